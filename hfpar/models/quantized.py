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
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from hfpar.models.cuts import Cut

BLOCK = 64
"""Numbers that share a scale in 4 bits (bitsandbytes' default)."""
NESTED_BLOCK = 256
"""Scales that share a scale under double quantization."""
_BLOCKS_PER_ROW = 4


@dataclass(frozen=True)
class FourBit:
    """nf4 or fp4 of bitsandbytes. A row of bytes holds 256 numbers of the flat weight."""

    quant_type: str
    double_quant: bool

    @property
    def name(self) -> str:
        """As in the settings."""
        return self.quant_type

    def num_rows(self, shape: tuple[int, ...]) -> int:
        """Rows of bytes of a weight of `shape`."""
        return -(-math.prod(shape) // (BLOCK * _BLOCKS_PER_ROW))

    def row_bytes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a row's numbers, and of its scales."""
        return BLOCK * _BLOCKS_PER_ROW // 2, _BLOCKS_PER_ROW * (1 if self.double_quant else 4)

    def numbers(self, rows: slice, shape: tuple[int, ...]) -> tuple[int, int]:
        """First and last + 1 of the flat weight's numbers in rows of bytes."""
        per_row, total = BLOCK * _BLOCKS_PER_ROW, math.prod(shape)
        return min(rows.start * per_row, total), min(rows.stop * per_row, total)

    def cut_of_statistics(self, cut: Cut, shape: tuple[int, ...]) -> Cut | None:
        """How a cut of a weight of `shape` deals its blocks, as [rows, blocks in a row]; None: it cuts through them."""
        trail = math.prod(shape[cut.dim + 1 :])
        borders = [border * trail for ranges in cut.ranges for pair in ranges for border in pair]
        lead = math.prod(shape[: cut.dim])
        if any(border % BLOCK for border in borders) or (lead > 1 and cut.size * trail % BLOCK):
            return None
        ranges = tuple(
            tuple((first * trail // BLOCK, last * trail // BLOCK) for first, last in own)
            for own in cut.ranges
        )
        return Cut(1, -(-cut.size * trail // BLOCK), ranges, cut.copies)

    def dequantize(
        self,
        weight: QuantizedWeight,
        packed: Tensor,
        scales: Tensor,
        nested: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The numbers that all rows of bytes stand for."""
        import bitsandbytes  # noqa: F401 - its operators

        num_blocks = -(-weight.numel // BLOCK)
        if not self.double_quant:
            absmax = scales.flatten().view(torch.float32)[:num_blocks]
        else:
            assert nested is not None
            statistics = nested.view(torch.float32)
            absmax = self._dequantize_scales(weight, scales.flatten()[:num_blocks], statistics[:-1])
            absmax = absmax + statistics[-1]
        flat = packed.flatten()[: -(-weight.numel // 2)]
        result: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            flat, absmax, BLOCK, self.quant_type, weight.shape, dtype
        )
        return result

    def _dequantize_scales(self, weight: QuantizedWeight, scales: Tensor, nested_scales: Tensor) -> Tensor:
        code = _dynamic_code(scales.device)
        if weight.statistics_cut is None:
            result: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
                scales, nested_scales, code, NESTED_BLOCK, torch.float32
            )
            return result
        number = weight.statistics_cut.take(_block_numbers(weight, scales.device), weight.tp_rank).flatten()
        return code[scales.long()] * nested_scales[number // NESTED_BLOCK]


@dataclass(frozen=True)
class EightBit:
    """int8 of bitsandbytes: a scale for each row of the weight, which is a row of bytes."""

    @property
    def name(self) -> str:
        """As in the settings."""
        return "int8"

    def num_rows(self, shape: tuple[int, ...]) -> int:
        """Rows of bytes of a weight of `shape`."""
        return math.prod(shape[:-1])

    def row_bytes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a row's numbers, and of its scale."""
        return shape[-1], 4

    def numbers(self, rows: slice, shape: tuple[int, ...]) -> tuple[int, int]:
        """First and last + 1 of the flat weight's numbers in rows of bytes."""
        return rows.start * shape[-1], rows.stop * shape[-1]

    def cut_of_statistics(self, cut: Cut, shape: tuple[int, ...]) -> Cut | None:
        """None: a rank has its rows' scales, also where it has a part of their columns."""
        return None

    def dequantize(
        self,
        weight: QuantizedWeight,
        packed: Tensor,
        scales: Tensor,
        nested: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The numbers that all rows of bytes stand for."""
        factors = scales.view(torch.float32).mul(1.0 / 127.0)
        return packed.view(torch.int8).to(dtype).mul_(factors).view(weight.shape)


Format = FourBit | EightBit


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
        return isinstance(self.format, FourBit) and self.cut is not None and self.statistics_cut is None

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


@lru_cache
def _dynamic_code(device: torch.device) -> Tensor:
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


def _block_numbers(weight: QuantizedWeight, device: torch.device) -> Tensor:
    """Of the whole weight, [rows, blocks in a row] as `statistics_cut` has them."""
    assert weight.statistics_cut is not None
    total = -(-math.prod(weight.whole_shape) // BLOCK)
    return torch.arange(total, device=device).view(-1, weight.statistics_cut.size)


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
    _set_weight(module, name, weight.part(cut, tp_rank))


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
    cache = f"_{name}_in_forward"

    def read(self: nn.Module) -> Tensor:
        kept: Tensor | None = self.__dict__.get(cache)
        return dequantized(self, name) if kept is None else kept

    def keep(self: nn.Module, args: Any) -> None:
        self.__dict__[cache] = dequantized(self, name)

    def drop(self: nn.Module, args: Any, output: Any) -> None:
        self.__dict__.pop(cache, None)

    original = type(module)
    module.__class__ = type(original.__name__, (original,), {name: property(read)})
    module.register_forward_pre_hook(keep)
    module.register_forward_hook(drop, always_call=True)
