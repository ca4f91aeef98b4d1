"""Every interval and test of an audit against enumeration, published values or simulation."""

import itertools
import math
import time

import numpy as np
import pytest
from scipy import stats

from hfpar.audit import statistics
from hfpar.audit.results import Stratum
from hfpar.audit.statistics import (
    SMALLEST_P_VALUE,
    auc,
    convolve,
    exact_excess,
    holm,
    mcnemar,
    mean,
    newcombe,
    newcombe_paired,
    order_p_value,
    share,
)
from hfpar.audit.strata import stratify


def stratum(hits: int, total: int, control_hits: int, control_total: int) -> Stratum:
    return Stratum(8, 20, hits, total, control_hits, control_total)


# Shares and means


def test_clopper_pearson_against_its_definition():
    found = share(7, 50)
    assert (found.value, found.total, found.hits) == (0.14, 50, 7)
    assert stats.binom.sf(6, 50, found.low) == pytest.approx(0.025)
    assert stats.binom.cdf(7, 50, found.high) == pytest.approx(0.025)


@pytest.mark.parametrize("hits", [0, 30])
def test_a_share_of_none_or_all(hits):
    found = share(hits, 30)
    assert found.value == hits / 30
    edge = 1 - 0.025 ** (1 / 30)
    assert (found.low, found.high) == pytest.approx((0, edge) if hits == 0 else (1 - edge, 1))


def test_a_share_of_nothing():
    found = share(0, 0)
    assert (found.value, found.low, found.high, found.total) == (None, None, None, 0)


def test_mean_covers_the_truth(monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_RESAMPLES", 500)
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(100):
        found = mean(rng.exponential(2.0, size=60), seed)
        covered += found.low <= 2.0 <= found.high
    assert 86 <= covered <= 100


@pytest.mark.parametrize("size", [40, 2500])
def test_mean_is_near_the_normal_interval(size):
    values = np.random.default_rng(2).normal(3, 1, size)
    found = mean(values)
    half = 1.96 * values.std() / size**0.5
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.15 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.15 * half)
    assert mean(values) == found


def test_mean_at_its_edges():
    assert mean([]).value is None
    one = mean([2.0])
    assert (one.value, one.low, one.high, one.total) == (2.0, None, None, 1)
    equal = mean([0.1] * 7)
    assert (equal.low, equal.high) == pytest.approx((0.1, 0.1))
    assert mean([1.0, math.nan, 3.0, math.inf]).total == 2


# The exact stratified test


def enumerated(strata: list[Stratum]) -> float:
    """Over all ways to deal each stratum's hits out to its items."""
    observed = sum(item.hits for item in strata)
    ways = []
    for item in strata:
        counts: dict[int, int] = {}
        items = item.total + item.control_total
        for chosen in itertools.combinations(range(items), item.hits + item.control_hits):
            mine = sum(place < item.total for place in chosen)
            counts[mine] = counts.get(mine, 0) + 1
        ways.append(counts)
    extreme = total = 0
    for picked in itertools.product(*(counts.items() for counts in ways)):
        weight = math.prod(count for _, count in picked)
        total += weight
        if sum(hits for hits, _ in picked) >= observed:
            extreme += weight
    return extreme / total


@pytest.mark.parametrize(
    "strata",
    [
        [stratum(3, 5, 1, 6)],
        [stratum(3, 5, 1, 6), stratum(2, 4, 0, 3)],
        [stratum(1, 3, 2, 4), stratum(2, 2, 1, 5), stratum(0, 4, 1, 1)],
        [stratum(0, 4, 0, 4), stratum(4, 4, 0, 4)],
        [stratum(5, 5, 5, 5)],
        [stratum(2, 3, 0, 0), stratum(1, 4, 1, 4)],
    ],
)
def test_exact_excess_against_enumeration(strata):
    assert exact_excess(strata) == pytest.approx(enumerated(strata), rel=1e-10)


def test_exact_excess_of_one_stratum_is_fishers_test():
    for hits, control_hits in itertools.product(range(0, 21, 4), range(0, 26, 5)):
        table = [[hits, 20 - hits], [control_hits, 25 - control_hits]]
        expected = stats.fisher_exact(table, alternative="greater")[1]
        assert exact_excess([stratum(hits, 20, control_hits, 25)]) == pytest.approx(expected, rel=1e-9)


