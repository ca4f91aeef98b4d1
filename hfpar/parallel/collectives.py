"""Collectives of tensor parallelism with their gradients.

A *region* is what tensor-parallel ranks compute together: each a part of it, whose sum is the whole. What goes in is
the same on every rank (`enter`, or `gather_tokens`), what comes out is summed (`leave`, or `scatter_tokens`). Inside,
each rank has its part of every gradient; so weights that all ranks hold are taken through `enter`, too.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053; tokens sharded between regions: Korthikanti et al., Reducing
Activation Recomputation, arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.models.cuts import Cut


def enter(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Into a region: the tensor itself; backward, the sum of all ranks' gradients."""
    result: Tensor = _Enter.apply(tensor, group)
    return result


def leave(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Out of a region: the sum over ranks; backward, the gradient itself."""
    result: Tensor = _Leave.apply(tensor, group)
    return result


def gather_tokens(tensor: Tensor, dim: int, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
    """Into a region from sharded tokens: all of them; backward, each rank's share of the summed gradients.

    Args:
        tensor: `ceil(num_tokens / tp_size)` tokens along `dim`; the last ranks' may be padding.
        dim: of the tokens.
        num_tokens: in all.
        group: the tp ranks.
    """
    result: Tensor = _GatherTokens.apply(tensor, dim, num_tokens, group)
    return result


def scatter_tokens(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Out of a region to sharded tokens: this rank's of the sum over ranks; backward, all ranks' gradients."""
    result: Tensor = _ScatterTokens.apply(tensor, dim, group)
    return result


def gather_features(tensor: Tensor, cut: Cut, group: dist.ProcessGroup) -> Tensor:
    """Within a region: the whole of the last dimension, of which each rank has its part.

    Backward, this rank's part of the summed gradients; nothing for a copy of what another rank has.
    """
    result: Tensor = _GatherFeatures.apply(tensor, cut, group)
    return result


def gather_whole(local: Tensor, cut: Cut, group: dist.ProcessGroup, device: torch.device) -> Tensor:
    """A whole weight of every rank's part, on `device`, which the group's backend must know. No gradient."""
    local = local.detach().to(device).contiguous()
    pieces = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
    dist.all_gather(pieces, local, group=group)
    return cut.assemble(pieces)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _sum(gradient, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(tensor, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, num_tokens: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group = dim, group
        return _all_gather(tensor, dim, group).narrow(dim, 0, num_tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _reduce_scatter(gradient, ctx.dim, ctx.group), None, None, None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.group, ctx.num_tokens = dim, group, tensor.shape[dim]
        return _reduce_scatter(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.dim, ctx.group).narrow(ctx.dim, 0, ctx.num_tokens), None, None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: Cut, group: dist.ProcessGroup) -> Tensor:
        ctx.cut, ctx.group = cut, group
        last_dim = along_last(cut, tensor)
        pieces = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(pieces, tensor.contiguous(), group=group)
        return last_dim.assemble(pieces)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        rank = dist.get_rank(ctx.group)
        part = along_last(ctx.cut, gradient).take(_sum(gradient, ctx.group), rank)
        return part if rank % ctx.cut.copies == 0 else torch.zeros_like(part), None, None


def along_last(cut: Cut, tensor: Tensor) -> Cut:
    """A cut of a weight's rows as one of the features that they make."""
    return Cut(tensor.dim() - 1, cut.size, cut.ranges, cut.copies)


def _sum(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = tensor.contiguous().clone()
    dist.all_reduce(total, group=group)
    return total


def _all_gather(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Rank after rank along `dim`."""
    first = tensor.movedim(dim, 0).contiguous()
    gathered = first.new_empty(dist.get_world_size(group) * first.shape[0], *first.shape[1:])
    dist.all_gather_into_tensor(gathered, first, group=group)
    return gathered.movedim(0, dim)


def _reduce_scatter(tensor: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's equal share along `dim` of the sum, filled up with zeros at the end."""
    first, size = tensor.movedim(dim, 0), dist.get_world_size(group)
    share = -(-first.shape[0] // size)
    padded = first.new_zeros(share * size, *first.shape[1:])
    padded[: first.shape[0]] = first
    result = first.new_empty(share, *first.shape[1:])
    dist.reduce_scatter_tensor(result, padded, group=group)
    return result.movedim(0, dim)
