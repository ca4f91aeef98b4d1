"""How a run ends: one line for the user, from one rank, and an exit code; no rank left waiting for another."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfpar.accelerator import launcher_reports_deaths
from hfpar.errors import HfparError

STOPPED = "hfpar: stopped; whole checkpoints are kept, --resume continues from the last one"
STOPPED_EXIT_CODE = 128 + signal.SIGINT
_LOST_A_RANK = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
_SAID = "hfpar/said"
_SECONDS_FOR_RANK_0 = 5.0


@dataclass(frozen=True)
class Ending:
    """What to say and to return."""

    exit_code: int
    line: str
    is_echo: bool = False
    """Another rank's end is the reason, and that rank may have said it."""


def run_to_exit_code(work: Callable[[], object], rank: int, *, stopped: str = STOPPED) -> int:
    """Do a rank's work and turn every ending into an exit code.

    Args:
        work: what to do.
        rank: of this process.
        stopped: what to say after Ctrl-C.

    Returns:
        0; 2 for what the user can mend; 130 for Ctrl-C; 1 for anything else. With more than one rank this doesn't
        return: the process ends here. After a failure an orderly shutdown would wait for other ranks, and at any
        time the destructors of process groups may wait for ever (see `hfpar.accelerator.finish`).
    """
    try:
        work()
        return _leave(0)
    except SystemExit:
        raise
    except BaseException as error:  # not only Exception: Ctrl-C, and torch's CheckpointException
        _ignore_interrupts()
        ending = describe(error)
        if ending is None:
            _is_first_to_say()
            traceback.print_exc()
            return _leave(1)
        _say(replace(ending, line=stopped) if ending.line == STOPPED else ending, rank)
        return _leave(ending.exit_code)


def describe(error: BaseException) -> Ending | None:
    """The ending that an exception stands for; None for a bug, which keeps its traceback."""
    if isinstance(error, HfparError):
        return Ending(error.exit_code, f"hfpar: error: {error}")
    if isinstance(error, KeyboardInterrupt):
        return Ending(STOPPED_EXIT_CODE, STOPPED)
    failures = _failures_of_ranks(error)
    if failures:
        known = [ending for ending in map(describe, failures) if ending is not None]
        return min(known, key=lambda ending: ending.is_echo) if known else None
    if isinstance(error, OSError | RuntimeError):
        for mark in _LOST_A_RANK:
            if mark in str(error):
                return Ending(1, f"hfpar: error: another process of this run ended ({mark})", is_echo=True)
    return None


def _failures_of_ranks(error: BaseException) -> Sequence[BaseException]:
    """What torch's CheckpointException holds; by its attribute, so that nothing heavy is imported for it."""
    failures: Any = getattr(error, "failures", None)
    return [failure for failure, _ in failures.values()] if isinstance(failures, dict) else []


def _say(ending: Ending, rank: int) -> None:
    """Print the line unless another rank has: rank 0 is given time to be the one that does."""
    if ending.is_echo:
        if _has_been_said() or launcher_reports_deaths():
            time.sleep(1)  # the launcher looks at who ended first
            return
    elif rank != 0:
        if ending.exit_code == STOPPED_EXIT_CODE and _store() is None:
            return  # Ctrl-C reaches every rank, and no launcher ends this one before its time is up
        deadline = time.monotonic() + _SECONDS_FOR_RANK_0
        while time.monotonic() < deadline:
            if _has_been_said():
                time.sleep(1)
                return
            time.sleep(0.1)
    if not _is_first_to_say():
        return
    where = "" if rank == 0 or ending.exit_code == STOPPED_EXIT_CODE else f" (rank {rank})"
    sys.stdout.flush()
    sys.stderr.write(f"{ending.line}{where}\n")
    sys.stderr.flush()


def _store() -> Any:
    """The store through which the ranks met; None before they have, and for a rank alone."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return None
    return torch.distributed.distributed_c10d._get_default_store()


def _has_been_said() -> bool:
    store = _store()
    try:
        return store is not None and bool(store.check([_SAID]))
    except RuntimeError:  # the store went with the rank or launcher that kept it
        return False


def _is_first_to_say() -> bool:
    """Whether no other rank has taken it upon itself; from now on this one has."""
    store = _store()
    try:
        return store is None or int(store.add(_SAID, 1)) == 1
    except RuntimeError:  # as above: nobody can be asked, and twice is better than never
        return True


def _ignore_interrupts() -> None:
    """A second Ctrl-C, or the launcher's after the user's, must not cut the ending short."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _leave(exit_code: int) -> int:
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        if exit_code == 0:
            atexit._run_exitfuncs()  # what libraries want done at an end that nobody is waiting for
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code
