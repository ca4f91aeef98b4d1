"""Quantized bases on engines and layouts against one plain process that computes with the numbers they stand for."""

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.spawn import VOCAB_SIZE, build_llama, engine_settings, make_samples, spawn  # noqa: TID251

pytestmark = pytest.mark.timeout(600)

ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
LAYOUTS = ("dp2", "tp2")
CASES: dict[str, tuple[str, dict[str, Any] | None]] = {
    # A checkpoint, and how it is quantized; None: it holds quantized weights.
    "nf4": ("llama", {"method": "nf4"}),
    "nf4, one scale": ("llama", {"method": "nf4", "double_quant": False}),
    "fp4": ("llama", {"method": "fp4"}),
    "int8": ("llama", {"method": "int8"}),
    "nf4, some layers": ("llama", {"method": "nf4", "skip_modules": ("q_proj", "model.layers.1.mlp")}),
    "nf4, tp through blocks": ("narrow", {"method": "nf4"}),
    "int8, odd sizes": ("narrow", {"method": "int8"}),
    "nf4, experts": ("experts", {"method": "nf4"}),
    "int8, experts": ("experts", {"method": "int8"}),
    "nf4, stored": ("stored nf4", None),
    "fp4, one scale, stored": ("stored fp4", None),
    "int8, stored": ("stored int8", None),
    "mxfp4, stored": ("stored mxfp4", None),
}
FP_TOLERANCE = 1e-5
LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "target_modules": ["q_proj", "v_proj", "o_proj", "k_proj"]}


# Checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for each checkpoint of `CASES`."""
    folder = tmp_path_factory.mktemp("quantized")
    wide = {"hidden_size": 128, "intermediate_size": 256}
    build_llama(folder / "llama", **wide)
    build_llama(folder / "narrow", hidden_size=48, intermediate_size=44)
    build_experts(folder / "experts")
    for method, options in (
        ("nf4", {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}),
        ("fp4", {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}),
        ("int8", {"load_in_8bit": True}),
    ):
        store_quantized(folder / "llama", folder / f"stored {method}", options)
    build_mxfp4(folder / "stored mxfp4")
    return folder


def build_experts(folder: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=1,
        initializer_range=0.1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def store_quantized(plain: Path, folder: Path, options: dict[str, Any]) -> None:
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    model = AutoModelForCausalLM.from_pretrained(
        plain,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(**options, bnb_4bit_compute_dtype=torch.float32),
        device_map={"": "cpu"},
    )
    model.save_pretrained(folder)


def build_mxfp4(folder: Path) -> None:
    """As GPT-OSS is stored: the experts' matrices as blocks and exponents."""
    import json

    import torch
    from safetensors.torch import load_file, save_file
    from transformers import GptOssConfig, GptOssForCausalLM

    torch.manual_seed(2)
    config = GptOssConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        pad_token_id=None,
    )
    GptOssForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(121, 125, shape, dtype=torch.uint8)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.embed_tokens"],
    }
    (folder / "config.json").write_text(json.dumps(values))


# One plain process


