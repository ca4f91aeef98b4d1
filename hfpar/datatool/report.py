"""The report of `hfpar data check`: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfpar.data.reading.rows import Place
from hfpar.datatool.check import CheckResult
from hfpar.datatool.duplicates import Repeats
from hfpar.datatool.gather import MOST_PLACES, DataFacts, SourceFacts
from hfpar.train.progress import print_summary

QUANTILES = {"min": 0, "p1": 1, "p5": 5, "p25": 25, "p50": 50, "p75": 75, "p95": 95, "p99": 99, "max": 100}
"""In percent."""
_KEPT = (95, 99, 100)
_OVERFLOW_COUNTS = ("too long", "truncated", "split", "pieces", "without label", "pieces without label")
_WIDTH_OF_FILES = 160


def quantiles(values: np.ndarray) -> dict[str, int | float] | None:
    """Quantiles, each one of the values, and the mean; None of nothing."""
    if not len(values):
        return None
    shares = np.array(list(QUANTILES.values())) / 100
    found = np.quantile(values, shares, method="inverted_cdf").tolist()
    return {**dict(zip(QUANTILES, map(int, found), strict=True)), "mean": round(float(values.mean()), 2)}


# JSON


def to_json(result: CheckResult) -> dict[str, Any]:
    """The report; docs/data.md says what each key is."""
    config = result.config
    return {
        "dataset": _data_json(result, result.dataset),
        "eval_dataset": None if result.eval_dataset is None else _data_json(result, result.eval_dataset),
        "rows_in_both": None if result.eval_dataset is None else _repeats_json(result.shared),
        "batches": None if result.batches is None else asdict(result.batches),
        "refusals": result.refusals,
        "model_name_or_path": config.model_name_or_path,
        "exit_code": result.exit_code,
    }


def _data_json(result: CheckResult, facts: DataFacts) -> dict[str, Any]:
    report = facts.report
    same, other = facts.digests.repeats()
    tokens = _tokens_json(result, facts) if facts.has_tokens else dict.fromkeys(_TOKEN_KEYS)
    return {
        "rows": report.num_rows,
        "bad_rows": report.num_bad_rows,
        "formats": dict(facts.formats.most_common()),
        "conversations": len(facts.turns.values),
        "roles": dict(facts.roles.most_common()),
        "turns_per_conversation": quantiles(facts.turns.values),
        **tokens,
        "problems": {
            "kinds": dict(report.problems.most_common()),
            "rows": [
                {"kind": problem.kind, **_place_json(problem.place), "reason": problem.reason}
                for problem in facts.problems
            ],
        },
        "duplicates": {"rows": _repeats_json(same), "prompts_answered_otherwise": _repeats_json(other)},
        "benchmark_items_in_all_rows": report.hidden_items,
        "sources": [_source_json(source, facts.has_tokens) for source in facts.sources],
    }


_TOKEN_KEYS = (
    "samples",
    "tokens",
    "label_tokens",
    "tokens_per_sample",
    "label_tokens_per_sample",
    "overflow",
    "notes",
)


def _tokens_json(result: CheckResult, facts: DataFacts) -> dict[str, Any]:
    report, whole = facts.report, facts.whole_lengths.values
    values = (
        report.num_samples,
        report.num_tokens,
        report.num_label_tokens,
        quantiles(whole),
        quantiles(facts.whole_label_lengths.values),
        {
            "max_length": result.config.max_length,
            "on_overflow": result.config.on_overflow,
            "longer": int((whole > result.config.max_length).sum()),
            "max_length_that_keeps": {str(share): length for share, length in _that_keep(whole).items()},
        },
        {
            kind: {"count": count, "places": [_place_json(place) for place in facts.noted_places[kind]]}
            for kind, count in report.counts.most_common()
        },
    )
    return dict(zip(_TOKEN_KEYS, values, strict=True))


def _source_json(source: SourceFacts, has_tokens: bool) -> dict[str, Any]:
    report = source.report
    return {
        "path": source.path,
        "weight": source.weight,
        "rows": report.num_rows,
        "bad_rows": report.num_bad_rows,
        "samples": report.num_samples if has_tokens else None,
        "tokens": report.num_tokens if has_tokens else None,
        "label_tokens": report.num_label_tokens if has_tokens else None,
    }


def _place_json(place: Place) -> dict[str, Any]:
    return {"file": place.path, "unit": place.unit, "number": place.number}


def _repeats_json(repeats: Repeats) -> dict[str, Any]:
    pairs = [{**_place_json(place), "earlier": _place_json(earlier)} for place, earlier in repeats.pairs]
    return {"count": repeats.count, "pairs": pairs}


def _that_keep(lengths: np.ndarray) -> dict[int, int]:
    """The smallest `max_length` that keeps so many percent of the samples whole."""
    if not len(lengths):
        return {}
    found = np.quantile(lengths, np.array(_KEPT) / 100, method="inverted_cdf").tolist()
    return dict(zip(_KEPT, map(int, found), strict=True))


# For people


def print_report(result: CheckResult) -> None:
    """Print tables and lists on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    for facts in result.data_sets:
        _print_data(console, result, facts)
    _print_lists(
        console,
        "in both",
        [("rows of eval_dataset that dataset has, too", result.shared.count, _pairs(result.shared))],
    )
    if result.batches is not None:
        print_summary(_batch_rows(result), "batches")
    elif result.config.streaming:
        steps = (
            f"{result.config.max_steps:,} (max_steps), in windows of {result.config.streaming_window:,} rows"
        )
        print_summary([("steps", steps)], "batches")
    elif not result.dataset.has_tokens:
        console.print(
            "Without --model_name_or_path there are no tokens, lengths, labels and batches to report."
        )
    for refusal in result.refusals:
        console.print(Text(f"training would stop: {refusal}", style="bold red"), soft_wrap=True)


