"""Every rank gets the right weights, no more of them than it keeps, in the dtype that was asked for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    build_llama,
    engine_settings,
    make_layout,
    spawn,
)

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cells of a whole module

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMAS: dict[str, dict[str, Any]] = {
    "odd sizes": {"intermediate_size": 61, "tie_word_embeddings": False, "mlp_bias": True},
    "fewer rows than ranks": {
        "hidden_size": 8,
        "head_dim": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 3,
        "vocab_size": 9,
    },
    "llama3 rope": {"rope_parameters": LLAMA3_ROPE},
    "yarn": {"rope_parameters": YARN},
    "several files": {},
}
REARRANGED = "sarvam_moe"
"""Its checkpoints hold q, k and v in one matrix, which Transformers can't take apart under ZeRO-3."""
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3")
"""Transformers keeps their experts in other tensors than their checkpoints."""
BIG = {
    "vocab_size": 24000,
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
LORA = {"r": 4, "alpha": 8, "dropout": 0.0, "target_modules": "all-linear", "seed": 3}


def build_mixture(folder: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hfpar.verify.reference import build_checkpoint
    from tests.families import FAMILIES  # noqa: TID251

    if name == REARRANGED:
        build_checkpoint(FAMILIES[name].config(), folder)
        return
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
    }
    if name == "deepseek_v3":
        heads = {"kv_lora_rank": 8, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6}
        sizes |= heads | {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
        sizes |= {"first_k_dense_replace": 1, "num_key_value_heads": 4}
        del sizes["head_dim"]
    else:
        sizes["num_local_experts" if name == "mixtral" else "num_experts"] = 4
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **sizes), dtype=torch.float32)
    for key, buffer in model.named_buffers():
        if key in model.state_dict():
            buffer.normal_()
    model.save_pretrained(folder)


def load_all(worker: Any, folder: Path, engines: tuple[str, ...], with_lora: bool) -> dict[str, Any]:
    worker.send("memory")
    results: dict[str, Any] = {"memory": load_big(worker, folder / "big")}
    results["different"] = {}
    for name in (*LLAMAS, *MIXTURES, REARRANGED):
        for engine in engines if name != REARRANGED else ("fsdp2",):
            worker.send((name, engine))
            results["different"][name, engine] = list(differences(worker, folder / name, engine))
    if with_lora:
        results["lora"] = {engine: bf16_base(worker, folder / "odd sizes", engine) for engine in ENGINES}
    return results


def build(worker: Any, folder: Path, engine: str, dtype: Any, *, lora: bool = False) -> Any:
    import torch

    from hfpar.engine.build import build_engine
    from hfpar.models.adapters import add_lora
    from hfpar.models.load import load_model, load_model_config

    settings = engine_settings(engine)
    config = load_model_config(folder)
    model = load_model(folder, config, settings=settings, dtype=dtype, attn_implementation="sdpa")
    if lora:
        model = add_lora(model, modules_to_save=None, **LORA)
    return build_engine(
        settings,
        model,
        lambda parameters: torch.optim.AdamW([parameter for _, parameter in parameters]),
        make_layout(worker),
        torch.device("cpu"),
        checkpoint_folder=folder,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
    )


