"""`report.json` written and read, and files that are whole or not there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hfpar.audit.results import SCHEMA_VERSION, Report
from hfpar.errors import ConfigError
from hfpar.whole_path import whole_path

REPORT_JSON = "report.json"

T = TypeVar("T")


def write_file(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file so that nobody ever sees half of it.

    Args:
        path: the file to write or replace; its folder is made where it is missing.
        write: writes it to the path that it is given.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_path(path) as partial:
            write(partial)
    except OSError as error:
        raise ConfigError(
            f"output_dir: {path} can't be written ({error.strerror or error}); make room or give another folder;"
            " items that were probed are kept in items.jsonl"
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file as UTF-8; half a surrogate pair, which UTF-8 can't hold, becomes an escape.

    Raises:
        ConfigError: the file can't be written.
    """
    write_file(path, lambda partial: partial.write_bytes(text.encode("utf-8", errors="backslashreplace")))


def plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, keys of dicts in order, and None for numbers that aren't finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float) or hasattr(value, "__float__"):  # NumPy's too
        number = float(value)
        return number if math.isfinite(number) else None
    return str(value)


def write_report_json(path: Path, report: Report) -> None:
    """Write `report.json`.

    Raises:
        ConfigError: the file can't be written.
    """
    write_text(path, json.dumps(plain(in_order(report)), indent=2, allow_nan=False) + "\n")


def in_order(report: Report) -> Report:
    """The same with every list sorted: benchmarks and controls as they were given, bare before chat, by ratio."""
    rank = {summary.name: number for number, summary in enumerate(report.sets)}

    def key(item: Any) -> tuple[Any, ...]:
        names = (getattr(item, "benchmark", ""), getattr(item, "control", ""))
        return (
            rank.get(names[0], len(rank)),
            getattr(item, "mode", ""),
            getattr(item, "ratio", 0.0),
            rank.get(names[1], len(rank)),
            *names,
        )

    sets = [
        dataclasses.replace(item, cuts=sorted(item.cuts, key=lambda cut: (cut.mode, cut.ratio)))
        for item in report.sets
    ]
    return dataclasses.replace(
        report,
        sets=sets,
        comparisons=sorted(report.comparisons, key=key),
        tests=sorted(report.tests, key=key),
        verdicts=sorted(report.verdicts, key=key),
        scores=sorted(report.scores, key=key),
        orders=sorted(report.orders, key=key),
        intrusions=sorted(report.intrusions, key=key),
    )


def read_report(folder: str | os.PathLike[str]) -> Report:
    """The report of a run folder, or of a path to its `report.json`.

    Keys of later versions of the same schema are left out.

    Raises:
        ConfigError: there is no report, or it isn't one that this version reads.
    """
    path = Path(folder)
    path = path if path.suffix == ".json" else path / REPORT_JSON
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{path} can't be read ({error.strerror or error}); give a folder with an audit"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{path} isn't JSON ({error}); run the audit again") from error
    if not isinstance(data, dict) or not isinstance(data.get("schema_version"), int):
        raise ConfigError(f"{path} isn't the report of an audit: it has no schema_version")
    if data["schema_version"] != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: schema_version {data['schema_version']}; this hfpar reads {SCHEMA_VERSION}; run the audit "
            "again with it, or use the version that wrote it (hfpar_version in the file)"
        )
    try:
        return parse(Report, data)
    except _BadValue as error:
        raise ConfigError(f"{path}: {error}; run the audit again") from error


class _BadValue(Exception):
    """Where a tree of values isn't what its dataclass says."""


def parse(cls: type[T], data: Any) -> T:
    """A dataclass from what `plain` made of it; for those whose types are in `results.py`."""
    return _parse(cls, data, "")


def _parse(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = get_origin(kind), get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _parse_dataclass(kind, data, where)
    if origin in (Union, UnionType):
        if data is None and NoneType in arguments:
            return None
        return _parse(next(item for item in arguments if item is not NoneType), data, where)
    if origin is Literal:
        return _checked(data, where, data in arguments, f"one of {', '.join(map(str, arguments))}")
    if origin is list:
        _checked(data, where, isinstance(data, list), "a list")
        return [_parse(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(data)]
    if origin is dict:
        _checked(data, where, isinstance(data, dict), "an object")
        return {key: _parse(arguments[1], item, f"{where}.{key}") for key, item in data.items()}
    if kind is float:
        is_number = isinstance(data, (int, float)) and not isinstance(data, bool)
        return float(_checked(data, where, is_number, "a number"))
    if kind is int:
        return _checked(data, where, isinstance(data, int) and not isinstance(data, bool), "a whole number")
    if kind in (str, bool):
        return _checked(data, where, isinstance(data, kind), "text" if kind is str else "true or false")
    return data


def _parse_dataclass(kind: type, data: Any, where: str) -> Any:
    _checked(data, where or "the report", isinstance(data, dict), "an object")
    hints = get_type_hints(kind)
    values = {}
    for item in dataclasses.fields(kind):
        place = f"{where}.{item.name}" if where else item.name
        if item.name in data:
            values[item.name] = _parse(hints[item.name], data[item.name], place)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            raise _BadValue(f"{place} is missing")
    return kind(**values)


def _checked(data: Any, where: str, is_good: bool, allowed: str) -> Any:
    if not is_good:
        shown = json.dumps(data)
        raise _BadValue(f"{where} is {shown if len(shown) <= 40 else shown[:37] + '...'}, not {allowed}")
    return data
