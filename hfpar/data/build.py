"""From files to tokens: rows are read in chunks, and chunks are encoded here or in several processes.

Whoever reads does no more than cut files into chunks; parsing, checking, rendering and tokenizing are the
encoder's. Chunks come back in their order, and only a few are in memory at any time.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from hfpar.child_processes import end_with_parent, interrupts_ignored
from hfpar.config.schema import DataSource, FormatName, SFTConfig
from hfpar.data.chat.encode import EncodedRow, EncodeOptions, encode
from hfpar.data.overlap.screen import Screen, SiftedRows, describe
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.formats import to_example
from hfpar.data.reading.rows import Example, Place, Problem, RowError
from hfpar.data.reading.sources import DataFile
from hfpar.data.store import MAX_LISTED_OVERLAPS, MAX_LISTED_PROBLEMS, DataReport, TokenArrays, TokenBlock
from hfpar.errors import BadRowsError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

_BYTES_FOR_A_PROCESS = 16 * 2**20
"""Starting a process takes as long as tokenizing about so much."""
_MOST_PROCESSES = 16


@dataclass(frozen=True)
class Recipe:
    """All that decides what becomes of a row."""

    format: FormatName
    columns: Mapping[str, str] | None
    options: EncodeOptions
    screen: Screen | None = None
    """For benchmark items among the rows."""

    @classmethod
    def of(cls, config: SFTConfig, source: DataSource, screen: Screen | None = None) -> Recipe:
        """For one entry of `dataset`."""
        options = EncodeOptions(
            max_length=config.max_length,
            on_overflow=config.on_overflow,
            train_on=config.train_on,
            earlier_turns=config.earlier_turns,
            chat_template_kwargs=config.chat_template_kwargs or {},
        )
        return cls(
            source.format or config.dataset_format,
            config.dataset_columns if source.columns is None else source.columns,
            options,
            screen,
        )

    def for_data(self, files: Sequence[DataFile], *, streaming: bool = False) -> Recipe:
        """The same recipe, ready for the rows of these files.

        Raises:
            DataError: a file can't be read.
        """
        if self.screen is None:
            return self
        screen = self.screen.for_data(files, self.format, self.columns, streaming=streaming)
        return replace(self, screen=screen)

    @property
    def hidden_items(self) -> list[str]:
        """Benchmark items that the data's template holds, so that no row is named for them."""
        return [] if self.screen is None else list(self.screen.hidden_items)


def encode_chunk(chunk: Chunk, tokenizer: PreTrainedTokenizerBase, recipe: Recipe) -> TokenBlock:
    """Parse, check, render and tokenize the rows of a chunk."""
    examples, problems = read_examples(chunk, recipe)
    sifted = sift(examples, recipe)
    encoded = encode(sifted.kept, tokenizer, recipe.options)
    block = make_block([place for place, _ in sifted.kept], encoded, problems)
    count_overlaps(block.report, sifted, recipe)
    return block


def sift(examples: Sequence[tuple[Place, Example]], recipe: Recipe) -> SiftedRows:
    """Look for benchmark items, if that is wanted."""
    return SiftedRows(list(examples), []) if recipe.screen is None else recipe.screen.sift(examples)


def count_overlaps(report: DataReport, sifted: SiftedRows, recipe: Recipe) -> None:
    """Add what sifting found to the report on the rows that it left."""
    if recipe.screen is not None and sifted.found:
        if recipe.screen.action == "drop":
            report.num_rows += len(sifted.found)
        report.counts[recipe.screen.counted_as] += len(sifted.found)
        report.listed_overlaps += [describe(*found) for found in sifted.found[:MAX_LISTED_OVERLAPS]]


def encode_rows(
    rows: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, recipe: Recipe
) -> TokenArrays:
    """The samples of rows that are in memory, in any format.

    Raises:
        BadRowsError: rows that can't be used.
    """
    chunk = Chunk("the data", "row", 1, "values", list(enumerate(rows, start=1)))
    block = encode_chunk(chunk, tokenizer, recipe)
    if block.report.num_bad_rows:
        raise BadRowsError(block.report.listed_problems)
    return TokenArrays(block.input_ids, block.trained, block.lengths)


def read_examples(chunk: Chunk, recipe: Recipe) -> tuple[list[tuple[Place, Example]], list[Problem]]:
    """The rows of a chunk that are well-formed, and what is wrong with the others."""
    examples: list[tuple[Place, Example]] = []
    problems: list[Problem] = []
    for place, value in chunk.rows():
        if isinstance(value, Problem):
            problems.append(value)
            continue
        try:
            examples.append((place, to_example(value, recipe.format, recipe.columns)))
        except RowError as error:
            problems.append(error.at(place))
    return examples, problems


