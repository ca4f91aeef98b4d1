"""A batch of an ordinary Transformers loop, cut for a rank of a layout: what `Layout.shard` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.data.stream import IGNORE_INDEX, TokenStream, build_stream
from hfpar.errors import ConfigError, HfparError
from hfpar.parallel.layout import Layout
from hfpar.parallel.sequence import shard_stream

_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_FOLLOW_FROM_POSITIONS = (*_BOUNDS, "max_length_q", "max_length_k", "seq_idx")
"""What `DataCollatorWithFlattening` adds: the documents that position_ids show as well."""


def shard_batch(
    batch: Mapping[str, Any], layout: Layout, *, num_items_in_batch: int | None = None
) -> dict[str, Any]:
    """Turn a batch into the keyword arguments of this rank's model call. All ranks together.

    Padding is removed, documents are told apart by rows and by where positions start anew, labels are shifted
    inside each, and this rank's slice is cut out. With labels, the model's own loss is then this rank's sum over
    the mean label count of a rank: averaged over all ranks, as engines average gradients and `Accelerator.reduce`
    averages losses, it is the mean over the global batch's labels.

    Args:
        batch: `input_ids` (B, S); and where they are there `attention_mask` (B, S) of 0 and 1, `position_ids`
            (B, S), `labels` (B, S), not shifted. The same on every rank with the same `layout.dp_rank`.
        layout: this rank's place.
        num_items_in_batch: label tokens of the global batch. None: counted over this call of all ranks, which is
            right unless gradients are accumulated over several calls.

    Raises:
        ConfigError: entries that can't be cut.
        HfparError: ranks that share a stream have different batches.
    """
    stream = to_stream(batch)
    device = batch["input_ids"].device
    if layout.sequence_size > 1:
        _check_same(stream, layout)
    shard = shard_stream(stream, layout)
    arguments: dict[str, Any] = {**shard.arguments(device), "use_cache": False}
    if batch.get("labels") is not None:
        if num_items_in_batch is None:
            num_items_in_batch = _count_labels(shard.num_label_tokens, layout)
        labels = shard.labels.to(device)
        share = torch.tensor(max(int(num_items_in_batch), 1) / layout.batch_size, device=device)
        # Transformers computes a loss where there are labels, and takes those that are shifted already from here.
        arguments |= {"labels": labels, "shift_labels": labels, "num_items_in_batch": share}
    return arguments


def to_stream(batch: Mapping[str, Any]) -> TokenStream:
    """The documents of a batch, back to back, on the CPU.

    Raises:
        ConfigError: entries of other shapes or names.
    """
    mask, positions, labels = _checked(batch)
    input_ids = batch["input_ids"].cpu()
    keep = mask.flatten() == 1
    row = torch.arange(input_ids.shape[0])[:, None].expand_as(input_ids).flatten()[keep]
    if not len(row):
        return build_stream([])
    position = positions.flatten()[keep]
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = (row[1:] != row[:-1]) | (position[1:] != position[:-1] + 1)
    cu_seqlens = torch.cat([is_first.nonzero().flatten(), torch.tensor([len(row)])]).int()
    _check_documents(batch, cu_seqlens)
    targets = torch.full_like(row, IGNORE_INDEX)
    targets[:-1] = labels.flatten()[keep][1:].masked_fill(is_first[1:], IGNORE_INDEX)
    return TokenStream(
        input_ids=input_ids.flatten()[keep][None],
        position_ids=position[None],
        cu_seqlens=cu_seqlens,
        labels=targets[None],
        num_label_tokens=int((targets != IGNORE_INDEX).sum()),
        num_tokens=len(row),
    )


def _checked(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Mask, positions and labels, (B, S) each, whether they are given or not."""
    if batch.get("input_ids") is None:
        raise ConfigError("batch: input_ids is missing; hfpar cuts tokens, nothing else")
    shape = batch["input_ids"].shape
    known = {"input_ids", "attention_mask", "position_ids", "labels"}
    if batch.get("position_ids") is not None:
        known.update(_FOLLOW_FROM_POSITIONS)
    for name, value in batch.items():
        if name not in known and value is not None:
            raise ConfigError(
                f"batch: {name} can't be cut between ranks; what can: {', '.join(sorted(known))}"
            )
        if (
            name in ("attention_mask", "position_ids", "labels")
            and value is not None
            and value.shape != shape
        ):
            raise ConfigError(
                f"batch: {name} has the shape {list(value.shape)}, but input_ids {list(shape)}; hfpar needs the same"
            )
    if len(shape) != 2:
        raise ConfigError(f"batch: input_ids has the shape {list(shape)}; hfpar needs [batch, tokens]")
    mask = batch.get("attention_mask")
    mask = torch.ones(shape, dtype=torch.long) if mask is None else mask.cpu()
    if bool(((mask != 0) & (mask != 1)).any()):
        raise ConfigError(
            "batch: attention_mask has values beside 0 and 1; tell documents apart by position_ids"
        )
    positions = batch.get("position_ids")
    positions = mask.long().cumsum(1) - 1 if positions is None else positions.cpu()
    labels = batch.get("labels")
    return mask, positions, torch.full(shape, IGNORE_INDEX) if labels is None else labels.cpu()


def _check_documents(batch: Mapping[str, Any], cu_seqlens: Tensor) -> None:
    """What else a batch says of its documents mustn't contradict its positions."""
    said = {name: batch[name].tolist() for name in _BOUNDS if batch.get(name) is not None}
    if batch.get("seq_idx") is not None:
        changes = batch["seq_idx"].flatten().diff().nonzero().flatten() + 1
        said["seq_idx"] = [0, *changes.tolist(), batch["seq_idx"].numel()]
    for name, bounds in said.items():
        if bounds != cu_seqlens.tolist():
            raise ConfigError(
                f"batch: by {name}, documents begin at {bounds[:-1]}, but by position_ids and attention_mask at "
                f"{cu_seqlens[:-1].tolist()}; count positions from 0 in each document"
            )


def _count_labels(count: int, layout: Layout) -> int:
    if layout.batch_size == 1:
        return count
    total = torch.tensor(count, device=layout.device_type)
    dist.all_reduce(total, group=layout.batch_group)
    return int(total)


def _check_same(stream: TokenStream, layout: Layout) -> None:
    """Ranks that share a stream must have been given the same one; a sampler over all ranks gives each its own."""
    weights = torch.arange(1, stream.input_ids.shape[1] + 1)
    digest = int(((stream.input_ids[0] * 31 + stream.labels[0] * 7 + stream.position_ids[0]) * weights).sum())
    bounds = torch.tensor([digest, -digest], device=layout.device_type)
    dist.all_reduce(bounds, op=dist.ReduceOp.MIN, group=layout.sequence_group)
    if int(bounds[0]) != -int(bounds[1]):
        raise HfparError(
            f"batch: the {layout.sequence_size} ranks that share a stream were given different batches; sample by "
            "layout.dp_rank of layout.dp_size, not by rank of all processes"
        )
