"""Read training rows from files or from the hub, and say exactly where one is wrong."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hfpar.errors import DataError

Row = dict[str, Any]

_JSON_LINES = (".jsonl", ".ndjson")
_BUILDERS = {".json": "json", ".parquet": "parquet", ".csv": "csv"}


def load_conversations(paths: str | list[str]) -> list[Row]:
    """Read and check all rows of one or more data sets, in order.

    Args:
        paths: Each a `.jsonl` (or `.ndjson`), `.json`, `.parquet` or `.csv` file, or a data set's id on the
            hub, whose `train` split is read unless the id names another, as in `owner/name:test`.

    Returns:
        Rows with `messages` (a list of objects with `role` and `content`), with `prompt` and `completion`
        (both strings, or both such lists), or with `text`. Keys without a value are left out.

    Raises:
        DataError: A file is missing, unreadable or empty, or a row is not one of these; the message names the
            file, the line (or row) and the reason.
    """
    rows: list[Row] = []
    for path in [paths] if isinstance(paths, str) else paths:
        found = list(_load(path))
        if not found:
            raise DataError(f"{path}: the data set is empty")
        rows += found
    if not rows:
        raise DataError("dataset: no file is named")
    return rows


def _load(path: str) -> Iterator[Row]:
    path = os.path.expanduser(path)
    suffix = Path(path).suffix.lower()
    if suffix in _JSON_LINES:
        return _checked(path, "line", _read_json_lines(path))
    if suffix in _BUILDERS:
        _require_file(path)
        return _checked(path, "row", _read_with_datasets(path, _BUILDERS[suffix]))
    if Path(path).exists() or path.startswith((".", "/", "~")) or path.count("/") > 1:
        _require_file(path)
        known = ", ".join([*_JSON_LINES, *_BUILDERS])
        raise DataError(f"{path}: unknown kind of file; allowed are {known}")
    return _checked(path, "row", _read_from_hub(path))


def _require_file(path: str) -> None:
    if not Path(path).is_file():
        raise DataError(f"{path}: {'is a folder, not a file' if Path(path).is_dir() else 'no such file'}")


def _read_json_lines(path: str) -> Iterator[tuple[int, Any]]:
    """Yield `(line number, value)`; blank lines are skipped but counted."""
    _require_file(path)
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of some editors
                if line.strip():
                    yield number, _parse_line(path, number, line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_line(path: str, number: int, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8").rstrip())
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: not UTF-8 (byte {error.start + 1} of the line)") from error
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number}: not valid JSON: {error.msg} at column {error.colno}"
        ) from error
    except RecursionError as error:
        raise DataError(f"{path}, line {number}: JSON nested too deeply to be read") from error


def _read_with_datasets(path: str, builder: str) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        table = datasets.load_dataset(builder, data_files=path, split="train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: cannot be read as {builder}: {_reason(error)}") from error
    return enumerate(map(_without_nulls, table), start=1)


def _read_from_hub(path: str) -> Iterator[tuple[int, Any]]:
    import datasets

    name, _, split = path.partition(":")
    try:
        table = datasets.load_dataset(name, split=split or "train")
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{path}: no such file, and the hub does not give it: {_reason(error)}") from error
    return enumerate(map(_without_nulls, table), start=1)


def _without_nulls(value: Any) -> Any:
    """Leave out what a table's columns add: there every message, and every tool's arguments, has the keys of all."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _reason(error: BaseException) -> str:
    """The innermost cause in one line: `datasets` wraps what really happened."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _checked(path: str, unit: str, numbered: Iterable[tuple[int, Any]]) -> Iterator[Row]:
    for number, value in numbered:
        if not isinstance(value, dict):
            raise DataError(f"{path}, {unit} {number}: {type(value).__name__} where an object is needed")
        row = {key: item for key, item in value.items() if item is not None}
        problem = _problem(row)
        if problem:
            raise DataError(f"{path}, {unit} {number}: {problem}")
        yield row


def _problem(row: Row) -> str | None:
    """Return what is wrong with a row, or None."""
    if "messages" in row:
        return _messages_problem("messages", row["messages"])
    if "prompt" in row and "completion" in row:
        prompt, completion = row["prompt"], row["completion"]
        if isinstance(prompt, str) and isinstance(completion, str):
            return None
        if isinstance(prompt, list) and isinstance(completion, list):
            return _messages_problem("prompt", prompt) or _messages_problem("completion", completion)
        return '"prompt" and "completion" must both be strings or both be lists of messages'
    if "text" in row:
        return None if isinstance(row["text"], str) else '"text" must be a string'
    found = ", ".join(sorted(row)) or "none"
    return f'needs "messages", or "prompt" and "completion", or "text"; its keys are: {found}'


def _messages_problem(name: str, messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f'"{name}" must be a list of at least one message'
    for index, message in enumerate(messages, start=1):
        if not isinstance(message, dict):
            return f'"{name}" {index} is not an object'
        if not isinstance(message.get("role"), str):
            return f'"{name}" {index} has no "role" (a string)'
        if not isinstance(message.get("content"), (str, list)) and not message.get("tool_calls"):
            return f'"{name}" {index} has no "content" (a string, or a list of parts)'
    return None
