"""`hfpar verify`: no engine and no layout changes one process's numbers; proof on this machine, for this model."""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from hfpar.errors import ConfigError, HfparError
from hfpar.verify.cells import (
    BATCHINGS,
    DEFAULT_ADAPTERS,
    DEFAULT_LAYOUTS,
    ENGINES,
    Cell,
    Errors,
    Result,
    layout_refusal,
    layout_sizes,
    make_cells,
)
from hfpar.verify.processes import SECONDS_TO_ANSWER, Worker, WorkerError, run_processes

TOLERANCE = 1e-5
_GIB_PER_PROCESS = 0.8
_WIDTH_FOR_NOTES = 120
_WIDTH_OF_FILES = 160

Progress = Callable[[str], None]
"""Told what is being done."""


def main(argv: Sequence[str]) -> int:
    """Run the table.

    Args:
        argv: the options.

    Returns:
        0 if nothing failed (refused cells are no failure), 1 if something did, 2 if nothing could be compared.

    Raises:
        ConfigError: an option that can't be.
    """
    args = _parse(argv)
    cells = make_cells(args.engines, args.layouts, args.adapters, args.batching)
    if args.json is not None and not args.json.resolve().parent.is_dir():
        raise ConfigError(f"--json: {args.json.parent} is no folder")
    started = time.monotonic()
    results = _run_with_progress(cells, args)
    return _report(results, args, time.monotonic() - started)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"verify: {message}; `hfpar verify --help` lists what it takes")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="hfpar verify",
        description="Trains a shrunk copy of a model under each combination, and compares the loss, the gradient "
        "norm, every gradient and every updated parameter with one plain process. All lists are comma-separated.",
    )
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument(
        "--layouts",
        default=DEFAULT_LAYOUTS,
        help="products of dp, cp (ring), sp (Ulysses) and tp (tensor) ranks, such as dp2,sp4,tp2cp2; default: "
        "%(default)s",
    )
    parser.add_argument("--adapters", default=DEFAULT_ADAPTERS, help="default: %(default)s")
    parser.add_argument("--batching", default=",".join(BATCHINGS), help="default: %(default)s")
    parser.add_argument(
        "--model_name_or_path", help="whose config is shrunk; default: the built-in tiny model"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table there, too")
    parser.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE, help="relative; default: %(default)s"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: GPUs where a layout has enough of them, else the CPU",
    )
    return parser.parse_args(list(argv))


