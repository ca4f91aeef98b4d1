"""The picture of a vocabulary: its rows' norms, with special and added tokens marked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from hfpar.errors import ConfigError
from hfpar.tokentool.measure import Measured, Model
from hfpar.whole_path import whole_path

if TYPE_CHECKING:
    from hfpar.tokentool.run import Findings

_VOCABULARY = ("#1f5fa8", "#2a8c82")
"""Of the first model and the second."""
_UNTRAINED, _WRITTEN, _OTHER, _INK = "#d1495b", "#0b7285", "#7a838c", "#333b44"
_NUM_BINS = 80
_DPI = 150
_MOST_LABELS = 22
_MOST_NAMES = 2
_MOST_CHARS = 28
_NEAR = 0.012
"""Share of the axis within which tokens have one label."""
_APART = 0.026
"""Share of the axis between labels."""
_FARTHEST = 2.0
"""Of the vocabulary's large norms: what is farther off is marked at the end of the axis, with its norm."""
_ROOM = 2.35
"""Height of a panel by that of its histogram: labels stand above that."""


def plot_norms(findings: Findings, path: Path) -> None:
    """Draw a histogram of the vocabulary's norms for each model and matrix, and mark special and added tokens.

    Args:
        findings: of one model or two.
        path: the PNG to write or replace.

    Raises:
        ConfigError: the file can't be written.
    """
    columns = max(len(model.measured) for model in findings.models)
    lines = len(findings.models)
    figure = Figure(
        figsize=(9.5 if columns == 1 else 15, 4.8 * lines), dpi=_DPI, layout="tight", facecolor="white"
    )
    FigureCanvasAgg(figure)
    panels = figure.subplots(lines, columns, squeeze=False)
    for column in range(columns):
        shown = [
            (number, model, model.measured[column])
            for number, model in enumerate(findings.models)
            if column < len(model.measured)
        ]
        high = max(_end_of_axis(measured, model, findings.listed) for _, model, measured in shown)
        for number, model, measured in shown:
            _draw(panels[number][column], model, measured, findings.listed, high, _VOCABULARY[number])
        for number in set(range(lines)) - {number for number, _, _ in shown}:
            panels[number][column].set_axis_off()
    try:
        with whole_path(path) as partial:
            figure.savefig(partial, format="png")
    except OSError as error:
        raise ConfigError(f"--plot: {path} can't be written ({error.strerror or error})") from error


def _end_of_axis(measured: Measured, model: Model, listed: Sequence[str]) -> float:
    """The largest norm, but not so large that the vocabulary would be squeezed into a corner."""
    norms = measured.ordinary_norms
    most = [_FARTHEST * float(np.quantile(norms, 0.999))] if len(norms) and norms.any() else []
    largest = max(
        [*norms.max(initial=0.0, keepdims=True).tolist(), *(m.norm for m in _marks(measured, model, listed))]
    )
    return min([largest, *most]) or 1.0


def _draw(
    axes: Axes, model: Model, measured: Measured, listed: Sequence[str], high: float, color: str
) -> None:
    norms, width = np.minimum(measured.ordinary_norms, high), 1.04 * high
    edges = np.linspace(0, high, _NUM_BINS + 1).tolist()
    axes.hist(norms, edges, color=color, alpha=0.25)
    axes.hist(norms, edges, color=color, histtype="step", linewidth=1.4)
    axes.set_xlim(-0.02 * high, width)
    tallest = max(1.0, float(np.histogram(norms, edges)[0].max()))
    axes.set_ylim(0, _ROOM * tallest)
    marks = [mark.within(high) for mark in _marks(measured, model, listed)]
    for mark in marks:
        axes.plot(
            [mark.norm, mark.norm], [0, 0.035 * tallest], color=mark.color, linewidth=1.2, clip_on=False
        )
    groups = _group(marks, _NEAR * width)
    for group, x in zip(groups, spread([g.norm for g in groups], _APART * width, 0, high), strict=True):
        axes.plot(
            [group.norm, group.norm, x],
            [0.035 * tallest, 1.06 * tallest, 1.16 * tallest],
            color=group.color,
            linewidth=0.7,
            alpha=0.75,
        )
        axes.text(
            x,
            1.18 * tallest,
            group.text,
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=7.5,
            color=group.color,
            parse_math=False,
        )
    title = f"{model.source.name}: {measured.matrix.name}"
    axes.set_title(title if len(title) < 80 else f"...{title[-77:]}", loc="left", fontsize=11, color=_INK)
    _tidy(axes, tallest)
    _legend(axes, color, len(norms), marks)


