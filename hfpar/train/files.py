"""Files that are whole or not there, and what is said when they can't be written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException

from hfpar.errors import ConfigError
from hfpar.whole_path import whole_path


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that nobody ever sees half of it."""
    with whole_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def make_fresh(folder: Path) -> None:
    """Make an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def remove_at_once(folder: Path) -> None:
    """Remove a folder so that one who is stopped in the middle doesn't leave half of it under its name."""
    if folder.exists():
        removed = folder.with_name(f".{folder.name}.removed.partial")
        shutil.rmtree(removed, ignore_errors=True)
        os.replace(folder, removed)
        shutil.rmtree(removed)


def files_in(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file below `folder`, with its path in it."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk: then a power cut can't halve it either."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained_write_errors(target: Path) -> Iterator[None]:
    """What the libraries raise when a file can't be written, as one line."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError, CheckpointException) as error:
        reason = _write_failure(error)
        if reason is None:
            raise
        raise ConfigError(
            f"output_dir: {target} can't be written ({reason}); earlier checkpoints are whole: make room and "
            "continue with --resume"
        ) from error


def _write_failure(error: BaseException) -> str | None:
    """Why a write failed; None if it is something else that failed."""
    if isinstance(error, CheckpointException):
        reasons = [_write_failure(failure) for failure, _ in error.failures.values()]
        return next((reason for reason in reasons if reason), None)
    if isinstance(error, OSError):
        return error.strerror or str(error)
    text = str(error)
    if any(mark in text for mark in ("PytorchStreamWriter", "inline_container", "file write failed")):
        return "a file was cut off; is the disk full?"  # torch's own words say neither
    return text.splitlines()[0] if "os error" in text or "IoError" in text else None
