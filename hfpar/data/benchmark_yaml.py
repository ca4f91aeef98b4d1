"""A benchmark of one's own, described by a small YAML file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from hfpar.config.schema import DataSource
from hfpar.config.yaml_io import Entry, read_mapping
from hfpar.errors import ConfigError, DataError

AnswerKind = Literal["math", "gsm8k", "choice", "exact", "none"]
"""How answers are found in text and compared."""

_KEYS = ("name", "path", "hub", "split", "config", "fields", "answer_kind")


@dataclass(frozen=True)
class Fields:
    """What a benchmark's columns are called."""

    question: str
    answer: str | None = None
    solution: str | None = None
    id: str | None = None
    pair: str | None = None
    """Of a control: the question, or the id, of the benchmark's item that it varies."""


@dataclass(frozen=True)
class BenchmarkSpec:
    """Where a benchmark is and what its columns mean."""

    name: str
    source: DataSource
    fields: Fields
    answer_kind: AnswerKind
    is_hub: bool = False


def read_benchmark_yaml(path: str) -> BenchmarkSpec:
    """Read a benchmark's description: `name`, `path` (relative to the file) or `hub`, `split`, `config`, `fields`
    (`question`, `answer`, `solution`, `id`, `pair`) and `answer_kind`.

    Raises:
        DataError: it can't be read, or a key is unknown, missing, or of the wrong type; one line with its place.
    """  # noqa: D205
    if not Path(path).expanduser().is_file():
        raise DataError(f"{path}: no such file")
    try:
        entries = read_mapping(str(Path(path).expanduser()))
    except ConfigError as error:
        raise DataError(str(error).removeprefix("--config ")) from error
    for key, entry in entries.items():
        _refuse_unknown(f"{path}, line {entry.line}", key, _KEYS)
    texts = {key: _text(path, key, entries) for key in _KEYS if key != "fields"}
    for needed in ("name", "fields"):
        if needed not in entries:
            raise DataError(f"{path}: has no {needed}; keys are {', '.join(_KEYS)}")
    names = _fields(path, entries["fields"])
    return BenchmarkSpec(
        texts["name"] or "",
        _source(path, texts),
        names,
        _answer_kind(path, texts["answer_kind"], names),
        is_hub=texts["hub"] is not None,
    )


def _refuse_unknown(place: str, key: str, allowed: tuple[str, ...]) -> None:
    if key not in allowed:
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(allowed)}"
        raise DataError(f"{place}: unknown key {key}; {hint}")


def _text(path: str, key: str, entries: Mapping[str, Entry]) -> str | None:
    entry = entries.get(key)
    if entry is None:
        return None
    if not isinstance(entry.value, str) or not entry.value.strip():
        raise DataError(f"{path}, line {entry.line}: {key} is {entry.value!r}; must be text")
    return entry.value.strip()


def _source(path: str, texts: Mapping[str, str | None]) -> DataSource:
    file, hub = texts["path"], texts["hub"]
    if (file is None) == (hub is None):
        raise DataError(f"{path}: needs one of path (a file) and hub (an id), and not both")
    if hub is not None:
        return DataSource(path=hub, split=texts["split"], name=texts["config"])
    for key in ("split", "config"):
        if texts[key] is not None:
            raise DataError(f"{path}: {key} is for a data set of the hub, not for path")
    return DataSource(path=str(Path(path).expanduser().parent / Path(str(file)).expanduser()))


def _fields(path: str, entry: Entry) -> Fields:
    allowed = tuple(field.name for field in fields(Fields))
    place = f"{path}, line {entry.line}"
    value: Any = entry.value
    if not isinstance(value, dict):
        raise DataError(f"{place}: fields must be lines such as `question: problem`")
    for key, name in value.items():
        _refuse_unknown(place, str(key), allowed)
        if not isinstance(name, str) or not name:
            raise DataError(f"{place}: {key} is {name!r}; must be the name of a column")
    if "question" not in value:
        raise DataError(f"{place}: fields has no question; it may have {', '.join(allowed)}")
    return Fields(**value)


def _answer_kind(path: str, kind: str | None, names: Fields) -> AnswerKind:
    allowed: tuple[AnswerKind, ...] = get_args(AnswerKind)
    if kind is None and names.answer is None:
        return "none"
    for known in allowed:
        if kind == known:
            if known != "none" and names.answer is None:
                raise DataError(f"{path}: answer_kind {kind} needs an answer in fields")
            return known
    found = "is missing" if kind is None else f"is {kind}"
    raise DataError(f"{path}: answer_kind {found}; allowed are {', '.join(allowed)}")
