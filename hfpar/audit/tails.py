"""Tails of a benchmark beside tails of a control that are about as hard to guess."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from hfpar.audit.endings import Endings
from hfpar.audit.perturb import find_sites
from hfpar.audit.results import ItemResult, Mode, Stratum
from hfpar.audit.strata import stratify
from hfpar.audit.summarize import cut_at, is_hit


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


def match_tails(ours: Sequence[Tail], theirs: Sequence[Tail]) -> list[Stratum]:
    """Strata of tails of about the same length, those that hold numbers apart from those that don't.

    A guess must get the numbers right, too, and perturbed copies always have some (those whose tails have none equal
    the benchmark's, and aren't probed): taken together, a benchmark's tails would be easier than the control's.
    """
    strata: list[Stratum] = []
    for holds in (True, False):
        mine = [tail for tail in ours if tail.holds_numbers is holds]
        others = [tail for tail in theirs if tail.holds_numbers is holds]
        found, _ = stratify(
            [tail.words for tail in mine],
            [tail.hit for tail in mine],
            [tail.words for tail in others],
            [tail.hit for tail in others],
            holds_numbers=holds,
        )
        strata += found
    return strata


class ProbedTails:
    """Probed tails of all sets; how each text ends, and where it can change, is looked up once."""

    def __init__(self, items: Mapping[str, Sequence[ItemResult]]) -> None:
        self.items = items
        texts = {item.text for found in items.values() for item in found}
        self.last_change = {text: last_change(text) for text in texts}
        self.endings = {
            name: Endings((item.owner, item.text) for item in found) for name, found in items.items()
        }

    def of(
        self, name: str, ratio: float, mode: Mode, others: Sequence[str] = ()
    ) -> list[tuple[ItemResult, Tail]]:
        """Of one set, with their items; skipped ones left out, and those that a text of `others` ends with, too.

        Such an ending is known from elsewhere. The same text with other numbers in front, which belongs to the same
        item, is no such text.
        """
        tails = []
        for item in self.items[name]:
            cut = cut_at(item, ratio, mode)
            if cut is None or cut.skipped is not None:
                continue
            text = item.text[cut.cut :]
            if not any(self.endings[other].include(text, but=item.owner) for other in others):
                changes = self.last_change[item.text] > cut.cut
                tails.append((item, Tail(cut.tail_words, is_hit(cut), changes)))
        return tails

    def pair(
        self, benchmark: str, controls: Sequence[str], ratio: float, mode: Mode
    ) -> tuple[list[Tail], list[Tail]]:
        """A benchmark's tails and those of controls that they can be held against."""
        ours = [tail for _, tail in self.of(benchmark, ratio, mode, controls)]
        theirs = [found for name in controls for found in self.of(name, ratio, mode, [benchmark])]
        return ours, independent(theirs, {item.owner for item in self.items[benchmark]}, len(ours))


def independent(
    tails: Sequence[tuple[ItemResult, Tail]], originals: Collection[tuple[str, str]], num_tails: int
) -> list[Tail]:
    """A control's tails, only the first of those that vary the same item where few items are varied.

    Variants of an item are about as hard as each other. Of at least half as many of a benchmark's items as it has
    tails in the comparison they may all count: even if an item's variants were all completed or none, the difference of
    the shares would vary no more than the test takes it to, because the benchmark has the same easy and hard items.
    Of fewer they'd make the control look surer than it is, and so would variants of what isn't the benchmark's.

    Args:
        tails: Of the control, with their items.
        originals: Owners of the benchmark's items.
        num_tails: Of the benchmark.
    """
    known = {item.owner for item, _ in tails} & set(originals)
    all_count = 2 * len(known) >= num_tails
    seen: set[tuple[str, str]] = set()
    kept = []
    for item, tail in tails:
        if item.owner not in seen or (all_count and item.owner in known):
            kept.append(tail)
        seen.add(item.owner)
    return kept
