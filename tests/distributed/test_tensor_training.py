"""Training with cut layers, under each kind of engine: as one process, resumed, exported; replicas stay equal."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import (  # noqa: TID251
    build_llama,
    changed,
    engine_settings,
    make_samples,
    make_trainer,
    spawn,
    train,
)

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cells of a whole module

LORA = {"lora_r": 4}
TP2, TP4 = {"tp_size": 2}, {"tp_size": 4}
SHARDED = TP2 | {"tp_sequence": True}
Cell = tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
CELLS: dict[str, Cell] = {
    # name: (engine, its options, sizes, settings); of 4 ranks, what tp leaves is data-parallel
    "ddp": ("ddp", {}, TP2, {}),
    "ddp, tp4": ("ddp", {}, TP4, {}),
    "ddp, tokens sharded": ("ddp", {}, SHARDED, {}),
    "ddp, LoRA": ("ddp", {}, TP2, LORA),
    "fsdp2": ("fsdp2", {}, TP2, {}),
    "fsdp2, one file, LoRA": ("fsdp2", {"state_dict_type": "FULL_STATE_DICT"}, TP2, LORA),
    "zero1": ("zero1", {}, TP2, {}),
    "zero3": ("zero3", {}, SHARDED, {}),
    "zero3, LoRA": ("zero3", {}, TP2, LORA),
}
STEPS, SAVED = 6, 3
LONG = 20
REPLICAS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": (TP2, {}),
    "full, copies": (TP4, {}),
    "full, tokens sharded": (SHARDED, {}),
    "LoRA": (TP2, LORA | {"lora_dropout": 0.25, "modules_to_save": ["norm"]}),
}
EXPORTS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    # name: (engine, whether tied, settings)
    "ddp": ("ddp", True, {}),
    "fsdp2, untied": ("fsdp2", False, {}),
    "zero3": ("zero3", True, {}),
    "ddp, LoRA": ("ddp", True, LORA),
    "fsdp2, LoRA, trained head": ("fsdp2", False, LORA | {"modules_to_save": ["lm_head"]}),
    "ddp, LoRA, trained embedding and head": (
        "ddp",
        True,
        LORA | {"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "zero3, LoRA on the head": ("zero3", False, LORA | {"lora_target_modules": "q_proj,down_proj,lm_head"}),
}
WORDS = 301
"""No multiple of 2."""


def make_config(folder: Path, output_dir: Path, **values: Any) -> SFTConfig:
    """Clipped, decayed, with a schedule."""
    settings: dict[str, Any] = {
        "model_name_or_path": str(folder / "model"),
        "output_dir": str(output_dir),
        "max_length": 30,
        "max_steps": STEPS,
        "save_steps": SAVED,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "weight_decay": 0.5,
        "max_grad_norm": 0.5,
    }
    return SFTConfig(**settings | values)


def samples() -> list[Any]:
    return make_samples(12)


def per_rank(layout: Any) -> dict[str, int]:
    """Four samples a step, in micro-batches of one where a rank has several."""
    return {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4 // layout.dp_size}


# What runs in the processes


def train_alone(worker: Any, folder: Path) -> dict[str, Any]:
    """What one process makes of it, and what of a run folder it may not change."""
    from hfpar.errors import ConfigError
    from hfpar.parallel.layout import Layout
    from hfpar.train.checkpoint import RunFolder

    layout = Layout(0, 1)
    results: dict[str, Any] = {}
    for name, values in (("full", {}), ("LoRA", LORA)):
        config = make_config(folder, folder / f"one process, {name}", **values, **per_rank(layout))
        results[name] = train(config, engine_settings("ddp"), samples(), layout)["weights"]
    config = make_config(folder, folder / "claimed", tp_size=2, cp_size=1)
    run = RunFolder(config, layout)
    run.claim()
    run.release()
    for key, value in (("tp_size", 1), ("tp_size", 4), ("cp_size", 2)):
        try:
            RunFolder(changed(config, resume=True, **{key: value}), layout).release()
            results[f"{key} {value}"] = ""
        except ConfigError as error:
            results[f"{key} {value}"] = str(error)
    return results


def train_by_four(worker: Any, folder: Path) -> dict[str, Any]:
    from dataclasses import replace

    from hfpar.parallel.layout import Layout

    layouts: dict[tuple[Any, ...], Any] = {}
    for sizes in (TP2, TP4):
        layouts[tuple(sizes.items())] = Layout(worker.rank, worker.world_size, tp_size=sizes["tp_size"])
    plain = layouts[tuple(TP2.items())]
    sharded = layouts[tuple(SHARDED.items())] = replace(plain, tp_sequence=True)
    for name in ("mesh", "batch_mesh", "batch_group", "tp_group", "_copies_groups"):
        sharded.__dict__[name] = getattr(plain, name)
    export(worker, folder, plain)
    return {"resumed": resume(worker, folder, layouts), "replicas": replicas(worker, folder, layouts)}


def resume(worker: Any, folder: Path, layouts: dict[Any, Any]) -> dict[str, Any]:
    """Runs that stop in the middle, beside those that don't."""
    import torch.distributed as dist

    results = {}
    for name, (engine, options, sizes, values) in CELLS.items():
        worker.send(name)
        layout, settings = layouts[tuple(sizes.items())], engine_settings(engine, **options)
        config = make_config(folder, folder / name, **values, **sizes, **per_rank(layout))
        whole = train(config, settings, samples(), layout)
        again = folder / f"{name}, again"
        if worker.rank == 0:
            again.mkdir()
            shutil.copytree(folder / name / f"checkpoint-{SAVED}", again / f"checkpoint-{SAVED}")
        dist.barrier()
        resumed = train(changed(config, output_dir=str(again), resume=True), settings, samples(), layout)
        weights = whole.pop("weights")
        other = resumed.pop("weights")
        results[name] = {
            "differing": [key for key, value in weights.items() if not value.equal(other[key])],
            "same place": whole == resumed,
            "weights": weights if worker.rank == 0 else None,
        }
    return results


