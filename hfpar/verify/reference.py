"""One plain process: what every engine and layout must reproduce.

On purpose this shares nothing with the way hfpar trains: documents go through the model one at a time, without
padding or packing, under Transformers' own attention; the logits are whole; the loss is torch's `cross_entropy`
with `reduction="sum"`, divided by the number of labels of the global batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hfpar.models.shrink import shrink_config
from hfpar.verify.documents import IGNORE_INDEX, Document, count_labels

MAX_GRAD_NORM = 0.5
"""Below the gradient norm of the test batch, so that clipping is part of the test."""

LORA: dict[str, Any] = {"r": 4, "lora_alpha": 8.0, "lora_dropout": 0.0, "target_modules": "all-linear"}

ADAM: dict[str, Any] = {"lr": 0.02, "betas": (0.9, 0.99), "eps": 1e-2}
"""AdamW's first update is g / (|g| + eps). With the usual tiny eps that is the sign of g: the scale of a gradient
then drops out, and an element that is zero but for rounding moves as far as any other, up or down. With eps at
the size of the gradients the update is smooth in g: a relative error of the gradient gives one of the same
size in the update, and the test measures the engine, not the optimizer's sensitivity."""

WEIGHT_DECAY = 0.1

_SPREAD = 0.06
"""Standard deviation of the weights: attention scores then differ from token to token."""


Pieces = dict[str, list[tuple[slice, ...]]]
"""By a layer's name: the parts of its weight that are quantized by themselves."""


def build_checkpoint(
    config: Any,
    folder: Path,
    seed: int = 0,
    *,
    fewest_heads: int = 1,
    tp_sizes: Sequence[int] = (),
    block: int = 1,
) -> None:
    """Write a shrunk model with random weights: vectors too (norms, biases, sinks), which otherwise start at 0 or 1."""
    from transformers import AutoModelForCausalLM

    small = shrink_config(config, fewest_heads=fewest_heads, tp_sizes=tp_sizes, block=block)
    if getattr(small, "initializer_range", None) is not None:
        small.initializer_range = max(small.initializer_range, _SPREAD)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    stored = model.state_dict()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name in stored and tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.1)
    model.save_pretrained(folder)


def load_plain(
    folder: Path,
    adapter_state: dict[str, Tensor] | None,
    *,
    quantization: str | None = None,
    pieces: Pieces | None = None,
) -> Any:
    """The model as Transformers loads it; with adapters, as PEFT puts them on; quantized, as bitsandbytes does it."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    options: dict[str, Any] = {}
    if quantization is not None:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=quantization,
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        )
        options["device_map"] = {"": "cpu"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=plain_attention(folder), **options
    )
    if quantization is not None and pieces:
        _quantize_pieces(model, folder, quantization, pieces)
    if adapter_state is not None:
        model = add_plain_lora(model)
        set_parameters(model, adapter_state)
    return model.train()


def _quantize_pieces(model: Any, folder: Path, quantization: str, pieces: Pieces) -> None:
    """Put the numbers of weights that are quantized in pieces into plain layers."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, places in pieces.items():
        layer = whole.get_submodule(name).requires_grad_(False)
        for place in places:
            piece = layer.weight[place].contiguous()
            options = {"blocksize": 64, "quant_type": quantization, "compress_statistics": True}
            layer.weight[place] = dequantize_4bit(*quantize_4bit(piece, **options))
        model.set_submodule(name, layer)


def plain_attention(folder: Path) -> str:
    """`sdpa`, or `eager` for what torch's fused attention can't compute (soft-capping, sinks)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    softcap = getattr(config, "attn_logit_softcapping", None)
    return "sdpa" if getattr(model_class, "_supports_sdpa", True) and softcap is None else "eager"


def add_plain_lora(model: Any) -> Any:
    """The adapters that every cell has, by PEFT alone."""
    from peft import LoraConfig, TaskType, get_peft_model

    return get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, **LORA))


def draw_adapter_state(folder: Path, seed: int = 1) -> dict[str, Tensor]:
    """Values for every adapter weight: B isn't zero, or the gradients of A would be."""
    from transformers import AutoModelForCausalLM

    model = add_plain_lora(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(parameter.shape, generator=generator) * 0.1
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def set_parameters(model: nn.Module, values: dict[str, Tensor]) -> None:
    """Copy values into the parameters of those names."""
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, value in values.items():
            parameters[name].copy_(value)


def make_optimizer(
    parameters: Sequence[tuple[str, nn.Parameter]], decayed: set[str]
) -> torch.optim.Optimizer:
    """AdamW with two groups, as in training; `decayed` names what decays (shards have lost their shape)."""
    groups = [
        {"params": [p for name, p in parameters if name in decayed], "weight_decay": WEIGHT_DECAY},
        {"params": [p for name, p in parameters if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([group for group in groups if group["params"]], **ADAM)


def document_loss(model: nn.Module, document: Document, device: torch.device) -> Tensor:
    """The summed cross-entropy of one document's labels, from whole logits."""
    logits = model(input_ids=torch.tensor([document.tokens], device=device), use_cache=False).logits[0]
    labels = torch.tensor(document.labels, device=device)
    return cross_entropy(logits[:-1].float(), labels[1:], reduction="sum", ignore_index=IGNORE_INDEX)


def accumulate_gradients(model: nn.Module, documents: Sequence[Document], device: torch.device) -> float:
    """Add the gradients of a global batch; returns its mean loss per label."""
    divisor = max(count_labels(documents), 1)
    total = 0.0
    for document in documents:
        if not count_labels([document]):
            continue
        loss = document_loss(model, document, device) / divisor
        loss.backward()  # type: ignore[no-untyped-call]
        total += float(loss.detach().double())
    return total


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every trainable parameter's gradient, on the CPU; zeros where none arrived."""
    return {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).detach().cpu().clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every parameter, on the CPU; what is quantized as the numbers that it stands for."""
    return {name: _numbers(p).cpu().clone() for name, p in model.named_parameters()}


def _numbers(parameter: nn.Parameter) -> Tensor:
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return parameter.detach()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(parameter.detach(), state)


def run_reference(
    folder: Path,
    windows: Sequence[Sequence[Document]],
    adapter_state: dict[str, Tensor] | None,
    device: torch.device,
    quantization: str | None = None,
    pieces: Pieces | None = None,
) -> dict[str, Any]:
    """Train one optimizer step a window, in one process.

    Args:
        folder: the checkpoint.
        windows: the documents of each step's global batch.
        adapter_state: None for full fine-tuning.
        device: where to.
        quantization: of the base, `nf4` or `fp4`.
        pieces: of weights that aren't quantized whole.

    Returns:
        `initial` (every parameter), `decayed` (names) and `steps`, each with `loss`, `grad_norm`, `gradients`
        and `parameters` (after the step).
    """
    model = load_plain(folder, adapter_state, quantization=quantization, pieces=pieces).to(device)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    trained = [p for _, p in named]
    decayed = {name for name, p in named if p.dim() >= 2}
    optimizer = make_optimizer(named, decayed)
    initial = parameters_of(model)
    steps = []
    for documents in windows:
        loss = accumulate_gradients(model, documents, device)
        gradients = gradients_of(model)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        steps.append(
            {
                "loss": loss,
                "grad_norm": grad_norm,
                "gradients": gradients,
                "parameters": parameters_of(model),
            }
        )
    return {"initial": initial, "decayed": sorted(decayed), "steps": steps}
