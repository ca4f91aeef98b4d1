"""Which samples every step, micro-batch and data-parallel rank gets, and their token streams.

The plan of an epoch is a pure function of the lengths, the seed and the sizes, so every rank works it out
for itself, and resuming needs no more than the epoch and the step. Which samples a step holds depends only
on the global batch, never on how that is cut into ranks and micro-batches.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hfpar.data.packing import pack
from hfpar.data.stream import Sample, TokenStream, build_stream, pad_batch, unpad_batch

_TOKEN_WORK = 4096
"""Work of a token outside attention, in units of one query meeting one key: about that of a model whose
hidden size is several hundred. It only steers the balance between ranks."""


@dataclass(frozen=True)
class BatchPlan:
    """An epoch, cut up."""

    steps: list[list[list[list[int]]]]
    """`[step][micro_batch][dp_rank]` -> sample indices. In the last step a rank may have none: `[]`."""


def plan_epoch(
    lengths: Sequence[int],
    *,
    seed: int,
    epoch: int,
    dp_size: int,
    gradient_accumulation_steps: int,
    per_device_train_batch_size: int | None,
    max_tokens_per_batch: int | None,
) -> BatchPlan:
    """Deal out all samples of one epoch: each exactly once, none dropped, none repeated.

    With `per_device_train_batch_size`, step k holds the next `dp_size * per_device_train_batch_size *
    gradient_accumulation_steps` samples of the epoch's order. With `max_tokens_per_batch`, the samples are
    packed over the whole epoch, and step k holds the next `dp_size * gradient_accumulation_steps` packs.
    Either way equal products give equal steps. The last step holds what is left, spread evenly over the
    ranks in as few micro-batches as it needs. All ranks have the same number of micro-batches, and in each
    step about the same work.

    Args:
        lengths: Tokens in each sample.
        seed: With `epoch`, decides the order.
        epoch: Counts from 0.
        dp_size: Data-parallel ranks.
        gradient_accumulation_steps: Micro-batches of a full step.
        per_device_train_batch_size: Samples of a rank's micro-batch, or None.
        max_tokens_per_batch: Most tokens of a rank's micro-batch, or None. Exactly one of the two is set.

    Raises:
        ConfigError: A sample has more than `max_tokens_per_batch` tokens.
    """
    if (per_device_train_batch_size is None) == (max_tokens_per_batch is None):
        raise ValueError("exactly one of per_device_train_batch_size and max_tokens_per_batch must be set")
    order = _epoch_order(len(lengths), seed, epoch)
    if max_tokens_per_batch is None:
        items = [[index] for index in order]
    else:
        packs = pack([lengths[index] for index in order], max_tokens_per_batch)
        items = [[order[position] for position in group] for group in packs]
        random.Random(f"packs:{seed}:{epoch}").shuffle(items)
    items_per_slot = per_device_train_batch_size or 1
    global_batch = dp_size * gradient_accumulation_steps * items_per_slot
    steps = [
        _deal_step(items[begin : begin + global_batch], lengths, dp_size, items_per_slot)
        for begin in range(0, len(items), global_batch)
    ]
    return BatchPlan(steps)


def _epoch_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    order = list(range(num_samples))
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def _deal_step(
    items: list[list[int]], lengths: Sequence[int], dp_size: int, items_per_slot: int
) -> list[list[list[int]]]:
    """Deal a step's items, each a few samples that stay together, to `[micro_batch][dp_rank]`."""
    num_micro_batches = -(-len(items) // (dp_size * items_per_slot))
    work = [sum(lengths[index] * (lengths[index] + _TOKEN_WORK) for index in item) for item in items]
    slots: list[list[list[int]]] = [[] for _ in range(num_micro_batches)]
    for share in _balance(list(range(len(items))), work, dp_size):
        for micro_batch, part in enumerate(_balance(share, work, num_micro_batches)):
            slots[micro_batch].append([index for position in part for index in items[position]])
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


class StepLoader:
    """The steps of one data-parallel rank, epoch after epoch.

    Iterating yields the rest of the current epoch: for each step the rank's micro-batches. `epoch` and
    `step` always name the step that comes next, which is all that resuming needs.

    Args:
        samples: All samples, the same on every rank.
        seed: Of the order.
        dp_size: Data-parallel ranks.
        dp_rank: This rank's number among them.
        gradient_accumulation_steps: Micro-batches of a full step.
        per_device_train_batch_size: Samples of a micro-batch, padded and then unpadded; or None.
        max_tokens_per_batch: Most tokens of a packed micro-batch; or None.
        pad_token_id: What padding is made of.
        start_epoch: The epoch to begin with.
        start_step: The step in it to begin with.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        seed: int,
        dp_size: int,
        dp_rank: int,
        gradient_accumulation_steps: int,
        per_device_train_batch_size: int | None,
        max_tokens_per_batch: int | None,
        pad_token_id: int,
        start_epoch: int = 0,
        start_step: int = 0,
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.dp_size = dp_size
        self.dp_rank = dp_rank
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.per_device_train_batch_size = per_device_train_batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.pad_token_id = pad_token_id
        self.epoch = start_epoch
        self.step = start_step
        self._lengths = [len(sample.input_ids) for sample in samples]
        self._planned: tuple[int, BatchPlan] | None = None

    def __iter__(self) -> Iterator[list[TokenStream]]:
        """Yield the micro-batches of each step that is left in the current epoch, then turn to the next."""
        steps = self.plan(self.epoch).steps
        while self.step < len(steps):
            micro_batches = steps[self.step]
            self.step += 1
            yield [self._stream(micro_batch[self.dp_rank]) for micro_batch in micro_batches]
        self.epoch += 1
        self.step = 0

    def plan(self, epoch: int) -> BatchPlan:
        """Return the plan of an epoch; the last one asked for is kept."""
        if self._planned is None or self._planned[0] != epoch:
            plan = plan_epoch(
                self._lengths,
                seed=self.seed,
                epoch=epoch,
                dp_size=self.dp_size,
                gradient_accumulation_steps=self.gradient_accumulation_steps,
                per_device_train_batch_size=self.per_device_train_batch_size,
                max_tokens_per_batch=self.max_tokens_per_batch,
            )
            self._planned = (epoch, plan)
        return self._planned[1]

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch; all epochs have the same."""
        return len(self.plan(epoch).steps)

    @property
    def fingerprint(self) -> str:
        """Of the samples' lengths in their order, on which the plan rests: other data rarely has the same."""
        return hashlib.sha256(array("q", self._lengths).tobytes()).hexdigest()[:16]

    @property
    def padding_saved(self) -> float:
        """Share of tokens that would be padding if the current epoch's micro-batches were padded.

        Packs are compared with padded batches of as many samples, drawn in the same random order: packs
        themselves put samples of like length together.
        """
        plan = self.plan(self.epoch)
        batches = [
            indices for step in plan.steps for micro_batch in step for indices in micro_batch if indices
        ]
        if self.max_tokens_per_batch is not None:
            order = _epoch_order(len(self.samples), self.seed, self.epoch)
            size = max(1, round(len(order) / len(batches)))
            batches = [order[start : start + size] for start in range(0, len(order), size)]
        padded = sum(len(indices) * max(self._lengths[index] for index in indices) for indices in batches)
        return 1.0 - sum(self._lengths) / padded if padded else 0.0

    def _stream(self, indices: list[int]) -> TokenStream:
        samples = [self.samples[index] for index in indices]
        if self.max_tokens_per_batch is not None:
            return build_stream(samples)
        return unpad_batch(pad_batch(samples, self.pad_token_id))
