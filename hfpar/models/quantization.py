"""Which weights of a model are held in few bits, and how: from settings, or from what a checkpoint holds already."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.errors import ConfigError, MissingDependencyError, first_line
from hfpar.models.formats import MXFP4, EightBit, Format, FourBit
from hfpar.models.quantized import QuantizedWeight, hold_quantized

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
    """nf4, fp4, int8 or mxfp4."""
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
        if self.method == "mxfp4":
            return MXFP4()
        return EightBit() if self.method == "int8" else FourBit(self.method, self.double_quant)


def quantize_skeleton(model: Any, quantization: Quantization) -> None:
    """Hold a model's linear layers and experts in few bits, but for the head and what is to be skipped.

    Args:
        model: of Transformers, without adapters, on the meta device.
        quantization: how.

    Raises:
        ConfigError: nothing to quantize, or a name to skip that no module has.
    """
    skip = quantization.skip_modules
    if not quantization.is_stored:
        check_skipped(model, skip)  # a checkpoint's own list may name what this class doesn't have
    chosen = experts_to_quantize(model, skip)
    if quantization.method != "mxfp4":
        chosen = [
            *((name, "weight") for name in layers_to_quantize(model, skip)),
            *(() if quantization.is_stored else chosen),  # bitsandbytes stores none
        ]
    seen: dict[int, str] = {}
    for name, leaf in chosen:
        module = model.get_submodule(name)
        parameter = module._parameters[leaf]
        twin = seen.setdefault(id(parameter), name)
        if twin != name and parameter is not None:
            raise ConfigError(
                f"quantization: {type(model).__name__} has one weight for {twin} and {name}, which hfpar can't hold in "
                "few bits; add both to llm_int8_skip_modules"
            )
        weight = QuantizedWeight(
            quantization.format,
            tuple(parameter.shape),
            parameter.dtype,
            quantization.compute_dtype or parameter.dtype,
            quantization.storage_dtype,
            is_stored=quantization.is_stored,
        )
        hold_quantized(module, leaf, weight)


def layers_to_quantize(model: Any, skip_modules: Sequence[str] = ()) -> list[str]:
    """The linear layers of a model by name, but for the head, what Transformers keeps in fp32, and what is skipped.

    Raises:
        ConfigError: there are none.
    """
    head = model.get_output_embeddings()
    names = [
        name
        for name, module in _not_skipped(model, skip_modules)
        if type(module) is nn.Linear and module is not head
    ]
    if not names:
        raise ConfigError(
            f"quantization: {type(model).__name__} has no linear layers to quantize; leave quantization out"
        )
    return names


def experts_to_quantize(model: Any, skip_modules: Sequence[str] = ()) -> list[tuple[str, str]]:
    """(module, parameter) of the matrices of all experts together: what bitsandbytes alone leaves as it is."""
    return [
        (name, leaf)
        for name, module in _not_skipped(model, skip_modules)
        for leaf in _matrices_of_experts(module)
    ]


def _matrices_of_experts(module: nn.Module) -> list[str]:
    if (
        "Experts" not in type(module).__name__
    ):  # as every family calls them; convolutions have 3 dimensions, too
        return []
    return [
        leaf
        for leaf, parameter in module._parameters.items()
        if parameter is not None and parameter.dim() == 3 and parameter.is_floating_point()
    ]


def check_skipped(model: Any, skip_modules: Sequence[str]) -> None:
    """Refuse names that skip nothing.

    Raises:
        ConfigError: names the first.
    """
    from transformers.quantizers.quantizers_utils import should_convert_module

    quantizable = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear or _matrices_of_experts(module)
    ]
    for skipped in skip_modules:
        if all(should_convert_module(name, [skipped]) for name in quantizable):
            raise ConfigError(
                f"llm_int8_skip_modules: {skipped} names no layer of {type(model).__name__} that would be quantized; "
                "give the end of a layer's name, or the beginning of a whole one such as model.layers.0"
            )


def _not_skipped(model: Any, skip_modules: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    from transformers.quantizers.quantizers_utils import should_convert_module

    keys = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    fp32 = [name for key in keys for name in getattr(model, key, None) or ()]
    for name, module in model.named_modules():
        if should_convert_module(name, [*skip_modules, *fp32]):
            yield name, module


# From settings


@dataclass(frozen=True)
class QuantizationChoice:
    """What the user asked for."""

    method: str | None = None
    compute_dtype: str = "auto"
    double_quant: bool | None = None
    storage: str = "auto"
    skip_modules: list[str] | None = field(default=None)

    def check_unused(self) -> None:
        """Refuse settings of a quantization that isn't there.

        Raises:
            ConfigError: names the first.
        """
        for name, value in (
            ("bnb_4bit_compute_dtype", None if self.compute_dtype == "auto" else self.compute_dtype),
            (
                "bnb_4bit_use_double_quant",
                None if self.double_quant is None else str(self.double_quant).lower(),
            ),
            ("bnb_4bit_quant_storage", None if self.storage == "auto" else self.storage),
            ("llm_int8_skip_modules", None if self.skip_modules is None else ", ".join(self.skip_modules)),
        ):
            if value is not None:
                raise ConfigError(
                    f"{name}: {value}, but nothing is quantized; set quantization, such as nf4, or leave it out"
                )


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
    precision = _PRECISION.get(settings.mixed_precision, dtype)
    compute_dtype = precision if choice.compute_dtype == "auto" else _STORAGE[choice.compute_dtype]
    stored = getattr(config.get_text_config(), "quantization_config", None) or getattr(
        config, "quantization_config", None
    )
    if stored is not None:
        return _stored_quantization(choice, stored, compute_dtype, settings, dtype)
    if choice.method in (None, "none"):
        choice.check_unused()
        return None
    if choice.method == "mxfp4":
        raise ConfigError(
            "quantization: mxfp4 is for checkpoints that hold it, such as GPT-OSS, which this one doesn't; use nf4"
        )
    check_bitsandbytes(choice.method)
    return Quantization(
        choice.method,
        double_quant=choice.double_quant is not False,
        compute_dtype=compute_dtype,
        storage_dtype=_storage_dtype(choice.storage, settings, dtype),
        skip_modules=tuple(choice.skip_modules or ()),
    )


def _stored_quantization(
    choice: QuantizationChoice,
    stored: Any,
    compute_dtype: torch.dtype,
    settings: EngineSettings,
    dtype: torch.dtype,
) -> Quantization:
    """What a checkpoint holds, if that is what the user asked for."""
    values = stored if isinstance(stored, dict) else stored.to_dict()
    kind = getattr(values.get("quant_method"), "value", values.get("quant_method"))
    if kind == "mxfp4":
        held = "mxfp4"
    elif kind == "bitsandbytes" or values.get("load_in_4bit") or values.get("load_in_8bit"):
        held = "int8" if values.get("load_in_8bit") else values.get("bnb_4bit_quant_type", "fp4")
        check_bitsandbytes(held)
    else:
        raise ConfigError(
            f"model_name_or_path: the checkpoint is quantized by {kind}, on which hfpar can't train adapters; use the "
            "unquantized model with quantization: nf4"
        )
    if choice.method not in (None, held):
        raise ConfigError(
            f"quantization: {choice.method}, but the checkpoint holds {held}; leave it out, or use the unquantized "
            "model"
        )
    double_quant = bool(values.get("bnb_4bit_use_double_quant"))
    if choice.double_quant not in (None, double_quant) and held in FOUR_BIT:
        raise ConfigError(
            f"bnb_4bit_use_double_quant: {str(choice.double_quant).lower()}, but the checkpoint was quantized with "
            f"{str(double_quant).lower()}; leave it out"
        )
    if choice.skip_modules is not None:
        raise ConfigError(
            f"llm_int8_skip_modules: {', '.join(choice.skip_modules)}, but the checkpoint is quantized already; leave "
            "it out"
        )
    return Quantization(
        held,
        double_quant,
        compute_dtype,
        _storage_dtype(choice.storage, settings, dtype),
        tuple(values.get("llm_int8_skip_modules") or ()),
        is_stored=True,
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
        reason = first_line(error)
        raise ConfigError(f"quantization: {method}: bitsandbytes can't be loaded: {reason}") from error


def check_device(method: str, device: torch.device) -> None:
    """Refuse a device on which bitsandbytes can't dequantize: a block is tried.

    Raises:
        ConfigError: names the device and the reason.
    """
    if method not in FOUR_BIT:
        return
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    numbers = torch.ones(1, 64, device=device)
    try:
        back = dequantize_4bit(*quantize_4bit(numbers, blocksize=64, quant_type=method))
        works = bool(torch.equal(back, numbers))
        reason = "its numbers come out wrong"
    except (RuntimeError, ValueError) as error:
        works, reason = False, first_line(error)
    if not works:
        raise ConfigError(
            f"quantization: {method}: bitsandbytes has no working backend for {device.type} ({reason}); install one "
            "that has, or leave quantization out"
        )


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
