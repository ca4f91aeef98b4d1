"""Bin packing: exact groups, every index once, best fit against a plain search, speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hfpar.data.packing import Packs, pack, pack_evenly
from hfpar.errors import ConfigError


def plain_best_fit_decreasing(lengths: list[int], budget: int) -> list[int]:
    """Return the rooms left, by the definition: for each sample look at every group."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [room for room in rooms if room >= length]
        if fitting:
            rooms[rooms.index(min(fitting))] -= length
        else:
            rooms.append(budget - length)
    return sorted(rooms)


def test_exact_groups() -> None:
    assert pack([6, 3, 4, 7, 1, 9], 10) == [[5, 4], [3, 1], [0, 2]]
    assert pack([], 10) == []
    assert pack([10], 10) == [[0]]
    assert pack([2, 2, 2, 2, 2], 4) == [[0, 1], [2, 3], [4]]


def test_best_fit_prefers_the_fullest_group() -> None:
    # 7 and 6 leave rooms 3 and 4: the 3 must go to the 7, or the 4 finds no room.
    assert pack([7, 6, 3, 4], 10) == [[0, 2], [1, 3]]


def test_samples_without_tokens_get_a_place() -> None:
    assert sorted(index for group in pack([0, 5, 0], 5) for index in group) == [0, 1, 2]


@pytest.mark.parametrize("budget", [10, 1023, 1024, 5000])
def test_equal_to_a_plain_search(budget: int) -> None:
    rng = random.Random(budget)
    for _ in range(20):
        lengths = [rng.randint(1, rng.choice([3, budget // 3, budget])) for _ in range(rng.randint(1, 200))]
        groups = pack(lengths, budget)
        assert sorted(index for group in groups for index in group) == list(range(len(lengths)))
        rooms = sorted(budget - sum(lengths[index] for index in group) for group in groups)
        assert rooms == plain_best_fit_decreasing(lengths, budget)


@pytest.mark.parametrize(
    "packing", [pack, lambda *args: pack_evenly(*args).to_lists()], ids=["best fit", "even"]
)
def test_number_of_groups_does_not_depend_on_the_order(packing: Callable[..., list[list[int]]]) -> None:
    rng = random.Random(0)
    lengths = [min(512, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(3000)]
    expected = len(packing(lengths, 512))
    for _ in range(5):
        rng.shuffle(lengths)
        assert len(packing(lengths, 512)) == expected


def test_long_samples_are_spread() -> None:
    # Best fit puts the two of 5 together.
    assert pack([6, 5, 5, 4], 10) == [[0, 3], [1, 2]]
    lengths = [50, 50, *[10] * 10]
    assert [[lengths[i] for i in group] for group in pack(lengths, 100)] == [[50, 50], [10] * 10]
    packs = pack_evenly(lengths, 100)
    assert packs.to_lists() == [[0, 2, 4, 9, 10, 11], [1, 3, 5, 6, 7, 8]]
    # The longest open the packs, the next go to those with the least work.
    lengths = [500, 490, 480, 470, 460, 450, 440, 430, *range(390, 350, -5), *[20] * 60]
    pairs = [group[:2] for group in pack_evenly(lengths, 1000).to_lists()]
    assert pairs[3:] == [[3, 12], [4, 11], [5, 10], [6, 9], [7, 8]]
    assert pack_evenly([], 10).to_lists() == []
    assert pack_evenly([0, 5, 0, 5], 5).to_lists() == pack([0, 5, 0, 5], 5)


@pytest.mark.parametrize("budget", [10, 100, 1024, 5000])
def test_even_packs_are_no_more_than_best_fit_makes(budget: int) -> None:
    rng = random.Random(budget)
    for _ in range(60):
        lengths = [rng.randint(1, rng.choice([3, budget // 3, budget])) for _ in range(rng.randint(1, 300))]
        packs = pack_evenly(lengths, budget)
        assert sorted(packs.indices.tolist()) == list(range(len(lengths)))
        groups = packs.to_lists()
        assert len(groups) == packs.num_packs <= len(pack(lengths, budget))
        assert all(group and sum(lengths[index] for index in group) <= budget for group in groups)


def test_most_even_packs_have_the_same_work() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(6, 1, 50_000).astype(np.int64), 1, 8192)
    even = pack_evenly(lengths, 8192)
    plain = pack(lengths, 8192)
    assert lengths.sum() / 8192 / even.num_packs > 0.999
    quartiles = [
        np.quantile([(lengths[group] ** 2).sum() for group in groups], [0.25, 0.75])
        for groups in (plain, even.to_lists())
    ]
    assert quartiles[0][1] / quartiles[0][0] > 3
    assert quartiles[1][1] / quartiles[1][0] < 1.3


def test_take() -> None:
    packs = Packs(np.array([4, 1, 0, 2, 3]), np.array([0, 2, 3, 5]))
    assert packs.to_lists() == [[4, 1], [0], [2, 3]]
    assert packs.take(np.array([2, 0])).to_lists() == [[2, 3], [4, 1]]
    assert packs.take(np.array([], np.int64)).to_lists() == []


@pytest.mark.parametrize("packing", [pack, pack_evenly])
def test_too_long_a_sample_is_refused(packing: Callable[..., object]) -> None:
    with pytest.raises(
        ConfigError, match="max_tokens_per_batch: 10 is less than the longest sample, 11 tokens"
    ):
        packing([3, 11], 10)


@pytest.mark.parametrize("packing", [pack, pack_evenly])
def test_a_million_samples_take_seconds(packing: Callable[..., Any]) -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(5.5, 1, 1_000_000).astype(np.int64), 1, 4096)
    start = time.process_time()
    packs = packing(lengths, 4096)
    assert time.process_time() - start < 5
    num_packs = packs.num_packs if isinstance(packs, Packs) else len(packs)
    assert num_packs <= 1.0001 * lengths.sum() / 4096
