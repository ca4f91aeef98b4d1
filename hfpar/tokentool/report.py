"""What was found, for people."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfpar.config.validate import first_of
from hfpar.tokentool.compare import Comparison, MatrixComparison, Pair
from hfpar.tokentool.json_report import ranges
from hfpar.tokentool.measure import Measured, Model, Token
from hfpar.train.progress import print_summary

if TYPE_CHECKING:
    from hfpar.tokentool.run import Findings

WRITTEN, NAMED = "\u25cf", "\u25cb"
_UNTRAINED, _TEMPLATE, _CHANGED = "bold red", "bold cyan", "bold green"
_WIDTH_OF_FILES = 160
_MOST_NAMED = 8
_REASONS = {
    "rows of zeros": "zeros",
    "copies of other tokens": "copy",
    "rows that aren't finite": "not finite",
}


def print_report(findings: Findings) -> None:
    """Print summaries, tables and what follows from them on stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    for model in findings.models:
        print_summary(_summary(model), f"hfpar tokens: {model.source.name}")
    if findings.comparison is None:
        (model,) = findings.models
        for measured in model.measured:
            console.print(_table(findings, model, measured))
    else:
        print_summary(_match_rows(findings.comparison), "in both")
        for number, matrix in enumerate(findings.comparison.matrices):
            console.print(_comparison_table(findings, matrix, -1 if number else 0))
    if findings.num_left_out:
        console.print(f"{findings.num_left_out:,} more special and added tokens; --all shows them.")
    for line in _legend(findings):
        console.print(line, soft_wrap=True)
    for model in findings.models:
        console.print(_verdict(model), soft_wrap=True)


# One model


def _summary(model: Model) -> list[tuple[str, str]]:
    rows = [("model", model.source.description)]
    for measured in model.measured:
        matrix = measured.matrix
        rows.append(
            (
                matrix.name,
                f"{matrix.num_rows:,} rows of {matrix.width:,} numbers, {measured.dtype}"
                + (", the head's, too" if len(model.measured) == 1 and not model.source.notes else ""),
            )
        )
        rows.append(("  vocabulary", _vocabulary(measured)))
        odd = measured.odd_ordinary()
        if odd:
            named = first_of([f"{model.texts[token]!r}" for token in odd], _MOST_NAMED)
            tokens = (
                "1 ordinary token, by its norm"
                if len(odd) == 1
                else f"{len(odd):,} ordinary tokens, by their norms"
            )
            rows.append(("  untrained", f"{tokens}: {named}"))
        if measured.padding.any():
            rows.append(("  padding", _padding(measured)))
    added = [token for token in model.tokens.values() if token.is_added]
    special = sum(token.is_special for token in added)
    rows.append(("tokens", f"{special:,} special, {len(added) - special:,} more that were added"))
    outside = [_shown(token.text) for token in added if token.id >= model.measured[0].matrix.num_rows]
    if outside:
        rows.append(("without a row", f"{first_of(outside, _MOST_NAMED)}: the model knows no such numbers"))
    written = [_shown(token.text) for token in added if token.template == "written"]
    if not model.source.tokenizer.chat_template:
        rows.append(
            ("chat template", "none; --chat_template chatml, or a file, shows what another would use")
        )
    else:
        rows.append(
            (
                "chat template",
                f"writes {first_of(written, _MOST_NAMED) if written else 'no special or added token'}",
            )
        )
    return [*rows, *(("note", note) for note in model.source.notes)]


def _vocabulary(measured: Measured) -> str:
    norms = measured.ordinary_norms
    if not len(norms):
        count = int(measured.ordinary.sum())
        return f"{count:,} ordinary tokens, whose rows aren't finite" if count else "no ordinary tokens"
    low, median, high = np.quantile(norms, (0, 0.5, 1)).tolist()
    return (
        f"{int(measured.ordinary.sum()):,} ordinary tokens; norms {_norm(low)} to {_norm(high)}, median "
        f"{_norm(median)}, mean {_norm(measured.mean)} +- {_norm(measured.deviation)}"
    )


