"""Bin packing: exact groups, every index once, best fit against a plain search, speed."""

from __future__ import annotations

import random
import time

import pytest

from hfpar.data.packing import pack
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


def test_number_of_groups_does_not_depend_on_the_order() -> None:
    rng = random.Random(0)
    lengths = [min(512, max(1, int(rng.lognormvariate(4, 1)))) for _ in range(3000)]
    expected = len(pack(lengths, 512))
    for _ in range(5):
        rng.shuffle(lengths)
        assert len(pack(lengths, 512)) == expected


def test_too_long_a_sample_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="max_tokens_per_batch: 10 is less than the longest sample, 11 tokens"
    ):
        pack([3, 11], 10)


def test_a_million_samples_take_seconds() -> None:
    rng = random.Random(0)
    lengths = [min(4096, max(1, int(rng.lognormvariate(5.5, 1)))) for _ in range(1_000_000)]
    start = time.process_time()
    groups = pack(lengths, 4096)
    assert time.process_time() - start < 10
    assert len(groups) <= 1.001 * sum(lengths) / 4096
