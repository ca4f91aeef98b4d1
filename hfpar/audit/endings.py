"""Texts that end alike: a model that completes an ending which others have, too, needn't have seen this one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from hfpar.audit.prefix import Cut
from hfpar.audit.summarize import SetInfo
from hfpar.audit.text import normalize
from hfpar.data.benchmarks import Benchmark, BenchmarkItem

Owner = tuple[str, str]
"""A set and an item of it; what varies an item belongs to that item."""
_LENGTH = 24
"""Characters at the end of a text by which others that end alike are looked up."""


class Endings:
    """The texts of a set, by how they end; white space makes no difference."""

    def __init__(self, texts: Iterable[tuple[Owner, str]]) -> None:
        """Take the texts with their owners."""
        self._texts: defaultdict[str, list[tuple[Owner, str]]] = defaultdict(list)
        for owner, text in texts:
            normal = normalize(text)
            self._texts[normal[-_LENGTH:]].append((owner, normal))

    def include(self, tail: str, *, but: Owner | None = None) -> bool:
        """Whether a text ends with `tail`, those of one owner left aside."""
        tail = normalize(tail)
        short = len(tail) < _LENGTH  # such as `min_tail_chars` may allow
        alike = chain(*self._texts.values()) if short else self._texts.get(tail[-_LENGTH:], [])
        return any(owner != but and text.endswith(tail) for owner, text in alike)


class CommonEndings:
    """Which tails of an audit's sets tell nothing of their items."""

    def __init__(self, sets: Iterable[tuple[SetInfo, Benchmark]]) -> None:
        """Look at how all texts end."""
        sets = list(sets)
        self._applies_to = {info.name: info.applies_to for info, _ in sets}
        self._endings = {
            info.name: Endings((item.owner(info.name), item.question) for item in found.items)
            for info, found in sets
        }

    def skip(self, cut: Cut, item: BenchmarkItem, name: str) -> Cut:
        """The cut of an item's text, marked as skipped where others end with its tail, too.

        Those are, of a control's tail, an item of a benchmark that it is held against; of any tail, another item of the
        same set: a sentence that stands under all of them, for one.

        Args:
            cut: of the question without white space around it.
            item: whose question it is.
            name: of its set.
        """
        if cut.skipped:
            return cut
        tail = item.question.strip()[cut.position :]
        if any(self._endings[benchmark].include(tail) for benchmark in self._applies_to[name]):
            return replace(cut, skipped="same_as_benchmark")
        if self._endings[name].include(tail, but=item.owner(name)):
            return replace(cut, skipped="shared_tail")
        return cut
