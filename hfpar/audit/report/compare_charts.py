"""Where things lie in the charts of a comparison of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hfpar.audit import wording
from hfpar.audit.paired import CheckpointComparison, PairedRate, TrajectoryPoint
from hfpar.audit.report.charts import (
    LEFT,
    RIGHT,
    WIDTH,
    Chart,
    DifferenceAxis,
    Marks,
    Point,
    Series,
    Tick,
    difference_axis,
    height_of,
    nice_step,
    polyline,
)
from hfpar.audit.results import Mode

_LONGEST_LABELS = 40
"""Characters under an axis; where names of checkpoints are longer, their numbers stand there."""


@dataclass(frozen=True)
class ChangeRow:
    """A later checkpoint beside the first; without marks where no item was probed in both."""

    rate: PairedRate
    marks: Marks | None


@dataclass(frozen=True)
class Changes:
    """Changes of exact completion, over one axis."""

    groups: list[tuple[str, Mode, list[ChangeRow]]]
    ticks: list[Tick]
    zero: float


def changes(comparison: CheckpointComparison) -> Changes | None:
    """The forest plot; None where nothing was compared."""
    if not comparison.rates:
        return None
    known = [rate for rate in comparison.rates if rate.difference is not None]
    axis = difference_axis(
        [value for rate in known for value in (rate.low, rate.difference) if value is not None],
        [value for rate in known for value in (rate.high, rate.difference) if value is not None],
    )
    groups: dict[tuple[str, Mode], list[ChangeRow]] = {}
    for rate in sorted(comparison.rates, key=lambda rate: rate.ratio):
        groups.setdefault((rate.set, rate.mode), []).append(ChangeRow(rate, _marks(rate, axis)))
    names = wording.names_in_order([rate.set for rate in comparison.rates])
    ordered = sorted(groups.items(), key=lambda group: (names.index(group[0][0]), group[0][1]))
    return Changes([(*key, rows) for key, rows in ordered], axis.ticks, axis.place(0.0))


def _marks(rate: PairedRate, axis: DifferenceAxis) -> Marks | None:
    if rate.difference is None:
        return None
    low = rate.difference if rate.low is None else rate.low
    high = rate.difference if rate.high is None else rate.high
    return axis.marks(low, high, rate.difference)


def tick_labels(checkpoints: list[str]) -> list[str]:
    """What stands under the checkpoints: their names, or their numbers where names are long."""
    if sum(map(len, checkpoints)) <= _LONGEST_LABELS:
        return checkpoints
    return [str(number) for number in range(1, len(checkpoints) + 1)]


def trajectory_charts(comparison: CheckpointComparison) -> list[Chart]:
    """Share of exact completions over the checkpoints: one chart a set and mode, a line for each ratio."""
    known = [point for point in comparison.trajectory if point.rate.value is not None]
    if not known:
        return []
    highest = max(0.02, *(point.rate.high or point.rate.value or 0.0 for point in known))
    step = nice_step(highest, 4)
    top = step * math.ceil(highest / step - 1e-9)
    labels = comparison.checkpoints
    gap = (WIDTH - LEFT - RIGHT - 50) / max(len(labels) - 1, 1)
    x_of = {label: LEFT + 25 + gap * number for number, label in enumerate(labels)}
    x_ticks = [
        Tick(round(x_of[label], 2), text) for label, text in zip(labels, tick_labels(labels), strict=True)
    ]
    y_ticks = [
        Tick(round(height_of(n * step / top), 2), f"{100 * n * step:.3g} %")
        for n in range(round(top / step) + 1)
    ]
    ratios = sorted({point.ratio for point in known})
    groups: dict[tuple[str, Mode], dict[float, list[TrajectoryPoint]]] = {}
    for point in known:
        groups.setdefault((point.set, point.mode), {}).setdefault(point.ratio, []).append(point)
    charts = []
    for (name, mode), lines in groups.items():
        series = [_line(ratios.index(ratio), len(ratios), lines[ratio], x_of, top) for ratio in sorted(lines)]
        charts.append(Chart(name, mode, series, x_ticks, y_ticks))
    return charts


def _line(
    number: int, total: int, points: list[TrajectoryPoint], x_of: Mapping[str, float], top: float
) -> Series:
    placed = []
    for point in points:
        value = point.rate.value or 0.0
        low = value if point.rate.low is None else point.rate.low
        high = value if point.rate.high is None else point.rate.high
        x = x_of[point.checkpoint] + 6 * (number - (total - 1) / 2)
        title = (
            f"{point.checkpoint}, {wording.ratio(point.ratio)} of the text: {wording.share(point.rate)},"
            f" {wording.interval(point.rate.low, point.rate.high)}"
        )
        heights = [round(height_of(share / top), 2) for share in (value, low, high)]
        placed.append(Point(round(x, 2), heights[0], heights[1], heights[2], title))
    path = polyline([(point.x, point.y) for point in placed])
    return Series(f"given {wording.ratio(points[0].ratio)}", number % 6, placed, path)
