"""Ulysses: an all-to-all turns "some tokens, all heads" into "all tokens, some heads", and back.

Source: Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509. Here one collective carries q, k and v, and one more
the output; head counts needn't divide.

Bytes that a rank sends in a layer, with t local tokens, of which the others get theirs of `e` bytes an element:

    forward    e * t * sum over other ranks r of (hq_r * D + hk_r * (D + Dv))     q, k and v
             + e * t * (sp - 1) * hq * Dv                                         the output
    backward   what it received forward: gradients go back where values came from

hq_r and hk_r are the query and key-value heads of rank r, see `split_heads`. With counts that divide, that is
e * t * (sp - 1) / sp * (H * D + Hkv * (D + Dv) + H * Dv) either way, whatever T is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Range = tuple[int, int]


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each rank computes."""

    query: tuple[Range, ...]
    """[sp_size] (first, last + 1)"""
    kv: tuple[Range, ...]
    """[sp_size] the key-value heads that those queries use; neighbours may share one"""

    group: int
    """Query heads of each key-value head."""

    def kv_of_query(self, sp_rank: int) -> list[int] | None:
        """For each local query head, its local key-value head; None where each of these has equally many."""
        first, last = self.query[sp_rank]
        num_kv = self.kv[sp_rank][1] - self.kv[sp_rank][0]
        used = [head // self.group - self.kv[sp_rank][0] for head in range(first, last)]
        per_kv, rest = divmod(last - first, num_kv)
        even = not rest and used == [head // per_kv for head in range(last - first)]
        return None if even else used


def split_heads(num_heads: int, num_kv_heads: int, sp_size: int) -> HeadSplit:
    """Deal query heads evenly, in order, and to each rank the key-value heads that they use: no more travel.

    Args:
        num_heads: H.
        num_kv_heads: Hkv, a divisor of H.
        sp_size: ranks, at most H.
    """
    group = num_heads // num_kv_heads
    bounds = [-(-rank * num_heads // sp_size) for rank in range(sp_size + 1)]
    query = tuple(zip(bounds[:-1], bounds[1:], strict=True))
    kv = tuple((first // group, (last - 1) // group + 1) for first, last in query)
    return HeadSplit(query, kv, group)


def gather_tokens(
    query: Tensor, key: Tensor, value: Tensor, heads: HeadSplit, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """All tokens of this rank's heads: [1, H, T/sp, D] -> [1, hq, T, D], and so for key and value.

    Args:
        query: [1, H, T/sp, D].
        key: [1, Hkv, T/sp, D].
        value: [1, Hkv, T/sp, Dv].
        heads: who gets which.
        group: the sp ranks.
    """
    tensors: Any = _TokensToHeads.apply(
        (heads.query, heads.kv, heads.kv), group, *(_by_token(tensor) for tensor in (query, key, value))
    )
    # [T, h, D] -> [1, h, T, D]; kernels are faster where a head's tokens lie together.
    query, key, value = (tensor.transpose(0, 1).contiguous()[None] for tensor in tensors)
    return query, key, value


def scatter_tokens(output: Tensor, heads: HeadSplit, group: dist.ProcessGroup) -> Tensor:
    """This rank's tokens of all heads: [1, T, hq, Dv] -> [1, T/sp, H, Dv]."""
    (tokens,) = _HeadsToTokens.apply((heads.query,), group, output[0])
    return tokens[None]


def _by_token(states: Tensor) -> Tensor:
    """[1, H, t, D] -> [t, H, D]."""
    return states[0].transpose(0, 1)


class _TokensToHeads(torch.autograd.Function):
    """[t, H_i, D_i] of all heads -> [T, h_i, D_i] of the local ones, for several tensors in one exchange."""

    @staticmethod
    def forward(
        ctx: Any, ranges: tuple[tuple[Range, ...], ...], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.group = ranges, group
        ctx.num_heads = [tensor.shape[1] for tensor in tensors]
        return _tokens_to_heads(tensors, ranges, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_heads_to_tokens(gradients, ctx.ranges, ctx.num_heads, ctx.group)


class _HeadsToTokens(torch.autograd.Function):
    """The way back; heads that several ranks had are summed."""

    @staticmethod
    def forward(
        ctx: Any, ranges: tuple[tuple[Range, ...], ...], group: dist.ProcessGroup, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.ranges, ctx.group = ranges, group
        num_heads = [max(last for _, last in of_ranks) for of_ranks in ranges]
        return _heads_to_tokens(tensors, ranges, num_heads, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return None, None, *_tokens_to_heads(gradients, ctx.ranges, ctx.group)


def _tokens_to_heads(
    tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], group: dist.ProcessGroup
) -> tuple[Tensor, ...]:
    """Send each rank its heads of the local tokens; [t, H_i, D_i] -> [T, h_i, D_i]."""
    sp_size, sp_rank, num_tokens = dist.get_world_size(group), dist.get_rank(group), tensors[0].shape[0]
    widths = _widths(tensors, ranges, sp_size)
    sent = tensors[0].new_empty(num_tokens * sum(widths))
    for rank, part in enumerate(sent.split([num_tokens * width for width in widths])):
        columns = part.view(num_tokens, widths[rank]).split(
            [
                (of_ranks[rank][1] - of_ranks[rank][0]) * tensor.shape[2]
                for tensor, of_ranks in _zip(tensors, ranges)
            ],
            dim=1,
        )
        for (tensor, of_ranks), column in zip(_zip(tensors, ranges), columns, strict=True):
            first, last = of_ranks[rank]
            column.unflatten(1, (last - first, tensor.shape[2])).copy_(tensor[:, first:last])
    width = widths[sp_rank]
    received = sent.new_empty(sp_size * num_tokens, width)  # [T, h]: rank after rank is token after token
    dist.all_to_all_single(
        received.view(-1),
        sent,
        [num_tokens * width] * sp_size,
        [num_tokens * width for width in widths],
        group=group,
    )
    sizes = [(last - first, t.shape[2]) for t, (first, last) in _local(tensors, ranges, sp_rank)]
    columns = received.split([heads * dim for heads, dim in sizes], dim=1)
    return tuple(column.unflatten(1, size) for column, size in zip(columns, sizes, strict=True))


def _heads_to_tokens(
    tensors: Sequence[Tensor],
    ranges: Sequence[Sequence[Range]],
    num_heads: Sequence[int],
    group: dist.ProcessGroup,
) -> tuple[Tensor, ...]:
    """Send each rank its tokens of the local heads; [T, h_i, D_i] -> [t, H_i, D_i]."""
    sp_size, sp_rank = dist.get_world_size(group), dist.get_rank(group)
    num_tokens = tensors[0].shape[0] // sp_size
    widths = _widths(tensors, ranges, sp_size)
    flat = [tensor.flatten(1) for tensor in tensors]
    sent = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, dim=1)  # [T, h]
    received = sent.new_empty(num_tokens * sum(widths))
    dist.all_to_all_single(
        received,
        sent.view(-1),
        [num_tokens * width for width in widths],
        [num_tokens * widths[sp_rank]] * sp_size,
        group=group,
    )
    parts = [
        part.view(num_tokens, width)
        for part, width in zip(received.split([num_tokens * width for width in widths]), widths, strict=True)
    ]
    outputs, begin = [], [0] * sp_size
    for (tensor, of_ranks), total in zip(_zip(tensors, ranges), num_heads, strict=True):
        dim = tensor.shape[2]
        output = tensor.new_zeros(num_tokens, total, dim)
        for rank, (first, last) in enumerate(of_ranks):
            size = (last - first) * dim
            column = parts[rank][:, begin[rank] : begin[rank] + size]
            output[:, first:last] += column.unflatten(1, (last - first, dim))
            begin[rank] += size
        outputs.append(output)
    return tuple(outputs)


def _zip(
    tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]]
) -> list[tuple[Tensor, Sequence[Range]]]:
    return list(zip(tensors, ranges, strict=True))


def _local(
    tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], rank: int
) -> list[tuple[Tensor, Range]]:
    return [(tensor, of_ranks[rank]) for tensor, of_ranks in _zip(tensors, ranges)]


def _widths(tensors: Sequence[Tensor], ranges: Sequence[Sequence[Range]], sp_size: int) -> list[int]:
    """Elements of one token that belong to each rank."""
    return [
        sum((last - first) * tensor.shape[2] for tensor, (first, last) in _local(tensors, ranges, rank))
        for rank in range(sp_size)
    ]