def make_block(
    places: Sequence[Place], encoded: Sequence[EncodedRow], problems: Sequence[Problem]
) -> TokenBlock:
    """Samples as arrays, with everything counted. `problems` are those of rows that weren't encoded."""
    counts: Counter[str] = Counter()
    found = list(problems)
    samples, rows = [], []
    for place, row in zip(places, encoded, strict=True):
        counts.update(row.counts)
        if row.problem is not None:
            found.append(row.problem)
        samples += row.samples
        rows += [place.number] * len(row.samples)
    found.sort(key=lambda problem: problem.place.number)
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    total = int(lengths.sum())
    input_ids = np.fromiter(
        itertools.chain.from_iterable(sample.input_ids for sample in samples), dtype=np.uint32, count=total
    )
    trained = np.fromiter(
        itertools.chain.from_iterable(sample.trained for sample in samples), dtype=np.bool_, count=total
    )
    trained[np.cumsum(lengths) - lengths] = False  # nothing predicts a sample's first token
    report = DataReport(
        num_rows=len(places) + len(problems),
        num_samples=len(samples),
        num_tokens=total,
        num_label_tokens=int(trained.sum()),
        max_token_id=int(input_ids.max()) if total else 0,
        counts=counts,
        problems=Counter(problem.kind for problem in found),
        listed_problems=[str(problem) for problem in found[:MAX_LISTED_PROBLEMS]],
    )
    return TokenBlock(input_ids, trained, lengths, np.array(rows, dtype=np.int64), report)


# Several processes


def useful_processes(num_bytes: int, wanted: int | None) -> int:
    """How many processes to encode in: as wanted, or as many as the size of the data is worth."""
    if wanted is not None:
        return wanted
    available = len(os.sched_getaffinity(0))
    return max(1, min(available, _MOST_PROCESSES, num_bytes // _BYTES_FOR_A_PROCESS))


def map_chunks(
    function: Callable[[Chunk, Any, Recipe], T],
    chunks: Iterable[Chunk],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    num_proc: int = 1,
) -> Generator[tuple[Chunk, T], None, None]:
    """Yield each chunk with `function(chunk, tokenizer, recipe)`, in order, computed in `num_proc` processes.

    Raises:
        DataError: a process died, out of memory perhaps.
    """
    if num_proc == 1:
        for chunk in chunks:
            yield chunk, function(chunk, tokenizer, recipe)
        return
    with _shared((function, tokenizer, recipe)) as given:
        # Not forked: by now this process may have threads, of the tokenizer and of the process group.
        pool = ProcessPoolExecutor(
            num_proc,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_keep,
            initargs=(given,),
        )
        try:
            yield from _in_order(pool, chunks, 2 * num_proc)
        except BrokenProcessPool as error:
            raise DataError(
                "dataset_num_proc: a process that tokenizes was killed (often: the machine is out of memory); "
                f"use fewer than {num_proc}"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _shared(content: Any) -> Iterator[Any]:
    """What a started process finds `content` by: a path to a file without a name, which ends with this process.

    Arguments of a process go through a pipe: where they don't fit into it, and the process is killed before it has read
    them, its parent waits for ever, since it holds the reading end, too.

    Raises:
        DataError: there is no room for it.
    """
    try:
        file = tempfile.TemporaryFile()
        pickle.dump(content, file)
        file.flush()
    except OSError as error:
        raise DataError(
            f"dataset_num_proc: {tempfile.gettempdir()} can't hold what processes are given "
            f"({error.strerror or error}); make room, name another folder with TMPDIR, or use 1"
        ) from error
    with file:
        path = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
        yield path if path.exists() else content  # outside of Linux by the pipe


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterable[Chunk], most: int
) -> Generator[tuple[Chunk, Any], None, None]:
    """Each chunk with what became of it; at most `most` chunks are in memory."""
    pending: deque[tuple[Chunk, Future[Any]]] = deque()
    for chunk in chunks:
        with interrupts_ignored():
            pending.append((chunk, pool.submit(_apply, chunk)))
        if len(pending) >= most:
            done, future = pending.popleft()
            yield done, future.result()
    while pending:
        done, future = pending.popleft()
        yield done, future.result()


class _Worker:
    """What a process of the pool was given at its start."""

    function: Callable[[Chunk, Any, Recipe], Any]
    tokenizer: Any
    recipe: Recipe


def _keep(given: Any) -> None:
    end_with_parent()
    if isinstance(given, Path):
        try:
            given = pickle.loads(given.read_bytes())
        except (
            FileNotFoundError
        ):  # the parent has ended meanwhile with what it was doing, by an error perhaps
            os._exit(1)
    function, _Worker.tokenizer, _Worker.recipe = given
    _Worker.function = staticmethod(function)


def _apply(chunk: Chunk) -> Any:
    return _Worker.function(chunk, _Worker.tokenizer, _Worker.recipe)
