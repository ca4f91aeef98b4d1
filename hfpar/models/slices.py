"""Weights of a model that is already cut: each rank reads only its own rows of a checkpoint."""

from __future__ import annotations

import copy
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from hfpar.errors import ConfigError
from hfpar.models.cuts import Cut, cuts_of
from hfpar.models.load import whole_model

logger = logging.getLogger(__name__)


def fill_from_checkpoint(model: nn.Module, folder: Path, *, device: torch.device, tp_rank: int = 0) -> None:
    """Give every weight that is still on the meta device its values, each rank reading only its own part.

    A checkpoint that names or lays out its weights in another way than the model (mixtures of experts, often)
    is read whole by every rank, by Transformers, and then cut; rank 0 says so.

    Args:
        model: a Transformers or PEFT model; parameters may be parts for a tensor-parallel rank, and DTensors that
            an engine has cut along their first dimension.
        folder: a checkpoint.
        device: where the weights are kept.
        tp_rank: of this process.

    Raises:
        ConfigError: weights that the checkpoint doesn't hold, or in other shapes.
    """
    pending = {name: parameter for name, parameter in model.named_parameters() if parameter.is_meta}
    if not pending:
        return
    buffers = persistent_buffers(model)
    stored_names = _stored_names(model)
    wanted = {name: stored_names[checkpoint_key(name)] for name in (*pending, *buffers)}
    source: _SafetensorsSource | _WholeSource
    source = _SafetensorsSource(folder)
    strange = next((name for name, names in wanted.items() if source.find(names) is None), None)
    if strange is not None:
        if dist.get_rank() == 0:
            logger.warning(
                "model_name_or_path: %s doesn't hold %s in that form; every process reads the whole model into "
                "memory and keeps its slices",
                folder,
                checkpoint_key(strange),
            )
        source = _WholeSource(model, folder, next(iter(pending.values())).dtype)
    owners, cuts = _owners(model), cuts_of(model)
    for name, parameter in pending.items():
        part = _Part(parameter, cuts.get(name), tp_rank)
        values = source.read(source.find(wanted[name]), part).to(device=device, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            values = DTensor.from_local(
                values,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
        for owner, attribute in owners[id(parameter)]:  # every module that shares it: ties stay tied
            setattr(owner, attribute, filled)
    for name, buffer in buffers.items():
        buffer.copy_(source.read(source.find(wanted[name]), _Part(buffer, None, tp_rank)))


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


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs, by its id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, name))
    return owners


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds beside the parameters, such as a router's score correction."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in model.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def _stored_names(model: nn.Module) -> dict[str, list[str]]:
    """For each name in a checkpoint, all names that the same values may have there: tied weights have several.

    Also right for a trained copy of a tied module (`modules_to_save`), which itself isn't tied any more.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(checkpoint_key(name))
    stored: dict[str, list[str]] = {checkpoint_key(name): [] for name in persistent_buffers(model)}
    for group in names.values():
        for name in group:
            stored.setdefault(name, []).extend(group)
    return {name: list(dict.fromkeys([name, *group])) for name, group in stored.items()}


@dataclass(frozen=True)
class _Part:
    """What this rank keeps of a stored weight."""

    like: Tensor
    """Of the shape that tensor parallelism leaves, and maybe cut again by an engine."""
    cut: Cut | None
    tp_rank: int

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """As it is stored."""
        return tuple(self.like.shape) if self.cut is None else self.cut.whole_shape(self.like.shape)

    def of(self, whole: Any) -> Tensor:
        """The part of a tensor, or of a slice of a file."""
        rows = _local_rows(self.like)
        if self.cut is not None:
            return self.cut.take(whole, self.tp_rank, rows)
        part: Tensor = whole[rows].clone()
        return part


def _local_rows(like: Tensor) -> slice:
    """The rows that an engine leaves this rank of a tensor; maybe none."""
    if not isinstance(like, DTensor):
        return slice(None)
    shape, offset = compute_local_shape_and_global_offset(like.shape, like.device_mesh, like.placements)
    return slice(offset[0], offset[0] + shape[0]) if shape[0] else slice(0, 0)


class _SafetensorsSource:
    """The safetensors files of a folder, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.where = self._index()

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return dict(json.loads(index.read_text())["weight_map"])
        if not (self.folder / "model.safetensors").is_file():
            return {}
        with self._open("model.safetensors") as file:
            return dict.fromkeys(file.keys(), "model.safetensors")

    def _open(self, file: str) -> Any:
        try:
            return safe_open(str(self.folder / file), framework="pt")
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"model_name_or_path: {self.folder / file}: {error}") from error

    def find(self, names: list[str]) -> str | None:
        """The name under which the files hold it."""
        return next((name for name in names if name in self.where), None)

    def read(self, name: str | None, part: _Part) -> Tensor:
        """This rank's part of it."""
        assert name is not None
        # Opened anew for each weight: what stays mapped counts as this process's memory.
        with self._open(self.where[name]) as file:
            stored = file.get_slice(name)
            _check_shape(name, stored.get_shape(), part, self.folder)
            whole: Tensor = file.get_tensor(name) if not part.like.dim() else part.of(stored)
            return whole


class _WholeSource:
    """The model as Transformers loads it, whole."""

    def __init__(self, model: Any, folder: Path, dtype: torch.dtype) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        model_class = next(kind for kind in type(base).__mro__ if not issubclass(kind, FSDPModule))
        whole = whole_model(model_class, folder, config=copy.deepcopy(base.config), dtype=dtype)
        self.folder = folder
        self.tensors = dict(whole.named_parameters(remove_duplicate=False)) | persistent_buffers(whole)

    def find(self, names: list[str]) -> str | None:
        """The name under which the model holds it."""
        return next((name for name in names if name in self.tensors), None)

    def read(self, name: str | None, part: _Part) -> Tensor:
        """This rank's part of it."""
        assert name is not None
        whole = self.tensors[name].detach()
        _check_shape(name, list(whole.shape), part, self.folder)
        return part.of(whole) if whole.dim() else whole.clone()


def _check_shape(name: str, shape: list[int], part: _Part, folder: Path) -> None:
    if tuple(shape) != part.whole_shape:
        raise ConfigError(
            f"model_name_or_path: {name} is {tuple(shape)} in {folder}, but {part.whole_shape} in the model"
        )
