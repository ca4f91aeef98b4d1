"""Scores of one text, from what a model thinks of its tokens; pure."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import LCSseq, Levenshtein

from hfpar.audit.text import normalize

Floats = npt.NDArray[np.floating]
Span = tuple[int, int]

MIN_K = 0.2
"""Share of a text's least likely tokens that Min-K % looks at."""


class Run(NamedTuple):
    """Tokens one after another."""

    length: int
    span: Span
    """In characters of the text."""


def longest_run(spans: Sequence[Span], hits: Sequence[bool]) -> Run:
    """The longest stretch of tokens that are all hits; the first of several."""
    best, length = Run(0, (0, 0)), 0
    for position, hit in enumerate(hits):
        length = length + 1 if hit else 0
        if length > best.length:
            best = Run(length, (spans[position - length + 1][0], spans[position][1]))
    return best


def hit_spans(spans: Sequence[Span], hits: Sequence[bool]) -> list[list[int]]:
    """Characters of the stretches of hits, one after another."""
    found: list[list[int]] = []
    before = False
    for (start, end), hit in zip(spans, hits, strict=True):
        if hit and before:
            found[-1][1] = max(end, found[-1][1])
        elif hit:
            found.append([start, end])
        before = hit
    return found


def familiarity(text: str, logprobs: Floats, mean: Floats | None, std: Floats | None) -> dict[str, float]:
    """Scores by which a text the model has seen might be told from others; each the higher, the more familiar.

    `loss` is the mean log-probability of a token; `zlib` the log-probability of the text over the length that zlib
    compresses it to (Carlini et al. 2021, arXiv:2012.07805); `min_k` the mean over the 20 % least likely tokens (Shi
    et al. 2024, arXiv:2310.16789); `min_k_plus_plus` the same after each log-probability is standardised by what the
    model expects at its place (Zhang et al. 2025, arXiv:2404.02936).

    Args:
        text: what the tokens spell.
        logprobs: of the tokens that have a prediction, in nats.
        mean: expectation of the log-probability at each place; None: not known, as behind a server.
        std: its standard deviation.

    Returns:
        By method; nothing where no token has a prediction.
    """
    if not len(logprobs):
        return {}
    compressed = len(zlib.compress(text.encode()))
    scores = {
        "loss": float(np.mean(logprobs)),
        "zlib": float(np.sum(logprobs) / compressed),
        "min_k": _lowest(logprobs),
    }
    if mean is not None and std is not None:
        scores["min_k_plus_plus"] = _lowest((logprobs - mean) / np.maximum(std, 1e-6))
    return {name: round(value, 6) for name, value in scores.items()}


def _lowest(values: Floats) -> float:
    count = max(1, round(MIN_K * len(values)))
    return float(np.mean(np.partition(values, count - 1)[:count]))


def rouge_l(reference: str, written: str) -> float:
    """ROUGE-L's F-measure over words (Lin 2004), of the normalised texts.

    What is written past the reference's number of words isn't counted against it.
    """
    words = normalize(reference).lower().split()
    others = normalize(written).lower().split()[: len(words)]
    if not words or not others:
        return 0.0
    common = LCSseq.similarity(words, others)
    return round(2 * common / (len(words) + len(others)), 6)


def edit_similarity(reference: str, written: str) -> float:
    """1 minus the edits of characters between the two over the longer's length, of the normalised texts.

    What is written past the reference's length isn't counted against it.
    """
    first = normalize(reference)
    return round(Levenshtein.normalized_similarity(first, normalize(written)[: len(first)]), 6)
