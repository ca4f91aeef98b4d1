"""Benchmark items in rows on their way to training: told of, or left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from hfpar.config.schema import FormatName, SFTConfig
from hfpar.config.validate import names_in
from hfpar.data.benchmarks import Benchmark, load_benchmarks
from hfpar.data.overlap.index import BenchmarkIndex, Hit
from hfpar.data.overlap.rows import find_templates, text_of_example
from hfpar.data.reading.rows import Example, Place
from hfpar.data.reading.sources import DataFile
from hfpar.errors import DataError

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
    hidden_items: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """Items in what most rows of the data set have in common, such as a system prompt; no row is found by them."""

    @classmethod
    def of(cls, config: SFTConfig) -> Screen | None:
        """What is looked for in the rows of `dataset`, if anything is.

        Raises:
            DataError: a benchmark can't be read or used.
        """
        if config.decontaminate_against is None:
            return None
        benchmarks = benchmarks_of(config)
        versions = tuple((benchmark.name, benchmark.sha256) for benchmark in benchmarks)
        return cls(versions, config.decontaminate, benchmarks)

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
        templates = find_templates(index, files, format, columns, streaming=streaming)
        hidden = tuple(f"{name} {item.item_id}" for name, item in index.hidden_by(templates))
        return replace(self, benchmarks=(), index=index.without(templates), hidden_items=hidden)

    def sift(self, examples: Sequence[tuple[Place, Example]]) -> SiftedRows:
        """Look at rows; those that hold an item stay only if it is to be told of."""
        assert self.index is not None
        found = self.index.find([text_of_example(example) for _, example in examples])
        held = [(place, hits) for (place, _), hits in zip(examples, found, strict=True) if hits]
        if self.action == "warn":
            return SiftedRows(list(examples), held)
        return SiftedRows([row for row, hits in zip(examples, found, strict=True) if not hits], held)


def benchmarks_of(config: SFTConfig) -> tuple[Benchmark, ...]:
    """The benchmarks of `decontaminate_against`.

    Raises:
        DataError: one can't be read or used.
    """
    names = names_in(config.decontaminate_against or [])
    if not names:
        raise DataError("decontaminate_against: names no benchmark; name some, such as math500,gsm8k")
    try:
        return load_benchmarks(names, config.benchmark_files or {})
    except DataError as error:
        raise DataError(f"decontaminate_against: {error}") from error


def describe(place: Place, hits: Sequence[Hit]) -> str:
    """A row and the item that it holds, in one line."""
    first = hits[0]
    more = f" and {len(hits) - 1} more" if len(hits) > 1 else ""
    return (
        f"{place}: {first.field} of {first.benchmark} {first.item.item_id} "
        f"({first.kind.replace('_', ' ')}, {first.score:.2f}){more}"
    )
