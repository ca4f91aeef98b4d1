"""How the numbers of one weight are held in few bits. Pure.

Bytes lie in rows that are dealt to ranks whole. A row's numbers and its scales are held apart, since kernels want each
of them in one piece.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfpar.models.cuts import Cut

if TYPE_CHECKING:
    from hfpar.models.quantized import QuantizedWeight

BLOCK = 64
"""Numbers that share a scale in 4 bits (bitsandbytes' default)."""
NESTED_BLOCK = 256
"""Scales that share a scale under double quantization."""
MX_BLOCK = 32
"""Numbers that share a scale in mxfp4."""
_BLOCKS_PER_ROW = 4


class Format(ABC):
    """One way of holding numbers. The rows of bytes of a weight's numbers and of its scales correspond."""

    @property
    @abstractmethod
    def name(self) -> str:
        """As in the settings."""

    @abstractmethod
    def num_rows(self, shape: tuple[int, ...]) -> int:
        """Rows of bytes of a weight of `shape`."""

    @abstractmethod
    def row_bytes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a row's numbers, and of its scales."""

    @abstractmethod
    def dequantize(
        self,
        weight: QuantizedWeight,
        packed: Tensor,
        scales: Tensor,
        nested: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The numbers that all rows of bytes stand for."""

    def cut_of_statistics(self, cut: Cut, shape: tuple[int, ...]) -> Cut | None:
        """How a cut of a weight of `shape` deals blocks with statistics of the whole; None: there are no such."""
        return None

    def cuts_through_blocks(self, weight: QuantizedWeight) -> bool:
        """Whether a part for a tp rank has other numbers than the whole weight has there."""
        return False


@dataclass(frozen=True)
class FourBit(Format):
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

    def cuts_through_blocks(self, weight: QuantizedWeight) -> bool:
        """Each part is then quantized by itself."""
        return weight.cut is not None and weight.statistics_cut is None

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
        num_bytes = -(-weight.numel // 2)
        # Kernels work row by row, and take no odd ones.
        shape = weight.shape if weight.shape[-1] % 2 == 0 else (1, 2 * num_bytes)
        result: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
            packed.flatten()[:num_bytes], absmax, BLOCK, self.quant_type, shape, dtype
        )
        return result.flatten()[: weight.numel].view(weight.shape)

    def _dequantize_scales(self, weight: QuantizedWeight, scales: Tensor, nested_scales: Tensor) -> Tensor:
        code = dynamic_code(scales.device)
        if weight.statistics_cut is None:
            result: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
                scales, nested_scales, code, NESTED_BLOCK, torch.float32
            )
            return result
        return code[scales.long()] * nested_scales[_nested_numbers(weight, scales.device)]


@dataclass(frozen=True)
class EightBit(Format):
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


@dataclass(frozen=True)
class MXFP4(Format):
    """What GPT-OSS stores: experts [E, in, out] as rows of `in` numbers, in blocks of 32 that share a power of two."""

    @property
    def name(self) -> str:
        """As in the settings."""
        return "mxfp4"

    def num_rows(self, shape: tuple[int, ...]) -> int:
        """Rows of bytes of a weight of `shape`."""
        experts, _, outputs = shape
        return experts * outputs

    def row_bytes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Of a row's numbers, and of its scales."""
        return shape[1] // 2, shape[1] // MX_BLOCK

    def cuts_through_blocks(self, weight: QuantizedWeight) -> bool:
        """Blocks run along the inputs."""
        if weight.cut is None or weight.cut.dim != 1:
            return False
        return any(border % MX_BLOCK for own in weight.cut.ranges for pair in own for border in pair)

    def dequantize(
        self,
        weight: QuantizedWeight,
        packed: Tensor,
        scales: Tensor,
        nested: Tensor | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """The numbers that all rows of bytes stand for."""
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        experts, inputs, outputs = weight.shape
        blocks = packed.view(experts, outputs, inputs // MX_BLOCK, MX_BLOCK // 2)
        exponents = scales.view(experts, outputs, inputs // MX_BLOCK)
        return convert_moe_packed_tensors(blocks, exponents, dtype=dtype)


@lru_cache
def dynamic_code(device: torch.device) -> Tensor:
    """The 256 values that a byte can stand for under double quantization."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


@lru_cache(maxsize=64)
def _nested_numbers(weight: QuantizedWeight, device: torch.device) -> Tensor:
    """Which nested scale each block of a part has; kept, for it is the same in every layer."""
    cut = weight.statistics_cut
    assert cut is not None
    total = -(-math.prod(weight.whole_shape) // BLOCK)
    numbers = torch.arange(total, dtype=torch.int32, device=device).view(-1, cut.size)
    return cut.take(numbers, weight.tp_rank).flatten() // NESTED_BLOCK
