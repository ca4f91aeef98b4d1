"""The symbolic step: math-verify in a process that can be killed, kept from one question to the next."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from functools import lru_cache
from pathlib import Path

from hfpar.child_processes import interrupts_ignored

TIMEOUT_SECONDS = 5.0
START_SECONDS = 60.0
MAX_LENGTH = 400


def symbolic_backend_available() -> bool:
    """Whether math-verify is installed; without it, what hfpar's own rules can't decide counts as different."""
    return importlib.util.find_spec("math_verify") is not None


class SymbolicWorker:
    """Asks math-verify whether expressions are equal; starts its process at the first question."""

    def __init__(self, timeout: float = TIMEOUT_SECONDS) -> None:
        """Nothing starts yet.

        Args:
            timeout: seconds for one question; then the process is killed, and the next question starts another.
        """
        self.timeout = timeout
        self.num_asked = 0
        self.num_timed_out = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def equal(self, left: str, right: str) -> bool:
        """Whether two expressions in LaTeX are equal; False also where that couldn't be decided."""
        if not symbolic_backend_available() or max(len(left), len(right)) > MAX_LENGTH:
            return False
        with self._lock:
            self.num_asked += 1
            process = self._running()
            question = json.dumps({"left": left, "right": right, "seconds": self.timeout})
            try:
                assert process.stdin is not None
                process.stdin.write(question.encode() + b"\n")
                process.stdin.flush()
            except OSError:
                self._kill()
                return False
            answer = self._read_line(process, self.timeout)
            if answer is None:
                self.num_timed_out += 1
                self._kill()
            return answer == b"true"

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._kill()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._kill()
            child = Path(__file__).with_name("symbolic_child.py")
            with interrupts_ignored():
                self._process = subprocess.Popen(
                    [sys.executable, str(child)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                )
            self._read_line(self._process, START_SECONDS)
        return self._process

    def _read_line(self, process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
        """What the process says, or None where it says nothing in time or has ended."""
        assert process.stdout is not None
        descriptor, line, end = process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([descriptor], [], [], max(0.0, end - time.monotonic()))
            piece = os.read(descriptor, 4096) if ready else b""
            if not piece:
                return None
            line += piece
        return line.strip()

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    assert stream is not None
                    stream.close()
                except OSError:
                    pass


def shared_worker() -> SymbolicWorker:
    """The one of this process, which ends with it; a forked process has its own."""
    return _worker_of(os.getpid())


@lru_cache(maxsize=1)
def _worker_of(pid: int) -> SymbolicWorker:
    worker = SymbolicWorker()
    atexit.register(worker.close)
    return worker
