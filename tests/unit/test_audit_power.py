"""What a comparison is said to find is found that often in simulation."""

import io
import time
from functools import cache

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from hfpar.audit import plan
from hfpar.audit.power import excess_p_values, expected_detectable_share, smallest_detectable_share
from hfpar.audit.prefix import Cut
from hfpar.audit.results import Stratum
from hfpar.audit.statistics import exact_excess
from hfpar.audit.summarize import SetInfo
from hfpar.data.benchmarks import Benchmark, BenchmarkItem

ALPHA = 0.0125
CROSSED = [(400, 0, 100), (100, 0, 400)]
UNEVEN = [(66, 1, 16), (50, 0, 13), (56, 0, 21), (52, 0, 26), (72, 0, 25), (127, 0, 51), (137, 0, 54),
          (269, 0, 108), (264, 0, 103)]  # fmt: skip
"""Nine strata of an audit of GSM8K: tails, and the control's hits and tails."""


def make(sizes: list[tuple[int, int, int]]) -> list[Stratum]:
    return [Stratum(8, 20, 0, total, hits, control_total) for total, hits, control_total in sizes]


def power(strata: list[Stratum], share: float, rates: list[float], luck: float | None, draws: int) -> float:
    """How often `exact_excess` finds it; the control stands as observed, or is drawn where `luck` is given."""
    rng = np.random.default_rng(8)

    @cache
    def found(hits: tuple[int, ...], control_hits: tuple[int, ...]) -> bool:
        drawn = [
            Stratum(8, 20, one, item.total, other, item.control_total)
            for one, other, item in zip(hits, control_hits, strata, strict=True)
        ]
        return exact_excess(drawn) <= ALPHA

    times = 0
    for _ in range(draws):
        hits = [
            int(rng.binomial(item.total, share + (1 - share) * rate))
            for item, rate in zip(strata, rates, strict=True)
        ]
        if luck is None:
            control_hits = [item.control_hits for item in strata]
        else:
            control_hits = [int(rng.binomial(item.control_total, luck)) for item in strata]
        times += found(tuple(hits), tuple(control_hits))
    return times / draws


@pytest.mark.parametrize(
    "sizes",
    [
        [(400, 0, 400)],
        [(400, 20, 400)],
        [(40, 3, 400)],
        [(1300, 0, 500)],
        CROSSED,
        [(400, 3, 100), (100, 0, 400)],
        [(60, 6, 60), (150, 2, 120), (150, 0, 150)],
        UNEVEN,
    ],
)
def test_the_smallest_detectable_share_is_found_four_times_in_five(sizes):
    strata = make(sizes)
    smallest = smallest_detectable_share(strata, ALPHA)
    overall = sum(hits for _, hits, _ in sizes) / sum(control_total for *_, control_total in sizes)
    rates = [(hits + overall) / (control_total + 1) for _, hits, control_total in sizes]
    assert 0.78 <= power(strata, smallest, rates, None, 2000) <= 0.83
    assert power(strata, smallest / 2, rates, None, 500) < 0.6


@pytest.mark.parametrize("sizes", [[(400, 0, 400)], [(1300, 0, 500)], CROSSED, UNEVEN])
@pytest.mark.parametrize("luck", [0.0, 0.005, 0.05])
def test_the_expected_share_is_found_four_times_in_five(sizes, luck):
    strata = make(sizes)
    expected = expected_detectable_share(strata, luck, ALPHA)
    assert 0.78 <= power(strata, expected, [luck] * len(strata), luck, 2000) <= 0.83


def test_a_plan_looks_at_every_stratum_and_at_each_control_by_itself(monkeypatch):
    strata = make(CROSSED)
    monkeypatch.setattr(plan, "match_tails", lambda ours, theirs: strata)
    made = [
        Benchmark(
            name, (BenchmarkItem("0", f"{name}:0", f"A text of {name}.", None, None),), "none", name, "0", 0
        )
        for name in ("own", "new", "other")
    ]
    controls = [SetInfo(name, "control", "file", "x", "0", applies_to=("own",)) for name in ("new", "other")]
    sets = list(zip([SetInfo("own", "benchmark", "benchmark", "x", "0"), *controls], made, strict=True))
    found = plan.make_plan(sets, (0.4, 0.6), lambda text, ratio: Cut(ratio, 7, 0, 2))
    expected = {rate: expected_detectable_share(strata, rate, 0.025) for rate in plan.CONTROL_RATES}
    assert [one.detectable for ratio in found.ratios for one in ratio.controls] == [expected] * 4
    out = io.StringIO()
    plan.print_plan(found, Console(file=out, width=200))
    assert "each control by itself" in " ".join(out.getvalue().split())


