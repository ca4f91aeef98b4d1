"""What processes that hfpar starts itself have in common: Ctrl-C is their parent's to answer, and they end with it.

Loads nothing heavy: a process sets its threads and its environment before it does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.resource_tracker
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Within it a started process inherits deafness to Ctrl-C: it is this process that ends the others.

    A Ctrl-C meanwhile isn't lost: this process hears of it at the end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    multiprocessing.resource_tracker.ensure_running()  # its start would undo the blocking
    heard: list[int] = []
    # Blocked is what a child inherits; the handler is for a signal that another thread of this process takes.
    handler = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def end_with_parent() -> None:
    """Watch the parent in a thread, and end this process with it, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
