"""What a person sees while a model trains: the summary, the progress bar or log lines, and `metrics.jsonl`.

Nothing here talks to other ranks: the caller passes figures that are already global, and says which rank is
the main one.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm

from hfpar.errors import ConfigError
from hfpar.whole_path import whole_path

METRICS_FILE = "metrics.jsonl"

MetricsRow = dict[str, Any]
Tracker = Callable[[dict[str, float], int], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """The global figures of one optimizer step, the same on every rank.

    Attributes:
        step: Optimizer steps done, this one included.
        epoch: Passes over the data done so far, with the fraction.
        loss: Mean negative log-likelihood of a label token of this step, in nats.
        grad_norm: Norm of the whole gradient before clipping.
        learning_rate: The rate this step used.
        num_tokens: Real tokens (prompt and label, no padding) seen since the run began.
        num_label_tokens: Tokens with a label seen since the run began.
        tokens_per_second: Real tokens of all ranks a second, since the last logged row.
        peak_memory_bytes: Peak memory of the rank that needed most.
    """

    step: int
    epoch: float
    loss: float
    grad_norm: float
    learning_rate: float
    num_tokens: int
    num_label_tokens: int
    tokens_per_second: float
    peak_memory_bytes: int


class MetricsLogger:
    """Shows the training on stderr and appends every logged row to `metrics.jsonl`.

    On a terminal there is a progress bar; elsewhere one plain line per logged step, so that a log file stays
    readable. The file holds one JSON object a line, written as a whole before `log_step` returns: the fields
    of `StepMetrics`, or for an evaluation `step`, `epoch`, `eval_loss` and `num_eval_label_tokens`. It is
    always valid JSON: a figure that is NaN or infinite is written as null.

    Opening it removes what an interrupted run logged after `start_step` (everything, if that is 0), and the
    half line of a killed process, so no step appears twice. On ranks that are not main, nothing happens.

    Args:
        output_dir: Folder of `metrics.jsonl`; made if it is missing.
        is_main: Whether this rank shows and writes anything.
        total_steps: Optimizer steps of the whole run.
        start_step: Steps that were done before this process started; 0 unless it resumes.
        tracker: Called with each row's figures (all but `step`; NaN and infinities as they are) and its step.

    Raises:
        ConfigError: On entering or logging, if `metrics.jsonl` can't be read or written.
    """

    def __init__(
        self,
        output_dir: str | os.PathLike[str],
        *,
        is_main: bool,
        total_steps: int,
        start_step: int,
        tracker: Tracker | None,
    ) -> None:
        self._path = Path(output_dir) / METRICS_FILE
        self._is_main = is_main
        self._total_steps = total_steps
        self._start_step = start_step
        self._tracker = tracker
        self._file_descriptor: int | None = None
        self._bar: Any = None
        self._start_time = 0.0

    def __enter__(self) -> "MetricsLogger":
        if not self._is_main:
            return self
        with _explained_os_errors(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _forget_rows_after(self._path, self._start_step)
            self._file_descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._start_time = time.monotonic()
        if sys.stderr.isatty():
            self._bar = tqdm(
                total=self._total_steps,
                initial=self._start_step,
                unit="step",
                file=sys.stderr,
                dynamic_ncols=True,
                bar_format="{bar:6}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            )
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if self._file_descriptor is not None:
            os.close(self._file_descriptor)
            self._file_descriptor = None

    def advance(self, step: int) -> None:
        """Moves the bar to `step`, for steps that are not logged."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def log_step(self, metrics: StepMetrics) -> None:
        """Shows, writes and tracks one training row."""
        if not self._is_main:
            return
        self._write_row(dataclasses.asdict(metrics))
        if self._bar is not None:
            self._bar.set_postfix_str(_bar_figures(metrics), refresh=False)
            self.advance(metrics.step)
            self._bar.refresh()
        else:
            self.message(format_step_line(metrics, self._total_steps, self._remaining_seconds(metrics.step)))

    def log_eval(self, *, step: int, epoch: float, eval_loss: float, num_eval_label_tokens: int) -> None:
        """Shows, writes and tracks one evaluation row.

        Args:
            step: Optimizer steps done; 0 before training.
            epoch: Passes over the training data done so far.
            eval_loss: Mean negative log-likelihood of a label token of the evaluation data, in nats.
            num_eval_label_tokens: Label tokens of the evaluation data.
        """
        if not self._is_main:
            return
        row = {
            "step": step,
            "epoch": epoch,
            "eval_loss": eval_loss,
            "num_eval_label_tokens": num_eval_label_tokens,
        }
        self._write_row(row)
        self.message(
            f"step {step}/{self._total_steps} | eval_loss {eval_loss:.4f}"
            f" over {format_count(num_eval_label_tokens)} label tokens"
        )

    def message(self, text: str) -> None:
        """Prints one line on stderr, above the bar if there is one."""
        if not self._is_main:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    def _remaining_seconds(self, step: int) -> float:
        num_done = step - self._start_step
        if num_done <= 0:
            return math.nan
        return (time.monotonic() - self._start_time) / num_done * (self._total_steps - step)

    def _write_row(self, row: MetricsRow) -> None:
        if self._file_descriptor is None:
            raise RuntimeError("MetricsLogger is used outside its `with` block")
        with _explained_os_errors(self._path):
            _append_whole(self._file_descriptor, _to_json_line(row))
        if self._tracker is not None:
            self._tracker({key: value for key, value in row.items() if key != "step"}, row["step"])


