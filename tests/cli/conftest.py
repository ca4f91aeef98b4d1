"""Real launches for the command-line tests: how to start one, what it left, and that nothing of it is left running."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "accelerate_configs"
TRAIN = ROOT / "sft" / "train.py"
HFPAR = (sys.executable, "-m", "hfpar.cli", "launch")
ACCELERATE = (sys.executable, "-m", "accelerate.commands.launch")
LAUNCH_VARIABLES = (
    "ACCELERATE_",
    "FSDP_",
    "PARALLELISM_CONFIG_",
    "TORCHELASTIC_",
    "HFPAR_",
    "DS_ACCELERATOR",
)
RANK_VARIABLES = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Inputs:
    """A tiny model and conversations to train it on."""

    model: Path
    data: Path
    small_data: Path
    """Eight rows."""

    @property
    def flags(self) -> list[str]:
        return ["--model_name_or_path", str(self.model), "--dataset", str(self.small_data)]


class Program:
    """A started program in a process group of its own; its output goes to a file."""

    def __init__(self, command: list[str], cwd: Path, output: Path, environment: dict[str, str]) -> None:
        self.command, self._output = command, output
        with output.open("w") as file:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._seen: dict[int, psutil.Process] = {}

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def lines(self, start: str = "hfpar") -> list[str]:
        """The lines that begin with a word: by default what hfpar itself says at an end."""
        return [line for line in self.output.splitlines() if line.startswith(f"{start}: ")]

    def workers(self) -> list[psutil.Process]:
        """The training processes, by rank."""
        found = {}
        for child in self._children():
            with contextlib.suppress(psutil.Error):
                if str(TRAIN) in child.cmdline() or child.environ().get("RANK"):
                    found[int(child.environ().get("RANK", "0"))] = child
        return [found[rank] for rank in sorted(found)]

    def _children(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self._seen[child.pid] = child
        return list(self._seen.values())

    def wait_for(self, condition: Callable[[], Any], timeout: float = 120) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {timeout} s in vain:\n{self.output}"
            self._children()
            time.sleep(0.1)

    def wait(self, timeout: float = 180) -> int:
        """The exit code. Fails if the program hangs or leaves a process behind."""
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"still running after {timeout} s:\n{self.output}", pytrace=False)
            self._children()
            time.sleep(0.1)
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=3)
        assert not alive, f"left running: {alive}"
        return self.process.returncode

    def signal_group(self, number: int) -> None:
        """As Ctrl-C in a terminal: to the launcher and the workers."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        for process in [*self._children(), self.process]:
            with contextlib.suppress(psutil.Error, ProcessLookupError):
                process.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Start]:
    """`start(command, *flags, cwd=..., name=value)` starts a program; what is left of it is killed at the end."""
    programs: list[Program] = []

    def start(*command: str, cwd: Path = tmp_path, **variables: str) -> Program:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(LAUNCH_VARIABLES) and name not in RANK_VARIABLES
        }
        environment |= {
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(tmp_path / "hf_home"),  # no default Accelerate file, no hub cache
            "HF_HUB_OFFLINE": "1",
            **variables,
        }
        program = Program(list(command), cwd, tmp_path / f"output_{len(programs)}.txt", environment)
        programs.append(program)
        return program

    yield start
    for program in programs:
        program.kill()


@pytest.fixture
def start_training(start: Start) -> Start:
    """`start_training(config, *flags, launcher=HFPAR, launcher_flags=())` starts `sft/train.py` under a launcher."""

    def start_training(
        config: str | Path,
        *flags: str,
        launcher: tuple[str, ...] = HFPAR,
        launcher_flags: tuple[str, ...] = (),
        script: Path = TRAIN,
        **options: Any,
    ) -> Program:
        path = config if isinstance(config, Path) else CONFIGS / f"{config}.yaml"
        port = () if "--main_process_port" in launcher_flags else ("--main_process_port", "0")
        return start(
            *launcher, "--config_file", str(path), *port, *launcher_flags, str(script), *flags, **options
        )

    return start_training


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    """One tiny model and its data for the whole session; copy what you mean to spoil."""
    from hfpar.models.tiny import build_tiny_model

    folder = tmp_path_factory.mktemp("inputs")
    build_tiny_model(folder / "model", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    rows = [
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": f"What is {number} plus {number % 7}?"},
                    {"role": "assistant", "content": f"It is {number + number % 7}."},
                ]
            }
        )
        for number in range(400)
    ]
    (folder / "data.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "small.jsonl").write_text("\n".join(rows[:8]) + "\n")
    return Inputs(folder / "model", folder / "data.jsonl", folder / "small.jsonl")


def read_metrics(output_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run's `metrics.jsonl`."""
    return [json.loads(line) for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """`metrics(output_dir)`: the rows of a run's `metrics.jsonl`."""
    return read_metrics


@pytest.fixture
def launchers() -> dict[str, tuple[str, ...]]:
    """The commands that launch."""
    return {"hfpar": HFPAR, "accelerate": ACCELERATE}
