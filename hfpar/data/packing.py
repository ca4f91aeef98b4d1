"""Bin packing of samples into micro-batches: best fit, longest first. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hfpar.errors import ConfigError

_WORD = 1024  # bits in a word of the capacity index


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
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
    if not len(lengths):
        return []
    sizes = np.maximum(np.asarray(lengths, dtype=np.int64), 1)
    if int(sizes.max()) > budget:
        raise ConfigError(
            f"max_tokens_per_batch: {budget} is less than the longest sample, {int(sizes.max())} tokens; "
            "raise it or lower max_length"
        )
    order = np.argsort(-sizes, kind="stable")
    ordered = sizes[order]
    edges = [0, *(np.flatnonzero(np.diff(ordered)) + 1).tolist(), len(ordered)]
    indices = order.tolist()
    groups: list[list[int]] = []
    open_groups = _OpenGroups(budget)
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        size = int(ordered[begin])
        while begin < end:
            found = open_groups.pop(size)
            if found is None:
                found = (budget, [])
                groups.append(found[1])
            room, group = found
            # What is left of the fullest fitting group is again the best fit for an equal sample.
            count = min(room // size, end - begin)
            group.extend(indices[begin : begin + count])
            open_groups.push(room - count * size, group)
            begin += count
    return groups


class _OpenGroups:
    """Groups by the room they have left; finds the least sufficient room in two steps over bit sets."""

    def __init__(self, budget: int) -> None:
        self.by_room: list[list[list[int]]] = [[] for _ in range(budget + 1)]
        self.words = [0] * (budget // _WORD + 1)  # bit r % _WORD of word r // _WORD: some group has room r
        self.summary = 0  # bit w: word w is not 0

    def push(self, room: int, group: list[int]) -> None:
        if room == 0:
            return
        self.by_room[room].append(group)
        self.words[room // _WORD] |= 1 << (room % _WORD)
        self.summary |= 1 << (room // _WORD)

    def pop(self, size: int) -> tuple[int, list[int]] | None:
        """Take out a group with the least room that is at least `size`."""
        word = size // _WORD
        bits = self.words[word] >> (size % _WORD)
        if bits:
            room = size + _lowest_bit(bits)
        else:
            later = self.summary >> (word + 1)
            if not later:
                return None
            word += 1 + _lowest_bit(later)
            room = word * _WORD + _lowest_bit(self.words[word])
        groups = self.by_room[room]
        group = groups.pop()
        if not groups:
            self.words[word] &= ~(1 << (room % _WORD))
            if not self.words[word]:
                self.summary &= ~(1 << word)
        return room, group


def _lowest_bit(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
