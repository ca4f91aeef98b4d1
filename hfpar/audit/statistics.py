"""Intervals and exact tests of an audit; SciPy does the work where it has it.

Nothing here knows of models or files: numbers come in, numbers go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Literal

import numpy as np
from scipy import optimize, special, stats

from hfpar.audit.results import Estimate, Stratum

Interval = tuple[float, float, float]
"""An estimate and the ends of its 95 % interval."""

MIN_CONTROL_ITEMS = 200
"""A comparison with fewer tails of a control has no power worth a p-value."""
SMALLEST_P_VALUE = 1e-100
"""Smaller ones are given as this."""
_NEGLIGIBLE = 1e-120
"""Chances that no such p-value depends on. Products of two of them are still ordinary numbers, which denormal ones,
a hundred times slower, are not."""
_Z = float(stats.norm.ppf(0.975))
_MOST_RESAMPLES = 2000
_MOST_DRAWS = 40_000_000
_MOST_FOR_BCA = 1000


def share(hits: int, total: int) -> Estimate:
    """A share with its Clopper-Pearson 95 % interval; of nothing, all None."""
    if total == 0:
        return Estimate(None, None, None, total=0, hits=0)
    # Quantiles of beta distributions; SciPy's interval searches for the same, a hundred times slower.
    low = float(special.betaincinv(hits, total - hits + 1, 0.025)) if hits else 0.0
    high = float(special.betaincinv(hits + 1, total - hits, 0.975)) if hits < total else 1.0
    return Estimate(hits / total, low, high, total=total, hits=hits)


def mean(values: Sequence[float], seed: int = 0) -> Estimate:
    """A mean with a bootstrap 95 % interval: BCa of up to 1,000 values, percentiles of more.

    Values that are no finite numbers are left out of the estimate and of `total`.
    """
    found = np.asarray(values, dtype=np.float64)
    found = found[np.isfinite(found)]
    if not len(found):
        return Estimate(None, None, None, total=0, method="bootstrap")
    value = float(found.mean())
    if np.ptp(found) <= 1e-12 * max(abs(value), 1e-300):
        # One value says nothing of its spread; that of many equal ones is none.
        end = value if len(found) > 1 else None
        return Estimate(value, end, end, total=len(found), method="bootstrap")
    interval = stats.bootstrap(
        (found,),
        np.mean,
        n_resamples=min(_MOST_RESAMPLES, max(200, _MOST_DRAWS // len(found))),
        batch=max(1, 4_000_000 // len(found)),
        method="BCa" if len(found) <= _MOST_FOR_BCA else "percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    low, high = min(float(interval.low), value), max(float(interval.high), value)
    return Estimate(value, low, high, total=len(found), method="bootstrap")


# Excess over a control


def convolve(distributions: Iterable[tuple[int, np.ndarray]]) -> tuple[int, np.ndarray]:
    """Distribution of a sum of independent whole numbers.

    Args:
        distributions: Of each its smallest value and the probabilities from there.

    Returns:
        The same of the sum. Ends below 1e-120 are cut off, which keeps sums of huge counts short; nothing is
        subtracted, so that small probabilities keep their digits.
    """
    return reduce(_convolve, distributions, (0, np.ones(1)))


def _convolve(first: tuple[int, np.ndarray], second: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    low, probabilities = first[0] + second[0], np.convolve(first[1], second[1])
    return _trim(low, probabilities)


def _trim(low: int, probabilities: np.ndarray) -> tuple[int, np.ndarray]:
    kept = np.flatnonzero(probabilities > _NEGLIGIBLE)
    return low + int(kept[0]), probabilities[kept[0] : kept[-1] + 1]


def exact_excess(strata: Sequence[Stratum]) -> float:
    """One-sided p-value: the benchmark's items are completed more often than the control's of the same stratum.

    Exact and conditional on each stratum's margins: under the null hypothesis the benchmark's hits in a stratum are
    hypergeometric, and the p-value is the chance that their sum is as large as observed or larger. Of one stratum it is
    Fisher's exact test, of several the exact Cochran-Mantel-Haenszel test.
    """
    parts = [
        hypergeometric(stratum.total, stratum.control_total, stratum.hits + stratum.control_hits)
        for stratum in strata
    ]
    low, probabilities = convolve(parts)
    observed = sum(stratum.hits for stratum in strata)
    p_value = float(probabilities[max(0, observed - low) :].sum())
    return min(1.0, max(SMALLEST_P_VALUE, p_value))


def hypergeometric(first: int, second: int, num_hits: int) -> tuple[int, np.ndarray]:
    """How many of `num_hits`, dealt at random over two groups of these sizes, are the first's; as `convolve` takes it.

    SciPy's says the same, and takes seconds for tens of thousands of items.
    """
    low, high = max(0, num_hits - second), min(num_hits, first)
    counts = np.arange(low, high + 1)
    logs = (
        _log_choose(num_hits, counts)
        + _log_choose(first + second - num_hits, first - counts)
        - _log_choose(first + second, np.array(first))
    )
    return _trim(low, np.exp(logs))


def _log_choose(total: int, chosen: np.ndarray) -> np.ndarray:
    return special.gammaln(total + 1) - special.gammaln(chosen + 1) - special.gammaln(total - chosen + 1)


def reweighted(strata: Sequence[Stratum]) -> Estimate:
    """The control's share, had it as many tails of each stratum as the benchmark, with a stratified Wilson interval."""
    hits = np.array([stratum.control_hits for stratum in strata], dtype=np.float64)
    totals = np.array([stratum.control_total for stratum in strata], dtype=np.float64)
    weights = np.array([stratum.total for stratum in strata], dtype=np.float64)
    if not strata:
        return share(0, 0)
    value, low, high = _stratified_wilson(hits, totals, weights / weights.sum())
    return Estimate(
        value, low, high, total=int(totals.sum()), hits=int(hits.sum()), method="stratified-wilson"
    )


