"""The support table of the docs: written from what a run of the tests gave, and compared with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.families import FAMILIES, REFUSED, Family  # noqa: TID251

DOCS = Path(__file__).parents[1] / "docs" / "families.md"
REWRITE = "HFPAR_WRITE_DOCS=1 pytest tests/distributed/test_sequence_families.py"

COLUMNS: dict[str, dict[str, int]] = {
    "sp 2": {"sp_size": 2},
    "sp 4": {"sp_size": 4},
    "cp 2": {"cp_size": 2},
    "cp 2 x sp 2": {"cp_size": 2, "sp_size": 2},
}
"""Titles and the sizes of their layouts. Another kind of parallelism is another column."""

REFUSAL_COLUMNS = ("alone", "sharing a stream")

INTRODUCTION = f"""# Model families

Which families hfpar trains, and in which layouts. {{num_families}} are computed right; {{num_refused}} more were tried
and are refused. Of a family that isn't listed, `hfpar verify --model FOLDER --layouts sp2,cp2` tells the same, and
training itself checks a tiny copy of the model before weights load: it either comes out right, or is refused by
name.

Each row is one step on a shrunk copy that keeps the family's features, in fp32, on four processes that share it as
the column says (a group of two: with two such groups side by side). Documents are longer than windows, are cut
between ranks and begin in the middle of a rank's tokens. A number is the error of the gradient that is furthest
off, of all parameters: the norm of its difference from one plain process, which runs one document at a time
without any of hfpar's parallel code, over that gradient's norm. Rounding gives about 1e-6; 1e-5 fails the test.

This page is written by the test: `{REWRITE}`.

## Trained

"""

REFUSALS = """
## Refused

Before weights load, with these reasons. *Alone*: one process, or data parallelism. Most families here carry a
state from token to token: packed documents would run into each other, and ranks can't share a stream of them.

"""

_NUMBER = re.compile(r"\d(\.\d)?e[-+]?\d+")
_DETAIL = re.compile(
    r" \(gradients of a tiny copy differ by [^)]*\)|; hfpar (can't train it|only trains what .*)$"
)


@dataclass(frozen=True)
class Cell:
    """What a family gave in a layout."""

    error: float | None = None
    """Of the worst gradient."""
    refusal: str | None = None
    """The message of the `ConfigError`."""

    @property
    def text(self) -> str:
        """As it stands in the table."""
        if self.refusal is None:
            assert self.error is not None
            return f"{self.error:.0e}".replace("e-0", "e-")
        reason = _DETAIL.sub("", self.refusal).removeprefix("model_name_or_path: ").replace("|", "/")
        return f"refused: {reason}"


Results = Mapping[str, Mapping[str, Cell]]
"""[family][column]"""


def render(results: Results) -> str:
    """The whole page."""
    trained = [_row(FAMILIES[name], results[name], tuple(COLUMNS)) for name in FAMILIES]
    refused = [_row(REFUSED[name], results[name], REFUSAL_COLUMNS) for name in REFUSED]
    introduction = INTRODUCTION.format(num_families=len(trained), num_refused=len(refused))
    return introduction + _table(tuple(COLUMNS), trained) + REFUSALS + _table(REFUSAL_COLUMNS, refused)


def _row(family: Family, cells: Mapping[str, Cell], columns: tuple[str, ...]) -> list[str]:
    return [
        family.title,
        f"`{family.model_type}`",
        family.special,
        *(cells[column].text for column in columns),
    ]


def _table(columns: tuple[str, ...], rows: list[list[str]]) -> str:
    header = ["Family", "`model_type`", "What is special", *columns]
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def verdict(text: str) -> str:
    """A cell without what differs from run to run."""
    return _NUMBER.sub("equal", text) if _NUMBER.fullmatch(text) else text


def read(page: str) -> dict[str, dict[str, str]]:
    """[title][column] -> verdict, of all tables of a page."""
    found: dict[str, dict[str, str]] = {}
    header: list[str] = []
    for line in page.splitlines():
        if not line.startswith("|"):
            header = []
            continue
        values = [value.strip() for value in line.strip("|").split("|")]
        if not header:
            header = values
        elif set(values) != {"---"}:
            found[values[0]] = dict(zip(header[1:], map(verdict, values[1:]), strict=True))
    return found
