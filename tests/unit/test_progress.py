"""Metrics, their file, the plot of it, and how figures are shown."""

import io
import json
import math
import os
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from hfpar.errors import ConfigError
from hfpar.train.plots import plot_loss, smooth
from hfpar.train.progress import (
    MetricsLogger,
    StepMetrics,
    format_bytes,
    format_count,
    format_duration,
    format_step_line,
    print_summary,
    read_metrics,
)


def metrics(step: int, **changes: float) -> StepMetrics:
    fields: dict[str, Any] = {
        "step": step,
        "epoch": step / 8,
        "loss": 4.0 / step,
        "grad_norm": 0.5,
        "learning_rate": 2e-5,
        "num_tokens": 1000 * step,
        "num_label_tokens": 400 * step,
        "tokens_per_second": 1234.5,
        "peak_memory_bytes": 3 * 2**30,
        **changes,
    }
    return StepMetrics(**fields)


def open_logger(folder: Path, start_step: int = 0, **changes: Any) -> MetricsLogger:
    arguments = {"is_main": True, "total_steps": 8, "start_step": start_step, "tracker": None, **changes}
    return MetricsLogger(folder, **arguments)


def steps_in(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_rows_are_exactly_what_was_logged(tmp_path: Path) -> None:
    with open_logger(tmp_path / "new" / "run") as logger:
        logger.log_step(metrics(1))
        # Flushed: there before the next row.
        assert steps_in(tmp_path / "new" / "run") == [1]
        logger.log_eval(step=1, epoch=0.125, eval_loss=3.5, num_eval_label_tokens=77)
    text = (tmp_path / "new" / "run" / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "epoch": 0.125, "loss": 4.0, "grad_norm": 0.5, "learning_rate": 2e-05,'
        ' "num_tokens": 1000, "num_label_tokens": 400, "tokens_per_second": 1234.5,'
        ' "peak_memory_bytes": 3221225472}\n'
        '{"step": 1, "epoch": 0.125, "eval_loss": 3.5, "num_eval_label_tokens": 77}\n'
    )


def test_not_finite_is_null_in_the_file_and_itself_for_the_tracker(tmp_path: Path) -> None:
    tracked: list[tuple[dict[str, float], int]] = []
    with open_logger(tmp_path, tracker=lambda row, step: tracked.append((row, step))) as logger:
        logger.log_step(metrics(3, loss=math.nan, grad_norm=math.inf))

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    assert row["loss"] is None and row["grad_norm"] is None and row["learning_rate"] == 2e-5
    (figures, step), *rest = tracked
    assert rest == [] and step == 3
    assert math.isnan(figures["loss"]) and figures["grad_norm"] == math.inf
    assert set(figures) == set(row) - {"step"}


def test_other_ranks_do_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []
    with open_logger(tmp_path / "run", is_main=False, tracker=lambda row, step: calls.append(step)) as logger:
        logger.log_step(metrics(1))
        logger.log_eval(step=1, epoch=0.1, eval_loss=1.0, num_eval_label_tokens=1)
        logger.advance(1)
        logger.message("saved")
    assert not (tmp_path / "run").exists()
    assert calls == []
    assert capsys.readouterr() == ("", "")


def test_resume_forgets_the_rows_after_its_start(tmp_path: Path) -> None:
    with open_logger(tmp_path) as logger:
        for step in (1, 2, 3, 4):
            logger.log_step(metrics(step))
            logger.log_eval(step=step, epoch=0.1, eval_loss=1.0, num_eval_label_tokens=1)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "epoch": 0.6, "lo')  # killed in the middle of a row
    with open_logger(tmp_path, start_step=2) as logger:
        assert steps_in(tmp_path) == [1, 1, 2, 2]
        logger.log_step(metrics(3))
    assert steps_in(tmp_path) == [1, 1, 2, 2, 3]
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resume_keeps_a_whole_last_row_without_its_newline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n{"step": 2, "loss": 0.1}')
    with open_logger(tmp_path, start_step=2) as logger:
        logger.log_step(metrics(3))
    assert steps_in(tmp_path) == [1, 2, 3]


def test_a_run_that_starts_over_forgets_everything(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval_loss": 2.0}\nnot json\n{"step": 1}\n')
    with open_logger(tmp_path) as logger:
        logger.log_step(metrics(1))
    assert steps_in(tmp_path) == [1]


def test_a_broken_row_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ConfigError) as caught:
        open_logger(tmp_path, start_step=3).__enter__()
    assert str(caught.value) == (
        f"{path}, line 2: not a JSON object with a step; mend the line, or move the file away"
    )


def test_an_interrupt_passes_and_the_rows_stay(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), open_logger(tmp_path) as logger:
        logger.log_step(metrics(1))
        raise KeyboardInterrupt
    assert steps_in(tmp_path) == [1]
    with pytest.raises(RuntimeError, match="outside its `with` block"):
        logger.log_step(metrics(2))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(ConfigError) as caught, open_logger(tmp_path) as logger:
        logger.log_step(metrics(1))
    assert str(caught.value).startswith(f"{path}: No space left on device; ")
    assert "\n" not in str(caught.value)


def test_a_row_that_does_not_fit_leaves_the_file_whole(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_logger(tmp_path) as logger:
        logger.log_step(metrics(1))
        before = (tmp_path / "metrics.jsonl").read_text()
        # Half of the next row fits, as on a disk that is about to be full.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) * 3 // 2, limits[1]))
        try:
            with pytest.raises(ConfigError, match="File too large"):
                logger.log_step(metrics(2))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run/metrics\.jsonl: Not a directory"):
        open_logger(tmp_path / "file" / "run").__enter__()


def test_plain_lines_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_logger(tmp_path) as logger:
        logger.log_step(metrics(2))
        logger.log_eval(step=2, epoch=0.25, eval_loss=3.25, num_eval_label_tokens=1234)
        logger.message("saved checkpoint-2")
    lines = capsys.readouterr().err.split("\n")
    assert lines[0].startswith("step 2/8 | epoch 0.25 | loss 2.0000 | lr 2.00e-05 | grad_norm 0.500 | ")
    assert lines[1:] == [
        "step 2/8 | eval_loss 3.2500 over 1.2K label tokens",
        "saved checkpoint-2",
        "",
    ]


def test_format_step_line() -> None:
    assert format_step_line(metrics(2), 8, 187.4) == (
        "step 2/8 | epoch 0.25 | loss 2.0000 | lr 2.00e-05 | grad_norm 0.500 | 1.2K tokens/s | 3.0 GiB"
        " | ETA 3m07s"
    )


def test_time_left_counts_only_steps_of_this_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter([100.0, 130.0])
    with monkeypatch.context() as patch:
        patch.setattr("hfpar.train.progress.time.monotonic", lambda: next(now))
        with open_logger(tmp_path, start_step=4, total_steps=10) as logger:
            logger.log_step(metrics(6))  # 2 steps in 30 s, 4 to go
    assert capsys.readouterr().err.endswith("| ETA 1m00s\n")


def test_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with open_logger(tmp_path, start_step=1) as logger:
        logger.advance(2)
        logger.log_step(metrics(4))
        logger.message("saved checkpoint-4")
    shown = terminal.getvalue()
    assert "| 1/8 [" in shown and "| 4/8 [" in shown
    assert ", loss 1.0000, lr 2.0e-05, grad 0.500, 1.2K tok/s]" in shown
    assert "saved checkpoint-4\n" in shown
    assert "step 4/8" not in shown


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (999, "999"),
        (1000, "1.0K"),
        (1234, "1.2K"),
        (999_949, "999.9K"),
        (999_950, "1.0M"),
        (134_515_008, "134.5M"),
        (7_200_000_000, "7.2B"),
        (1.5e12, "1.5T"),
        (4e15, "4000.0T"),
        (115.34, "115.3"),
        (999.97, "1.0K"),
        (math.nan, "nan"),
    ],
)
def test_format_count(value: float, text: str) -> None:
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (3_328_599_654, "3.1 GiB"),
        (2**41, "2.0 TiB"),
    ],
)
def test_format_bytes(value: float, text: str) -> None:
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (42.4, "42s"),
        (59.6, "1m00s"),
        (187, "3m07s"),
        (3599.6, "1h00m"),
        (7510, "2h05m"),
        (86400 + 3 * 3600 + 59, "1d03h"),
        (-1, "0s"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_format_duration(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_summary_is_plain_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long_path = "/data/" + "x" * 200
    print_summary([("engine", "FSDP2"), ("parameters", "134.5M [all]"), ("output", long_path)], "Run")
    assert capsys.readouterr().out == (
        f"Run\n  engine      FSDP2\n  parameters  134.5M [all]\n  output      {long_path}\n"
    )


def test_summary_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "60"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_summary([("engine", "FSDP2"), ("parameters", "134.5M [all]")], "Run")
    shown = stream.getvalue()
    assert "╭" in shown and "\x1b[" in shown and "134.5M [all]" in shown


def test_read_metrics_of_nothing(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    (tmp_path / "metrics.jsonl").write_text("\n\n")
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_smooth() -> None:
    assert smooth([], 2) == []
    assert smooth([1.0, 4.0, 1.0, 4.0, 7.0], 1) == [1.0, 2.0, 3.0, 4.0, 7.0]
    assert smooth([1.0, None, 5.0, 3.0, 4.0], 1) == [1.0, None, 4.0, 4.0, 4.0]


@pytest.mark.parametrize("num_rows", [0, 1, 2, 30])
def test_plot_survives_any_metrics(tmp_path: Path, num_rows: int) -> None:
    metrics_path, png_path = tmp_path / "metrics.jsonl", tmp_path / "loss.png"
    rows = [
        {"step": step, "loss": None if step % 3 == 1 else 1 / step, "learning_rate": 1e-5, "num_tokens": 5}
        for step in range(1, num_rows + 1)
    ]
    rows += [{"step": row["step"], "eval_loss": None} for row in rows]
    metrics_path.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 31, "lo')
    plot_loss(metrics_path, png_path)
    assert png_path.read_bytes().startswith(b"\x89PNG")
    assert sorted(os.listdir(tmp_path)) == ["loss.png", "metrics.jsonl"]


def test_plot_draws_the_loss(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def blue_pixels(losses: list[float | None]) -> int:
        path = tmp_path / "metrics.jsonl"
        rows = [{"step": step, "loss": loss, "learning_rate": 1e-5} for step, loss in enumerate(losses, 1)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        plot_loss(path, tmp_path / "loss.png")
        image = imread(tmp_path / "loss.png")
        return int(((image[..., 2] - image[..., 0]) > 0.3).sum())

    assert blue_pixels([]) == 0
    assert blue_pixels([None, None]) == 0
    assert blue_pixels([3.0, 2.0, 1.5, 1.2]) > 1000


def test_plot_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "nowhere" / "loss.png")
    assert str(caught.value).startswith(f"{tmp_path / 'nowhere' / 'loss.png'}: No such file or directory; ")
    (tmp_path / "loss.png").mkdir()
    with pytest.raises(ConfigError, match=r"loss\.png: Is a directory"):
        plot_loss(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert os.listdir(tmp_path) == ["loss.png"]
