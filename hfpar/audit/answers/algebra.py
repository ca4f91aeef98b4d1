"""Exact arithmetic for answers: quotients of sums of products of rationals, roots, constants, variables and functions.

Two expressions without functions or nested roots are equal if and only if their forms here are: powers of distinct
primes with exponents in [0, 1) are linearly independent over the rationals, and pi, e and variables count as free.
Everything is bounded in size, so that no input takes long.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

MAX_TERMS = 120
MAX_BITS = 8_000
MAX_EXPONENT = 24
"""Largest power of a sum that is expanded."""
MAX_TRIAL_DIVISOR = 2_000
AGREE_WITHIN = 1e-9
SMALLEST = 1e-200

INVERSES = {"cot": "tan", "sec": "cos", "csc": "sin"}
NAMES = {"arcsin": "asin", "arccos": "acos", "arctan": "atan", "ln": "log"}

Monomial = tuple[tuple["Atom", Fraction], ...]
Terms = dict[Monomial, Fraction]


class NotComputable(ValueError):
    """Too large, or undefined."""


@dataclass(frozen=True, order=True)
class Atom:
    """What has no simpler form: a prime under a root, a constant, a variable, a function's value, a sum's root."""

    name: str
    function: str | None = field(default=None, compare=False)
    arguments: tuple[Expression, ...] = field(default=(), compare=False)
    prime: int = field(default=0, compare=False)

    @property
    def is_opaque(self) -> bool:
        """Whether two forms of one value may hold different ones of these."""
        return self.function is not None


I_UNIT = Atom("i")
PI = Atom("pi")
E = Atom("e")
INFINITY = Atom("infty")
HALF = Fraction(1, 2)


@dataclass(frozen=True)
class Expression:
    """A quotient of two sums; the divisor is 1 where it is a single product."""

    terms: Terms
    divisor: Terms

    @property
    def rational(self) -> Fraction | None:
        """Its value where that is a rational number."""
        if self.divisor != _ONE:
            return None
        if not self.terms:
            return Fraction(0)
        return self.terms.get(()) if len(self.terms) == 1 else None

    @property
    def atoms(self) -> set[Atom]:
        """Every atom of both sums, not those within functions."""
        return {atom for sums in (self.terms, self.divisor) for product in sums for atom, _ in product}

    @property
    def is_opaque(self) -> bool:
        """Whether different forms may still be one value."""
        return any(atom.is_opaque for atom in self.atoms)

    @property
    def key(self) -> str:
        """Equal for equal forms."""
        return f"{_sum_key(self.terms)}//{_sum_key(self.divisor)}"


_ZERO = Fraction(0)
_ONE: Terms = {(): Fraction(1)}


def _sum_key(sums: Mapping[Monomial, Fraction]) -> str:
    parts = [f"{value}*{[(atom.name, str(power)) for atom, power in key]}" for key, value in sums.items()]
    return "+".join(sorted(parts))


def number(value: int | Fraction) -> Expression:
    """A rational number."""
    value = Fraction(value)
    return Expression({(): value} if value else {}, _ONE)


def symbol(atom: Atom) -> Expression:
    """A constant or a variable."""
    return Expression({((atom, Fraction(1)),): Fraction(1)}, _ONE)


def call(function: str, *arguments: Expression) -> Expression:
    """A function's value, unevaluated."""
    name = f"{function}({';'.join(argument.key for argument in arguments)})"
    if len(name) > 5_000:
        raise NotComputable("too deep")
    return symbol(Atom(name, function, arguments))


def add(left: Expression, right: Expression) -> Expression:
    """The sum."""
    if left.divisor == right.divisor:
        return _expression(_add(left.terms, right.terms), left.divisor)
    over = _multiply(left.divisor, right.divisor)
    return _expression(_add(_multiply(left.terms, right.divisor), _multiply(right.terms, left.divisor)), over)


def negate(value: Expression) -> Expression:
    """The value with the other sign."""
    return Expression({key: -factor for key, factor in value.terms.items()}, value.divisor)


def multiply(left: Expression, right: Expression) -> Expression:
    """The product."""
    return _expression(_multiply(left.terms, right.terms), _multiply(left.divisor, right.divisor))


def divide(left: Expression, right: Expression) -> Expression:
    """The quotient."""
    if not right.terms:
        raise NotComputable("division by zero")
    return _expression(_multiply(left.terms, right.divisor), _multiply(left.divisor, right.terms))


def power(base: Expression, exponent: Expression) -> Expression:
    """The base to the exponent."""
    value = exponent.rational
    if value is not None:
        return _rational_power(base, value)
    constant = exponent.terms.get((), Fraction(0)) if exponent.divisor == _ONE else Fraction(0)
    if constant.denominator != 1 or not base.terms:
        return call("pow", base, exponent)
    rest = add(exponent, number(-constant))
    return multiply(_rational_power(base, constant), call("pow", base, rest))


