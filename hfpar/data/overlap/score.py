"""How much of one text another holds, word by word. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np


class Run(NamedTuple):
    """Words that two texts have in common, in the same order and with nothing between them."""

    row_start: int
    part_start: int
    num_words: int


class Coverage(NamedTuple):
    """What common runs cover of a text."""

    share: float
    """Of its words that tell something."""
    left_out: np.ndarray
    """Which of its words no run has, whether they tell something or not."""
    longest: Run | None
    """Of the runs that tell something."""
    telling_words: int
    """Of `longest`: those that lie in a run of weight."""


class Alignment(NamedTuple):
    """The best stretch of a row beside a text."""

    common: np.ndarray
    """`(words,)` bool: which of the text's words stand there in the same order."""
    row_start: int
    row_end: int


def common_runs(
    row: Sequence[int], part: Sequence[int], size: int, starts: Iterable[int] | None = None
) -> list[Run]:
    """All longest runs of at least `size` words, the row's in order.

    Args:
        row: its words.
        part: a text's.
        size: words of the shortest run.
        starts: where in the row a run of `size` may begin, in order; anywhere by default.
    """
    runs: list[Run] = []
    ends: dict[int, int] = {}
    for start, part_start in positions_of(row, part, size, starts):
        diagonal = start - part_start
        if ends.get(diagonal, -1) > start:
            continue  # inside a run that is known
        length = size
        while (
            start + length < len(row)
            and part_start + length < len(part)
            and row[start + length] == part[part_start + length]
        ):
            length += 1
        ends[diagonal] = start + length - size + 1
        runs.append(Run(start, part_start, length))
    return runs


def positions_of(
    row: Sequence[int], part: Sequence[int], size: int, starts: Iterable[int] | None = None
) -> list[tuple[int, int]]:
    """Where (in the row, in the text) runs of `size` words begin that both have; as `common_runs` otherwise."""
    where: dict[tuple[int, ...], list[int]] = {}
    for start in range(len(part) - size + 1):
        where.setdefault(tuple(part[start : start + size]), []).append(start)
    return [
        (start, part_start)
        for start in (range(len(row) - size + 1) if starts is None else starts)
        for part_start in where.get(tuple(row[start : start + size]), ())
    ]


def cover(runs: Sequence[Run], is_telling: np.ndarray, size: int) -> Coverage:
    """Measure what runs cover.

    Args:
        runs: of at least `size` words.
        is_telling: `(runs of the text,)` bool: which of its runs of `size` words have weight.
        size: words of a run.
    """
    num_words = len(is_telling) + size - 1
    telling = spread(is_telling, size)
    covered, left_out = np.zeros(num_words, dtype=bool), np.ones(num_words, dtype=bool)
    longest, most = None, 0
    for run in runs:
        inside = np.zeros(len(is_telling), dtype=bool)
        inside[run.part_start : run.part_start + run.num_words - size + 1] = True
        left_out[run.part_start : run.part_start + run.num_words] = False
        words = spread(inside & is_telling, size)
        covered |= words
        if int(words.sum()) > most:
            longest, most = run, int(words.sum())
    share = float(covered.sum() / max(1, telling.sum()))
    return Coverage(share, np.flatnonzero(left_out), longest, most)


def spread(starts: np.ndarray, size: int) -> np.ndarray:
    """`(words,)` bool: which words lie in a run of `size` that begins where `starts` is true."""
    edges = np.zeros(len(starts) + size, dtype=np.int64)
    edges[: len(starts)] += starts
    edges[size:] -= starts
    return np.cumsum(edges)[:-1] > 0


def align(row: Sequence[int], part: Sequence[int], anchors: Sequence[tuple[int, int]]) -> Alignment:
    """Find a text in a row, words left out, put in or changed.

    Args:
        row: its words.
        part: the text's.
        anchors: positions (in the row, in the text) of runs that they have in common.
    """
    from rapidfuzz.distance import LCSseq

    size = len(part)
    diagonals = sorted(row_start - part_start for row_start, part_start in anchors)
    slack = max(8, size // 2)
    best = max(
        diagonals,
        key=lambda diagonal: (
            bisect_right(diagonals, diagonal + slack) - bisect_left(diagonals, diagonal - slack)
        ),
    )
    start = max(0, best - slack)
    window = row[start : best + size + slack]
    common = np.zeros(size, dtype=bool)
    blocks = [block for block in LCSseq.opcodes(window, part) if block.tag == "equal"]
    for block in blocks:
        common[block.dest_start : block.dest_end] = True
    if not blocks:
        return Alignment(common, start, start)
    return Alignment(common, start + blocks[0].src_start, start + blocks[-1].src_end)