def _print_data(console: Console, result: CheckResult, facts: DataFacts) -> None:
    title = f"{facts.key}: {', '.join(source.path for source in facts.sources)}"
    print_summary(_summary_rows(result, facts), title)
    if len(facts.sources) > 1:
        console.print(_source_table(facts))
    table = _quantile_table(facts)
    if table.row_count:
        console.print(table)
    problems = [
        (kind, count, [str(problem) for problem in facts.problems if problem.kind == kind])
        for kind, count in facts.report.problems.most_common()
    ]
    notes = [
        (kind, facts.report.counts[kind], [str(place) for place in places])
        for kind, places in facts.noted_places.items()
    ]
    hidden = facts.report.hidden_items
    notes.append(
        ("benchmark items in what most rows have in common, such as a system prompt", len(hidden), hidden)
    )
    same, other = facts.digests.repeats()
    duplicates = [
        ("rows that say what an earlier row says", same.count, _pairs(same)),
        ("rows that answer an earlier row's prompt otherwise", other.count, _pairs(other)),
    ]
    _print_lists(console, "problems", problems, style="bold red")
    _print_lists(console, "notes", notes)
    _print_lists(console, "duplicates", duplicates)


def _pairs(repeats: Repeats) -> list[str]:
    return [f"{place} = {earlier}" for place, earlier in repeats.pairs]


def _print_lists(
    console: Console, title: str, lists: Sequence[tuple[str, int, list[str]]], style: str = "bold"
) -> None:
    """Print the lists that aren't empty: for each what it is of, how many there are, and the first few."""
    lists = [(name, count, lines[:MOST_PLACES]) for name, count, lines in lists if count]
    if lists:
        console.print(Text(title, style=style))
    for name, count, lines in lists:
        console.print(Text(f"  {count:,} {name}"), soft_wrap=True)
        more = [f"and {count - len(lines):,} more"] if count > len(lines) else []
        for line in lines + more:
            console.print(Text(f"    {line}"), soft_wrap=True)


def _summary_rows(result: CheckResult, facts: DataFacts) -> list[tuple[str, str]]:
    report = facts.report
    rows = [("rows", f"{report.num_rows:,}, of them {report.num_bad_rows:,} that can't be used")]
    rows.append(("formats", _counts(facts.formats)))
    if facts.roles:
        rows.append(("roles", _counts(facts.roles)))
    if not facts.has_tokens:
        return rows
    whole = facts.whole_lengths.values
    dropped = [f"{report.counts[kind]:,} {kind}" for kind in _OVERFLOW_COUNTS if report.counts[kind]]
    rows.append(("samples", ", ".join([f"{report.num_samples:,}", *dropped])))
    share = report.num_label_tokens / report.num_tokens if report.num_tokens else 0.0
    rows.append(
        ("tokens", f"{report.num_tokens:,}, of them {report.num_label_tokens:,} labels ({share:.1%})")
    )
    config = result.config
    longer = int((whole > config.max_length).sum())
    rows.append(
        ("too long", f"{longer:,} over {config.max_length:,} tokens; on_overflow {config.on_overflow}")
    )
    if len(whole):
        keep = ", ".join(f"{length:,} for {share} %" for share, length in _that_keep(whole).items())
        rows.append(("max_length", f"{keep} of the samples"))
    return rows


def _counts(counts: Mapping[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered) or "none"


def _source_table(facts: DataFacts) -> Table:
    table = _table("source", "weight", "rows", "bad rows", "samples", "tokens", "label tokens")
    for source in facts.sources:
        values = _source_json(source, facts.has_tokens)
        figures = ["-" if value is None else f"{value:,}" for value in list(values.values())[1:]]
        table.add_row(Text(source.path), *figures)
    return table


def _quantile_table(facts: DataFacts) -> Table:
    names = [f"{share} %" if 0 < share < 100 else name for name, share in QUANTILES.items()]
    table = _table("", *names, "mean")
    rows = (
        ("tokens of a sample", facts.whole_lengths.values),
        ("label tokens of a sample", facts.whole_label_lengths.values),
        ("assistant's turns of a conversation", facts.turns.values),
    )
    for name, values in rows:
        found = quantiles(values)
        if found is not None:
            *figures, mean = found.values()
            table.add_row(name, *(f"{figure:,}" for figure in figures), f"{mean:,.1f}")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _batch_rows(result: CheckResult) -> list[tuple[str, str]]:
    batches = result.batches
    assert batches is not None
    samples = f"{batches.num_samples:,} an epoch"
    if batches.num_held_out:
        samples += f", {batches.num_held_out:,} held out (eval_fraction {result.config.eval_fraction:g})"
    sizes = f"x {batches.gradient_accumulation_steps} x {batches.dp_size} ranks"
    if batches.max_tokens_per_batch is not None:
        rows = [
            (
                "packs",
                f"{batches.num_packs:,} of {batches.max_tokens_per_batch:,} tokens, {batches.fill:.2%} full",
            ),
            ("batch", f"1 pack {sizes}"),
        ]
    else:
        rows = [
            ("batch", f"{batches.per_device_train_batch_size} samples {sizes}"),
            ("padding", f"{1 - batches.fill:.1%} of padded batches, taken out before the model"),
        ]
    unit = f"num_train_epochs {batches.num_train_epochs:g}"
    if result.config.max_steps > 0:
        unit = f"max_steps {result.config.max_steps}"
    steps = f"{batches.total_steps:,} ({batches.steps_per_epoch:,} an epoch, {unit})"
    return [("samples", samples), *rows, ("steps", steps)]
