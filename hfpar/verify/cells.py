"""What is verified: a table's cells, from what the user asked for. Pure; loads nothing heavy."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from hfpar.config.validate import did_you_mean, names_in
from hfpar.errors import ConfigError

ENGINES = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
ADAPTERS = ("full", "lora", "qlora")
DEFAULT_ADAPTERS = "full,lora"
BATCHINGS = ("padded", "packed")
DEFAULT_LAYOUTS = "dp2"

_LAYOUT = re.compile(r"(?:(?:pp|dp|cp|sp|tp)[1-9][0-9]*)+")
_AXIS = re.compile(r"([a-z]+)([0-9]+)")
_NOT_YET = {"pp": "pipeline parallelism"}

Status = Literal["pass", "refused", "fail"]


@dataclass(frozen=True)
class Cell:
    """One combination to run."""

    engine: str
    layout: str
    adapter: str
    batching: str

    @property
    def world_size(self) -> int:
        """Processes."""
        return math.prod(layout_sizes(self.layout).values())

    def __str__(self) -> str:
        """The row's name, as in progress and messages."""
        return f"{self.engine} {self.layout} {self.adapter} {self.batching}"


@dataclass(frozen=True)
class Errors:
    """How far a cell is from one process. Zero is equal; infinite is not comparable (NaN, or missing)."""

    loss: float = 0.0
    """Relative."""
    grad_norm: float = 0.0
    """Relative."""
    gradient: float = 0.0
    """Worst parameter's, relative."""
    parameter: float = 0.0
    """Worst parameter's after a step, relative."""
    worst: str | None = None
    """The parameter with the largest error of the two."""

    @property
    def largest(self) -> float:
        """What the tolerance is held against."""
        return max(self.loss, self.grad_norm, self.gradient, self.parameter)

    def merge(self, other: Errors) -> Errors:
        """The worse of two ranks, or of two steps, figure by figure."""
        mine, theirs = max(self.gradient, self.parameter), max(other.gradient, other.parameter)
        return Errors(
            loss=max(self.loss, other.loss),
            grad_norm=max(self.grad_norm, other.grad_norm),
            gradient=max(self.gradient, other.gradient),
            parameter=max(self.parameter, other.parameter),
            worst=other.worst if self.worst is None or theirs > mine else self.worst,
        )


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    cell: Cell
    status: Status
    errors: Errors | None = None
    """None: it never got to comparing."""
    reason: str | None = None
    """One line, unless it passed."""
    details: str = field(default="", repr=False)
    """A crashed process's traceback and last output."""


def layout_sizes(layout: str) -> dict[str, int]:
    """`dp2cp4` -> {"dp": 2, "cp": 4}, in any order; axes that aren't named have one rank."""
    return {axis: int(size) for axis, size in _AXIS.findall(layout)}


def layout_refusal(layout: str) -> str | None:
    """Why hfpar doesn't run this layout, or None."""
    for axis, size in layout_sizes(layout).items():
        if size > 1 and axis in _NOT_YET:
            return f"{axis}_size {size}: {_NOT_YET[axis]} isn't supported yet; use dp, cp, sp and tp, such as dp2tp2"
    return None


def make_cells(engines: str, layouts: str, adapters: str, batching: str) -> list[Cell]:
    """Every combination of four comma-separated lists.

    Raises:
        ConfigError: a name that doesn't exist.
    """
    chosen = (
        _choose("layouts", layouts, None),
        _choose("engines", engines, ENGINES),
        _choose("adapters", adapters, ADAPTERS),
        _choose("batching", batching, BATCHINGS),
    )
    return [
        Cell(engine, layout, adapter, batch) for layout, engine, adapter, batch in itertools.product(*chosen)
    ]


def _choose(option: str, text: str, allowed: Sequence[str] | None) -> list[str]:
    names = list(dict.fromkeys(names_in(text)))
    if not names:
        raise ConfigError(
            f"--{option}: names nothing; allowed: {', '.join(allowed or ['dp2', 'sp4', 'dp2cp2', '...'])}"
        )
    for name in names:
        if allowed is None:
            axes = [axis for axis, _ in _AXIS.findall(name)]
            if not _LAYOUT.fullmatch(name) or len(set(axes)) != len(axes):
                raise ConfigError(
                    f"--{option}: {name} is no layout; allowed: dp, cp, sp and tp, each with its number of ranks, such "
                    "as dp2 or tp2sp2"
                )
        elif name not in allowed:
            near = did_you_mean(name, list(allowed))
            raise ConfigError(f"--{option}: {name}; allowed: {', '.join(allowed)}{near}")
    return names
