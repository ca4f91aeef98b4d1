"""Merged models compute what their adapter models do; what can't be merged is refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, Qwen3MoeConfig

from hfpar.errors import ConfigError
from hfpar.exporting.main import main
from hfpar.exporting.shards import ShardWriter
from hfpar.models.tiny import build_tiny_model

IDS = torch.arange(3, 51).view(2, 24)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, with a tokenizer."""
    folder = tmp_path_factory.mktemp("base") / "tiny"
    build_tiny_model(folder, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    return folder


def make_base(folder: Path, config: Any, tiny: Path, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, dtype: torch.dtype = torch.float32, **choices: Any) -> Path:
    """An adapter with noise in everything that it trains."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    options = {"target_modules": "all-linear", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8}
    adapted = get_peft_model(model, LoraConfig(**{**options, **choices}))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder, save_embedding_layers=False)
    return folder


@torch.no_grad()
def adapter_logits(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    logits: torch.Tensor = PeftModel.from_pretrained(model, adapter).eval()(IDS).logits
    return logits


@torch.no_grad()
def logits_of(folder: Path, **options: Any) -> torch.Tensor:
    logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, **options).eval()(IDS).logits
    return logits


def export(adapter: Path, output: Path, *flags: str) -> Path:
    assert main([str(adapter), "--merge", "--output", str(output), *flags]) == 0
    return output


def assert_equal(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


CHOICES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 3}},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "norms in full": {"modules_to_save": ["norm"]},
    "head in full": {"modules_to_save": ["lm_head"]},
    "embedding in full": {"modules_to_save": ["embed_tokens"]},
    "both in full": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "embedding in full, head with it": {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    "rows": {"trainable_token_indices": [3, 7, 11]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
}
TIED_STILL = {
    "lora",
    "rslora",
    "dora",
    "pissa",
    "olora",
    "norms in full",
    "rows",
    "embedding in full, head with it",
}


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings")
@pytest.mark.parametrize("choice", CHOICES)
def test_merged_tied_model_computes_what_its_adapter_does(choice: str, tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter", **CHOICES[choice])
    output = export(adapter, tmp_path / "merged")
    expected = adapter_logits(tiny, adapter)
    assert (expected - logits_of(tiny)).abs().max() > 0.1  # the adapter does something
    assert_equal(logits_of(output), expected)
    is_tied = json.loads((output / "config.json").read_text())["tie_word_embeddings"]
    assert is_tied == (choice in TIED_STILL)
    assert ("lm_head.weight" in load_file(output / "model.safetensors")) == (not is_tied)


@pytest.mark.parametrize(
    ("choices", "bias"),
    [
        ({"trainable_token_indices": {"embed_tokens": [3, 9], "lm_head": [4, 9]}}, False),
        ({"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}, False),
        ({"bias": "all"}, True),
        ({"lora_bias": True, "target_modules": ["q_proj", "v_proj"]}, True),
    ],
)
def test_untied_model(choices: dict[str, Any], bias: bool, tiny: Path, tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES, **NO_TOKENS, tie_word_embeddings=False, attention_bias=bias)
    base = make_base(tmp_path / "base", config, tiny)
    adapter = make_adapter(base, tmp_path / "adapter", **choices)
    assert_equal(logits_of(export(adapter, tmp_path / "merged")), adapter_logits(base, adapter))


def test_merged_weights_are_those_of_peft(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter", use_dora=True)
    model = AutoModelForCausalLM.from_pretrained(tiny)
    expected = PeftModel.from_pretrained(model, adapter).merge_and_unload(safe_merge=True).state_dict()
    for name, weight in load_file(export(adapter, tmp_path / "merged") / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-6, atol=1e-7)


def test_transposed_weights(tiny: Path, tmp_path: Path) -> None:
    """GPT-2 stores its linear layers the other way round, and other names than the model has."""
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, bos_token_id=None, eos_token_id=1)
    base = make_base(tmp_path / "base", config, tiny)
    weights = load_file(base / "model.safetensors")
    without_prefix = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    assert weights.keys() != without_prefix.keys()
    save_file(without_prefix, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
    output = export(adapter, tmp_path / "merged")
    assert_equal(logits_of(output), adapter_logits(base, adapter))
    assert load_file(output / "model.safetensors").keys() == without_prefix.keys()


def test_head_that_is_tied_where_the_config_does_not_say_so(tiny: Path, tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, bos_token_id=None, eos_token_id=1)
    base = make_base(tmp_path / "base", config, tiny)
    settings = json.loads((base / "config.json").read_text())
    del settings["tie_word_embeddings"]
    (base / "config.json").write_text(json.dumps(settings))
    choices = {"target_modules": ["c_attn"], "fan_in_fan_out": True, "modules_to_save": ["lm_head"]}
    adapter = make_adapter(base, tmp_path / "adapter", **choices)
    assert_equal(logits_of(export(adapter, tmp_path / "merged")), adapter_logits(base, adapter))


@pytest.fixture
def experts(tiny: Path, tmp_path: Path) -> Path:
    sizes = {**SIZES, "moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 8}
    config = Qwen3MoeConfig(**sizes, **NO_TOKENS, num_experts=12, num_experts_per_tok=2)
    base = make_base(tmp_path / "base", config, tiny)
    assert "model.layers.0.mlp.experts.11.up_proj.weight" in load_file(base / "model.safetensors")
    return base


def test_attention_of_a_model_whose_experts_are_stored_one_by_one(experts: Path, tmp_path: Path) -> None:
    adapter = make_adapter(experts, tmp_path / "adapter", target_modules=["q_proj", "o_proj"])
    output = export(adapter, tmp_path / "merged")
    assert_equal(logits_of(output), adapter_logits(experts, adapter))
    before, after = load_file(experts / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    changed = {name.split(".")[-2] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "o_proj"}


@pytest.mark.filterwarnings("ignore:.*target_parameters.*")
def test_experts_that_are_stored_one_by_one(experts: Path, tmp_path: Path) -> None:
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = make_adapter(
        experts, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=targets
    )
    output = export(adapter, tmp_path / "merged")
    assert_equal(logits_of(output), adapter_logits(experts, adapter))
    before, after = load_file(experts / "model.safetensors"), load_file(output / "model.safetensors")
    assert before.keys() == after.keys()
    assert not torch.equal(*(side["model.layers.1.mlp.experts.7.up_proj.weight"] for side in (before, after)))


# Types and files


def test_several_files(tiny: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(base, max_shard_size="60KB")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(base)
    assert len(list(base.glob("model-*.safetensors"))) > 2
    adapter = make_adapter(base, tmp_path / "adapter")
    output = export(adapter, tmp_path / "merged", "--max_shard_size", "20KB", "--base", str(base))
    files = sorted(output.glob("model-*.safetensors"))
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert {path.name for path in files} == set(index["weight_map"].values()) and len(files) > 3
    sizes = [sum(weight.nbytes for weight in load_file(path).values()) for path in files]
    assert sum(sizes) == index["metadata"]["total_size"]
    # Only a file with a single weight is larger.
    assert all(size <= 20_000 or len(load_file(path)) == 1 for size, path in zip(sizes, files, strict=True))
    assert_equal(logits_of(output), adapter_logits(base, adapter))


def test_a_change_is_rounded_once(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter")
    exact = load_file(export(adapter, tmp_path / "exact") / "model.safetensors")
    rounded = load_file(export(adapter, tmp_path / "rounded", "--dtype", "bfloat16") / "model.safetensors")
    assert all(torch.equal(rounded[name], exact[name].to(torch.bfloat16)) for name in exact)
    assert json.loads((tmp_path / "rounded" / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "rounded").dtype == torch.bfloat16


def test_every_dtype_in_the_config_is_the_new_one(tiny: Path, tmp_path: Path) -> None:
    """Also under the name that it had before, and in configs of parts."""
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    settings = json.loads((base / "config.json").read_text())
    del settings["dtype"]
    settings |= {"torch_dtype": "float32", "part_config": {"dtype": "float32"}}
    (base / "config.json").write_text(json.dumps(settings))
    output = export(make_adapter(base, tmp_path / "adapter"), tmp_path / "merged", "--dtype", "bfloat16")
    settings = json.loads((output / "config.json").read_text())
    assert (
        settings["torch_dtype"] == settings["part_config"]["dtype"] == "bfloat16" and "dtype" not in settings
    )
    assert AutoModelForCausalLM.from_pretrained(output).dtype == torch.bfloat16


def test_auto_keeps_the_dtype_of_the_base(tiny: Path, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", LlamaConfig(**SIZES, **NO_TOKENS), tiny, dtype=torch.bfloat16)
    adapter = make_adapter(base, tmp_path / "adapter")
    output = export(adapter, tmp_path / "merged")
    weights = load_file(output / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    expected = adapter_logits(base, adapter)
    assert (logits_of(output, dtype=torch.float32) - expected).abs().max() < 0.02 * expected.abs().max()
    finer = export(adapter, tmp_path / "finer", "--dtype", "float32")
    assert_equal(logits_of(finer), expected)


def test_float16_that_overflows_is_refused(tiny: Path, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    weights = load_file(base / "model.safetensors")
    weights["model.norm.weight"][0] = 1e6
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    adapter = make_adapter(base, tmp_path / "adapter")
    assert_refused(
        adapter,
        tmp_path / "merged",
        "float16 can't hold the values of model.norm.weight",
        "--dtype",
        "float16",
    )


def test_folder_is_complete(tiny: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tiny, tmp_path / "adapter")
    output = export(adapter, tmp_path / "merged")
    names = {path.name for path in output.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"} <= names
    assert (
        AutoTokenizer.from_pretrained(output).chat_template
        == AutoTokenizer.from_pretrained(tiny).chat_template
    )
    assert (output / "model.safetensors").stat().st_mode == (output / "config.json").stat().st_mode
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


# Refusals


def assert_refused(adapter: Path, output: Path, message: str, *flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        export(adapter, output, *flags)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not output.with_name(f".{output.name}.partial").exists()


@pytest.fixture(scope="module")
def adapter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tiny, tmp_path_factory.mktemp("adapter") / "adapter")


def spoil(adapter: Path, folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    shutil.copytree(adapter, folder)
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.update({"base_model.model.model.layers.9.x.weight": torch.ones(2)}),
            "belongs to no module",
        ),
        (lambda weights: weights.pop(A), "doesn't hold"),
        (lambda weights: weights.update({A: torch.ones(4, 7)}), "size mismatch"),
        (lambda weights: weights[A].fill_(torch.nan), "can't be merged: NaNs detected"),
    ],
)
def test_broken_adapters(
    change: Callable[[dict[str, torch.Tensor]], Any], message: str, adapter: Path, tmp_path: Path
) -> None:
    assert_refused(spoil(adapter, tmp_path / "spoilt", change), tmp_path / "merged", message)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "an adapter of type IA3; only LoRA"),
        ({"init_lora_weights": "corda"}, "changed the base in a way that can't be found again"),
        ({"target_modules": ["nothing_here"]}, "doesn't fit the base"),
        ({"base_model_name_or_path": None}, "names no base; name it with --base"),
        ({"base_model_name_or_path": "some/model", "revision": "v2"}, "revision v2 of some/model"),
    ],
)
def test_adapter_settings(settings: dict[str, Any], message: str, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(adapter, tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    assert_refused(tmp_path / "adapter", tmp_path / "merged", message)


def test_a_checkpoint_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "run" / "run_config.yaml").write_text("lora_r: 4\nmodel_name_or_path: x\ndataset: y\n")
    assert_refused(tmp_path / "run" / "checkpoint-3", tmp_path / "merged", "a checkpoint; name its run")
    assert_refused(tmp_path / "run", tmp_path / "merged", "without an export or a whole checkpoint")


def test_another_base(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", LlamaConfig(**SIZES, **NO_TOKENS), tiny)
    assert_refused(adapter, tmp_path / "merged", "doesn't fit the base", "--base", str(base))
    weights = load_file(tiny / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    shutil.copytree(tiny, tmp_path / "other")
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    assert_refused(
        adapter, tmp_path / "merged", "base: model.norm.weight is (7,)", "--base", str(tmp_path / "other")
    )


def test_a_weight_that_the_base_stores_in_another_form(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "base")
    weights = load_file(tiny / "model.safetensors")
    weights["fused"] = weights.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(weights, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})
    message = "doesn't store model.layers.1.self_attn.q_proj.weight in a form"
    assert_refused(adapter, tmp_path / "merged", message, "--base", str(tmp_path / "base"))


def test_missing_bases(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(adapter, tmp_path / "merged", "base: /nowhere is neither a folder", "--base", "/nowhere")
    (tmp_path / "no_weights").mkdir()
    shutil.copy(
        Path(json.loads((adapter / "adapter_config.json").read_text())["base_model_name_or_path"])
        / "config.json",
        tmp_path / "no_weights",
    )
    assert_refused(
        adapter, tmp_path / "merged", "no safetensors files", "--base", str(tmp_path / "no_weights")
    )
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert_refused(adapter, tmp_path / "merged", "the hub didn't give it", "--base", "nobody/nothing")


def test_what_is_no_adapter(tiny: Path, tmp_path: Path) -> None:
    assert_refused(tiny, tmp_path / "merged", "holds a whole model and no adapter")
    assert_refused(tmp_path, tmp_path / "merged", "holds no adapter")
    assert_refused(tmp_path / "nothing", tmp_path / "merged", "no such folder")


def test_outputs(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    assert_refused(adapter, adapter, "which is read", "--overwrite")
    assert_refused(adapter, tiny, "which is read", "--overwrite")
    assert_refused(adapter, tiny.parent, "which is read", "--overwrite")
    full = tmp_path / "full"
    full.mkdir()
    (full / "letter.txt").write_text("dear")
    assert_refused(adapter, full, "isn't an export", "--overwrite")
    (tmp_path / "file").write_text("x")
    assert_refused(adapter, tmp_path / "file", "is no folder")
    output = export(adapter, tmp_path / "merged")
    (output / "old.txt").write_text("x")
    assert_refused(adapter, output, "replace it with --overwrite")
    assert (output / "old.txt").exists()
    export(adapter, output, "--overwrite")
    assert not (output / "old.txt").exists()
    assert (full / "letter.txt").read_text() == "dear"


def test_a_failed_overwrite_leaves_the_old_export(adapter: Path, tmp_path: Path) -> None:
    output = export(adapter, tmp_path / "merged")
    (output / "old.txt").write_text("x")
    broken = spoil(adapter, tmp_path / "spoilt", lambda weights: weights[A].fill_(torch.nan))
    assert_refused(broken, output, "NaNs", "--overwrite")
    assert (output / "old.txt").exists()


def test_a_full_disk(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    assert_refused(adapter, tmp_path / "merged", "make room")

    def fill(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.undo()
    monkeypatch.setattr("hfpar.exporting.shards.save_file", fill)
    assert_refused(adapter, tmp_path / "merged", "can't be written (No space left on device)")


def test_an_export_that_transformers_would_not_read_is_refused(
    adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = ShardWriter.add
    monkeypatch.setattr(
        ShardWriter, "add", lambda self, name, weight: add(self, name.replace("norm", "nrom"), weight)
    )
    assert_refused(adapter, tmp_path / "merged", "can't be stored under a name that Transformers reads")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--merge"], "required: --output"),
        (["--output", "x"], "one of the arguments --merge --adapter is required"),
        (["--merge", "--output", "x", "--rank", "3"], "unrecognized arguments: --rank"),
        (["--merge", "--output", "x", "--dtype", "int4"], "invalid choice"),
        (["--merge", "--output", "x", "--max_shard_size", "big"], "allowed: a size such as"),
        (["--adapter", "--output", "x", "--dtype", "float16"], "exported as it is"),
    ],
)
def test_flags(flags: list[str], message: str, adapter: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        main([str(adapter), *flags])


def test_adapter_alone(adapter: Path, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "moved")
    assert (
        main(
            [str(adapter), "--adapter", "--output", str(tmp_path / "out"), "--base", str(tmp_path / "moved")]
        )
        == 0
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
    } <= names
    saved = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(tmp_path / "moved")
    assert torch.equal(adapter_logits(tiny, tmp_path / "out"), adapter_logits(tiny, adapter))
