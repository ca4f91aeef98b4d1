"""The folder of an export: there as a whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from hfpar.errors import ConfigError
from hfpar.train.checkpoint import CONFIG_FILE
from hfpar.train.files import files_in, make_fresh, remove_at_once, sync

_MARKS = ("config.json", "adapter_config.json")


class Output:
    """Where an export goes."""

    def __init__(self, folder: Path, *, overwrite: bool, never: Sequence[Path]) -> None:
        """Check it.

        Args:
            folder: given by the user.
            overwrite: whether an export that is there may be replaced.
            never: folders that must stay.

        Raises:
            ConfigError: something is there that must stay.
        """
        self.folder = Path(os.path.abspath(folder.expanduser()))
        real = self.folder.resolve()
        for other in never:
            if real == other.resolve() or real in other.resolve().parents:
                raise ConfigError(
                    f"--output: {folder} is or holds {other}, which is read; use another folder"
                )
        if self.folder.is_symlink() or (self.folder.exists() and not self.folder.is_dir()):
            raise ConfigError(f"--output: {folder} is no folder; use another")
        if not self.folder.is_dir() or not any(self.folder.iterdir()):
            return
        is_export = any((self.folder / mark).is_file() for mark in _MARKS)
        if not is_export or (self.folder / CONFIG_FILE).exists():
            raise ConfigError(f"--output: {folder} isn't empty and isn't an export; use another folder")
        if not overwrite:
            raise ConfigError(
                f"--output: {folder} holds an export; replace it with --overwrite, or use another folder"
            )

    def check_space(self, num_bytes: int) -> None:
        """Refuse what won't fit.

        Raises:
            ConfigError: the disk has less room.
        """
        parent = next(folder for folder in self.folder.parents if folder.is_dir())
        free = shutil.disk_usage(parent).free
        if num_bytes > free:
            raise ConfigError(
                f"--output: {self.folder} needs {num_bytes / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free; "
                "make room, or use another folder"
            )

    @contextmanager
    def written(self) -> Iterator[Path]:
        """A folder to write into, which takes its place at the end if nothing went wrong.

        Raises:
            ConfigError: it can't be written.
        """
        partial = self.folder.with_name(f".{self.folder.name}.partial")
        try:
            with self._explained_errors():
                make_fresh(partial)
            with self._explained_errors():
                yield partial
                mode = next(partial / mark for mark in _MARKS if (partial / mark).is_file()).stat().st_mode
                for _, path in files_in(partial):
                    path.chmod(mode)  # safetensors files come readable by their owner alone
                    sync(path)
                remove_at_once(self.folder)
                os.replace(partial, self.folder)
                sync(self.folder.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _explained_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, SafetensorError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
            raise ConfigError(f"--output: {self.folder} can't be written ({reason or error})") from error
