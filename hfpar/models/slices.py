"""Weights of a model that is already cut: each rank reads only its own rows of a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hfpar.errors import ConfigError
from hfpar.models.adapter_init import read_base
from hfpar.models.cuts import cuts_of
from hfpar.models.quantized import quantized_weights, weight_names
from hfpar.models.quantized_fill import ReadRows, ReadStored, Sharers, quantize_rows, stored_rows
from hfpar.models.stored import (
    SafetensorsSource,
    WeightPart,
    WholeSource,
    checkpoint_key,
    local_rows,
    persistent_buffers,
)

logger = logging.getLogger(__name__)


Source = SafetensorsSource | WholeSource


@dataclass(frozen=True)
class Filling:
    """How weights become real."""

    device: torch.device
    """Where they are kept."""
    quantize_on: torch.device
    """Where they are quantized; the backend of `sharers`' groups must know it."""
    tp_rank: int = 0
    sharers: Sharers = Sharers()
    when_filled: Callable[[nn.Module], None] | None = None
    """Told each module as soon as its own weights are there."""


def fill_from_checkpoint(model: nn.Module, folder: Path, filling: Filling) -> None:
    """Give every weight that is still on the meta device its values, each rank reading only its own part.

    Checkpoints that name weights in another way than the model, or hold experts one by one, are read by
    Transformers' own rules for them. Where these ask for more than that, every rank reads the whole model with
    Transformers and cuts it; rank 0 says so. Weights to be held in few bits are quantized one after another.

    Args:
        model: a Transformers or PEFT model; parameters may be parts for a tensor-parallel rank, and DTensors that
            an engine has cut along their first dimension.
        folder: a checkpoint.
        filling: how.

    Raises:
        ConfigError: weights that the checkpoint doesn't hold, or in other shapes.
    """
    modules = dict(model.named_modules())
    pending = {
        prefix: [name for name in weight_names(module) if _is_pending(module, name)]
        for prefix, module in modules.items()
    }
    if not any(pending.values()):
        return
    buffers = persistent_buffers(model)
    stored_names = _stored_names(model)
    names = [_join(prefix, name) for prefix, own in pending.items() for name in own]
    wanted = {name: stored_names[checkpoint_key(name)] for name in (*names, *buffers)}
    source = _source_of(model, folder, wanted)
    owners, cuts = _owners(model), cuts_of(model)
    for prefix, own in pending.items():
        module = modules[prefix]
        for name in own:
            full_name = _join(prefix, name)
            found = source.find(wanted[full_name])
            cut = cuts.get(full_name)
            if name in quantized_weights(module):
                read = partial(_read_rows, source, found, module, name, filling.tp_rank)
                read_stored = partial(_read_stored, source, found)
                _fill_quantized(module, name, read, read_stored, filling)
                continue
            parameter = module._parameters[name]
            assert parameter is not None
            if not parameter.is_meta:
                continue  # filled where it hangs, too
            part = WeightPart(parameter, cut, filling.tp_rank)
            values = read_base(source, found, part, module, name)
            values = values.to(device=filling.device, dtype=parameter.dtype)
            filled = _like(parameter, values)
            for owner, attribute in owners[id(parameter)]:  # every module that shares it: ties stay tied
                setattr(owner, attribute, filled)
        if own and filling.when_filled is not None:
            filling.when_filled(module)
    for name, buffer in buffers.items():
        buffer.copy_(source.read(source.find(wanted[name]), WeightPart(buffer, None, filling.tp_rank)))


