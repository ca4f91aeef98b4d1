"""Whether a benchmark's file is likelier in its own order than shuffled (Oren et al. 2024, arXiv:2310.17623).

A model that has read the file has read its items one after another. Before any is read, all orders are equally likely
to score best, so that the rank of the file's own order among shuffled ones gives an exact p-value. The file is taken
in shards, and their ranks are added up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hfpar.audit.results import OrderTest
from hfpar.audit.sets import AuditSet
from hfpar.audit.statistics import order_p_value

SHARD_ITEMS = 8
MOST_SHARDS = 25
_FEWEST_SHARDS = 3
_BETWEEN = "\n\n"

LogLikelihood = Callable[[Sequence[list[int]]], list[float]]


@dataclass(frozen=True)
class Shard:
    """Items that stand one after another in a file."""

    benchmark: str
    number: int
    questions: tuple[str, ...]

    def orders(self, num_permutations: int, seed: int) -> list[str]:
        """The shard's text in the file's order, then in shuffled ones, all different."""
        rng = random.Random(f"{seed}:{self.benchmark}:{self.number}")
        seen = {tuple(range(len(self.questions)))}
        orders = [tuple(range(len(self.questions)))]
        while len(orders) <= num_permutations:
            shuffled = tuple(rng.sample(range(len(self.questions)), len(self.questions)))
            if shuffled not in seen:
                seen.add(shuffled)
                orders.append(shuffled)
        return [_BETWEEN.join(self.questions[index] for index in order) for order in orders]


def make_shards(
    one: AuditSet, count_tokens: Callable[[Sequence[str]], list[int]], max_tokens: int
) -> list[Shard]:
    """Shards of 8 items that the model can read at once, spread evenly over the file."""
    questions = [item.question.strip() for item in one.benchmark.items]
    lengths = count_tokens(questions)
    starts = range(0, len(questions) - SHARD_ITEMS + 1, SHARD_ITEMS)
    fitting = [
        start for start in starts if sum(lengths[start : start + SHARD_ITEMS]) + 2 * SHARD_ITEMS <= max_tokens
    ]
    if len(fitting) > MOST_SHARDS:
        fitting = [fitting[index * len(fitting) // MOST_SHARDS] for index in range(MOST_SHARDS)]
    return [
        Shard(one.name, number, tuple(questions[start : start + SHARD_ITEMS]))
        for number, start in enumerate(fitting)
    ]


def rank_of(scores: Sequence[float]) -> int:
    """How many shuffled orders are likelier than the first; one that is as likely counts, too."""
    return sum(score >= scores[0] for score in scores[1:])


def order_test(benchmark: str, ranks: Sequence[int], num_permutations: int) -> OrderTest:
    """The test of one benchmark, from the ranks of its shards."""
    if len(ranks) < _FEWEST_SHARDS:
        note = f"{len(ranks)} shards of {SHARD_ITEMS} items fit the model's context; too few to test"
        return OrderTest(benchmark, len(ranks), num_permutations, None, note)
    return OrderTest(benchmark, len(ranks), num_permutations, order_p_value(ranks, num_permutations))
