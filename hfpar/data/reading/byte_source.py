"""Bytes of a file, compressed or not, that says so when they end too soon."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from typing import IO, Any

from hfpar.data.reading.rows import RowError
from hfpar.errors import DataError, MissingDependencyError

COMPRESSIONS = {".gz": "gzip", ".bz2": "bzip2", ".xz": "xz", ".zst": "zstd"}
"""By suffix."""


class ByteSource:
    """A file's decompressed bytes, in order.

    Args:
        path: of the file.
        compression: one of `COMPRESSIONS`' values, or None.

    Raises:
        DataError: the file can't be opened, or its first bytes can't be read.
        MissingDependencyError: the package that decompresses it isn't installed.
    """

    def __init__(self, path: str, compression: str | None) -> None:
        self.path = path
        self.compression = compression
        try:
            self._raw: IO[bytes] = open(path, "rb")
        except OSError as error:
            raise cannot_be_read(path, error) from error
        self._size = os.fstat(self._raw.fileno()).st_size
        self._stream: Any = _decompressed(path, self._raw, compression)
        self._started = False
        self._ended = False

    def __enter__(self) -> ByteSource:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self._raw.close()

    def position(self) -> int:
        """How far into the file, in bytes on disk, the reader is."""
        return self._raw.tell()

    def readline(self, limit: int) -> bytes:
        """Read to the end of a line, but no more than `limit` bytes; nothing at the end of the file.

        Raises:
            RowError: the bytes end too soon, or are broken from here on. No more can be read.
        """
        return self._read(self._stream.readline, limit)

    def read(self, limit: int) -> bytes:
        """Read some bytes, at most `limit`; as `readline` otherwise."""
        return self._read(self._stream.read1, limit)

    def _read(self, method: Any, limit: int) -> bytes:
        if self._ended:
            return b""
        try:
            data: bytes = method(limit)
        except EOFError as error:
            self._ended = True
            raise RowError("file cut short", f"the {self.compression} file is cut short here") from error
        except (OSError, zlib.error, lzma.LZMAError, ValueError) as error:
            self._ended = True
            if not self._started or not self.compression:
                raise cannot_be_read(self.path, error, self.compression) from error
            raise RowError(
                "broken compression", f"cannot be read as {self.compression} from here on"
            ) from error
        self._started = True
        if not data:
            self._ended = True
            if not self.compression and self._raw.tell() < self._size:
                raise RowError("file cut short", "the file became shorter while it was read")
        return data


def cannot_be_read(path: str, error: BaseException, kind: str | None = None) -> DataError:
    """The error of a file as a whole, on one line."""
    reason = (error.strerror if isinstance(error, OSError) else None) or one_line(error)
    return DataError(f"{path}: cannot be read{f' as {kind}' if kind else ''}: {reason}")


def one_line(error: BaseException) -> str:
    """An error's text on one line, not too long a one."""
    text = " ".join(str(error).split())
    return (text[:300] + "..." if len(text) > 300 else text) or type(error).__name__


def _decompressed(path: str, raw: IO[bytes], compression: str | None) -> Any:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression == "bzip2":
        return bz2.BZ2File(raw)
    if compression == "xz":
        return lzma.LZMAFile(raw)
    if compression == "zstd":
        try:
            import zstandard
        except ImportError as error:
            raw.close()
            raise MissingDependencyError(f"{path}: needs zstandard: pip install 'hfpar[zstd]'") from error
        return io.BufferedReader(_ZstdReader(raw, zstandard), buffer_size=1 << 17)
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompressed bytes of one or more frames; `zstandard`'s own reader takes a cut file for a whole one."""

    def __init__(self, raw: IO[bytes], zstandard: Any) -> None:
        self._file = raw
        self._zstandard = zstandard
        self._frame: Any = None
        self._input = b""
        self._output = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            if not self._input:
                self._input = self._file.read(1 << 15)
            if not self._input:
                if self._frame is not None:
                    raise EOFError
                return 0
            self._step()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count

    def _step(self) -> None:
        if self._frame is None:
            self._frame = self._zstandard.ZstdDecompressor().decompressobj()
        try:
            self._output = self._frame.decompress(self._input)
        except self._zstandard.ZstdError as error:
            raise ValueError(str(error)) from error
        self._input = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
