"""First values of adapters: from the seed, or from the weights that they are put on.

PiSSA and OLoRA begin with a part of each weight in the adapter, and leave the base the rest of it. That rest isn't
computed here unless the weight is there, whole: it is noted, and subtracted from each rank's own rows as they are
read (`read_base`), before they are quantized. LoftQ begins with what quantizing a weight has lost.

Each weight is read and decomposed by one rank, and what it finds is sent to the others, so that all begin alike.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpar.errors import ConfigError
from hfpar.models.formats import FourBit
from hfpar.models.quantized import QuantizedWeight, quantized_weights
from hfpar.models.quantized_fill import Bytes, Sharers, quantize_rows, stored_rows
from hfpar.models.stored import SafetensorsSource, WeightPart, WholeSource, checkpoint_key

ADAPTER = "default"
"""PEFT's name for the only adapter."""

TAKEN_FROM_BASE = ("pissa", "olora")
"""Initializations that leave the base the rest of each weight."""

_NOTE = "_hfpar_residual"


@dataclass(frozen=True, eq=False)
class Taken:
    """What an adapter has been given of its base weight: scaling * b @ a, read by slices as a weight of a file is."""

    a: Tensor
    """[r, in_features], as the adapter began."""
    b: Tensor
    """[out_features, r]"""
    scaling: float

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Rows, or rows and columns, in double precision: so exact that it doesn't matter how they are cut."""
        rows, columns = (*index, slice(None))[:2] if isinstance(index, tuple) else (index, slice(None))
        return (self.scaling * self.b[rows].double()) @ self.a[:, columns].double()

    def leave(self, values: Tensor, taken: Tensor) -> Tensor:
        """The rest of some rows of the weight, in fp32."""
        return (values.double() - taken.to(values.device)).float()


def taken_from(module: nn.Module, name: str = "weight") -> Taken | None:
    """What an adapter has been given of a module's own weight; None: nothing."""
    return module.__dict__.get(_NOTE) if name == "weight" else None


def read_base(
    source: SafetensorsSource | WholeSource, found: str | None, part: WeightPart, module: nn.Module, name: str
) -> Tensor:
    """A rank's part of a stored weight, without what an adapter has been given of it.

    Args:
        source: the checkpoint.
        found: the weight's name in it.
        part: of the weight.
        module: where the weight is to hang.
        name: of the parameter there.
    """
    values = source.read(found, part)
    taken = taken_from(module, name)
    return values if taken is None else taken.leave(values.to(part.like.dtype), part.of(taken))


# The layers


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Every layer with an adapter, in module order."""
    from peft.tuners.lora import LoraLayer

    for name, module in model.named_modules():
        if isinstance(module, LoraLayer):
            yield name, module


def check_layers(model: nn.Module, kind: str) -> None:
    """Refuse layers that can't begin as `kind` says, or be trained as their adapters are.

    Raises:
        ConfigError: names the first.
    """
    for full_name, layer in lora_layers(model):
        name = checkpoint_key(full_name)
        is_linear = isinstance(layer.get_base_layer(), nn.Linear)
        type_name = type(layer.get_base_layer()).__name__
        if layer.use_dora.get(ADAPTER) and not is_linear:
            raise ConfigError(
                f"use_dora: true takes linear layers, and {name} is of type {type_name}; leave it out of "
                "lora_target_modules"
            )
        if kind not in (*TAKEN_FROM_BASE, "loftq"):
            continue
        held = quantized_weights(layer.get_base_layer()).get("weight")
        if held is not None and held.is_stored:
            raise ConfigError(
                f"init_lora_weights: {kind} starts from weights in full precision, and the checkpoint holds {name} in "
                f"{held.format.name}; use default, or the unquantized model"
            )
        if not is_linear:
            raise ConfigError(
                f"init_lora_weights: {kind} takes linear layers, and {name} is of type {type_name}; leave it out of "
                "lora_target_modules, or use default"
            )
        smallest = min(layer.in_features, layer.out_features)
        if layer.r[ADAPTER] > smallest:
            raise ConfigError(
                f"lora_r: {layer.r[ADAPTER]} with init_lora_weights: {kind}, but {name} has only {smallest} rows or "
                f"columns to begin with; use lora_r {smallest} or less, or init_lora_weights: default"
            )


def initialize(model: Any, kind: str, dtype: torch.dtype, folder: Path | None) -> None:
    """Give every adapter its first values; those on the meta device become real. All ranks together.

    What isn't taken from weights is drawn from torch's generator, in module order.

    Args:
        model: a PEFT model; its base may be on the meta device, and isn't cut for tensor parallelism yet.
        kind: default, gaussian, pissa, olora or loftq.
        dtype: of the adapters.
        folder: the base's checkpoint. None: nothing is taken from weights.
    """
    layers = list(lora_layers(model))
    for _, layer in layers:
        for container in dict.fromkeys(layer.adapter_layer_names):
            _make_real(getattr(layer, container), dtype)
        layer.reset_lora_parameters(ADAPTER, init_lora_weights="gaussian" if kind == "gaussian" else True)
    if folder is None:
        assert kind in ("default", "gaussian")
        return
    from_weights = [(name, layer) for name, layer in layers if _needs_weight(layer, kind)]
    if from_weights:
        weights = _StoredWeights(model, folder, from_weights)
        for number, (_, layer) in enumerate(from_weights):
            _initialize_layer(layer, kind, weights, number)


def _make_real(container: Any, dtype: torch.dtype) -> None:
    """A module's or parameter dict's own values, on the CPU if they were nowhere, in the adapters' dtype."""
    if not isinstance(container, nn.Module):
        return
    if any(p.is_meta for p in container.parameters()):
        container.to_empty(device="cpu")
    container.to(dtype)