def _is_pending(module: nn.Module, name: str) -> bool:
    parameter = module._parameters[f"{name}_packed" if name in quantized_weights(module) else name]
    return parameter is not None and parameter.is_meta


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _source_of(model: nn.Module, folder: Path, wanted: dict[str, list[str]]) -> Source:
    source = SafetensorsSource(folder, model, [name for names in wanted.values() for name in names])
    strange = next((name for name, names in wanted.items() if source.find(names) is None), None)
    if strange is None:
        return source
    if any(weight.is_stored for module in model.modules() for weight in quantized_weights(module).values()):
        raise ConfigError(
            f"model_name_or_path: {folder} doesn't hold {checkpoint_key(strange)} in a form that hfpar reads of "
            "quantized checkpoints; use the unquantized model"
        )
    if dist.get_rank() == 0:
        logger.warning(
            "model_name_or_path: %s doesn't hold %s in that form; every process reads the whole model into "
            "memory and keeps its slices",
            folder,
            checkpoint_key(strange),
        )
    return WholeSource(model, folder, _weights_dtype(model))


def _weights_dtype(model: nn.Module) -> torch.dtype:
    """Of the first weight that comes from a checkpoint."""
    for module in model.modules():
        for weight in quantized_weights(module).values():
            return weight.dtype
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_meta and parameter.is_floating_point():
                return parameter.dtype
    raise AssertionError("nothing to load")


def _read_rows(
    source: Source, found: str | None, module: nn.Module, name: str, tp_rank: int, rows: slice
) -> Tensor:
    """Rows of a tp rank's part of a weight that is to be held in few bits."""
    weight = quantized_weights(module)[name]
    like = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return read_base(source, found, WeightPart(like, weight.cut, tp_rank, rows), module, name)


def _read_stored(source: Source, found: str | None, ending: str, index: tuple[slice, ...] | None) -> Tensor:
    """What a checkpoint holds of a quantized weight."""
    assert isinstance(source, SafetensorsSource) and found is not None
    return source.read_beside(found, ending, index)


def _fill_quantized(
    module: nn.Module, name: str, read: ReadRows, read_stored: ReadStored, filling: Filling
) -> None:
    weight = quantized_weights(module)[name]
    packed, scales = module._parameters[f"{name}_packed"], module._parameters[f"{name}_scales"]
    assert packed is not None and scales is not None
    is_dealt = isinstance(packed, DTensor)
    rows = local_rows(packed) if is_dealt else slice(0, packed.shape[0])
    sharers = filling.sharers if is_dealt else replace(filling.sharers, shard_group=None)
    if weight.is_stored:
        stored = stored_rows(weight, rows, read_stored)
    else:
        stored = quantize_rows(weight, rows, read, sharers, filling.quantize_on)
    for parameter, kind, values in ((packed, "packed", stored.packed), (scales, "scales", stored.scales)):
        values = weight.as_stored(values.to(filling.device).contiguous())
        module._parameters[f"{name}_{kind}"] = _like(parameter, values)
    if stored.nested is not None:
        module._buffers[f"{name}_nested"] = stored.nested.to(filling.device)


def _like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """Values as a parameter, dealt to ranks as another is."""
    if isinstance(parameter, DTensor):
        values = DTensor.from_local(
            values,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return nn.Parameter(values, requires_grad=parameter.requires_grad)


def _owners(model: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Where each parameter hangs, by its id."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner in model.modules():
        for name, parameter in owner._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((owner, name))
    return owners


def _stored_names(model: nn.Module) -> dict[str, list[str]]:
    """For each name in a checkpoint, all names that the same values may have there: tied weights have several.

    Also right for a trained copy of a tied module (`modules_to_save`), which itself isn't tied any more.
    """
    names: dict[int, list[str]] = {}
    for name, tensor in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(tensor), []).append(checkpoint_key(name))
    for prefix, module in model.named_modules():
        for name, weight in quantized_weights(module).items():
            names[id(weight)] = [checkpoint_key(_join(prefix, name))]
    stored: dict[str, list[str]] = {checkpoint_key(name): [] for name in persistent_buffers(model)}
    for group in names.values():
        for name in group:
            stored.setdefault(name, []).extend(group)
    return {name: list(dict.fromkeys([name, *group])) for name, group in stored.items()}
