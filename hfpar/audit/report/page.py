"""`report.html`: one file that needs no network, with the items as data and a small script that shows them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from hfpar.audit import wording
from hfpar.audit.report import charts
from hfpar.audit.report.storage import in_order, plain
from hfpar.audit.results import CutResult, ItemResult, Report
from hfpar.train.progress import format_count, format_duration

MOST_CONTROL_ITEMS = 1000
"""Of each control, those with the longest runs; all of them are in `items.jsonl`."""


def make_page(report: Report, items: Sequence[ItemResult]) -> str:
    """The page.

    Args:
        report: as it is, in any order.
        items: all of them; controls' longest tails of the list are left out of the page.
    """
    report = in_order(report)
    of_set: dict[str, list[ItemResult]] = {summary.name: [] for summary in report.sets}
    for item in items:
        of_set.setdefault(item.set, []).append(item)
    shown, num_left_out = _shown_items(report, of_set)
    return render(
        "template.html",
        report=report,
        forest=charts.forest(report),
        ratio_charts=charts.ratio_charts(report),
        run_charts=charts.run_charts(report, items),
        maps={name: charts.item_map(mine) for name, mine in of_set.items() if mine},
        num_items={name: len(mine) for name, mine in of_set.items()},
        score_table=score_table(report),
        has_chat=wording.has_chat(report),
        has_answers=any(cut.answer is not None for item in report.sets for cut in item.cuts),
        num_shown=len(shown),
        num_left_out=num_left_out,
        data=embedded({"items": shown, "gradeWords": wording.GRADES, "skipWords": wording.SKIP_REASONS}),
        summary=wording.summary_sentence(report),
        facts=facts(report),
    )


def render(template: str, **context: Any) -> str:
    """A template of this folder with the style and the script of all pages."""
    here = files("hfpar.audit.report")
    script = (here / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment = Environment(
        loader=PackageLoader("hfpar.audit.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["unbroken"] = lambda text: str(text).replace(" %", "\N{NO-BREAK SPACE}%")
    environment.globals.update(
        words=wording,
        style=(here / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=digest,
        count=format_count,
        duration=format_duration,
    )
    return environment.get_template(template).render(**context).lstrip()


def embedded(value: Any) -> str:
    """JSON that can stand inside a `script` element: nothing in it ends the element or opens a comment.

    Half a surrogate pair, which an address in the page can't hold, is replaced.
    """
    text = json.dumps(plain(value), separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    text = re.sub("[\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", text)
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def score_table(report: Report) -> dict[str, Any]:
    """AUCs by benchmark and control (rows) and method (columns)."""
    methods = wording.names_in_order(
        [name for name in wording.SCORE_NAMES if any(s.method == name for s in report.scores)]
    )
    methods += sorted({score.method for score in report.scores} - set(methods))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for score in report.scores:
        rows.setdefault((score.benchmark, score.control), {})[score.method] = score
    return {"methods": methods, "rows": rows}


def facts(report: Report) -> list[tuple[str, str]]:
    """How the report was made, as names and values."""
    model = report.model
    rows = [
        ("model", model.name),
        (
            "architecture",
            model.architecture
            if model.num_parameters is None
            else f"{model.architecture}, {format_count(model.num_parameters)} parameters, {model.dtype}",
        ),
        ("adapter's base", model.base or ""),
        ("quantization", model.quantization or ""),
        ("weights, SHA-256", model.sha256 or "not known: behind a server"),
        ("tokenizer, SHA-256", model.tokenizer_sha256 or ""),
    ]
    if report.reference_model is not None:
        rows += [
            ("reference model", report.reference_model.name),
            ("its weights, SHA-256", report.reference_model.sha256 or ""),
        ]
    for summary in report.sets:
        rows.append((f"{summary.name}, SHA-256", f"{summary.sha256}  ({summary.source})"))
    timing = report.timing
    processes = "" if timing.world_size == 1 else f" on {timing.world_size} processes"
    rows += [
        ("method", report.method),
        (
            "time",
            f"{format_duration(timing.seconds)}, of which {format_duration(timing.probe_seconds)} probing "
            f"{format_count(timing.num_tokens)} tokens{processes}",
        ),
        ("made", report.created),
        ("versions", ", ".join(f"{name} {report.versions[name]}" for name in sorted(report.versions))),
        (
            "settings",
            ", ".join(
                f"{name}: {_shown(report.settings[name])}"
                for name in sorted(report.settings)
                if report.settings[name] is not None
            ),
        ),
    ]
    return [(name, value) for name, value in rows if value]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(plain(value))


def _shown_items(
    report: Report, of_set: Mapping[str, Sequence[ItemResult]]
) -> tuple[list[dict[str, Any]], int]:
    """Items as the page has them, and how many of the controls were left out."""
    controls = {summary.name for summary in wording.controls(report)}
    shown: list[dict[str, Any]] = []
    num_left_out = 0
    for name, mine in of_set.items():
        kept = list(mine)
        if name in controls and len(kept) > MOST_CONTROL_ITEMS:
            kept = sorted(kept, key=lambda item: -item.longest_run)[:MOST_CONTROL_ITEMS]
            num_left_out += len(mine) - len(kept)
        shown += [_item_json(item) for item in kept]
    return shown, num_left_out


def _item_json(item: ItemResult) -> dict[str, Any]:
    """An item without what is as usual, which for thousands of items is most of the file."""
    cuts = []
    for cut in item.cuts:
        values = {"ratio": cut.ratio, "mode": cut.mode, **_unusual(cut)}
        if cut.exact and not cut.skipped and item.text[cut.cut :] == cut.written:
            values.pop("written", None)
        cuts.append(values)
    return {**_unusual(item), "cuts": cuts}


def _unusual(value: ItemResult | CutResult) -> dict[str, Any]:
    known = {
        field.name: None if field.default is MISSING else field.default
        for field in fields(value)
        if field.name not in ("ratio", "mode", "cuts")
    }
    return {name: getattr(value, name) for name, usual in known.items() if getattr(value, name) != usual}
