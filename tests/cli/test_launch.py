"""Real launches of tiny scripts: what is on the screen, and the exit code."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = "import sys; from hfpar.launch import main; sys.exit(main(sys.argv[1:]))"
LINE = "error: max_steps=0: allowed is -1 or at least 1"
ONE_PROCESS = {"distributed_type": "'NO'", "use_cpu": "true", "num_processes": "1"}
TWO_PROCESSES = {"distributed_type": "MULTI_GPU", "use_cpu": "false", "num_processes": "2"}
LAUNCHES = pytest.mark.parametrize("config", [ONE_PROCESS, TWO_PROCESSES], ids=["one", "two"])


def start(tmp_path: Path, config: dict[str, str], script: str) -> "subprocess.Popen[str]":
    settings = {
        "compute_environment": "LOCAL_MACHINE",
        "mixed_precision": "'no'",
        "num_machines": "1",
        "machine_rank": "0",
        "main_process_port": "0",
        **config,
    }
    config_path = tmp_path / "accelerate.yaml"
    config_path.write_text("".join(f"{key}: {value}\n" for key, value in settings.items()))
    script_path = tmp_path / "script.py"
    script_path.write_text("import os, sys, time\nfrom pathlib import Path\n" + script)
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "--config_file", str(config_path), str(script_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(paths: list[Path]) -> None:
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"no {paths}"
        time.sleep(0.05)


@LAUNCHES
def test_an_explained_failure_is_one_line(tmp_path: Path, config: dict[str, str]) -> None:
    script = (
        f"if os.environ.get('RANK', '0') == '0': print({LINE!r}, file=sys.stderr)\n"
        "else: time.sleep(5)\n"
        "sys.exit(2)\n"
    )
    process = start(tmp_path, config, script)
    output, _ = process.communicate(timeout=60)
    assert output == LINE + "\n"
    assert process.returncode == 2


def test_a_crash_shows_the_workers_traceback_alone(tmp_path: Path) -> None:
    script = "if os.environ['RANK'] == '1': raise RuntimeError('broken')\ntime.sleep(60)\n"
    process = start(tmp_path, TWO_PROCESSES, script)
    output, _ = process.communicate(timeout=60)
    assert output.count("Traceback") == 1
    assert output.endswith("RuntimeError: broken\nhfpar launch: rank 1 failed with exit code 1\n")
    assert process.returncode == 1


def test_success_adds_nothing(tmp_path: Path) -> None:
    process = start(tmp_path, TWO_PROCESSES, "sys.stdout.write(f'rank {os.environ[\"RANK\"]}\\n')\n")
    output, _ = process.communicate(timeout=60)
    assert sorted(output.splitlines()) == ["rank 0", "rank 1"]
    assert process.returncode == 0


@LAUNCHES
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_launcher_leaves_no_worker(
    tmp_path: Path, config: dict[str, str], number: signal.Signals, exit_code: int
) -> None:
    script = (
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "rank = os.environ.get('RANK', '0')\n"
        "try:\n"
        "    Path(f'partial_{rank}').write_text(str(os.getpid()))\n"
        "    Path(f'partial_{rank}').rename(f'started_{rank}')\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    process = start(tmp_path, config, script)
    started = [tmp_path / f"started_{rank}" for rank in range(int(config["num_processes"]))]
    wait_for(started)
    time.sleep(0.5)  # until the launcher waits, also where the machine is busy
    stopped_at = time.monotonic()
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert time.monotonic() - stopped_at < 10
    assert output == ""
    assert process.returncode == exit_code
    for path in started:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
