"""The vocabulary over tp ranks: each has some rows of the embedding and of the head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpar.models.cuts import Cut
from hfpar.parallel.collectives import gather_features
from hfpar.parallel.layout import Layout

_NOTE = "_hfpar_vocabulary"


@dataclass(frozen=True)
class VocabularyShard:
    """The words of which this rank computes logits."""

    start: int
    size: int
    """Of them; the local logits after these are padding."""
    group: dist.ProcessGroup
    enter: Callable[[Tensor], Tensor]
    """Hidden states into the region: [N, H] that label tokens have, or all of a stream's tokens."""
    tokens_sharded: bool
    """Whether the head is given a share of the tokens: they enter before label tokens are picked."""


def vocabulary_of(head: nn.Module) -> VocabularyShard | None:
    """A head's shard; None: it has all words."""
    shard: VocabularyShard | None = head.__dict__.get(_NOTE)
    return shard


def shard_embedding(
    embedding: nn.Module,
    layers: Sequence[nn.Module],
    cut: Cut,
    layout: Layout,
    *,
    leave: Callable[[Tensor], Tensor],
) -> None:
    """Look up the words of this rank, zeros for the others, and sum over ranks.

    Args:
        embedding: as the model calls it.
        layers: the embedding layers in it.
        cut: of their rows.
        layout: the rank's place.
        leave: out of the region.
    """
    start, stop = _words(cut, layout.tp_rank)
    for layer in layers:
        module: Any = layer
        module.num_embeddings = cut.local_size
        if module.padding_idx is not None:
            module.padding_idx = module.padding_idx - start if start <= module.padding_idx < stop else None
    original = embedding.forward

    def forward(self: nn.Module, input_ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_mine = (input_ids >= start) & (input_ids < stop)
        rows: Tensor = original((input_ids - start).where(is_mine, 0), *args, **kwargs)
        return leave(rows.where(is_mine[..., None], 0))

    embedding.forward = MethodType(forward, embedding)  # type: ignore[method-assign]


def shard_head(head: nn.Module, cut: Cut, layout: Layout, *, enter: Callable[[Tensor], Tensor]) -> None:
    """Note the head's words for the loss; a call for logits, as in generation, gathers them.

    Args:
        head: as the model calls it.
        cut: of its rows.
        layout: the rank's place.
        enter: hidden states into the region.
    """
    start, stop = _words(cut, layout.tp_rank)
    group = layout.tp_group
    head.__dict__[_NOTE] = VocabularyShard(start, stop - start, group, enter, layout.tp_sequence)
    original = head.forward

    def forward(self: nn.Module, hidden: Tensor, *args: Any, sharded: bool = False, **kwargs: Any) -> Tensor:
        if sharded:
            result: Tensor = original(hidden, *args, **kwargs)
            return result
        return gather_features(original(enter(hidden), *args, **kwargs), cut, group)

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]


def _words(cut: Cut, tp_rank: int) -> tuple[int, int]:
    ((first, last),) = cut.ranges[tp_rank]
    return first, last


def sharded_cross_entropy(logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:
    """Summed cross-entropy of logits of which each rank has some words; the same on every rank.

    Args:
        logits: [n, local words], fp32, -inf for padding.
        targets: [n], in the whole vocabulary.
        shard: this rank's words.
    """
    loss: Tensor = _ShardedCrossEntropy.apply(logits, targets, shard)
    return loss


class _ShardedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, shard: VocabularyShard) -> Tensor:  # type: ignore[override]
        loss, exponentials, total, local = softmax_parts(logits.clone(), targets, shard)
        ctx.save_for_backward(exponentials.div_(total), *local)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        probabilities, rows, words = ctx.saved_tensors
        result = probabilities.clone()
        result[rows, words] -= 1
        return result * gradient, None, None


def softmax_parts(
    logits: Tensor, targets: Tensor, shard: VocabularyShard
) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """What loss and gradient of a chunk of logits are made of; the logits' memory is used again.

    Args:
        logits: [n, local words], fp32.
        targets: [n], in the whole vocabulary.
        shard: this rank's words.

    Returns:
        The summed loss of all words; exp(logits - their maximum) [n, local words]; its sum over all ranks' words
        [n, 1]; and the (row, local word) of the targets that this rank has.
    """
    local_targets = targets - shard.start
    rows = ((local_targets >= 0) & (local_targets < shard.size)).nonzero()[:, 0]
    words = local_targets[rows]
    sums = logits.new_zeros(2, logits.shape[0])
    sums[1, rows] = logits[rows, words]
    maximum = logits.amax(dim=1, keepdim=True)
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=shard.group)
    exponentials = logits.sub_(maximum).exp_()
    sums[0] = exponentials.sum(dim=1)
    dist.all_reduce(sums, group=shard.group)
    total, target_logits = sums[0][:, None], sums[1]
    loss = ((total.log() + maximum)[:, 0] - target_logits).sum()
    return loss, exponentials, total, (rows, words)