def test_one_stratum_against_the_exact_power():
    strata = make([(400, 0, 400)])
    needed = next(
        hits
        for hits in range(400)
        if stats.fisher_exact([[hits, 400 - hits], [0, 400]], "greater")[1] <= ALPHA
    )
    for wanted in (0.5, 0.8, 0.95):
        smallest = smallest_detectable_share(strata, ALPHA, wanted)
        assert stats.binom.sf(needed - 1, 400, smallest) == pytest.approx(wanted, abs=0.01)


def test_small_shares_are_as_precise_as_large_ones():
    needed = next(
        hits
        for hits in range(100)
        if exact_excess([Stratum(8, 20, hits, 100_000, 0, 100_000)]) <= ALPHA
    )  # fmt: skip
    smallest = smallest_detectable_share(make([(100_000, 0, 100_000)]), ALPHA)
    assert smallest < 1e-4
    assert stats.binom.sf(needed - 1, 100_000, smallest / 1.02) < 0.8
    assert stats.binom.sf(needed - 1, 100_000, smallest * 1.01) > 0.8


def test_p_values_of_many_outcomes_are_those_of_one_at_a_time():
    rng = np.random.default_rng(3)
    for _ in range(40):
        number = int(rng.integers(1, 10))
        totals, control_totals = rng.integers(1, [[600], [300]], (2, number))
        rates = rng.beta(0.3, 1, (2, 20, number))
        rates[:, 0], rates[:, 1], rates[0, 2], rates[1, 2] = 0, 1, 1, 0
        hits, control_hits = rng.binomial(totals, rates[0]), rng.binomial(control_totals, rates[1])
        expected = [
            exact_excess([Stratum(8, 20, *counts) for counts in zip(*outcome, strict=True)])
            for outcome in zip(
                hits.tolist(), [totals.tolist()] * 20, control_hits.tolist(), [control_totals.tolist()] * 20,
                strict=True,
            )
        ]  # fmt: skip
        found = excess_p_values(hits, totals, control_hits, control_totals)
        assert found == pytest.approx(np.array(expected), rel=0, abs=1e-9)


def test_no_share_is_detectable_with_too_few_items():
    few = make([(3, 0, 3)])
    assert smallest_detectable_share(few, 0.01) is None
    assert smallest_detectable_share([], 0.01) is None
    assert smallest_detectable_share(make([(3, 0, 0)]), 0.01) is None
    assert smallest_detectable_share(make([(300, 300, 300)]), 0.01) is None
    assert expected_detectable_share(few, 0.0, 0.01) is None
    assert expected_detectable_share([], 0.0, 0.01) is None
    assert expected_detectable_share(make([(0, 0, 300)]), 0.0, 0.01) is None


def test_a_stratum_without_counterparts_changes_nothing():
    alone, beside = make(CROSSED), make([*CROSSED, (500, 0, 0), (0, 3, 200)])
    assert smallest_detectable_share(alone, ALPHA) == smallest_detectable_share(beside, ALPHA)
    assert expected_detectable_share(alone, 0.01, ALPHA) == expected_detectable_share(beside, 0.01, ALPHA)


def test_more_items_detect_less():
    shares = [expected_detectable_share(make([(total, 0, total)]), 0.01, ALPHA) for total in (200, 400, 1600)]
    assert shares == sorted(shares, reverse=True) and shares[-1] < 0.02


def test_power_is_fast():
    started = time.perf_counter()
    smallest_detectable_share(make(UNEVEN), ALPHA)
    expected_detectable_share(make(UNEVEN), 0.05, ALPHA)
    assert time.perf_counter() - started < 2
    assert smallest_detectable_share(make([(5_000, 2_500, 5_000)] * 5), 0.01) < 0.05
    assert time.perf_counter() - started < 10
