"""What changed between checkpoints, for people and programs: `compare.json`, `.md`, `.html`, a picture, a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

import hfpar
from hfpar.audit import wording
from hfpar.audit.paired import CheckpointComparison, PairedRate
from hfpar.audit.report import compare_charts
from hfpar.audit.report.figures import draw_trajectory
from hfpar.audit.report.markdown import markdown_table, markdown_text
from hfpar.audit.report.page import render
from hfpar.audit.report.storage import plain, write_file, write_text
from hfpar.audit.report.terminal import default_console
from hfpar.audit.results import Report
from hfpar.config.validate import first_of

COMPARE_SCHEMA_VERSION = 1
_MOST_IDS = 20
"""Listed of a row in Markdown; the page and the JSON have all."""


def write_comparison(
    folder: Path,
    comparison: CheckpointComparison,
    reports: Mapping[str, Report] | None = None,
    command: str = "",
) -> None:
    """Write `compare.json`, `compare.md`, `compare.html` and `trajectory.png`, each whole or not at all.

    Args:
        folder: made where it is missing.
        comparison: of two checkpoints or more.
        reports: of the checkpoints, by label, for their hashes.
        command: that made it.

    Raises:
        ConfigError: a file can't be written.
    """
    folder = Path(folder)
    data = {"schema_version": COMPARE_SCHEMA_VERSION, "command": command, **plain(comparison)}
    write_text(folder / "compare.json", json.dumps(data, indent=2, allow_nan=False) + "\n")
    write_text(folder / "compare.md", make_compare_markdown(comparison))
    write_text(folder / "compare.html", make_compare_page(comparison, reports, command))
    figure = draw_trajectory(comparison)
    FigureCanvasAgg(figure)
    write_file(folder / "trajectory.png", lambda path: figure.savefig(path, format="png"))


def make_compare_page(
    comparison: CheckpointComparison, reports: Mapping[str, Report] | None = None, command: str = ""
) -> str:
    """The page."""
    return render(
        "compare.html",
        comparison=comparison,
        charts=compare_charts.trajectory_charts(comparison),
        changes=compare_charts.changes(comparison),
        numbered=compare_charts.tick_labels(comparison.checkpoints) != comparison.checkpoints,
        has_chat=_has_chat(comparison),
        summary=summarize_changes(comparison),
        reports=dict(reports or {}),
        command=command,
        version=hfpar.__version__,
    )


def summarize_changes(comparison: CheckpointComparison) -> str:
    """What the last checkpoint does that the first didn't, in a sentence."""
    last = comparison.checkpoints[-1]
    parts = []
    for name in wording.names_in_order(rate.set for rate in comparison.rates):
        mine = [rate for rate in comparison.rates if rate.set == name and rate.second == last]
        known = [rate for rate in mine if rate.p_holm is not None]
        if not known:
            parts.append(f"{name}: no item changed")
            continue
        best = min(known, key=lambda rate: (rate.p_holm or 0.0, -abs(rate.difference or 0.0)))
        parts.append(
            f"{name}: {wording.points(best.difference)} from {wording.ratio(best.ratio)} of the text, "
            f"{wording.p_equals(best.p_holm)}"
        )
    return "; ".join(parts) + "." if parts else "Nothing was probed in both."


def make_compare_markdown(comparison: CheckpointComparison) -> str:
    """The comparison in GitHub's Markdown."""
    labels = [markdown_text(label) for label in comparison.checkpoints]
    parts = [
        f"# Checkpoints compared: {' → '.join(labels)}",
        markdown_text(summarize_changes(comparison)),
        *(f"> **Warning.** {markdown_text(warning)}" for warning in comparison.warnings),
    ]
    if comparison.rates:
        headings = [*_HEADINGS[:2], "set", *_HEADINGS[2:]]
        rows = [
            [*map(markdown_text, (rate.second, wording.mode_name(rate.mode), rate.set)), *_figures(rate)]
            for rate in comparison.rates
        ]
        parts += ["## Exact completions", markdown_table(headings, rows, numbers=range(3, len(headings)))]
        parts.append(
            f"Each checkpoint beside {labels[0]}, over the items probed in both: Newcombe's paired 95 % interval, "
            "McNemar's exact two-sided p, Holm over all rows."
        )
        parts += [_ids(rate) for rate in comparison.rates if rate.newly_completed or rate.lost]
    if comparison.logprobs:
        rows = [
            [
                markdown_text(item.set),
                markdown_text(item.second),
                wording.signed(item.change.value),
                markdown_text(wording.interval(item.change.low, item.change.high, "")),
                wording.percent(item.share_up),
            ]
            for item in comparison.logprobs
        ]
        headings = ["set", "checkpoint", "nats a token", "95 %", "items that became likelier"]
        parts += ["## Log-probabilities", markdown_table(headings, rows, numbers=range(2, 5))]
    return "\n\n".join(parts) + "\n"


_HEADINGS = ("checkpoint", "prompt", "given", "first", "then", "new", "lost", "difference", "p", "p, Holm")


def _figures(rate: PairedRate) -> list[str]:
    difference = f"{wording.points(rate.difference)} {wording.interval(rate.low, rate.high)}".strip()
    return [
        wording.ratio(rate.ratio),
        wording.share(rate.first_rate),
        wording.share(rate.second_rate),
        f"{rate.only_second:,}",
        f"{rate.only_first:,}",
        difference,
        wording.p_value(rate.p_value),
        wording.p_value(rate.p_holm),
    ]


def _ids(rate: PairedRate) -> str:
    lists = [("newly completed", rate.newly_completed), ("lost", rate.lost)]
    words = []
    for name, ids in lists:
        if ids:
            words.append(f"{name}: {first_of([markdown_text(one) for one in ids], _MOST_IDS)}")
    where = f"{rate.set} at {wording.ratio(rate.ratio)}, {wording.mode_name(rate.mode)}, {rate.second}"
    return f"- {markdown_text(where)}. " + "; ".join(words)


def print_comparison(
    comparison: CheckpointComparison, folder: Path | None = None, console: Console | None = None
) -> None:
    """Print a table for each set, and where the report lies.

    Args:
        comparison: what is printed.
        folder: whose `compare.html` is named at the end.
        console: instead of standard output.
    """
    console = console or default_console()
    console.print()
    console.print(Text.assemble("Checkpoints compared: ", (" → ".join(comparison.checkpoints), "bold")))
    for warning in comparison.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    has_chat = _has_chat(comparison)
    for name in wording.names_in_order(rate.set for rate in comparison.rates):
        table = Table(title=Text(name, "bold"), title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for number, heading in enumerate(_HEADINGS):
            if heading != "prompt" or has_chat:
                table.add_column(heading, justify="left" if number < 2 else "right", overflow="fold")
        for rate in (each for each in comparison.rates if each.set == name):
            cells = [rate.second, *([rate.mode] if has_chat else []), *_figures(rate)]
            is_clear = rate.p_holm is not None and rate.p_holm <= 0.05
            table.add_row(*map(Text, cells), style=None if is_clear else "dim")
        console.print(table)
    console.print(Text(summarize_changes(comparison)))
    if folder is not None:
        path = str(Path(folder) / "compare.html")
        console.print(Text.assemble("report: ", (path, "bold")), soft_wrap=True)


def _has_chat(comparison: CheckpointComparison) -> bool:
    return any(rate.mode == "chat" for rate in comparison.rates)
