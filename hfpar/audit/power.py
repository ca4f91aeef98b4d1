"""What a comparison could have found, and what a planned one can."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy import fft, special, stats

from hfpar.audit.results import Stratum

_DRAWS = 512
"""Made-up outcomes, a power of two as Sobol's points want it. The true power then is within 0.02 of the wanted one."""
_PRECISION = 1.01
"""The search ends where its bracket's ends are this close."""
_FEWEST_HITS = 0.1
"""The search begins at the share that makes so many hits: hardly ever one."""
_REACH = 36.0
"""Counts are left out at each end where all beyond are less likely than exp(-36)."""


def smallest_detectable_share(strata: Sequence[Stratum], alpha: float, power: float = 0.8) -> float | None:
    """The smallest share of items completed from memory that `exact_excess` would have found.

    The control stands as observed. Of the benchmark, a share is completed from memory, and the rest with the chance
    that the control shows: that of all its tails together, reweighted by stratum where a stratum has hits of its own.

    Args:
        strata: As compared; the benchmark's own hits don't matter.
        alpha: Level of the single test.
        power: Chance of finding it.

    Returns:
        A share, or None where not even 1 would be found.
    """
    strata = _comparable(strata)
    if not strata:
        return None
    uniforms = _uniforms(len(strata))
    control_hits = np.tile([stratum.control_hits for stratum in strata], (_DRAWS, 1))
    return _smallest(strata, _rates(strata), control_hits, uniforms, alpha, power)


def expected_detectable_share(
    strata: Sequence[Stratum], control_rate: float, alpha: float, power: float = 0.8
) -> float | None:
    """The same before a run: the control's hits are random, too, with `control_rate` in every stratum.

    Args:
        strata: As they would be compared; their hits don't matter.
        control_rate: Chance of a tail to be completed without memory.
        alpha: Level of the single test.
        power: Chance of finding it.
    """
    strata = _comparable(strata)
    if not strata:
        return None
    uniforms = _uniforms(2 * len(strata))
    rates = np.full(len(strata), control_rate)
    control_totals = np.array([stratum.control_total for stratum in strata])
    control_hits = _draw(uniforms[:, len(strata) :], control_totals, rates)
    return _smallest(strata, rates, control_hits, uniforms[:, : len(strata)], alpha, power)


def excess_p_values(
    hits: np.ndarray, totals: np.ndarray, control_hits: np.ndarray, control_totals: np.ndarray
) -> np.ndarray:
    """`exact_excess` of many outcomes at once, with an error below 1e-12.

    Args:
        hits: `(outcomes, strata)`: the benchmark's.
        totals: `(strata,)`
        control_hits: `(outcomes, strata)`
        control_totals: `(strata,)`
    """
    parts = []
    for index, (total, control_total) in enumerate(
        zip(totals.tolist(), control_totals.tolist(), strict=True)
    ):
        margins, which = np.unique(hits[:, index] + control_hits[:, index], return_inverse=True)
        parts.append((*_hypergeometric(total, control_total, margins), which))
    # Long enough for the sum of all, so that nothing wraps around.
    length = int(fft.next_fast_len(1 + sum(chances.shape[1] - 1 for _, chances, _ in parts), real=True))
    spectrum = np.ones((len(hits), length // 2 + 1), dtype=np.complex128)
    low = np.zeros(len(hits), dtype=np.int64)
    for lows, chances, which in parts:
        spectrum *= fft.rfft(chances, length)[which]
        low += lows[which]
    reached = np.arange(length) >= (hits.sum(axis=1) - low)[:, np.newaxis]
    found: np.ndarray = np.where(reached, fft.irfft(spectrum, length), 0).sum(axis=1)
    return found


def _hypergeometric(first: int, second: int, num_hits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """`statistics.hypergeometric` of several numbers of hits: smallest values and rows of chances from there."""
    everything = first + second
    means = num_hits * (first / everything)
    variances = means * (second / everything) * (everything - num_hits) / max(1, everything - 1)
    # Bernstein's bound, which holds for a sum of independent yes or no, and a hypergeometric number is one.
    reach = _REACH / 3 + np.sqrt(_REACH**2 / 9 + 2 * _REACH * variances)
    low = np.maximum(np.maximum(0, num_hits - second), np.floor(means - reach).astype(np.int64))
    high = np.minimum(np.minimum(num_hits, first), np.ceil(means + reach).astype(np.int64))
    counts = low[:, np.newaxis] + np.arange(int((high - low).max()) + 1)
    inside = counts <= high[:, np.newaxis]
    counts = np.minimum(counts, high[:, np.newaxis])
    log_factorials = special.gammaln(np.arange(1, everything + 2))
    hits = num_hits[:, np.newaxis]
    constant = log_factorials[first] + log_factorials[second] - log_factorials[everything]
    logs = constant + log_factorials[hits] + log_factorials[everything - hits]
    for cell in (counts, hits - counts, first - counts, second - hits + counts):
        logs = logs - log_factorials[cell]
    return low, np.where(inside, np.exp(logs), 0)


def _smallest(
    strata: Sequence[Stratum],
    rates: np.ndarray,
    control_hits: np.ndarray,
    uniforms: np.ndarray,
    alpha: float,
    power: float,
) -> float | None:
    """The share at which as many of the draws are found as `power` wants.

    A draw's hits grow with the share, and its p-value falls with each: found at one share, it is found at all larger
    ones. A step therefore looks only at the draws that no earlier one has decided.
    """
    totals = np.array([stratum.total for stratum in strata])
    control_totals = np.array([stratum.control_total for stratum in strata])

    def found(share: float, draws: np.ndarray) -> np.ndarray:
        hits = _draw(uniforms[draws], totals, share + (1 - share) * rates)
        p_values = excess_p_values(hits, totals, control_hits[draws], control_totals)
        return np.asarray(p_values <= alpha)

    undecided = np.arange(len(uniforms))
    wanted = power * len(uniforms)
    if found(1.0, undecided).sum() < wanted:
        return None
    low, high = _FEWEST_HITS / float(totals.sum()), 1.0
    while high > _PRECISION * low:
        middle = (low * high) ** 0.5
        rejected = found(middle, undecided)
        if rejected.sum() >= wanted:
            high, undecided = middle, undecided[rejected]
        else:
            low, undecided = middle, undecided[~rejected]
            wanted -= rejected.sum()
    return high


def _uniforms(num_dimensions: int) -> np.ndarray:
    """The same ones for every share, so that a larger one is never found less often."""
    sobol = stats.qmc.Sobol(num_dimensions, rng=np.random.default_rng(0))
    drawn: np.ndarray = sobol.random(_DRAWS)
    return drawn


def _draw(uniforms: np.ndarray, totals: np.ndarray, chances: np.ndarray) -> np.ndarray:
    # Of exactly 0, SciPy's quantile is -1.
    return np.maximum(stats.binom.ppf(uniforms, totals, chances), 0).astype(np.int64)


def _comparable(strata: Sequence[Stratum]) -> list[Stratum]:
    return [stratum for stratum in strata if stratum.total and stratum.control_total]


def _rates(strata: Sequence[Stratum]) -> np.ndarray:
    """Chances of the strata's tails to be completed without memory, each drawn towards that of all."""
    hits = np.array([stratum.control_hits for stratum in strata], dtype=np.float64)
    totals = np.array([stratum.control_total for stratum in strata], dtype=np.float64)
    overall = hits.sum() / totals.sum()
    return (hits + overall) / (totals + 1)