def equal(left: Expression, right: Expression) -> bool:
    """Whether the forms show that the values are equal."""
    if left.divisor == right.divisor:
        return left.terms == right.terms
    return _multiply(left.terms, right.divisor) == _multiply(right.terms, left.divisor)


def proportional(left: Expression, right: Expression) -> Fraction | None:
    """The rational number that `right` must be multiplied by to give `left`, where there is one."""
    if left.divisor != right.divisor or left.terms.keys() != right.terms.keys() or not left.terms:
        return None
    ratios = {left.terms[key] / right.terms[key] for key in left.terms}
    return ratios.pop() if len(ratios) == 1 else None


# Sums


def _expression(terms: Terms, divisor: Terms) -> Expression:
    if not divisor:
        raise NotComputable("division by zero")
    if len(divisor) == 1 and divisor != _ONE:
        ((product, factor),) = divisor.items()
        inverse = tuple((atom, -exponent) for atom, exponent in product)
        terms, divisor = _multiply(terms, _product(inverse, 1 / factor)), _ONE
    elif divisor != _ONE:
        lead = divisor[min(divisor)]
        if lead != 1:
            divisor = {key: value / lead for key, value in divisor.items()}
            terms = {key: value / lead for key, value in terms.items()}
    return Expression(terms, divisor if terms else _ONE)


def _add(left: Terms, right: Terms) -> Terms:
    return _add_to(dict(left), right)


def _add_to(result: Terms, more: Terms) -> Terms:
    for key, value in more.items():
        value = result.get(key, _ZERO) + value
        if value:
            result[key] = value
        else:
            result.pop(key, None)
    return result


def _multiply(left: Terms, right: Terms) -> Terms:
    if left == _ONE:
        return right
    if right == _ONE:
        return left
    if len(left) * len(right) > 4 * MAX_TERMS:
        raise NotComputable("too many terms")
    result: Terms = {}
    for left_key, left_value in left.items():
        for right_key, right_value in right.items():
            factor = left_value * right_value
            if left_key and right_key:
                _add_to(result, _product(left_key + right_key, factor))
            else:
                _add_to(result, {left_key or right_key: factor})
            if factor.numerator.bit_length() + factor.denominator.bit_length() > MAX_BITS:
                raise NotComputable("too large")
    if len(result) > MAX_TERMS:
        raise NotComputable("too many terms")
    return result


def _product(powers: Monomial, factor: Fraction) -> Terms:
    """One product in its form: exponents of primes in [0, 1), no i squared, roots of sums to whole powers undone."""
    exponents: dict[Atom, Fraction] = {}
    for atom, exponent in powers:
        exponents[atom] = exponents.get(atom, Fraction(0)) + exponent
    sums: list[tuple[Expression, int]] = []
    for atom, exponent in list(exponents.items()):
        if atom.prime:
            whole = math.floor(exponent)
            factor *= _integer_power(Fraction(atom.prime), whole)
            exponents[atom] = exponent - whole
        elif atom == I_UNIT and exponent.denominator == 1:
            quarter = int(exponent) % 4
            factor *= -1 if quarter >= 2 else 1
            exponents[atom] = Fraction(quarter % 2)
        elif atom.function == "root" and exponent.denominator == 1 and exponent:
            sums.append((atom.arguments[0], int(exponent)))
            exponents[atom] = Fraction(0)
    key = tuple(sorted((atom, exponent) for atom, exponent in exponents.items() if exponent))
    result = {key: factor}
    for base, whole in sums:
        raised = _rational_power(base, Fraction(whole))
        if raised.divisor != _ONE:
            raise NotComputable("a sum below the line")
        result = _multiply(result, raised.terms)
    return result


# Powers


def _integer_power(base: Fraction, exponent: int) -> Fraction:
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:
        raise NotComputable("too large")
    if base == 0 and exponent < 0:
        raise NotComputable("division by zero")
    return base**exponent


def _rational_power(base: Expression, exponent: Fraction) -> Expression:
    rational = base.rational
    if exponent.denominator == 1:
        whole = int(exponent)
        if rational is not None:
            return number(_integer_power(rational, whole))
        if whole < 0:
            return divide(number(1), _rational_power(base, -exponent))
        if len(base.terms) == 1 and base.divisor == _ONE:
            ((product, factor),) = base.terms.items()
            raised = tuple((atom, power * whole) for atom, power in product)
            return _expression(_product(raised, _integer_power(factor, whole)), _ONE)
        if whole > MAX_EXPONENT:
            raise NotComputable("too many terms")
        result = number(1)
        for _ in range(whole):
            result = multiply(result, base)
        return result
    if not base.terms:
        return number(0) if exponent > 0 else divide(number(1), base)
    if len(base.terms) == 1 and base.divisor == _ONE:
        root = _product_power(base, exponent)
        if root is not None:
            return root
    name = f"root({base.key})"
    if len(name) > 5_000:
        raise NotComputable("too deep")
    return Expression({((Atom(name, "root", (base,)), exponent),): Fraction(1)}, _ONE)


