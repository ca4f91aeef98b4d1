"""Benchmarks as they're audited and looked for in training data: items with their questions and answers."""

from __future__ import annotations

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfpar.config.schema import DataSource
from hfpar.data.benchmark_yaml import AnswerKind, BenchmarkSpec, Fields, read_benchmark_yaml
from hfpar.data.reading.chunks import type_name
from hfpar.data.reading.rows import Place, Problem
from hfpar.data.reading.sources import DataFile, read_chunks, resolve
from hfpar.errors import ConfigError, DataError

__all__ = [
    "AnswerKind",
    "Benchmark",
    "BenchmarkItem",
    "built_in_names",
    "load_benchmark",
    "load_benchmarks",
    "load_control",
    "parse_benchmark_files",
]

_GSM8K = {
    "hub": "openai/gsm8k",
    "config": "main",
    "fields": Fields(question="question", answer="answer", solution="answer"),
    "answer_kind": "gsm8k",
}
_BUILT_IN: dict[str, dict[str, Any]] = {
    "math500": {
        "hub": "HuggingFaceH4/MATH-500",
        "split": "test",
        "fields": Fields(question="problem", answer="answer", solution="solution"),
        "answer_kind": "math",
    },
    "gsm8k": {**_GSM8K, "split": "test"},
    "gsm8k_train": {**_GSM8K, "split": "train"},
}
_ID_FIELDS = ("unique_id", "id")
_CONTROL_FIELDS: dict[str, tuple[str, ...]] = {
    "question": ("problem", "question", "prompt", "text"),
    "answer": ("answer",),
    "solution": ("solution",),
    "pair": ("seed_question", "original_question", "seed_id"),
}


@dataclass(frozen=True)
class BenchmarkItem:
    """One problem of a benchmark, or of a control."""

    item_id: str
    """The row's own, or its number in the file from 0; no two of a benchmark have the same."""
    place: str
    """For people: file and line."""
    question: str
    """Exactly as in the file."""
    answer: str | None
    """The answer field as it stands; GSM8K's is the worked answer that ends in `#### N`."""
    solution: str | None
    """A worked solution, if the benchmark has one; GSM8K's is its answer."""
    pair_id: str | None = None
    """Of a control: `item_id` of the benchmark's item that it varies."""
    pair_set: str | None = None
    """Name of the benchmark whose item that is: ids may come in several."""
    varies: str | None = None
    """Of a control: what it varies, where that is no item of a benchmark at hand."""

    def owner(self, name: str) -> tuple[str, str]:
        """A set and an item of it, this one being of the set `name`: what varies an item belongs to that one."""
        return owner_of(name, self.item_id, self.pair_set, self.pair_id, self.varies)


def owner_of(
    name: str, item_id: str, pair_set: str | None, pair_id: str | None, varies: str | None
) -> tuple[str, str]:
    """A set and an item of it, to which all that varies it belongs; the set is empty where it isn't at hand."""
    if pair_id is not None:
        return pair_set or "", pair_id
    return (name, item_id) if varies is None else ("", varies)


@dataclass(frozen=True)
class Benchmark:
    """A benchmark, or a control, whole."""

    name: str
    items: tuple[BenchmarkItem, ...]
    answer_kind: AnswerKind
    source: str
    """A path, or an id on the hub."""
    sha256: str
    """As `DataFile.fingerprint`."""
    num_duplicates: int
    """Items left out because an earlier one asks the same."""


def built_in_names() -> tuple[str, ...]:
    """Names of the benchmarks that need no YAML."""
    return tuple(_BUILT_IN)


def parse_benchmark_files(pairs: Sequence[str], key: str = "benchmark_files") -> dict[str, str]:
    """Take `name=path` apart, as flags give it.

    Raises:
        ConfigError: it isn't that, or a name comes twice; one line that begins with `--KEY`.
    """
    files: dict[str, str] = {}
    for pair in pairs:
        name, separator, path = pair.partition("=")
        if not separator or not name.strip() or not path.strip():
            raise ConfigError(f"--{key} {pair}: must be name=path, such as math500=math500.jsonl")
        if name.strip() in files:
            raise ConfigError(f"--{key}: {name.strip()} is given twice; keep one")
        files[name.strip()] = path.strip()
    return files