def replicas(worker: Any, folder: Path, layouts: dict[Any, Any]) -> dict[str, Any]:
    """What each rank holds after many steps, and what it drew from."""
    import torch

    from hfpar.models.cuts import cuts_of

    results: dict[str, Any] = {}
    for name, (sizes, values) in REPLICAS.items():
        worker.send(name)
        layout = layouts[tuple(sizes.items())]
        config = make_config(
            folder,
            folder / f"replicas, {name}",
            **values,
            **sizes,
            **per_rank(layout) | {"max_steps": LONG, "save_steps": None, "max_grad_norm": 1.0},
        )
        seeds: list[int] = []
        with make_trainer(config, engine_settings("ddp"), samples(), layout) as trainer:
            module = trainer.engine.module
            before = {key: value.clone() for key, value in module.named_parameters()}
            module.register_forward_pre_hook(lambda *_, seeds=seeds: seeds.append(torch.initial_seed()))
            trainer.train(None)
            parameters, state = dict(module.named_parameters()), trainer.engine.optimizer.state
            kept = [value for entry in state.values() for value in entry.values() if value.dim()]
            cuts = cuts_of(module)
            results[name] = {
                "hashes": {
                    key: hashlib.sha256(value.detach().numpy().tobytes()).hexdigest()
                    for key, value in parameters.items()
                },
                "moved": {key for key, value in parameters.items() if not value.equal(before[key])},
                "trained": {key for key, value in parameters.items() if value.requires_grad},
                "copies": {key: cut.copies for key, cut in cuts.items()},
                "place": (layout.dp_rank, layout.tp_rank),
                "seeds": seeds,
                "optimizer": sum(value.numel() for value in kept),
                "numel": sum(value.numel() for value in parameters.values() if value.requires_grad),
            }
    return results


