"""Readers of JSON lines and CSV: from bytes to chunks, with flat memory."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from typing import Any

from hfpar.data.reading.byte_source import ByteSource
from hfpar.data.reading.chunks import Chunk, ChunkForm
from hfpar.data.reading.rows import Place, RowError
from hfpar.errors import DataError

MAX_LINE_BYTES = 32 << 20
"""Longer lines are problems, and are never held in memory."""
SKIP_BYTES = 1 << 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_EMPTY: dict[ChunkForm, Any] = {"lines": b"\n", "cells": []}
REST_IS_LOST = "; the rest of the file isn't read"


class ChunkBuilder:
    """Gathers neighbouring rows until they are enough for a chunk, and counts them.

    Args:
        path: of the file.
        unit: what rows are counted in.
        form: of the chunks.
        limits: rows and bytes at which a chunk is full.
        pack: makes the payload of a list of rows.
    """

    def __init__(
        self,
        path: str,
        unit: str,
        form: ChunkForm,
        limits: tuple[int, int],
        pack: Callable[[list[Any]], Any],
    ) -> None:
        self.path, self.unit, self.form, self.limits, self.pack = path, unit, form, limits, pack
        self.number = 0
        """Rows so far."""
        self._num_empty = 0
        self._items: list[Any] = []
        self._size = 0

    def add_empty(self) -> None:
        """Count an empty line; it is a problem only if another line follows."""
        self.number += 1
        self._num_empty += 1

    def add(self, item: Any, size: int) -> Iterator[Chunk]:
        """Take a row of about so many bytes."""
        if self._num_empty:
            yield from self._empty_lines()
        self.number += 1
        self._items.append(item)
        self._size += size
        if len(self._items) >= self.limits[0] or self._size >= self.limits[1]:
            yield from self.flush()

    def add_problem(self, error: RowError) -> Iterator[Chunk]:
        """Take a row that can't be used."""
        if self._num_empty:
            yield from self._empty_lines()
        yield from self.flush()
        self.number += 1
        yield problem_chunk(self.path, self.unit, self.number, error)

    def flush(self) -> Iterator[Chunk]:
        """Give away the rows that wait."""
        if self._items:
            first = self.number - self._num_empty - len(self._items) + 1
            items, self._items, self._size = self._items, [], 0
            yield Chunk(self.path, self.unit, first, self.form, self.pack(items))

    def _empty_lines(self) -> Iterator[Chunk]:
        if self._num_empty <= self.limits[0]:
            self._items += [_EMPTY[self.form]] * self._num_empty
            self._num_empty = 0
            return
        yield from self.flush()
        first, count, self._num_empty = self.number - self._num_empty + 1, self._num_empty, 0
        yield Chunk(self.path, self.unit, first, "empty lines", count)


def problem_chunk(path: str, unit: str, number: int, error: RowError) -> Chunk:
    """A chunk of one row that can't be used."""
    return Chunk(path, unit, number, "values", [(number, error.at(Place(path, unit, number)))])


def too_long(what: str) -> RowError:
    """The error of a line or row that would take too much memory."""
    return RowError("line too long", f"{what} is longer than {MAX_LINE_BYTES:,} bytes")


def read_lines(source: ByteSource, limits: tuple[int, int]) -> Iterator[Chunk]:
    """Read JSON lines.

    Args:
        source: of the bytes.
        limits: rows and bytes at which a chunk is full.
    """
    builder = ChunkBuilder(source.path, "line", "lines", limits, b"".join)
    try:
        while line := source.readline(MAX_LINE_BYTES + 1):
            if builder.number == 0:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if len(line) > MAX_LINE_BYTES:
                yield from builder.add_problem(too_long("the line"))
                while line and not line.endswith(b"\n"):
                    line = source.readline(SKIP_BYTES)
            elif not line.strip():
                builder.add_empty()
            else:
                yield from builder.add(line, len(line))
    except RowError as error:
        yield from builder.add_problem(error)
    yield from builder.flush()


class _CsvLines:
    """Lines of text for `csv.reader`, which joins those of a cell with line breaks."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.size = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self.source.readline(MAX_LINE_BYTES + 1)
        if not line:
            raise StopIteration
        if len(line) > MAX_LINE_BYTES:
            raise too_long("a line")
        if self.size == 0:
            line = line.removeprefix(BYTE_ORDER_MARK)
        self.size += len(line)
        return line.decode("utf-8", "surrogateescape")


def read_csv(source: ByteSource, delimiter: str, limits: tuple[int, int]) -> Iterator[Chunk]:
    """Read a CSV file whose first row names the columns.

    Row 1 is the first one under the header.

    Args:
        source: of the bytes.
        delimiter: between two cells.
        limits: rows and bytes at which a chunk is full.

    Raises:
        DataError: the header can't be used.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    lines = _CsvLines(source)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    header = _read_header(source.path, reader)
    builder = ChunkBuilder(source.path, "row", "cells", limits, lambda rows: (header, rows))
    while True:
        size = lines.size
        try:
            row = next(reader, None)
        except csv.Error as error:
            is_last = "field limit" in str(error)
            reason = f"not valid CSV: {error}{REST_IS_LOST if is_last else ''}"
            yield from builder.add_problem(RowError("broken CSV", reason))
            if is_last:
                return
        except RowError as error:
            yield from builder.add_problem(RowError(error.kind, error.reason + REST_IS_LOST))
            return
        else:
            if row is None:
                break
            if row:
                yield from builder.add(row, lines.size - size)
            else:
                builder.add_empty()
    yield from builder.flush()


def _read_header(path: str, reader: Iterator[list[str]]) -> list[str]:
    try:
        header = next(reader, None)
    except (csv.Error, RowError) as error:
        raise DataError(f"{path}: its header cannot be read: {error}") from error
    if header is None:
        return []
    twice = sorted({name for name in header if header.count(name) > 1})
    if twice:
        raise DataError(f'{path}: two columns are named "{twice[0]}"')
    return header