def _needs_weight(layer: Any, kind: str) -> bool:
    if layer.use_dora.get(ADAPTER):
        return True
    return kind in TAKEN_FROM_BASE or (kind == "loftq" and _is_four_bit(layer.get_base_layer()))


def _is_four_bit(base: nn.Module) -> bool:
    held = quantized_weights(base).get("weight")
    return held is not None and isinstance(held.format, FourBit)


def _initialize_layer(layer: Any, kind: str, weights: _StoredWeights, number: int) -> None:
    """One layer's first values, found by one rank."""
    base, scaling = layer.get_base_layer(), layer.scaling[ADAPTER]
    matrices = [layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight]
    if layer.use_dora.get(ADAPTER):
        matrices.append(layer.lora_magnitude_vector[ADAPTER].weight)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    owner = number % world_size
    device = _collective_device()
    found = [matrix.detach().to(device).contiguous() for matrix in matrices]
    if world_size == 1 or dist.get_rank() == owner:
        values = _first_values(layer, kind, weights, number, device)
        for target, value in zip(found, values, strict=True):
            target.copy_(value)
    if world_size > 1:
        for target in found:
            dist.broadcast(target, src=owner)
    for matrix, value in zip(matrices, found, strict=True):
        matrix.data.copy_(value)
    if kind in TAKEN_FROM_BASE:
        a, b = (matrix.detach().clone() for matrix in matrices[:2])
        taken = Taken(a, b, scaling)
        base.__dict__[_NOTE] = taken
        _leave_the_rest(base, taken)


def _collective_device() -> torch.device:
    is_nccl = dist.is_initialized() and "nccl" in str(dist.get_backend())
    return torch.device("cuda" if is_nccl else "cpu")


def _first_values(
    layer: Any, kind: str, weights: _StoredWeights, number: int, device: torch.device
) -> list[Tensor]:
    """A, B, and with DoRA the magnitudes, of a layer with a weight [out_features, in_features]."""
    base, scaling = layer.get_base_layer(), layer.scaling[ADAPTER]
    held = quantized_weights(base).get("weight")
    a, b = (matrix[ADAPTER].weight.detach().to(device) for matrix in (layer.lora_A, layer.lora_B))
    if held is not None and held.is_stored:
        kept = weights.stored(number, held).to(device)
    else:
        whole = kept = weights.whole(number, device)
        if kind in TAKEN_FROM_BASE:
            a, b = (matrix.to(a.dtype) for matrix in _as_peft_does(layer, kind, whole))
            taken = Taken(a, b, scaling)
            kept = taken.leave(whole, taken[:])
        kept = kept.to(_weight_dtype(base)).float() if held is None else _as_held(held, kept)
        if kind == "loftq" and _is_four_bit(base):
            a, b = _low_rank(whole - kept, layer.r[ADAPTER], scaling)
    if not layer.use_dora.get(ADAPTER):
        return [a, b]
    return [a, b, torch.linalg.norm(kept + scaling * b.float() @ a.float(), dim=1)]


def _as_peft_does(layer: Any, kind: str, whole: Tensor) -> tuple[Tensor, Tensor]:
    """The A and B with which PEFT would begin on this weight."""
    from peft import LoraConfig
    from peft.tuners.lora import Linear as LoraLinear

    rank, alpha = layer.r[ADAPTER], layer.lora_alpha[ADAPTER]
    config = LoraConfig(
        r=rank, lora_alpha=alpha, init_lora_weights=kind, use_rslora=layer.use_rslora[ADAPTER]
    )
    alone = nn.Linear(whole.shape[1], whole.shape[0], bias=False, device="meta")
    alone.weight = nn.Parameter(whole.clone(), requires_grad=False)
    wrapped: Any = LoraLinear(alone, ADAPTER, config=config, r=rank, lora_alpha=alpha)
    return wrapped.lora_A[ADAPTER].weight.detach(), wrapped.lora_B[ADAPTER].weight.detach()


