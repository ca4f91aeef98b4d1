"""The steps of one data-parallel rank as token streams, epoch after epoch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence

import numpy as np

from hfpar.data.packing import Integers
from hfpar.data.plan import EpochPlan, epoch_order, plan_epoch
from hfpar.data.stream import Sample, TokenStream, build_stream, pad_batch, unpad_batch

_ORDER_VERSION = "order 2"
"""Part of `StepLoader.fingerprint`: to be changed when equal data would come in another order."""


class StepLoader:
    """The steps of one data-parallel rank, epoch after epoch.

    Iterating yields the rest of the current epoch: for each step the rank's micro-batches. `epoch` and
    `step` always name the step that comes next, which is all that resuming needs: set them.

    Args:
        samples: All samples, the same on every rank.
        seed: Of the order.
        dp_size: Data-parallel ranks.
        dp_rank: This rank's number among them.
        gradient_accumulation_steps: Micro-batches of a full step.
        per_device_train_batch_size: Samples of a micro-batch, padded and then unpadded; or None.
        max_tokens_per_batch: Most tokens of a packed micro-batch; or None.
        pad_token_id: What padding is made of.
        lengths: Tokens in each sample. Without it: what `samples.lengths` says, or else they are counted.
        sources: `(number of samples, weight)` of each source, whose samples follow one another. Without it: one
            source of weight 1.
        content: A digest of the samples, for the fingerprint.
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
        lengths: Sequence[int] | Integers | None = None,
        sources: Sequence[tuple[int, float]] | None = None,
        content: str = "",
    ) -> None:
        self.samples = samples
        self.seed = seed
        self.dp_size = dp_size
        self.dp_rank = dp_rank
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.per_device_train_batch_size = per_device_train_batch_size
        self.max_tokens_per_batch = max_tokens_per_batch
        self.pad_token_id = pad_token_id
        self.content = content
        self.sources = [(len(samples), 1.0)] if sources is None else list(sources)
        self.epoch = 0
        self.step = 0
        if lengths is None:
            lengths = getattr(samples, "lengths", None)
        if lengths is None:
            lengths = [len(sample.input_ids) for sample in samples]
        self._lengths = np.asarray(lengths, dtype=np.int64)
        self._planned: tuple[int, EpochPlan] | None = None
        self._num_steps: dict[int, int] = {}

    def __iter__(self) -> Iterator[list[TokenStream]]:
        """Yield the micro-batches of each step that is left in the current epoch, then turn to the next."""
        plan = self.plan(self.epoch)
        while self.step < plan.num_steps:
            micro_batches = plan.step(self.step)
            self.step += 1
            yield [self._stream(micro_batch[self.dp_rank]) for micro_batch in micro_batches]
        self.epoch += 1
        self.step = 0

    def plan(self, epoch: int) -> EpochPlan:
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
                sources=self.sources,
            )
            self._planned = (epoch, plan)
        return self._planned[1]

    @property
    def _epochs_are_equal(self) -> bool:
        """Whether all epochs have the same number of steps: packs of other samples may be more or fewer."""
        return self.max_tokens_per_batch is None or all(weight == int(weight) for _, weight in self.sources)

    def num_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch.

        All epochs have the same, unless samples are packed and a source's weight is not a whole number.
        """
        key = 0 if self._epochs_are_equal else epoch
        if key not in self._num_steps:
            self._num_steps[key] = self.plan(epoch).num_steps
        return self._num_steps[key]

    def total_steps(self, num_epochs: float) -> int:
        """Return the number of steps of the first `num_epochs` epochs; of a partial one its share, rounded up."""
        if self._epochs_are_equal:
            return math.ceil(num_epochs * self.num_steps(0))
        whole = int(num_epochs)
        total = sum(self.num_steps(epoch) for epoch in range(whole))
        if num_epochs > whole:
            total += math.ceil(round((num_epochs - whole) * self.num_steps(whole), 6))
        return total

    @property
    def fingerprint(self) -> str:
        """Of all that decides the order but the seed: the samples' lengths, the sources and their weights.

        Other data rarely has the same, and never where `content` was given.
        """
        digest = hashlib.sha256(self._lengths.tobytes() + self.content.encode())
        digest.update(repr((_ORDER_VERSION, [(int(n), float(w)) for n, w in self.sources])).encode())
        return digest.hexdigest()[:16]

    @property
    def padding_saved(self) -> float:
        """Share of the tokens that would be padding if batches of the current epoch were padded.

        The batches are as large as a rank's micro-batches, for packs as their mean number of samples, and
        drawn in random order.
        """
        plan = self.plan(self.epoch)
        order = epoch_order(len(self._lengths), self.sources, seed=self.seed, epoch=self.epoch)
        if not len(order):
            return 0.0
        size = self.per_device_train_batch_size or max(1, round(len(order) / plan.items.num_packs))
        lengths = self._lengths[order]
        starts = np.arange(0, len(order), size)
        counts = np.diff(np.append(starts, len(order)))
        padded = int((np.maximum.reduceat(lengths, starts) * counts).sum())
        return 1.0 - int(lengths.sum()) / padded if padded else 0.0

    def _stream(self, indices: list[int]) -> TokenStream:
        samples = [self.samples[index] for index in indices]
        if self.max_tokens_per_batch is not None:
            return build_stream(samples)
        return unpad_batch(pad_batch(samples, self.pad_token_id))