def export(worker: Any, folder: Path, layout: Any) -> None:
    """The logits of trained models, and their folders."""
    import torch
    from transformers import AutoTokenizer

    from hfpar.data.stream import build_stream
    from hfpar.parallel.layout import Layout
    from hfpar.parallel.sequence import shard_stream
    from hfpar.train.export import export_model
    from hfpar.train.step import model_inputs

    stream = build_stream([samples()[1]])
    inputs = model_inputs(shard_stream(stream, Layout(rank=0, world_size=1)), torch.device("cpu"))
    del inputs["labels"]

    def logits_of(engine: Any) -> torch.Tensor:
        engine.module.eval()
        with engine.inference():
            result: torch.Tensor = engine.forward(**inputs).logits.clone()
        engine.module.train()
        return result

    for name, (engine, tied, values) in EXPORTS.items():
        worker.send(name)
        base = folder / ("tied" if tied else "untied")
        config = make_config(
            folder,
            folder / f"export, {name}",
            **{"model_name_or_path": str(base), "max_steps": 3, "save_steps": None},
            **{"learning_rate": 3e-2, "warmup_steps": 0, "lora_alpha": 32.0},
            **values,
            **TP2,
            **per_rank(layout),
        )
        with make_trainer(config, engine_settings(engine), samples(), layout) as trainer:
            before = logits_of(trainer.engine)
            trainer.train(None)
            logits = logits_of(trainer.engine)
            output_dir = Path(str(config.output_dir))
            export_model(trainer.engine, AutoTokenizer.from_pretrained(base), output_dir, layout)
        if worker.rank == 0:
            found = {"input_ids": inputs["input_ids"], "logits": logits, "before": before}
            torch.save(found, output_dir / "logits.pt")


def build_tied_and_untied(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from hfpar.models.tiny import build_tiny_model

    for tied in (True, False):
        target = folder / ("tied" if tied else "untied")
        build_tiny_model(
            target,
            hidden_size=32,
            intermediate_size=60,
            num_hidden_layers=2,
            vocab_size=WORDS,
            initializer_range=0.1,
        )
        config = AutoConfig.from_pretrained(target)
        assert config.vocab_size == WORDS
        config.tie_word_embeddings = tied
        torch.manual_seed(1)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(target)


# What it must be


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], list[Any]]:
    folder = tmp_path_factory.mktemp("tensor_training")
    build_llama(folder / "model", mlp_bias=True)
    build_tied_and_untied(folder)
    (alone,) = spawn(train_alone, 1, folder, folder)
    return folder, alone, spawn(train_by_four, 4, folder, folder)


def rows(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "epoch", "loss", "grad_norm", "learning_rate", "num_tokens", "num_label_tokens")
    return [{key: line[key] for key in keys} for line in lines if "loss" in line]


Runs = tuple[Path, dict[str, Any], list[Any]]


@pytest.mark.parametrize("name", CELLS)
def test_losses_and_clipped_norms_are_those_of_one_process(runs: Runs, name: str) -> None:
    folder, _, _ = runs
    adapter = "LoRA" if "LoRA" in name else "full"
    found, expected = rows(folder / name), rows(folder / f"one process, {adapter}")
    assert len(found) == STEPS and min(row["grad_norm"] for row in found) > 0.5  # every step is clipped
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-4)


@pytest.mark.parametrize("name", CELLS)
def test_decayed_and_other_weights_are_those_of_one_process(runs: Runs, name: str) -> None:
    from transformers import AutoModelForCausalLM

    from hfpar.verify.compare import compare_parameters, worst_of

    folder, alone, results = runs
    expected = alone["LoRA" if "LoRA" in name else "full"]
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    plain = dict(model.named_parameters())
    before = {
        key: plain.get(key.removeprefix("base_model.model.").replace("base_layer.", ""), 0.9 * value).detach()
        for key, value in expected.items()
    }
    found = results[0]["resumed"][name]["weights"]
    assert found.keys() == expected.keys()
    worst, error = worst_of(compare_parameters(found.items(), expected, before))
    assert error < 1e-3, worst


