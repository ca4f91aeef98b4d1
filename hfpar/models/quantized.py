"""Weights that are held in few bits: frozen bytes in place of a parameter, and the weight itself as a property.

A `QuantizedLinear` is an `nn.Linear` to whoever looks at it, PEFT included; its `weight` is dequantized each time it
is asked for. The bytes are parameters that every engine can shard, gather, broadcast and move as it does others, and
none can convert: they are `uint8`. They lie in rows that are dealt to ranks whole, so that each rank can quantize
the rows it keeps.

The numbers are those of bitsandbytes for the whole weight, however it is cut: blocks don't reach over the border of a
part, and the statistics of double quantization, which run over the whole weight, are put together from all ranks
(`hfpar.models.quantized_fill`). Where a cut goes through a block, each part is quantized by itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hfpar.errors import ConfigError
from hfpar.models.cuts import Cut
from hfpar.models.formats import BLOCK, NESTED_BLOCK, Format, FourBit


@dataclass(frozen=True)
class QuantizedWeight:
    """What is known of a held weight beside its bytes."""

    format: Format
    shape: tuple[int, ...]
    """On this rank, before an engine deals the rows of bytes."""
    dtype: torch.dtype
    """In which it was quantized."""
    compute_dtype: torch.dtype
    """In which layers use it."""
    storage_dtype: torch.dtype = torch.uint8
    cut: Cut | None = None
    """If it is a part for a tp rank."""
    tp_rank: int = 0
    is_stored: bool = False
    """Whether the checkpoint holds these bytes."""
    statistics_cut: Cut | None = None
    """Which blocks of the whole weight this part has, if the statistics are the whole weight's."""

    @property
    def numel(self) -> int:
        """Numbers on this rank."""
        return math.prod(self.shape)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Over all tp ranks."""
        return self.shape if self.cut is None else self.cut.whole_shape(self.shape)

    def part(self, cut: Cut, tp_rank: int) -> QuantizedWeight:
        """The part that a tp rank keeps."""
        assert self.cut is None
        return replace(
            self,
            shape=cut.local_shape(self.shape),
            cut=cut,
            tp_rank=tp_rank,
            statistics_cut=self.format.cut_of_statistics(cut, self.shape),
        )

    @property
    def cuts_through_blocks(self) -> bool:
        """Whether the numbers depend on the cut: each part is quantized by itself."""
        return self.format.cuts_through_blocks(self)

    def empty_bytes(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """Rows of bytes of the right shape: of numbers, and of scales."""
        rows, widths = self.format.num_rows(self.shape), self.format.row_bytes(self.shape)
        packed, scales = (torch.empty(rows, width, dtype=torch.uint8, device=device) for width in widths)
        return self.as_stored(packed), self.as_stored(scales)

    def as_stored(self, rows: Tensor) -> Tensor:
        """Bytes as engines see them."""
        return rows.view(self.storage_dtype)

    def dequantize(self, packed: Tensor, scales: Tensor, nested: Tensor | None, dtype: torch.dtype) -> Tensor:
        """The weight, of all of its rows of bytes.

        Args:
            packed: numbers [rows, bytes], in the storage dtype.
            scales: scales [rows, bytes], in the storage dtype.
            nested: bytes of the statistics of double quantization.
            dtype: of the result.
        """
        if packed.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        with torch.no_grad():
            packed, scales = packed.detach().view(torch.uint8), scales.detach().view(torch.uint8)
            return self.format.dequantize(self, packed, scales, nested, dtype)


# Modules

_NOTE = "_hfpar_quantized"


def quantized_weights(module: nn.Module) -> dict[str, QuantizedWeight]:
    """A module's own held weights, by name."""
    held: dict[str, QuantizedWeight] = module.__dict__.get(_NOTE, {})
    return held


def hold_quantized(module: nn.Module, name: str, weight: QuantizedWeight) -> None:
    """Put bytes on the meta device in place of a module's parameter.

    Args:
        module: an `nn.Linear`, or any that only reads its parameter.
        name: of the parameter.
        weight: what is to be held.
    """
    parameter = module._parameters.pop(name)
    assert parameter is not None
    module.__dict__.setdefault(_NOTE, {})
    if isinstance(module, nn.Linear):
        assert type(module) is nn.Linear and name == "weight"
        module.__class__ = QuantizedLinear
    else:
        _read_as_property(module, name)
    _set_weight(module, name, weight)


def _set_weight(module: nn.Module, name: str, weight: QuantizedWeight) -> None:
    quantized_weights(module)[name] = weight
    packed, scales = weight.empty_bytes("meta")
    module._parameters[f"{name}_packed"] = nn.Parameter(packed, requires_grad=False)
    module._parameters[f"{name}_scales"] = nn.Parameter(scales, requires_grad=False)
    if isinstance(weight.format, FourBit) and weight.format.double_quant:
        whole = weight.whole_shape if weight.statistics_cut is not None else weight.shape
        num_nested = math.ceil(math.ceil(math.prod(whole) / BLOCK) / NESTED_BLOCK)
        # Bytes, or an engine would convert it to its own precision; real, since buffers always are.
        nested = torch.zeros(4 * (num_nested + 1), dtype=torch.uint8)
        module.register_buffer(f"{name}_nested", nested, persistent=False)


