"""The support table of the docs: written from what a run of the tests gave, and compared with one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families import FAMILIES, REFUSED, Family  # noqa: TID251

DOCS = Path(__file__).parents[1] / "docs" / "families.md"
REWRITE = "HFPAR_WRITE_DOCS=1 pytest tests/distributed/test_families.py"

COLUMNS: dict[str, dict[str, Any]] = {
    "sp 2": {"sp_size": 2},
    "sp 4": {"sp_size": 4},
    "cp 2": {"cp_size": 2},
    "cp 2 x sp 2": {"cp_size": 2, "sp_size": 2},
    "tp 2": {"tp_size": 2},
    "tp 4": {"tp_size": 4},
    "tp 2 x sp 2": {"tp_size": 2, "sp_size": 2},
    "tp 2 and the tokens": {"tp_size": 2, "tp_sequence": True},
}
"""Titles and the sizes of their layouts. Another kind of parallelism is another column."""

REFUSAL_COLUMNS = ("alone", "sharing a stream")

INTRODUCTION = f"""# Model families

Which families hfpar trains, and in which layouts. {{num_families}} are computed right; {{num_refused}} more were tried
and are refused. Of a family that isn't listed, `hfpar verify --model_name_or_path FOLDER --layouts sp2,cp2,tp2` tells
the same, and training itself checks a tiny copy of the model before weights load: it either comes out right, or is
refused by name.

Each row is one step on a shrunk copy that keeps the family's features, in fp32, on four processes that share it as
the column says (a group of two: with two such groups side by side). Documents are longer than windows, are cut
between ranks and begin in the middle of a rank's tokens. *tp 2 and the tokens* is `tp_sequence`. A number is the
error of the gradient that is furthest off, of all parameters: the norm of its difference from one plain process,
which runs one document at a time without any of hfpar's parallel code, over that gradient's norm. Rounding gives
about 1e-6; 1e-5 fails the test.

This page is written by the test: `{REWRITE}`.

## Trained

"""

REFUSALS = """
## Refused

Before weights load, in one line that names the model and the reason given here. *Alone*: in one process, or with data
parallelism. Most of these families carry a state from token to token: packed documents would run into each other, and
a rank that shares a stream would lack the state of the tokens before its own. That is refused by the config alone,
whatever keeps packed documents apart on some device.

"""

_NUMBER = re.compile(r"\d(\.\d)?e[-+]?\d+")
_DETAIL = re.compile(
    r"^model_name_or_path: |^cp_size and sp_size: |"
    r" \(gradients of a tiny copy differ by [^)]*\)|"
    r"; hfpar (can't train it|only trains what .*)$|, so ranks can't share its streams; .*$"
)
_SUBJECT = re.compile(r"^[a-z0-9_]+ (?=[a-z]+('t)? )")
"""The model type, which the row has already."""


@dataclass(frozen=True)
class Cell:
    """What a family gave in a layout."""

    error: float | None = None
    """Of the worst gradient."""
    refusal: str | None = None
    """The message of the `ConfigError`."""

    @property
    def text(self) -> str:
        """As it stands in the table of what is trained."""
        if self.refusal is None:
            assert self.error is not None
            return f"{self.error:.0e}".replace("e-0", "e-")
        return f"refused: {_DETAIL.sub('', self.refusal).partition('; ')[0]}".replace("|", "/")

    @property
    def reason(self) -> str:
        """As it stands in the table of what is refused."""
        assert self.refusal is not None
        return _SUBJECT.sub("", _DETAIL.sub("", self.refusal)).replace("|", "/")


Results = Mapping[str, Mapping[str, Cell]]
"""[family][column]"""


def render(results: Results) -> str:
    """The whole page."""
    trained = [[*_head(family), *row(name, results[name]).values()] for name, family in FAMILIES.items()]
    refused = [[*_head(family), *row(name, results[name]).values()] for name, family in REFUSED.items()]
    introduction = INTRODUCTION.format(num_families=len(trained), num_refused=len(refused))
    return introduction + _table(tuple(COLUMNS), trained) + REFUSALS + _table(REFUSAL_COLUMNS, refused)


def _head(family: Family) -> list[str]:
    return [family.title, f"`{family.model_type}`", family.special]


def row(name: str, cells: Mapping[str, Cell]) -> dict[str, str]:
    """The text of each cell of a family."""
    return {column: cell.text if name in FAMILIES else cell.reason for column, cell in cells.items()}


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