def newcombe(strata: Sequence[Stratum]) -> Interval:
    """Difference of two stratified shares with Newcombe's hybrid score interval (Yan and Su 2010).

    Strata weigh as much as the benchmark has items in them, so that the difference is about the benchmark as it is.
    Of one stratum this is Newcombe's (1998) method 10. The variances that choose each stratum's part of the Wilson
    intervals are taken at those intervals' centres: a stratum without hits has one, too.

    Raises:
        ValueError: There are no strata, or one lacks a group.
    """
    if not strata or any(not stratum.total or not stratum.control_total for stratum in strata):
        raise ValueError("a difference needs items of both groups in every stratum")
    totals = np.array([stratum.total for stratum in strata], dtype=np.float64)
    control_totals = np.array([stratum.control_total for stratum in strata], dtype=np.float64)
    weights = totals / totals.sum()
    hits = np.array([stratum.hits for stratum in strata], dtype=np.float64)
    control_hits = np.array([stratum.control_hits for stratum in strata], dtype=np.float64)
    first, first_low, first_high = _stratified_wilson(hits, totals, weights)
    second, second_low, second_high = _stratified_wilson(control_hits, control_totals, weights)
    of_first = float((weights**2 / totals).sum())
    of_second = float((weights**2 / control_totals).sum())
    below = of_first * first_low * (1 - first_low) + of_second * second_high * (1 - second_high)
    above = of_first * first_high * (1 - first_high) + of_second * second_low * (1 - second_low)
    difference = first - second
    return difference, max(-1.0, difference - _Z * below**0.5), min(1.0, difference + _Z * above**0.5)


def _stratified_wilson(hits: np.ndarray, totals: np.ndarray, weights: np.ndarray) -> Interval:
    centres = (hits + _Z**2 / 2) / (totals + _Z**2)
    variances = centres * (1 - centres) / (totals + _Z**2)
    # The sum of the strata's intervals would be too wide: their errors partly cancel.
    z = _Z * np.sqrt((weights**2 * variances).sum()) / (weights * np.sqrt(variances)).sum()
    low, high = wilson(hits, totals, float(z))
    return float((weights * hits / totals).sum()), float((weights * low).sum()), float((weights * high).sum())


def wilson(hits: np.ndarray, totals: np.ndarray, z: float) -> tuple[np.ndarray, np.ndarray]:
    """Ends of Wilson's score intervals at `z` standard deviations, elementwise."""
    centre = (hits + z**2 / 2) / (totals + z**2)
    half = z * np.sqrt(hits * (totals - hits) / totals + z**2 / 4) / (totals + z**2)
    return np.clip(centre - half, 0, 1), np.clip(centre + half, 0, 1)


def newcombe_paired(both: int, only_first: int, only_second: int, neither: int) -> Interval:
    """Difference of two shares of the same items, first less second, with Newcombe's (1998) paired interval.

    Method 10 of "Improved confidence intervals for the difference between binomial proportions based on paired data":
    Wilson's intervals, joined through a correlation that is corrected for continuity where it is positive.

    Raises:
        ValueError: There are no items.
    """
    total = both + only_first + only_second + neither
    if total == 0:
        raise ValueError("a paired difference needs items")
    firsts, seconds = both + only_first, both + only_second
    shares = np.array([firsts, seconds], dtype=np.float64)
    low, high = wilson(shares, np.array([total, total], dtype=np.float64), _Z)
    share_first, share_second = shares / total
    margins = float(firsts) * (total - firsts) * seconds * (total - seconds)
    product = float(both) * neither - float(only_first) * only_second
    if margins == 0:
        correlation = 0.0
    else:
        corrected = max(product - total / 2, 0.0) if product > 0 else product
        correlation = corrected / margins**0.5
    down, up = share_first - low[0], high[1] - share_second
    below = down**2 - 2 * correlation * down * up + up**2
    down, up = share_second - low[1], high[0] - share_first
    above = up**2 - 2 * correlation * up * down + down**2
    difference = (only_first - only_second) / total
    return difference, float(difference - max(below, 0.0) ** 0.5), float(difference + max(above, 0.0) ** 0.5)


