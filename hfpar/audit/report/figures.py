"""The forest plot and exact match against ratio, as pictures beside the report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from hfpar.audit import wording
from hfpar.audit.paired import CheckpointComparison
from hfpar.audit.report.storage import in_order, write_file
from hfpar.audit.results import Comparison, Estimate, Mode, Report, SetSummary

_BENCHMARK_COLOR = "#1f5fa8"
_CONTROL_COLORS = ("#7b6f60", "#a2476a", "#4a7a4a", "#8a6d00", "#5c5c8a")
_CONTROL_MARKERS = ("s", "^", "D", "v", "P")
_INK = "#333b44"
_COLUMNS = 3
_BENCHMARK_LABEL = "the benchmark"


def write_figures(folder: Path, report: Report) -> None:
    """Draw `forest.png` and `ratios.png`.

    Raises:
        ConfigError: a picture can't be written.
    """
    report = in_order(report)
    for name, figure in (("forest.png", draw_forest(report)), ("ratios.png", draw_ratios(report))):
        FigureCanvasAgg(figure)
        write_file(folder / name, lambda path, figure=figure: figure.savefig(path, format="png"))  # type: ignore[misc]


def draw_forest(report: Report) -> Figure:
    """Differences in exact match with Newcombe's intervals, one row for each comparison."""
    shown = [item for item in report.comparisons if item.difference is not None]
    figure = Figure(figsize=(9, 1.3 + 0.3 * max(len(shown), 4)), dpi=150, layout="tight", facecolor="white")
    axes = figure.subplots()
    if not shown:
        return _say(figure, axes, "nothing to compare with")
    axes.axvline(0, color="#8a929a", linewidth=1, zorder=1)
    labels, bounds = [], wording.thresholds(report)
    for row, item in enumerate(shown):
        difference = item.difference or 0.0
        low = difference if item.low is None else item.low
        high = difference if item.high is None else item.high
        test = wording.test_of(report, item)
        decides = test is not None and test.deciding_control == item.control
        color = _BENCHMARK_COLOR if decides else _CONTROL_COLORS[0]
        style = (0, (2, 2)) if item.p_value is None else "-"
        axes.plot([low, high], [row, row], color=color, linewidth=1.8, linestyle=style)
        axes.plot(
            [difference],
            [row],
            marker="D" if decides else "s",
            markersize=6,
            color=color,
            markerfacecolor=color if decides else "white",
            markeredgewidth=1.5,
        )
        labels.append(_forest_label(report, item))
        axes.annotate(
            "no power" if item.p_value is None else wording.p_equals(item.p_value, *bounds),
            (1.01, row),
            xycoords=("axes fraction", "data"),
            va="center",
            fontsize=8,
            color=_INK,
        )
        if row and (item.benchmark, item.mode) != (shown[row - 1].benchmark, shown[row - 1].mode):
            axes.axhline(row - 0.5, color="#d5dae0", linewidth=0.8)
    axes.set_yticks(range(len(shown)), labels)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}"))
    axes.set_xlabel(
        "exact match, benchmark minus control (percentage points; 95 % interval)", color=_INK, fontsize=9
    )
    axes.set_title(
        f"{report.model.name}: excess over controls (filled: the control that decides)",
        loc="left",
        fontsize=11,
        color=_INK,
    )
    _tidy(axes, "x")
    return figure


def draw_ratios(report: Report) -> Figure:
    """Share of exact completions against the ratio of the text given, a panel for each benchmark and mode."""
    panels = [
        (summary, mode)
        for summary in wording.benchmarks(report)
        for mode in sorted({cut.mode for cut in summary.cuts})
    ]
    figure, every = _panels(len(panels))
    if not panels:
        return _say(figure, every[0], "no benchmark was probed")
    for axes, (summary, mode) in zip(every, panels, strict=False):
        _draw_panel(axes, report, summary, mode)
    highest = max(
        (cut.exact_normalized.high or 0.0 for item in report.sets for cut in item.cuts), default=0.0
    )
    every[0].set_ylim(0, 1.05 * max(highest, 0.02))  # of all, which share it
    _add_legend(figure, every)
    return figure


