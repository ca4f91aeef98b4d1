"""Data that is tokenized while it is trained on: a window of rows at a time, in place of an epoch.

Every rank reads and tokenizes every window, which needs no exchange between them and is cheap beside
training; so all know the same samples, and the plan of a window is that of an epoch.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfpar.data.build import encode_chunk
from hfpar.data.cache import TokenRequest
from hfpar.data.loader import StepLoader
from hfpar.data.reading.rows import Place, Problem
from hfpar.data.reading.sources import DataFile, read_chunks
from hfpar.data.store import DataReport, TokenArrays, TokenBlock
from hfpar.data.stream import Sample, TokenStream
from hfpar.errors import BadRowsError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OUTLINE_BYTES = 1 << 20

NumberedRow = tuple[Place, "dict[str, Any] | Problem"]


@dataclass(frozen=True)
class _Rows:
    """Rows that are parsed already, in place of a chunk."""

    held: list[NumberedRow]

    def rows(self) -> Iterator[NumberedRow]:
        return iter(self.held)


class WindowReader:
    """Windows of several data sets, each read again from its start whenever it ends.

    A window takes rows of each data set in proportion to the weights.
    """

    def __init__(
        self,
        requests: Sequence[TokenRequest],
        weights: Sequence[float],
        tokenizer: PreTrainedTokenizerBase,
        *,
        rows: int,
        check: Callable[[TokenBlock], None],
        tokenizer_key: str = "",
    ) -> None:
        """Start at the first window.

        Args:
            requests: the data sets.
            weights: of each.
            tokenizer: with the chat template that is in effect.
            rows: of a window.
            check: is shown each window, and raises what it doesn't like.
            tokenizer_key: of the tokenizer and its template, for the fingerprint.
        """
        self.requests = list(requests)
        self._recipes = [request.recipe.for_data(request.files, streaming=True) for request in self.requests]
        self.tokenizer = tokenizer
        self.rows = rows
        self.report = DataReport()
        for recipe in self._recipes:
            self.report.add(DataReport(hidden_items=recipe.hidden_items))
        self._shares = [weight / sum(weights) for weight in weights]
        self._check = check
        self._tokenizer_key = tokenizer_key
        self._streams = [_endless(request) for request in self.requests]
        self._next = 0
        self._ahead: Future[list[TokenBlock]] | None = None
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="window")

    @property
    def fingerprint(self) -> str:
        """Of what is read, and how: of long files the beginning, the end and the size."""
        parts = [
            (
                [(file.path, _outline(file)) for file in request.files],
                repr(request.recipe),
                request.skip_bad_rows,
            )
            for request in self.requests
        ]
        text = repr((parts, self._shares, self.rows, self._tokenizer_key))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def read(self, window: int) -> TokenArrays:
        """The samples of a window, and in the background those of the next. Windows only go forward.

        Raises:
            BadRowsError: rows that can't be used, where they aren't to be skipped.
            DataError: a data set without rows, or a window without a sample.
        """
        assert window >= self._next
        if self._ahead is not None:
            blocks = self._ahead.result()
            self._next += 1
        if self._ahead is None or window >= self._next:
            self._skip_to(window)
            blocks = self._window(window)
        self._next = window + 1
        for block in blocks:
            self.report.add(block.report)
        problems = [line for block in blocks for line in block.report.listed_problems]
        if problems and not all(request.skip_bad_rows for request in self.requests):
            raise BadRowsError(problems)
        lengths = np.concatenate([block.lengths for block in blocks])
        if not len(lengths):
            raise DataError(
                f"dataset: not one sample in rows {window * self.rows + 1} to {(window + 1) * self.rows} of the "
                "stream; `hfpar data check` says why"
            )
        for block in blocks:
            if len(block.lengths):
                self._check(block)
        self._ahead = self._executor.submit(self._window, window + 1)
        return TokenArrays(
            np.concatenate([block.input_ids for block in blocks]),
            np.concatenate([block.trained for block in blocks]),
            lengths,
        )

    def _skip_to(self, window: int) -> None:
        for earlier in range(self._next, window):
            for stream, count in zip(self._streams, self._counts(earlier), strict=True):
                for _ in itertools.islice(stream, count):
                    pass

    def _window(self, window: int) -> list[TokenBlock]:
        blocks = []
        for recipe, stream, count in zip(self._recipes, self._streams, self._counts(window), strict=True):
            chunk: Any = _Rows(list(itertools.islice(stream, count)))
            blocks.append(encode_chunk(chunk, self.tokenizer, recipe))
        return blocks

    def _counts(self, window: int) -> list[int]:
        """Rows of each data set in a window; what rounding takes from one window it gives to a later one."""
        return [
            int(share * self.rows * (window + 1)) - int(share * self.rows * window) for share in self._shares
        ]


def _outline(file: DataFile) -> str:
    path = Path(file.path)
    if not path.is_file():
        return f"{file.split} {file.name} {file.num_bytes}"
    with path.open("rb") as content:
        digest = hashlib.sha256(content.read(_OUTLINE_BYTES))
        content.seek(max(file.num_bytes - _OUTLINE_BYTES, 0))
        digest.update(content.read(_OUTLINE_BYTES))
    return f"{file.num_bytes} {digest.hexdigest()}"


def _endless(request: TokenRequest) -> Iterator[NumberedRow]:
    while True:
        for chunk in read_chunks(request.files, streaming=True):
            yield from chunk.rows()


class StreamLoader:
    """A `StepLoader` whose epochs are windows: `epoch` counts them, and `step` the steps in one."""

    def __init__(self, windows: WindowReader, **batches: Any) -> None:
        """Start at the first window.

        Args:
            windows: the samples.
            batches: as `StepLoader` takes them.
        """
        self.windows = windows
        self.epoch = 0
        self.step = 0
        self._batches = batches
        self._current: tuple[int, StepLoader] | None = None

    def __iter__(self) -> Iterator[list[TokenStream]]:
        """Yield the micro-batches of each step that is left in the window, then turn to the next."""
        loader = self._loader()
        loader.step = self.step
        for micro_batches in loader:
            self.step += 1
            yield micro_batches
        self.epoch += 1
        self.step = 0

    def _loader(self) -> StepLoader:
        if self._current is None or self._current[0] != self.epoch:
            loader = StepLoader(self.windows.read(self.epoch), **self._batches)
            loader.epoch = self.epoch
            self._current = (self.epoch, loader)
        return self._current[1]

    @property
    def samples(self) -> Sequence[Sample]:
        """Of the current window."""
        return self._loader().samples

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of the current window."""
        assert epoch == self.epoch
        return self._loader().num_steps(epoch)

    @property
    def fingerprint(self) -> str:
        """Of what is streamed, and how."""
        return self.windows.fingerprint

    @property
    def padding_saved(self) -> float:
        """As `StepLoader.padding_saved`, of the current window."""
        return self._loader().padding_saved
