"""What processes that hfpar starts itself have in common: Ctrl-C is their parent's to answer, and they end with it.

Loads nothing heavy: a process sets its threads and its environment before it does.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Within it a started process inherits deafness to Ctrl-C: it is this process that ends the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_with_parent() -> None:
    """Watch the parent in a thread, and end this process with it, however that ends."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
