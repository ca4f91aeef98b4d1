"""Writing all that stands in a run folder beside its items."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hfpar.audit.report.figures import write_figures
from hfpar.audit.report.markdown import make_markdown
from hfpar.audit.report.page import make_page
from hfpar.audit.report.storage import REPORT_JSON, write_report_json, write_text
from hfpar.audit.results import ItemResult, Report


def write_report(folder: Path, report: Report, items: Iterable[ItemResult]) -> None:
    """Write `report.json`, `report.md`, `report.html`, `forest.png` and `ratios.png`, each whole or not at all.

    Args:
        folder: the run folder; made where it is missing.
        report: what is in `report.json`.
        items: of all sets, for the page.

    Raises:
        ConfigError: a file can't be written; what stood under its name is as it was.
    """
    folder = Path(folder)
    write_report_json(folder / REPORT_JSON, report)
    write_text(folder / "report.md", make_markdown(report))
    write_text(folder / "report.html", make_page(report, list(items)))
    write_figures(folder, report)
