"""Tokenized samples in files that are mapped into memory: a million open in a moment, and ranks share the pages."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, overload

import numpy as np

from hfpar.data.reading.rows import Place
from hfpar.data.samples import IGNORE_INDEX, Sample
from hfpar.errors import BadRowsError

META_FILE = "meta.json"
MAX_LISTED_PROBLEMS = BadRowsError.MOST
MAX_LISTED_OVERLAPS = 5
_SAMPLES_AT_ONCE = 20_000
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass
class DataReport:
    """What became of the rows of one or more data sets."""

    num_rows: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_label_tokens: int = 0
    """Tokens that are targets."""
    max_token_id: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    """Of what happened to rows on the way, such as `too long`."""
    problems: Counter[str] = field(default_factory=Counter)
    """Rows that can't be used, by kind."""
    listed_problems: list[str] = field(default_factory=list)
    """The first of them, each with its place and reason."""
    listed_overlaps: list[str] = field(default_factory=list)
    """The first rows that hold a benchmark's item, each with its place and the item."""
    hidden_items: list[str] = field(default_factory=list)
    """Benchmark items in what most rows have in common, such as a system prompt; no row is counted for them."""

    @property
    def num_bad_rows(self) -> int:
        """Rows that can't be used."""
        return sum(self.problems.values())

    def add(self, other: DataReport) -> None:
        """Count another's rows too."""
        self.num_rows += other.num_rows
        self.num_samples += other.num_samples
        self.num_tokens += other.num_tokens
        self.num_label_tokens += other.num_label_tokens
        self.max_token_id = max(self.max_token_id, other.max_token_id)
        self.counts.update(other.counts)
        self.problems.update(other.problems)
        room = MAX_LISTED_PROBLEMS - len(self.listed_problems)
        self.listed_problems += other.listed_problems[: max(room, 0)]
        room = MAX_LISTED_OVERLAPS - len(self.listed_overlaps)
        self.listed_overlaps += other.listed_overlaps[: max(room, 0)]
        self.hidden_items += [item for item in other.hidden_items if item not in self.hidden_items]


@dataclass
class TokenBlock:
    """Samples back to back, as they leave the tokenizer."""

    input_ids: np.ndarray
    """`(tokens,)` uint32."""
    trained: np.ndarray
    """`(tokens,)` bool: whether the token is to be learnt; never at a sample's first."""
    lengths: np.ndarray
    """`(samples,)` int64."""
    rows: np.ndarray
    """`(samples,)` int64: the line or row number that each comes from."""
    report: DataReport


class TokenWriter:
    """Writes the files of a `TokenStore` block after block; `close` makes the folder whole."""

    def __init__(self, folder: Path) -> None:
        """Start in an empty folder."""
        self.folder = folder
        self.report = DataReport()
        self._digest = hashlib.sha256()
        self._files: dict[str, BinaryIO] = {
            name: open(folder / f"{name}.bin", "wb")
            for name in ("tokens", "trained", "lengths", "rows", "files")
        }

    def write(self, block: TokenBlock, file_number: int) -> None:
        """Append the samples of a block, which come from the file of that number."""
        for name, values, dtype in (
            ("tokens", block.input_ids, np.uint32),
            ("trained", block.trained, np.bool_),
            ("lengths", block.lengths, np.int64),
        ):
            content = values.astype(dtype, copy=False).tobytes()
            self._digest.update(content)
            self._files[name].write(content)
        self._files["rows"].write(block.rows.astype(np.int64, copy=False).tobytes())
        self._files["files"].write(np.full(len(block.lengths), file_number, dtype=np.int32).tobytes())
        self.report.add(block.report)

    def close(self, files: Sequence[tuple[str, str]]) -> None:
        """Write what was counted, and each file's path and unit (`line` or `row`), by its number."""
        for file in self._files.values():
            file.close()
        meta = {
            "files": [list(entry) for entry in files],
            "digest": self._digest.hexdigest(),
            "report": vars(self.report),
        }
        (self.folder / META_FILE).write_text(json.dumps(meta, indent=1), encoding="utf-8")

    def abandon(self) -> None:
        """Close the files of a folder that is to be thrown away."""
        for file in self._files.values():
            file.close()


