"""Quantizing while loading: each rank reads and quantizes only the rows of bytes that it keeps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.errors import ConfigError
from hfpar.models.formats import BLOCK, MX_BLOCK, MXFP4, NESTED_BLOCK, EightBit, FourBit, dynamic_code
from hfpar.models.quantized import QuantizedWeight

ReadRows = Callable[[slice], Tensor]
"""Rows, along dimension 0, of this tp rank's part of a stored weight."""


@dataclass(frozen=True)
class Sharers:
    """Who else has a part of the same weight."""

    shard_group: dist.ProcessGroup | None = None
    """Ranks to which an engine deals the rows of bytes, in order; None: each has all."""
    tp_group: dist.ProcessGroup | None = None
    """Ranks among which tensor parallelism cuts the weight."""


@dataclass(frozen=True)
class Bytes:
    """Of a held weight: rows that this rank keeps, and the statistics of double quantization."""

    packed: Tensor
    scales: Tensor
    nested: Tensor | None


def quantize_rows(
    weight: QuantizedWeight, rows: slice, read: ReadRows, sharers: Sharers, device: torch.device
) -> Bytes:
    """Read and quantize rows of bytes. All who share the weight together.

    Args:
        weight: what is held.
        rows: of bytes, with a start and a stop.
        read: gives rows of the weight.
        sharers: who else has a part.
        device: where it is quantized.
    """
    form = weight.format
    assert isinstance(form, FourBit | EightBit), f"{form.name} is only stored"
    first, last = form.numbers(rows, weight.shape)
    per_index = math.prod(weight.shape[1:])
    begin, end = first // per_index, -(-last // per_index)
    values = read(slice(begin, end) if last > first else slice(0, 0))
    flat = values.to(device=device, dtype=weight.dtype).flatten()
    flat = flat[first - begin * per_index : last - begin * per_index] if last > first else flat[:0]
    if isinstance(form, EightBit):
        return _eight_bits(weight, flat.view(-1, weight.shape[-1]), sharers)
    return _four_bits(weight, form, rows, flat, sharers)


ReadStored = Callable[[str, tuple[slice, ...] | None], Tensor]
"""A tensor that a checkpoint holds for a weight, by what its name ends with; whole, or a slice of it."""


