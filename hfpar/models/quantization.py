"""Which weights of a model are held in few bits, and how: from settings, or from what a checkpoint holds already."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.errors import ConfigError, MissingDependencyError
from hfpar.models.quantized import EightBit, Format, FourBit, QuantizedWeight, hold_quantized

FOUR_BIT = ("nf4", "fp4")
_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
_STORAGE = {
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Quantization:
    """How the weights of linear layers are held."""

    method: str
    """nf4, fp4 or int8."""
    double_quant: bool = True
    compute_dtype: torch.dtype | None = None
    """None: the weights'."""
    storage_dtype: torch.dtype = torch.uint8
    skip_modules: tuple[str, ...] = ()
    """Beside the head."""
    is_stored: bool = False
    """Whether the checkpoint holds the bytes already."""

    @property
    def format(self) -> Format:
        """Of a weight."""
        return EightBit() if self.method == "int8" else FourBit(self.method, self.double_quant)


def quantize_skeleton(model: Any, quantization: Quantization) -> list[str]:
    """Hold a model's linear layers in few bits, but for the head and what is to be skipped.

    Args:
        model: of Transformers, without adapters, on the meta device.
        quantization: how.

    Returns:
        The names of the layers.

    Raises:
        ConfigError: nothing to quantize, or a name to skip that no module has.
    """
    names = layers_to_quantize(model, quantization.skip_modules)
    for name in names:
        module = model.get_submodule(name)
        parameter = module.weight
        weight = QuantizedWeight(
            quantization.format,
            tuple(parameter.shape),
            parameter.dtype,
            quantization.compute_dtype or parameter.dtype,
            quantization.storage_dtype,
        )
        hold_quantized(module, "weight", weight)
    return names


def layers_to_quantize(model: Any, skip_modules: tuple[str, ...] | list[str] = ()) -> list[str]:
    """The linear layers of a model by name, but for the head, what Transformers keeps in fp32, and what is skipped.

    Raises:
        ConfigError: there are none, or a name to skip that no module has.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    all_names = [name for name, _ in model.named_modules()]
    for skipped in skip_modules:
        if all(should_convert_module(name, [skipped]) for name in all_names if name):
            raise ConfigError(
                f"llm_int8_skip_modules: {skipped} matches no module of {type(model).__name__}; leave it out"
            )
    fp32 = [
        name
        for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for name in getattr(model, key, None) or ()
    ]
    patterns = [*skip_modules, *fp32]
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head and should_convert_module(name, patterns)
    ]
    if not names:
        raise ConfigError(
            f"quantization: {type(model).__name__} has no linear layers to quantize; leave quantization out"
        )
    return names


# From settings


@dataclass(frozen=True)
class QuantizationChoice:
    """What the user asked for."""

    method: str | None = None
    compute_dtype: str = "auto"
    double_quant: bool | None = None
    storage: str = "auto"
    skip_modules: list[str] | None = field(default=None)


def find_quantization(
    choice: QuantizationChoice, config: PretrainedConfig, settings: EngineSettings, dtype: torch.dtype
) -> Quantization | None:
    """What is to be held in few bits on this engine; None: nothing.

    Args:
        choice: the user's.
        config: the model's.
        settings: the engine's.
        dtype: of the weights.

    Raises:
        ConfigError: a combination that can't be trained, or another one than the checkpoint holds.
        MissingDependencyError: bitsandbytes isn't installed.
    """
    stored = getattr(config, "quantization_config", None)
    if stored is not None:
        raise ConfigError(
            "model_name_or_path: the checkpoint is quantized, which can't be trained; use the unquantized model"
        )
    if choice.method in (None, "none"):
        return None
    check_bitsandbytes(choice.method)
    precision = _PRECISION.get(settings.mixed_precision, dtype)
    compute_dtype = precision if choice.compute_dtype == "auto" else _STORAGE[choice.compute_dtype]
    return Quantization(
        choice.method,
        double_quant=choice.double_quant is not False,
        compute_dtype=compute_dtype,
        storage_dtype=_storage_dtype(choice.storage, settings, dtype),
        skip_modules=tuple(choice.skip_modules or ()),
    )


def check_bitsandbytes(method: str) -> None:
    """Refuse a method for which bitsandbytes isn't there.

    Raises:
        MissingDependencyError: it isn't installed.
        ConfigError: it is, but can't be loaded.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError(
            f"quantization: {method} needs bitsandbytes: pip install 'hfpar[quantization]'"
        )
    try:
        import bitsandbytes  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"quantization: {method}: bitsandbytes can't be loaded: {reason}") from error


def _storage_dtype(name: str, settings: EngineSettings, dtype: torch.dtype) -> torch.dtype:
    """What packed bytes look like to an engine: `uint8`, or a float type that the engine won't convert."""
    if name in ("auto", "uint8"):
        return torch.uint8
    storage = _STORAGE[name]
    kept = dtype
    if isinstance(settings, FSDP2Settings | ZeROSettings):
        kept = _PRECISION.get(settings.mixed_precision, dtype)
    if (
        isinstance(settings, FSDP2Settings | ZeROSettings)
        and settings.mixed_precision != "no"
        and storage != kept
    ):
        raise ConfigError(
            f"bnb_4bit_quant_storage: {name} with mixed precision {settings.mixed_precision}, to which {settings.name} "
            "would convert the packed bytes as if they were numbers; use uint8, or leave it out"
        )
    return storage
