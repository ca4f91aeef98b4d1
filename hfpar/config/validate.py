"""Refuse settings that cannot work, as far as the settings alone can tell; nothing here reads the machine."""

import math
from collections.abc import Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.errors import ConfigError

TRACKERS = (
    "aim",
    "all",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "none",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
"""What `report_to` may name: Accelerate's trackers, all that are installed, or none."""

_AT_LEAST_ONE = (
    "tp_size",
    "sp_size",
    "cp_size",
    "per_device_train_batch_size",
    "max_tokens_per_batch",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "logging_steps",
    "eval_steps",
    "save_steps",
    "save_total_limit",
    "dataset_num_proc",
    "streaming_window",
)
_AT_LEAST_ZERO = ("learning_rate", "warmup_steps", "weight_decay", "max_grad_norm", "seed", "lora_r")
_ABOVE_ZERO = ("adam_epsilon", "num_train_epochs", "lora_alpha")
_BELOW_ONE = ("adam_beta1", "adam_beta2", "lora_dropout", "eval_fraction")
_NOT_EMPTY = (
    "model_name_or_path",
    "dataset",
    "eval_dataset",
    "dataset_columns",
    "decontaminate_against",
    "benchmark_files",
    "chat_template",
    "chat_template_kwargs",
    "token_cache",
    "lora_target_modules",
    "modules_to_save",
    "trainable_token_indices",
    "train_tokens",
    "llm_int8_skip_modules",
    "output_dir",
    "report_to",
)


def validate(config: SFTConfig) -> None:
    """Refuse impossible values, and combinations of settings that contradict each other.

    Raises:
        ConfigError: One line with the key, its value, what is allowed and how to mend it.
    """
    _check_numbers(config)
    _check_text(config)
    _check_lora(config)
    _check_quantization(config)
    _check_data(config)
    _check_batches(config)
    _check_schedule(config)
    _check_trackers(config.report_to)
    if config.overwrite and config.resume:
        raise ConfigError("overwrite: true contradicts resume: true; overwrite starts anew, resume goes on")


def show(value: object) -> str:
    """A value as a person would write it, on one line and not too long."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        text = "[" + ", ".join(show(item) for item in value) + "]"
    elif isinstance(value, dict):
        text = "{" + ", ".join(f"{name}: {show(item)}" for name, item in value.items()) + "}"
    elif isinstance(value, DataSource):
        text = show(value.path)
    elif isinstance(value, str) and value.strip() == value and value.isprintable() and value:
        text = value
    else:
        text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def names_in(value: str | list[str]) -> list[str]:
    """The names of a setting that takes several, with commas or as a list."""
    texts = [value] if isinstance(value, str) else value
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def first_of(texts: Sequence[str], most: int) -> str:
    """The first of several, with commas, and how many more there are."""
    more = f" and {len(texts) - most:,} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def did_you_mean(name: str, names: list[str] | tuple[str, ...]) -> str:
    """`; did you mean X?` for the nearest of `names`, or nothing where none is near."""
    near = get_close_matches(name.lower(), names, n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""


def _check_numbers(config: SFTConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise _must_be(config, field.name, "a finite number")
    for names, low, allowed in (
        (_AT_LEAST_ONE, 1, "a whole number of at least 1"),
        (_AT_LEAST_ZERO, 0, "0 or more"),
    ):
        for name in names:
            value = getattr(config, name)
            if value is not None and value < low:
                raise _must_be(config, name, allowed)
    for name in _ABOVE_ZERO:
        if getattr(config, name) <= 0:
            raise _must_be(config, name, "above 0")
    for name in _BELOW_ONE:
        if not 0 <= getattr(config, name) < 1:
            raise _must_be(config, name, "at least 0 and below 1")
    if config.seed >= 2**32:
        raise _must_be(config, "seed", "below 2**32")


def _check_text(config: SFTConfig) -> None:
    for name in _NOT_EMPTY:
        value = getattr(config, name)
        texts = [str(getattr(item, "path", item)) for item in _as_list(value)]
        if value is not None and (not value or any(not text.strip() for text in texts)):
            raise ConfigError(f"{name}: {show(value)} is empty; give a value, or leave {name} out")
    targets = _as_list(config.lora_target_modules)
    if len(targets) > 1 and "all-linear" in targets:
        raise ConfigError(
            f"lora_target_modules: {show(targets)}; all-linear stands alone, and includes the others"
        )


_ADAPTER_SETTINGS = (
    "modules_to_save",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "adapter_dtype",
    "trainable_token_indices",
    "train_tokens",
)
"""Beside those whose names begin with `lora_`."""


def _check_lora(config: SFTConfig) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        if (
            not config.lora_r
            and field.name.startswith(("lora_", *_ADAPTER_SETTINGS))
            and value != field.default
        ):
            raise ConfigError(
                f"{field.name}: {show(value)} without lora_r, so that all weights would be trained; set lora_r, "
                f"or leave {field.name} out"
            )
    _check_first_values(config)
    _check_tokens(config)


def _check_first_values(config: SFTConfig) -> None:
    if config.init_lora_weights == "eva":
        raise ConfigError(
            "init_lora_weights: eva begins from what layers compute on the data, for which no engine holds the model "
            "before training; use pissa or olora, which begin from the weights, or default"
        )
    if config.init_lora_weights == "loftq" and config.quantization not in _FOUR_BIT:
        raise ConfigError(
            f"init_lora_weights: loftq begins with what 4 bits lose of each weight, and quantization is "
            f"{show(config.quantization or 'none')}; set quantization: nf4, or use default"
        )
    if config.use_dora and (config.tp_size or 1) > 1:
        raise ConfigError(
            f"use_dora: true with tp_size: {config.tp_size}, but it takes norms of whole rows, which no rank has; use "
            "plain LoRA, or leave tp_size at 1"
        )


def _check_tokens(config: SFTConfig) -> None:
    numbers = config.trainable_token_indices or []
    if any(number < 0 for number in numbers):
        raise _must_be(config, "trainable_token_indices", "token numbers of 0 or more")
    if numbers and (config.tp_size or 1) > 1:
        raise ConfigError(
            f"trainable_token_indices: {show(numbers)} with tp_size: {config.tp_size}, whose ranks share the rows; "
            "leave tp_size at 1"
        )
    names = _as_list(config.train_tokens)
    for alone in ("auto", "none"):
        if alone in names and len(names) > 1:
            raise ConfigError(f"train_tokens: {show(names)}; {alone} stands alone")


_FOUR_BIT = ("nf4", "fp4")


def _check_quantization(config: SFTConfig) -> None:
    method = config.quantization
    if method not in (None, "none") and not config.lora_r:
        raise ConfigError(
            f"quantization: {method} without lora_r; a quantized base can't be trained itself: set lora_r, such as 16, "
            "or leave quantization out"
        )
    for name in ("bnb_4bit_use_double_quant", "bnb_4bit_quant_storage"):
        value = getattr(config, name)
        if value not in (None, "auto") and method is not None and method not in _FOUR_BIT:
            raise ConfigError(
                f"{name}: {show(value)} is of nf4 and fp4, not of quantization: {method}; leave it out"
            )


_TAKEN_BY_RENDERING = (
    "messages",
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
    "return_dict",
    "return_tensors",
    "return_assistant_tokens_mask",
    "padding",
    "truncation",
    "max_length",
)
"""Arguments of `apply_chat_template` that aren't the template's."""


def _check_data(config: SFTConfig) -> None:
    for name in config.chat_template_kwargs or {}:
        if name in _TAKEN_BY_RENDERING:
            raise ConfigError(f"chat_template_kwargs: {name} isn't a template's to be told; leave it out")
    for key in ("dataset", "eval_dataset"):
        for source in _as_list(getattr(config, key)):
            if isinstance(source, DataSource) and not (math.isfinite(source.weight) and source.weight > 0):
                raise ConfigError(f"{key}: {source.path} has weight {source.weight}; must be above 0")
            if isinstance(source, DataSource) and source.weight != 1 and key == "eval_dataset":
                raise ConfigError(f"{key}: {source.path} has weight {source.weight}; held-out data has none")
    if config.eval_fraction and config.eval_dataset is not None:
        raise ConfigError(
            f"eval_fraction: {config.eval_fraction} contradicts eval_dataset: {show(config.eval_dataset)}; keep one"
        )
    has_eval = config.eval_dataset is not None or config.eval_fraction
    if config.eval_steps is not None and config.dataset is not None and not has_eval:
        raise ConfigError(
            f"eval_steps: {config.eval_steps} has nothing to evaluate; set eval_dataset or eval_fraction too"
        )
    if config.decontaminate_against is None:
        for name, default in (("decontaminate", "warn"), ("benchmark_files", None)):
            if getattr(config, name) != default:
                raise ConfigError(
                    f"{name}: {show(getattr(config, name))} without decontaminate_against; name the benchmarks with "
                    f"it, or leave {name} out"
                )
    if config.streaming and config.max_steps == -1:
        raise ConfigError("streaming: true, so that nobody knows the number of steps; set max_steps")
    if config.streaming and config.eval_fraction:
        raise ConfigError(
            f"streaming: true with eval_fraction: {config.eval_fraction}; use eval_dataset instead"
        )


def _check_batches(config: SFTConfig) -> None:
    budget = config.max_tokens_per_batch
    if config.max_length < 2:
        raise _must_be(config, "max_length", "at least 2: the first token of a sample is never a target")
    if budget is None:
        return
    if config.per_device_train_batch_size is not None:
        raise ConfigError(
            f"per_device_train_batch_size: {config.per_device_train_batch_size} contradicts "
            f"max_tokens_per_batch: {budget}; the first pads, the second packs: keep one"
        )
    if budget < config.max_length:
        raise ConfigError(
            f"max_tokens_per_batch: {budget} is below max_length: {config.max_length}, so that a long "
            "sample would not fit; raise the first or lower the second"
        )


def _check_schedule(config: SFTConfig) -> None:
    if config.max_steps < 1 and config.max_steps != -1:
        raise _must_be(config, "max_steps", "at least 1, or -1 for no limit")
    if not 0 <= config.warmup_ratio <= 1:
        raise _must_be(config, "warmup_ratio", "from 0 to 1")
    if config.warmup_ratio and config.warmup_steps:
        raise ConfigError(
            f"warmup_ratio: {config.warmup_ratio} contradicts warmup_steps: {config.warmup_steps}; keep one"
        )


def _check_trackers(report_to: str | list[str]) -> None:
    names = _as_list(report_to)
    for name in names:
        if name not in TRACKERS:
            raise ConfigError(
                f"report_to: {show(name)}; must be of {', '.join(TRACKERS)}{did_you_mean(name, TRACKERS)}"
            )
    for alone in ("none", "all"):
        if alone in names and len(names) > 1:
            raise ConfigError(f"report_to: {show(names)}; {alone} stands alone")


def _as_list(value: Any) -> list[Any]:
    """The items of a setting that may be one text or several; the names of a mapping."""
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)


def _must_be(config: SFTConfig, name: str, allowed: str) -> ConfigError:
    return ConfigError(f"{name}: {show(getattr(config, name))}; must be {allowed}")
