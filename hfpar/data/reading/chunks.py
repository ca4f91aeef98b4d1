"""A piece of a file on its way to the process that decodes it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from hfpar.data.reading.rows import Place, Problem, RowError

ChunkForm = Literal["lines", "empty lines", "values", "cells", "arrow"]

MAX_DEPTH = 128
"""Rows nested deeper are problems: many a function on their way would fail on them."""

_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
"""A byte that wasn't UTF-8, as Python's `surrogateescape` keeps it."""


@dataclass(frozen=True)
class Chunk:
    """Neighbouring rows of one file, not decoded yet, so that another process can do it."""

    path: str
    unit: str
    """`line` or `row`."""
    first: int
    """Number of the first row, from 1."""
    form: ChunkForm
    payload: Any
    """By form: whole lines of JSON as bytes; how many empty lines; a list of (number, value); a CSV file's
    header and its rows as lists of text; an Arrow stream as bytes. A `Problem` can stand in for a value."""
    num_bytes: int = 0
    """How much further the reader got in the file, in bytes on disk; all chunks together make about its size."""

    def rows(self) -> Iterator[tuple[Place, dict[str, Any] | Problem]]:
        """Decode the rows, in order, each with its place; what can't be decoded is a problem."""
        for number, value in self._values():
            place = Place(self.path, self.unit, number)
            if isinstance(value, RowError):
                value = value.at(place)
            elif not isinstance(value, (dict, Problem)):
                value = Problem("wrong type", place, f"{type_name(value)} where an object is needed")
            yield place, value

    def _values(self) -> Iterable[tuple[int, Any]]:
        if self.form == "lines":
            return enumerate(map(_parse_line, split_lines(self.payload)), start=self.first)
        if self.form == "empty lines":
            return ((number, _EMPTY) for number in range(self.first, self.first + self.payload))
        if self.form == "values":
            return self.payload
        if self.form == "cells":
            header, rows = self.payload
            return enumerate((_parse_cells(header, row) for row in rows), start=self.first)
        return enumerate(_parse_arrow(self.payload), start=self.first)


TOO_DEEP = "JSON nested too deeply to be read"
_EMPTY = RowError("empty line", "the line is empty")


def type_name(value: Any) -> str:
    """A value's type as JSON calls it, with its article."""
    names = {
        str: "a string",
        list: "a list",
        bool: "a boolean",
        int: "a number",
        float: "a number",
        dict: "an object",
    }
    return "null" if value is None else names.get(type(value), type(value).__name__)


def split_lines(payload: bytes) -> list[bytes]:
    """Cut at line feeds alone; Python's `splitlines` knows more ends of lines than JSON files have."""
    lines = payload.split(b"\n")
    if not lines[-1]:
        lines.pop()
    return lines


def json_reason(error: Exception) -> str:
    """Say in a few words what `json` found."""
    if isinstance(error, json.JSONDecodeError):
        return f"not valid JSON: {error.msg} at column {error.colno}"
    if isinstance(error, RecursionError):
        return TOO_DEEP
    return f"not valid JSON: {' '.join(str(error).split())}"


def is_too_deep(text: str, value: Any) -> bool:
    """Whether a value is nested deeper than `MAX_DEPTH`; its text saves most of the search."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return False
    level = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MAX_DEPTH):
        level = [
            item
            for parent in level
            for item in (parent.values() if isinstance(parent, dict) else parent)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return False
    return True


def _parse_line(line: bytes) -> Any:
    try:
        text = line.decode("utf-8").rstrip()
    except UnicodeDecodeError as error:
        return RowError("not UTF-8", f"not UTF-8 (byte {error.start + 1} of the line)")
    if not text:
        return _EMPTY
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return RowError("broken JSON", json_reason(error))
    return RowError("broken JSON", TOO_DEEP) if is_too_deep(text, value) else value


def _parse_cells(header: list[str], row: list[str] | Problem) -> Any:
    if isinstance(row, Problem):
        return row
    if not row:
        return _EMPTY
    if len(row) != len(header):
        return RowError("wrong number of cells", f"{len(row)} cells under {len(header)} columns")
    for name, cell in zip(header, row, strict=True):
        if has_escaped_bytes(cell):
            return RowError("not UTF-8", f'not UTF-8 (column "{name}")')
    return {name: _parse_cell(cell) for name, cell in zip(header, row, strict=True)}


def has_escaped_bytes(text: str) -> bool:
    """Whether text that was decoded with `surrogateescape` held bytes that aren't UTF-8."""
    return not text.isascii() and _ESCAPED_BYTE.search(text) is not None


def _parse_cell(cell: str) -> Any:
    """None for an empty cell; a list of messages where the cell is one as JSON."""
    if not cell:
        return None
    if cell.lstrip()[:1] == "[":
        try:
            value = json.loads(cell)
        except (ValueError, RecursionError):
            return cell
        if value and all(isinstance(item, dict) and ("role" in item or "from" in item) for item in value):
            return value
    return cell


def _parse_arrow(payload: bytes) -> Iterator[Any]:
    import pyarrow

    table = pyarrow.ipc.open_stream(payload).read_all()
    names, types = table.schema.names, table.schema.types
    try:
        rows = table.to_pylist()
    except (ValueError, OverflowError):
        rows = [_one_arrow_row(table.slice(index, 1)) for index in range(table.num_rows)]
    has_json = "arrow.json" in str(table.schema)
    for row in rows:
        if has_json and isinstance(row, dict):
            row = {name: _decode_json(row[name], kind) for name, kind in zip(names, types, strict=True)}
        # A row's own keys stay, as null: they tell which columns there are.
        yield {key: _without_nulls(item) for key, item in row.items()} if isinstance(row, dict) else row


def _one_arrow_row(table: Any) -> Any:
    try:
        return table.to_pylist()[0]
    except UnicodeDecodeError:
        return RowError("not UTF-8", "a text is not UTF-8")
    except (ValueError, OverflowError) as error:
        return RowError("wrong type", f"cannot be read: {' '.join(str(error).split())}")


def _decode_json(value: Any, kind: Any) -> Any:
    """Decode what `datasets` stores as JSON text in columns of mixed types."""
    import pyarrow

    if value is None:
        return None
    if isinstance(kind, pyarrow.JsonType):
        return json.loads(value)
    if pyarrow.types.is_struct(kind):
        return {field.name: _decode_json(value[field.name], field.type) for field in kind}
    if isinstance(value, list):
        return [_decode_json(item, kind.value_type) for item in value]
    return value


def _without_nulls(value: Any) -> Any:
    """Leave out what a table's columns add: there every message, and every tool's arguments, has the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