def test_exact_excess_at_its_edges():
    assert exact_excess([]) == 1.0
    assert exact_excess([stratum(0, 50, 0, 50)]) == 1.0
    assert exact_excess([stratum(50, 50, 50, 50)]) == pytest.approx(1.0)
    assert exact_excess([stratum(5000, 5000, 0, 5000)]) == SMALLEST_P_VALUE


def test_exact_excess_keeps_the_digits_of_small_p_values():
    table = [[180, 20], [20, 180]]
    expected = stats.fisher_exact(table, alternative="greater")[1]
    assert expected < 1e-50
    assert exact_excess([stratum(180, 200, 20, 200)]) == pytest.approx(expected, rel=1e-8)


def test_huge_counts_are_fast():
    started = time.perf_counter()
    many = [stratum(10_300, 20_000, 10_000, 20_000)] * 5
    p_value = exact_excess(many)
    newcombe(many)
    assert time.perf_counter() - started < 10
    # The normal approximation is good here.
    z = 5 * 300 / 2 / (5 * 40_000 * 0.25 * (20_300 / 40_000) * (19_700 / 40_000)) ** 0.5
    assert math.log(p_value) == pytest.approx(math.log(stats.norm.sf(z)), rel=0.02)


def test_exact_excess_is_no_larger_than_its_level_under_the_null():
    rng = np.random.default_rng(3)
    p_values = []
    for _ in range(1500):
        strata = []
        for rate, total, control_total in ((0.3, 30, 25), (0.1, 60, 50), (0.02, 120, 90)):
            hits, control_hits = rng.binomial(total, rate), rng.binomial(control_total, rate)
            strata.append(stratum(int(hits), total, int(control_hits), control_total))
        p_values.append(exact_excess(strata))
    for alpha in (0.01, 0.05, 0.2, 0.5):
        size = np.mean(np.array(p_values) <= alpha)
        assert size <= alpha + 3 * (alpha * (1 - alpha) / 1500) ** 0.5
        assert size >= alpha / 4  # it isn't a test that never finds anything, either


# Newcombe's intervals


def test_newcombe_of_one_stratum_has_the_published_value():
    # Newcombe 1998, Statistics in Medicine 17:873, table II, method 10.
    found = newcombe([stratum(56, 70, 48, 80)])
    assert found == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)
    assert newcombe([stratum(9, 10, 3, 10)]) == pytest.approx((0.6, 0.1705, 0.8090), abs=5e-5)
    assert newcombe([stratum(10, 10, 0, 10)]) == pytest.approx((1.0, 0.6075, 1.0), abs=5e-5)


def test_newcombe_paired_has_the_published_values():
    # Newcombe 1998, Statistics in Medicine 17:2635, method 10.
    assert newcombe_paired(36, 12, 2, 0) == pytest.approx((0.2, 0.0569, 0.3404), abs=5e-5)
    assert newcombe_paired(20, 12, 2, 16) == pytest.approx((0.2, 0.0562, 0.3292), abs=5e-5)


def test_newcombe_weighs_strata_by_the_benchmark():
    strata = [stratum(30, 100, 1, 10), stratum(0, 300, 0, 500)]
    difference, low, high = newcombe(strata)
    assert difference == pytest.approx(0.25 * (0.3 - 0.1))
    assert low < difference < high
    # Items of the control's alone don't count; where nothing differs, 0 lies inside.
    assert newcombe([stratum(0, 40, 0, 40)] * 3)[0] == 0
    with pytest.raises(ValueError):
        newcombe([stratum(1, 2, 0, 0)])


@pytest.mark.parametrize("excess", [0.0, 0.1, 0.4])
def test_newcombe_covers_the_truth(excess):
    rng = np.random.default_rng(4)
    design = ((0.2, 40, 50), (0.05, 80, 60), (0.01, 160, 120))
    covered = 0
    for _ in range(600):
        strata = [
            stratum(int(rng.binomial(n, rate + (1 - rate) * excess)), n, int(rng.binomial(m, rate)), m)
            for rate, n, m in design
        ]
        truth = sum(n * (1 - rate) * excess for rate, n, _ in design) / 280
        _, low, high = newcombe(strata)
        covered += low <= truth <= high
    assert 0.93 <= covered / 600 <= 0.995


def test_newcombe_paired_covers_the_truth():
    rng = np.random.default_rng(5)
    chances = (0.1, 0.15, 0.05, 0.7)
    covered = sum(
        low <= 0.1 <= high
        for _, low, high in (newcombe_paired(*map(int, rng.multinomial(120, chances))) for _ in range(600))
    )
    assert 0.93 <= covered / 600 <= 0.98