def plain_model(folder: Path, case: str, tp_size: int) -> Any:
    """A model of Transformers in fp32 that has the quantized numbers as its weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    checkpoint, options = CASES[case]
    if options is None:
        return plain_stored(folder, checkpoint)
    model = AutoModelForCausalLM.from_pretrained(
        folder / checkpoint, dtype=torch.float32, attn_implementation="eager"
    )
    assert AutoConfig.from_pretrained(folder / checkpoint).model_type == model.config.model_type
    for name, parameter in model.named_parameters():
        is_head = parameter is model.get_output_embeddings().weight
        skipped = any(part in name for part in options.get("skip_modules", ()))
        is_router = name.endswith("mlp.gate.weight")
        if parameter.dim() >= 2 and not (is_head or skipped or is_router or "embed" in name):
            is_cut_by_columns = "o_proj" in name or "down_proj" in name
            dim = (parameter.dim() - 1) if is_cut_by_columns else parameter.dim() - 2
            parts = tp_size if checkpoint == "narrow" and tp_size > 1 and options["method"] != "int8" else 1
            if parameter.dim() == 2 and not is_cut_by_columns:
                # Whole blocks of 64 in each rank's rows are quantized as in one piece.
                through = parameter.numel() // tp_size % 64
                parts = parts if through else 1
            pieces = [quantized_numbers(piece, options) for piece in parameter.detach().chunk(parts, dim)]
            parameter.data = torch.cat(pieces, dim)
    return model


def quantized_numbers(weight: Any, options: dict[str, Any]) -> Any:
    import bitsandbytes.functional as bnb

    if options["method"] == "int8":
        numbers, scales, _ = bnb.int8_vectorwise_quant(weight.flatten(0, -2).half())
        return (numbers.float() * (scales / 127).unsqueeze(1)).view_as(weight)
    packed, state = bnb.quantize_4bit(
        weight.contiguous(),
        blocksize=64,
        quant_type=options["method"],
        compress_statistics=options.get("double_quant", True),
    )
    return bnb.dequantize_4bit(packed, state)


def plain_stored(folder: Path, checkpoint: str) -> Any:
    """What Transformers makes of the stored bytes, in a plain model."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    if checkpoint != "stored mxfp4":
        quantized = AutoModelForCausalLM.from_pretrained(
            folder / checkpoint, dtype=torch.float32, attn_implementation="eager", device_map={"": "cpu"}
        )
        return quantized.dequantize(dtype=torch.float32)
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = AutoConfig.from_pretrained(folder / checkpoint)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(folder / checkpoint / "model.safetensors")
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors.pop(f"{name}_blocks"), tensors.pop(f"{name}_scales")
        tensors[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.load_state_dict(tensors)
    return model


def with_adapters(model: Any) -> Any:
    """PEFT's LoRA on attention, its values drawn by name."""
    import torch
    from peft import LoraConfig, get_peft_model

    wrapped = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **LORA))
    set_adapters(wrapped)
    assert torch is not None
    return wrapped


def set_adapters(model: Any) -> None:
    import torch

    with torch.no_grad():
        for number, (_, parameter) in enumerate(
            (name, p) for name, p in model.named_parameters() if p.requires_grad
        ):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def plain_gradients(model: Any, samples: list[Any]) -> tuple[float, dict[str, Any]]:
    """Loss per label and every adapter's gradient, document by document."""
    import torch

    model = with_adapters(model.requires_grad_(False)).train()
    count = sum(label != -100 for sample in samples for label in sample.labels[1:])
    total = 0.0
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1]
        labels = torch.tensor(sample.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100) / count
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}


# Ranks


def run_cells(worker: Any, folder: Path) -> dict[tuple[str, str, str], Any]:
    from hfpar.parallel.layout import Layout

    layouts = {
        "dp2": Layout(worker.rank, worker.world_size),
        "tp2": Layout(worker.rank, worker.world_size, tp_size=2),
    }
    results = {}
    for case in CASES:
        for name, layout in layouts.items():
            for engine in ENGINES:
                worker.send(f"{case} {name} {engine}")
                results[case, name, engine] = run_cell(folder, case, layout, engine)
    return results


