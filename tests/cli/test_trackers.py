"""Trackers, offline: one run in all, however many ranks there are."""

from pathlib import Path

import pytest

pytest.importorskip("wandb")
pytest.importorskip("tensorboard")


def test_wandb_and_tensorboard_get_one_run_from_two_ranks(start_training, inputs, metrics, tmp_path: Path):
    program = start_training(
        "ddp",
        *inputs.flags,
        *("--output_dir", "runs/tracked", "--run_name", "my-run", "--max_steps", "3"),
        *("--per_device_train_batch_size", "2", "--report_to", "wandb", "tensorboard"),
        WANDB_MODE="offline",
        WANDB_DIR=str(tmp_path),
        WANDB_SILENT="true",
    )
    assert program.wait() == 0, program.output
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    files = list((tmp_path / "runs" / "tracked").rglob("events.out.tfevents.*"))
    folders = {file.parent for file in files}
    scalars: dict[str, list[float]] = {}
    for folder in folders:
        accumulator = EventAccumulator(str(folder))
        accumulator.Reload()
        for tag in accumulator.Tags()["scalars"]:
            scalars[tag] = [event.value for event in accumulator.Scalars(tag)]
    rows = [row for row in metrics(tmp_path / "runs" / "tracked") if "loss" in row]
    assert scalars["loss"] == pytest.approx([row["loss"] for row in rows], rel=1e-6)
    assert len(scalars["grad_norm"]) == 3