def read_metrics(path: str | os.PathLike[str]) -> list[MetricsRow]:
    """Reads the rows of a `metrics.jsonl`; the half line of a killed process at the end is left out.

    Args:
        path: The file; one that doesn't exist, or isn't a regular file, has no rows.

    Raises:
        ConfigError: If a line before the last one isn't a JSON object with an integer `step`.
    """
    path = Path(path)
    if not path.is_file():
        return []
    with _explained_os_errors(path):
        lines = path.read_bytes().split(b"\n")
    while lines and not lines[-1].strip():
        lines.pop()
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse_row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise ConfigError(
                f"{path}, line {number}: not a JSON object with a step; mend the line, or move the file away"
            )
    return rows


def print_summary(rows: Sequence[tuple[str, str]], title: str) -> None:
    """Prints a two-column table on stdout: with a frame and colours on a terminal, plain elsewhere.

    Args:
        rows: Name and value of each line; shown as they are, no markup.
        title: Heading of the table.
    """
    console = Console(highlight=False)
    if console.is_terminal:
        table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=ROUNDED)
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows:
            table.add_row(Text(name), Text(value))
        console.print(table)
        return
    # Without a terminal rich would wrap at 80 columns; a log wants the whole value on its line.
    width = max((len(name) for name, _ in rows), default=0)
    lines = [title, *(f"  {name:<{width}}  {value}".rstrip() for name, value in rows)]
    console.out("\n".join(lines), highlight=False)


def format_step_line(metrics: StepMetrics, total_steps: int, remaining_seconds: float) -> str:
    """Returns the plain line of one training row, for logs that are not a terminal."""
    return (
        f"step {metrics.step}/{total_steps} | epoch {metrics.epoch:.2f} | loss {metrics.loss:.4f}"
        f" | lr {metrics.learning_rate:.2e} | grad_norm {metrics.grad_norm:.3f}"
        f" | {format_count(metrics.tokens_per_second)} tokens/s"
        f" | {format_bytes(metrics.peak_memory_bytes)} | ETA {format_duration(remaining_seconds)}"
    )


def format_count(value: float) -> str:
    """Returns a short count: `950`, `1.2K`, `134.5M`, `7.2B`; a fraction below 1000 keeps one decimal."""
    return _scaled(value, 1000, ("", "K", "M", "B", "T"))


