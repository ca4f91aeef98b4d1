"""The table that a person reads, and the JSON that a program does."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfpar.errors import ConfigError
from hfpar.verify.cells import Result

_COLORS = {"pass": "green", "refused": "yellow", "fail": "bold red"}


def make_table(results: Sequence[Result], title: str, *, with_notes: bool) -> Any:
    """A rich table, a row a cell.

    Args:
        results: the rows.
        title: over the table.
        with_notes: whether there is room for a column with each row's worst parameter, or reason.
    """
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for header in ("engine", "layout", "adapter", "batching", "status"):
        table.add_column(header, no_wrap=True)
    for header in ("loss", "norm", "grads", "params"):
        table.add_column(header, justify="right", no_wrap=True)
    if with_notes:
        table.add_column("worst parameter, or reason", overflow="fold")
    for result in results:
        cell, errors, color = result.cell, result.errors, _COLORS[result.status]
        figures = ["", "", "", ""]
        if errors is not None:
            figures = [_figure(e) for e in (errors.loss, errors.grad_norm, errors.gradient, errors.parameter)]
        row = [cell.engine, cell.layout, cell.adapter, cell.batching, f"[{color}]{result.status}[/{color}]"]
        note = errors.worst if errors is not None else result.reason
        table.add_row(*row, *figures, *([escape(note or "")] if with_notes else []))
    return table


def notes(results: Sequence[Result]) -> list[str]:
    """What the table without its last column leaves out: the largest error, and why cells were refused."""
    lines = []
    measured = [result for result in results if result.errors is not None]
    if measured:
        result = max(measured, key=lambda r: r.errors.largest if r.errors else 0.0)
        assert result.errors is not None
        lines.append(
            f"largest error: {_figure(result.errors.largest)} in {result.cell} ({result.errors.worst})"
        )
    for reason in dict.fromkeys(r.reason for r in results if r.status == "refused"):
        cells = [str(r.cell) for r in results if r.reason == reason]
        shown = cells[0] if len(cells) == 1 else f"{cells[0]} and {len(cells) - 1} more"
        lines.append(f"refused: {shown}: {reason}")
    return lines


def _figure(error: float) -> str:
    return "0" if error == 0 else f"{error:.1e}"


def summary(results: Sequence[Result], tolerance: float, seconds: float) -> str:
    """One line under the table."""
    counts = {
        status: sum(result.status == status for result in results) for status in ("pass", "refused", "fail")
    }
    parts = [f"{counts['pass']} of {len(results)} equal one process within {tolerance:g}"]
    parts += [f"{counts[status]} {status}" for status in ("refused", "fail") if counts[status]]
    return f"{', '.join(parts)} ({seconds:.0f} s)"


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """A row an object; a figure that there isn't, or that isn't finite, is null."""
    rows = []
    for result in results:
        cell, errors = result.cell, result.errors
        rows.append(
            {
                "engine": cell.engine,
                "layout": cell.layout,
                "adapter": cell.adapter,
                "batching": cell.batching,
                "status": result.status,
                "loss_error": _finite(errors.loss) if errors else None,
                "grad_norm_error": _finite(errors.grad_norm) if errors else None,
                "max_rel_grad_error": _finite(errors.gradient) if errors else None,
                "max_rel_param_error": _finite(errors.parameter) if errors else None,
                "worst": errors.worst if errors else None,
                "reason": result.reason,
            }
        )
    return rows


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def write_json(results: Sequence[Result], path: Path) -> None:
    """Write the rows.

    Raises:
        ConfigError: the file can't be written.
    """
    try:
        path.write_text(json.dumps(to_json(results), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json: {path} can't be written ({error.strerror})") from error
