"""What a checkpoint folder holds, and a rank's part of it."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hfpar.errors import ConfigError
from hfpar.models.cuts import Cut
from hfpar.models.load import whole_model


def checkpoint_key(parameter_name: str) -> str:
    """A parameter's name in the base checkpoint: without what PEFT puts around and into modules."""
    parts = parameter_name.removeprefix("base_model.model.").split(".")
    kept: list[str] = []
    skip_adapter_name = False
    for part in parts:
        if skip_adapter_name:
            skip_adapter_name = False
        elif part in ("base_layer", "original_module", "token_adapter"):
            continue
        elif part == "modules_to_save":
            skip_adapter_name = True
        else:
            kept.append(part)
    return ".".join(kept)


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds beside the parameters, such as a router's score correction."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in model.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


@dataclass(frozen=True)
class WeightPart:
    """What this rank keeps of a stored weight."""

    like: Tensor
    """Of the shape that tensor parallelism leaves, and maybe cut again by an engine."""
    cut: Cut | None
    tp_rank: int
    rows: slice | None = None
    """Of it, along dimension 0; None: those that an engine leaves this rank."""

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """As it is stored."""
        return tuple(self.like.shape) if self.cut is None else self.cut.whole_shape(self.like.shape)

    def of(self, whole: Any) -> Tensor:
        """The part of a tensor, or of a slice of a file."""
        rows = local_rows(self.like) if self.rows is None else self.rows
        if self.cut is not None:
            return self.cut.take(whole, self.tp_rank, rows)
        part: Tensor = whole[rows].clone()
        return part


