"""The picture of a data set: how long its samples are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from hfpar.datatool.gather import DataFacts
from hfpar.errors import ConfigError
from hfpar.whole_path import whole_path

_TOKENS_COLOR = "#1f5fa8"
_LABELS_COLOR = "#d1495b"
_INK = "#333b44"
_NUM_BINS = 60
_SPREAD_FOR_LOG = 20
"""How many times longer than the short samples the long ones must be for an axis of powers of ten."""


def plot_lengths(facts: DataFacts, max_length: int, path: Path) -> None:
    """Draw how many samples have how many tokens, and how many label tokens; before `max_length` acts.

    Args:
        facts: of the data set.
        max_length: is marked.
        path: the PNG to write or replace.

    Raises:
        ConfigError: the file can't be written.
    """
    lengths, labels = facts.whole_lengths.values, facts.whole_label_lengths.values
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="tight", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if len(lengths):
        _draw(axes, lengths, labels, max_length)
    else:
        axes.text(0.5, 0.5, "no samples", transform=axes.transAxes, ha="center", color=_INK)
    _tidy(axes)
    try:
        with whole_path(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise ConfigError(f"--plot: {path} can't be written ({error.strerror or error})") from error


def uses_log_axis(values: np.ndarray) -> bool:
    """Whether lengths are spread so far that equal steps would squeeze most of them into a corner."""
    low, high = np.quantile(values, (0.05, 0.99))
    return bool(high / max(low, 1) > _SPREAD_FOR_LOG)


def _draw(axes: Axes, lengths: np.ndarray, labels: np.ndarray, max_length: int) -> None:
    longest = int(lengths.max())
    marked = max_length <= 4 * longest  # farther out it would squeeze everything else
    high = max(longest, max_length) if marked else longest
    if uses_log_axis(np.concatenate([lengths, labels])):
        # No bin is narrower than one token, or there would be holes between short lengths.
        edges = (np.unique(np.geomspace(int(labels.min()), high + 1, _NUM_BINS).round()) - 0.5).tolist()
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        width = max(1, -(-(high + 1) // _NUM_BINS))
        edges = (np.arange(0, high + 1 + width, width) - 0.5).tolist()
    for values, color, name in (
        (lengths, _TOKENS_COLOR, "all tokens"),
        (labels, _LABELS_COLOR, "label tokens"),
    ):
        axes.hist(values, edges, color=color, alpha=0.25)
        axes.hist(values, edges, color=color, histtype="step", linewidth=1.4, label=name)
    axes.set_xlim(edges[0], edges[-1])
    median = int(np.quantile(lengths, 0.5, method="inverted_cdf"))
    axes.axvline(
        median, color=_TOKENS_COLOR, linewidth=1.2, linestyle=(0, (2, 2)), label=f"median, {median:,}"
    )
    if marked:
        axes.axvline(
            max_length, color=_INK, linewidth=1.4, linestyle=(0, (6, 3)), label=f"max_length, {max_length:,}"
        )
    axes.legend(framealpha=0.9, edgecolor="white", labelcolor=_INK, fontsize=9)
    longer = int((lengths > max_length).sum())
    axes.set_title(
        f"{len(lengths):,} samples, {longer:,} longer than max_length {max_length:,}",
        loc="left",
        fontsize=11,
        color=_INK,
    )


def _tidy(axes: Axes) -> None:
    axes.set_xlabel("tokens in a sample", color=_INK, fontsize=9)
    axes.set_ylabel("number of samples", color=_INK, fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab2ba")
    axes.tick_params(colors=_INK, labelsize=9, which="both")
    axes.grid(axis="y", color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
