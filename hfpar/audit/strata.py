"""Tails of about the same length, beside each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hfpar.audit.results import Stratum

LEAST_IN_A_STRATUM = 10
"""Tails of the control."""
_NEAR, _MOST_APART, _LONGER = 1.25, 1.5, 1.03
"""How much longer tails may be that are about as long; within merged bins; and of the control in the mean."""
_EDGES = (1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 3 / 4)


def stratify(
    lengths: Sequence[int],
    hits: Sequence[bool],
    control_lengths: Sequence[int],
    control_hits: Sequence[bool],
    least: int = LEAST_IN_A_STRATUM,
    holds_numbers: bool | None = None,
) -> tuple[list[Stratum], int]:
    """Put items of a benchmark beside items of a control with tails of about the same length.

    A model that knows nothing completes a tail of n words with a chance that falls about exponentially with n, so that
    nearly all of its lucky ones are among the shortest tails. The bins are therefore finer there: their edges are
    1/32, 1/16, 1/8, 3/16, 1/4, 3/8, 1/2 and 3/4 quantiles of the benchmark's lengths. A bin with fewer than `least`
    tails of the control is merged with the next longer one, and the last one with the one before it.

    Shorter tails beside longer ones would look like an excess. So a tail of the benchmark counts only if `least` of the
    control's are within a quarter of its length, bins merge only up to half as long again, and in no stratum is the
    control's mean length more than 3 % above the benchmark's: its longest tails are left out, then the benchmark's
    shortest. All of this looks at lengths alone.

    Args:
        lengths: Of the benchmark's tails, in words.
        hits: Which of them were completed.
        control_lengths: Of the control's.
        control_hits: Which of them were completed.
        least: Tails of the control in a stratum.
        holds_numbers: What to write into `Stratum.holds_numbers`.

    Returns:
        Strata in order of length, and how many tails of the benchmark are in none.
    """
    ours, theirs = np.asarray(lengths, dtype=np.int64), np.asarray(control_lengths, dtype=np.int64)
    our_hits, their_hits = np.asarray(hits, dtype=bool), np.asarray(control_hits, dtype=bool)
    if not len(ours):
        return [], 0
    inside = _num_near(ours, theirs) >= least
    if not inside.any():
        return [], len(ours)
    edges = np.unique(np.quantile(ours[inside], _EDGES, method="inverted_cdf"))
    # A bin's upper end is an edge, inclusive; the last one has none. Control tails beyond the benchmark's are no match.
    near = (theirs >= ours[inside].min()) & (theirs <= ours[inside].max())
    our_bins = np.where(inside, np.searchsorted(edges, ours), -1)
    their_bins = np.where(near, np.searchsorted(edges, theirs), -1)
    strata = []
    for group in _merge(ours, our_bins, their_bins, len(edges) + 1, least):
        here, there = (np.flatnonzero(np.isin(bins, group)) for bins in (our_bins, their_bins))
        shortest, longest = ours[here].min() / _NEAR, ours[here].max() * _NEAR
        there = there[(theirs[there] >= shortest) & (theirs[there] <= longest)]
        if len(there) < least:
            continue
        here, there = _balance(ours, here, theirs, there, least)
        if len(here):
            both = np.concatenate([ours[here], theirs[there]])
            counts = (int(our_hits[here].sum()), len(here), int(their_hits[there].sum()), len(there))
            strata.append(Stratum(int(both.min()), int(both.max()), *counts, holds_numbers=holds_numbers))
    return strata, len(ours) - sum(stratum.total for stratum in strata)


def _num_near(lengths: np.ndarray, others: np.ndarray) -> np.ndarray:
    """How many of the others are about as long as each: up to a quarter longer or shorter, or a word."""
    ordered = np.sort(others)
    low = np.minimum(np.ceil(lengths / _NEAR), lengths - 1)
    high = np.maximum(np.floor(lengths * _NEAR), lengths + 1)
    return np.searchsorted(ordered, high, side="right") - np.searchsorted(ordered, low, side="left")


def _merge(
    ours: np.ndarray, our_bins: np.ndarray, their_bins: np.ndarray, num_bins: int, least: int
) -> list[list[int]]:
    """Bins that make strata: each with a tail of the benchmark and `least` of the control's."""
    groups: list[list[int]] = []
    current: list[int] = []
    for number in range(num_bins):
        here = ours[our_bins == number]
        before = ours[np.isin(our_bins, current)]
        if len(here) and len(before) and here.max() > _MOST_APART * before.min():
            current = []  # nothing of the control is about as long
        current.append(number)
        if np.isin(our_bins, current).any() and np.isin(their_bins, current).sum() >= least:
            groups.append(current)
            current = []
    if current and groups:
        joined = ours[np.isin(our_bins, groups[-1] + current)]
        if joined.max() <= _MOST_APART * joined.min():
            groups[-1] = groups[-1] + current
    return groups


def _balance(
    ours: np.ndarray, here: np.ndarray, theirs: np.ndarray, there: np.ndarray, least: int
) -> tuple[np.ndarray, np.ndarray]:
    """Leave out the control's longest tails, then the benchmark's shortest, until those aren't longer in the mean."""
    while len(here) and theirs[there].mean() > _LONGER * ours[here].mean():
        shorter = there[theirs[there] < theirs[there].max()]
        if len(shorter) >= least:
            there = shorter
        else:
            here = here[ours[here] > ours[here].min()]
    return here, there
