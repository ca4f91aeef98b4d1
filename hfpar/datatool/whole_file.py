"""Files that a command writes: whole or not there, and never in place of what it reads."""

from __future__ import annotations

import fcntl
import glob
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hfpar.errors import ConfigError


def check_target(flag: str, path: str, inputs: Sequence[str]) -> Path:
    """Refuse a file that can't be written as JSON lines, or that would replace an input.

    Raises:
        ConfigError: one line with the flag.
    """
    target = Path(path).expanduser()
    if target.suffix.lower() not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--{flag}: {path} must end in .jsonl, for that is what is written")
    if target.is_dir():
        raise ConfigError(f"--{flag}: {path} is a folder; name a file")
    if not target.absolute().parent.is_dir():
        raise ConfigError(f"--{flag}: {target.parent} is no folder")
    for name in inputs:
        if os.path.exists(name) and target.exists() and os.path.samefile(name, target):
            raise ConfigError(f"--{flag}: {path} is read, too; name another file")
    return target


class WholeFile:
    """A file to write into, which takes its name when all is well; what was there before stays until then.

    Raises:
        ConfigError: it can't be written; one line with the flag.
    """

    def __init__(self, flag: str, target: Path) -> None:
        """Open a file beside its place."""
        self._flag, self._target = flag, target
        self._partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        with self._explained():
            self._remove_leftovers()
            self._file = open(self._partial, "wb")
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def write(self, content: bytes) -> None:
        """Append bytes."""
        with self._explained():
            self._file.write(content)

    def __enter__(self) -> WholeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with self._explained():
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
                    self._file.close()
                    os.replace(self._partial, self._target)
        finally:
            with suppress(OSError):  # what is left in the buffer of a full disk
                self._file.close()
            self._partial.unlink(missing_ok=True)

    def _remove_leftovers(self) -> None:
        """Of processes that were killed: whoever lives holds a lock."""
        for left in self._target.parent.glob(f".{glob.escape(self._target.name)}.*.partial"):
            with suppress(OSError), left.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                left.unlink(missing_ok=True)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"--{self._flag}: {self._target} can't be written ({reason}); make room, or name another file"
            ) from error
