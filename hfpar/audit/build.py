"""From results to the report: everything that needs no model."""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

from hfpar import __version__
from hfpar.audit.answers import answers_equal, gold_answer
from hfpar.audit.conclude import compare, conclude, test_ratios
from hfpar.audit.familiarity import compare_scores, find_intrusion
from hfpar.audit.limitations import limitations
from hfpar.audit.report import print_report, write_report
from hfpar.audit.results import (
    SCHEMA_VERSION,
    Intrusion,
    ItemResult,
    ModelInfo,
    OrderTest,
    Report,
    Timing,
)
from hfpar.audit.sets import AuditSet
from hfpar.audit.summarize import summarize_set
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.load import plain_settings

_PACKAGES = ("torch", "transformers", "tokenizers", "peft", "scipy", "numpy", "rapidfuzz", "math-verify")


def build_report(
    config: AuditConfig,
    sets: Sequence[AuditSet],
    items: Mapping[str, Sequence[ItemResult]],
    *,
    model: ModelInfo,
    reference_model: ModelInfo | None,
    orders: Sequence[OrderTest],
    timing: Timing,
    warnings: Sequence[str],
) -> Report:
    """Put together what `report.json` holds.

    Args:
        config: the audit's.
        sets: benchmarks and controls.
        items: results by the name of their set, in its order.
        model: what was audited.
        reference_model: what it was compared with, if anything.
        orders: tests of the files' orders.
        timing: what it cost.
        warnings: what the user should know of this run.
    """
    infos = [one.info for one in sets]
    comparisons = compare(infos, items)
    tests = test_ratios(comparisons, config.alpha)
    return Report(
        schema_version=SCHEMA_VERSION,
        hfpar_version=__version__,
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        settings=plain_settings(config),
        versions=_versions(),
        model=model,
        reference_model=reference_model,
        method=config.method,
        sets=[summarize_set(one.info, items[one.name], config.seed) for one in sets],
        comparisons=comparisons,
        tests=tests,
        verdicts=conclude(infos, items, comparisons, tests, config.alpha),
        scores=compare_scores(infos, items),
        orders=list(orders),
        intrusions=_intrusions(sets, items),
        limitations=limitations(infos, items, comparisons, tests, has_orders=bool(orders)),
        timing=timing,
        warnings=list(warnings),
    )


def _intrusions(sets: Sequence[AuditSet], items: Mapping[str, Sequence[ItemResult]]) -> list[Intrusion]:
    found = []
    for one in (one for one in sets if one.info.role == "benchmark"):
        kind = one.benchmark.answer_kind
        for control in sets:
            if control.info.role != "control" or one.name not in control.info.applies_to:
                continue
            intrusion = find_intrusion(
                one.name,
                control.name,
                items[one.name],
                items[control.name],
                {item.item_id: gold_answer(item, kind) for item in one.benchmark.items},
                {
                    item.item_id: gold_answer(item, control.benchmark.answer_kind)
                    for item in control.benchmark.items
                    if item.pair_set == one.name  # another benchmark may have an item of the same id
                },
                lambda gold, answer, kind=kind: answers_equal(gold, answer, kind),  # type: ignore[misc]
            )
            if intrusion is not None:
                found.append(intrusion)
    return found


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "hfpar": __version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def notes(num_items: int, num_done: int, num_too_long: int) -> list[str]:
    """What the report says of how the run went.

    Args:
        num_items: of all sets.
        num_done: of them, those that an earlier run of the same audit had finished.
        num_too_long: of them, those that don't fit into the model's context.
    """
    found = []
    if num_too_long:
        found.append(f"{num_too_long} texts are longer than the model's context, and weren't read")
    if num_done:
        found.append(f"{num_done} of {num_items} items are from an earlier, stopped run of the same audit")
    return found


def publish(
    folder: Path, report: Report, items: Mapping[str, Sequence[ItemResult]], sets: Sequence[AuditSet]
) -> None:
    """Write the report's files, and print it."""
    write_report(folder, report, [item for one in sets for item in items[one.name]])
    print_report(report, folder)