def _tolerance(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(f"--tolerance: {text}; allowed: a number between 0 and 1, such as 1e-5")
    return value


def _run_with_progress(cells: Sequence[Cell], args: argparse.Namespace) -> list[Result]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as ProgressBar

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory(prefix="hfpar_verify_") as folder,
        ProgressBar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("starting", total=len(cells))
        done = 0

        def show(text: str) -> None:
            bar.update(task, description=text)

        def advance(result: Result) -> None:
            nonlocal done
            done += 1
            bar.update(task, completed=done)

        return verify(
            cells,
            Path(folder),
            model_name_or_path=args.model_name_or_path,
            tolerance=args.tolerance,
            device=args.device,
            show=show,
            on_result=advance,
        )


def run_cells_lazily(worker: Worker, *arguments: Any) -> None:
    """`run_cells`, loaded in the process that needs it: once its output and environment are set up."""
    from hfpar.verify.worker import run_cells

    run_cells(worker, *arguments)


def prepare_references_lazily(worker: Worker, *arguments: Any) -> None:
    """`prepare_references`, loaded in the process that needs it."""
    from hfpar.verify.worker import prepare_references

    prepare_references(worker, *arguments)


def verify(
    cells: Sequence[Cell],
    folder: Path,
    *,
    model_name_or_path: str | None = None,
    tolerance: float = TOLERANCE,
    device: str = "auto",
    show: Progress = lambda text: None,
    on_result: Callable[[Result], None] = lambda result: None,
    run_cells: Callable[..., None] = run_cells_lazily,
    timeout: float = SECONDS_TO_ANSWER,
) -> list[Result]:
    """Run cells and compare each with one plain process.

    Args:
        cells: which, in the order of the table.
        folder: an empty one, for everything that is written on the way.
        model_name_or_path: whose config is shrunk; None: the tiny model's.
        tolerance: largest relative error that passes.
        device: `auto`, `cpu` or `cuda`.
        show: told what is being done.
        on_result: called with every row as it is known.
        run_cells: what each process runs; see `hfpar.verify.worker.run_cells`.
        timeout: seconds of silence after which processes are stopped.

    Returns:
        A row a cell, in their order.

    Raises:
        ConfigError: the model can't be read or shrunk.
        WorkerError: the plain process failed.
    """
    results: dict[int, Result] = {}

    def settle(number: int, result: Result) -> None:
        results[number] = result
        on_result(result)

    environment, zero_refusal = _prepare_zero(cells, folder, device, show)
    for number, cell in enumerate(cells):
        refusal = layout_refusal(cell.layout) or _too_big(cell, device)
        if refusal is None and cell.engine.startswith("zero"):
            refusal = zero_refusal
        if refusal is not None:
            settle(number, Result(cell, "refused", reason=refusal))
    runnable = [(number, cell) for number, cell in enumerate(cells) if number not in results]
    if runnable:
        adapters = sorted({cell.adapter for _, cell in runnable})
        sizes = [layout_sizes(cell.layout) for _, cell in runnable]
        fewest_heads = max(size.get("sp", 1) * size.get("tp", 1) for size in sizes)
        tp_sizes = sorted({size.get("tp", 1) for size in sizes})
        _make_references(model_name_or_path, adapters, fewest_heads, tp_sizes, folder, device, show)
    for world_size in sorted({cell.world_size for _, cell in runnable}):
        run = _Run(folder, world_size, environment, tolerance, timeout, run_cells, show, settle)
        run(
            [(number, cell) for number, cell in runnable if cell.world_size == world_size],
            _device_type(world_size, device),
        )
    return [results[number] for number in range(len(cells))]


def _make_references(
    model_name_or_path: str | None,
    adapters: list[str],
    fewest_heads: int,
    tp_sizes: list[int],
    folder: Path,
    device: str,
    show: Progress,
) -> None:
    show("one plain process")
    try:
        run_processes(
            prepare_references_lazily,
            1,
            (model_name_or_path, adapters, fewest_heads, tp_sizes, folder),
            folder=folder,
            device_type=_device_type(1, device),
        )
    except WorkerError as error:
        if error.refused:
            raise ConfigError(str(error)) from error
        raise WorkerError(f"the plain process failed: {error}\n{error.details}") from error


def _prepare_zero(
    cells: Sequence[Cell], folder: Path, device: str, show: Progress
) -> tuple[dict[str, str], str | None]:
    """The environment of the processes, and why no ZeRO cell can run, or None."""
    zero = [cell for cell in cells if cell.engine.startswith("zero") and layout_refusal(cell.layout) is None]
    if not zero:
        return {}, None
    if importlib.util.find_spec("deepspeed") is None:
        return {}, "DeepSpeed isn't installed: pip install 'hfpar[deepspeed]'"
    if all(_device_type(cell.world_size, device) == "cuda" for cell in zero):
        return {}, None
    from hfpar.verify.extensions import prepare_extensions

    show("DeepSpeed's op for CPUs")
    return prepare_extensions(folder)


def _device_type(num_processes: int, device: str) -> str:
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.device_count() >= num_processes else "cpu"


def _too_big(cell: Cell, device: str) -> str | None:
    """Why this machine can't hold the cell's processes, or None."""
    size = cell.world_size
    if _device_type(size, device) == "cuda":
        import torch

        count = torch.cuda.device_count()
        return None if count >= size else f"{cell.layout} needs {size} GPUs, this machine has {count}"
    import psutil

    available = psutil.virtual_memory().available / 2**30
    needed = size * _GIB_PER_PROCESS
    if needed <= available:
        return None
    return f"{cell.layout} needs about {needed:.0f} GiB for {size} processes, {available:.0f} GiB are free"


class _Run:
    """The cells of one number of processes: one set of processes for all, a new one after a crash."""

    def __init__(
        self,
        folder: Path,
        world_size: int,
        environment: dict[str, str],
        tolerance: float,
        timeout: float,
        run_cells: Callable[..., None],
        show: Progress,
        settle: Callable[[int, Result], None],
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.environment = environment
        self.tolerance = tolerance
        self.timeout = timeout
        self.run_cells = run_cells
        self.show = show
        self.settle = settle

    def __call__(self, cells: list[tuple[int, Cell]], device_type: str) -> None:
        pending = dict(cells)
        while pending:
            self.show(f"starting {self.world_size} processes")
            heard: dict[int, list[Errors]] = {}

            def on_message(rank: int, message: Any, heard: dict[int, list[Errors]] = heard) -> None:
                kind, number, *rest = message
                if kind == "start":
                    self.show(str(pending[number]))
                    return
                heard.setdefault(number, []).extend(rest)
                if len(heard[number]) < self.world_size:
                    return
                cell = pending.pop(number)
                if kind == "refused":  # by all ranks alike
                    self.settle(number, Result(cell, "refused", reason=rest[0]))
                else:
                    self.settle(number, self._judge(cell, heard[number]))

            try:
                run_processes(
                    self.run_cells,
                    self.world_size,
                    (list(pending.items()), self.folder),
                    folder=self.folder,
                    device_type=device_type,
                    environment=self.environment,
                    timeout=self.timeout,
                    on_message=on_message,
                )
            except WorkerError as error:
                number = next(iter(pending))
                status: Any = "refused" if error.refused else "fail"
                result = Result(pending.pop(number), status, reason=str(error), details=error.details)
                self.settle(number, result)
            else:
                if pending:
                    raise HfparError(f"no result for {', '.join(str(cell) for cell in pending.values())}")

    def _judge(self, cell: Cell, errors: list[Errors]) -> Result:
        worst = errors[0]
        for other in errors[1:]:
            worst = worst.merge(other)
        if worst.largest <= self.tolerance:
            return Result(cell, "pass", worst)
        figures = {
            "loss": worst.loss,
            "gradient norm": worst.grad_norm,
            "a gradient": worst.gradient,
            "an updated parameter": worst.parameter,
        }
        off = [f"{name} is off by {error:.1e}" for name, error in figures.items() if error > self.tolerance]
        return Result(
            cell, "fail", worst, reason=f"{', '.join(off)} (relative; tolerance {self.tolerance:g})"
        )


def _report(results: list[Result], args: argparse.Namespace, seconds: float) -> int:
    from rich.console import Console

    from hfpar.verify.report import make_table, notes, summary, write_json

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    wide = console.width >= _WIDTH_FOR_NOTES
    title = f"relative errors against one process: {args.model_name_or_path or 'the built-in tiny model'}"
    console.print(make_table(results, title, with_notes=wide))
    for line in [] if wide else notes(results):
        console.print(line, markup=False)
    console.print(summary(results, args.tolerance, seconds))
    failed = [result for result in results if result.status == "fail"]
    for result in failed:
        console.print(f"[bold red]fail[/bold red] {result.cell}: ", end="")
        console.print("\n".join(part for part in (result.reason, result.details) if part), markup=False)
    if args.json is not None:
        write_json(results, args.json)
    if failed:
        return 1
    if all(result.status == "refused" for result in results):
        console.print("[bold yellow]nothing was compared[/]: every row was refused")
        return 2
    return 0
