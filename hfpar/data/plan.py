"""Which samples every step, micro-batch and data-parallel rank of an epoch gets. Pure.

The plan of an epoch is a function of the lengths, the seed and the sizes alone, so every rank works it out
for itself, and resuming needs no more than the epoch and the step. Which samples a step holds depends only
on the global batch, never on how that is cut into ranks and micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hfpar.data.packing import Integers, Packs, pack_evenly

_TOKEN_WORK = 4096
"""Work of a token outside attention, in units of one query meeting one key: about that of a model whose
hidden size is several hundred. It only steers the balance between ranks."""

_TOLERANCE = 0.06
"""Packs whose attention differs by less than this share count as equal: chance puts them in order."""

# What is drawn by chance; each has random numbers of its own.
_ORDER, _SIMILAR, _STEPS, _LAST, _PARTS = range(5)


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """An epoch, cut into steps; a step is dealt to ranks and micro-batches when it is asked for."""

    items: Packs
    """What a rank takes whole, in the order of the epoch: packs, or single samples."""
    lengths: Integers
    """Tokens in each sample."""
    dp_size: int
    """Data-parallel ranks."""
    items_per_slot: int
    """Most items in a rank's micro-batch."""
    items_per_step: int
    """Items of every step but the last."""

    @property
    def num_steps(self) -> int:
        """Steps of the epoch."""
        return -(-self.items.num_packs // self.items_per_step)

    @property
    def num_last(self) -> int:
        """Items of the last step: fewer than `items_per_step` where it is partial."""
        return self.items.num_packs - max(self.num_steps - 1, 0) * self.items_per_step

    def step(self, number: int) -> list[list[list[int]]]:
        """Deal one step: `[micro_batch][dp_rank]` -> sample indices. In the last a rank may have none: `[]`.

        Raises:
            IndexError: There is no such step.
        """
        if not 0 <= number < self.num_steps:
            raise IndexError(f"step {number} of an epoch of {self.num_steps} steps")
        begin = number * self.items_per_step
        end = min(begin + self.items_per_step, self.items.num_packs)
        items = self.items.take(np.arange(begin, end))
        return _deal(items, self.lengths, self.dp_size, self.items_per_slot)

    @property
    def steps(self) -> list[list[list[list[int]]]]:
        """All steps, dealt one after another: for small data."""
        return [self.step(number) for number in range(self.num_steps)]


def plan_epoch(
    lengths: Sequence[int] | Integers,
    *,
    seed: int,
    epoch: int,
    dp_size: int,
    gradient_accumulation_steps: int,
    per_device_train_batch_size: int | None,
    max_tokens_per_batch: int | None,
    sources: Sequence[tuple[int, float]] | None = None,
) -> EpochPlan:
    """Deal out all samples of one epoch: each exactly once, unless `sources` say otherwise.

    With `per_device_train_batch_size`, step k holds the next `dp_size * per_device_train_batch_size *
    gradient_accumulation_steps` samples of the epoch's random order. With `max_tokens_per_batch`, the samples
    are packed over the whole epoch, and a step holds `dp_size * gradient_accumulation_steps` packs of similar
    work; the steps come in random order. Either way equal products give equal steps. The last step holds what
    is left, spread evenly over the ranks in as few micro-batches as it needs. All ranks have the same number of
    micro-batches, and in each step about the same work.

    Why packs of similar work: attention grows with the square of a document's length. Among eight packs of 8,192
    tokens that meet by chance (lengths log-normal, median 400, sigma 1), the one with the most work has about
    twice that of their mean, so seven ranks would wait for one; no dealing can mend that where each rank gets one
    pack. The price is that steps differ in what they hold: by how much depends on the packs. Those of plain best
    fit have documents of one kind each, and whole steps would be of short documents only. `pack_evenly` makes most
    packs alike in work, and each of short and long documents. Then only packs with a document that is more work
    than an average pack end up together, which balance calls for, and the rest meet by chance. In figures: the
    token-weighted mean of log2(length) of a step of eight packs has a standard deviation over steps of 0.6; it
    would be 1.4 with best fit's packs sorted by work, 0.5 with those in random order and 0.2 with even packs in
    random order (`benchmarks/packing.py`). Where a global batch has several micro-batches, dealing alone could do
    with less similarity, but then equal products would no longer give equal steps.

    Args:
        lengths: Tokens in each sample.
        seed: With `epoch`, decides the order.
        epoch: Counts from 0.
        dp_size: Data-parallel ranks.
        gradient_accumulation_steps: Micro-batches of a full step.
        per_device_train_batch_size: Samples of a rank's micro-batch, or None.
        max_tokens_per_batch: Most tokens of a rank's micro-batch, or None. Exactly one of the two is set.
        sources: `(number of samples, weight)` of each source, whose samples follow one another in `lengths`:
            an epoch then holds what `draw_samples` says. Without it: one source of weight 1.

    Raises:
        ConfigError: A sample has more than `max_tokens_per_batch` tokens.
    """
    if (per_device_train_batch_size is None) == (max_tokens_per_batch is None):
        raise ValueError("exactly one of per_device_train_batch_size and max_tokens_per_batch must be set")
    lengths = np.asarray(lengths, dtype=np.int64)
    order = epoch_order(len(lengths), sources, seed=seed, epoch=epoch)
    items_per_slot = per_device_train_batch_size or 1
    items_per_step = dp_size * gradient_accumulation_steps * items_per_slot
    if max_tokens_per_batch is None:
        items = Packs(order, np.arange(len(order) + 1))
    else:
        packs = pack_evenly(lengths[order], max_tokens_per_batch)
        packs = Packs(order[packs.indices], packs.bounds)
        items = packs.take(_similar_together(packs, lengths, items_per_step, seed=seed, epoch=epoch))
    return EpochPlan(items, lengths, dp_size, items_per_slot, items_per_step)


def epoch_order(
    num_samples: int, sources: Sequence[tuple[int, float]] | None, *, seed: int, epoch: int
) -> Integers:
    """Return the samples of an epoch in random order.

    Raises:
        ValueError: The sources don't have `num_samples` samples together.
    """
    sources = [(num_samples, 1.0)] if sources is None else sources
    if sum(count for count, _ in sources) != num_samples:
        raise ValueError(f"sources {list(sources)} for {num_samples} samples")
    drawn = draw_samples(sources, seed=seed, epoch=epoch)
    return drawn[_permutation(len(drawn), _ORDER, seed=seed, epoch=epoch)]


def num_draws(num_samples: int, weight: float) -> int:
    """Return how many samples an epoch draws from a source: `num_samples * weight`, rounded, but not to 0.

    Raises:
        ValueError: The weight is not a number above 0.
    """
    if not 0 < weight < float("inf"):
        raise ValueError(f"weight {weight}: not a number above 0")
    return max(round(num_samples * weight), min(num_samples, 1))


def draw_samples(sources: Sequence[tuple[int, float]], *, seed: int, epoch: int) -> Integers:
    """Choose the samples of an epoch, source after source.

    A source gives `num_draws` samples: all of them as often as that goes, and for the rest the next ones of a
    random order of its samples, which each epoch goes on with where the last one stopped. So after any number
    of epochs no sample of a source has come more than once more than another.
    """
    drawn, start = [], 0
    for number, (count, weight) in enumerate(sources):
        if count:
            passes, part = divmod(num_draws(count, weight), count)
            drawn.append(np.tile(np.arange(start, start + count), passes))
            if part:
                order = _permutation(count, _PARTS + number, seed=seed, epoch=0)
                drawn.append(start + order[(epoch * part + np.arange(part)) % count])
        start += count
    return np.concatenate(drawn) if drawn else np.empty(0, np.int64)


def _similar_together(
    packs: Packs, lengths: Integers, packs_per_step: int, *, seed: int, epoch: int
) -> Integers:
    """Order packs so that every step takes some of similar work, and steps come in random order."""
    if packs.num_packs == 0:
        return np.empty(0, np.int64)
    work = np.add.reduceat(np.maximum(lengths[packs.indices], 1) ** 2, packs.bounds[:-1])
    noise = _random(packs.num_packs, _SIMILAR, seed=seed, epoch=epoch) / 2.0**64
    by_work = np.argsort(work * (1 + _TOLERANCE * noise), kind="stable")
    num_full, num_last = divmod(packs.num_packs, packs_per_step)
    # The last, partial step is of any work, not always of the most.
    position = packs_per_step * int(_random(1, _LAST, seed=seed, epoch=epoch)[0] % np.uint64(num_full + 1))
    last = by_work[position : position + num_last]
    full = np.delete(by_work, np.s_[position : position + num_last]).reshape(num_full, packs_per_step)
    steps = full[_permutation(num_full, _STEPS, seed=seed, epoch=epoch)]
    return np.concatenate((steps.ravel(), last))


def _random(count: int, purpose: int, *, seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    """Return `(count,)` random uint64. The generator's raw output is the same in every version of numpy."""
    key = (seed % 2**64) | (epoch << 64)
    return np.random.Philox(key=key, counter=purpose << 192).random_raw(count)


def _permutation(count: int, purpose: int, *, seed: int, epoch: int) -> Integers:
    return np.argsort(_random(count, purpose, seed=seed, epoch=epoch), kind="stable")


def _deal(items: Packs, lengths: Integers, dp_size: int, items_per_slot: int) -> list[list[list[int]]]:
    """Deal a step's items, each a few samples that stay together, to `[micro_batch][dp_rank]`."""
    num_micro_batches = -(-items.num_packs // (dp_size * items_per_slot))
    sizes = lengths[items.indices]
    work = np.add.reduceat(sizes * (sizes + _TOKEN_WORK), items.bounds[:-1]).tolist()
    samples = items.to_lists()
    slots: list[list[list[int]]] = [[] for _ in range(num_micro_batches)]
    for share in _balance(list(range(len(samples))), work, dp_size):
        for micro_batch, part in enumerate(_balance(share, work, num_micro_batches)):
            slots[micro_batch].append([index for position in part for index in samples[position]])
    return slots


def _balance(items: list[int], work: Sequence[int], num_bins: int) -> list[list[int]]:
    """Split items into bins of equal count (to within one) and nearly equal work.

    From the most work to the least, each goes to the bin with the least work so far that may take one more.
    The bins come back with the fullest first, so that ranks that call this meet heavy with heavy.
    """
    floor, num_larger = divmod(len(items), num_bins)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, number) for number in range(num_bins)]
    for item in sorted(items, key=lambda item: (-work[item], item)):
        # A bin at the floor count may grow once more while larger bins are still to be had.
        total, number = heapq.heappop(heap)
        bins[number].append(item)
        if len(bins[number]) > floor:
            num_larger -= 1
            if num_larger == 0:
                heap = [entry for entry in heap if len(bins[entry[1]]) < floor]
                heapq.heapify(heap)
        elif len(bins[number]) < floor or num_larger > 0:
            heapq.heappush(heap, (total + work[item], number))
    bins.sort(key=lambda part: -sum(work[item] for item in part))
    return bins
