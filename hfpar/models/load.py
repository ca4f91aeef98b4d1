"""From a model's name to weights on the right ranks: whole, cut by DeepSpeed, or one slice a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.data.chat.templates import resolve_chat_template
from hfpar.errors import ConfigError, first_line
from hfpar.models.quantization import Quantization, quantize_skeleton

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_folder(model_name_or_path: str, *, files: Sequence[str] | None = None) -> Path:
    """The local folder of a model: itself, or the snapshot of a hub id.

    Args:
        model_name_or_path: the folder or the id.
        files: patterns of those to download; None: all that hfpar reads.

    Raises:
        ConfigError: neither a folder with a config.json nor an id that the hub (or its cache) has.
    """
    folder = Path(model_name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"model_name_or_path: {folder} has no config.json")
    if folder.is_absolute() or model_name_or_path.startswith(".") or model_name_or_path.count("/") > 1:
        raise ConfigError(f"model_name_or_path: {model_name_or_path} is neither a folder nor a hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionResolutionError

    try:
        return Path(
            snapshot_download(
                model_name_or_path,
                allow_patterns=None if files is None else list(files),
                ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx"],
            )
        )
    except (OSError, ValueError, RevisionResolutionError) as error:
        reason = first_line(error)
        raise ConfigError(
            f"model_name_or_path: {model_name_or_path} is no folder here, and the hub didn't give it: {reason}"
        ) from error


def load_model_config(folder: Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The model's config.

    Raises:
        ConfigError: not readable, or of a type that Transformers doesn't know.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, json.JSONDecodeError) as error:
        raise ConfigError(f"model_name_or_path: {folder}: {first_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
        raise ConfigError(f"model_name_or_path: {folder}: {config.model_type} isn't a causal language model")
    if type(config) in AutoModelForSeq2SeqLM._model_mapping:
        raise ConfigError(
            f"model_name_or_path: {folder}: {config.model_type} is an encoder-decoder; use a decoder-only model"
        )
    return config


def load_tokenizer(folder: Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer, with the template that `chat_template` names (chatml or a Jinja file) if one is given.

    Raises:
        ConfigError: no tokenizer there, or an empty one, which Transformers makes for families that it knows where
            there are no files of one; no such template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        reason = first_line(error) if _has_tokenizer_files(folder) else "it has no tokenizer.json"
        raise ConfigError(f"model_name_or_path: {folder} has no usable tokenizer: {reason}") from error
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.added_tokens_decoder):
        missing = "" if _has_tokenizer_files(folder) else "it has no tokenizer.json, and "
        reason = f"{missing}it knows no tokens but special and added ones"
        raise ConfigError(f"model_name_or_path: {folder} has no usable tokenizer: {reason}")
    if chat_template is not None:
        is_token = "<|im_end|>" in tokenizer.get_vocab()
        close_with_eos = not is_token and bool(tokenizer.eos_token)
        tokenizer.chat_template = resolve_chat_template(chat_template, close_with_eos=close_with_eos)
    return tokenizer


def _has_tokenizer_files(folder: Path) -> bool:
    return any(
        (folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
    )


def weights_dtype(name: str, config: PretrainedConfig) -> torch.dtype:
    """The dtype that `dtype` asks for; `auto`: the checkpoint's own, or float32 if it doesn't say."""
    if name != "auto":
        return DTYPES[name]
    dtype = getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def load_model(
    folder: Path,
    config: PretrainedConfig,
    *,
    settings: EngineSettings,
    dtype: torch.dtype,
    attn_implementation: str,
    trust_remote_code: bool = False,
    tp_size: int = 1,
    quantization: Quantization | None = None,
) -> Any:
    """The model, as much of it as this rank keeps.

    Under FSDP2, tensor parallelism and quantization its weights stay on the meta device until they have been cut
    (`fill_from_checkpoint`); under ZeRO-3 DeepSpeed cuts each weight as it is read; otherwise every rank reads the
    whole model.

    Args:
        folder: a checkpoint folder.
        config: the model's.
        settings: the engine's.
        dtype: of the weights.
        attn_implementation: a name that Transformers knows.
        trust_remote_code: whether code in the folder may run.
        tp_size: ranks that will cut the weights among them.
        quantization: how linear layers are held in few bits; None: they aren't.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if isinstance(settings, FSDP2Settings) or tp_size > 1 or quantization is not None:
        model = _skeleton_of(folder, config, dtype, options)
        if quantization is not None:
            quantize_skeleton(model, quantization)
        return model
    with _cut_while_loading(settings, dtype):
        return whole_model(AutoModelForCausalLM, folder, config=config, dtype=dtype, **options)


def whole_model(model_class: Any, folder: Path, **options: Any) -> Any:
    """`from_pretrained`, but a weight that the checkpoint lacks is an error: it would start at random."""
    try:
        model, report = model_class.from_pretrained(folder, output_loading_info=True, **options)
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"model_name_or_path: {folder}: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"model_name_or_path: {folder} doesn't hold {missing[0]}{more}; its weights and its config.json "
            "don't belong together"
        )
    return model


def _skeleton_of(folder: Path, config: PretrainedConfig, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    model = skeleton(config, dtype=dtype, **options)
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model


def skeleton(config: PretrainedConfig, **options: Any) -> Any:
    """A model whose parameters take no memory and whose buffers are real; `options` are `from_config`'s."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model


@contextmanager
def _cut_while_loading(settings: EngineSettings, dtype: torch.dtype) -> Iterator[None]:
    """Within it, Transformers hands each weight to DeepSpeed as soon as it exists (stage 3 only)."""
    if not (isinstance(settings, ZeROSettings) and settings.stage == 3 and settings.zero3_init):
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    # Only what DeepSpeed needs to cut weights; the engine is given the completed config later.
    keys = ("stage", "offload_param")
    zero = {
        key: value for key, value in settings.deepspeed_config["zero_optimization"].items() if key in keys
    }
    kept = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.mixed_precision, dtype)
    precision = {
        "bf16": {"enabled": kept == torch.bfloat16},  # else it would cut everything as fp32
        "fp16": {"enabled": kept == torch.float16},
    }
    alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **precision})
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive
