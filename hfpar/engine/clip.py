"""The global gradient norm, for gradients that lie whole or in shards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hfpar.models.cuts import Cut

_BLOCK = 4096


def clip_and_step(
    optimizer: Optimizer,
    scaler: torch.amp.GradScaler,
    parameters: Sequence[tuple[nn.Parameter, Cut | None]],
    max_grad_norm: float | None,
    *,
    group: dist.ProcessGroup | None,
    tp_group: dist.ProcessGroup | None,
) -> float:
    """Unscale, clip, update and drop the gradients; returns the global norm before clipping.

    Args:
        optimizer: of `parameters`.
        scaler: of fp16; disabled otherwise.
        parameters: what is trained, and which of it is a part for a tp rank.
        max_grad_norm: bound on the norm; None: no clipping.
        group: the ranks that hold the shards; None if nothing is sharded.
        tp_group: the ranks that hold the parts; None if nothing is cut.
    """
    scaler.unscale_(optimizer)
    if scaler.is_enabled() and tp_group is not None:
        for found_inf in scaler._check_inf_per_device(optimizer).values():  # or some ranks would step alone
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=tp_group)
    with_gradient = [(parameter.grad, cut) for parameter, cut in parameters if parameter.grad is not None]
    gradients = [gradient for gradient, _ in with_gradient]
    norm = global_grad_norm(gradients, group, [cut for _, cut in with_gradient], tp_group)
    clip_gradients(gradients, norm, max_grad_norm)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return float(norm)


def global_grad_norm(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    cuts: Sequence[Cut | None] | None = None,
    tp_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """The L2 norm over all gradients, each element counted once.

    Args:
        gradients: whole on every rank, or DTensors sharded over `group`.
        group: the ranks that hold the shards; None if nothing is sharded.
        cuts: of each gradient, if it is a part for a tp rank; None: none is.
        tp_group: the ranks that hold the parts; None if nothing is cut.

    Returns:
        float64 scalar, the same on every rank.
    """
    device = gradients[0].device if gradients else torch.device("cpu")
    squares = torch.zeros(2, 2, dtype=torch.float64, device=device)  # [whole or cut, whole or sharded]
    for gradient, cut in zip(gradients, cuts or [None] * len(gradients), strict=True):
        is_sharded = isinstance(gradient, DTensor)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        squares[int(cut is not None), int(is_sharded)] += _sum_of_squares(local) / (cut.copies if cut else 1)
    if group is not None:
        sharded = squares[:, 1].contiguous()
        dist.all_reduce(sharded, group=group)
        squares[:, 1] = sharded
    if tp_group is not None:
        dist.all_reduce(squares[1], group=tp_group)
    return squares.sum().sqrt()


def clip_gradients(gradients: Sequence[Tensor], norm: Tensor, max_grad_norm: float | None) -> None:
    """Scale all gradients in place so that their norm is at most `max_grad_norm` (torch's rule: eps 1e-6)."""
    if max_grad_norm is None:
        return
    factor = float((max_grad_norm / (norm + 1e-6)).clamp(max=1.0))
    if factor < 1.0:
        for gradient in gradients:
            (gradient.to_local() if isinstance(gradient, DTensor) else gradient).mul_(factor)


def _sum_of_squares(gradient: Tensor) -> Tensor:
    """In float64, of fp32 norms of short blocks.

    One fp32 norm of a large tensor adds up too many small terms in a row: over an embedding of 28 M elements a
    CPU's result is 1.6e-3 too low, and depends on how an engine cuts the tensor. All in float64 takes 20 times
    as long.
    """
    flat = gradient.flatten()
    whole = flat.numel() // _BLOCK * _BLOCK
    blocks = torch.linalg.vector_norm(flat[:whole].view(-1, _BLOCK), dim=1, dtype=torch.float32)
    rest = torch.linalg.vector_norm(flat[whole:], dtype=torch.float32)
    return blocks.double().square().sum() + rest.double().square()
