"""Finds the items of benchmarks in rows of training data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.data.overlap.grams import FoundGrams, GramTable, find_families, hash_runs
from hfpar.data.overlap.score import align, common_runs, cover, positions_of, spread
from hfpar.data.overlap.short import ShortTexts
from hfpar.data.overlap.words import NUMBER, Vocabulary, split_words

HitKind = Literal["verbatim", "long_run", "near"]
Field = Literal["question", "solution"]

KINDS: tuple[HitKind, ...] = ("verbatim", "long_run", "near")
"""From the surest on."""
MIN_WORDS = 8
MAX_FAMILIES = 2
"""What more items have in common, unless they vary one another, tells nothing about one of them."""
VERBATIM_SHARE = 0.9
LONG_RUN_WORDS = 13
SOLUTION_SHARE = 1 / 3
"""Solutions are alike in their phrases and sums: a long run must be so much of one."""
NEAR_SIMILARITY = 0.8
NEAR_COMMON = 8
"""Words, numbers and single letters apart, that a near match has in common at least."""
NEAR_WORDS = 12
"""Shorter questions aren't looked for in other words: chance makes too many that are like them."""
_NEAR_SIZE = 4
_NEAR_SHARE = 0.2
"""Of a question's short runs, numbers left open, that a row must have to be compared with it word by word."""
SHORTEST = 3
"""Questions of fewer words aren't looked for."""


class Part(NamedTuple):
    """A text of an item that is looked for."""

    item: int
    """Its number over all benchmarks."""
    field: Field
    ids: list[int]
    """Of its words."""
    open_ids: list[int]
    """The same with all numbers alike."""


class RowText(NamedTuple):
    """What a training row says."""

    texts: tuple[str, ...]
    """Turn by turn."""
    prompt: str
    """What is asked, by which rows are told apart."""


@dataclass(frozen=True)
class Hit:
    """A benchmark's item in a row."""

    benchmark: str
    item: BenchmarkItem
    field: Field
    """Which of the item's texts."""
    kind: HitKind
    score: float
    """Of `verbatim` and `long_run`: the share of the text's telling words that common runs cover; of `near`: the share
    of its telling words, numbers apart, that the row has in the same order."""
    num_words: int
    """Words of the longest common run; 0 for `near`."""
    row_span: tuple[int, int]
    """`[start, end)` of that run, or of the like stretch, in the row's words; one more word ends each of its texts."""
    item_span: tuple[int, int]
    """The same in the words of the item's text."""


