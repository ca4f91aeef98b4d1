"""Questions of a few words: found only where they stand alone, for inside a sentence they could be anybody's."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np

from hfpar.data.overlap.grams import hash_runs
from hfpar.data.overlap.words import UNKNOWN, Vocabulary, split_words

_BREAK = re.compile(r"\n+|(?<=[.?!:])\$*\s+|(?<=[.?!:]\$)\s+")
"""The end of a line, or of a sentence; `Problem 3:` is one, too."""


class ShortTexts:
    """Texts of a few words, by their words' ids.

    Args:
        numbers: of the texts, by their words.
        vocabulary: that their ids are of.
    """

    def __init__(self, numbers: Mapping[tuple[int, ...], int], vocabulary: Vocabulary) -> None:
        self._numbers = numbers
        self._vocabulary = vocabulary
        self._hashes = {
            size: np.array([hash_runs(np.array(ids), size)[0] for ids in numbers if len(ids) == size])
            for size in {len(ids) for ids in numbers}
        }

    def positions(self, ids: np.ndarray) -> np.ndarray:
        """Where the words of one may begin, in a text or in many with gaps."""
        found = [np.flatnonzero(np.isin(hash_runs(ids, size), own)) for size, own in self._hashes.items()]
        return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)

    def find(self, texts: tuple[str, ...]) -> Iterator[tuple[int, int, int]]:
        """Texts that stand alone in a row: number, and `[start, end)` in its words with one more after each text."""
        before = 0
        for text in texts:
            ids: list[int] = []
            edges = {0}
            for piece in _BREAK.split(text):
                ids += [self._vocabulary[word] for word in split_words(piece)]
                edges.add(len(ids))
            for start in sorted(edges):
                for size in self._hashes:
                    number = self._numbers.get(tuple(ids[start : start + size]))
                    if (
                        number is not None
                        and start + size in edges
                        and UNKNOWN not in ids[start : start + size]
                    ):
                        yield number, before + start, before + start + size
            before += len(ids) + 1
