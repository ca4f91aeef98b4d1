"""Controls that hfpar makes itself: texts that no model can have read, to set a benchmark's completions against."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from hfpar.audit.perturb import perturb
from hfpar.audit.text import normalize
from hfpar.data.benchmarks import Benchmark, BenchmarkItem

RANDOM_CALCULATION = "random_calculation"
"""Name of the control that `random_calculation` makes."""
_MOST_STEPS = 20
_MOST_COPIES = 4
_EARLY = 0.4
"""A copy that differs only in this first part of its text has no tail of its own."""
_INSTRUCTION = (
    "Work out the exact value of the following expression, and give it as a fraction in lowest terms:"
)
_SIGNS = {"+": "+", "-": "-", "*": r"\times", "/": r"\div"}


def perturbed_name(benchmark: str) -> str:
    """Name of a benchmark's perturbed copies, as a set."""
    return f"{benchmark}-perturbed"


def perturbed_copies(benchmark: Benchmark, num_items: int | None, seed: int) -> Benchmark:
    """Copies of a benchmark's items with other numbers, names and variables.

    Args:
        benchmark: What to copy.
        num_items: The most copies, of items chosen at random; up to four of each where the benchmark is smaller. None:
            one of each.
        seed: Of the choice and of the changes. An item's copy is the same whichever others are chosen.

    Returns:
        Copies in the benchmark's order, without answers (nobody has worked them out); `pair_id` is the original's id.
        Items of which nothing behind the first 40 % could change are left out, and copies that an item of the
        benchmark or another copy equals.
    """
    known = {normalize(item.question) for item in benchmark.items}
    order = list(range(len(benchmark.items)))
    random.Random(f"{seed}:{benchmark.name}").shuffle(order)
    wanted = len(order) if num_items is None else num_items
    copies: dict[tuple[int, int], BenchmarkItem] = {}
    for turn, number in itertools.product(range(1 if num_items is None else _MOST_COPIES), order):
        if len(copies) >= wanted:
            break
        copy = _copy(benchmark.name, benchmark.items[number], turn, seed)
        if copy is not None and normalize(copy.question) not in known:
            known.add(normalize(copy.question))
            copies[number, turn] = copy
    items = tuple(copies[key] for key in sorted(copies))
    return Benchmark(
        name=perturbed_name(benchmark.name),
        items=items,
        answer_kind="none",
        source=f"{benchmark.source}, perturbed by hfpar, seed {seed}",
        sha256=_digest(item.question for item in items),
        num_duplicates=0,
    )


def _copy(benchmark: str, item: BenchmarkItem, turn: int, seed: int) -> BenchmarkItem | None:
    number = "" if turn == 0 else str(turn + 1)
    changed = perturb(
        item.question, random.Random(f"{seed}:{benchmark}:{item.item_id}{number and f':{number}'}")
    )
    if not any(end > _EARLY * len(item.question) for _, end in changed.spans):
        return None
    return BenchmarkItem(
        item_id=f"{item.item_id}-perturbed{number}",
        place=f"{item.place}, perturbed",
        question=changed.text,
        answer=None,
        solution=None,
        pair_id=item.item_id,
        pair_set=benchmark,
    )


def random_calculation(num_items: int, seed: int) -> Benchmark:
    r"""Arithmetic expressions in LaTeX that have never been written before, as in arXiv:2507.10532.

    Each has 1 to 20 steps (+, -, \times, \div) over integers to 100, fractions, squares and cubes; no step divides by
    zero, and no two items are equal.
    """
    rng = random.Random(f"{seed}:{RANDOM_CALCULATION}")
    found: dict[str, Fraction] = {}
    tries = 0
    while len(found) < num_items and tries < 100 * num_items:
        tries += 1
        expression = _expression(rng, 1 + len(found) % _MOST_STEPS)
        found.setdefault(expression.text, expression.value)
    items = tuple(
        BenchmarkItem(
            item_id=str(number),
            place=f"{RANDOM_CALCULATION}:{number}",
            question=f"{_INSTRUCTION} ${text}$",
            answer=_latex(value),
            solution=None,
        )
        for number, (text, value) in enumerate(found.items())
    )
    return Benchmark(
        name=RANDOM_CALCULATION,
        items=items,
        answer_kind="math",
        source=f"made by hfpar, seed {seed}",
        sha256=_digest(item.question for item in items),
        num_duplicates=0,
    )


def _digest(questions: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(questions).encode()).hexdigest()


@dataclass(frozen=True)
class _Term:
    text: str
    value: Fraction
    is_sum: bool = False
    """Needs brackets as a factor."""


def _expression(rng: random.Random, num_steps: int) -> _Term:
    """Join two expressions that share the other steps between them."""
    if num_steps == 0:
        return _operand(rng)
    first_steps = rng.randrange(num_steps)
    while True:
        first, second = _expression(rng, first_steps), _expression(rng, num_steps - 1 - first_steps)
        sign = rng.choice("+-*/")
        if sign != "/" or second.value != 0:
            return _join(first, sign, second)


def _operand(rng: random.Random) -> _Term:
    kind = rng.choice(("integer", "integer", "fraction", "square", "cube"))
    if kind == "integer":
        number = rng.randint(0, 100)
        return _Term(str(number), Fraction(number))
    if kind == "fraction":
        below = rng.randint(2, 30)
        above = rng.randint(1, 99)
        return _Term(rf"\frac{{{above}}}{{{below}}}", Fraction(above, below))
    if kind == "square":
        number = rng.randint(2, 30)
        return _Term(f"{number}^2", Fraction(number**2))
    number = rng.randint(2, 12)
    return _Term(f"{number}^3", Fraction(number**3))


def _join(first: _Term, sign: str, second: _Term) -> _Term:
    left, right = first.text, second.text
    if sign in "*/":
        left = f"( {left} )" if first.is_sum else left
    if sign == "/" or (sign == "*" and second.is_sum) or (sign == "-" and second.is_sum):
        right = f"( {right} )" if second.is_sum or " " in right else right
    values = {
        "+": lambda: first.value + second.value,
        "-": lambda: first.value - second.value,
        "*": lambda: first.value * second.value,
        "/": lambda: first.value / second.value,
    }
    return _Term(f"{left} {_SIGNS[sign]} {right}", values[sign](), is_sum=sign in "+-")


def _latex(value: Fraction) -> str:
    if value.denominator == 1:
        return str(value.numerator)
    sign = "-" if value < 0 else ""
    return rf"{sign}\frac{{{abs(value.numerator)}}}{{{value.denominator}}}"