def load_benchmarks(names: Sequence[str], files: Mapping[str, str]) -> tuple[Benchmark, ...]:
    """Load several benchmarks.

    Args:
        names: as `load_benchmark`'s.
        files: paths by name.

    Raises:
        DataError: as `load_benchmark`; or two have the same name, or `files` names none of them.
    """
    benchmarks = tuple(load_benchmark(name, files) for name in names)
    counts = Counter(benchmark.name for benchmark in benchmarks)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise DataError(f"benchmark {twice[0]}: given twice; keep one")
    for name in files:
        if name not in counts:
            raise DataError(f"benchmark_files {name}: no such benchmark here; there are {', '.join(counts)}")
    return benchmarks


def load_benchmark(name_or_yaml: str, files: Mapping[str, str]) -> Benchmark:
    """Load one benchmark, whole.

    Args:
        name_or_yaml: a built-in's name, or the path of a YAML file that describes one (see docs/data.md).
        files: where to read a benchmark instead of the hub, by name: a path, or another id.

    Returns:
        Its items in the file's order, questions that come twice once.

    Raises:
        DataError: there is no such benchmark, or it can't be read or used; one line that says what to do.
    """
    spec = _find_spec(name_or_yaml)
    given = files.get(spec.name)
    if given:
        spec = replace(spec, source=DataSource(path=given), is_hub=False)
    if spec.is_hub:
        _tell_of_errors_alone()
    try:
        data_files = resolve(spec.source)
        sha256 = _fingerprint(data_files)
        items = list(_read_items(data_files, spec))
    except DataError as error:
        if not spec.is_hub or f"{spec.source.path}: no such file" not in str(error):
            raise
        raise DataError(f"{error}; give a file: --benchmark_files {spec.name}=PATH") from error
    kept = _without_duplicates(items)
    return Benchmark(
        spec.name, tuple(kept), spec.answer_kind, spec.source.path, sha256, len(items) - len(kept)
    )


def load_control(name: str, path: str, benchmarks: Sequence[Benchmark]) -> Benchmark:
    """Load a user's own control: problems that the model can't have seen as the benchmark's.

    Args:
        name: for reports.
        path: a file of any kind that training data may have, a hub id, or a benchmark's YAML. Without a YAML the
            question is in `problem`, `question`, `prompt` or `text`, the answer in `answer`, and the item that it
            varies in `seed_question`, `original_question` (its text) or `seed_id`.
        benchmarks: whose items it may vary.

    Raises:
        DataError: it can't be read or used; one line.
    """
    if _is_yaml(path):
        spec = read_benchmark_yaml(path)
    else:
        spec = BenchmarkSpec(name, DataSource(path=path), Fields(question=""), "math")
    data_files = resolve(spec.source)
    if not spec.fields.question:
        spec = replace(spec, fields=_control_fields(data_files))
    items, owners = _paired(list(_read_items(data_files, spec)), benchmarks)
    kept = _without_duplicates(items)
    kind = spec.answer_kind if _is_yaml(path) else _control_kind(kept, owners, benchmarks)
    return Benchmark(
        name, tuple(kept), kind, spec.source.path, _fingerprint(data_files), len(items) - len(kept)
    )


def _is_yaml(path: str) -> bool:
    return path.lower().endswith((".yaml", ".yml"))


def _find_spec(name_or_yaml: str) -> BenchmarkSpec:
    if _is_yaml(name_or_yaml):
        return read_benchmark_yaml(name_or_yaml)
    found = _BUILT_IN.get(name_or_yaml)
    if found is None:
        near = difflib.get_close_matches(name_or_yaml, _BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_BUILT_IN)}"
        raise DataError(f"benchmark {name_or_yaml}: unknown; {hint} Another is described by a .yaml file")
    source = DataSource(path=found["hub"], split=found["split"], name=found.get("config"))
    return BenchmarkSpec(name_or_yaml, source, found["fields"], found["answer_kind"], is_hub=True)


def _fingerprint(files: Sequence[DataFile]) -> str:
    if len(files) == 1:
        return files[0].fingerprint()
    return hashlib.sha256("\0".join(file.fingerprint() for file in files).encode()).hexdigest()


def _tell_of_errors_alone() -> None:
    """Without the hub, its library would tell of each of its tries."""
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity_error()


def _rows(files: Sequence[DataFile]) -> Iterator[tuple[Place, dict[str, Any]]]:
    for chunk in read_chunks(files):
        for place, row in chunk.rows():
            if isinstance(row, Problem):
                raise DataError(str(row))
            yield place, row


