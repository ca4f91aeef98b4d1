"""One optimizer step: a window of micro-batches, one divisor, one update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.data.stream import TokenStream
from hfpar.engine.base import Engine
from hfpar.parallel.layout import Layout
from hfpar.parallel.sequence import StreamShard, shard_stream


@dataclass(frozen=True)
class StepResult:
    """Global figures of one step, the same on every rank."""

    loss: float
    """Mean over the label tokens of the whole global batch; 0 if it has none."""
    grad_norm: float
    num_tokens: int
    num_label_tokens: int


def train_step(
    engine: Engine, micro_batches: Sequence[TokenStream], layout: Layout, max_grad_norm: float | None
) -> StepResult:
    """Accumulate the window's gradients and update the weights.

    Ranks of a sequence group bring the same streams, and each computes its slice of them. Each rank's loss is the
    sum over its own label tokens, divided by the number of label tokens in the whole global batch: all ranks, all
    micro-batches of this window, however many it has. Engines average over the batch group, so the loss is
    multiplied by its size; nothing else scales it.
    """
    shards = [shard_stream(stream, layout) for stream in micro_batches]
    counts = global_counts(shards, layout, engine.device)
    divisor = max(counts.num_label_tokens, 1)
    loss_sum = torch.zeros((), dtype=torch.float64, device=engine.device)
    for index, shard in enumerate(shards):
        last = index == len(shards) - 1
        with engine.accumulate(last_micro_batch=last):
            loss = engine.forward(**model_inputs(shard, engine.device))
            loss_sum += loss.detach().double()
            engine.backward(loss * (layout.batch_size / divisor), last_micro_batch=last)
    grad_norm = engine.step(max_grad_norm)
    dist.all_reduce(loss_sum, group=layout.batch_group)
    return StepResult(float(loss_sum) / divisor, grad_norm, counts.num_tokens, counts.num_label_tokens)


def evaluate(engine: Engine, batches: Sequence[TokenStream], layout: Layout) -> tuple[float, int]:
    """The mean loss over all label tokens of all ranks' batches, and their number. Keeps sums, not logits.

    Every rank must bring the same number of batches.
    """
    totals = torch.zeros(2, dtype=torch.float64, device=engine.device)
    training = engine.module.training
    engine.module.eval()
    with engine.inference():
        for stream in batches:
            shard = shard_stream(stream, layout)
            loss = engine.forward(**model_inputs(shard, engine.device))
            totals += torch.stack([loss.double(), totals.new_tensor(shard.num_label_tokens)])
    engine.module.train(training)
    dist.all_reduce(totals, group=layout.batch_group)
    loss_sum, num_label_tokens = totals.tolist()
    return loss_sum / max(num_label_tokens, 1), int(num_label_tokens)


@dataclass(frozen=True)
class Counts:
    """Tokens of a global batch."""

    num_tokens: int
    num_label_tokens: int


def global_counts(shards: Sequence[StreamShard], layout: Layout, device: torch.device) -> Counts:
    """Tokens and label tokens over all ranks and micro-batches."""
    local = [sum(s.num_tokens for s in shards), sum(s.num_label_tokens for s in shards)]
    totals = torch.tensor(local, dtype=torch.int64, device=device)
    dist.all_reduce(totals, group=layout.batch_group)
    num_tokens, num_label_tokens = totals.tolist()
    return Counts(int(num_tokens), int(num_label_tokens))


def model_inputs(shard: StreamShard, device: torch.device) -> dict[str, Tensor | Any]:
    """What the patched model's forward takes."""
    return {**shard.arguments(device), "labels": shard.labels.to(device, non_blocking=True)}