def format_bytes(num_bytes: float) -> str:
    """Returns a size in binary units: `512 B`, `1.5 KiB`, `3.1 GiB`."""
    return _scaled(num_bytes, 1024, (" B", " KiB", " MiB", " GiB", " TiB"))


def format_duration(seconds: float) -> str:
    """Returns a duration in its two largest units: `42s`, `3m07s`, `2h05m`, `1d03h`; `?` if not finite."""
    if not math.isfinite(seconds):
        return "?"
    total = max(0, round(seconds))
    if total < 60:
        return f"{total}s"
    for upper, large, small, names in ((3600, 60, 1, "ms"), (86400, 3600, 60, "hm")):
        if total < upper:
            return f"{total // large}{names[0]}{total % large // small:02d}{names[1]}"
    return f"{total // 86400}d{total % 86400 // 3600:02d}h"


def _scaled(value: float, base: int, suffixes: Sequence[str]) -> str:
    if not math.isfinite(value):
        return str(value)
    if float(value).is_integer() and abs(value) < base:
        return f"{int(value)}{suffixes[0]}"
    index = 0
    # Compared after rounding: 999_999 is 1.0M, not 1000.0K.
    while round(abs(value), 1) >= base and index < len(suffixes) - 1:
        value /= base
        index += 1
    return f"{value:.1f}{suffixes[index]}"


def _bar_figures(metrics: StepMetrics) -> str:
    """The figures in so few characters that the bar's line fits into 80 columns."""
    return (
        f"loss {metrics.loss:.4f}, lr {metrics.learning_rate:.1e}, grad {metrics.grad_norm:.3f},"
        f" {format_count(metrics.tokens_per_second)} tok/s"
    )


def _to_json_line(row: MetricsRow) -> bytes:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in row.items()
    }
    return json.dumps(finite, allow_nan=False).encode() + b"\n"


def _parse_row(line: bytes) -> MetricsRow | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _forget_rows_after(path: Path, step: int) -> None:
    if not path.is_file():
        return
    # A run that starts over doesn't even look at what is there.
    kept = [row for row in read_metrics(path) if row["step"] <= step] if step > 0 else []
    content = b"".join(_to_json_line(row) for row in kept)
    if content != path.read_bytes():
        with whole_path(path) as partial:
            partial.write_bytes(content)


def _append_whole(file_descriptor: int, line: bytes) -> None:
    """Appends `line`, or leaves the file as it was: a full disk takes only part of a write."""
    num_bytes_before = os.fstat(file_descriptor).st_size
    try:
        written = 0
        while written < len(line):
            written += os.write(file_descriptor, line[written:])
    except BaseException:
        # A device can't be truncated; the error that brought us here is the one to tell.
        with contextlib.suppress(OSError):
            os.ftruncate(file_descriptor, num_bytes_before)
        raise


@contextlib.contextmanager
def _explained_os_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; the metrics need a folder that can be written and a disk"
            " with free space (output_dir names another one)"
        ) from error


class RowsBar:
    """How much of the data is read and tokenized, for work that takes more than a moment."""

    def __init__(self, title: str, num_bytes: int) -> None:
        """Show nothing yet. `num_bytes` is the size of all files, 0 where nobody knows it."""
        unit = "B" if num_bytes else " rows"
        self._bar = tqdm(
            desc=title,
            total=num_bytes or None,
            unit=unit,
            unit_scale=True,
            delay=2,
            leave=False,
            disable=None,
        )
        self._num_rows = 0

    def __enter__(self) -> "RowsBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, path: str, num_bytes: int, num_rows: int) -> None:
        """Count a piece of a file that is done."""
        self._num_rows += num_rows
        self._bar.set_postfix_str(f"{format_count(self._num_rows)} rows, {Path(path).name}", refresh=False)
        self._bar.update(num_bytes if self._bar.total else num_rows)

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._bar.write(text, file=sys.stderr)
