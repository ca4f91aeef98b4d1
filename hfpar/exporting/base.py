"""The base's files: which weight of the model each stored tensor is, read one at a time."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PretrainedConfig

from hfpar.errors import ConfigError, first_line
from hfpar.models.quantization import check_bitsandbytes
from hfpar.models.stored import SafetensorsSource, WeightPart

_STATISTICS = re.compile(
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.bitsandbytes__\w+|SCB|weight_format)$|_scales$"
)
"""What is stored beside a quantized weight."""
_BLOCKS = "_blocks"
"""What the name of a weight in mxfp4 ends with."""
_ITEM_SIZE = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of a number, of those types that are converted."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight of the model, or a stored tensor that isn't one.

    Attributes:
        name: in the model; None for what the model doesn't have.
        sections: the tensors that it is stored as, [section][expert]: one, or the matrices that Transformers stacks.
    """

    name: str | None
    sections: tuple[tuple[str, ...], ...]

    @property
    def stored(self) -> list[str]:
        """All names."""
        return [name for section in self.sections for name in section]

    @property
    def is_stacked(self) -> bool:
        """Whether it is put together."""
        return len(self.sections) > 1 or len(self.sections[0]) > 1


class Base:
    """A checkpoint.

    Attributes:
        weights: all that it holds, in the order of its files.
        model_dtype: what its config says.
    """

    def __init__(self, folder: Path, config: PretrainedConfig, model: Any) -> None:
        """Look up what the files hold.

        Args:
            folder: with safetensors files.
            config: the model's.
            model: of Transformers, on the meta device, without an adapter.

        Raises:
            ConfigError: no such files, or quantized in a way that can't be undone here.
        """
        self.folder = folder
        self.quantization = _stored_quantization(folder, config)
        self._like: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers()),
        }
        try:
            self._source = SafetensorsSource(folder, model, list(self._like))
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"base: {folder}: the index of its weights can't be read: {error}") from error
        if not self._source.where:
            raise ConfigError(
                f"base: {folder} has no safetensors files; save it once with Transformers' save_pretrained"
            )
        missing = next((file for file in self.files if not (folder / file).is_file()), None)
        if missing is not None:
            raise ConfigError(f"base: {folder} has no {missing}, which its index names")
        self.tied = tied_names(model)
        dtype = getattr(config, "dtype", None)
        self.model_dtype: torch.dtype | None = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.weights = list(self._find_weights())

    @property
    def files(self) -> list[str]:
        """Names."""
        return list(dict.fromkeys(self._source.where.values()))

    def num_bytes(self, dtype: torch.dtype | None) -> int:
        """Bytes that its weights take in `dtype` (None: as they are), or a little less."""
        total = 0
        for file in self.files:
            with _reading(self.folder), safe_open(str(self.folder / file), framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - it has no other way
                    part = opened.get_slice(name)
                    stored = _ITEM_SIZE.get(part.get_dtype())
                    if _STATISTICS.search(name) is None:
                        size = (dtype.itemsize if dtype else stored) if stored else 1
                        total += math.prod(part.get_shape()) * (size or 1)
        return total

    def _find_weights(self) -> Iterator[StoredWeight]:
        by_stored: dict[str, StoredWeight] = {}
        for name in self._like:
            if name in self._source.sections:
                sections = tuple(tuple(section) for section in self._source.sections[name])
                weight = StoredWeight(name, sections)
                by_stored.update(dict.fromkeys(weight.stored, weight))
            elif self.quantization == "mxfp4" and name + _BLOCKS in self._source.where:
                by_stored[name + _BLOCKS] = StoredWeight(name, ((name,),))
        done: set[str] = set()
        order = {file: number for number, file in enumerate(self.files)}
        for stored in sorted(self._source.where, key=lambda name: (order[self._source.where[name]], name)):
            is_statistic = self.quantization is not None and _STATISTICS.search(stored)
            if stored not in done and not is_statistic:
                weight = by_stored.get(stored) or StoredWeight(None, ((stored,),))
                done.update(weight.stored)
                yield weight

    def read(self, weight: StoredWeight) -> Tensor:
        """Its values, dequantized if need be.

        Raises:
            ConfigError: it can't be read, or isn't of the shape that the config says.
        """
        if self.quantization == "mxfp4" and weight.stored[0] not in self._source.where:
            return self._from_mxfp4(weight.stored[0])
        if self.quantization == "bitsandbytes" and self._is_quantized(weight.stored[0]):
            return self._dequantize(weight.stored[0])
        if weight.name is None:
            return self._tensor(weight.stored[0]).clone()
        with _reading(self.folder):
            part = WeightPart(torch.empty_like(self._like[weight.name], device="meta"), None, 0)
            return self._source.read(weight.name, part)

    def split(self, weight: StoredWeight, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """What it is stored as."""
        if not weight.is_stacked:
            yield weight.stored[0], values
            return
        begin = 0
        for section in weight.sections:
            rows = self._shape(section[0])[0]
            for expert, name in enumerate(section):
                yield name, values[expert, begin : begin + rows]
            begin += rows

    def _shape(self, stored: str) -> list[int]:
        with (
            _reading(self.folder),
            safe_open(str(self.folder / self._source.where[stored]), framework="pt") as file,
        ):
            shape: list[int] = file.get_slice(stored).get_shape()
            return shape

    def _tensor(self, stored: str) -> Tensor:
        # Opened anew for each tensor: what stays mapped counts as this process's memory.
        with (
            _reading(self.folder),
            safe_open(str(self.folder / self._source.where[stored]), framework="pt") as file,
        ):
            tensor: Tensor = file.get_tensor(stored)
            return tensor

    # Quantized weights

    def _from_mxfp4(self, name: str) -> Tensor:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks, scales = self._tensor(name + _BLOCKS), self._tensor(name + "_scales")
        dtype = self.model_dtype or torch.bfloat16
        values: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        return values.cpu()

    def _is_quantized(self, stored: str) -> bool:
        scale = stored.removesuffix("weight") + "SCB"
        return f"{stored}.absmax" in self._source.where or scale in self._source.where

    def _dequantize(self, stored: str) -> Tensor:
        import bitsandbytes.functional as bnb

        packed = self._tensor(stored)
        scale = stored.removesuffix("weight") + "SCB"
        if scale in self._source.where:
            dtype = self.model_dtype or torch.float16
            return (packed.float() * (self._tensor(scale).float() / 127).unsqueeze(1)).to(dtype)
        prefix = f"{stored}."
        state = {
            name.removeprefix(prefix): self._tensor(name)
            for name in self._source.where
            if name.startswith(prefix)
        }
        values: Tensor = bnb.dequantize_4bit(
            packed, bnb.QuantState.from_dict(state, device=torch.device("cpu"))
        )
        return values


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError, KeyError) as error:
        raise ConfigError(f"base: {folder}: {first_line(error)}") from error
    except ConfigError as error:
        raise ConfigError("base: " + str(error).removeprefix("model_name_or_path: ")) from error


def _stored_quantization(folder: Path, config: PretrainedConfig) -> str | None:
    """How the weights are stored: by bitsandbytes, in mxfp4, or plainly (None)."""
    saved = getattr(config, "quantization_config", None)
    if saved is None:
        return None
    settings: dict[str, Any] = saved if isinstance(saved, dict) else saved.to_dict()
    method = settings.get("quant_method", "bitsandbytes" if "load_in_4bit" in settings else "unknown")
    method = str(getattr(method, "value", method))
    if method not in ("bitsandbytes", "mxfp4"):
        raise ConfigError(
            f"base: {folder} is quantized ({method}), and an adapter can only be merged into weights that aren't, or "
            "that bitsandbytes or mxfp4 quantized; name an unquantized copy with --base"
        )
    if method == "bitsandbytes":
        check_bitsandbytes("nf4" if settings.get("load_in_4bit") else "int8")
    return method


def tied_names(model: nn.Module) -> list[list[str]]:
    """Groups of names that share a weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
