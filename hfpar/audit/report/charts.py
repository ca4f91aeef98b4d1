"""Where things lie in the page's charts: plain numbers, which the template draws."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hfpar.audit import wording
from hfpar.audit.results import Comparison, CutSummary, ItemResult, Mode, Report, SetSummary

WIDTH, HEIGHT = 360, 246
"""Of a small chart, in its own units; a phone shows them about one to one."""
LEFT, RIGHT, TOP, BOTTOM = 44, 12, 12, 44
_MOST_POINTS = 200
RUN_OF_GRADE_B = 20

Scale = Callable[[float], float]
"""From a value to a place."""


@dataclass(frozen=True)
class Tick:
    """A place on an axis."""

    at: float
    label: str


@dataclass(frozen=True)
class Marks:
    """An interval and a point, in percent of the track."""

    low: float
    width: float
    point: float


@dataclass(frozen=True)
class DifferenceAxis:
    """From differences of shares to places on the track."""

    start: float
    length: float
    ticks: list[Tick]

    def place(self, value: float) -> float:
        """In percent of the track."""
        return round(100 * (value - self.start) / self.length, 3)

    def marks(self, low: float, high: float, point: float) -> Marks:
        """An interval and a point."""
        return Marks(self.place(low), round(self.place(high) - self.place(low), 3), self.place(point))


@dataclass(frozen=True)
class ForestRow:
    """A comparison; without marks where it has no difference."""

    comparison: Comparison
    is_deciding: bool
    p_holm: float | None
    marks: Marks | None


@dataclass(frozen=True)
class Forest:
    """Differences in exact match, over one axis."""

    groups: list[tuple[str, Mode, list[ForestRow]]]
    ticks: list[Tick]
    zero: float


@dataclass(frozen=True)
class Point:
    """A share with its interval, in units of the chart."""

    x: float
    y: float
    low: float
    high: float
    title: str


@dataclass(frozen=True)
class Series:
    """A set in a small chart."""

    name: str
    style: int
    """0: the benchmark; 1 and more: controls."""
    points: list[Point]
    path: str


@dataclass(frozen=True)
class Chart:
    """A small chart of a benchmark beside its controls."""

    title: str
    mode: Mode
    series: list[Series]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    marker: float | None = None


def forest(report: Report) -> Forest | None:
    """The forest plot; None where nothing could be compared."""
    if not report.comparisons:
        return None
    shown = [item for item in report.comparisons if item.difference is not None]
    lows = [value for item in shown for value in (item.low, item.difference) if value is not None]
    highs = [value for item in shown for value in (item.high, item.difference) if value is not None]
    axis = difference_axis(lows, highs)
    rows: dict[tuple[str, Mode], list[ForestRow]] = {}
    for item in report.comparisons:
        test = wording.test_of(report, item)
        is_deciding = test is not None and test.deciding_control == item.control
        p_holm = None if test is None else test.p_holm
        marks = None
        if item.difference is not None:
            low = item.difference if item.low is None else item.low
            high = item.difference if item.high is None else item.high
            marks = axis.marks(low, high, item.difference)
        rows.setdefault((item.benchmark, item.mode), []).append(ForestRow(item, is_deciding, p_holm, marks))
    return Forest([(*key, value) for key, value in rows.items()], axis.ticks, axis.place(0.0))


def difference_axis(lows: Sequence[float], highs: Sequence[float]) -> DifferenceAxis:
    """An axis that holds all of these, and zero."""
    low, high = min([*lows, -0.02]), max([*highs, 0.02])
    step = nice_step(high - low, 5)
    first, last = math.floor(low / step), math.ceil(high / step)
    start, length = first * step, (last - first) * step
    ticks = [
        Tick(round(100 * (number * step - start) / length, 3), _points(number * step))
        for number in range(first, last + 1)
    ]
    return DifferenceAxis(start, length, ticks)


def _points(value: float) -> str:
    text = f"{100 * abs(value):.3g}"
    return text if text == "0" else f"{'+' if value > 0 else wording.MINUS}{text}"


def ratio_charts(report: Report) -> list[Chart]:
    """Exact match against the ratio; one chart for each benchmark and mode, all with the same axes."""
    cuts = [cut for summary in report.sets for cut in summary.cuts if cut.exact_normalized.value is not None]
    if not cuts:
        return []
    ratios = sorted({cut.ratio for cut in cuts})
    highest = max(cut.exact_normalized.high or cut.exact_normalized.value or 0.0 for cut in cuts)
    step = nice_step(max(highest, 0.02), 4)
    top = step * math.ceil(max(highest, 0.02) / step - 1e-9)

    def x_of(value: float) -> float:
        low, high = ratios[0], ratios[-1]
        share = 0.5 if high == low else 0.12 + 0.76 * (value - low) / (high - low)
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y_of(value: float) -> float:
        return height_of(value / top)

    x_ticks = [Tick(round(x_of(value), 2), wording.ratio(value)) for value in ratios]
    y_ticks = [
        Tick(round(y_of(n * step), 2), f"{100 * n * step:.3g} %") for n in range(round(top / step) + 1)
    ]
    charts = []
    for benchmark, mode, shown in _shown_sets(report):
        series = []
        for number, summary in enumerate(shown):
            mine = [
                cut for cut in summary.cuts if cut.mode == mode and cut.exact_normalized.value is not None
            ]
            dodge = 7 * (number - (len(shown) - 1) / 2)
            points = [_share_point(cut, summary.name, x_of(cut.ratio) + dodge, y_of) for cut in mine]
            if points:
                style = _style(report, summary)
                series.append(Series(summary.name, style, points, polyline([(p.x, p.y) for p in points])))
        if series:
            charts.append(Chart(benchmark.name, mode, series, x_ticks, y_ticks))
    return charts


def _share_point(cut: CutSummary, name: str, x: float, y_of: Scale) -> Point:
    exact = cut.exact_normalized
    title = (
        f"{name}, {wording.ratio(cut.ratio)} of the text: {wording.share(exact)} exact,"
        f" {wording.interval(exact.low, exact.high)}"
    )
    value = exact.value or 0.0
    low = value if exact.low is None else exact.low
    high = value if exact.high is None else exact.high
    return Point(round(x, 2), round(y_of(value), 2), round(y_of(low), 2), round(y_of(high), 2), title)


def run_charts(report: Report, items: Sequence[ItemResult]) -> list[Chart]:
    """Share of items with a verbatim run of so many tokens or more; one chart a benchmark, all with the same axes."""
    runs: dict[str, list[int]] = {}
    for item in items:
        runs.setdefault(item.set, []).append(item.longest_run)
    longest = max((max(values) for values in runs.values()), default=0)
    if longest < 1:
        return []
    largest = max(len(values) for values in runs.values())
    decades = max(1, math.ceil(math.log10(largest)))
    end = max(float(longest), 25.0)

    def x_of(value: float) -> float:
        return LEFT + (math.log(value) / math.log(end)) * (WIDTH - LEFT - RIGHT)

    def y_of(share: float) -> float:
        return height_of(1 + math.log10(share) / decades)

    shown_ticks = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000]
    x_ticks = [Tick(round(x_of(value), 2), f"{value:,}") for value in shown_ticks if value <= end]
    y_ticks = [Tick(round(y_of(10.0**-n), 2), f"{10.0 ** (2 - n):.3g} %") for n in range(decades + 1)]
    charts = []
    for benchmark, mode, shown in _shown_sets(report):
        if mode != "bare" and len({cut.mode for cut in benchmark.cuts}) > 1:
            continue  # runs don't depend on the cut
        series = []
        for summary in shown:
            values = sorted(runs.get(summary.name, []))
            if values:
                path = _survival(values, x_of, y_of)
                series.append(Series(summary.name, _style(report, summary), [], path))
        if series:
            charts.append(
                Chart(benchmark.name, mode, series, x_ticks, y_ticks, round(x_of(RUN_OF_GRADE_B), 2))
            )
    return charts


def _survival(values: list[int], x_of: Scale, y_of: Scale) -> str:
    """A stair: over each length the share of runs at least so long; `values` sorted."""
    corners = [(x_of(1), y_of(1.0))]
    share = 1.0
    for length in sorted({value for value in values if value > 0}):
        longer = 1 - bisect_left(values, length + 1) / len(values)
        bottom = height_of(0.0) if longer == 0 else y_of(longer)
        corners += [(x_of(length), y_of(share)), (x_of(length), bottom)]
        share = longer
    if len(corners) > _MOST_POINTS:
        stride = 2 * -(-len(corners) // _MOST_POINTS)
        corners = [corners[i] for i in range(len(corners)) if i % stride < 2 or i >= len(corners) - 2]
    return polyline(corners)


def _shown_sets(report: Report) -> Iterable[tuple[SetSummary, Mode, list[SetSummary]]]:
    """Each benchmark in each mode, with itself and its controls."""
    for benchmark in wording.benchmarks(report):
        mine = [item for item in wording.controls(report) if benchmark.name in item.applies_to]
        for mode in sorted({cut.mode for cut in benchmark.cuts}):
            yield benchmark, mode, [benchmark, *mine]


def _style(report: Report, summary: SetSummary) -> int:
    """0 of a benchmark; a control has the same number in all charts."""
    names = [item.name for item in wording.controls(report)]
    return names.index(summary.name) % 5 + 1 if summary.name in names else 0


def item_map(items: Sequence[ItemResult]) -> dict[str, object]:
    """A cell for each item in the file's order, as one SVG path for each grade."""
    columns = max(60, math.ceil(math.sqrt(6 * len(items))))
    paths: dict[str, list[str]] = {"none": [], "C": [], "B": [], "A": []}
    for number, item in enumerate(items):
        paths[item.grade or "none"].append(
            f"M{number % columns * 10 + 1} {number // columns * 10 + 1}h8v8h-8z"
        )
    rows = -(-len(items) // columns)
    return {
        "columns": columns,
        "width": 10 * columns,
        "height": 10 * rows,
        "paths": {grade: "".join(parts) for grade, parts in paths.items() if parts},
    }


def height_of(share: float) -> float:
    """From 0 at the bottom of a small chart to 1 at its top."""
    return TOP + (1 - share) * (HEIGHT - TOP - BOTTOM)


def polyline(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path."""
    return "M" + "L".join(f"{x:.2f} {y:.2f}" for x, y in points)


def nice_step(length: float, most: int) -> float:
    """1, 2 or 5 times a power of ten, so that `most` steps or fewer cover `length`."""
    rough = length / most
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