class BenchmarkIndex:
    """Benchmarks, ready for being looked for in rows.

    Attributes:
        items: the benchmarks' names and items, all in one list.
        parts: the texts of at least `min_words` words that are looked for.
        runs: runs of `min_words` words of them.
        near_runs: short runs of the questions, numbers left open.
    """

    def __init__(self, benchmarks: Sequence[Benchmark], min_words: int = MIN_WORDS) -> None:
        """Take in the benchmarks.

        Args:
            benchmarks: whose items.
            min_words: words of the shortest common run that counts.
        """
        self.min_words = min_words
        self.items = [(benchmark.name, item) for benchmark in benchmarks for item in benchmark.items]
        texts = [
            (number, field, split_words(text))
            for number, (_, item) in enumerate(self.items)
            for field, text in _texts(item)
        ]
        self.vocabulary = Vocabulary(words for _, _, words in texts)
        self._is_number = self.vocabulary.numbers()
        self._is_long_word = self.vocabulary.long_words()
        parts = [self._part(*text) for text in texts]
        questions = [part for part in parts if part.field == "question"]
        families = find_families([np.array(part.open_ids) for part in questions], _NEAR_SIZE + 1)
        family_of_item = dict(zip((part.item for part in questions), families.tolist(), strict=True))
        self.parts = [part for part in parts if len(part.ids) >= min_words]
        self.runs = self._table(self.parts, family_of_item, is_open=False)
        self._near_parts = [
            number
            for number, part in enumerate(self.parts)
            if part.field == "question" and len(part.ids) >= NEAR_WORDS
        ]
        near = [self.parts[number] for number in self._near_parts]
        self.near_runs = self._table(near, family_of_item, is_open=True)
        self._near_needed = np.array([self._near_runs_needed(part) for part in near], dtype=np.int64)
        # A single run is too little for any kind of hit, but in the shortest texts.
        self._needed = np.array([1 + (len(part.ids) > min_words) for part in self.parts], dtype=np.int64)
        self._questions = questions
        short = {
            tuple(part.ids): number
            for number, part in enumerate(questions)
            if SHORTEST <= len(part.ids) < min_words
        }
        self._short = ShortTexts(short, self.vocabulary)

    def _part(self, item: int, field: Field, words: Sequence[str]) -> Part:
        ids = self.vocabulary.ids(words)
        return Part(item, field, ids.tolist(), self.open_numbers(ids).tolist())

    def _table(self, parts: Sequence[Part], families: dict[int, int], *, is_open: bool) -> GramTable:
        return GramTable(
            [np.array(part.open_ids if is_open else part.ids) for part in parts],
            _NEAR_SIZE if is_open else self.min_words,
            np.array([families[part.item] for part in parts], dtype=np.int64),
            MAX_FAMILIES,
        )

    def _near_runs_needed(self, part: Part) -> int:
        grams = np.unique(self.near_runs.find(np.array(part.open_ids)).grams)
        return max(3, int(_NEAR_SHARE * self.near_runs.has_weight[grams].sum()))

    def without(self, templates: Templates) -> BenchmarkIndex:
        """The same index in which runs of words that stand in most rows tell nothing."""
        other = copy.copy(self)
        other.runs = self.runs.without(templates.runs)
        other.near_runs = self.near_runs.without(templates.near_runs)
        return other

    def hidden_by(self, templates: Templates) -> list[tuple[str, BenchmarkItem]]:
        """Items that stand in a template, almost whole, so that no row is found by them."""
        hidden = {}
        for part in self.parts:
            grams = self.runs.find(np.array(part.ids)).grams
            grams = grams[self.runs.has_weight[grams]]
            if len(grams) and templates.runs[grams].mean() >= VERBATIM_SHARE:
                hidden[part.item] = self.items[part.item]
        return list(hidden.values())

    # Looking for items

    def find(self, rows: Sequence[RowText]) -> list[list[Hit]]:
        """The items that each row holds, the surest first and each once; a thousand rows at a time are fast."""
        words = self.encode(rows)
        found, near = self.runs.find(words.ids), self.near_runs.find(self.open_numbers(words.ids))
        candidates: dict[int, dict[int, bool]] = {}
        """By row: the parts, and whether they're compared for their runs."""
        pairs = self.near_runs.pairs(near, words.row_of_word, len(self._near_parts))
        is_enough = pairs.counts >= self._near_needed[pairs.parts]
        for row, part in zip(pairs.rows[is_enough].tolist(), pairs.parts[is_enough].tolist(), strict=True):
            candidates.setdefault(row, {})[self._near_parts[part]] = False
        pairs = self.runs.pairs(found, words.row_of_word, len(self.parts))
        is_enough = pairs.counts >= self._needed[pairs.parts]
        for row, part in zip(pairs.rows[is_enough].tolist(), pairs.parts[is_enough].tolist(), strict=True):
            candidates.setdefault(row, {})[part] = True
        hits: list[list[Hit]] = [[] for _ in rows]
        for row, parts in candidates.items():
            seen = _SeenRow(
                words.of_row(row).tolist(),
                self.open_numbers(words.of_row(row)).tolist(),
                words.within_row(row, found),
                words.within_row(row, near),
            )
            compared = (self._compare(seen, part, has_runs) for part, has_runs in parts.items())
            hits[row] = _best(hit for hit in compared if hit is not None)
        for row in np.unique(words.row_of_word[self._short.positions(words.ids)]).tolist():
            short = [
                self._hit(
                    self._questions[number], "verbatim", 1.0, end - start, (start, end), (0, end - start)
                )
                for number, start, end in self._short.find(rows[row].texts)
            ]
            hits[row] = _best([*hits[row], *short])
        return hits

    def encode(self, rows: Sequence[RowText]) -> RowWords:
        """The words of rows."""
        ids, starts = self.vocabulary.encode(text for row in rows for text in row.texts)
        starts = starts[np.cumsum([0] + [len(row.texts) for row in rows])]
        return RowWords(ids, starts, np.repeat(np.arange(len(rows)), np.diff(starts)))

    def open_numbers(self, ids: np.ndarray) -> np.ndarray:
        """Words with all numbers alike."""
        return np.where(self._is_number[ids], NUMBER, ids)

    def _compare(self, row: _SeenRow, number: int, has_runs: bool) -> Hit | None:
        part = self.parts[number]
        found = self._compare_runs(row, part) if has_runs else None
        if found is not None or part.field != "question" or len(part.ids) < NEAR_WORDS:
            return found
        return self._compare_loosely(row, part)

    def _compare_runs(self, row: _SeenRow, part: Part) -> Hit | None:
        runs = common_runs(row.ids, part.ids, self.min_words, self.runs.starts(row.found, part.ids))
        coverage = cover(runs, self._is_telling(self.runs, part.ids), self.min_words)
        run = coverage.longest
        if run is None:
            return None
        is_number_left_out = self._is_number[np.array(part.ids)[coverage.left_out]].any()
        is_verbatim = coverage.share >= VERBATIM_SHARE and not is_number_left_out
        is_long = coverage.telling_words >= LONG_RUN_WORDS
        if part.field == "solution" and coverage.share < SOLUTION_SHARE:
            is_long = False
        if not (is_verbatim or is_long):
            return None
        return self._hit(
            part,
            "verbatim" if is_verbatim else "long_run",
            coverage.share,
            run.num_words,
            (run.row_start, run.row_start + run.num_words),
            (run.part_start, run.part_start + run.num_words),
        )

    def _compare_loosely(self, row: _SeenRow, part: Part) -> Hit | None:
        anchors = positions_of(
            row.open_ids, part.open_ids, _NEAR_SIZE, self.near_runs.starts(row.near, part.open_ids)
        )
        if not anchors:
            return None
        telling = spread(self._is_telling(self.near_runs, part.open_ids), _NEAR_SIZE)
        telling &= np.array(part.open_ids) != NUMBER
        found = align(row.open_ids, part.open_ids, anchors)
        common = found.common & telling
        similarity = int(common.sum()) / max(1, int(telling.sum()))
        num_long = int((common & self._is_long_word[part.open_ids]).sum())
        if similarity < NEAR_SIMILARITY or num_long < NEAR_COMMON:
            return None
        span = (found.row_start, found.row_end)
        return self._hit(part, "near", similarity, 0, span, (0, len(part.ids)))

    def _is_telling(self, table: GramTable, ids: Sequence[int]) -> np.ndarray:
        """`(runs of a part,)` bool."""
        return table.has_weight[np.searchsorted(table.hashes, hash_runs(np.array(ids), table.size))]

    def _hit(
        self,
        part: Part,
        kind: HitKind,
        score: float,
        num_words: int,
        row_span: tuple[int, int],
        item_span: tuple[int, int],
    ) -> Hit:
        name, item = self.items[part.item]
        return Hit(name, item, part.field, kind, round(score, 4), num_words, row_span, item_span)


