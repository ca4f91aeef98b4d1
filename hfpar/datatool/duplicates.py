"""Rows that say the same, found by their digests: 44 bytes a row, however long the rows are."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hfpar.data.reading.rows import Place
from hfpar.datatool.facts import DIGEST_BYTES, NO_PROMPT, ChunkFacts

MOST_PAIRS = 5
"""So many are listed."""


@dataclass
class Repeats:
    """Rows that repeat an earlier one in some respect."""

    count: int = 0
    pairs: list[tuple[Place, Place]] = field(default_factory=list)
    """The first of them, each with the earlier row."""


class RowDigests:
    """The digests of all well-formed rows, and where these stand."""

    def __init__(self) -> None:
        """Start without a row."""
        self.files: list[tuple[str, str]] = []
        self._whole, self._prompts = bytearray(), bytearray()
        self._file_numbers, self._numbers = array("i"), array("q")

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, path: str, unit: str, facts: ChunkFacts) -> None:
        """Append the rows of a chunk of a file."""
        if not self.files or self.files[-1] != (path, unit):
            self.files.append((path, unit))
        self._whole += facts.digests
        self._prompts += facts.prompt_digests
        self._numbers.frombytes(facts.row_numbers.tobytes())
        self._file_numbers.extend([len(self.files) - 1] * len(facts.row_numbers))

    def place(self, row: int) -> Place:
        """Where a row stands."""
        path, unit = self.files[self._file_numbers[row]]
        return Place(path, unit, self._numbers[row])

    def repeats(self) -> tuple[Repeats, Repeats]:
        """Rows that say just what an earlier one says; and rows that answer an earlier one's prompt otherwise."""
        first, prompts = _first_equal(_as_numbers(self._whole)), _as_numbers(self._prompts)
        numbers = np.arange(len(first))
        same = np.flatnonzero(first != numbers)
        has_prompt = (prompts != _as_numbers(NO_PROMPT)).any(axis=1)
        asking = np.flatnonzero((first == numbers) & has_prompt)
        first_asking = asking[_first_equal(prompts[asking])]
        other = first_asking != asking
        return self._list(same, first[same]), self._list(asking[other], first_asking[other])

    def rows_shared_with(self, other: RowDigests) -> Repeats:
        """Rows that say just what a row of another data set says."""
        first = _first_equal(np.concatenate([_as_numbers(other._whole), _as_numbers(self._whole)]))
        first = first[len(other) :]
        shared = np.flatnonzero(first < len(other))
        pairs = [(self.place(int(row)), other.place(int(first[row]))) for row in shared[:MOST_PAIRS]]
        return Repeats(len(shared), pairs)

    def _list(self, rows: np.ndarray, earlier: np.ndarray) -> Repeats:
        pairs = zip(rows[:MOST_PAIRS].tolist(), earlier[:MOST_PAIRS].tolist(), strict=True)
        return Repeats(len(rows), [(self.place(row), self.place(before)) for row, before in pairs])


def _as_numbers(digests: Sequence[int] | bytes | bytearray) -> np.ndarray:
    """`(rows, 2)` uint64."""
    return np.frombuffer(bytes(digests), dtype=np.uint64).reshape(-1, DIGEST_BYTES // 8)


def _first_equal(keys: np.ndarray) -> np.ndarray:
    """For each row of `(rows, 2)` the number of the first row that equals it."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal rows stay in order
    ordered = keys[order]
    is_new = np.ones(len(keys), dtype=bool)
    is_new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = np.flatnonzero(is_new)
    first = np.empty(len(keys), dtype=np.int64)
    first[order] = order[starts[np.cumsum(is_new) - 1]] if len(keys) else 0
    return first
