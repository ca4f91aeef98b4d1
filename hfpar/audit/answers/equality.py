"""When two answers are the same: exact rules first, numbers only to tell apart, the symbolic step only for the rest."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from hfpar.audit.answers import algebra
from hfpar.audit.answers.latex import as_latex, strip_words_wrapper
from hfpar.audit.answers.parse import Parsed, parse
from hfpar.audit.answers.values import (
    BaseNumber,
    Collection,
    Labelled,
    Matrix,
    Number,
    Ratio,
    Relation,
    Sequence,
    Union,
    Value,
    Words,
)

MAX_UNDECIDED = 4
"""Pairs of parts that one comparison hands to the symbolic step."""

Decide = Callable[[str, str], bool]
"""Whether two expressions in LaTeX are equal, by other means; not decided is False."""


def math_equal(gold: str, answer: str, decide: Decide | None = None) -> bool:
    """Whether an answer in LaTeX or plain text equals the gold one.

    Args:
        gold: the reference answer.
        answer: what the model answered.
        decide: asked about two expressions that hfpar's rules can neither equate nor tell apart.

    Returns:
        True only where the texts are equal after normalisation, or the rules (or `decide`) say that the values are.
    """
    left, right = parse(gold), parse(answer)
    if not left.key or not right.key:
        return False
    if left.key == right.key:
        return True
    if _is_choice(left) and (found := re.match(r"\(([A-J])\)", strip_words_wrapper(right.key))):
        return found[1] == left.key.strip("()")
    comparison = _Comparison(decide)
    pairs = [(left.value, right.value)]
    if isinstance(right.value, Collection) and left.listed:
        pairs.append((left.listed, right.value))
    if isinstance(left.value, Collection) and right.listed:
        pairs.append((left.value, right.listed))
    return any(one is not None and other is not None and comparison.same(one, other) for one, other in pairs)


def _is_choice(gold: Parsed) -> bool:
    return re.fullmatch(r"\(?[A-J]\)?", gold.key) is not None


class _Comparison:
    """One comparison, with what it may still ask."""

    def __init__(self, decide: Decide | None) -> None:
        self.decide = decide
        self.num_left = MAX_UNDECIDED

    def same(self, left: Value, right: Value) -> bool:
        """Whether two values are equal."""
        if isinstance(left, Labelled) or isinstance(right, Labelled):
            return self._same_labelled(left, right)
        if isinstance(left, Number) and isinstance(right, Number):
            return self._same_number(left, right)
        if isinstance(left, Sequence) and isinstance(right, Sequence):
            # Of two, brackets tell whether the ends of an interval belong to it; longer ones are vectors.
            alike = left.brackets == right.brackets or len(left.items) > 2
            return alike and self._in_order(left.items, right.items)
        if isinstance(left, Collection) and isinstance(right, Collection):
            return self._in_any_order(left.items, right.items)
        if isinstance(left, Union) and isinstance(right, Union):
            return self._in_any_order(left.items, right.items)
        if isinstance(left, Matrix) and isinstance(right, Matrix):
            return len(left.rows) == len(right.rows) and all(
                self._in_order(*rows) for rows in zip(left.rows, right.rows, strict=True)
            )
        if isinstance(left, Ratio) and isinstance(right, Ratio):
            return self._in_order(left.items, right.items)
        if isinstance(left, Relation) and isinstance(right, Relation):
            return _same_relation(left, right)
        if isinstance(left, BaseNumber | Words):
            return left == right
        return False

    def _same_labelled(self, left: Value, right: Value) -> bool:
        relations = [value.relation if isinstance(value, Labelled) else value for value in (left, right)]
        one, other = relations
        if isinstance(one, Relation) and isinstance(other, Relation) and _same_relation(one, other):
            return True
        if isinstance(left, Labelled) and isinstance(right, Labelled):
            return left.label == right.label and self.same(left.value, right.value)
        if isinstance(left, Labelled):
            return self.same(left.value, right)
        return isinstance(right, Labelled) and self.same(left, right.value)

    def _same_number(self, left: Number, right: Number) -> bool:
        if left.is_percent != right.is_percent:
            percent, other = (left, right) if left.is_percent else (right, left)
            share = algebra.divide(percent.expression, algebra.number(100))
            if algebra.equal(share, other.expression):
                return True
        one, other_one = left.expression, right.expression
        try:
            if algebra.equal(one, other_one):
                return True
            if not one.is_opaque and not other_one.is_opaque:
                return False
        except algebra.NotComputable:
            pass
        if self.decide is None or self.num_left == 0 or not left.source or not right.source:
            return False
        if not algebra.agree(one, other_one):
            return False
        self.num_left -= 1
        return self.decide(as_latex(left.source), as_latex(right.source))

    def _in_order(self, left: tuple[Value, ...], right: tuple[Value, ...]) -> bool:
        return len(left) == len(right) and all(
            self.same(one, other) for one, other in zip(left, right, strict=True)
        )

    def _in_any_order(self, left: tuple[Value, ...], right: tuple[Value, ...]) -> bool:
        if len(left) != len(right):
            return False
        rest = list(right)
        for one in left:
            match = next((place for place, other in enumerate(rest) if self.same(one, other)), None)
            if match is None:
                return False
            del rest[match]
        return True


def _same_relation(left: Relation, right: Relation) -> bool:
    factor = algebra.proportional(left.expression, right.expression)
    return left.sign == right.sign and factor is not None and (left.sign in ("=", "!=") or factor > 0)


# Numbers of word problems

MAX_NUMBER_LENGTH = 200
_NUMBER = re.compile(r"([+-]?)(?:(?:([0-9]+)\s+)?([0-9]+)\s*/\s*([0-9]+)|([0-9]*\.?[0-9]+))")


def numbers_equal(gold: str, answer: str) -> bool:
    """Whether two plain numbers are one: `1080` and `1,080`, `18` and `18.00`, `1/2` and `0.5`."""
    left, right = as_number(gold), as_number(answer)
    return left is not None and left == right


def as_number(text: str) -> Fraction | None:
    """The number of a text that holds nothing else (commas, a currency, a percent sign and a final period aside)."""
    if len(text) > MAX_NUMBER_LENGTH:
        return None
    found = _NUMBER.fullmatch(re.sub(r"[,$%£€]", "", text).strip().rstrip("."))
    if not found:
        return None
    sign, whole, above, below, plain = found.groups()
    if plain is not None:
        value = Fraction(plain)
    elif int(below) == 0:
        return None
    else:
        value = int(whole or 0) + Fraction(int(above), int(below))
    return -value if sign == "-" else value
