"""Reader of a JSON file that is one list of rows, which is never held as a whole."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from hfpar.data.reading import text_files
from hfpar.data.reading.byte_source import ByteSource
from hfpar.data.reading.chunks import TOO_DEEP, Chunk, has_escaped_bytes, is_too_deep, json_reason
from hfpar.data.reading.rows import Place, RowError
from hfpar.data.reading.text_files import BYTE_ORDER_MARK, REST_IS_LOST, SKIP_BYTES, problem_chunk, too_long
from hfpar.errors import DataError

_BLOCK = 1 << 20


def is_json_list(path: str, compression: str | None) -> bool:
    """Tell whether a `.json` file is a list of rows; otherwise it is JSON lines.

    Raises:
        DataError: it is neither.
    """
    with ByteSource(path, compression) as source:
        first = _next_line(source).removeprefix(BYTE_ORDER_MARK)
        if not first.strip():
            first = _next_line(source)
        if first.lstrip().startswith(b"["):
            return True
        second = _next_line(source) if first.endswith(b"\n") else b""
    if second and not second.lstrip().startswith(b"{"):
        try:
            json.loads(first)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{path}: one JSON object over several lines, where a list of rows or one row a line is needed"
            ) from error
    return False


def _next_line(source: ByteSource) -> bytes:
    """The start of the next line that isn't empty, or nothing."""
    try:
        while (line := source.readline(SKIP_BYTES)) and not line.strip():
            pass
    except RowError:
        return b""
    return line


def read_json_list(source: ByteSource, limits: tuple[int, int]) -> Iterator[Chunk]:
    """Read a JSON file that is one list of rows, however it is laid out.

    A row's number is its place in the list; several may stand on one line.

    Args:
        source: of the bytes.
        limits: rows and bytes at which a chunk is full.
    """
    text, items, size, number = _Text(source), [], 0, 0
    try:
        for value, length in text.values():
            number += 1
            if isinstance(value, RowError):
                value = value.at(Place(source.path, "row", number))
            items.append((number, value))
            size += length
            if len(items) >= limits[0] or size >= limits[1]:
                yield Chunk(source.path, "row", items[0][0], "values", items)
                items, size = [], 0
    except RowError as error:
        if items:
            yield Chunk(source.path, "row", items[0][0], "values", items)
        yield problem_chunk(source.path, "row", number + 1, error)
        return
    if items:
        yield Chunk(source.path, "row", items[0][0], "values", items)


class _Text:
    """Decoded text of a source, a window of it at a time."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.decode = codecs.getincrementaldecoder("utf-8-sig")(errors="surrogateescape").decode
        self.text = ""
        self.position = 0
        self.line = 1
        """Of the position, from 1."""
        self.num_before = 0
        """Characters of the window's first line that stand before the window."""
        self.at_end = False

    def values(self) -> Iterator[tuple[Any, int]]:
        """Yield the list's elements, each as its value, or what is wrong with it, and its length.

        Raises:
            RowError: what stands next isn't a list's text; no more can be read.
        """
        self._peek()
        self.position += 1  # the opening bracket
        if self._peek() != "]":
            yield self._value()
            while self._peek() == ",":
                self.position += 1
                self._peek()
                yield self._value()
        mark = self._peek()
        if not mark:
            raise RowError("file cut short", "the file ends before its list is closed")
        if mark != "]":
            raise RowError("broken JSON", f"not valid JSON: a comma or ] is needed{REST_IS_LOST}")
        self.position += 1
        if self._peek():
            raise RowError("broken JSON", "not valid JSON: more text behind the end of the list")

    def _more(self) -> None:
        """Read at least a block, or as much again as is waiting, and let go of what is passed."""
        passed, rest = self.text[: self.position], self.text[self.position :]
        self.num_before = len(passed) - passed.rfind("\n") - 1 + (0 if "\n" in passed else self.num_before)
        parts, wanted = [rest], max(_BLOCK, len(rest))
        while wanted > 0 and not self.at_end:
            data = self.source.read(_BLOCK)
            self.at_end = not data
            parts.append(self.decode(data, self.at_end))
            wanted -= len(data)
        self.text, self.position = "".join(parts), 0

    def _peek(self) -> str:
        """The next character that isn't white space, or nothing at the end."""
        while True:
            start = self.position
            while self.position < len(self.text) and self.text[self.position] in " \t\r\n":
                self.position += 1
            self.line += self.text.count("\n", start, self.position)
            if self.position < len(self.text):
                return self.text[self.position]
            if self.at_end:
                return ""
            self._more()

    def _value(self) -> tuple[Any, int]:
        while True:
            try:
                value, end = _DECODER.raw_decode(self.text, self.position)
            except (ValueError, RecursionError) as error:
                if not self.at_end and self._may_be_unfinished(error):
                    self._more()
                    continue
                raise self._problem(error) from error
            if end < len(self.text) or self.at_end:
                return self._pass(value, end)
            self._more()  # a number may go on behind the window

    def _may_be_unfinished(self, error: Exception) -> bool:
        if len(self.text) - self.position > text_files.MAX_LINE_BYTES:
            raise RowError(too_long("").kind, too_long("the row").reason + REST_IS_LOST)
        return isinstance(error, json.JSONDecodeError) and (
            error.msg.startswith("Unterminated string") or error.pos >= len(self.text) - 12
        )

    def _problem(self, error: Exception) -> RowError:
        if not isinstance(error, json.JSONDecodeError):
            return RowError("broken JSON", json_reason(error) + REST_IS_LOST)
        if self.at_end and (error.pos >= len(self.text) or error.msg.startswith("Unterminated string")):
            return RowError("file cut short", "the file ends before its list is closed")
        line = self.line + self.text.count("\n", self.position, error.pos)
        before = self.text.rfind("\n", 0, error.pos)
        column = error.pos - before + (self.num_before if before < 0 else 0)
        return RowError(
            "broken JSON", f"not valid JSON: {error.msg} at line {line}, column {column}{REST_IS_LOST}"
        )

    def _pass(self, value: Any, end: int) -> tuple[Any, int]:
        text, self.position = self.text[self.position : end], end
        self.line += text.count("\n")
        if has_escaped_bytes(text):
            value = RowError("not UTF-8", "not UTF-8")
        elif is_too_deep(text, value):
            value = RowError("broken JSON", TOO_DEEP)
        return value, len(text)


_DECODER = json.JSONDecoder()