def differences(worker: Any, folder: Path, name: str) -> Iterator[str]:
    """What isn't as Transformers loads it."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    engine = build(worker, folder, name, torch.float32)
    loaded = dict(engine.parameters())
    expected = dict(plain.named_parameters())
    yield from sorted(set(loaded) ^ set(expected))
    for key, value in loaded.items():
        if not (value.dtype == expected[key].dtype and value.equal(expected[key].detach())):
            yield key
    buffers = dict(engine.module.named_buffers())
    for key, value in plain.named_buffers():
        if not value.equal(buffers[key]):
            yield key
    if plain.generation_config.to_dict() != engine.module.generation_config.to_dict():
        yield "generation_config"
    engine.close()


def load_big(worker: Any, folder: Path) -> tuple[int, int, int]:
    """(bytes of all weights, bytes of this rank's, most memory that loading took)."""
    import gc

    import torch

    build(worker, folder.parent / "yarn", "fsdp2", torch.float32)  # what the first engine costs isn't weights
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    engine = build(worker, folder, "fsdp2", torch.float32)
    peak = resident("VmHWM") - before
    parameters = list(engine.module.parameters())
    return sum(p.numel() * 4 for p in parameters), sum(p.to_local().numel() * 4 for p in parameters), peak


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise AssertionError(key)


def bf16_base(worker: Any, folder: Path, name: str) -> dict[str, Any]:
    """Sizes of what is frozen, and every adapter's first value."""
    import torch

    worker.send((name, "lora"))
    engine = build(worker, folder, name, torch.bfloat16, lora=True)
    frozen = [p for p in engine.module.parameters() if not p.requires_grad]
    bytes_each = {getattr(p, "ds_tensor", p).element_size() for p in frozen}
    adapters = {key: value.clone() for key, value in engine.parameters(trainable_only=True)}
    engine.close()
    return {"bytes": bytes_each, "adapters": adapters}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Any]]:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("loading")
    for name, values in LLAMAS.items():
        build_llama(folder / name, **values)
    model = AutoModelForCausalLM.from_pretrained(folder / "several files")
    (folder / "several files" / "model.safetensors").unlink()
    model.save_pretrained(folder / "several files", max_shard_size="10KB")
    for name in (*MIXTURES, REARRANGED):
        build_mixture(folder / name, name)
    build_llama(folder / "big", **BIG)
    results = {
        2: spawn(load_all, 2, folder, folder, ("fsdp2", "zero3"), True),
        4: spawn(load_all, 4, folder, folder, ("fsdp2",), False),
    }
    for path in folder.rglob("*.safetensors"):
        path.unlink()
    log = next(path for path in folder.rglob("rank0.log") if (path.parent / "rank3.log").is_file())
    results[0] = [log.read_text(), (log.parent / "rank1.log").read_text()]
    return results


@pytest.mark.parametrize("name", [*LLAMAS, *MIXTURES])
@pytest.mark.parametrize(("ranks", "engine"), [(2, "fsdp2"), (2, "zero3"), (4, "fsdp2")])
def test_weights_and_buffers_are_those_of_transformers(
    loaded: dict[int, list[Any]], ranks: int, engine: str, name: str
) -> None:
    for result in loaded[ranks]:
        assert result["different"][name, engine] == []


@pytest.mark.parametrize("ranks", [2, 4])
def test_weights_that_must_be_taken_apart(loaded: dict[int, list[Any]], ranks: int) -> None:
    for result in loaded[ranks]:
        assert result["different"][REARRANGED, "fsdp2"] == []


def test_rank_0_says_what_is_read_whole(loaded: dict[int, list[Any]]) -> None:
    """Experts that a checkpoint holds one by one are read by slices; what must be taken apart isn't."""
    rank_0, rank_1 = loaded[0]
    (said,) = [line for line in rank_0.splitlines() if "every process reads the whole model" in line]
    assert REARRANGED in said
    assert "whole model" not in rank_1


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_needs_memory_for_its_own_share_only(loaded: dict[int, list[Any]], ranks: int) -> None:
    for result in loaded[ranks]:
        whole, own, peak = result["memory"]
        print(
            f"{ranks} ranks: {whole / 1e6:.0f} MB of weights, {own / 1e6:.0f} MB kept, peak {peak / 1e6:.0f} MB"
        )
        assert whole > 190e6
        assert own < whole / ranks * 1.01
        assert own < peak < own * 1.1 + 30e6  # the largest weight's share is there twice for a moment


def test_a_frozen_base_keeps_its_dtype(loaded: dict[int, list[Any]]) -> None:
    for result in loaded[2]:
        assert {engine: lora["bytes"] for engine, lora in result["lora"].items()} == dict.fromkeys(
            ENGINES, {2}
        )


def test_adapters_start_the_same_everywhere(loaded: dict[int, list[Any]]) -> None:
    first = loaded[2][0]["lora"]["ddp"]["adapters"]
    assert any(value.abs().max() > 0 for value in first.values())
    for result in loaded[2]:
        for lora in result["lora"].values():
            assert lora["adapters"].keys() == first.keys()
            assert all(value.equal(first[key]) for key, value in lora["adapters"].items())


def test_a_weight_that_the_checkpoint_lacks_is_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    from hfpar.errors import ConfigError
    from hfpar.models.load import load_model, load_model_config

    folder = build_llama(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"doesn't hold model.layers.1.mlp.up_proj.weight;"):
        load_model(
            folder,
            load_model_config(folder),
            settings=engine_settings("ddp"),
            dtype=torch.float32,
            attn_implementation="sdpa",
        )
