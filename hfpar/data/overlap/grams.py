"""Runs of n words by their hashes: which texts of a benchmark have those of a training row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hfpar.data.overlap.words import UNKNOWN

_BITS = 22
_MANY = 256
"""So many positions are looked through faster than sorted out."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class FoundGrams(NamedTuple):
    """Runs of words that a benchmark has, too."""

    positions: np.ndarray
    """`(found,)` where each begins."""
    grams: np.ndarray
    """`(found,)` its number in the table."""


class Pairs(NamedTuple):
    """Texts that have runs in common."""

    rows: np.ndarray
    """`(pairs,)`"""
    parts: np.ndarray
    """`(pairs,)`"""
    counts: np.ndarray
    """`(pairs,)` how many different runs of weight."""


class GramTable:
    """All runs of `size` words of some texts, and which of the texts have them.

    Attributes:
        size: words of a run.
        hashes: `(grams,)` uint64, sorted.
        has_weight: `(grams,)` bool: false for what so many say that it tells nothing.
    """

    def __init__(
        self, texts: Sequence[np.ndarray], size: int, families: np.ndarray, max_families: int
    ) -> None:
        """Take in the texts.

        Args:
            texts: ids of their words.
            size: words of a run.
            families: `(texts,)` texts of one family vary one another.
            max_families: what more of them have in common tells nothing.
        """
        self.size = size
        hashes, owners = [np.zeros(0, dtype=np.uint64)], [np.zeros(0, dtype=np.int64)]
        for number, ids in enumerate(texts):
            found = np.unique(hash_runs(ids, size))
            hashes.append(found)
            owners.append(np.full(len(found), number))
        every, owner = np.concatenate(hashes), np.concatenate(owners)
        order = np.argsort(every, kind="stable")
        every, owner = every[order], owner[order]
        self.hashes, self._starts, counts = np.unique(every, return_index=True, return_counts=True)
        self._owners = owner
        self._counts = counts
        gram = np.repeat(np.arange(len(self.hashes)), counts)
        of_families = np.unique(np.stack([gram, families[owner]]), axis=1)[0] if len(gram) else gram
        self.num_families = np.bincount(of_families, minlength=len(self.hashes))
        self.has_weight = self.num_families <= max_families
        self._may_have = np.zeros(1 << _BITS, dtype=bool)
        self._may_have[_slots(self.hashes)] = True

    def find(self, ids: np.ndarray) -> FoundGrams:
        """Which runs of a text, or of many back to back with gaps, are in the table."""
        hashes = hash_runs(ids, self.size)
        positions = np.flatnonzero(self._may_have[_slots(hashes)])
        hashes = hashes[positions]
        grams = np.searchsorted(self.hashes, hashes)
        grams[grams == len(self.hashes)] = 0
        is_found = self.hashes[grams] == hashes if len(self.hashes) else np.zeros(len(hashes), dtype=bool)
        return FoundGrams(positions[is_found], grams[is_found])

    def without(self, is_template: np.ndarray) -> GramTable:
        """The same table in which those runs have no weight, either."""
        other = copy.copy(self)
        other.has_weight = self.has_weight & ~is_template
        return other

    def starts(self, found: FoundGrams, ids: Sequence[int]) -> list[int]:
        """Where in a row a text's runs may begin; in a long row, where they do."""
        if len(found.positions) <= _MANY:
            return found.positions.tolist()
        own = self.find(np.array(ids)).grams
        return found.positions[np.isin(found.grams, own)].tolist()

    def pairs(self, found: FoundGrams, row_of_word: np.ndarray, num_parts: int) -> Pairs:
        """Rows and texts that have runs of weight in common.

        Args:
            found: in the rows' words.
            row_of_word: `(words,)` int64: of which row each is.
            num_parts: number of the table's texts.
        """
        is_good = self.has_weight[found.grams]
        grams = found.grams[is_good]
        rows = row_of_word[found.positions[is_good]]
        # A run that a row repeats counts once.
        keys = np.unique(rows * len(self.hashes) + grams) if len(rows) else rows
        rows, grams = keys // max(len(self.hashes), 1), keys % max(len(self.hashes), 1)
        counts = self._counts[grams]
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        parts = self._owners[np.repeat(self._starts[grams], counts) + within]
        pair, num = np.unique(np.repeat(rows, counts) * num_parts + parts, return_counts=True)
        return Pairs(pair // num_parts, pair % num_parts, num)


def hash_runs(ids: np.ndarray, size: int) -> np.ndarray:
    """`(words - size + 1,)` uint64: a hash of each run of words; 0 where it holds an unknown one."""
    count = len(ids) - size + 1
    if count <= 0:
        return np.zeros(0, dtype=np.uint64)
    mixed = _mix(ids.astype(np.uint64))
    hashes = mixed[:count].copy()
    for shift in range(1, size):
        hashes *= _FACTOR
        hashes += mixed[shift : shift + count]
    unknown = np.concatenate([[0], np.cumsum(ids == UNKNOWN)])
    hashes[unknown[size:] != unknown[:count]] = 0
    return hashes


def find_families(texts: Sequence[np.ndarray], size: int) -> np.ndarray:
    """`(texts,)`: the number of the earlier text that each is a variation of, or its own.

    A text is a variation if half of its runs of `size` words are of that one's family.
    """
    owner: dict[int, int] = {}
    families = np.arange(len(texts))
    for number, ids in enumerate(texts):
        runs = set(hash_runs(ids, size).tolist())
        shares: dict[int, int] = {}
        for run in runs:
            if run in owner:
                shares[owner[run]] = shares.get(owner[run], 0) + 1
        best = max(shares, key=shares.__getitem__, default=number)
        if shares.get(best, 0) * 2 >= len(runs) and runs:
            families[number] = best
        for run in runs:
            owner.setdefault(run, int(families[number]))
    return families


def _slots(hashes: np.ndarray) -> np.ndarray:
    return _mix(hashes) >> np.uint64(64 - _BITS)


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter 64-bit numbers (the finalizer of splitmix64, and an odd factor in front)."""
    values = (values + np.uint64(1)) * _FACTOR
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