def stored_rows(weight: QuantizedWeight, rows: slice, read: ReadStored) -> Bytes:
    """Rows of bytes of a weight that the checkpoint holds quantized.

    Raises:
        ConfigError: bytes of another kind than the checkpoint's config says.
    """
    if isinstance(weight.format, MXFP4):
        return _stored_mxfp4(weight, rows, read)
    packed, scales, nested = read("", None), None, None
    if isinstance(weight.format, EightBit):
        packed, scales = packed.view(torch.uint8), read(".SCB", None).float().unsqueeze(1)
        if weight.cut is not None:
            packed = weight.cut.take(packed, weight.tp_rank)
            scales = weight.cut.take(scales, weight.tp_rank) if weight.cut.dim == 0 else scales
        return Bytes(packed[rows].clone(), scales.contiguous().view(torch.uint8)[rows].clone(), None)
    form = weight.format
    assert isinstance(form, FourBit)
    state = _stored_state(form, read)
    numbers, width = form.row_bytes(weight.shape)
    packed, scales = packed.flatten().view(torch.uint8), read(".absmax", None)
    if form.double_quant:
        nested = _stored_statistics(state, read)
    scales = scales.view(torch.uint8)
    if weight.statistics_cut is not None:
        packed = _take_blocks(weight, packed, BLOCK // 2)
        scales = _take_blocks(weight, scales, width * BLOCK // (2 * numbers))
    parts = [
        _filled_up(part, form.num_rows(weight.shape), size)[rows].clone()
        for part, size in ((packed, numbers), (scales, width))
    ]
    return Bytes(parts[0], parts[1], nested)


def _take_blocks(weight: QuantizedWeight, flat: Tensor, block_bytes: int) -> Tensor:
    cut = weight.statistics_cut
    assert cut is not None
    return cut.take(flat.view(-1, cut.size, block_bytes), weight.tp_rank).flatten()


def _filled_up(flat: Tensor, num_rows: int, width: int) -> Tensor:
    """Bytes in rows, the last one filled up with zeros."""
    filled = flat.new_zeros(num_rows * width)
    filled[: len(flat)] = flat
    return filled.view(num_rows, width)


def _stored_state(form: FourBit, read: ReadStored) -> dict[str, Any]:
    """What bitsandbytes notes beside a weight."""
    from bitsandbytes.utils import unpack_tensor_to_dict

    state: dict[str, Any] = unpack_tensor_to_dict(read(f".quant_state.bitsandbytes__{form.name}", None))
    found = (state["blocksize"], state.get("nested_blocksize"))
    if found != (BLOCK, NESTED_BLOCK if form.double_quant else None):
        scales = "no" if found[1] is None else f"blocks of {found[1]}"
        raise ConfigError(
            f"model_name_or_path: the checkpoint is quantized in blocks of {found[0]} with {scales} double "
            f"quantization; hfpar reads blocks of {BLOCK}, and what the checkpoint's config says of them; use the "
            "unquantized model"
        )
    return state


def _stored_statistics(state: dict[str, Any], read: ReadStored) -> Tensor:
    code = read(".nested_quant_map", None)
    if not torch.equal(code, dynamic_code(code.device)):
        raise ConfigError(
            "model_name_or_path: the checkpoint's scales are quantized by another map than bitsandbytes'"
        )
    offset = state["nested_offset"]
    return torch.cat([read(".nested_absmax", None).float(), torch.tensor([offset])]).view(torch.uint8)


def _stored_mxfp4(weight: QuantizedWeight, rows: slice, read: ReadStored) -> Bytes:
    """Stored as blocks [E, out, in / 32, 16] and scales [E, out, in / 32]."""
    outputs = weight.shape[2]
    begin, end = rows.start // outputs, -(-rows.stop // outputs)
    experts = slice(begin, end) if rows.stop > rows.start else slice(0, 0)
    indices: list[tuple[slice, ...]] = [(experts,)]
    if weight.cut is not None:
        ranges = weight.cut.ranges[weight.tp_rank]
        if weight.cut.dim == 2:
            indices = [(experts, slice(first, last)) for first, last in ranges]
        else:
            indices = [
                (experts, slice(None), slice(first // MX_BLOCK, last // MX_BLOCK)) for first, last in ranges
            ]
    dim = 1 if weight.cut is None or weight.cut.dim == 2 else 2
    inside = slice(rows.start - begin * outputs, rows.stop - begin * outputs)
    packed, scales = (
        torch.cat([read(name, index) for index in indices], dim).flatten(0, 1).flatten(1)[inside].contiguous()
        for name in ("_blocks", "_scales")
    )
    return Bytes(packed, scales, None)


def _eight_bits(weight: QuantizedWeight, values: Tensor, sharers: Sharers) -> Bytes:
    values = values.half()  # as bitsandbytes does before it quantizes
    scales = values.abs().amax(dim=1).float() if len(values) else values.new_zeros(0, dtype=torch.float32)
    if weight.cut is not None and weight.cut.dim == len(weight.shape) - 1:
        dist.all_reduce(scales, op=dist.ReduceOp.MAX, group=sharers.tp_group)
    packed = torch.round(values * (127.0 / scales.unsqueeze(1))).to(torch.int8)
    packed[scales == 0] = 0
    return Bytes(packed.view(torch.uint8), scales.unsqueeze(1).view(torch.uint8), None)


def _four_bits(weight: QuantizedWeight, form: FourBit, rows: slice, flat: Tensor, sharers: Sharers) -> Bytes:
    import bitsandbytes  # noqa: F401 - its operators

    num_rows = rows.stop - rows.start
    numbers_width, scales_width = form.row_bytes(weight.shape)
    filled = flat.new_zeros(num_rows * numbers_width * 2)
    filled[: len(flat)] = flat
    if num_rows:
        packed, absmax = torch.ops.bitsandbytes.quantize_4bit(filled, BLOCK, form.quant_type, torch.uint8)
    else:
        packed = filled.new_empty(0, dtype=torch.uint8)
        absmax = filled.new_empty(0, dtype=torch.float32)
    packed = packed.view(num_rows, numbers_width)
    if not form.double_quant:
        return Bytes(packed, absmax.view(torch.uint8).view(num_rows, scales_width), None)
    whole = _whole_statistics(weight, absmax, sharers)
    quantized, nested = _quantize_statistics(whole)
    if weight.statistics_cut is not None:
        mine = quantized.view(-1, weight.statistics_cut.size)
        quantized = weight.statistics_cut.take(mine, weight.tp_rank).flatten()
    all_scales = quantized.new_zeros(form.num_rows(weight.shape) * scales_width)
    all_scales[: len(quantized)] = quantized
    return Bytes(packed, all_scales.view(-1, scales_width)[rows].clone(), nested)


def _whole_statistics(weight: QuantizedWeight, absmax: Tensor, sharers: Sharers) -> Tensor:
    """Every block's scale, in the order of the whole weight (or of this part, if it is quantized by itself)."""
    num_blocks = -(-weight.numel // BLOCK)
    if sharers.shard_group is not None:
        absmax = _gather_in_order(absmax, sharers.shard_group)
    absmax = absmax[:num_blocks]
    if weight.statistics_cut is None:
        return absmax
    mine = absmax.view(-1, weight.statistics_cut.local_size)
    pieces = [torch.empty_like(mine) for _ in range(dist.get_world_size(sharers.tp_group))]
    dist.all_gather(pieces, mine.contiguous(), group=sharers.tp_group)
    return weight.statistics_cut.assemble(pieces).flatten()


def _gather_in_order(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Parts of different lengths, one after another."""
    size = torch.tensor([len(part)], device=part.device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    longest = max(int(one) for one in sizes)
    padded = part.new_zeros(longest)
    padded[: len(part)] = part
    parts = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([one[: int(length)] for one, length in zip(parts, sizes, strict=True)])


def _quantize_statistics(absmax: Tensor) -> tuple[Tensor, Tensor]:
    """Double quantization as bitsandbytes does it: (8-bit scales, bytes of their own scales and the offset)."""
    from bitsandbytes.functional import quantize_blockwise

    offset = absmax.mean()
    quantized, state = quantize_blockwise(absmax - offset, blocksize=NESTED_BLOCK)
    return quantized, torch.cat([state.absmax.float(), offset.float().view(1)]).view(torch.uint8)