def _padding(measured: Measured) -> str:
    numbers = np.flatnonzero(measured.padding)
    norms = measured.norms[numbers]
    spans = [f"{first:,} to {last:,}" if last > first else f"{first:,}" for first, last in ranges(numbers)]
    low, median, high = np.quantile(norms, (0, 0.5, 1)).tolist()
    zeros = int((norms == 0).sum())
    return (
        f"{len(numbers):,} rows of no token ({first_of(spans, 3)}); {zeros:,} zeros, "
        f"norms {_norm(low)} to {_norm(high)}, median {_norm(median)}"
    )


def _table(findings: Findings, model: Model, measured: Measured) -> Table:
    is_embedding = measured is model.measured[0]
    with_neighbors = is_embedding and any(model.neighbors.values())
    table = _empty_table(
        measured.matrix.name,
        ["id", "norm", "z", "robust z"],
        ["row", *(["nearest"] if with_neighbors else [])],
    )
    for token in _listed(findings, model):
        cells = _measures(measured, token.id)
        state, style = _state(measured, token.id)
        near = [f"{near.text!r} {near.cosine:.2f}" for near in model.neighbors.get(token.id, [])]
        table.add_row(
            _name(token.text, [token], measured, [token.id]),
            Text(_mark([token]), style=_TEMPLATE),
            Text(", ".join(token.roles)),
            f"{token.id:,}",
            *(Text(cell, style=style) for cell in cells),
            Text(state, style=style),
            *([Text(", ".join(near))] if with_neighbors else []),
        )
    return table


def _listed(findings: Findings, model: Model) -> list[Token]:
    by_text = {token.text: token for token in model.tokens.values()}
    return [by_text[text] for text in findings.listed if text in by_text]


def _measures(measured: Measured, token: int | None) -> list[str]:
    """Norm, z and robust z."""
    if token is None or token >= measured.matrix.num_rows:
        return ["-", "-", "-"]
    values = (measured.z(token), measured.robust_z(token))
    return [_norm(float(measured.norms[token])), *(_z(value) for value in values)]


def _state(measured: Measured, token: int | None) -> tuple[str, str]:
    """What is wrong with a row, and in which style it is shown."""
    if token is None or token >= measured.matrix.num_rows:
        return "none", "dim"
    reason = measured.reasons.get(token)
    return (_REASONS.get(reason, "far off"), _UNTRAINED) if reason else ("trained", "")


# Two models


def _match_rows(comparison: Comparison) -> list[tuple[str, str]]:
    rows = [
        (
            "vocabularies",
            f"{comparison.num_matching:,} tokens by text, of {comparison.num_first:,} and {comparison.num_second:,}; "
            f"{comparison.num_same_id:,} have one id in both",
        )
    ]
    for matrix in comparison.matrices:
        if matrix.median_distance is None or matrix.far_distance is None or matrix.share_changed is None:
            what = "rows of other widths, or no ordinary token in both: no distances"
        elif not matrix.share_changed:
            what = f"none of {matrix.num_sampled:,} ordinary tokens changed"
        else:
            what = (
                f"{matrix.share_changed:.1%} of {matrix.num_sampled:,} ordinary tokens changed; distance "
                f"{matrix.median_distance:.2g} at the median, {matrix.far_distance:.2g} at 99 %"
            )
        rows.append((matrix.name, what))
    return rows


def _comparison_table(findings: Findings, matrix: MatrixComparison, number: int) -> Table:
    names = _short_names(findings)
    columns = [f"{what}\n{name}" for name in names for what in ("norm", "z", "row")]
    table = _empty_table(matrix.name, columns, ["cosine", "distance", "change"])
    pairs = {pair.text: pair for pair in matrix.pairs}
    for text in findings.listed:
        pair = pairs[text]
        ids = (pair.first, pair.second)
        tokens = [token for model in findings.models for token in model.tokens.values() if token.text == text]
        sides = [(model.measured[number], token) for model, token in zip(findings.models, ids, strict=True)]
        states = [_state(measured, token) for measured, token in sides]
        roles = dict.fromkeys(role for token in tokens for role in token.roles)
        table.add_row(
            _name(text, tokens, sides[0][0], [pair.first]),
            Text(_mark(tokens), style=_TEMPLATE),
            Text(", ".join(roles)),
            *(
                Text(cell, style=style)
                for (measured, token), (state, style) in zip(sides, states, strict=True)
                for cell in (*_measures(measured, token)[:2], state)
            ),
            *_pair_cells(pair),
        )
    return table


