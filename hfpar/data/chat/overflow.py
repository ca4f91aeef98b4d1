"""What becomes of samples that are too long."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hfpar.config.schema import OverflowName
from hfpar.data.reading.rows import RowError


class EncodedSample(NamedTuple):
    """One tokenized document."""

    input_ids: list[int]
    trained: list[bool]
    """For each token, whether the model is to learn it; the first has nothing before it that predicts it."""


def fit_length(
    sample: EncodedSample, max_length: int, on_overflow: OverflowName, counts: Counter[str]
) -> list[EncodedSample]:
    """Make samples of at most `max_length` tokens, each with something to learn.

    Args:
        sample: of any length.
        max_length: in tokens.
        on_overflow: what is done to a longer one: `drop` it, `truncate` it to its first tokens, `split` it into
            pieces one after another, or `error`.
        counts: gets what was done: `too long` (dropped), `truncated`, `split` and `pieces` (of those split, with
            something to learn), `without label` (samples dropped), `pieces without label` (dropped).

    Raises:
        RowError: too long, with `error`.
    """
    length = len(sample.input_ids)
    if length <= max_length:
        return _with_label([sample], counts, "without label")
    if on_overflow == "error":
        raise RowError("too long", f"it has {length} tokens, more than max_length {max_length}")
    if on_overflow == "drop":
        counts["too long"] += 1
        return []
    if on_overflow == "truncate":
        counts["truncated"] += 1
        return _with_label([_cut(sample, 0, max_length)], counts, "without label")
    pieces = [_cut(sample, start, max_length) for start in range(0, length, max_length)]
    kept = _with_label(pieces, counts, "pieces without label")
    counts["split"] += 1
    counts["pieces"] += len(kept)
    return kept


def _cut(sample: EncodedSample, start: int, length: int) -> EncodedSample:
    end = start + length
    return EncodedSample(sample.input_ids[start:end], sample.trained[start:end])


def _with_label(samples: list[EncodedSample], counts: Counter[str], kind: str) -> list[EncodedSample]:
    kept = [sample for sample in samples if True in sample.trained[1:]]
    if len(kept) < len(samples):
        counts[kind] += len(samples) - len(kept)
    return kept