# Other tests


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm's step-down adjustment over those that aren't None."""
    tested = sorted((value, index) for index, value in enumerate(p_values) if value is not None)
    adjusted: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (value, index) in enumerate(tested):
        largest = max(largest, min(1.0, value * (len(tested) - rank)))
        adjusted[index] = largest
    return adjusted


def auc(scores: Sequence[float], control_scores: Sequence[float]) -> Interval:
    """Chance that an item scores higher than a control's (ties count half), with a 95 % interval.

    DeLong's (1988), or Newcombe's (2006) method 5 where that is wider. Scores that are no numbers are left out.

    Raises:
        ValueError: One of the groups is empty.
    """
    ours, theirs = _numbers(scores), _numbers(control_scores)
    num_ours, num_theirs = len(ours), len(theirs)
    if not num_ours or not num_theirs:
        raise ValueError("an AUC needs scores of both groups")
    ranks = stats.rankdata(np.concatenate([ours, theirs]))
    # Of each item, the share of the other group that it is above.
    of_ours = (ranks[:num_ours] - stats.rankdata(ours)) / num_theirs
    of_theirs = 1 - (ranks[num_ours:] - stats.rankdata(theirs)) / num_ours
    value = float(of_ours.mean())
    if min(num_ours, num_theirs) < 2:
        return value, 0.0, 1.0
    variance = float(of_ours.var(ddof=1) / num_ours + of_theirs.var(ddof=1) / num_theirs)
    half = _Z * variance**0.5
    low, high = max(0.0, value - half), min(1.0, value + half)
    ends = _score_interval(value, num_ours, num_theirs)
    # DeLong's variance is too small near 0 and 1, and none where the groups don't overlap or all scores are equal.
    return (value, *ends) if ends[1] - ends[0] > high - low else (value, low, high)


def _numbers(scores: Sequence[float]) -> np.ndarray:
    found = np.asarray(scores, dtype=np.float64)
    return found[~np.isnan(found)]


def _score_interval(value: float, first: int, second: int) -> tuple[float, float]:
    """The AUCs from which an observed one is 1.96 standard errors away, by Hanley and McNeil's variance at each."""

    def distance(true: float) -> float:
        spread = (1 - true) / (2 - true) + true / (1 + true)
        variance = true * (1 - true) * (1 + ((first + second) / 2 - 1) * spread) / (first * second)
        return abs(value - true) - _Z * variance**0.5

    low = 0.0 if value == 0 else float(optimize.brentq(distance, 0.0, min(value, 1 - 1e-12)))
    high = 1.0 if value == 1 else float(optimize.brentq(distance, max(value, 1e-12), 1.0))
    return low, high


def mcnemar(
    only_first: int, only_second: int, alternative: Literal["two-sided", "greater", "less"]
) -> float | None:
    """McNemar's exact p-value; `greater`: the first more often than the second. None where no pair disagrees."""
    total = only_first + only_second
    if total == 0:
        return None
    p_value = float(stats.binomtest(only_first, total, 0.5, alternative=alternative).pvalue)
    return max(SMALLEST_P_VALUE, p_value)


def order_p_value(ranks: Sequence[int], num_permutations: int) -> float:
    """Exact one-sided p-value of the file's own order being likelier than shuffled ones.

    Args:
        ranks: Of each shard, how many of its shuffled orders are as likely as the true one, or likelier: 0 is the
            strongest. Under exchangeability each is uniform over 0 ... `num_permutations`, or larger by ties.
        num_permutations: Shuffled orders of each shard.

    Returns:
        The chance that the ranks' sum is as small as this, or smaller.

    Raises:
        ValueError: A rank is outside 0 ... `num_permutations`.
    """
    if any(not 0 <= rank <= num_permutations for rank in ranks):
        raise ValueError(f"ranks lie in 0 ... {num_permutations}")
    uniform = np.full(num_permutations + 1, 1 / (num_permutations + 1))
    low, probabilities = convolve((0, uniform) for _ in ranks)
    p_value = float(probabilities[: max(0, sum(ranks) - low + 1)].sum())
    return min(1.0, max(SMALLEST_P_VALUE, p_value))
