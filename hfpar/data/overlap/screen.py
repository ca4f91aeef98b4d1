"""Benchmark items in rows on their way to training: told of, or left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hfpar.config.schema import FormatName
from hfpar.data.benchmarks import Benchmark, load_benchmarks
from hfpar.data.overlap.index import BenchmarkIndex, Hit
from hfpar.data.overlap.rows import TEMPLATE_ROWS, TemplateCounter, text_of_example, text_of_row
from hfpar.data.reading.rows import Example, Place, Problem
from hfpar.data.reading.sources import DataFile, read_chunks

DROPPED = "benchmark items"
"""What rows that are left out are counted as."""
KEPT = "hold a benchmark item"
"""What rows that are only told of are counted as."""


class SiftedRows(NamedTuple):
    """Rows, and what was found in them."""

    kept: list[tuple[Place, Example]]
    found: list[tuple[Place, list[Hit]]]
    """Rows that hold an item."""


@dataclass(frozen=True)
class Screen:
    """What is looked for in training rows, and what becomes of those that hold it."""

    versions: tuple[tuple[str, str], ...]
    """Names and fingerprints of the benchmarks."""
    action: Literal["warn", "drop"]
    benchmarks: tuple[Benchmark, ...] = field(repr=False, compare=False)
    index: BenchmarkIndex | None = field(default=None, repr=False, compare=False)
    """Of one data set; see `for_data`."""

    @classmethod
    def of(cls, names: Sequence[str], files: Mapping[str, str], action: Literal["warn", "drop"]) -> Screen:
        """Load the benchmarks.

        Raises:
            DataError: one can't be read or used.
        """
        benchmarks = load_benchmarks(names, files)
        versions = tuple((benchmark.name, benchmark.sha256) for benchmark in benchmarks)
        return cls(versions, action, benchmarks)

    @property
    def counted_as(self) -> str:
        """What rows with an item are counted as."""
        return DROPPED if self.action == "drop" else KEPT

    def for_data(
        self,
        files: Sequence[DataFile],
        format: FormatName,  # noqa: A002
        columns: Mapping[str, str] | None,
        *,
        streaming: bool = False,
    ) -> Screen:
        """The same screen, ready for these files: it reads their first rows to learn what is a template in them.

        Raises:
            DataError: a file can't be read.
        """
        index = BenchmarkIndex(self.benchmarks)
        counter = TemplateCounter(index)
        left = TEMPLATE_ROWS
        for chunk in read_chunks(files, streaming=streaming):
            rows = [row for _, row in chunk.rows() if not isinstance(row, Problem)][:left]
            counter.add([text_of_row(row, format, columns) for row in rows])
            left -= len(rows)
            if left <= 0:
                break
        return replace(self, benchmarks=(), index=index.without(counter.templates()))

    def sift(self, examples: Sequence[tuple[Place, Example]]) -> SiftedRows:
        """Look at rows; those that hold an item stay only if it is to be told of."""
        assert self.index is not None
        found = self.index.find([text_of_example(example) for _, example in examples])
        held = [(place, hits) for (place, _), hits in zip(examples, found, strict=True) if hits]
        if self.action == "warn":
            return SiftedRows(list(examples), held)
        return SiftedRows([row for row, hits in zip(examples, found, strict=True) if not hits], held)


def describe(place: Place, hits: Sequence[Hit]) -> str:
    """A row and the item that it holds, in one line."""
    first = hits[0]
    more = f" and {len(hits) - 1} more" if len(hits) > 1 else ""
    return (
        f"{place}: {first.field} of {first.benchmark} {first.item.item_id} "
        f"({first.kind.replace('_', ' ')}, {first.score:.2f}){more}"
    )