@pytest.mark.parametrize("name", CELLS)
def test_a_resumed_run_equals_an_uninterrupted_one(runs: Runs, name: str) -> None:
    folder, _, results = runs
    resumed = rows(folder / f"{name}, again")
    assert [row["step"] for row in resumed] == list(range(SAVED + 1, STEPS + 1))
    assert resumed == rows(folder / name)[SAVED:]
    for result in results:
        assert result["resumed"][name]["differing"] == []
        assert result["resumed"][name]["same place"]


def test_a_run_keeps_its_tp_size(runs: Runs) -> None:
    folder, alone, _ = runs
    for size in (1, 4):
        assert alone[f"tp_size {size}"] == (
            f"resume: {folder / 'claimed'} was started with tp_size: 2 there, {size} here; resume with the settings "
            "it has"
        )
    assert alone["cp_size 2"] == ""


@pytest.mark.parametrize("name", REPLICAS)
def test_replicas_are_equal_bit_for_bit_after_many_steps(runs: Runs, name: str) -> None:
    _, _, results = runs
    found = [result["replicas"][name] for result in results]
    copies = found[0]["copies"]
    assert ("full" in name) == (found[0]["moved"] == found[0]["hashes"].keys())
    for key in found[0]["hashes"]:
        groups: dict[int, set[str]] = {}
        for rank in found:
            part = rank["place"][1] // copies[key] if key in copies else 0
            groups.setdefault(part, set()).add(rank["hashes"][key])
        assert all(len(hashes) == 1 for hashes in groups.values()), key
        if key in copies and len(groups) > 1 and "bias" not in key:
            assert len(set.union(*groups.values())) == len(groups), key
    for rank in found:
        assert rank["moved"] == rank["trained"]
        assert rank["optimizer"] == 2 * rank["numel"]  # AdamW's two moments of a rank's own part
    numbers = {max(copies.values()) for copies in [copies]}
    assert numbers == ({2} if name == "full, copies" else {1})


def test_tp_ranks_draw_the_same_and_dp_ranks_do_not(runs: Runs) -> None:
    _, _, results = runs
    found = {rank["place"]: rank["seeds"] for rank in (result["replicas"]["LoRA"] for result in results)}
    assert len(found[0, 0]) == 2 * LONG and len(set(found[0, 0])) == LONG
    assert found[0, 0] == found[0, 1] and found[1, 0] == found[1, 1]
    assert not set(found[0, 0]) & set(found[1, 0])


@pytest.mark.parametrize("name", EXPORTS)
def test_an_export_has_the_logits_that_were_trained(runs: Runs, name: str) -> None:
    import torch
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = runs[0] / f"export, {name}"
    is_peft = "LoRA" in name
    assert (folder / "adapter_config.json").is_file() == is_peft
    kind: Any = AutoPeftModelForCausalLM if is_peft else AutoModelForCausalLM
    model = kind.from_pretrained(folder).eval()
    saved = torch.load(folder / "logits.pt")
    with torch.no_grad():
        logits = model(input_ids=saved["input_ids"]).logits
    scale = saved["logits"].abs().max()
    assert (saved["before"] - saved["logits"]).abs().max() > 0.1 * scale  # the base model wouldn't do
    assert logits.shape[-1] == WORDS and (logits - saved["logits"]).abs().max() < 1e-5 * scale
    (file,) = folder.glob("*.safetensors")
    rows = {tensor.shape[0] for key, tensor in load_file(file).items() if "lm_head" in key or "embed" in key}
    assert rows - {4} <= {WORDS}  # an adapter's A has its rank
    if not is_peft:
        assert rows == {WORDS} and model.config.vocab_size == WORDS