def local_rows(like: Tensor) -> slice:
    """The rows that an engine leaves this rank of a tensor; maybe none."""
    if not isinstance(like, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return slice(offset[0], offset[0] + shape[0]) if shape[0] else slice(0, 0)


class SafetensorsSource:
    """The safetensors files of a folder, read slice by slice."""

    def __init__(self, folder: Path, model: nn.Module, wanted: Iterable[str]) -> None:
        """Look up what the files hold.

        Args:
            folder: with safetensors files.
            model: the Transformers or PEFT model to fill.
            wanted: names of its weights, as `checkpoint_key` gives them.
        """
        self.folder = folder
        self.where = self._index()
        self.sections: dict[str, list[list[str]]] = {name: [[name]] for name in self.where}
        """Of a weight of the model: the stored matrices that it is made of, [section][expert]; or one name."""
        self.stacked: set[str] = set()
        self._convert(model, set(wanted))

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        if not (self.folder / "model.safetensors").is_file():
            return {}
        with self._open("model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")

    def _convert(self, model: Any, wanted: set[str]) -> None:
        """Ask Transformers what a stored name becomes.

        Renaming and stacking experts can be done by slices; what asks for more can't be found here.
        """
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            Concatenate,
            MergeModulelist,
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        mapping = get_model_conversion_mapping(base)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        known = dict.fromkeys(wanted, True)
        found: dict[str, dict[str, list[str]]] = {}
        for stored in sorted(self.where, key=_natural):
            name, pattern = rename_source_key(stored, renamings, converters, base.base_model_prefix, known)
            if name in wanted and pattern is None:
                self.sections.setdefault(name, [[stored]])
            elif name in wanted:
                found.setdefault(name, {}).setdefault(pattern, []).append(stored)
        for name, by_source in found.items():
            converter = by_pattern[next(iter(by_source))]
            kinds = [(type(step), step.dim) for step in converter.operations if hasattr(step, "dim")]
            can_stack = kinds in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)])
            self.sections.pop(name, None)
            if can_stack and len(kinds) == len(converter.operations):
                sections = [by_source.get(pattern, []) for pattern in converter.source_patterns]
                _check_experts(name, sections, self.folder)
                self.sections[name] = sections
                self.stacked.add(name)

    def _open(self, file: str) -> Any:
        try:
            return safe_open(str(self.folder / file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model_name_or_path: {self.folder / file}: {error}") from error

    def find(self, names: list[str]) -> str | None:
        """The name of these under which the weight can be read."""
        found = next((name for name in names if name in self.sections), None)
        return found or next((name for name in names if f"{name}_blocks" in self.where), None)  # mxfp4

    def read(self, name: str | None, part: WeightPart) -> Tensor:
        """This rank's part of it."""
        assert name is not None
        sections = self.sections[name]
        # Opened anew for each weight: what stays mapped counts as this process's memory.
        with ExitStack() as opened:
            files = {
                file: opened.enter_context(self._open(file))
                for file in dict.fromkeys(self.where[stored] for section in sections for stored in section)
            }
            slices = [
                [files[self.where[stored]].get_slice(stored) for stored in section] for section in sections
            ]
            whole = _Stack(slices) if name in self.stacked else slices[0][0]
            if isinstance(whole, _Stack) and not whole.equal:
                raise ConfigError(
                    f"model_name_or_path: {self.folder} holds matrices of different shapes for the experts of {name}"
                )
            _check_shape(name, whole.get_shape(), part, self.folder)
            if part.like.dim():
                values = part.of(whole)
            else:
                values = files[self.where[sections[0][0]]].get_tensor(sections[0][0])
        if part.like.is_floating_point() and not values.is_floating_point():
            raise ConfigError(
                f"model_name_or_path: {name} is stored quantized ({str(values.dtype).removeprefix('torch.')}) in "
                f"{self.folder}, where the model has plain numbers; use the unquantized model"
            )
        return values

    def read_beside(self, name: str, ending: str, index: tuple[slice, ...] | None) -> Tensor:
        """A tensor, or a slice of one, that is stored with a weight and named after it.

        Raises:
            ConfigError: it isn't there.
        """
        stored = self.sections[name][0][0] if name in self.sections else name
        whole_name = stored.removesuffix(".weight") + ending if ending == ".SCB" else stored + ending
        if whole_name not in self.where:
            raise ConfigError(
                f"model_name_or_path: {self.folder} doesn't hold {whole_name}; is it quantized?"
            )
        with self._open(self.where[whole_name]) as file:
            if index is None:
                whole: Tensor = file.get_tensor(whole_name)
                return whole
            part: Tensor = file.get_slice(whole_name)[index]
            return part


def _check_experts(name: str, sections: list[list[str]], folder: Path) -> None:
    """Every section has each expert, from the first on: matrices are put together by their order."""
    for section in sections:
        numbers = zip(*(re.findall(r"\d+", stored) for stored in section), strict=True)
        differing = [[int(number) for number in of_all] for of_all in numbers if len(set(of_all)) > 1]
        in_order = not differing or differing == [list(range(len(section)))]
        if len(section) != len(sections[0]) or not section or not in_order:
            raise ConfigError(
                f"model_name_or_path: {folder} doesn't hold each expert's matrices of {name}; its weights and its "
                "config.json don't belong together"
            )


class _Stack:
    """Matrices of a file as the one tensor [experts, rows of all sections, columns] that they make together."""

    def __init__(self, sections: Sequence[Sequence[Any]]) -> None:
        """Keep slices of files, [section][expert]."""
        self.sections = sections
        self.shapes = [section[0].get_shape() for section in sections]
        self.equal = all(
            matrix.get_shape() == shape
            for section, shape in zip(sections, self.shapes, strict=True)
            for matrix in section
        )

    def get_shape(self) -> list[int]:
        """Of the whole."""
        return [len(self.sections[0]), sum(rows for rows, _ in self.shapes), self.shapes[0][1]]

    def __getitem__(self, index: slice | tuple[slice, ...]) -> Tensor:
        """Read what is asked for alone."""
        index = index if isinstance(index, tuple) else (index,)
        experts, rows, columns = (*index, *(slice(None),) * (3 - len(index)))
        start, stop, _ = rows.indices(self.get_shape()[1])
        matrices = []
        for expert in range(*experts.indices(len(self.sections[0]))):
            pieces, begin = [], 0
            for section, (size, _) in zip(self.sections, self.shapes, strict=True):
                low, high = max(start - begin, 0), min(stop - begin, size)
                if low < high:
                    pieces.append(section[expert][low:high, columns])
                begin += size
            matrices.append(torch.cat(pieces))
        if matrices:
            return torch.stack(matrices)
        empty: Tensor = self.sections[0][0][0:0, columns]
        return empty.new_zeros(0, stop - start, empty.shape[1])


def _natural(name: str) -> list[tuple[int, str]]:
    """Expert 10 comes after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


class WholeSource:
    """The model as Transformers loads it, whole."""

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        """Load it; `model` says of which class."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        model_class = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
        whole = whole_model(model_class, folder, config=copy.deepcopy(base.config), dtype=dtype)
        self.folder = folder
        self.tensors = dict(whole.named_parameters(remove_duplicate=False)) | persistent_buffers(whole)

    def find(self, names: list[str]) -> str | None:
        """The name under which the model holds it."""
        return next((name for name in names if name in self.tensors), None)

    def read(self, name: str | None, part: WeightPart) -> Tensor:
        """This rank's part of it."""
        assert name is not None
        whole = self.tensors[name].detach()
        _check_shape(name, list(whole.shape), part, self.folder)
        return part.of(whole) if whole.dim() else whole.clone()


def _check_shape(name: str, shape: list[int], part: WeightPart, folder: Path) -> None:
    if tuple(shape) != part.whole_shape:
        raise ConfigError(
            f"model_name_or_path: {name} is {tuple(shape)} in {folder}, but {part.whole_shape} in the model"
        )
