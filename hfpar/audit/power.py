"""What a comparison could have found, and what a planned one can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy import special

from hfpar.audit.results import Stratum
from hfpar.audit.statistics import binomial, convolve, exact_excess

_STEPS = 14
"""Halvings of a search between 0 and 1."""
_LIKELY = 1e-9
"""Control counts less likely than this are left out of an average over them."""
_MOST_COUNTS = 64
"""More of them are averaged over in groups."""


def smallest_detectable_share(
    strata: Sequence[Stratum], alpha: float, power: float = 0.8, control_rate: float | None = None
) -> float | None:
    """The smallest share of items completed from memory that `exact_excess` would have found.

    The control stands as observed. Of the benchmark, a share is completed from memory, and the rest with the chance
    that the control shows: that of all its tails together, reweighted by stratum where a stratum has hits of its own.

    Args:
        strata: As compared; the benchmark's own hits don't matter.
        alpha: Level of the single test.
        power: Chance of finding it.
        control_rate: In place of the control's own rate.

    Returns:
        A share, or None where not even 1 would be found.
    """
    strata = [stratum for stratum in strata if stratum.total and stratum.control_total]
    if not strata:
        return None
    rates = _rates(strata, control_rate)

    def found(share: float) -> bool:
        chances = share + (1 - share) * rates
        totals = [stratum.total for stratum in strata]
        parts = [(0, binomial(total, chance)) for total, chance in zip(totals, chances.tolist(), strict=True)]
        low, probabilities = convolve(_shorten(part) for part in parts)
        # As many hits as are reached with the wanted power.
        reached = np.cumsum(probabilities[::-1])[::-1]
        hits = low + int(np.flatnonzero(reached >= min(power, reached[0]))[-1])
        spread = _spread(hits, np.array(totals) * chances, totals)
        filled = [replace(stratum, hits=count) for stratum, count in zip(strata, spread, strict=True)]
        return exact_excess(filled) <= alpha

    return _smallest(found)


def expected_detectable_share(
    total: int, control_total: int, control_rate: float, alpha: float, power: float = 0.8
) -> float | None:
    """The same before a run, of one stratum: the control's hits are random, too, with `control_rate`.

    Exact but for control counts of a chance below 1e-9, and where more than 64 counts are likely: then neighbours
    count as one.
    """
    if not total or not control_total:
        return None
    counts = np.arange(control_total + 1)
    chances = binomial(control_total, control_rate)
    groups = np.array_split(counts[chances > _LIKELY], min(_MOST_COUNTS, int((chances > _LIKELY).sum())))
    needed = []
    hits = 0
    for group in groups:
        # Grows with the control's count: begin where the last one ended.
        hits = _hits_needed(total, int(group[len(group) // 2]), control_total, alpha, hits)
        needed.append((hits, float(chances[group].sum())))

    def found(share: float) -> bool:
        rate = share + (1 - share) * control_rate
        return sum(chance * float(special.bdtrc(hits - 1, total, rate)) for hits, chance in needed) >= power

    return _smallest(found)


def _hits_needed(total: int, control_hits: int, control_total: int, alpha: float, start: int) -> int:
    """The fewest hits, from `start` on, that Fisher's exact test finds too many; `total + 1` where none are."""
    step, low, high = 1, start, start
    while high <= total and _p_value(high, total, control_hits, control_total) > alpha:
        low, high, step = high + 1, min(high + step, total + 1), 2 * step
    while low < high:
        middle = (low + high) // 2
        if _p_value(middle, total, control_hits, control_total) <= alpha:
            high = middle
        else:
            low = middle + 1
    return low


def _p_value(hits: int, total: int, control_hits: int, control_total: int) -> float:
    return exact_excess([Stratum(0, 0, hits, total, control_hits, control_total)])


def _smallest(found: Callable[[float], bool]) -> float | None:
    if not found(1.0):
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _rates(strata: Sequence[Stratum], control_rate: float | None) -> np.ndarray:
    """Chances of the strata's tails to be completed without memory, each drawn towards that of all."""
    if control_rate is not None:
        return np.full(len(strata), control_rate)
    hits = np.array([stratum.control_hits for stratum in strata], dtype=np.float64)
    totals = np.array([stratum.control_total for stratum in strata], dtype=np.float64)
    overall = hits.sum() / totals.sum()
    return (hits + overall) / (totals + 1)


def _shorten(part: tuple[int, np.ndarray]) -> tuple[int, np.ndarray]:
    """Without the ends that don't matter to a quantile."""
    low, probabilities = part
    kept = np.flatnonzero(probabilities > 1e-15)
    return low + int(kept[0]), probabilities[kept[0] : kept[-1] + 1]


def _spread(hits: int, expected: np.ndarray, totals: Sequence[int]) -> list[int]:
    """Deal `hits` out in proportion to what is expected, as whole numbers, by largest remainders."""
    if not expected.sum():
        return [0] * len(totals)
    wanted = np.minimum(hits * expected / expected.sum(), totals)
    counts = np.floor(wanted).astype(int)
    while counts.sum() < hits:
        open_ones = np.flatnonzero(counts < totals)
        best = open_ones[np.argmax((wanted - counts)[open_ones])]
        counts[best] += 1
    return [int(count) for count in counts]