def _pair_cells(pair: Pair) -> list[Text]:
    style = {"taught": _CHANGED, "untaught": _UNTRAINED, "moved": "green"}.get(pair.change or "", "")
    return [
        Text("-" if pair.cosine is None else f"{pair.cosine:.3f}"),
        Text("-" if pair.distance is None else f"{pair.distance:.2g}"),
        Text(pair.change or "-", style=style),
    ]


def _short_names(findings: Findings) -> list[str]:
    names = [PurePath(model.source.name.rstrip("/")).name[:18] for model in findings.models]
    return names if len(set(names)) == len(names) else ["MODEL", "OTHER"]


# Parts


def _empty_table(title: str, figures: Sequence[str], others: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("token", overflow="fold")
    table.add_column("used", justify="center", no_wrap=True)
    table.add_column("role", no_wrap=True)
    for name in figures:
        table.add_column(name, justify="right", no_wrap=True)
    for name in others:
        table.add_column(name, no_wrap=name != "nearest", overflow="fold")
    return table


def _name(text: str, tokens: Sequence[Token], measured: Measured, ids: Sequence[int | None]) -> Text:
    is_untrained = any(token in measured.reasons for token in ids)
    is_written = any(token.template == "written" for token in tokens)
    return Text(_shown(text), style=_UNTRAINED if is_untrained else _TEMPLATE if is_written else "")


def _shown(text: str) -> str:
    """A token on one line, with nothing in it that a terminal would obey."""
    return text if text.isprintable() and text.strip() == text else repr(text)


def _mark(tokens: Sequence[Token]) -> str:
    uses = {token.template for token in tokens}
    return WRITTEN if "written" in uses else NAMED if "named" in uses else ""


def _legend(findings: Findings) -> list[Text]:
    lines = [
        f"{WRITTEN} the chat template writes it in a conversation   {NAMED} it names it, for tools and the like",
        "z: standard deviations between a row's norm and the vocabulary's mean norm."
        + (
            ""
            if findings.comparison
            else " robust z: the same of the norm's logarithm, by the median and the median deviation; beyond +-5 a "
            "row counts as never trained."
        ),
    ]
    if (
        any(near for model in findings.models for near in model.neighbors.values())
        and not findings.comparison
    ):
        lines.append("nearest: by the cosine between rows from which the vocabulary's mean row is taken.")
    if findings.comparison is not None:
        lines.append(
            "change: taught = never trained in the first, trained in the second; moved = changed more than 99 % of the "
            "vocabulary."
        )
    return [Text(line, style="dim") for line in lines]


def _verdict(model: Model) -> Text:
    untrained = model.untrained
    used = [
        _shown(model.tokens[token].text) for token in untrained if model.tokens[token].template == "written"
    ]
    name = model.source.name
    if used:
        return Text(
            f"{name}: its chat template writes tokens that it was never taught: "
            f"{first_of(used, _MOST_NAMED)}. Train their rows, too: "
            "hfpar does so beside LoRA adapters (train_tokens: auto).",
            style=_UNTRAINED,
        )
    if not untrained:
        return Text(f"{name}: every special and added token was trained.", style=_CHANGED)
    few = first_of([_shown(model.tokens[token].text) for token in untrained], _MOST_NAMED)
    some = (
        "1 special or added token was"
        if len(untrained) == 1
        else f"{len(untrained):,} special and added tokens were"
    )
    has_template = bool(model.source.tokenizer.chat_template)
    return Text(
        f"{name}: {some} never trained: {few}"
        + ("; its chat template writes none of them." if has_template else "."),
        style="yellow",
    )


def _norm(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def _z(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "-"
    return f"{value:+.2f}" if math.isfinite(value) else ("-inf" if value < 0 else "inf")