def _control_fields(files: Sequence[DataFile]) -> Fields:
    """By the first row's keys."""
    place, row = next(_rows(files))
    found = {
        field: next((name for name in names if row.get(name) is not None), None)
        for field, names in _CONTROL_FIELDS.items()
    }
    question = found.pop("question")
    if question is None:
        names = ", ".join(_CONTROL_FIELDS["question"])
        raise DataError(
            f"{place}: has no question; its keys are {', '.join(map(str, row))}; one must be of {names} "
            "(a .yaml file can name others)"
        )
    return Fields(question=question, **found)


def _read_items(files: Sequence[DataFile], spec: BenchmarkSpec) -> Iterator[BenchmarkItem]:
    fields = spec.fields
    for number, (place, row) in enumerate(_rows(files)):
        own_id = fields.id or next((name for name in _ID_FIELDS if row.get(name) is not None), None)
        yield BenchmarkItem(
            item_id=str(number) if own_id is None else _value(row, own_id, "id", place),
            place=str(place),
            question=_value(row, fields.question, "question", place),
            answer=_value(row, fields.answer, "answer", place) if fields.answer else None,
            solution=_value(row, fields.solution, "solution", place) if fields.solution else None,
            pair_id=_value(row, fields.pair, "pair", place) if fields.pair else None,
        )


def _value(row: Mapping[str, Any], name: str, field: str, place: Place) -> str:
    value = row.get(name)
    if value is None:
        has = "has no value in" if name in row else "has no"
        keys = ", ".join(map(str, row))[:200]
        raise DataError(
            f'{place}: {has} "{name}", the {field} of a benchmark; its keys are {keys} '
            "(a .yaml file can name others)"
        )
    if isinstance(value, (dict, list)):
        raise DataError(f'{place}: "{name}" is {type_name(value)} where text is needed')
    text = str(value)
    if not text.strip():
        raise DataError(f'{place}: "{name}", the {field}, is empty')
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError(
            f'{place}: "{name}", the {field}, holds half a surrogate pair, which is no character; mend the file'
        )
    return text


def _same(text: str) -> str:
    """For telling whether two questions are the same."""
    return " ".join(text.split())


def _without_duplicates(items: Sequence[BenchmarkItem]) -> list[BenchmarkItem]:
    """Leave out questions that were there before.

    Raises:
        DataError: two items with the same id ask different things.
    """
    questions: set[str] = set()
    by_id: dict[str, BenchmarkItem] = {}
    for item in items:
        question = _same(item.question)
        if question in questions:
            continue
        if item.item_id in by_id:
            first = by_id[item.item_id].place
            raise DataError(f"{item.place}: has the id {item.item_id} of {first}, but another question")
        questions.add(question)
        by_id[item.item_id] = item
    return list(by_id.values())


def _paired(
    items: Sequence[BenchmarkItem], benchmarks: Sequence[Benchmark]
) -> tuple[list[BenchmarkItem], Counter[str]]:
    """Items whose pairs are ids, and how many are of which benchmark; what is no benchmark's item has no pair."""
    by_question = {
        _same(item.question): (benchmark.name, item.item_id)
        for benchmark in benchmarks
        for item in benchmark.items
    }
    by_id: dict[str, list[tuple[str, str]]] = {}
    for benchmark in benchmarks:
        for item in benchmark.items:
            by_id.setdefault(item.item_id, []).append((benchmark.name, item.item_id))
    owners: Counter[str] = Counter()
    paired = []
    for item in items:
        found = None
        if item.pair_id is not None:
            found = by_question.get(_same(item.pair_id))
            candidates = by_id.get(item.pair_id, [])
            if not found and len(candidates) > 1:
                names = " and ".join(name for name, _ in candidates)
                raise DataError(
                    f"{item.place}: varies item {item.pair_id}, which {names} have; give its question"
                )
            found = found or next(iter(candidates), None)
        if found:
            owners[found[0]] += 1
        pair_set, pair_id = found or (None, None)
        varies = None if found or item.pair_id is None else _same(item.pair_id)
        paired.append(replace(item, pair_id=pair_id, pair_set=pair_set, varies=varies))
    return paired, owners


def _control_kind(
    items: Sequence[BenchmarkItem], owners: Counter[str], benchmarks: Sequence[Benchmark]
) -> AnswerKind:
    """That of the benchmark that most of its items vary, or of the only one."""
    if all(item.answer is None for item in items):
        return "none"
    kinds = {benchmark.name: benchmark.answer_kind for benchmark in benchmarks}
    if owners:
        return kinds[owners.most_common(1)[0][0]]
    return next(iter(kinds.values())) if len(kinds) == 1 else "math"
