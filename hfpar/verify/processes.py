"""Processes that work together, watched: a crash, a kill or a hang ends them all with a message.

They meet through a file, so no port can clash. What they and the libraries print goes to a log of their own,
which is shown only if something goes wrong. Loads no torch: each process sets its threads and its environment
before it does.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from hfpar.child_processes import end_with_parent, interrupts_ignored
from hfpar.errors import ConfigError, HfparError, first_line

SECONDS_TO_ANSWER = 300.0
"""Longest silence of all processes before they count as hanging."""

_LOG_LINES = 30
_SECONDS_TO_EXPLAIN = 1.0


class WorkerError(HfparError):
    """A process failed.

    Attributes:
        details: its traceback and the end of its output.
        refused: the process raised a `ConfigError`; its text is then this error's.
    """

    def __init__(self, message: str, details: str = "", *, refused: bool = False) -> None:
        super().__init__(message)
        self.details = details
        self.refused = refused


@dataclass
class Worker:
    """One process's view, handed to the function that it runs."""

    rank: int
    world_size: int
    device_type: str
    """`cpu` or `cuda`."""
    folder: Path
    """For this set of processes alone."""
    connection: Connection = field(repr=False)

    def send(self, message: Any) -> None:
        """Tell the parent something; it is also a sign of life."""
        self.connection.send(("message", message))

    def join_group(self) -> None:
        """Form the world's process group: NCCL beside gloo on GPUs, else gloo alone."""
        from datetime import timedelta

        import torch
        import torch.distributed as dist

        if self.device_type == "cuda":
            torch.cuda.set_device(self.rank)
        dist.init_process_group(
            "cuda:nccl,cpu:gloo" if self.device_type == "cuda" else "gloo",
            store=dist.FileStore(str(self.folder / "store"), self.world_size),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=SECONDS_TO_ANSWER),
        )


def run_processes(
    function: Callable[..., None],
    world_size: int,
    arguments: tuple[Any, ...] = (),
    *,
    folder: Path,
    device_type: str = "cpu",
    environment: Mapping[str, str] | None = None,
    timeout: float = SECONDS_TO_ANSWER,
    on_message: Callable[[int, Any], None] | None = None,
    preload: str | None = None,
) -> None:
    """Run `function(worker, *arguments)` in new processes and wait for all of them.

    Args:
        function: importable by name.
        world_size: number of processes.
        arguments: picklable.
        folder: where logs and the meeting point go; a new folder is made in it.
        device_type: `cpu` or `cuda`.
        environment: variables to set in them.
        timeout: seconds without any sign of life.
        on_message: called with (rank, message) for each `Worker.send`.
        preload: a module that a server loads once; all later processes are forked from it. It must start no
            thread.

    Raises:
        WorkerError: one failed, was killed, or all were silent for too long. None is left running.
    """
    context: Any = multiprocessing.get_context("forkserver" if preload else "spawn")
    if preload:
        context.set_forkserver_preload([preload])
    run_folder = Path(tempfile.mkdtemp(prefix="ranks_", dir=folder))
    processes: list[Any] = []
    readers: dict[Any, int] = {}
    try:
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            worker = Worker(rank, world_size, device_type, run_folder, writer)
            process = context.Process(
                target=_run, args=(worker, function, arguments, dict(environment or {})), daemon=True
            )
            with interrupts_ignored():
                process.start()
                processes.append(process)
            writer.close()
            readers[reader] = rank
        _watch(processes, readers, run_folder, timeout, on_message)
    finally:
        _stop(processes)


def _watch(
    processes: list[Any],
    readers: dict[Any, int],
    folder: Path,
    timeout: float,
    on_message: Callable[[int, Any], None] | None,
) -> None:
    """Pass messages on until every process has ended well."""
    finished: set[int] = set()
    while readers:
        ready = wait(list(readers), timeout)
        if not ready:
            silent = [rank for rank in range(len(processes)) if rank not in finished]
            logs = "\n".join(_log_tail(folder, rank) for rank in silent)
            raise WorkerError(
                f"no sign of life for {timeout:.0f} s from rank {', '.join(map(str, silent))}: stopped", logs
            )
        reader: Any
        for reader in ready:
            rank = readers[reader]
            try:
                kind, content = reader.recv()
            except (EOFError, ConnectionResetError):
                del readers[reader]
                if rank not in finished:
                    raise _death(processes, rank, readers, folder) from None
                continue
            if kind == "error":
                raise _failure(rank, content, folder)
            if kind == "done":
                finished.add(rank)
            elif on_message is not None:
                on_message(rank, content)


def _failure(rank: int, content: tuple[bool, str, str], folder: Path) -> WorkerError:
    refused, message, trace = content
    if refused:
        return WorkerError(message, refused=True)
    return WorkerError(f"rank {rank}: {message}", f"{trace}\n{_log_tail(folder, rank)}")


def _death(processes: list[Any], rank: int, readers: dict[Any, int], folder: Path) -> WorkerError:
    """A process ended without a word: killed, or gone with `os._exit`."""
    processes[rank].join(_SECONDS_TO_EXPLAIN)
    code = processes[rank].exitcode
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        hint = " (often: the machine is out of memory)" if -code == signal.SIGKILL else ""
        message = f"rank {rank} was killed by {name}{hint}"
    else:
        message = f"rank {rank} ended with exit code {code} and said nothing"
    return WorkerError(message, _log_tail(folder, rank))


def _log_tail(folder: Path, rank: int) -> str:
    path = folder / f"rank{rank}.log"
    if not path.is_file():
        return ""
    lines = path.read_text(errors="replace").splitlines()[-_LOG_LINES:]
    return "\n".join([f"--- last output of rank {rank} ---", *lines]) if lines else ""


def _stop(processes: list[Any]) -> None:
    """End what is left, at once: after a failure the others wait for it in a collective."""
    deadline = time.monotonic() + (5.0 if all(p.exitcode in (0, None) for p in processes) else 0.5)
    for process in processes:
        if sys.exc_info()[0] is None:
            process.join(max(deadline - time.monotonic(), 0.1))
        if process.is_alive():
            process.kill()
    for process in processes:
        process.join()


def _run(
    worker: Worker, function: Callable[..., None], arguments: tuple[Any, ...], environment: dict[str, str]
) -> None:
    """A process's whole life."""
    _redirect_output(worker.folder / f"rank{worker.rank}.log")
    _clean_environment({"LOCAL_RANK": str(worker.rank), **environment})
    end_with_parent()
    try:
        import torch
        from tqdm import tqdm

        # tqdm's own lock is a named semaphore, which a killed process leaves behind with a warning.
        tqdm.set_lock(threading.RLock())
        torch.set_num_threads(max((os.cpu_count() or 1) // worker.world_size, 1))
        function(worker, *arguments)
        worker.connection.send(("done", None))
    except Exception as error:
        refused = isinstance(error, ConfigError)
        said = first_line(error)
        message = said if refused else f"{type(error).__name__}: {said}"
        worker.connection.send(("error", (refused, message, traceback.format_exc())))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of destructors: after a failure, those of process groups wait for ranks that are gone.
    worker.connection.close()
    os._exit(0)


def _redirect_output(path: Path) -> None:
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _clean_environment(environment: dict[str, str]) -> None:
    """Forget a launch that this may have been started from: libraries would read its engine and ranks."""
    launch_prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "TORCHELASTIC_", "DS_ACCELERATOR")
    launch_names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    for name in list(os.environ):
        if name.startswith(launch_prefixes) or name in launch_names:
            del os.environ[name]
    os.environ.update(environment)
