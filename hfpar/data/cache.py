"""Tokenized data, kept for the next run under a key of everything that decides it.

An entry is a folder, built beside its place and moved there when it is whole; a lock lets one process build
it while others wait. Whoever is killed leaves a part without a name, which the next builder removes.
"""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hfpar.data.build import Recipe, encode_chunk, map_chunks, useful_processes
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.sources import DataFile, read_chunks
from hfpar.data.store import META_FILE, TokenStore, TokenWriter
from hfpar.errors import BadRowsError, ConfigError, DataError
from hfpar.whole_path import whole_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LIBRARIES = ("transformers", "tokenizers", "jinja2")
"""Whose versions may change the tokens."""
_TOKENIZER_FILES = ("*token*", "vocab*", "merges*", "*.model", "*.tiktoken", "*.jinja", "*.py")


@dataclass(frozen=True)
class TokenRequest:
    """One data set, to be tokenized in one way."""

    files: Sequence[DataFile]
    recipe: Recipe
    skip_bad_rows: bool


Progress = Callable[[Chunk, int], None]
"""Told of each chunk that is done, and of its number of rows."""


class TokenCache:
    """Where tokenized data is kept."""

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, tokenizer_folder: Path) -> None:
        """Open a cache.

        Args:
            folder: where the entries are.
            tokenizer: with the chat template that is in effect.
            tokenizer_folder: the files that it was loaded from.
        """
        self.folder = folder
        self.tokenizer = tokenizer
        self.tokenizer_key = tokenizer_fingerprint(tokenizer, tokenizer_folder)

    def key(self, request: TokenRequest) -> str:
        """A digest of everything that decides the tokens: contents, tokenizer, template, settings, code."""
        parts = {
            "files": [self._content(file) for file in request.files],
            "tokenizer": self.tokenizer_key,
            "recipe": repr(request.recipe),
            "skip_bad_rows": request.skip_bad_rows,
            "code": code_fingerprint(),
            "libraries": [importlib.metadata.version(name) for name in _LIBRARIES],
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def find(self, key: str) -> TokenStore | None:
        """The entry of a key, if there is a whole one."""
        return TokenStore(self.folder / key) if (self.folder / key / META_FILE).is_file() else None

    def get(
        self,
        request: TokenRequest,
        *,
        num_proc: int | None = None,
        progress: Progress | None = None,
        say: Callable[[str], None] = print,
    ) -> TokenStore:
        """The tokens of a data set, built now if this is the first time.

        Args:
            request: what to tokenize, and how.
            num_proc: processes; as many as the data is worth by default.
            progress: see `Progress`.
            say: takes a line for the user.

        Raises:
            BadRowsError: rows that can't be used, where they aren't to be skipped.
            ConfigError: the cache can't be written.
        """
        with self._explained():
            self.folder.mkdir(parents=True, exist_ok=True)
            key = self.key(request)
            found = self.find(key)
            if found is not None:
                return found
            with self._lock(key, say):
                found = self.find(key)
                if found is None:
                    self._build(key, request, num_proc, progress)
                    found = self.find(key)
        assert found is not None
        return found

    def _build(
        self, key: str, request: TokenRequest, num_proc: int | None, progress: Progress | None
    ) -> None:
        partial = self.folder / f".{key}.partial"
        shutil.rmtree(partial, ignore_errors=True)  # of a builder that was killed: the lock is ours
        partial.mkdir()
        try:
            write_tokens(partial, request, self.tokenizer, num_proc=num_proc, progress=progress)
            if self.key(request) != key:
                raise DataError(f"{request.files[0].path}: the data changed while it was read; start again")
            os.replace(partial, self.folder / key)
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    @contextmanager
    def _lock(self, key: str, say: Callable[[str], None]) -> Iterator[None]:
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / f".{key}.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"Waiting for another process, which is tokenizing the same data (lock: {lock.lock_file})")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"token_cache: {self.folder} can't be used ({error.strerror or error}); make room, or name another "
                "folder with --token_cache"
            ) from error

    def _content(self, file: DataFile) -> str:
        """The fingerprint of a file's content, looked up where the file hasn't been touched since."""
        path = Path(file.path)
        if not path.is_file():
            return file.fingerprint()
        status = path.stat()
        seen = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, file.kind, file.split]
        memory = self.folder / "fingerprints" / hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]
        try:
            remembered = json.loads(memory.read_text())
            if remembered["seen"] == seen:
                return str(remembered["fingerprint"])
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not remembered, or by a process that was killed over it
        fingerprint = file.fingerprint()
        memory.parent.mkdir(exist_ok=True)
        with whole_path(memory) as partial:
            partial.write_text(json.dumps({"seen": seen, "fingerprint": fingerprint}))
        return fingerprint


def write_tokens(
    folder: Path,
    request: TokenRequest,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_proc: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Tokenize a data set into an empty folder, for `TokenStore`.

    Raises:
        BadRowsError: see `TokenCache.get`.
    """
    recipe = request.recipe.for_data(request.files)
    writer = TokenWriter(folder)
    writer.report.hidden_items += recipe.hidden_items
    files: list[tuple[str, str]] = []
    blocks = map_chunks(
        encode_chunk,
        read_chunks(request.files),
        tokenizer,
        recipe,
        useful_processes(sum(file.num_bytes for file in request.files), num_proc),
    )
    try:
        for chunk, block in blocks:
            if not files or files[-1][0] != chunk.path:
                files.append((chunk.path, chunk.unit))
            writer.write(block, len(files) - 1)
            if progress is not None:
                progress(chunk, block.report.num_rows)
            if not request.skip_bad_rows and len(writer.report.listed_problems) >= BadRowsError.MOST:
                break
        if writer.report.num_bad_rows and not request.skip_bad_rows:
            raise BadRowsError(writer.report.listed_problems)
        writer.close(files)
    finally:
        writer.abandon()
        blocks.close()


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase, folder: Path) -> str:
    """A digest of a tokenizer's files, and of the chat template in effect."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    for path in sorted({path for pattern in _TOKENIZER_FILES for path in folder.glob(pattern)}):
        if path.is_file():
            digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    template = json.dumps(tokenizer.chat_template, sort_keys=True)
    digest.update(b"\0" + template.encode())
    if "strftime_now" in template:  # it writes the date into every conversation
        digest.update(datetime.date.today().isoformat().encode())
    return digest.hexdigest()


def code_fingerprint() -> str:
    """A digest of the code that makes tokens: an entry of other code is another entry."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()
