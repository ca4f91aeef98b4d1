"""Which line and exit code each kind of failure gives, and which rank says it."""

import pytest

from hfpar.errors import ConfigError, HfparError
from hfpar.train import endings
from hfpar.train.endings import STOPPED, describe, run_to_exit_code


class RankFailures(BaseException):
    """As torch's CheckpointException."""

    def __init__(self, *failures: BaseException) -> None:
        self.failures = {rank: (failure, None) for rank, failure in enumerate(failures)}


LOST = RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1\nmore")


@pytest.fixture(autouse=True)
def keep_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endings, "_ignore_interrupts", lambda: None)
    monkeypatch.setattr(endings.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(endings, "_SECONDS_FOR_RANK_0", 0.0)
    monkeypatch.delenv("HFPAR_LAUNCH", raising=False)


def fail_with(error: BaseException, rank: int = 0) -> int:
    def work() -> None:
        raise error

    return run_to_exit_code(work, rank)


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (ConfigError("a: 1; must be 2"), 2, "hfpar: error: a: 1; must be 2"),
        (HfparError("broken"), 1, "hfpar: error: broken"),
        (KeyboardInterrupt(), 130, STOPPED),
        (
            LOST,
            1,
            "hfpar: error: another process of this run ended (Connection closed by peer)",
        ),
        (RankFailures(KeyboardInterrupt()), 130, STOPPED),
        (RankFailures(LOST, ConfigError("mine")), 2, "hfpar: error: mine"),
    ],
)
def test_one_line_and_an_exit_code(
    capsys: pytest.CaptureFixture[str], error: BaseException, exit_code: int, line: str
) -> None:
    assert fail_with(error) == exit_code
    assert capsys.readouterr().err == line + "\n"
    assert fail_with(error, rank=3) == exit_code
    # Ctrl-C reaches every rank: rank 0 is enough.
    assert capsys.readouterr().err == ("" if exit_code == 130 else line + " (rank 3)\n")


def test_a_bug_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert describe(ValueError("a bug")) is None
    assert describe(RuntimeError("shapes don't match")) is None
    assert describe(RankFailures(ValueError("a bug"))) is None
    assert fail_with(ValueError("a bug")) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith("ValueError: a bug\n")


def test_success_and_help_are_no_failures() -> None:
    assert run_to_exit_code(lambda: None, 0) == 0
    with pytest.raises(SystemExit):
        fail_with(SystemExit(0))


def test_a_rank_among_several_leaves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Destructors of process groups can wait for ever, so it must not come to them; exit handlers still run."""
    import torch.distributed as dist

    done: list[object] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(endings.os, "_exit", done.append)
    monkeypatch.setattr(endings.atexit, "_run_exitfuncs", lambda: done.append("exit handlers"))
    run_to_exit_code(lambda: done.append("work"), 1)
    assert done == ["work", "exit handlers", 0]


def test_what_another_rank_has_said_isnt_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(endings, "_has_been_said", lambda: True)
    monkeypatch.setattr(endings, "_SECONDS_FOR_RANK_0", 5.0)
    assert fail_with(LOST) == 1
    assert fail_with(ConfigError("a"), rank=1) == 2
    assert capsys.readouterr().err == ""


def test_only_the_first_rank_to_lose_patience_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 0 may be slow: rank 1 then speaks for it, and rank 0 is silent when it comes to it at last."""
    from torch.distributed import HashStore

    store = HashStore()
    monkeypatch.setattr(endings, "_store", lambda: store)
    assert fail_with(KeyboardInterrupt(), rank=1) == 130
    assert fail_with(KeyboardInterrupt(), rank=0) == 130
    assert capsys.readouterr().err == STOPPED + "\n"


def test_hfpar_launch_says_itself_who_was_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HFPAR_LAUNCH", "1")
    assert fail_with(LOST) == 1
    assert capsys.readouterr().err == ""
    assert fail_with(ConfigError("a")) == 2
    assert capsys.readouterr().err == "hfpar: error: a\n"
