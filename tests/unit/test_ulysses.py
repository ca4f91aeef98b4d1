"""Who computes which heads."""

import pytest

from hfpar.attention.ulysses import split_heads


@pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(4, 2), (9, 3), (14, 2), (32, 8), (8, 1), (6, 6), (64, 4)]
)
def test_every_query_head_once_and_just_the_kv_heads_it_uses(num_heads, num_kv_heads):
    group = num_heads // num_kv_heads
    for sp_size in range(1, num_heads + 1):
        split = split_heads(num_heads, num_kv_heads, sp_size)
        dealt = [head for first, last in split.query for head in range(first, last)]
        assert dealt == list(range(num_heads))
        counts = [last - first for first, last in split.query]
        assert max(counts) - min(counts) <= 1
        for rank, (first, last) in enumerate(split.query):
            used = {head // group for head in range(first, last)}
            assert used == set(range(*split.kv[rank]))


def test_kv_heads_are_repeated_no_more_than_needed():
    assert split_heads(32, 8, 4).kv == ((0, 2), (2, 4), (4, 6), (6, 8))  # none twice
    assert split_heads(32, 8, 16).kv == tuple((rank // 2, rank // 2 + 1) for rank in range(16))  # each twice
    assert split_heads(9, 3, 2).kv == ((0, 2), (1, 3))  # the middle one twice
    assert split_heads(9, 3, 3).kv == ((0, 1), (1, 2), (2, 3))


def test_local_kv_head_of_each_query():
    """None: heads group evenly, as attention kernels expect."""
    assert split_heads(32, 8, 4).kv_of_query(0) is None
    assert split_heads(32, 8, 16).kv_of_query(3) is None
    assert split_heads(9, 3, 2).kv_of_query(0) == [0, 0, 0, 1, 1]
    assert split_heads(9, 3, 2).kv_of_query(1) == [0, 1, 1, 1]
    assert split_heads(6, 2, 2).kv_of_query(1) is None
    assert split_heads(6, 3, 4).kv_of_query(1) is None  # one query head


@pytest.mark.parametrize(
    "num_heads, num_kv_heads", [(4, 2), (9, 3), (14, 2), (32, 8), (8, 1), (6, 6), (40, 8)]
)
def test_each_query_head_meets_its_own_kv_head(num_heads, num_kv_heads):
    """By the list, or by even groups where there is none: what a local kernel does with so many of each."""
    group = num_heads // num_kv_heads
    for sp_size in range(1, num_heads + 1):
        split = split_heads(num_heads, num_kv_heads, sp_size)
        for rank, (first, last) in enumerate(split.query):
            num_local, num_local_kv = last - first, split.kv[rank][1] - split.kv[rank][0]
            used = split.kv_of_query(rank)
            if used is None:
                assert num_local % num_local_kv == 0
                used = [head // (num_local // num_local_kv) for head in range(num_local)]
            assert [split.kv[rank][0] + local for local in used] == [
                head // group for head in range(first, last)
            ]


def test_few_kv_heads_travel_twice():
    """Neighbours share at most one: of Hkv heads, at most sp_size - 1 more than Hkv travel in all."""
    for num_heads, num_kv_heads in [(9, 3), (14, 2), (32, 8), (64, 4), (8, 1)]:
        for sp_size in range(1, num_heads + 1):
            kv = split_heads(num_heads, num_kv_heads, sp_size).kv
            assert num_kv_heads <= sum(last - first for first, last in kv) <= num_kv_heads + sp_size - 1