def _add_legend(figure: Figure, every: Sequence[Axes]) -> None:
    """One for all panels, below them."""
    found = {
        label: handle
        for axes in every
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    labels = sorted(found, key=lambda label: label != _BENCHMARK_LABEL)
    if labels:
        figure.legend(
            [found[label] for label in labels],
            labels,
            loc="outside lower left",
            ncols=4,
            frameon=False,
            labelcolor=_INK,
            fontsize=8.5,
        )


def _draw_panel(axes: Axes, report: Report, summary: SetSummary, mode: Mode) -> None:
    names = [item.name for item in wording.controls(report)]
    controls = [item for item in wording.controls(report) if summary.name in item.applies_to]
    ratios = sorted({cut.ratio for cut in summary.cuts})
    for number, shown in enumerate([*controls, summary]):
        is_benchmark = shown is summary
        style = 0 if is_benchmark else names.index(shown.name) % len(_CONTROL_COLORS)
        cuts = [cut for cut in shown.cuts if cut.mode == mode and cut.exact_normalized.value is not None]
        color = _BENCHMARK_COLOR if is_benchmark else _CONTROL_COLORS[style]
        _draw_line(
            axes,
            [cut.ratio + 0.006 * (number - len(controls) / 2) for cut in cuts],
            [cut.exact_normalized for cut in cuts],
            color=color,
            linewidth=2 if is_benchmark else 1.2,
            linestyle="-" if is_benchmark else (0, (4, 3)),
            marker="o" if is_benchmark else _CONTROL_MARKERS[style],
            markersize=6 if is_benchmark else 5,
            markerfacecolor=color if is_benchmark else "white",
            label=_BENCHMARK_LABEL if is_benchmark else f"{shown.name} (control)",
            zorder=4 if is_benchmark else 3,
        )
    axes.set_xticks(ratios)
    axes.set_xlim(ratios[0] - 0.08, ratios[-1] + 0.08)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.set_xlabel("share of the text given", color=_INK, fontsize=9)
    _finish(axes, f"{summary.name}, {wording.mode_name(mode)}" if wording.has_chat(report) else summary.name)


def draw_trajectory(comparison: CheckpointComparison) -> Figure:
    """Share of exact completions over the checkpoints, a panel for each set and mode."""
    panels = list(dict.fromkeys((point.set, point.mode) for point in comparison.trajectory))
    figure, every = _panels(len(panels))
    if not panels:
        return _say(figure, every[0], "nothing to compare")
    highest = max(point.rate.high or 0.0 for point in comparison.trajectory)
    every[0].set_ylim(0, 1.05 * max(highest, 0.02))  # of all, which share it
    has_chat = any(mode == "chat" for _, mode in panels)
    for axes, (name, mode) in zip(every, panels, strict=False):
        mine = [point for point in comparison.trajectory if (point.set, point.mode) == (name, mode)]
        for number, ratio in enumerate(sorted({point.ratio for point in mine})):
            points = [point for point in mine if point.ratio == ratio and point.rate.value is not None]
            _draw_line(
                axes,
                [comparison.checkpoints.index(point.checkpoint) + 0.03 * number for point in points],
                [point.rate for point in points],
                color=(_BENCHMARK_COLOR, *_CONTROL_COLORS)[number % 6],
                marker=("o", *_CONTROL_MARKERS)[number % 6],
                label=f"given {wording.ratio(ratio)}",
            )
        axes.set_xticks(range(len(comparison.checkpoints)), comparison.checkpoints, rotation=20, ha="right")
        _finish(axes, f"{name}, {wording.mode_name(mode)}" if has_chat else name)
    _add_legend(figure, every)
    return figure


def _panels(number: int) -> tuple[Figure, list[Axes]]:
    """Axes that share the height, for so many panels; one where there is none."""
    columns = min(max(number, 1), _COLUMNS)
    rows = max(1, -(-number // columns))
    size = (max(6.0, 4.2 * columns), 0.4 + 3.2 * rows)
    figure = Figure(figsize=size, dpi=150, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    every = [axes for line in grid for axes in line]
    for axes in every[max(number, 1) :]:
        axes.set_visible(False)
    for line in grid:
        line[0].set_ylabel("exact completions", color=_INK, fontsize=9)
    return figure, every


def _draw_line(axes: Axes, x: Sequence[float], rates: Sequence[Estimate], **style: Any) -> None:
    values = [rate.value or 0.0 for rate in rates]
    lows = [max(0.0, value - (rate.low or 0.0)) for value, rate in zip(values, rates, strict=True)]
    highs = [max(0.0, (rate.high or value) - value) for value, rate in zip(values, rates, strict=True)]
    shown = {"linewidth": 1.6, "markersize": 5, **style}
    axes.errorbar(x, values, yerr=[lows, highs], capsize=2.5, elinewidth=1, clip_on=False, **shown)


def _finish(axes: Axes, title: str) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axes.set_title(title, loc="left", fontsize=11, color=_INK)
    _tidy(axes, "y")


def _forest_label(report: Report, item: Comparison) -> str:
    mode = f", {item.mode}" if wording.has_chat(report) else ""
    return f"{item.benchmark} at {wording.ratio(item.ratio)}{mode}, against {item.control}"


def _say(figure: Figure, axes: Axes, text: str) -> Figure:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=_INK)
    axes.set(xticks=[], yticks=[])
    _tidy(axes, "y")
    return figure


def _tidy(axes: Axes, grid: Literal["x", "y"]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab2ba")
    axes.tick_params(colors=_INK, labelsize=8.5)
    axes.grid(axis=grid, color="#e4e8ec", linewidth=0.8)
    axes.set_axisbelow(True)
