"""Read a data set whole, in several processes where that helps, and keep what the report needs."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.data.build import Recipe, map_chunks, useful_processes
from hfpar.data.overlap.screen import Screen
from hfpar.data.reading.rows import Place, Problem
from hfpar.data.reading.sources import DataFile, read_chunks, resolve
from hfpar.data.store import DataReport
from hfpar.datatool.duplicates import RowDigests
from hfpar.datatool.facts import ChunkFacts, inspect_chunk
from hfpar.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_PLACES = 5
"""So many places of a kind are listed; `--json` has those of all problems."""

Progress = Callable[[str, int, int], None]
"""Told the file, the bytes and the rows of each chunk that is done."""


class Numbers:
    """Whole numbers that pile up, 8 bytes each."""

    def __init__(self) -> None:
        """Start with none."""
        self._values = array("q")

    def add(self, values: np.ndarray) -> None:
        """Append an int64 array."""
        self._values.frombytes(values.astype(np.int64, copy=False).tobytes())

    @property
    def values(self) -> np.ndarray:
        """All, in order."""
        return np.array(self._values, dtype=np.int64)


class SourceFacts:
    """One entry of `dataset`: its samples, as `hold_out` and the loader need them."""

    def __init__(self, source: DataSource) -> None:
        """Start without a row."""
        self.path, self.weight = source.path, source.weight
        self.report = DataReport()
        self.lengths = self.rows = self.files = np.zeros(0, dtype=np.int64)
        self._lengths, self._rows, self._files, self._contents = Numbers(), Numbers(), Numbers(), Numbers()

    def __len__(self) -> int:
        return len(self.lengths)

    def add(self, facts: ChunkFacts, file_number: int) -> None:
        """Count a chunk."""
        problems = Counter(problem.kind for problem in facts.problems)
        self.report.add(facts.report or DataReport(num_rows=facts.num_rows, problems=problems))
        self._lengths.add(facts.lengths)
        self._rows.add(facts.sample_rows)
        self._files.add(np.full(len(facts.lengths), file_number, dtype=np.int64))
        self._contents.add(facts.sample_contents.view(np.int64))

    def finish(self) -> None:
        """Make arrays of what has piled up."""
        self.lengths, self.rows, self.files = self._lengths.values, self._rows.values, self._files.values

    def contents(self) -> np.ndarray:
        """`(samples,)` uint64: see `content_hashes`."""
        return self._contents.values.view(np.uint64)


class DataFacts:
    """All that was found in `dataset` or `eval_dataset`."""

    def __init__(self, key: str, *, has_tokens: bool, keep_all_problems: bool) -> None:
        """Start without a row.

        Args:
            key: the setting's name.
            has_tokens: whether there is a tokenizer.
            keep_all_problems: else the first few of a kind are kept, and all counted.
        """
        self.key = key
        self.has_tokens = has_tokens
        self.sources: list[SourceFacts] = []
        self.report = DataReport()
        self.formats: Counter[str] = Counter()
        self.roles: Counter[str] = Counter()
        self.problems: list[Problem] = []
        self.noted_places: dict[str, list[Place]] = {}
        self.digests = RowDigests()
        self.turns, self.whole_lengths, self.whole_label_lengths = Numbers(), Numbers(), Numbers()
        self._keep_all_problems = keep_all_problems
        self._num_kept: Counter[str] = Counter()

    @property
    def lengths(self) -> np.ndarray:
        """`(samples,)` tokens in each, source after source."""
        return np.concatenate([source.lengths for source in self.sources])

    def add(self, path: str, unit: str, facts: ChunkFacts) -> None:
        """Count a chunk of the last source."""
        self.digests.add(path, unit, facts)
        self.sources[-1].add(facts, len(self.digests.files))
        self.formats += facts.formats
        self.roles += facts.roles
        self.turns.add(facts.turns)
        self.whole_lengths.add(facts.whole_lengths)
        self.whole_label_lengths.add(facts.whole_label_lengths)
        for problem in facts.problems:
            if self._keep_all_problems or self._num_kept[problem.kind] < MOST_PLACES:
                self.problems.append(problem)
                self._num_kept[problem.kind] += 1
        for kind, place in facts.noted_places:
            places = self.noted_places.setdefault(kind, [])
            if len(places) < MOST_PLACES:
                places.append(place)


def find_files(key: str, sources: Sequence[DataSource]) -> list[list[DataFile]]:
    """The files of each entry of `dataset` or `eval_dataset`.

    Raises:
        DataError: an entry has none.
    """
    try:
        return [resolve(source) for source in sources]
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def gather(
    facts: DataFacts,
    config: SFTConfig,
    sources: Sequence[DataSource],
    files: Sequence[Sequence[DataFile]],
    tokenizer: PreTrainedTokenizerBase | None,
    progress: Progress,
) -> None:
    """Read all rows of a data set.

    Args:
        facts: gets what is found.
        config: says what becomes of a row.
        sources: the entries of the data set.
        files: of each.
        tokenizer: with its chat template, if there is one.
        progress: see `Progress`.

    Raises:
        DataError: a file that can't be read at all.
    """
    screen = Screen.of(config) if facts.key == "dataset" else None
    for source, found in zip(sources, files, strict=True):
        facts.sources.append(SourceFacts(source))
        num_bytes = sum(file.num_bytes for file in found)
        recipe = Recipe.of(config, source, screen).for_data(found, streaming=config.streaming)
        facts.sources[-1].report.add(DataReport(hidden_items=recipe.hidden_items))
        chunks = map_chunks(
            inspect_chunk,
            read_chunks(found, streaming=config.streaming),
            tokenizer,  # type: ignore[arg-type]
            recipe,
            useful_processes(num_bytes, config.dataset_num_proc),
        )
        for chunk, chunk_facts in chunks:
            facts.add(chunk.path, chunk.unit, chunk_facts)
            progress(chunk.path, chunk.num_bytes, chunk_facts.num_rows)
        facts.sources[-1].finish()
        facts.report.add(facts.sources[-1].report)
