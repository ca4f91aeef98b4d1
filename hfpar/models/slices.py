"""Weights of a model that is already cut: each rank reads only its own rows of a checkpoint."""

from __future__ import annotations

import logging
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hfpar.models.cuts import cuts_of
from hfpar.models.stored import SafetensorsSource, WeightPart, WholeSource, checkpoint_key, persistent_buffers

logger = logging.getLogger(__name__)


def fill_from_checkpoint(model: nn.Module, folder: Path, *, device: torch.device, tp_rank: int = 0) -> None:
    """Give every weight that is still on the meta device its values, each rank reading only its own part.

    Checkpoints that name weights in another way than the model, or hold experts one by one, are read by
    Transformers' own rules for them. Where these ask for more than that, every rank reads the whole model with
    Transformers and cuts it; rank 0 says so.

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
    source: SafetensorsSource | WholeSource
    source = SafetensorsSource(folder, model, [name for names in wanted.values() for name in names])
    strange = next((name for name, names in wanted.items() if source.find(names) is None), None)
    if strange is not None:
        if dist.get_rank() == 0:
            logger.warning(
                "model_name_or_path: %s doesn't hold %s in that form; every process reads the whole model into "
                "memory and keeps its slices",
                folder,
                checkpoint_key(strange),
            )
        source = WholeSource(model, folder, next(iter(pending.values())).dtype)
    owners, cuts = _owners(model), cuts_of(model)
    for name, parameter in pending.items():
        part = WeightPart(parameter, cuts.get(name), tp_rank)
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
        buffer.copy_(source.read(source.find(wanted[name]), WeightPart(buffer, None, tp_rank)))


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
    stored: dict[str, list[str]] = {checkpoint_key(name): [] for name in persistent_buffers(model)}
    for group in names.values():
        for name in group:
            stored.setdefault(name, []).extend(group)
    return {name: list(dict.fromkeys([name, *group])) for name, group in stored.items()}