@dataclass(frozen=True)
class RowWords:
    """Words of many rows, back to back."""

    ids: np.ndarray
    """`(words,)` int32"""
    starts: np.ndarray
    """`(rows + 1,)` where each row begins."""
    row_of_word: np.ndarray
    """`(words,)` int64"""

    def of_row(self, row: int) -> np.ndarray:
        """The words of one row."""
        return self.ids[self.starts[row] : self.starts[row + 1]]

    def within_row(self, row: int, found: FoundGrams) -> FoundGrams:
        """Those that lie in a row, counted from its beginning."""
        begin, end = np.searchsorted(found.positions, self.starts[row : row + 2])
        return FoundGrams(found.positions[begin:end] - self.starts[row], found.grams[begin:end])


class _SeenRow(NamedTuple):
    """A row's words, and which of the benchmarks' runs are where in them."""

    ids: list[int]
    open_ids: list[int]
    found: FoundGrams
    near: FoundGrams


@dataclass(frozen=True)
class Templates:
    """What stands in so many rows that it tells nothing about one of them."""

    runs: np.ndarray
    """`(runs of the index,)` bool"""
    near_runs: np.ndarray
    """`(short runs of the index,)` bool"""
    num_prompts: int
    """Different prompts that were looked at."""


def _texts(item: BenchmarkItem) -> Iterator[tuple[Field, str]]:
    yield "question", item.question
    if item.solution:
        yield "solution", item.solution


def _best(hits: Iterator[Hit] | Sequence[Hit]) -> list[Hit]:
    """One hit for each item, the surest."""
    ordered = sorted(hits, key=lambda hit: (KINDS.index(hit.kind), -hit.score, hit.field))
    best: dict[tuple[str, str], Hit] = {}
    for hit in ordered:
        best.setdefault((hit.benchmark, hit.item.item_id), hit)
    return list(best.values())
