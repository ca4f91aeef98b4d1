"""What QLoRA trained, merged: against plain bitsandbytes and PEFT."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GptOssConfig, Qwen3MoeConfig

from hfpar.config.load import dump_config
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.exporting.main import main
from hfpar.models.tiny import build_tiny_model

bnb = pytest.importorskip("bitsandbytes.functional")

IDS = torch.arange(3, 51).view(2, 24)
RUN = SFTConfig(dataset="data.jsonl", lora_r=4, output_dir="runs/q", tp_size=1, per_device_train_batch_size=8)
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
O_PROJ = "model.layers.1.self_attn.o_proj.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "tiny"
    build_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    return folder


def make_run(base: Path, folder: Path, config: SFTConfig, **choices: Any) -> Path:
    """A run's folder, with noise in everything that its adapter trains."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(base)
    options: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "r": 4, "lora_alpha": 8}
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**options, **choices}))
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.1
    adapted.save_pretrained(folder, save_embedding_layers=False)
    text = dump_config(replace(config, model_name_or_path=str(base)))
    (folder / "run_config.yaml").write_text(text)
    return folder


def export(run: Path, output: Path, *flags: str) -> dict[str, torch.Tensor]:
    assert main([str(run), "--merge", "--output", str(output), *flags]) == 0
    return load_file(output / "model.safetensors")


def four_bits(method: str, *, double: bool, dtype: torch.dtype = torch.float32) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=method,
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None, **options: Any) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def round_trip(weight: torch.Tensor, **options: Any) -> torch.Tensor:
    packed, state = bnb.quantize_4bit(weight.contiguous(), blocksize=64, **options)
    values: torch.Tensor = bnb.dequantize_4bit(packed, state)
    return values


def delta(run: Path, name: str, rank: int = 4, scaling: float = 2.0) -> torch.Tensor:
    weights = load_file(run / "adapter_model.safetensors")
    prefix = f"base_model.model.{name.removesuffix('.weight')}"
    a, b = weights[f"{prefix}.lora_A.weight"], weights[f"{prefix}.lora_B.weight"]
    return scaling * b[:, :rank] @ a[:rank]


