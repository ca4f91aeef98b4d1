"""Readers of Parquet, Arrow and hub data sets: from columns to chunks, with flat memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hfpar.data.reading.byte_source import cannot_be_read, one_line
from hfpar.data.reading.chunks import Chunk
from hfpar.errors import DataError

_BUFFER = 1 << 20


def read_parquet(path: str, limits: tuple[int, int]) -> Iterator[Chunk]:
    """Read a Parquet file.

    Args:
        path: of the file.
        limits: rows and bytes at which a chunk is full.

    Raises:
        DataError: the file can't be read.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        # Without a buffer size a whole row group is read at once.
        with pyarrow.parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
            yield from _chunks(path, file.iter_batches(batch_size=limits[0], use_threads=False), limits)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise cannot_be_read(path, error, "Parquet") from error


def read_arrow(path: str, limits: tuple[int, int]) -> Iterator[Chunk]:
    """Read an Arrow file, or the folder of a saved data set; as `read_parquet` otherwise."""
    import pyarrow

    try:
        yield from _chunks(path, _arrow_batches(path), limits)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise cannot_be_read(path, error, "Arrow") from error


def arrow_files(path: str) -> list[str]:
    """The Arrow files of a saved data set, in order; or the file itself.

    Raises:
        DataError: the folder's own list of them can't be used.
    """
    if not os.path.isdir(path):
        return [path]
    state = Path(path, "state.json")
    try:
        names = [item["filename"] for item in json.loads(state.read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise cannot_be_read(str(state), error) from error
    return [str(Path(path, name)) for name in names]


def _arrow_batches(path: str) -> Iterator[Any]:
    import pyarrow

    for name in arrow_files(path):
        # Read, not mapped: a mapped file that shrinks kills the process.
        with pyarrow.OSFile(name, "rb") as file:
            is_stream = file.read(6) != b"ARROW1"
            file.seek(0)
            if is_stream:
                yield from pyarrow.ipc.open_stream(file)
            else:
                reader = pyarrow.ipc.open_file(file)
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))


def read_hub(
    path: str, split: str, name: str | None, limits: tuple[int, int], *, streaming: bool
) -> Iterator[Chunk]:
    """Read one split of a data set of the hub.

    Args:
        path: its id.
        split: of the data set.
        name: of its configuration, where it has several.
        limits: rows and bytes at which a chunk is full.
        streaming: read it over the network, and keep nothing; otherwise from the cache, where it is put first.

    Raises:
        DataError: the hub doesn't give it.
    """
    import datasets

    try:
        table = datasets.load_dataset(path, name, split=split, streaming=streaming).with_format("arrow")
        batches = (batch for part in table.iter(limits[0]) for batch in part.to_batches())
        yield from _chunks(path, batches, limits)
    except Exception as error:  # whatever the network, the cache or the data set's files may raise
        raise hub_error(path, error) from error


def hub_fingerprint(path: str, name: str | None) -> str:
    """What tells this version of a data set of the hub from others.

    Raises:
        DataError: the hub doesn't give it.
    """
    import datasets

    try:
        builder = datasets.load_dataset_builder(path, name)
    except Exception as error:  # as in `read_hub`
        raise hub_error(path, error) from error
    return f"{builder.config.name} {builder.hash}"


def hub_error(path: str, error: Exception) -> DataError:
    """Explain on one line why there is no such data set."""
    if isinstance(error, DataError):
        return error
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    return DataError(f"{path}: no such file, and the hub does not give it: {one_line(cause)}")


def _chunks(path: str, batches: Iterable[Any], limits: tuple[int, int]) -> Iterator[Chunk]:
    import pyarrow

    number = 1
    for batch in batches:
        count = min(limits[0], max(1, batch.num_rows * limits[1] // max(1, batch.nbytes)))
        for start in range(0, batch.num_rows, count):
            piece = batch.slice(start, count)
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, piece.schema) as writer:
                writer.write_batch(piece)
            yield Chunk(path, "row", number, "arrow", sink.getvalue().to_pybytes())
            number += piece.num_rows
