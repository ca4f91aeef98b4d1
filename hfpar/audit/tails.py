"""Tails of a benchmark beside tails of a control that are about as hard to guess."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hfpar.audit.perturb import find_sites
from hfpar.audit.results import Stratum
from hfpar.audit.statistics import stratify


@dataclass(frozen=True)
class Tail:
    """What makes a tail hard to guess, and whether it was completed."""

    words: int
    hit: bool
    holds_numbers: bool
    """Or names, or variables that could be others."""


def last_change(text: str) -> int:
    """Where the last number, name or variable ends that could be another; 0: there is none."""
    return max((site.end for site in find_sites(text)), default=0)


def match_tails(ours: Sequence[Tail], theirs: Sequence[Tail]) -> tuple[list[Stratum], int]:
    """Strata of tails of about the same length, those that hold numbers apart from those that don't.

    A guess must get the numbers right, too, and perturbed copies always have some (those whose tails have none equal
    the benchmark's, and aren't probed): taken together, a benchmark's tails would be easier than the control's.

    Returns:
        Strata, and how many of the benchmark's tails are in none.
    """
    strata: list[Stratum] = []
    num_unmatched = 0
    for holds in (True, False):
        mine = [tail for tail in ours if tail.holds_numbers is holds]
        others = [tail for tail in theirs if tail.holds_numbers is holds]
        found, unmatched = stratify(
            [tail.words for tail in mine],
            [tail.hit for tail in mine],
            [tail.words for tail in others],
            [tail.hit for tail in others],
            holds_numbers=holds,
        )
        strata += found
        num_unmatched += unmatched
    return strata, num_unmatched
