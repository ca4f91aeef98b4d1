"""The token stream: what a micro-batch is everywhere in hfpar.

All documents of a micro-batch lie one after another in one dense row. Labels are shifted inside each
document before anything else happens to them, so that neither joining, nor slicing, nor padding can
make a token predict the start of another document.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hfpar.data.samples import IGNORE_INDEX, Sample
from hfpar.data.unpad import unpad_input


@dataclass(frozen=True, eq=False)
class TokenStream:
    """T tokens of n documents, back to back."""

    input_ids: Tensor
    """`(1, T)` int64."""
    position_ids: Tensor
    """`(1, T)` int64, starting again from 0 at every document."""
    cu_seqlens: Tensor
    """`(n + 1,)` int32: document i is the tokens `cu_seqlens[i]` to `cu_seqlens[i + 1]`; none is empty."""
    labels: Tensor
    """`(1, T)` int64, shifted: entry t is the target of position t, -100 where it has none."""
    num_label_tokens: int
    """Entries of `labels` that are not -100."""
    num_tokens: int
    """T; 0 for the stand-in of a rank that has no samples."""

    @functools.cached_property
    def max_seqlen(self) -> int:
        """Tokens in the longest document."""
        return int(self.cu_seqlens.diff().max())

    def to(self, device: torch.device | str) -> TokenStream:
        """Return the stream with its tensors on `device`."""
        moved = replace(
            self,
            input_ids=self.input_ids.to(device, non_blocking=True),
            position_ids=self.position_ids.to(device, non_blocking=True),
            cu_seqlens=self.cu_seqlens.to(device, non_blocking=True),
            labels=self.labels.to(device, non_blocking=True),
        )
        # Counted here, before the move: reading it back from a GPU would wait for that GPU.
        moved.__dict__["max_seqlen"] = self.max_seqlen
        return moved


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """N documents, one a row, each followed by padding up to the longest, S."""

    input_ids: Tensor
    """`(N, S)` int64."""
    attention_mask: Tensor
    """`(N, S)` int64, 1 at tokens and 0 at padding."""
    labels: Tensor
    """`(N, S)` int64, not shifted, -100 at padding."""


def shift_labels(labels: Tensor) -> Tensor:
    """Turn per-token labels into per-position targets.

    Args:
        labels: `(..., S)`, one document along the last dimension.

    Returns:
        `(..., S)`: entry t is `labels[..., t + 1]`, and the last one -100.
    """
    shifted = torch.full_like(labels, IGNORE_INDEX)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


def build_stream(samples: Sequence[Sample]) -> TokenStream:
    """Join documents into one stream, in the order given.

    Samples without tokens leave no document. Without any token at all, the stream is one token (id 0)
    without a label, so that a rank that has no samples still takes part in the step.
    """
    documents = [sample for sample in samples if sample.input_ids]
    if not documents:
        stand_in = build_stream([Sample(input_ids=[0], labels=[IGNORE_INDEX])])
        return replace(stand_in, num_tokens=0)
    lengths = [len(document.input_ids) for document in documents]
    input_ids = list(itertools.chain.from_iterable(document.input_ids for document in documents))
    targets = list(itertools.chain.from_iterable([*d.labels[1:], IGNORE_INDEX] for d in documents))
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return _stream(torch.tensor(input_ids, dtype=torch.long), torch.tensor(targets), cu_seqlens)


def pad_batch(samples: Sequence[Sample], pad_token_id: int) -> PaddedBatch:
    """Lay out documents as rows, padded on the right to the longest.

    Without samples, the batch is one row of padding.
    """
    seqlen = max((len(sample.input_ids) for sample in samples), default=1)
    shape = (max(len(samples), 1), seqlen)
    input_ids = torch.full(shape, pad_token_id, dtype=torch.long)
    attention_mask = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.long)
    for row, sample in enumerate(samples):
        length = len(sample.input_ids)
        input_ids[row, :length] = torch.tensor(sample.input_ids, dtype=torch.long)
        attention_mask[row, :length] = 1
        labels[row, :length] = torch.tensor(sample.labels, dtype=torch.long)
    return PaddedBatch(input_ids=input_ids, attention_mask=attention_mask, labels=labels)


def unpad_batch(batch: PaddedBatch) -> TokenStream:
    """Remove the padding: equal to `build_stream` of the rows, bit for bit.

    Only the attention mask says what padding is, never a token's id: a pad token that is also the
    end-of-turn token keeps its label wherever it is part of a document.
    """
    # Shift while the rows still are rows, then drop the padding of ids and targets together.
    targets = shift_labels(batch.labels.masked_fill(batch.attention_mask == 0, IGNORE_INDEX))
    hidden = torch.stack((batch.input_ids, targets), dim=-1)  # [N, S, 2]
    tokens, _, cu_seqlens, _ = unpad_input(hidden, batch.attention_mask)  # [T, 2]
    if not len(tokens):
        return build_stream([]).to(batch.input_ids.device)
    cu_seqlens = cu_seqlens.unique_consecutive()  # rows without tokens leave no document
    return _stream(tokens[:, 0], tokens[:, 1], cu_seqlens)


def _stream(input_ids: Tensor, targets: Tensor, cu_seqlens: Tensor) -> TokenStream:
    """Make a stream of `(T,)` ids and shifted targets; positions follow from `cu_seqlens`."""
    starts = cu_seqlens[:-1].long()
    lengths = cu_seqlens.diff().long()
    position_ids = torch.arange(len(input_ids), device=input_ids.device) - starts.repeat_interleave(lengths)
    return TokenStream(
        input_ids=input_ids[None].contiguous(),
        position_ids=position_ids[None],
        cu_seqlens=cu_seqlens,
        labels=targets[None].contiguous(),
        num_label_tokens=int((targets != IGNORE_INDEX).sum()),
        num_tokens=len(input_ids),
    )