def _legend(axes: Axes, color: str, num_ordinary: int, marks: Sequence[Mark]) -> None:
    axes.fill_between([], [], color=color, alpha=0.25, label=f"{num_ordinary:,} ordinary tokens")
    names = {
        _UNTRAINED: "never trained",
        _WRITTEN: "written by the chat template",
        _OTHER: "other special or added",
    }
    for mark_color, name in names.items():
        count = sum(mark.color == mark_color for mark in marks)
        if count:
            axes.plot([], [], color=mark_color, linewidth=1.6, label=f"{name} ({count:,})")
    axes.legend(
        framealpha=0.9,
        edgecolor="white",
        labelcolor=_INK,
        fontsize=8,
        loc="upper right",
        bbox_to_anchor=(1.0, 1.0),
    )


def _tidy(axes: Axes, tallest: float) -> None:
    axes.set_xlabel("norm of a token's row", color=_INK, fontsize=9)
    axes.set_ylabel("number of tokens", color=_INK, fontsize=9)
    axes.yaxis.set_label_coords(-0.09, 0.25)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= 1.02 * tallest])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#aab2ba")
    axes.spines["left"].set_bounds(0, tallest)
    axes.tick_params(colors=_INK, labelsize=9, which="both")


# Marks and their labels


@dataclass(frozen=True)
class Mark:
    """A token, or several that lie close together.

    Attributes:
        norm: of the row.
        text: of the label.
        color: of mark and label.
        rank: what matters most has the lowest.
    """

    norm: float
    text: str
    color: str
    rank: int

    def within(self, high: float) -> Mark:
        """At the end of the axis, if it is farther off."""
        if self.norm <= high:
            return self
        return replace(self, norm=high, text=f"{_short(self.text, _MOST_CHARS - 8)} {self.norm:.3g} \u2192")


def _marks(measured: Measured, model: Model, listed: Sequence[str]) -> list[Mark]:
    chosen = set(listed)
    marks = []
    for token in model.tokens.values():
        if token.text not in chosen or token.id >= measured.matrix.num_rows:
            continue
        norm = float(measured.norms[token.id])
        if not np.isfinite(norm):
            continue
        is_untrained, is_written = token.id in measured.reasons, token.template == "written"
        color = _UNTRAINED if is_untrained else _WRITTEN if is_written else _OTHER
        rank = 0 if is_written else 1 if token.roles else 2 if is_untrained else 3
        text = token.text if token.text.isprintable() and token.text.strip() else repr(token.text)
        marks.append(Mark(norm, _short(text, _MOST_CHARS), color, rank))
    return marks


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _group(marks: Sequence[Mark], near: float) -> list[Mark]:
    """One mark for those of a colour that lie close together; the most important ones, by their norms."""
    groups: list[list[Mark]] = []
    for mark in sorted(marks, key=lambda mark: (mark.color, mark.norm)):
        if groups and groups[-1][0].color == mark.color and mark.norm - groups[-1][0].norm <= near:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    merged = []
    for group in groups:
        group.sort(key=lambda mark: mark.rank)
        names = [mark.text for mark in group[:_MOST_NAMES]]
        if len(", ".join(names)) > _MOST_CHARS:
            names = names[:1]
        more = f" +{len(group) - len(names)}" if len(group) > len(names) else ""
        text = ", ".join(names) + more
        norm = float(np.mean([mark.norm for mark in group]))
        merged.append(Mark(norm, text, group[0].color, group[0].rank))
    merged.sort(key=lambda mark: mark.rank)
    return sorted(merged[:_MOST_LABELS], key=lambda mark: mark.norm)


def spread(places: Sequence[float], apart: float, low: float, high: float) -> list[float]:
    """Places for labels, in rising order as the marks are: not closer than `apart`, and near their marks.

    Each run of labels that touch is centred on its marks, and pushed back within the limits.
    """
    runs: list[tuple[list[float], float]] = []  # the marks of a run, and where its first label is
    for place in places:
        runs.append(([place], place))
        while len(runs) > 1 and runs[-2][1] + apart * len(runs[-2][0]) > runs[-1][1]:
            marks = runs[-2][0] + runs[-1][0]
            start = float(np.mean(marks)) - apart * (len(marks) - 1) / 2
            start = max(low, min(start, high - apart * (len(marks) - 1)))
            runs[-2:] = [(marks, start)]
    return [start + apart * number for marks, start in runs for number in range(len(marks))]
