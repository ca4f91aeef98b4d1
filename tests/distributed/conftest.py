"""Processes for tests: spawned, meeting in a file, with a time limit and the child's traceback."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfpar.verify.processes import WorkerError, run_processes


@pytest.fixture
def spawn(tmp_path: Path) -> Callable[..., list[Any]]:
    """`spawn(function, world_size, *arguments)` runs it in gloo processes; returns what each rank sent last."""

    def run(
        function: Callable[..., None], world_size: int, *arguments: Any, timeout: float = 120
    ) -> list[Any]:
        sent: dict[int, Any] = {}
        try:
            run_processes(
                function,
                world_size,
                arguments,
                folder=tmp_path,
                timeout=timeout,
                on_message=sent.__setitem__,
            )
        except WorkerError as error:
            pytest.fail(f"{error}\n{error.details}", pytrace=False)
        return [sent.get(rank) for rank in range(world_size)]

    return run
