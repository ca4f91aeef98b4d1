"""Which part of a weight each tensor-parallel rank keeps. Pure, but for the note that a module carries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Range = tuple[int, int]
"""(first, last + 1)"""


@dataclass(frozen=True)
class Cut:
    """How one dimension of a weight is dealt to the ranks; the others stay whole."""

    dim: int
    size: int
    """Of the whole weight along `dim`."""
    ranges: tuple[tuple[Range, ...], ...]
    """[tp_size] what each rank keeps of it, in order. Ranks with less than others fill up with zeros at the end."""
    copies: int = 1
    """Neighbours that keep the same part (key-value heads, where there are fewer of them than ranks)."""

    @property
    def local_size(self) -> int:
        """Along `dim`, the same on every rank."""
        return max(_length(ranges) for ranges in self.ranges)

    def local_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Of a rank's part of a weight of `shape`."""
        return (*shape[: self.dim], self.local_size, *shape[self.dim + 1 :])

    def whole_shape(self, local_shape: Sequence[int]) -> tuple[int, ...]:
        """Of the weight of which a part has `local_shape`."""
        return (*local_shape[: self.dim], self.size, *local_shape[self.dim + 1 :])

    def slices(self, rank: int, rows: slice = slice(None)) -> list[tuple[slice, ...]]:
        """Indices into the whole weight of what a rank keeps, one after another along `dim`, without the zeros.

        Args:
            rank: in the tp group.
            rows: of the rank's part, along dimension 0: all, or those that an engine leaves this process.
        """
        if self.dim > 0:
            between = (slice(None),) * (self.dim - 1)
            return [(rows, *between, slice(first, last)) for first, last in self.ranges[rank]]
        start, stop, _ = rows.indices(self.local_size)
        found: list[tuple[slice, ...]] = []
        begin = 0
        for first, last in self.ranges[rank]:
            low, high = max(start - begin, 0), min(stop - begin, last - first)
            if low < high:
                found.append((slice(first + low, first + high),))
            begin += last - first
        return found

    def take(self, whole: Any, rank: int, rows: slice = slice(None)) -> Tensor:
        """A rank's part of the whole weight: a tensor, or a slice of a safetensors file."""
        pieces = [whole[index] for index in self.slices(rank, rows)] or [whole[(slice(0, 0),)]]
        like = pieces[0]
        start, stop, _ = rows.indices(self.local_size)
        expected = stop - start if self.dim == 0 else self.local_size
        missing = expected - sum(piece.shape[self.dim] for piece in pieces)
        if missing:
            shape = (*like.shape[: self.dim], missing, *like.shape[self.dim + 1 :])
            pieces.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        return torch.cat(pieces, dim=self.dim) if len(pieces) > 1 else pieces[0].clone()

    def assemble(self, pieces: Sequence[Tensor]) -> Tensor:
        """The whole weight, of every rank's part."""
        whole = pieces[0].new_empty(self.whole_shape(pieces[0].shape))
        for ranges, piece in zip(self.ranges, pieces, strict=True):
            begin = 0
            for first, last in ranges:
                part = piece.narrow(self.dim, begin, last - first)
                whole.narrow(self.dim, first, last - first).copy_(part)
                begin += last - first
        return whole


def cut_evenly(dim: int, size: int, tp_size: int, sections: int = 1) -> Cut:
    """Equal contiguous parts; of fused matrices, such a part of each of the equal sections."""
    width = size // sections
    step = width // tp_size
    assert step * tp_size * sections == size, f"{size} in {sections} x {tp_size} parts"
    return Cut(
        dim,
        size,
        tuple(
            tuple((s * width + rank * step, s * width + (rank + 1) * step) for s in range(sections))
            for rank in range(tp_size)
        ),
    )


def cut_heads(dim: int, size: int, num_heads: int, tp_size: int) -> Cut:
    """Whole heads; where there are fewer than ranks, neighbours keep the same one."""
    if num_heads >= tp_size:
        return cut_evenly(dim, size, tp_size)
    copies, width = tp_size // num_heads, size // num_heads
    assert copies * num_heads == tp_size, f"{num_heads} heads on {tp_size} ranks"
    heads = [rank // copies for rank in range(tp_size)]
    return Cut(dim, size, tuple(((head * width, (head + 1) * width),) for head in heads), copies)


def cut_vocabulary(dim: int, size: int, tp_size: int) -> Cut:
    """Contiguous parts, the last ones shorter where the vocabulary doesn't divide."""
    step = -(-size // tp_size)
    bounds = [min(rank * step, size) for rank in range(tp_size + 1)]
    return Cut(
        dim, size, tuple(((first, last),) for first, last in zip(bounds[:-1], bounds[1:], strict=True))
    )


def join_cuts(cuts: Sequence[Cut]) -> Cut:
    """Of a matrix that holds several one after another, such as q, k and v."""
    offset = 0
    ranges: list[tuple[Range, ...]] = [()] * len(cuts[0].ranges)
    for cut in cuts:
        ranges = [
            (*before, *((first + offset, last + offset) for first, last in own))
            for before, own in zip(ranges, cut.ranges, strict=True)
        ]
        offset += cut.size
    return replace(cuts[0], size=offset, ranges=tuple(ranges))


def _length(ranges: Sequence[Range]) -> int:
    return sum(last - first for first, last in ranges)


# The note on a module

_NOTE = "_hfpar_cuts"


def note_cut(module: nn.Module, name: str, cut: Cut) -> None:
    """Remember that a module's parameter is a part."""
    module.__dict__.setdefault(_NOTE, {})[name] = cut


def cut_of(module: nn.Module, name: str) -> Cut | None:
    """How a module's own parameter is cut; None: it is whole."""
    cut: Cut | None = module.__dict__.get(_NOTE, {}).get(name)
    return cut


def cuts_of(model: nn.Module) -> dict[str, Cut]:
    """Every cut parameter of a model, by each of its names."""
    return {
        f"{prefix}.{name}" if prefix else name: cut
        for prefix, module in model.named_modules()
        for name, cut in module.__dict__.get(_NOTE, {}).items()
    }