class Samples(Sequence[Sample]):
    """Samples that are made as they are asked for, and whose lengths are known before."""

    lengths: np.ndarray
    """`(samples,)` int64: tokens in each."""

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sample]: ...
    def __getitem__(self, index: int | slice) -> Sample | list[Sample]:
        """A sample, or several."""
        if isinstance(index, slice):
            return [self.at(position) for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self.at(index % len(self))

    @abstractmethod
    def at(self, index: int) -> Sample:
        """Make a sample; the index counts from 0."""


class TokenArrays(Samples):
    """Samples that lie back to back in arrays."""

    def __init__(self, tokens: np.ndarray, trained: np.ndarray, lengths: np.ndarray) -> None:
        """Of arrays as a `TokenBlock` has them."""
        self.lengths = lengths
        self._offsets = np.concatenate([[0], np.cumsum(lengths)])
        self._tokens = tokens
        self._trained = trained

    def at(self, index: int) -> Sample:
        """Read a sample."""
        begin, end = self._offsets[index], self._offsets[index + 1]
        input_ids = self._tokens[begin:end].astype(np.int64)
        labels = np.where(self._trained[begin:end], input_ids, IGNORE_INDEX)
        return Sample(input_ids.tolist(), labels.tolist())


class TokenStore(TokenArrays):
    """The samples of one data set, read from their files as they are asked for."""

    def __init__(self, folder: Path) -> None:
        """Open a folder that a `TokenWriter` has closed."""
        meta: dict[str, Any] = json.loads((folder / META_FILE).read_text(encoding="utf-8"))
        report = meta["report"]
        for name in ("counts", "problems"):
            report[name] = Counter(report[name])
        self.key = folder.name
        self.digest: str = meta["digest"]
        """Of the tokens and labels."""
        self.report = DataReport(**report)
        self._named_files: list[tuple[str, str]] = [(path, unit) for path, unit in meta["files"]]
        super().__init__(
            _mapped(folder / "tokens.bin", np.uint32),
            _mapped(folder / "trained.bin", np.bool_),
            np.fromfile(folder / "lengths.bin", dtype=np.int64),
        )
        self.rows: np.ndarray = _mapped(folder / "rows.bin", np.int64)
        """`(samples,)`: line or row number of each."""
        self.files: np.ndarray = _mapped(folder / "files.bin", np.int32)
        """`(samples,)`: number of the file of each."""

    def contents(self) -> np.ndarray:
        """`(samples,)` uint64: see `content_hashes`."""
        found = []
        for begin in range(0, len(self), _SAMPLES_AT_ONCE):
            lengths = self.lengths[begin : begin + _SAMPLES_AT_ONCE]
            span = slice(self._offsets[begin], self._offsets[begin + len(lengths)])
            found.append(content_hashes(self._tokens[span], self._trained[span], lengths))
        return np.concatenate(found) if found else np.zeros(0, dtype=np.uint64)

    def place(self, index: int) -> Place:
        """Where a sample comes from."""
        path, unit = self._named_files[self.files[index]]
        return Place(path, unit, int(self.rows[index]))


class Selection(Samples):
    """Samples of several stores, one store after another, all or some of them."""

    def __init__(self, stores: Sequence[TokenStore], chosen: Sequence[np.ndarray] | None = None) -> None:
        """Select.

        Args:
            stores: where the samples are.
            chosen: of each store, which; all by default.
        """
        self.stores = stores
        self.chosen = [np.arange(len(store)) for store in stores] if chosen is None else list(chosen)
        self.sizes = [len(part) for part in self.chosen]
        self._ends = np.cumsum(self.sizes)
        parts = [store.lengths[part] for store, part in zip(stores, self.chosen, strict=True)]
        self.lengths = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)

    def at(self, index: int) -> Sample:
        """Read a sample from its store."""
        store, position = self.locate(index)
        return store[position]

    def locate(self, index: int) -> tuple[TokenStore, int]:
        """The store of a sample, and its number there."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        first = int(self._ends[number - 1]) if number else 0
        return self.stores[number], int(self.chosen[number][index - first])


def content_hashes(tokens: np.ndarray, trained: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Tell samples apart by their tokens and labels, as a `TokenBlock` has them.

    Returns:
        `(samples,)` uint64: equal for equal samples, and hardly ever for others.
    """
    if not len(lengths):
        return np.zeros(0, dtype=np.uint64)
    starts = np.cumsum(lengths) - lengths
    position = np.arange(len(tokens), dtype=np.uint64) - np.repeat(starts, lengths).astype(np.uint64)
    token = tokens.astype(np.uint64) * np.uint64(2) + trained
    return np.add.reduceat(_mix(token * _ODD + _mix(position + np.uint64(1))), starts)


def _mix(values: np.ndarray) -> np.ndarray:
    """Scatter 64-bit numbers (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mapped(path: Path, dtype: Any) -> np.ndarray:
    """A file as an array; an empty file can't be mapped."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")
