"""`--compare`: several checkpoints beside each other, each audited first where it hasn't been."""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

from hfpar.accelerator import Launch
from hfpar.audit.backends import audit
from hfpar.audit.paired import compare_checkpoints
from hfpar.audit.report import print_comparison, read_report, write_comparison
from hfpar.audit.report.storage import REPORT_JSON
from hfpar.audit.results import ItemResult, Report, item_from_dict
from hfpar.config.audit_schema import AuditConfig
from hfpar.errors import ConfigError


def run_comparison(config: AuditConfig, launch: Launch) -> list[tuple[str, Report]]:
    """Audit the checkpoints that haven't been, and compare them all with the first.

    Args:
        config: its `compare` names checkpoints and folders of finished audits.
        launch: how this process was started.

    Returns:
        The reports by label.

    Raises:
        HfparError: anything that the user can mend.
    """
    assert config.compare is not None
    folder = Path(config.output_dir or "runs/audit/comparison").expanduser()
    labels = _labels(config.compare)
    reports: list[tuple[str, Report]] = []
    audits: dict[str, dict[str, list[ItemResult]]] = {}
    for label, name in zip(labels, config.compare, strict=True):
        audited = Path(name).expanduser()
        if not (audited / REPORT_JSON).is_file():
            audited = folder / label
            audit(replace(config, compare=None, model_name_or_path=name, output_dir=str(audited)), launch)
        reports.append((label, read_report(audited)))
        audits[label] = read_items(audited)
    if launch.is_main:
        comparison = compare_checkpoints(audits, config.seed)
        write_comparison(folder, comparison, dict(reports), shlex.join(sys.argv))
        print_comparison(comparison)
        print(f"comparison: {folder / 'compare.html'}", flush=True)
    return reports


def _labels(names: list[str]) -> list[str]:
    """The last parts of the paths, and more of them where these are the same."""
    paths = [Path(name).expanduser() for name in names]
    # `.` and `..` have no name of their own.
    paths = [Path(os.path.abspath(path)) if path.is_dir() else path for path in paths]
    for depth in range(1, 5):
        labels = ["-".join(path.parts[-depth:]).strip("/-") for path in paths]
        if len(set(labels)) == len(labels):
            return labels
    raise ConfigError(f"compare: {', '.join(names)}; each may stand once")


def read_items(folder: Path) -> dict[str, list[ItemResult]]:
    """The items of a finished audit, by set.

    Raises:
        ConfigError: they can't be read.
    """
    path = folder / "items.jsonl"
    items: dict[str, list[ItemResult]] = {}
    try:
        for text in path.read_text(encoding="utf-8").splitlines():
            item = item_from_dict(json.loads(text))
            items.setdefault(item.set, []).append(item)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"compare: {path} can't be read ({error}); give the folder of a finished audit"
        ) from error
    return items
