"""What an epoch looks like: packs or padded batches, and steps, from the plan that training uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from hfpar.config.schema import SFTConfig
from hfpar.data.loader import StepLoader
from hfpar.datatool.gather import SourceFacts
from hfpar.train.data import hold_out


@dataclass(frozen=True)
class Batches:
    """The first epoch, and the length of the run."""

    dp_size: int
    gradient_accumulation_steps: int
    per_device_train_batch_size: int | None
    max_tokens_per_batch: int | None
    num_samples: int
    """Of the first epoch, without those held out."""
    num_held_out: int
    num_packs: int | None
    """None where batches are padded."""
    fill: float
    """Share of the packs' budget, or of padded batches, that is tokens."""
    steps_per_epoch: int
    num_train_epochs: float
    total_steps: int


def plan_batches(config: SFTConfig, sources: Sequence[SourceFacts], dp_size: int) -> Batches:
    """Plan the first epoch.

    Args:
        config: settled.
        sources: the entries of `dataset`.
        dp_size: data-parallel ranks.

    Raises:
        ConfigError: fewer samples than the split of `eval_fraction` needs.
    """
    assert config.gradient_accumulation_steps is not None
    kept, held_out = hold_out(cast(Any, sources), config.eval_fraction, config.seed)
    parts = [source.lengths[part] for source, part in zip(sources, kept, strict=True)]
    lengths = np.concatenate(parts)
    loader = StepLoader(
        cast(Any, range(len(lengths))),  # only the lengths are asked
        lengths=lengths,
        sources=[(len(part), source.weight) for source, part in zip(sources, parts, strict=True)],
        seed=config.seed,
        dp_size=dp_size,
        dp_rank=0,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        max_tokens_per_batch=config.max_tokens_per_batch,
        pad_token_id=0,
    )
    items = loader.plan(0).items
    fill = 1 - loader.padding_saved
    if config.max_tokens_per_batch is not None:
        fill = int(lengths[items.indices].sum()) / (items.num_packs * config.max_tokens_per_batch)
    return Batches(
        dp_size=dp_size,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        max_tokens_per_batch=config.max_tokens_per_batch,
        num_samples=len(items.indices),
        num_held_out=sum(map(len, held_out)),
        num_packs=items.num_packs if config.max_tokens_per_batch is not None else None,
        fill=fill,
        steps_per_epoch=loader.num_steps(0),
        num_train_epochs=config.num_train_epochs,
        total_steps=config.max_steps if config.max_steps > 0 else loader.total_steps(config.num_train_epochs),
    )
