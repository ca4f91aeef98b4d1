"""The report of `hfpar data decontaminate`: tables and examples for people, JSON for programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfpar.config.validate import first_of
from hfpar.data.overlap.index import KINDS

if TYPE_CHECKING:
    from hfpar.datatool.decontaminate import Decontamination

_COLORS = {"verbatim": "bold red", "long_run": "bold yellow", "near": "bold cyan"}
_MARK = "black on #ffd54f"
_CONTEXT = 140
"""Characters of a text that are shown on each side of a match."""
_OPEN, _CLOSE = "\u27e6", "\u27e7"


def to_json(result: Decontamination, output: str | None, list_file: str | None) -> dict[str, Any]:
    """The report; docs/data.md says what each key is."""
    return {
        "rows": result.num_rows,
        "rows_with_items": result.num_found,
        "unreadable_rows": dict(result.problems.most_common()),
        "template_runs": result.num_template_runs,
        "benchmarks": [
            {
                "name": benchmark.name,
                "source": benchmark.source,
                "sha256": benchmark.sha256,
                "items": len(benchmark.items),
                "items_found": len(result.items.get(benchmark.name, ())),
                "items_in_templates": [
                    item.item_id for name, item in result.hidden if name == benchmark.name
                ],
                "found": {
                    field: {kind: result.rows[benchmark.name, field, kind] for kind in KINDS}
                    for field in ("question", "solution")
                },
            }
            for benchmark in result.benchmarks
        ],
        "output": output,
        "list": list_file,
    }


def print_report(
    result: Decontamination, output: str | None, list_file: str | None, console: Console | None = None
) -> None:
    """Print what was found: a table, and the first of each kind with both texts."""
    console = console or Console(highlight=False)
    console.print(_table(result))
    for (_, kind), examples in sorted(result.examples.items(), key=lambda entry: KINDS.index(entry[0][1])):
        for example in examples:
            _print_example(console, kind, example)
    share = 100 * result.num_found / max(1, result.num_rows)
    hit = f"{result.num_found:,} of {result.num_rows:,} rows ({share:.2f} %) hold a benchmark's item"
    _print(console, hit, "bold red" if result.num_found else "bold green")
    _print_notes(console, result)
    if output is not None:
        left = result.num_rows - result.num_found - result.problems.total()
        _print(console, f"{left:,} rows without one are in {output}")
    if list_file is not None:
        _print(console, f"All matches with both texts are in {list_file}")


def _table(result: Decontamination) -> Table:
    table = Table(
        title="Benchmark items in the data", title_justify="left", title_style="bold", box=box.ROUNDED
    )
    table.add_column("benchmark", style="cyan")
    table.add_column("items", justify="right")
    table.add_column("found", justify="right")
    for kind in KINDS:
        table.add_column(kind.replace("_", " "), justify="right")
    table.add_column("in solutions", justify="right")
    for benchmark in result.benchmarks:
        name = benchmark.name
        counts = [result.rows[name, "question", kind] for kind in KINDS]
        solutions = sum(result.rows[name, "solution", kind] for kind in KINDS)
        cells = [
            Text(f"{count:,}", _COLORS[kind] if count else "dim")
            for kind, count in zip(KINDS, counts, strict=True)
        ]
        found = len(result.items.get(name, ()))
        table.add_row(
            name,
            f"{len(benchmark.items):,}",
            Text(f"{found:,}", "bold" if found else "dim"),
            *cells,
            f"{solutions:,}",
        )
    return table


def _print_example(console: Console, kind: str, example: dict[str, Any]) -> None:
    number = example.get("line", example.get("row"))
    unit = "line" if "line" in example else "row"
    run = f", {example['num_words']} words in a row" if example["num_words"] else ""
    heading = Text.assemble(
        "\n",
        (kind.replace("_", " "), _COLORS[kind]),
        f" {example['score']:.2f}{run}: {example['file']}, {unit} {number} holds the {example['field']} of ",
        (f"{example['benchmark']} {example['item_id']}", "cyan"),
    )
    console.print(heading, soft_wrap=True)
    for title, key in (("row", "row"), ("item", "item")):
        text = _marked(example[f"{key}_text"], example[f"{key}_span"], console)
        console.print(Text.assemble((f"  {title:<5}", "dim"), text), soft_wrap=True)


def _marked(text: str, span: list[int], console: Console) -> Text:
    """A match and what stands beside it, on one line; in brackets where there are no colours."""
    start, end = span
    before, match, after = text[max(0, start - _CONTEXT) : start], text[start:end], text[end : end + _CONTEXT]
    parts = [_printable(" ".join(part.split())) for part in (before, match, after)]
    gaps = [" " if before[-1:].isspace() else "", " " if after[:1].isspace() else ""]
    if console.color_system is None or console.no_color:
        parts[1] = f"{_OPEN}{parts[1]}{_CLOSE}"
    return Text.assemble(
        "..." if start > _CONTEXT else "",
        parts[0] + gaps[0],
        (parts[1], _MARK),
        gaps[1] + parts[2],
        "..." if end + _CONTEXT < len(text) else "",
    )


def _printable(text: str) -> str:
    """With nothing that a terminal would obey."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\ufffd" for c in text)


def _print_notes(console: Console, result: Decontamination) -> None:
    if result.problems:
        kinds = ", ".join(f"{kind} ({count:,})" for kind, count in result.problems.most_common())
        total = result.problems.total()
        rows = "1 row" if total == 1 else f"{total:,} rows"
        _print(
            console,
            f"{rows} can't be read, and no file has them: {kinds}; first: {result.first_problem}",
            "yellow",
        )
    if result.hidden:
        names = first_of([f"{name} {item.item_id}" for name, item in result.hidden], 5)
        _print(
            console,
            f"Items in a template that stands in most rows, and so not counted in any: {names}",
            "yellow",
        )


def _print(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style), soft_wrap=True)
