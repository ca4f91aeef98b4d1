"""The report on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from hfpar.audit import wording
from hfpar.audit.report.storage import in_order
from hfpar.audit.results import Level, Report, SetSummary, Verdict

_STYLES: dict[Level, str] = {"strong": "red", "some": "yellow", "none": "cyan", "untested": "bright_black"}
_WIDTH_OF_FILES = 120
_WIDEST = 120


def print_report(report: Report, folder: Path | None = None, console: Console | None = None) -> None:
    """Print a panel for each verdict, a table for each benchmark, and where the report lies.

    Args:
        report: what is printed.
        folder: the run folder, whose `report.html` is named at the end.
        console: instead of standard output.
    """
    report = in_order(report)
    console = console or default_console()
    width = min(console.width, _WIDEST)
    console.print()
    console.print(Text.assemble("Contamination audit: ", (report.model.name, "bold")))
    for warning in report.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), warning))
    for verdict in report.verdicts:
        summary = next((item for item in report.sets if item.name == verdict.benchmark), None)
        parts: list[Text | Table] = [Text(verdict.text)]
        if summary is not None:
            parts.append(_grades(summary))
        style = _STYLES[verdict.level]
        console.print(
            Panel(Group(*parts), title=_title(verdict), title_align="left", border_style=style, width=width)
        )
        table = _table(report, verdict.benchmark)
        if table.row_count:
            console.print(table, width=width)
    if not report.verdicts:
        console.print("No benchmark was audited.")
    if folder is not None:
        console.print(Text.assemble("report: ", (str(Path(folder) / "report.html"), "bold")), soft_wrap=True)


def default_console() -> Console:
    """Standard output; wide enough for the tables where it is a file."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    return console


def _title(verdict: Verdict) -> Text:
    style = _STYLES[verdict.level]
    mark = wording.LEVEL_MARKS[verdict.level]
    return Text.assemble((verdict.benchmark, "bold"), "  ", (f"{mark} {verdict.headline}", f"bold {style}"))


def _grades(summary: SetSummary) -> Text:
    counts = [f"{grade} {summary.grades.get(grade, 0):,}" for grade in wording.GRADES]
    return Text(f"Items by grade: {', '.join(counts)}, of {summary.num_items:,}", style="dim")


def _table(report: Report, benchmark: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_chat, bounds = wording.has_chat(report), wording.thresholds(report)
    table.add_column("given", justify="right", no_wrap=True)
    if has_chat:
        table.add_column("prompt", no_wrap=True)
    table.add_column("control", overflow="fold")
    for heading in ("exact", "control's", "difference", "p", "p, Holm"):
        table.add_column(heading, justify="right")
    for item in (each for each in report.comparisons if each.benchmark == benchmark):
        test = wording.test_of(report, item)
        decides = test is not None and test.deciding_control == item.control
        difference = f"{wording.points(item.difference)} {wording.interval(item.low, item.high)}".strip()
        cells = [
            wording.ratio(item.ratio),
            *([item.mode] if has_chat else []),
            item.control,
            wording.share(item.rate),
            wording.control_share(item.control_rate),
            difference,
            "no power" if item.p_value is None else wording.p_value(item.p_value, *bounds),
            wording.p_value(test.p_holm, *bounds) if decides and test is not None else "",
        ]
        table.add_row(*map(Text, cells), style=None if decides else "dim")
    return table
