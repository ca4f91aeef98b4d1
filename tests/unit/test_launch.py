"""What `hfpar launch` makes of the ways in which a launch can end, with Accelerate's launcher replaced."""

import logging
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from hfpar.errors import ConfigError
from hfpar.launch import first_failure, main

accelerate_launch = pytest.importorskip("accelerate.commands.launch")


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "script.py"
    path.write_text("")
    return str(path)


@pytest.fixture
def launch_ends_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException | None], None]:
    def replace(error: BaseException | None) -> None:
        def launch_command(args: object) -> None:
            if error is not None:
                raise error

        monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)

    return replace


def failed_children(**exit_codes: int) -> Exception:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    return ChildFailedError(
        "script.py",
        {
            int(rank.removeprefix("rank")): ProcessFailure(
                local_rank=0, pid=1, exitcode=exit_code, error_file="none"
            )
            for rank, exit_code in exit_codes.items()
        },
    )


def test_first_failure_is_not_a_worker_that_the_launcher_ended() -> None:
    failures = {
        0: SimpleNamespace(exitcode=-signal.SIGTERM, timestamp=10),
        3: SimpleNamespace(exitcode=1, timestamp=12),
        1: SimpleNamespace(exitcode=2, timestamp=11),
        2: SimpleNamespace(exitcode=7, timestamp=11),
    }
    assert first_failure(failures) == (1, failures[1])
    # All ended from outside: then that is what happened.
    assert first_failure({0: failures[0]}) == (0, failures[0])


@pytest.mark.parametrize(
    ("make_error", "exit_code", "stderr"),
    [
        (lambda: None, 0, ""),
        (lambda: failed_children(rank0=2), 2, ""),
        (lambda: failed_children(rank0=-15, rank1=130), 130, ""),
        (lambda: failed_children(rank0=-15, rank3=1), 1, "hfpar launch: rank 3 failed with exit code 1\n"),
        (
            lambda: failed_children(rank1=-9),
            137,
            "hfpar launch: rank 1 was killed by SIGKILL (often: the machine is out of memory)\n",
        ),
        (lambda: failed_children(rank0=-11), 139, "hfpar launch: rank 0 was killed by SIGSEGV\n"),
        (lambda: subprocess.CalledProcessError(2, ["python"]), 2, ""),
        (
            lambda: subprocess.CalledProcessError(3, ["python"]),
            3,
            "hfpar launch: the worker failed with exit code 3\n",
        ),
        (KeyboardInterrupt, 130, ""),
    ],
)
def test_exit_code_and_what_is_said(
    make_error: Callable[[], BaseException | None],
    exit_code: int,
    stderr: str,
    script: str,
    launch_ends_with: Callable[[BaseException | None], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    launch_ends_with(make_error())
    assert main([script]) == exit_code
    assert capsys.readouterr().err == stderr


def test_a_signal_that_torch_reports(
    script: str, launch_ends_with: Callable[[BaseException | None], None]
) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    launch_ends_with(SignalException("stopped", sigval=signal.SIGINT))
    assert main([script]) == 130
    launch_ends_with(SignalException("stopped", sigval=signal.SIGTERM))
    assert main([script]) == 143


def test_refusals_of_accelerate_are_one_line(
    script: str, launch_ends_with: Callable[[BaseException | None], None]
) -> None:
    launch_ends_with(ValueError("You need at least 2 processes\n to use `--multi_gpu`."))
    with pytest.raises(ConfigError) as caught:
        main([script])
    assert str(caught.value) == (
        "accelerate launch refuses these settings: You need at least 2 processes to use `--multi_gpu`."
    )


def test_machines_that_do_not_meet(
    script: str, launch_ends_with: Callable[[BaseException | None], None]
) -> None:
    import torch.distributed as dist

    launch_ends_with(dist.DistNetworkError("timed out"))
    with pytest.raises(
        ConfigError, match=r"^main_process_ip=10\.0\.0\.1, main_process_port=4242: .*timed out"
    ):
        main(["--main_process_ip", "10.0.0.1", "--main_process_port", "4242", script])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config_file={path}: no such file; hfpar's own are in accelerate_configs/"),
        ("", "config_file={path}: not an Accelerate config; it needs keys such as `distributed_type`"),
        ("- a\n", "config_file={path}: not an Accelerate config; it needs keys such as `distributed_type`"),
        ("a: [1\n", "config_file={path}: can't be read: "),
    ],
)
def test_config_file_is_checked_first(content: str | None, message: str, script: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        main(["--config_file", str(path), script])
    assert str(caught.value).startswith(message.format(path=path))
    assert "\n" not in str(caught.value)


def test_missing_script_and_wrong_argument(tmp_path: Path, script: str) -> None:
    with pytest.raises(ConfigError, match=r"^training_script=.*nope\.py: no such file"):
        main([str(tmp_path / "nope.py")])
    with pytest.raises(ConfigError, match=r"^launch: argument --num_processes.*: invalid int value: 'two'"):
        main(["--num_processes", "two", script])


def test_arguments_of_the_script_are_left_alone(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(accelerate_launch, "launch_command", lambda args: seen.append(args))
    assert main(["--num_processes", "1", script, "--config", "x.yaml", "--num_processes", "7"]) == 0
    assert seen[0].num_processes == 1
    assert seen[0].training_script_args == ["--config", "x.yaml", "--num_processes", "7"]


def test_the_process_is_left_as_it_was(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed.run  # noqa: F401

    logger = logging.getLogger("torch.distributed.elastic.agent.server.api")
    logger.setLevel(logging.INFO)
    before = logger.level, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    during = []

    def launch_command(args: object) -> None:
        during.append(logger.level)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)
    main([script])
    assert during == [logging.CRITICAL]
    assert before == (logger.level, signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_no_worker_is_left_and_others_are(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    other = subprocess.Popen(sleep)
    workers = []

    def launch_command(args: object) -> None:
        workers.append(subprocess.Popen(sleep, stderr=subprocess.DEVNULL))
        raise KeyboardInterrupt

    monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)
    try:
        assert main([script]) == 130
        assert other.poll() is None
        assert workers[0].wait(timeout=5) is not None
    finally:
        for process in (other, *workers):
            process.kill()
            process.wait()