# Strata


def test_strata_cover_what_both_groups_have():
    lengths = list(range(8, 108))
    control = list(range(20, 70)) * 2
    hits = [length < 15 or length == 30 for length in lengths]
    strata, unmatched = stratify(lengths, hits, control, [length == 40 for length in control])
    # 20 has ten of the control's up to a quarter longer, 81 ten a quarter shorter; from 67 on a stratum has too few.
    assert unmatched == 12 + 26 + 15
    assert sum(item.total for item in strata) == 47 and sum(item.control_total for item in strata) >= 90
    assert sum(item.hits for item in strata) == 1  # those before 20 are out of the control's range
    assert sum(item.control_hits for item in strata) == 2
    for first, second in itertools.pairwise(strata):
        assert first.high < second.low
    assert all(item.total and item.control_total >= 10 for item in strata)


def test_few_of_a_benchmarks_tails_make_a_stratum_and_few_of_a_controls_dont():
    strata, unmatched = stratify([9] * 50 + [30] * 5, [False] * 55, [9] * 50 + [30] * 50, [True] * 100)
    assert [(one.low, one.high, one.total, one.control_total) for one in strata] == [
        (9, 9, 50, 50),
        (30, 30, 5, 50),
    ]
    assert unmatched == 0
    # The last few join those before them, but none that are far away.
    ours, theirs = [8] * 10 + [11] * 3 + [33] * 3 + [42] * 10, [9] * 12 + [37] * 6 + [44] * 8
    strata, _ = stratify(ours, [False] * 26, theirs, [False] * 26)
    assert strata and all(one.high <= 1.5 * one.low for one in strata)
    ours, theirs = [8] * 3 + [17] * 30 + [19] * 3 + [48] * 30, [9] * 12 + [44] * 12
    strata, _ = stratify(ours, [False] * 66, theirs, [False] * 24)
    assert [(one.low, one.high, one.total, one.control_total) for one in strata] == [(44, 48, 30, 12)]
    # Twenty in the bin, but eight of about this length.
    theirs = [9] * 12 + [44] * 8 + [50] * 5
    assert stratify([8] * 3 + [48] * 30, [False] * 33, theirs, [False] * 25) == ([], 33)
    (only,), unmatched = stratify([9] * 40 + [10] * 20, [False] * 60, [9] * 50 + [10] * 5, [True] * 55)
    assert (only.low, only.high, only.total, only.control_total, unmatched) == (9, 10, 60, 55, 0)


def test_a_few_short_tails_of_a_control_dont_stand_for_many():
    rng = np.random.default_rng(2)
    ours, theirs = rng.integers(8, 60, 400), rng.integers(40, 60, 400)
    strata, _ = stratify(ours, [True] * 400, [9, *theirs], [False] * 401)
    assert min(one.low for one in strata) >= 32 and all(one.high <= 1.5 * one.low for one in strata)
    # Many of them, but none in between.
    strata, _ = stratify([8, 30] * 50, [True] * 100, [8] * 5 + [30] * 50, [False] * 55)
    assert [(one.low, one.high) for one in strata] == [(30, 30)]


def test_a_control_isnt_longer_than_a_benchmark_in_the_mean():
    ours, theirs = [20] * 100 + [24] * 20, [20] * 5 + [24] * 95
    (only,), unmatched = stratify(ours, [False] * 120, theirs, [False] * 100)
    assert (only.total, only.control_total, unmatched) == (20, 100, 100)
    (only,), unmatched = stratify(ours, [False] * 120, [*theirs, *[21] * 8], [False] * 108)
    assert (only.total, only.control_total, unmatched) == (120, 13, 0)


def test_strata_need_some_of_both_groups():
    assert stratify([9] * 50, [False] * 50, [9] * 3, [False] * 3) == ([], 50)
    assert stratify([], [], [9], [True]) == ([], 0)
    assert stratify([9, 10], [True, True], [], []) == ([], 2)
    assert stratify([9] * 20, [True] * 20, [50] * 20, [True] * 20) == ([], 20)
    (only,), unmatched = stratify([9] * 20, [True] * 20, [9] * 30, [False] * 30)
    assert (only.low, only.high, only.hits, only.total, only.control_total, unmatched) == (
        9,
        9,
        20,
        20,
        30,
        0,
    )