@pytest.mark.parametrize(("method", "double"), [("nf4", True), ("nf4", False), ("fp4", True)])
def test_into_trained_is_the_model_of_bitsandbytes_and_peft(
    method: str, double: bool, base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = replace(RUN, quantization=method, bnb_4bit_use_double_quant=None if double else False)  # type: ignore[arg-type]
    run = make_run(base, tmp_path / "run", config)
    export(run, tmp_path / "merged")
    assert f"the {method} weights that were trained on" in capsys.readouterr().out
    options = {"quantization_config": four_bits(method, double=double), "dtype": torch.float32}
    expected = logits_of(base, run, **options)
    assert error(logits_of(base, run), expected) > 1e-2  # quantizing matters
    assert error(logits_of(tmp_path / "merged"), expected) < 1e-5


def test_with_dora_and_rows(base: Path, tmp_path: Path) -> None:
    config = replace(RUN, quantization="nf4", use_dora=True)
    run = make_run(base, tmp_path / "run", config, use_dora=True, trainable_token_indices=[5, 9])
    export(run, tmp_path / "merged")
    options = {"quantization_config": four_bits("nf4", double=True), "dtype": torch.float32}
    assert error(logits_of(tmp_path / "merged"), logits_of(base, run, **options)) < 1e-5


def test_into_original(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(base, tmp_path / "run", replace(RUN, quantization="nf4"))
    export(run, tmp_path / "merged", "--into", "original")
    assert "isn't quite the function that was trained" in capsys.readouterr().out
    assert error(logits_of(tmp_path / "merged"), logits_of(base, run)) < 1e-5


def test_every_quantized_layer_is_replaced_and_no_other(base: Path, tmp_path: Path) -> None:
    config = replace(RUN, quantization="nf4", llm_int8_skip_modules=["v_proj"])
    merged = export(make_run(base, tmp_path / "run", config), tmp_path / "merged")
    stored = load_file(base / "model.safetensors")
    unchanged = {name.split(".")[-2] for name in stored if torch.equal(stored[name], merged[name])}
    norms = {"input_layernorm", "post_attention_layernorm", "norm", "q_norm", "k_norm"}
    assert unchanged == {"embed_tokens", "v_proj"} | norms
    assert torch.equal(merged[O_PROJ], round_trip(stored[O_PROJ], quant_type="nf4", compress_statistics=True))


def test_int8(base: Path, tmp_path: Path) -> None:
    run = make_run(base, tmp_path / "run", replace(RUN, quantization="int8"))
    merged, stored = export(run, tmp_path / "merged"), load_file(base / "model.safetensors")
    for name in (O_PROJ, Q_PROJ):
        packed, scales, _ = bnb.int8_vectorwise_quant(stored[name].half())
        expected = packed.float() * scales.unsqueeze(1) / 127
        if name == Q_PROJ:
            expected = expected + delta(run, name)
        torch.testing.assert_close(merged[name], expected, rtol=1e-5, atol=1e-6)


def test_the_runs_dtype_comes_before_quantizing(base: Path, tmp_path: Path) -> None:
    run = make_run(base, tmp_path / "run", replace(RUN, quantization="nf4", dtype="bfloat16"))
    merged, stored = export(run, tmp_path / "merged"), load_file(base / "model.safetensors")
    expected = round_trip(stored[O_PROJ].bfloat16(), quant_type="nf4", compress_statistics=True)
    assert torch.equal(merged[O_PROJ], expected.float())
    assert torch.equal(merged["model.norm.weight"], stored["model.norm.weight"].bfloat16().float())


def test_a_run_in_bfloat16_without_quantization(base: Path, tmp_path: Path) -> None:
    run = make_run(base, tmp_path / "run", replace(RUN, dtype="bfloat16"))
    stored = load_file(base / "model.safetensors")
    trained = export(run, tmp_path / "trained")
    assert torch.equal(trained[Q_PROJ], stored[Q_PROJ].bfloat16().float() + delta(run, Q_PROJ))
    original = export(run, tmp_path / "original", "--into", "original")
    assert torch.equal(original[Q_PROJ], stored[Q_PROJ] + delta(run, Q_PROJ))


def test_parts_that_tensor_parallelism_quantized_by_themselves(base: Path, tmp_path: Path) -> None:
    """32 of o_proj's 64 columns aren't a block; q_proj's rows are, and so is the whole that its statistics need."""
    run = make_run(
        base, tmp_path / "run", replace(RUN, quantization="nf4", tp_size=2), target_modules=["k_proj"]
    )
    merged, stored = export(run, tmp_path / "merged"), load_file(base / "model.safetensors")
    options = {"quant_type": "nf4", "compress_statistics": True}
    parts = [round_trip(part, **options) for part in stored[O_PROJ].chunk(2, dim=1)]
    assert torch.equal(merged[O_PROJ], torch.cat(parts, dim=1))
    assert not torch.equal(merged[O_PROJ], round_trip(stored[O_PROJ], **options))
    assert torch.equal(merged[Q_PROJ], round_trip(stored[Q_PROJ], **options))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_that_began_with_a_part_of_the_base(dtype: str, base: Path, tmp_path: Path) -> None:
    """PiSSA quantized what it left of the weight, and saves that beginning, negated, behind what was trained."""
    config = replace(RUN, quantization="nf4", init_lora_weights="pissa", dtype=dtype)  # type: ignore[arg-type]
    run = make_run(base, tmp_path / "run", config, r=8, lora_alpha=16)
    merged, stored = export(run, tmp_path / "merged"), load_file(base / "model.safetensors")
    beginning = delta(run, Q_PROJ) - delta(run, Q_PROJ, rank=8)
    held = getattr(torch, dtype)
    left = (stored[Q_PROJ].to(held).float() - beginning).to(held)
    rest = round_trip(left, quant_type="nf4", compress_statistics=True).float()
    torch.testing.assert_close(merged[Q_PROJ], rest + delta(run, Q_PROJ), rtol=1e-4, atol=1e-4)
    assert (merged[Q_PROJ] - stored[Q_PROJ] - delta(run, Q_PROJ, rank=8)).abs().max() > 1e-2


# A base that bitsandbytes has stored


@pytest.mark.parametrize("double", [True, False])
def test_stored_in_four_bits(double: bool, base: Path, tmp_path: Path) -> None:
    quantization = four_bits("nf4", double=double, dtype=torch.bfloat16)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stored")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "stored")
    adapter = make_run(base, tmp_path / "adapter", RUN)
    merged = export(adapter, tmp_path / "merged", "--base", str(tmp_path / "stored"))
    expected = round_trip(
        load_file(base / "model.safetensors")[O_PROJ], quant_type="nf4", compress_statistics=double
    )
    assert torch.equal(merged[O_PROJ], expected)
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in settings and settings["dtype"] == "float32"
    exact = {"quantization_config": four_bits("nf4", double=double), "dtype": torch.float32}
    assert error(logits_of(tmp_path / "merged"), logits_of(base, adapter, **exact)) < 1e-5
    with pytest.raises(ConfigError, match="--into: original, but .* holds quantized weights only"):
        export(adapter, tmp_path / "other", "--base", str(tmp_path / "stored"), "--into", "original")


def test_stored_in_eight_bits(base: Path, tmp_path: Path) -> None:
    quantization = BitsAndBytesConfig(load_in_8bit=True)
    model = AutoModelForCausalLM.from_pretrained(base, quantization_config=quantization, dtype=torch.float32)
    model.save_pretrained(tmp_path / "stored")
    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path / "stored")
    adapter = make_run(base, tmp_path / "adapter", RUN)
    merged = export(adapter, tmp_path / "merged", "--base", str(tmp_path / "stored"), "--dtype", "float32")
    packed, scales, _ = bnb.int8_vectorwise_quant(load_file(base / "model.safetensors")[O_PROJ].half())
    torch.testing.assert_close(
        merged[O_PROJ], packed.float() * scales.unsqueeze(1) / 127, rtol=1e-5, atol=1e-6
    )
    assert set(merged) == set(load_file(base / "model.safetensors"))


def test_experts_that_are_stored_in_mxfp4(base: Path, tmp_path: Path) -> None:
    """As GPT-OSS has them: Transformers dequantizes them where it has no kernels for them."""
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=None,
        eos_token_id=1,
    )
    folder = tmp_path / "stored"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        weights[f"{name}_blocks"] = torch.randint(
            256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8
        )
        weights[f"{name}_scales"] = torch.randint(
            121, 125, (experts, outputs, inputs // 32), dtype=torch.uint8
        )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["self_attn", "lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(settings))

    adapter = make_run(folder, tmp_path / "adapter", RUN, target_modules=["q_proj", "o_proj"])
    (adapter / "run_config.yaml").unlink()
    merged = export(adapter, tmp_path / "merged", "--dtype", "float32")
    assert not any(name.endswith(("_blocks", "_scales")) for name in merged)
    expected = logits_of(folder, adapter, dtype=torch.float32)
    assert error(logits_of(folder, dtype=torch.float32), expected) > 1e-2
    assert error(logits_of(tmp_path / "merged"), expected) < 1e-5


def test_experts_are_quantized_together(base: Path, tmp_path: Path) -> None:
    """They are stored one by one, and held, and quantized, as one weight."""
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=12,
        pad_token_id=None,
        eos_token_id=1,
    )
    folder = tmp_path / "experts"
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    run = make_run(folder, tmp_path / "run", replace(RUN, quantization="nf4"), target_modules=["q_proj"])
    merged, stored = export(run, tmp_path / "merged"), load_file(folder / "model.safetensors")
    assert merged.keys() == stored.keys()
    names = [
        [f"model.layers.0.mlp.experts.{n}.{side}_proj.weight" for side in ("gate", "up")] for n in range(12)
    ]
    whole = torch.stack([torch.cat([stored[name] for name in pair]) for pair in names])
    expected = round_trip(whole, quant_type="nf4", compress_statistics=True)
    assert torch.equal(torch.stack([torch.cat([merged[name] for name in pair]) for pair in names]), expected)


def test_other_quantized_bases_are_refused(base: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(other)
    settings = json.loads((other / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "fp8"}
    (other / "config.json").write_text(json.dumps(settings))
    adapter = make_run(base, tmp_path / "adapter", RUN)
    with pytest.raises(ConfigError, match=r"is quantized \(fp8\), and an adapter can only be merged"):
        export(adapter, tmp_path / "merged", "--base", str(other))


def test_full_runs_are_models_already(base: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(run)
    (run / "run_config.yaml").write_text(dump_config(replace(RUN, lora_r=0, model_name_or_path=str(base))))
    with pytest.raises(ConfigError, match="is the whole model already"):
        export(run, tmp_path / "merged")
    (run / "config.json").unlink()
    with pytest.raises(ConfigError, match="continue it with --resume"):
        export(run, tmp_path / "merged")
