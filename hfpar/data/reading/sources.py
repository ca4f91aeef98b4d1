"""From a source's path to its files, and from files to chunks of rows."""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hfpar.config.schema import DataSource
from hfpar.data.reading import columnar, json_list, text_files
from hfpar.data.reading.byte_source import COMPRESSIONS, ByteSource, cannot_be_read
from hfpar.data.reading.chunks import Chunk
from hfpar.errors import DataError

DataKind = Literal["jsonl", "json", "csv", "parquet", "arrow", "hub"]

_KINDS: dict[str, DataKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
_ALLOWED = f"{', '.join(_KINDS)}; all but the last two also with {', '.join(COMPRESSIONS)}"
_HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?)(:(?P<split>.+))?")
_BLOCK = 1 << 20


@dataclass(frozen=True)
class DataFile:
    """A file of rows, a saved data set, or one split of a data set of the hub."""

    path: str
    kind: DataKind
    compression: str | None = None
    """One of `COMPRESSIONS`' values."""
    split: str | None = None
    name: str | None = None
    """Of a hub data set's configuration."""

    @property
    def num_bytes(self) -> int:
        """Size on disk; 0 for a data set of the hub."""
        if self.kind == "hub":
            return 0
        return sum(os.path.getsize(path) for path in columnar.arrow_files(self.path))

    def fingerprint(self) -> str:
        """SHA-256 of all that decides what rows there are: the kind and the contents, not the path or the time.

        Raises:
            DataError: the file can't be read, or the hub doesn't give its version.
        """
        digest = hashlib.sha256(f"{self.kind} {self.compression} {self._delimiter}\0".encode())
        if self.kind == "hub":
            version = columnar.hub_fingerprint(self.path, self.name)
            digest.update(f"{self.path}\0{self.name}\0{self.split}\0{version}".encode())
            return digest.hexdigest()
        for path in columnar.arrow_files(self.path):
            try:
                with open(path, "rb") as file:
                    digest.update(_content_digest(file))
            except OSError as error:
                raise cannot_be_read(path, error) from error
        return digest.hexdigest()

    @property
    def _delimiter(self) -> str:
        return "\t" if _suffixes(self.path)[0] == ".tsv" else ","


def _content_digest(file: Any) -> bytes:
    if sys.version_info >= (3, 11):
        return hashlib.file_digest(file, "sha256").digest()
    digest = hashlib.sha256()
    while block := file.read(_BLOCK):
        digest.update(block)
    return digest.digest()


def data_sources(dataset: str | Sequence[str | DataSource] | None) -> list[DataSource]:
    """The entries of `dataset` or `eval_dataset`."""
    if dataset is None:
        return []
    entries = [dataset] if isinstance(dataset, str) else dataset
    return [DataSource(path=entry) if isinstance(entry, str) else entry for entry in entries]


def resolve(source: DataSource) -> list[DataFile]:
    """Find what a source names, without reading it.

    Args:
        source: its path is a file, a pattern of files (`data/*.jsonl.gz`, with `**` for folders at any depth), a
            folder that `datasets` saved, or a data set's id on the hub, to which `:split` may be added.

    Returns:
        The files, sorted by path; or one entry for a saved data set or one of the hub.

    Raises:
        DataError: nothing is there, or it is not of a kind that can be read; one line.
    """
    path = os.path.expanduser(source.path)
    if os.path.isdir(path):
        return [_saved_data_set(path, source)]
    if os.path.lexists(path):
        return [_file(path, source)]
    hub = _hub_data_set(path, source)
    if hub:
        return [hub]
    if not glob.has_magic(path):
        raise DataError(f"{path}: no such file")
    return _matches(path, source)


def read_chunks(
    files: Sequence[DataFile],
    *,
    rows_per_chunk: int = 1000,
    bytes_per_chunk: int = 4 << 20,
    streaming: bool = False,
) -> Iterator[Chunk]:
    """Read files one after the other; nothing but the present chunk is held.

    Args:
        files: of one source.
        rows_per_chunk: most rows of a chunk.
        bytes_per_chunk: size at which a chunk ends; a single row may be larger.
        streaming: read a data set of the hub over the network, instead of putting it in the cache first.

    Raises:
        DataError: a file can't be opened, is not of its kind, or there is not one row in all files.
    """
    found = False
    for file in files:
        for chunk in _read_file(file, (rows_per_chunk, bytes_per_chunk), streaming):
            found = True
            yield chunk
    if not found and files:
        others = f" (and so are {len(files) - 1} others)" if len(files) > 1 else ""
        raise DataError(f"{files[0].path}: the data set is empty{others}")


