"""From a model's name to weights on the right ranks: whole, cut by DeepSpeed, or one slice a rank."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_folder(model_name_or_path: str) -> Path:
    """The local folder of a model: itself, or the snapshot of a hub id.

    Raises:
        ConfigError: neither a folder with a config.json nor an id that the hub (or its cache) has.
    """
    folder = Path(model_name_or_path).expanduser()
    if (folder / "config.json").is_file():
        return folder
    if folder.is_dir():
        raise ConfigError(f"model_name_or_path: {folder} has no config.json")
    if folder.is_absolute() or model_name_or_path.startswith(".") or model_name_or_path.count("/") > 1:
        raise ConfigError(
            f"model_name_or_path: {model_name_or_path} is neither a folder nor a hub id"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import RevisionResolutionError

    try:
        return Path(
            snapshot_download(model_name_or_path, ignore_patterns=["*.bin", "*.pth", "*.gguf", "*.onnx"])
        )
    except (OSError, ValueError, RevisionResolutionError) as error:
        reason = str(error).strip().splitlines()[0]
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
        raise ConfigError(f"model_name_or_path: {folder}: {_first_line(error)}") from error
    if type(config) not in AutoModelForCausalLM._model_mapping and not trust_remote_code:
        raise ConfigError(f"model_name_or_path: {folder}: {config.model_type} isn't a causal language model")
    return config


def load_tokenizer(folder: Path, *, chat_template: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer, with the Jinja file `chat_template` as its template if one is given.

    Raises:
        ConfigError: no tokenizer there, or no such template file.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"model_name_or_path: {folder} has no usable tokenizer: {_first_line(error)}"
        ) from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"chat_template: {chat_template} can't be read: {_first_line(error)}"
            ) from error
    return tokenizer


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


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
) -> Any:
    """The model, as much of it as this rank keeps.

    Under FSDP2 its weights stay on the meta device until the engine has cut them (`fill_from_checkpoint`);
    under ZeRO-3 DeepSpeed cuts each weight as it is read; otherwise every rank reads the whole model.

    Args:
        folder: a checkpoint folder.
        config: the model's.
        settings: the engine's.
        dtype: of the weights.
        attn_implementation: a name that Transformers knows.
        trust_remote_code: whether code in the folder may run.
    """
    options = {"attn_implementation": attn_implementation, "trust_remote_code": trust_remote_code}
    if isinstance(settings, FSDP2Settings):
        return _skeleton(config, dtype, options)
    with _cut_while_loading(settings):
        try:
            return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **options)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model_name_or_path: {folder}: {_first_line(error)}") from error


def _skeleton(config: PretrainedConfig, dtype: torch.dtype, options: dict[str, Any]) -> Any:
    """A model whose parameters take no memory and whose buffers are real."""
    from accelerate import init_empty_weights

    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    model.tie_weights()
    return model


@contextmanager
def _cut_while_loading(settings: EngineSettings) -> Iterator[None]:
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
    precision = {name: {"enabled": settings.mixed_precision == name} for name in ("bf16", "fp16")}
    alive = HfDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **precision})
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del alive


# Slices of a checkpoint


def fill_from_checkpoint(model: nn.Module, folder: Path, *, device: torch.device) -> None:
    """Give every weight that is still on the meta device its values, each rank reading only its own rows.

    Args:
        model: parameters on the meta device may be DTensors, cut along their first dimension.
        folder: a safetensors checkpoint.
        device: where the weights are kept.

    Raises:
        ConfigError: weights that the checkpoint doesn't hold under the model's own names.
    """
    names: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                names.setdefault(id(parameter), []).append((owner, name))
    pending = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not pending:
        return
    with _Checkpoint(folder) as checkpoint:
        aliases = _tied_names(model)
        for name, parameter in pending.items():
            key = checkpoint.find(name, aliases)
            filled = nn.Parameter(
                checkpoint.read(key, parameter, device), requires_grad=parameter.requires_grad
            )
            for owner, attribute in names[id(parameter)]:  # every module that shares it: ties stay tied
                setattr(owner, attribute, filled)


def checkpoint_key(parameter_name: str) -> str:
    """A parameter's name in the base checkpoint: without what PEFT puts around and into modules."""
    parts = parameter_name.removeprefix("base_model.model.").split(".")
    kept: list[str] = []
    skip_adapter_name = False
    for part in parts:
        if skip_adapter_name:
            skip_adapter_name = False
        elif part in ("base_layer", "original_module"):
            continue
        elif part == "modules_to_save":
            skip_adapter_name = True
        else:
            kept.append(part)
    return ".".join(kept)


def _tied_names(model: nn.Module) -> dict[str, str]:
    tied: dict[str, str] = {}
    for module in model.modules():
        keys = getattr(module, "_tied_weights_keys", None)
        if isinstance(keys, dict):
            tied.update(keys)
    return tied


class _Checkpoint:
    """The safetensors files of a folder, open for reading slices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Any] = {}
        self.where = self._index()

    def __enter__(self) -> _Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.files.clear()

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        if not (self.folder / "model.safetensors").is_file():
            raise ConfigError(
                f"model_name_or_path: {self.folder} has no safetensors weights; FSDP2 reads them slice by slice: "
                "save the model with save_pretrained first"
            )
        return dict.fromkeys(self._open("model.safetensors").keys(), "model.safetensors")

    def _open(self, file: str) -> Any:
        if file not in self.files:
            from safetensors import SafetensorError, safe_open

            try:
                self.files[file] = safe_open(str(self.folder / file), framework="pt")
            except (OSError, SafetensorError) as error:
                raise ConfigError(
                    f"model_name_or_path: {self.folder / file}: {_first_line(error)}"
                ) from error
        return self.files[file]

    def find(self, parameter_name: str, tied: dict[str, str]) -> str:
        key = checkpoint_key(parameter_name)
        for candidate in (key, tied.get(key), *(target for target, source in tied.items() if source == key)):
            if candidate in self.where:
                return candidate
        raise ConfigError(
            f"model_name_or_path: {self.folder} doesn't hold {key}; FSDP2 reads weights by the model's own names: "
            "load and save the model once with this Transformers version, or use DDP or ZeRO"
        )

    def read(self, key: str, like: Tensor, device: torch.device) -> Tensor:
        """The rows of `key` that belong into `like`, in its dtype, as the same kind of tensor."""
        rows = self._open(self.where[key]).get_slice(key)
        if tuple(rows.get_shape()) != tuple(like.shape):
            raise ConfigError(
                f"model_name_or_path: {key} is {tuple(rows.get_shape())} in {self.folder}, but "
                f"{tuple(like.shape)} in the model"
            )
        if not isinstance(like, DTensor):
            return rows[:].to(device=device, dtype=like.dtype)
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        local_shape, offset = compute_local_shape_and_global_offset(
            like.shape, like.device_mesh, like.placements
        )
        if local_shape and local_shape[0]:
            local = rows[offset[0] : offset[0] + local_shape[0]]
        else:
            local = torch.empty(local_shape)  # fewer rows than ranks: this rank keeps none
        local = local.to(device=device, dtype=like.dtype)
        return DTensor.from_local(
            local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )
