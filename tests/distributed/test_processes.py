"""A set of processes ends well, or says what happened; it never hangs and leaves nobody behind."""

import os
import signal
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path

import pytest

from hfpar.errors import ConfigError
from hfpar.verify.processes import Worker, WorkerError, run_processes


def all_reduce(worker: Worker) -> None:
    import torch
    import torch.distributed as dist

    worker.join_group()
    total = torch.tensor([worker.rank + 1])
    dist.all_reduce(total)
    worker.send(total.item())


def raise_on_rank_1(worker: Worker) -> None:
    import torch
    import torch.distributed as dist

    worker.join_group()
    worker.send(os.getpid())
    print("a word before the end")
    if worker.rank == 1:
        raise ZeroDivisionError("a deliberate error")
    dist.all_reduce(torch.ones(1))


def die_on_rank_1(worker: Worker) -> None:
    import torch
    import torch.distributed as dist

    worker.join_group()
    worker.send(os.getpid())
    if worker.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def leave_quietly(worker: Worker) -> None:
    os._exit(3)


def sleep(worker: Worker) -> None:
    worker.send(os.getpid())
    time.sleep(600)


def refuse(worker: Worker) -> None:
    raise ConfigError("sp_size: 4 isn't supported")


def report_environment(worker: Worker) -> None:
    names = ("RANK", "WORLD_SIZE", "ACCELERATE_USE_FSDP", "FSDP_VERSION", "MARK")
    worker.send({name: os.environ.get(name) for name in names})


def run(function, folder: Path, **options) -> tuple[WorkerError, list[int]]:
    """The error of two processes, and the ids that they sent."""
    pids: list[int] = []
    with pytest.raises(WorkerError) as caught:
        run_processes(function, 2, folder=folder, on_message=lambda rank, pid: pids.append(pid), **options)
    return caught.value, pids


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_they_meet_without_a_port(spawn):
    assert spawn(all_reduce, 3) == [6, 6, 6]


def test_an_exception_comes_with_its_traceback_and_ends_the_others(tmp_path):
    error, pids = run(raise_on_rank_1, tmp_path)
    assert "ZeroDivisionError: a deliberate error" in str(error)
    assert str(error).startswith("rank 1")
    assert 'raise ZeroDivisionError("a deliberate error")' in error.details
    assert "a word before the end" in error.details
    assert not error.refused
    assert_gone(pids)


def test_a_killed_process_is_named_at_once(tmp_path):
    started = time.monotonic()
    error, pids = run(die_on_rank_1, tmp_path)
    # Which of the two is heard first isn't certain: rank 0's collective fails because rank 1 is gone.
    assert "rank 1 was killed by SIGKILL" in str(error) or "rank 0" in str(error)
    assert time.monotonic() - started < 60
    assert len(pids) == 2
    assert_gone(pids)


def test_a_process_that_ends_without_a_word(tmp_path):
    error, _ = run(leave_quietly, tmp_path)
    assert "ended with exit code 3 and said nothing" in str(error)


def test_a_ctrl_c_while_they_start_leaves_none(tmp_path, monkeypatch):
    started, start = [], SpawnProcess.start

    def interrupted(process):
        start(process)
        started.append(process)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(SpawnProcess, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_processes(sleep, 2, folder=tmp_path)
    assert len(started) == 1 and not started[0].is_alive()


def test_silence_has_a_limit(tmp_path):
    error, pids = run(sleep, tmp_path, timeout=15)
    assert str(error) == "no sign of life for 15 s from rank 0, 1: stopped"
    assert_gone(pids)


def test_a_refusal_keeps_its_line(tmp_path):
    error, _ = run(refuse, tmp_path)
    assert error.refused
    assert str(error) == "sp_size: 4 isn't supported"


def test_a_launch_around_them_is_forgotten(tmp_path, monkeypatch):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "8",
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
    }.items():
        monkeypatch.setenv(name, value)
    heard = []
    run_processes(
        report_environment,
        1,
        folder=tmp_path,
        environment={"MARK": "x"},
        on_message=lambda rank, message: heard.append(message),
    )
    assert heard == [
        {"RANK": None, "WORLD_SIZE": None, "ACCELERATE_USE_FSDP": None, "FSDP_VERSION": None, "MARK": "x"}
    ]


def test_what_they_print_stays_off_the_screen(tmp_path, capfd):
    run(raise_on_rank_1, tmp_path)
    assert capfd.readouterr() == ("", "")