def _low_rank(error: Tensor, rank: int, scaling: float) -> tuple[Tensor, Tensor]:
    """A and B so that scaling * B @ A is the best of this rank: the error's largest singular values."""
    left, values, right = torch.linalg.svd(error, full_matrices=False)
    root = (values[:rank] / scaling).sqrt()
    return root[:, None] * right[:rank], left[:, :rank] * root


def _as_held(held: QuantizedWeight, whole: Tensor) -> Tensor:
    """What quantizing makes of a weight, fp32."""
    rows = slice(0, held.format.num_rows(held.shape))
    return _numbers(held, quantize_rows(held, rows, lambda wanted: whole[wanted], Sharers(), whole.device))


def _numbers(held: QuantizedWeight, stored: Bytes) -> Tensor:
    packed, scales = (held.as_stored(part.contiguous()) for part in (stored.packed, stored.scales))
    return held.dequantize(packed, scales, stored.nested, held.dtype).float()


def _weight_dtype(base: Any) -> torch.dtype:
    held = quantized_weights(base).get("weight")
    dtype: torch.dtype = base.weight.dtype if held is None else held.dtype
    return dtype


def _leave_the_rest(base: Any, taken: Taken) -> None:
    """Subtract what has been taken from a weight that is there already; others are told when they are read."""
    if quantized_weights(base) or base.weight.is_meta:
        return
    weight = base.weight
    if not hasattr(weight, "ds_id"):
        weight.data.copy_(taken.leave(weight.data, taken[:]))
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([weight], modifier_rank=0):
        weight.data.copy_(taken.leave(weight.data, taken[:]))


class _StoredWeights:
    """Weights of layers as a checkpoint has them, whole."""

    def __init__(self, model: Any, folder: Path, layers: Sequence[tuple[str, Any]]) -> None:
        """Look up where they are."""
        self.layers = [layer for _, layer in layers]
        self.keys = [f"{checkpoint_key(name)}.weight" for name, _ in layers]
        self.source: SafetensorsSource | WholeSource = SafetensorsSource(folder, model, self.keys)
        if any(self.source.find([key]) is None for key in self.keys):
            dtype = _weight_dtype(self.layers[0].get_base_layer())
            self.source = WholeSource(model, folder, dtype)

    def whole(self, number: int, device: torch.device) -> Tensor:
        """The weight of a layer, as the model would have it without an adapter; [out_features, in_features], fp32."""
        layer, key = self.layers[number], self.keys[number]
        dtype = _weight_dtype(layer.get_base_layer())
        like = torch.empty(layer.out_features, layer.in_features, dtype=dtype, device="meta")
        values = self.source.read(self.source.find([key]), WeightPart(like, None, 0))
        return values.to(device=device, dtype=dtype).float()

    def stored(self, number: int, held: QuantizedWeight) -> Tensor:
        """The numbers of a weight that the checkpoint holds in few bits, fp32."""
        found = self.source.find([self.keys[number]])
        assert isinstance(self.source, SafetensorsSource) and found is not None
        read = partial(self.source.read_beside, found)
        return _numbers(held, stored_rows(held, slice(0, held.format.num_rows(held.shape)), read))


# The export


def as_plain_lora(model: Any, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
    """A trained adapter, so that it fits the original base: what was taken at the start is subtracted in it.

    With W the original weight and A0, B0 the first values, W - B0 A0 + B A = W + [B, -B0] [A; A0]: an adapter of
    twice the rank, whose second half is what was taken.

    Args:
        model: the PEFT model.
        weights: of the adapter, whole, by their names in the model; empty where nothing is to be written.

    Returns:
        The weights and PEFT's config to save; unchanged where nothing was taken.
    """
    config = model.peft_config[ADAPTER]
    converted, found = dict(weights), False
    for name, layer in lora_layers(model):
        taken = taken_from(layer.get_base_layer())
        if taken is None:
            continue
        found = True
        for key, first, dim in (("lora_A", taken.a, 0), ("lora_B", -taken.b, 1)):
            full_name = f"{name}.{key}.{ADAPTER}.weight"
            if full_name in weights:
                converted[full_name] = torch.cat([weights[full_name].to(first.dtype), first], dim=dim)
    if not found:
        return weights, config
    config = copy.deepcopy(config)
    config.r *= 2
    config.lora_alpha *= math.sqrt(2) if config.use_rslora else 2
    return converted, config


def save_adapter(model: Any, weights: dict[str, Tensor], folder: Path) -> None:
    """Write a trained adapter as a PEFT folder that fits the original base.

    Args:
        model: the PEFT model.
        weights: all that is trained, whole, by their names in the model.
        folder: where to.
    """
    config = model.peft_config[ADAPTER]
    weights, model.peft_config[ADAPTER] = as_plain_lora(model, weights)
    try:
        model.save_pretrained(folder, state_dict=weights, save_embedding_layers=False)
    finally:
        model.peft_config[ADAPTER] = config
