"""The picture of a run: its loss curve, from `metrics.jsonl`."""

import os
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hfpar.errors import ConfigError
from hfpar.train.progress import MetricsRow, format_count, read_metrics
from hfpar.whole_path import whole_path

_TRAIN_COLOR = "#1f5fa8"
_EVAL_COLOR = "#d1495b"
_RATE_COLOR = "#5f6b76"
_INK = "#333b44"
_MIN_ROWS_TO_SMOOTH = 10


def plot_loss(metrics_path: str | os.PathLike[str], png_path: str | os.PathLike[str]) -> None:
    """Draws the training loss, the evaluation loss and the learning rate over the steps.

    The loss of every logged step is a thin line, with a gap where it was not finite; from ten rows on a
    smoothed line lies over it. The file appears under its name only when it is whole.

    Args:
        metrics_path: A `metrics.jsonl`; with no rows, the picture says so.
        png_path: The picture to write or replace.

    Raises:
        ConfigError: If the metrics can't be read or the picture can't be written.
    """
    rows = read_metrics(metrics_path)
    train_rows = [row for row in rows if "loss" in row]
    eval_rows = [row for row in rows if row.get("eval_loss") is not None]

    figure = Figure(figsize=(8, 5), dpi=150, layout="tight", facecolor="white")
    FigureCanvasAgg(figure)
    loss_axes, rate_axes = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    _draw_losses(loss_axes, train_rows, eval_rows)
    _draw_learning_rate(rate_axes, train_rows)
    for axes in (loss_axes, rate_axes):
        _tidy(axes)
    if not rows:
        rate_axes.set(xticks=[], yticks=[])
    elif len({row["step"] for row in rows}) == 1:
        loss_axes.set_xlim(rows[0]["step"] - 1, rows[0]["step"] + 1)
    figure.align_ylabels()
    _write_whole(figure, Path(png_path))


def smooth(values: Sequence[float | None], half_width: int) -> list[float | None]:
    """Returns the mean of each value and its neighbours, which unlike a running average does not lag.

    Args:
        values: One value a row; None is left out of the means and stays None.
        half_width: Neighbours on either side. Near an end there are fewer, equally many on both sides.
    """
    sums = [0.0]
    counts = [0]
    for value in values:
        sums.append(sums[-1] + (value or 0.0))
        counts.append(counts[-1] + (value is not None))
    smoothed: list[float | None] = []
    for index, value in enumerate(values):
        width = min(half_width, index, len(values) - 1 - index)
        first, end = index - width, index + width + 1
        smoothed.append(None if value is None else (sums[end] - sums[first]) / (counts[end] - counts[first]))
    return smoothed


def _draw_losses(axes: Axes, train_rows: Sequence[MetricsRow], eval_rows: Sequence[MetricsRow]) -> None:
    axes.set_ylabel("loss (nats per label token)", color=_INK, fontsize=9)
    if not eval_rows and all(row["loss"] is None for row in train_rows):
        text = "no finite loss" if train_rows else "no step logged yet"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_INK)
        axes.set_yticks([])
        return
    steps = [row["step"] for row in train_rows]
    losses = [row["loss"] for row in train_rows]
    smoothing = len(train_rows) >= _MIN_ROWS_TO_SMOOTH
    if train_rows:
        axes.plot(
            steps,
            _gaps(losses),
            color=_TRAIN_COLOR,
            linewidth=0.8 if smoothing else 1.6,
            alpha=0.35 if smoothing else 1.0,
            marker="" if smoothing else "o",
            markersize=4,
            label="training loss",
        )
    if smoothing:
        axes.plot(
            steps,
            _gaps(smooth(losses, half_width=max(2, len(losses) // 30))),
            color=_TRAIN_COLOR,
            linewidth=2,
            label="training loss, smoothed",
        )
    if eval_rows:
        axes.plot(
            [row["step"] for row in eval_rows],
            [row["eval_loss"] for row in eval_rows],
            color=_EVAL_COLOR,
            linewidth=1,
            linestyle=(0, (4, 3)),
            marker="o",
            markersize=5,
            markeredgecolor="white",
            label="evaluation loss",
            zorder=3,
        )
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
    axes.set_title(_title(train_rows, eval_rows), loc="left", fontsize=11, color=_INK)


def _draw_learning_rate(axes: Axes, train_rows: Sequence[MetricsRow]) -> None:
    axes.plot(
        [row["step"] for row in train_rows],
        _gaps([row.get("learning_rate") for row in train_rows]),
        color=_RATE_COLOR,
        linewidth=1.4,
        marker="o" if len(train_rows) == 1 else "",
        markersize=4,
    )
    highest = max((row.get("learning_rate") or 0.0 for row in train_rows), default=0.0)
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.set_ylabel("learning rate", color=_INK, fontsize=9)
    axes.set_xlabel("optimizer step", color=_INK, fontsize=9)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=3, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.3g}".replace("e-0", "e-")))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _tidy(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab2ba")
    axes.tick_params(colors=_INK, labelsize=9)
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)


def _title(train_rows: Sequence[MetricsRow], eval_rows: Sequence[MetricsRow]) -> str:
    parts = []
    if train_rows:
        parts.append(f"step {train_rows[-1]['step']}")
        if train_rows[-1].get("num_tokens"):
            parts.append(f"{format_count(train_rows[-1]['num_tokens'])} tokens")
        if train_rows[-1]["loss"] is not None:
            parts.append(f"training loss {train_rows[-1]['loss']:.3f}")
    if eval_rows:
        parts.append(f"evaluation loss {eval_rows[-1]['eval_loss']:.3f}")
    return ", ".join(parts)


def _gaps(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _write_whole(figure: Figure, path: Path) -> None:
    try:
        with whole_path(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; the plot needs a folder that can be written and a disk with"
            " free space"
        ) from error
