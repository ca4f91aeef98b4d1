"""From the config to the samples of a run and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from hfpar.config.schema import SFTConfig
from hfpar.data.chat import TokenizeReport, tokenize_rows
from hfpar.data.loader import StepLoader
from hfpar.data.packing import pack
from hfpar.data.sources import load_conversations
from hfpar.data.stream import Sample, TokenStream, build_stream
from hfpar.errors import ConfigError, DataError
from hfpar.parallel.layout import Layout


@dataclass(frozen=True)
class RunData:
    """What a run is trained and evaluated on, the same on every rank."""

    samples: list[Sample]
    report: TokenizeReport
    eval_samples: list[Sample]


def read_data(
    config: SFTConfig, tokenizer: Any, layout: Layout, *, model_config: PretrainedConfig
) -> RunData:
    """Read, tokenize and label the data.

    Args:
        config: names the files.
        tokenizer: with its chat template.
        layout: for the number of data-parallel ranks, each of which needs a sample.
        model_config: the model's, which bounds lengths and token ids.

    Raises:
        DataError: nothing usable in the files; the message names the line.
        ConfigError: fewer samples than ranks, or samples that don't fit the model.
    """
    assert config.dataset is not None
    samples, report = _read("dataset", config.dataset, tokenizer, config.max_length)
    if len(samples) < layout.dp_size:
        raise ConfigError(
            f"dataset: {len(samples)} usable samples for {layout.dp_size} data-parallel ranks; "
            f"use --num_processes {len(samples)} or fewer"
        )
    check_fit("dataset", samples, model_config)
    eval_samples: list[Sample] = []
    if config.eval_dataset is not None:
        eval_samples, _ = _read("eval_dataset", config.eval_dataset, tokenizer, config.max_length)
        check_fit("eval_dataset", eval_samples, model_config)
    return RunData(samples, report, eval_samples)


def check_fit(key: str, samples: Sequence[Sample], model_config: PretrainedConfig) -> None:
    """Refuse samples that the model can't take, or not the same in every batch.

    Raises:
        ConfigError: more tokens than positions, token ids that the model has no embedding for, or lengths on
            both sides of where longrope changes its factors.
    """
    text_config = model_config.get_text_config()
    lengths = [len(sample.input_ids) for sample in samples]
    max_positions = getattr(text_config, "max_position_embeddings", None)
    if max_positions is not None and max(lengths) > max_positions:
        raise ConfigError(
            f"max_length: a sample of {key} has {max(lengths)} tokens, but the model has {max_positions} "
            f"positions; set max_length to {max_positions} or less"
        )
    vocab_size = getattr(text_config, "vocab_size", None)
    largest = max(max(sample.input_ids) for sample in samples)
    if vocab_size is not None and largest >= vocab_size:
        raise ConfigError(
            f"model_name_or_path: its tokenizer makes token {largest} of {key}, but the model has {vocab_size} "
            "tokens; use the model's own tokenizer, or resize the model's embeddings first"
        )
    # Transformers gives a whole call the factors of its longest document: batches would decide a short one's.
    short = _longest_short_of_longrope(text_config)
    if short is not None and min(lengths) <= short < max(lengths):
        raise ConfigError(
            f"max_length: {key} has samples of {min(lengths)} and of {max(lengths)} tokens, but the model's longrope "
            f"computes those up to {short} in another way, and a batch in one way; set max_length to {short} or less"
        )


def _longest_short_of_longrope(text_config: Any) -> int | None:
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [
        rope,
        *(value for value in rope.values() if isinstance(value, dict)),
    ]  # one dict, or one a layer type
    bounds = [
        kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"
    ]
    return min(bounds, default=None)


def _read(
    key: str, paths: str | list[str], tokenizer: Any, max_length: int
) -> tuple[list[Sample], TokenizeReport]:
    try:
        return tokenize_rows(load_conversations(paths), tokenizer, max_length)
    except DataError as error:
        raise DataError(f"{key}: {error}") from error


def make_loader(
    config: SFTConfig, samples: Sequence[Sample], layout: Layout, *, pad_token_id: int
) -> StepLoader:
    """The order in which this rank sees the samples."""
    assert config.gradient_accumulation_steps is not None
    return StepLoader(
        samples,
        seed=config.seed,
        dp_size=layout.dp_size,
        dp_rank=layout.dp_rank,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
        per_device_train_batch_size=config.per_device_train_batch_size,
        max_tokens_per_batch=config.max_tokens_per_batch,
        pad_token_id=pad_token_id,
    )


def eval_batches(samples: Sequence[Sample], config: SFTConfig, layout: Layout) -> list[TokenStream]:
    """This rank's share of the held-out samples, as many batches as every other rank has.

    Packed as in training if training is packed; otherwise `per_device_eval_batch_size` samples of like length
    a batch. The mean over all label tokens is the same either way.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    if config.max_tokens_per_batch is not None:
        batches = pack(lengths, config.max_tokens_per_batch)
    else:
        by_length = sorted(range(len(samples)), key=lambda index: (-lengths[index], index))
        size = config.per_device_eval_batch_size
        batches = [by_length[start : start + size] for start in range(0, len(by_length), size)]
    num_rounds = -(-len(batches) // layout.dp_size)
    batches += [[]] * (num_rounds * layout.dp_size - len(batches))
    return [
        build_stream([samples[index] for index in batch])
        for batch in batches[layout.dp_rank :: layout.dp_size]
    ]