def test_short_tails_that_any_model_completes_are_no_excess():
    rng = np.random.default_rng(6)

    def draw(num: int, spread: float) -> tuple[np.ndarray, np.ndarray]:
        lengths = 8 + rng.gamma(2, spread, num).astype(int)
        return lengths, rng.random(num) < 0.5 * np.exp(-0.4 * (lengths - 8))

    found = naive = 0
    for _ in range(100):
        ours, our_hits = draw(500, 5)
        theirs, their_hits = draw(400, 10)  # the control's tails are twice as long
        strata, _ = stratify(ours, our_hits, theirs, their_hits)
        found += exact_excess(strata) <= 0.05
        naive += exact_excess([stratum(int(our_hits.sum()), 500, int(their_hits.sum()), 400)]) <= 0.05
    assert naive > 75
    assert found <= 10


# Other tests


def test_holm_against_a_worked_example():
    # Holm 1979 by hand: 0.01 x 4, 0.02 x 3, max(0.06, 0.03 x 2), max(0.06, 0.04).
    assert holm([0.03, None, 0.01, 0.04, 0.02]) == pytest.approx([0.06, None, 0.04, 0.06, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == [] and holm([None]) == [None]


def test_auc_is_the_share_of_pairs_and_delongs_variance_its_formula():
    rng = np.random.default_rng(7)
    ours, theirs = rng.integers(0, 12, 40), rng.integers(0, 10, 30)
    above = (ours[:, None] > theirs[None]) + 0.5 * (ours[:, None] == theirs[None])
    value, low, high = auc(ours, theirs)
    assert value == pytest.approx(above.mean())
    assert value == pytest.approx(stats.mannwhitneyu(ours, theirs).statistic / 1200)
    variance = above.mean(1).var(ddof=1) / 40 + above.mean(0).var(ddof=1) / 30
    assert (low, high) == pytest.approx(
        (value - 1.959964 * variance**0.5, value + 1.959964 * variance**0.5), abs=1e-6
    )
    draws = []
    for _ in range(600):
        draws.append(above[rng.integers(0, 40, 40)][:, rng.integers(0, 30, 30)].mean())
    assert high - low == pytest.approx(2 * 1.96 * np.std(draws), rel=0.12)


def test_auc_at_its_edges():
    value, low, high = auc([5, 6, 7], [1, 2, 3])
    assert (value, high) == (1.0, 1.0) and low < 0.7
    value, low, high = auc(range(40), range(100, 140))
    assert (value, low) == (0.0, 0.0) and 0.01 < high < 0.2
    value, low, high = auc([1.0] * 5, [1.0] * 5)
    assert value == 0.5 and 0.15 < low < 0.3 and 0.7 < high < 0.85  # equal scores say little
    assert auc([2.0], [1.0]) == (1.0, 0.0, 1.0)
    assert auc([2.0, math.nan], [1.0])[0] == 1.0
    with pytest.raises(ValueError):
        auc([], [1.0])


def test_an_auc_near_1_is_less_sure_with_a_pair_that_is_crossed():
    apart = auc(range(20, 40), range(20))
    crossed = auc([*range(20, 39), 18.5], range(20))
    assert crossed[0] < 1 and crossed[1] < apart[1]


def test_mcnemar_is_exact():
    assert mcnemar(8, 2, "greater") == pytest.approx(sum(math.comb(10, k) for k in (8, 9, 10)) / 1024)
    assert mcnemar(8, 2, "two-sided") == pytest.approx(2 * sum(math.comb(10, k) for k in (8, 9, 10)) / 1024)
    assert mcnemar(0, 0, "two-sided") is None
    assert mcnemar(1319, 0, "two-sided") == 1e-100


@pytest.mark.parametrize("ranks", [[0, 0, 0], [1, 0, 3], [4, 4, 4], [2, 1]])
def test_order_p_value_against_enumeration(ranks):
    every = list(itertools.product(range(5), repeat=len(ranks)))
    expected = sum(sum(other) <= sum(ranks) for other in every) / len(every)
    assert order_p_value(ranks, 4) == pytest.approx(expected)


def test_order_p_value_at_its_edges():
    assert order_p_value([], 10) == 1.0
    assert order_p_value([0] * 10, 9) == pytest.approx(1e-10)
    assert order_p_value([0] * 60, 99) == SMALLEST_P_VALUE
    with pytest.raises(ValueError):
        order_p_value([11], 10)


def test_convolve_adds_independent_numbers():
    dice = (1, np.full(6, 1 / 6))
    low, probabilities = convolve([dice, dice])
    assert low == 2
    assert probabilities * 36 == pytest.approx([1, 2, 3, 4, 5, 6, 5, 4, 3, 2, 1])
