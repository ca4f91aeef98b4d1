"""Bin packing of samples into micro-batches: in few packs, and with little difference in work. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hfpar.errors import ConfigError

Integers = npt.NDArray[np.int64]

_WORD = 1024  # bits in a word of the index of rooms

_TAIL = 0.25
"""Share of the tokens, in the shortest samples, that `pack_evenly` leaves for filling packs up."""

_RESERVE = 0.1
"""Share of the budget that it keeps free in a pack for them, where longer samples can choose."""

_REPACKED = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
"""Shares of the packs that it tries to pack anew by best fit alone; with all of them it does what `pack` does."""


@dataclass(frozen=True, eq=False)
class Packs:
    """Groups of samples, one after another."""

    indices: Integers
    """`(n,)`: all samples, each once."""
    bounds: Integers
    """`(p + 1,)`: pack k is `indices[bounds[k] : bounds[k + 1]]`; none is empty."""

    @property
    def num_packs(self) -> int:
        """P."""
        return len(self.bounds) - 1

    def to_lists(self) -> list[list[int]]:
        """As plain lists of indices."""
        indices, bounds = self.indices.tolist(), self.bounds.tolist()
        return [indices[begin:end] for begin, end in zip(bounds[:-1], bounds[1:], strict=True)]

    def take(self, numbers: Integers) -> Packs:
        """The packs of these numbers, in their order."""
        counts = np.diff(self.bounds)[numbers]
        bounds = np.concatenate(([0], np.cumsum(counts)))
        positions = np.arange(bounds[-1]) + np.repeat(self.bounds[:-1][numbers] - bounds[:-1], counts)
        return Packs(self.indices[positions], bounds)


def pack(lengths: Sequence[int] | Integers, budget: int) -> list[list[int]]:
    """Group samples so that no group has more than `budget` tokens, in few groups.

    Best fit decreasing: from the longest sample to the shortest, each goes to the group that it fills
    best. Equal input gives equal output; samples of equal length are taken in the order given, and the
    number of groups does not depend on the order of `lengths`.

    Args:
        lengths: Tokens in each sample.
        budget: Most tokens of a group.

    Returns:
        Groups of indices into `lengths`; every index is in exactly one.

    Raises:
        ConfigError: A sample is longer than `budget`.
    """
    order, sizes = _longest_first(lengths, budget)
    return _collect(order, _best_fit(sizes, np.empty(0, np.int64), budget)).to_lists()


def pack_evenly(lengths: Sequence[int] | Integers, budget: int) -> Packs:
    """Group samples in no more groups than `pack` does, most of which have about the same work.

    Best fit decreasing puts like with like: the last groups hold nothing but the shortest samples, and the
    work of a group, the sum of its squared lengths, differs by a factor of 10 and more. Here the longer
    samples, longest first, each go to a group with little work so far, and only the shortest, a quarter of all
    tokens, fill up what is left by best fit. A group then has long and short samples, and only those that
    hold one so long that it alone is more work than an average group stand out.

    That can cost a few groups in 100,000. Best fit alone then packs anew the groups with the most room left,
    a growing share of all, until it costs none.

    Args:
        lengths: Tokens in each sample.
        budget: Most tokens of a group.

    Returns:
        Packs of indices into `lengths`. Their number and their samples' lengths do not depend on the order.

    Raises:
        ConfigError: A sample is longer than `budget`.
    """
    order, sizes = _longest_first(lengths, budget)
    most = _num_bins(_best_fit(sizes, np.empty(0, np.int64), budget))
    spread = bin_of = _spread(sizes, budget)
    for share in _REPACKED:
        if _num_bins(bin_of) <= most:
            break
        bin_of = _repack(sizes, spread, share, budget)
    return _collect(order, bin_of)


def _longest_first(lengths: Sequence[int] | Integers, budget: int) -> tuple[Integers, Integers]:
    """Return the order of the samples from the longest to the shortest, and the lengths in it, at least 1."""
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    if len(sizes) and int(sizes.max()) > budget:
        raise ConfigError(
            f"max_tokens_per_batch: {budget} is less than the longest sample, {int(sizes.max())} tokens; "
            "raise it or lower max_length"
        )
    order = np.argsort(-sizes, kind="stable")
    return order, sizes[order]


def _num_bins(bin_of: Integers) -> int:
    return int(bin_of.max()) + 1 if len(bin_of) else 0


def _collect(order: Integers, bin_of: Integers) -> Packs:
    counts = np.bincount(bin_of)
    by_bin = np.argsort(bin_of, kind="stable")
    return Packs(order[by_bin], np.concatenate(([0], np.cumsum(counts[counts > 0]))))


def _spread(sizes: Integers, budget: int) -> Integers:
    """Give each sample a bin, evening out the bins' sums of squares; `sizes` descend."""
    total = int(sizes.sum())
    num_bins = -(-total // budget)
    bin_of = np.arange(len(sizes))  # the longest open the bins
    done = min(num_bins, len(sizes))
    rooms, work = np.full(num_bins, budget), np.zeros(num_bins, np.int64)
    rooms[:done] -= sizes[:done]
    work[:done] = sizes[:done] ** 2
    stop = int(np.searchsorted(np.cumsum(sizes), (1 - _TAIL) * total))
    while done < stop:
        # A round: the next samples, longest first, to as many bins of those with the least work.
        bins = np.flatnonzero(rooms >= sizes[done] + int(_RESERVE * budget))
        count = min(max(1, num_bins // 4), stop - done, len(bins))
        if count == 0:
            break
        # Stable, not a partition: that leaves the order of equals to the processor.
        bins = bins[np.argsort(work[bins], kind="stable")[:count]]
        placed = sizes[done : done + count]
        bin_of[done : done + count] = bins
        rooms[bins] -= placed
        work[bins] += placed**2
        done += count
    bin_of[done:] = _best_fit(sizes[done:], rooms, budget)
    return bin_of


def _repack(sizes: Integers, bin_of: Integers, share: float, budget: int) -> Integers:
    """Pack by best fit alone what is in the bins with the most room left, a share of all bins."""
    rooms = budget - np.bincount(bin_of, weights=sizes).astype(np.int64)
    numbers = np.arange(len(rooms))
    # Among bins that are equally full, some of all kinds: the first ones have the longest samples.
    by_room = np.lexsort((numbers * 2654435761 % 2**32, -rooms))
    opened = np.zeros(len(rooms), bool)
    opened[by_room[: math.ceil(share * len(rooms))]] = True
    again = opened[bin_of]
    kept = np.cumsum(~opened)
    repacked = kept[bin_of] - 1
    repacked[again] = kept[-1] + _best_fit(sizes[again], np.empty(0, np.int64), budget)
    return repacked


def _best_fit(sizes: Integers, rooms: Integers, budget: int) -> Integers:
    """Give each sample the bin that it fills best; `sizes` descend.

    Args:
        sizes: Tokens in each sample.
        rooms: Tokens that bins 0, 1, ... have room for; more bins are opened as needed.
        budget: Room of a new bin.

    Returns:
        `(n,)` numbers of bins.
    """
    waiting = _Bins(rooms, budget)
    distinct, counts = np.unique(sizes, return_counts=True)
    bins: list[int] = []
    each: list[int] = []  # samples for every bin of a move
    moved: list[int] = []  # bins of a move
    for size, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            room = waiting.least_room(size)
            if room is None:
                waiting.open(-(-count // (budget // size)))
                continue
            # What is left of the best fit is again the best fit for an equal sample.
            per_bin = min(room // size, count)
            taken = waiting.pop(room, count // per_bin)
            waiting.push(room - per_bin * size, taken)
            bins += taken
            each.append(per_bin)
            moved.append(len(taken))
            count -= per_bin * len(taken)
    return np.repeat(np.array(bins, np.int64), np.repeat(np.array(each, np.int64), moved))


class _Bins:
    """Bins by the room they have left; finds the least sufficient room in two steps over bit sets."""

    def __init__(self, rooms: Integers, budget: int) -> None:
        self.budget = budget
        self.num_bins = len(rooms)
        self.by_room: list[list[int]] = [[] for _ in range(budget + 1)]
        self.words = [0] * (budget // _WORD + 1)  # bit r % _WORD of word r // _WORD: some bin has room r
        self.summary = 0  # bit w: word w is not 0
        for number, room in enumerate(rooms.tolist()):
            self.push(room, [number])

    def open(self, count: int) -> None:
        """Add empty bins."""
        self.push(self.budget, list(range(self.num_bins + count - 1, self.num_bins - 1, -1)))
        self.num_bins += count

    def push(self, room: int, bins: list[int]) -> None:
        if room == 0:
            return
        self.by_room[room] += bins
        self.words[room // _WORD] |= 1 << (room % _WORD)
        self.summary |= 1 << (room // _WORD)

    def pop(self, room: int, count: int) -> list[int]:
        """Take out up to `count` bins of this room, last in first."""
        bins = self.by_room[room]
        taken = bins[: -count - 1 : -1]
        del bins[-count:]
        if not bins:
            self.words[room // _WORD] &= ~(1 << (room % _WORD))
            if not self.words[room // _WORD]:
                self.summary &= ~(1 << (room // _WORD))
        return taken

    def least_room(self, size: int) -> int | None:
        """Return the least room, of those that bins have, that is at least `size`."""
        word = size // _WORD
        bits = self.words[word] >> (size % _WORD)
        if bits:
            return size + _lowest_bit(bits)
        later = self.summary >> (word + 1)
        if not later:
            return None
        word += 1 + _lowest_bit(later)
        return word * _WORD + _lowest_bit(self.words[word])


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
