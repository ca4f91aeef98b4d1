"""What the audits of planted models found: figures, goals, tables. Used by planted_contamination.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from planted_models import COPIES, FORMATS
from rich.console import Console
from rich.table import Table

from hfpar.audit.statistics import auc, share

METHODS = (
    "exact 40 %",
    "exact 60 %",
    "longest run",
    "grade A or B",
    "loss",
    "zlib",
    "min_k",
    "min_k_plus_plus",
    "reference",
)
AS_THEY_STAND = "as they stand"
"""Verbatim, and question only."""


def recall_at(scores: Sequence[float], others: Sequence[float], false_positives: float = 0.01) -> float:
    """Share of `scores` at or above the lowest threshold that at most this share of `others` reaches."""
    allowed = int(false_positives * len(others) + 1e-9)
    above = sorted(others, reverse=True)[allowed]
    return float(np.mean(np.asarray(scores) > above))


def summarize(planted: Sequence[Mapping[str, Any]], nulls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Everything that is reported, from what each model's audit found."""
    held_out = [row for one in planted for row in one["held_out"]]
    items = [row for one in planted for row in one["planted"]]
    methods = [
        compare_method(method, copies, name, rows, held_out)
        for copies in COPIES
        for name in (AS_THEY_STAND, *FORMATS)
        if (rows := [row for row in items if row["copies"] == copies and is_of(row, name)])
        for method in METHODS
    ]
    completed = {
        ratio: share(
            sum(row["scores"][f"exact {100 * ratio:.0f} %"] == 1 for row in held_out),
            sum(ratio in row["probed"] for row in held_out),
        )
        for ratio in (0.4, 0.6)
    }
    grades = {
        grade: share(
            sum(row["grade"] == grade for row in items),
            sum(row["grade"] == grade for row in [*items, *held_out]),
        )
        for grade in ("A", "B")
    }
    alarms = {
        "null models": [one["alarms"] for one in nulls],
        "held-out halves": [one["alarms"] for one in planted],
        "random splits": [one["splits"] for one in planted],
    }
    return {
        "methods": methods,
        "held_out_exact": {str(ratio): asdict(one) for ratio, one in completed.items()},
        "grades": {grade: asdict(one) for grade, one in grades.items()},
        "grades_on_nulls": sum(row["grade"] in ("A", "B") for one in nulls for row in one["held_out"]),
        "grades_on_controls": sum(one["control_grades"] for one in planted),
        "alarms": {
            name: sum(hits for hits, _ in found) / sum(total for _, total in found)
            for name, found in alarms.items()
        },
        "levels": {
            "planted": [one["level"] for one in planted],
            "null": [one["level"] for one in nulls],
            "held out": [one["held_out_level"] for one in planted],
        },
    }


def is_of(row: Mapping[str, Any], name: str) -> bool:
    """Whether an item was planted in this format."""
    return row["format"] in ("verbatim", "question only") if name == AS_THEY_STAND else row["format"] == name


def compare_method(
    method: str,
    copies: int,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """One method on one kind of planted items, beside all held-out ones."""
    ours, theirs = (
        [row["scores"][method] for row in group if method in row["scores"]] for group in (rows, held_out)
    )
    value, low, high = auc(ours, theirs)
    found = {"method": method, "copies": copies, "format": name, "items": len(ours)}
    return {**found, "auc": value, "low": low, "high": high, "recall": recall_at(ours, theirs)}


def goals(figures: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """What was asked for, what was found, and whether it is met."""
    best = {
        name: max(found, key=lambda one: one["recall"])
        for name in (AS_THEY_STAND, "reformatted")
        if (found := [one for one in figures["methods"] if (one["copies"], one["format"]) == (16, name)])
    }
    exact = {ratio: one for ratio, one in figures["held_out_exact"].items()}
    worst = max(one["value"] for one in exact.values())
    hits, total = (sum(one[key] for one in figures["grades"].values()) for key in ("hits", "total"))
    levels = figures["levels"]
    wrong = [level for level in [*levels["null"], *levels["held out"]] if level in ("some", "strong")]
    alarm = max(figures["alarms"].values())
    return [
        *(
            (
                f"recall at 16 copies, {name}, 1 % false positives, best method: at least 90 %",
                f"{100 * one['recall']:.1f} % of {one['items']} ({one['method']})",
                one["recall"] >= 0.9,
            )
            for name, one in best.items()
        ),
        (
            "held-out items completed: at most 2 %",
            ", ".join(
                f"{one['hits']} of {one['total']} from {100 * float(ratio):.0f} %"
                for ratio, one in exact.items()
            ),
            worst <= 0.02,
        ),
        (
            "items of grade A or B that were planted: at least 98 %",
            f"{hits} of {total}" + (f" ({100 * hits / total:.1f} %)" if total else ""),
            total > 0 and hits >= 0.98 * total,
        ),
        (
            "false alarms among draws at alpha 0.05: at most 8 %",
            as_shares(figures["alarms"]),
            alarm <= 0.08,
        ),
        (
            "verdicts of null models and of held-out halves: none says evidence",
            f"{len(wrong)} of {len(levels['null']) + len(levels['held out'])} do",
            not wrong,
        ),
        (
            "verdicts of planted models: some or strong evidence",
            ", ".join(levels["planted"]),
            set(levels["planted"]) <= {"some", "strong"},
        ),
    ]


def show(console: Console, figures: Mapping[str, Any]) -> None:
    """Print the tables."""
    cells = {(one["method"], one["copies"], one["format"]): one for one in figures["methods"]}
    names = (AS_THEY_STAND, "reformatted", "numbers changed")
    for key, title in (
        ("auc", "AUC against held-out items"),
        ("recall", "Recall at 1 % false positives, in %"),
    ):
        table = Table(title=f"{title}; 1 / 4 / 16 / 32 copies")
        for column in ("method", *names):
            table.add_column(column, justify="left" if column == "method" else "right", no_wrap=True)
        for method in METHODS:
            found = [[cells.get((method, copies, name)) for copies in COPIES] for name in names]
            table.add_row(method, *(" / ".join(as_cell(one, key) for one in group) for group in found))
        console.print(table)
    table = Table(title="Goals")
    for column in ("goal", "found", ""):
        table.add_column(column)
    for goal, value, is_met in goals(figures):
        table.add_row(goal, value, "met" if is_met else "[red]MISSED[/red]")
    console.print(table)
    console.print(
        f"Of grade A or B are {figures['grades_on_nulls']} items of null models and "
        f"{figures['grades_on_controls']} of the planted models' controls."
    )


def as_cell(found: Mapping[str, Any] | None, key: str) -> str:
    """A figure."""
    if found is None:
        return "-"
    return f"{found[key]:.2f}" if key == "auc" else f"{100 * found[key]:.0f}"


def as_shares(found: Mapping[str, float]) -> str:
    """Several, each with its name."""
    return ", ".join(f"{name} {100 * value:.1f} %" for name, value in found.items())
