"""What an answer can be once it has been read."""

from __future__ import annotations

from dataclasses import dataclass

from hfpar.audit.answers.algebra import Expression


@dataclass(frozen=True)
class Number:
    """A number or an expression with variables, and the text it was read from."""

    expression: Expression
    source: str
    is_percent: bool = False


@dataclass(frozen=True)
class Sequence:
    """An ordered pair, tuple or interval, with its brackets."""

    brackets: str
    items: tuple[Value, ...]


@dataclass(frozen=True)
class Collection:
    r"""A set, a list of solutions, both signs of a `\pm`: the order doesn't count."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Union:
    """Of intervals and sets."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class Matrix:
    """Rows of values."""

    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Ratio:
    """`a:b`, a time of day."""

    items: tuple[Value, ...]


@dataclass(frozen=True)
class BaseNumber:
    """Digits in a base that is written beside them."""

    digits: str
    base: int


@dataclass(frozen=True)
class Words:
    """A name, a direction, a yes."""

    text: str


@dataclass(frozen=True)
class Labelled:
    r"""`x = 5`, `f(x) = 2x`, `x \in [0, 1]`: a value and whose it is."""

    label: str
    value: Value
    relation: Relation | None = None
    """The whole of it, where both sides are expressions."""


@dataclass(frozen=True)
class Relation:
    """`expression = 0`, `expression < 0`, ..."""

    sign: str
    expression: Expression


Value = Number | Sequence | Collection | Union | Matrix | Ratio | BaseNumber | Words | Labelled | Relation


def collect(items: list[Value]) -> Value:
    """A set or a list of these; one alone is itself, and a label that they share is the collection's."""
    if len(items) == 1:
        return items[0]
    labels = [item.label if isinstance(item, Labelled) else None for item in items]
    if labels[0] is not None and set(labels[1:]) in ({labels[0]}, {None}):
        return Labelled(labels[0], Collection(tuple(without_label(item) for item in items)))
    return Collection(tuple(items))


def without_label(value: Value) -> Value:
    """The value alone."""
    return value.value if isinstance(value, Labelled) else value