def _product_power(base: Expression, exponent: Fraction) -> Expression | None:
    """A root of one product; None where its factors can't be told apart (a square's root may have either sign)."""
    ((product, factor),) = base.terms.items()
    raised: list[tuple[Atom, Fraction]] = []
    if factor < 0:
        if exponent.denominator == 2:
            raised.append((I_UNIT, Fraction(exponent.numerator)))
        elif exponent.denominator % 2 == 0 or product:
            return None
    for value, sign in ((abs(factor.numerator), 1), (factor.denominator, -1)):
        raised += [(atom, sign * count * exponent) for atom, count in _factors(value).items()]
    for atom, count in product:
        is_positive = atom.prime or atom in (PI, E)
        if not is_positive and (atom == I_UNIT or atom.is_opaque or count.numerator % 2 == 0):
            return None
        raised.append((atom, count * exponent))
    negative = factor < 0 and exponent.denominator % 2 == 1 and exponent.numerator % 2 == 1
    return _expression(_product(tuple(raised), Fraction(-1 if negative else 1)), _ONE)


def _factors(value: int) -> dict[Atom, int]:
    found: dict[Atom, int] = {}
    divisor = 2
    while divisor <= MAX_TRIAL_DIVISOR and divisor * divisor <= value:
        while value % divisor == 0:
            atom = Atom(f"prime {divisor}", prime=divisor)
            found[atom] = found.get(atom, 0) + 1
            value //= divisor
        divisor += 1 if divisor == 2 else 2
    if value > 1:
        root, count = math.isqrt(value), 1
        if root * root == value and root <= MAX_TRIAL_DIVISOR**2:
            value, count = root, 2
        # Without a small divisor it may still be a product of large primes: then only numbers tell.
        function = "large" if value > MAX_TRIAL_DIVISOR**2 else None
        found[Atom(f"prime {value}", function, prime=value)] = count
    return found


# Numbers, only ever to show that two values differ


def agree(left: Expression, right: Expression) -> bool:
    """Whether the values are equal in floating point, with variables set at random; False where that can't be said."""
    for seed in (0, 1):
        try:
            (one, size), (other, other_size) = _evaluate(left, seed), _evaluate(right, seed)
        except (ArithmeticError, ValueError):
            return False
        size = max(size, other_size)
        if not (cmath.isfinite(one) and cmath.isfinite(other) and SMALLEST < size < math.inf):
            return False
        if abs(one - other) > AGREE_WITHIN * size:
            return False
    return True


def _evaluate(value: Expression, seed: int) -> tuple[complex, float]:
    """The value, and how large the parts are that it was summed from."""
    above, size = _evaluate_sum(value.terms, seed)
    below, size_below = _evaluate_sum(value.divisor, seed)
    return above / below, size / abs(below) * (size_below / abs(below))


def _evaluate_sum(sums: Terms, seed: int) -> tuple[complex, float]:
    terms = []
    for product, factor in sums.items():
        term = complex(float(factor))
        for atom, exponent in product:
            term *= _evaluate_atom(atom, seed) ** float(exponent)
        terms.append(term)
    return sum(terms, 0j), sum(map(abs, terms))


def _evaluate_atom(atom: Atom, seed: int) -> complex:
    if atom.prime:
        return complex(float(atom.prime))
    if atom.function is None:
        constants = {PI: complex(math.pi), E: complex(math.e), I_UNIT: 1j, INFINITY: complex(math.inf)}
        return constants.get(atom) or complex(random.Random(f"{atom.name} {seed}").uniform(0.3, 0.9))
    first, *rest = [_evaluate(argument, seed)[0] for argument in atom.arguments]
    if atom.function == "root":
        return first
    if atom.function == "pow":
        return complex(first ** rest[0])
    if atom.function == "abs":
        return complex(abs(first))
    if atom.function == "log":
        return cmath.log(first) / cmath.log(rest[0] if rest else 10)
    if atom.function in ("floor", "ceil"):
        return complex(getattr(math, atom.function)(first.real))
    if atom.function == "factorial":
        return complex(math.gamma(first.real + 1))
    if atom.function in INVERSES:
        return 1 / complex(getattr(cmath, INVERSES[atom.function])(first))
    function = getattr(cmath, NAMES.get(atom.function, atom.function), None)
    if function is None or rest:
        raise ValueError(atom.function)
    return complex(function(first))