def run_cell(folder: Path, case: str, layout: Any, engine_name: str) -> dict[str, Any]:
    import torch

    from hfpar.attention import interface
    from hfpar.data.stream import build_stream
    from hfpar.engine.build import build_engine
    from hfpar.models.adapters import add_lora
    from hfpar.models.load import load_model, load_model_config
    from hfpar.models.quantization import Quantization, QuantizationChoice, find_quantization
    from hfpar.parallel import sequence, tensor
    from hfpar.train import loss
    from hfpar.train.step import train_step

    interface.register()
    checkpoint, options = CASES[case]
    config = load_model_config(folder / checkpoint)
    settings = engine_settings(engine_name)
    if options is None:
        quantization = find_quantization(QuantizationChoice(), config, settings, torch.float32)
        assert quantization is not None and quantization.is_stored
    else:
        quantization = Quantization(**options, compute_dtype=torch.float32)
    model = load_model(
        folder / checkpoint,
        config,
        settings=settings,
        dtype=torch.float32,
        attn_implementation=interface.interface_name("auto"),
        tp_size=layout.tp_size,
        quantization=quantization,
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(
        model,
        r=LORA["r"],
        alpha=LORA["lora_alpha"],
        dropout=0.0,
        target_modules=LORA["target_modules"],
        modules_to_save=None,
        seed=0,
    )
    set_adapters(model)
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)
    engine = build_engine(
        settings,
        model.train(),
        lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.0),
        layout,
        torch.device("cpu"),
        checkpoint_folder=folder / checkpoint,
        gradient_accumulation_steps=1,
        max_grad_norm=None,
    )
    found: dict[str, Any] = {}
    step = engine.step

    def recorded(max_grad_norm: float | None) -> float:
        found.update(engine.gradients())
        norm: float = step(max_grad_norm)
        return norm

    engine.step = recorded  # type: ignore[method-assign]
    mine = make_samples(8)[layout.dp_rank :: layout.dp_size]
    held = [p for name, p in engine.module.named_parameters() if name.endswith(("_packed", "_scales"))]
    try:
        result = train_step(engine, [build_stream(mine)], layout, None)
        base = {name: value for name, value in engine.parameters() if ".lora_" not in name}
        return {
            "loss": result.loss,
            "gradients": {name: value.clone() for name, value in found.items()},
            "base": base if layout.rank == 0 else None,
            "bytes": sum(bytes_here(parameter) for parameter in held),
        }
    finally:
        engine.close()


def bytes_here(parameter: Any) -> int:
    """Bytes of a parameter that this rank keeps between steps."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel() * parameter.element_size())
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel() * local.element_size())


@pytest.fixture(scope="module")
def results(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """Of each rank."""
    return spawn(run_cells, 2, tmp_path_factory.mktemp("run"), checkpoints)


@pytest.fixture(scope="module")
def references(checkpoints: Path) -> dict[tuple[str, int], Any]:
    """(loss, gradients, base) by case and tp size."""
    found = {}
    for case in CASES:
        for tp_size in (1, 2):
            model = plain_model(checkpoints, case, tp_size)
            base = {f"base_model.model.{name}": p.detach().clone() for name, p in model.named_parameters()}
            found[case, tp_size] = (*plain_gradients(model, make_samples(8)), base)
    return found


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_quantized_base_gives_the_numbers_of_one_process(
    results: Any, references: Any, case: str, layout: str, engine: str
) -> None:
    loss, gradients, base = references[case, 2 if layout == "tp2" else 1]
    for rank_results in results:
        found = rank_results[case, layout, engine]
        assert found["loss"] == pytest.approx(loss, rel=FP_TOLERANCE)
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = float((found["gradients"][name] - gradient).norm() / gradient.norm())
            assert error < FP_TOLERANCE, f"{name}: {error:.1e}"
    weights = {
        name.replace(".base_layer", ""): value
        for name, value in results[0][case, layout, engine]["base"].items()
    }
    assert weights.keys() == base.keys()
    for name, weight in base.items():
        # Equal but for the order in which a number's factors are multiplied.
        assert float((weights[name] - weight).abs().max()) <= 1e-6 * float(weight.abs().max()), name


@pytest.mark.parametrize(
    ("layout", "engine", "share"),
    [
        ("dp2", "fsdp2", 0.5),
        ("dp2", "zero3", 0.5),
        ("tp2", "ddp", 0.5),
        ("tp2", "zero2", 0.5),
        ("dp2", "ddp", 1.0),
    ],
)
def test_ranks_keep_their_share_of_the_bytes(results: Any, layout: str, engine: str, share: float) -> None:
    whole = results[0]["nf4", "dp2", "ddp"]["bytes"]
    numbers = 2 * (128 * 128 * 2 + 2 * 128 * 64 + 3 * 128 * 256)
    assert whole == numbers // 2 + numbers // 64
    for rank_results in results:
        assert rank_results["nf4", layout, engine]["bytes"] == pytest.approx(share * whole, rel=0.01)
