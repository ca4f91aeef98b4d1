"""Real runs that end in the middle of a save, and what `--resume` makes of what they left."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

SPOILER = """
import os, resource, time

replace = os.replace

def spoiled(source, target, **options):
    name = os.path.basename(target)
    if name == os.environ.get("HANG_BEFORE"):
        open(os.environ["MARKER"], "w").close()
        time.sleep(600)
    replace(source, target, **options)
    if name == os.environ.get("DISK_FULL_AFTER"):  # no file may grow beyond this: writing fails as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

os.replace = spoiled
"""


@pytest.fixture
def run(tmp_path: Path, start_training: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
    """Starts six steps that save after every second one."""
    folder = tmp_path / "spoiler"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(SPOILER)

    def start(engine: str, *flags: str, **variables: str) -> Any:
        options = {
            "dataset": str(inputs.data),
            "model_name_or_path": str(inputs.model),
            "output_dir": "run",
            "max_steps": "6",
            "save_steps": "2",
            "learning_rate": "1e-3",
            "per_device_train_batch_size": "2",
        }
        words = [word for name, value in options.items() for word in (f"--{name}", value)]
        path = os.pathsep.join([str(folder), str(ROOT)])
        return start_training(engine, *words, *flags, PYTHONPATH=path, **variables)

    return start


def checkpoints(run_folder: Path) -> list[str]:
    return sorted(path.name for path in run_folder.glob("*checkpoint-*"))


def figures(rows: list[dict[str, Any]]) -> dict[int, list[float]]:
    return {
        row["step"]: [row["loss"], row["grad_norm"], row["learning_rate"]] for row in rows if "loss" in row
    }


@pytest.mark.slow
def test_saves_that_fail_cost_only_themselves(
    tmp_path: Path, run: Callable[..., Any], metrics: Callable[[Path], list[dict[str, Any]]]
) -> None:
    folder, marker = tmp_path / "run", tmp_path / "marker"

    killed = run("ddp", HANG_BEFORE="checkpoint-4", MARKER=str(marker))
    killed.wait_for(marker.exists)
    killed.signal_group(signal.SIGKILL)
    killed.kill()
    assert checkpoints(folder) == [".checkpoint-4.partial", "checkpoint-2"]
    before = figures(metrics(folder))

    full = run("fsdp2", "--resume", DISK_FULL_AFTER="checkpoint-4")
    assert full.wait() == 2
    assert full.lines("resume") == [
        "resume: leaving out run/.checkpoint-4.partial: it was never finished",
        "resume: continuing from run/checkpoint-2 (step 2)",
    ]
    (line,) = full.lines()
    assert line.startswith("hfpar: error: output_dir: run/checkpoint-6 can't be written (")
    assert line.endswith("earlier checkpoints are whole: make room and continue with --resume")
    assert "Traceback" not in full.output
    assert checkpoints(folder) == [".checkpoint-6.partial", "checkpoint-2", "checkpoint-4"]
    again = figures(metrics(folder))
    for step in (3, 4):
        assert again[step] == pytest.approx(before[step], rel=1e-5)

    shards = sorted((folder / "checkpoint-4").rglob("*.distcp"))
    size = shards[-1].stat().st_size
    os.truncate(shards[-1], size - 1)

    last = run("ddp", "--resume", "--save_total_limit", "1")
    assert last.wait() == 0
    assert last.lines("resume") == [
        "resume: leaving out run/.checkpoint-6.partial: it was never finished",
        f"resume: leaving out run/checkpoint-4: it has {size - 1} of the {size} bytes of sharded/{shards[-1].name}",
        "resume: continuing from run/checkpoint-2 (step 2)",
    ]
    assert checkpoints(folder) == ["checkpoint-6"]
    assert (folder / "model.safetensors").is_file() and not list(folder.glob(".*.partial"))
    finished = figures(metrics(folder))
    assert list(finished) == [1, 2, 3, 4, 5, 6]
    for step in (5, 6):
        assert finished[step] == pytest.approx(again[step], rel=1e-5)
