"""The documents that every cell trains on, and how they are dealt out.

Two optimizer steps: a whole accumulation window, then the shorter one that ends an epoch, in which all ranks
but one have nothing to do. Lengths and label counts are as uneven as they come: a wrong divisor, a leak from
document to document or a rank that is forgotten changes the numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

IGNORE_INDEX = -100

GRADIENT_ACCUMULATION_STEPS = 2
"""Micro-batches of a whole window."""

# A document of one token, and lengths on either side of the shrunk sliding window.
_WHOLE_WINDOW = (23, 17, 1, 9, 30, 12, 4, 26, 14, 7, 19, 11)
_LAST_WINDOW = (13, 21)
_WITHOUT_LABEL = 8
"""Index of the document of the whole window in which nothing is to be learnt."""


@dataclass(frozen=True)
class Document:
    """Tokens, and per token itself where it is to be learnt or -100 (not shifted)."""

    tokens: list[int]
    labels: list[int]


def make_windows(vocab_size: int, seed: int = 0) -> list[list[Document]]:
    """The documents of each optimizer step."""
    rng = random.Random(seed)
    windows = []
    for lengths in (_WHOLE_WINDOW, _LAST_WINDOW):
        documents = []
        for index, length in enumerate(lengths):
            tokens = [rng.randrange(vocab_size) for _ in range(length)]
            # Every second document, and so every second rank, has only a few labels.
            num_labels = 2 if index % 2 else length - length // 4
            if lengths is _WHOLE_WINDOW and index == _WITHOUT_LABEL:
                num_labels = 0
            start = max(length - num_labels, 0)
            documents.append(Document(tokens, [IGNORE_INDEX] * start + tokens[start:]))
        windows.append(documents)
    return windows


def deal(windows: Sequence[Sequence[Document]], dp_size: int) -> list[list[list[list[Document]]]]:
    """Split each window into micro-batches: [window][micro_batch][dp_rank] -> documents, [] for a rank without."""
    dealt = []
    for index, documents in enumerate(windows):
        if index == len(windows) - 1:
            dealt.append([[list(documents), *([] for _ in range(dp_size - 1))]])
            continue
        slots = GRADIENT_ACCUMULATION_STEPS * dp_size
        parts = [list(documents[slot::slots]) for slot in range(slots)]
        dealt.append([parts[start : start + dp_size] for start in range(0, slots, dp_size)])
    return dealt


def count_labels(documents: Sequence[Document]) -> int:
    """Labels that a causal model can be asked for: the first token of a document is never predicted."""
    return sum(label != IGNORE_INDEX for document in documents for label in document.labels[1:])