def _read_file(file: DataFile, limits: tuple[int, int], streaming: bool) -> Iterator[Chunk]:
    if file.kind == "hub":
        yield from columnar.read_hub(file.path, file.split or "train", file.name, limits, streaming=streaming)
    elif file.kind == "parquet":
        yield from columnar.read_parquet(file.path, limits)
    elif file.kind == "arrow":
        yield from columnar.read_arrow(file.path, limits)
    else:
        as_list = file.kind == "json" and json_list.is_json_list(file.path, file.compression)
        with ByteSource(file.path, file.compression) as source:
            position = 0
            for chunk in _read_text(file, source, limits, as_list):
                position, before = source.position(), position
                yield replace(chunk, num_bytes=position - before)


def _read_text(file: DataFile, source: ByteSource, limits: tuple[int, int], as_list: bool) -> Iterator[Chunk]:
    if file.kind == "csv":
        return text_files.read_csv(source, file._delimiter, limits)
    if as_list:
        return json_list.read_json_list(source, limits)
    return text_files.read_lines(source, limits)


def _suffixes(path: str) -> tuple[str, str]:
    """A file's own suffix, and that of its compression or nothing."""
    name = Path(path.lower())
    if name.suffix in COMPRESSIONS:
        return Path(name.stem).suffix, name.suffix
    return name.suffix, ""


def _file(path: str, source: DataSource) -> DataFile:
    suffix, compression = _suffixes(path)
    kind = _KINDS.get(suffix)
    if not os.path.isfile(path):
        what = "not a regular file" if os.path.exists(path) else "a link to a file that doesn't exist"
        raise DataError(f"{path}: {what}")
    if kind is None:
        raise DataError(f"{path}: unknown kind of file; allowed are {_ALLOWED}")
    if compression and kind in ("parquet", "arrow"):
        raise DataError(
            f"{path}: a {suffix} file is compressed inside; unpack it once with {compression[1:]}"
        )
    _refuse_split(path, source)
    _refuse_unreadable(path)
    return DataFile(path, kind, COMPRESSIONS.get(compression))


def _refuse_split(path: str, source: DataSource) -> None:
    for key, value in (("split", source.split), ("name", source.name)):
        if value is not None:
            raise DataError(f"{path}: a file has no {key}, so that {key}: {value} can't be chosen")


def _refuse_unreadable(path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise cannot_be_read(path, error) from error


def _saved_data_set(path: str, source: DataSource) -> DataFile:
    if os.path.isfile(os.path.join(path, "state.json")):
        _refuse_split(path, source)
        return DataFile(path, "arrow")
    listing = os.path.join(path, "dataset_dict.json")
    if not os.path.isfile(listing):
        raise DataError(
            f"{path}: is a folder, not a file, and not one that datasets saved; "
            f"name its files by a pattern, such as {os.path.join(path, '*.jsonl')}"
        )
    try:
        splits = list(json.loads(Path(listing).read_bytes())["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise cannot_be_read(listing, error) from error
    split = source.split or "train"
    if split not in splits:
        raise DataError(f"{path}: has no split {split}; it has {', '.join(splits)}")
    folder = os.path.join(path, split)
    if not os.path.isfile(os.path.join(folder, "state.json")):
        raise DataError(f"{folder}: not a saved data set: it has no state.json")
    return DataFile(folder, "arrow", split=split)


def _hub_data_set(path: str, source: DataSource) -> DataFile | None:
    match = _HUB_ID.fullmatch(path)
    if not match or _suffixes(match["id"])[0] in _KINDS:
        return None
    if match["split"] and source.split and match["split"] != source.split:
        raise DataError(f"{path}: names one split, and split: {source.split} another")
    return DataFile(match["id"], "hub", split=match["split"] or source.split or "train", name=source.name)


def _matches(pattern: str, source: DataSource) -> list[DataFile]:
    # By where they really are: a link may lead back to a folder that is read already.
    found = {
        os.path.realpath(path): path for path in sorted(glob.glob(pattern, recursive=True), reverse=True)
    }
    paths = sorted(found.values())
    saved = [path for path in paths if os.path.isfile(os.path.join(path, "state.json"))]
    inside = tuple(os.path.join(path, "") for path in saved)
    inside += tuple(path for path in paths if os.path.basename(path) == "dataset_dict.json")
    files = [path for path in paths if path in saved or not (os.path.isdir(path) or path.startswith(inside))]
    if not files:
        raise DataError(f"{pattern}: no file matches")
    return [_saved_data_set(path, source) if path in saved else _file(path, source) for path in files]
