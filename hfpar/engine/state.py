"""Checkpoints of DDP and FSDP2: torch's distributed checkpoint, or one file, of what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout

_WHOLE = "state.pt"
_SHARDED = "sharded"


def save(
    module: nn.Module,
    optimizer: Optimizer,
    folder: Path,
    *,
    sharded: bool,
    layout: Layout,
    scaler: torch.amp.GradScaler,
) -> None:
    """Write trainable weights, optimizer and loss scale: one file from rank 0, or each rank its shards."""
    folder = _of_tp_rank(folder, layout)
    # torch gathers whole states for the world's first rank alone, and with tp each batch group has one to write.
    is_gathered_here = not sharded and layout.tp_size > 1
    options = StateDictOptions(
        full_state_dict=not sharded and not is_gathered_here,
        cpu_offload=not is_gathered_here,
        ignore_frozen_params=True,
    )
    weights, optimizer_state = get_state_dict(module, optimizer, options=options)
    state: dict[str, Any] = {"module": weights, "optimizer": optimizer_state}
    if is_gathered_here:
        state = _whole_on_cpu(state, keep=dist.get_rank(layout.batch_group) == 0)
    if sharded:
        state["scaler"] = scaler.state_dict()
        dcp.save(state, checkpoint_id=str(folder / _SHARDED), process_group=layout.batch_group)
    elif dist.get_rank(layout.batch_group) == 0:
        folder.mkdir(exist_ok=True)
        state["scaler"] = scaler.state_dict()
        torch.save(state, folder / _WHOLE)


def _whole_on_cpu(state: Any, *, keep: bool) -> Any:
    """Each DTensor put together, one at a time, and kept where it is wanted. The ranks that share them together."""
    if isinstance(state, dict):
        return {name: _whole_on_cpu(value, keep=keep) for name, value in state.items()}
    if isinstance(state, list):
        return [_whole_on_cpu(value, keep=keep) for value in state]
    if isinstance(state, DTensor):
        whole: Tensor = state.full_tensor()  # type: ignore[attr-defined]
        return whole.cpu() if keep else None
    return state.cpu() if isinstance(state, Tensor) else state


def _of_tp_rank(folder: Path, layout: Layout) -> Path:
    """Ranks of a tp group hold different models, so that each batch group has a folder of its own."""
    return folder / f"tp{layout.tp_rank}" if layout.tp_size > 1 else folder


def load(
    module: nn.Module, optimizer: Optimizer, folder: Path, *, layout: Layout, scaler: torch.amp.GradScaler
) -> None:
    """Read what `save` wrote, from any number of ranks onto any number of ranks.

    Raises:
        ConfigError: the folder holds another engine's checkpoint.
    """
    folder = _of_tp_rank(folder, layout)
    if (folder / _WHOLE).is_file():
        options = StateDictOptions(full_state_dict=True, ignore_frozen_params=True, strict=False)
        state = torch.load(folder / _WHOLE, map_location="cpu", weights_only=True)
    elif (folder / _SHARDED).is_dir():
        options = StateDictOptions(ignore_frozen_params=True, strict=False, cpu_offload=True)
        weights, optimizer_state = get_state_dict(module, optimizer, options=options)
        state = {"module": weights, "optimizer": optimizer_state, "scaler": scaler.state_dict()}
        dcp.load(state, checkpoint_id=str(folder / _SHARDED), process_group=layout.batch_group)
    else:
        raise ConfigError(
            f"resume: {folder} was written by another engine; resume with the engine that wrote it"
        )
    set_state_dict(
        module,
        optimizer,
        model_state_dict=state["module"],
        optim_state_dict=state["optimizer"],
        options=options,
    )
    if state["scaler"]:
        scaler.load_state_dict(state["scaler"])