def cut_quantized(module: nn.Module, name: str, cut: Cut, tp_rank: int) -> None:
    """Leave a tp rank its part of a held weight that isn't filled yet."""
    weight = quantized_weights(module)[name]
    assert module._parameters[f"{name}_packed"].is_meta  # type: ignore[union-attr]
    part = weight.part(cut, tp_rank)
    if part.is_stored and part.cuts_through_blocks:
        raise ConfigError(
            f"tp_size: {len(cut.ranges)} ranks would cut through the blocks in which the checkpoint is quantized "
            f"(a {weight.format.name} weight of {' x '.join(map(str, weight.shape))}); use another tp_size, or the "
            "unquantized model"
        )
    _set_weight(module, name, part)


# What others see


def weight_names(module: nn.Module) -> list[str]:
    """A module's own weights: parameters, but for bytes, and what bytes stand for."""
    held = quantized_weights(module)
    of_bytes = {f"{name}_{kind}" for name in held for kind in ("packed", "scales")}
    there = [name for name, parameter in module._parameters.items() if parameter is not None]
    return [*held, *(name for name in there if name not in of_bytes)]


def weight_shape(module: nn.Module, name: str) -> tuple[int, ...]:
    """Of a module's own weight, on this rank before an engine cuts it."""
    held = quantized_weights(module).get(name)
    if held is not None:
        return held.shape
    parameter = module._parameters[name]
    assert parameter is not None
    return tuple(parameter.shape)


def dequantized(module: nn.Module, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """A module's held weight, where its bytes are all there; by default in the dtype that layers use."""
    weight = quantized_weights(module)[name]
    packed, scales = module._parameters[f"{name}_packed"], module._parameters[f"{name}_scales"]
    assert packed is not None and scales is not None
    nested = module._buffers.get(f"{name}_nested")
    return weight.dequantize(packed, scales, nested, dtype or weight.compute_dtype)


class QuantizedLinear(nn.Linear):
    """A linear layer with a held weight; made by `hold_quantized`."""

    weight_packed: Tensor
    weight_scales: Tensor

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out_features, in_features], dequantized; without a gradient."""
        return dequantized(self, "weight")

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class names it
        """As of `nn.Linear`, in the compute dtype; what comes out has the input's."""
        compute_dtype = quantized_weights(self)["weight"].compute_dtype
        bias = None if self.bias is None else self.bias.to(compute_dtype)
        with torch.autocast(input.device.type, enabled=False):
            output: Tensor = _QuantizedMatmul.apply(  # type: ignore[no-untyped-call]
                input.to(compute_dtype), bias, self, self.weight_packed, self.weight_scales
            )
        return output.to(input.dtype)


class _QuantizedMatmul(torch.autograd.Function):
    """Dequantizes for the forward and again for the backward, so that no whole weight is kept between them."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, bias: Tensor | None, module: nn.Module, *stored: Tensor) -> Tensor:
        # The parameters themselves are saved: engines that free and gather their data do so here as elsewhere.
        ctx.save_for_backward(*stored)
        ctx.module = module
        return nn.functional.linear(states, dequantized(module, "weight", states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = quantized_weights(ctx.module)["weight"]
        packed, scales = ctx.saved_tensors
        nested = ctx.module._buffers.get("weight_nested")
        to_states = to_bias = None
        if ctx.needs_input_grad[0]:
            to_states = gradient @ weight.dequantize(packed, scales, nested, gradient.dtype)
        if ctx.needs_input_grad[1]:
            to_bias = gradient.flatten(0, -2).sum(0)
        return to_states, to_bias, None, None, None


def _read_as_property(module: nn.Module, name: str) -> None:
    """Give one module a class of its own in which a weight is dequantized, once a forward."""
    original = type(module)
    cache = f"_{name}_in_forward"

    def read(self: nn.Module) -> Tensor:
        kept: Tensor | None = self.__dict__.get(cache)
        return dequantized(self, name) if kept is None else kept

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Not by hooks: an engine's own, which gather the bytes, must come before.
        kept = dequantized(self, name)
        states = next((value for value in (*args, *kwargs.values()) if _is_hidden(value)), kept)
        if not torch.is_autocast_enabled(states.device.type):
            kept = kept.to(states.dtype)  # what the module computes with besides
        self.__dict__[cache] = kept
        try:
            return original.forward(self, *args, **kwargs)
        finally:
            del self.__dict__[cache]

    module.__class__ = type(original.__name__, (original,), {name: property(read), "forward": forward})


def _is_hidden(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()
