"""From settings to an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import nn

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.engine.base import Engine, OptimizerFactory
from hfpar.engine.ddp import DDPEngine
from hfpar.engine.fsdp2 import FSDP2Engine
from hfpar.engine.zero import Partitioner, ZeROEngine
from hfpar.models.quantized_fill import Sharers
from hfpar.models.slices import Filling, fill_from_checkpoint
from hfpar.parallel.layout import Layout


def build_engine(
    settings: EngineSettings,
    module: nn.Module,
    make_optimizer: OptimizerFactory,
    layout: Layout,
    device: torch.device,
    *,
    checkpoint_folder: Path,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
) -> Engine:
    """Wrap `module` as `settings` say.

    Args:
        settings: which engine, and how.
        module: from `hfpar.models.load.load_model`, patched and with adapters.
        make_optimizer: called on the parameters as the engine keeps them.
        layout: the rank's place.
        device: this rank's.
        checkpoint_folder: where the weights that are still on the meta device are read.
        gradient_accumulation_steps: the longest window, in micro-batches.
        max_grad_norm: bound on the global gradient norm; None: no clipping.
    """
    tp_group = layout.tp_group if layout.tp_size > 1 else None
    if isinstance(settings, FSDP2Settings):
        offload = settings.offload_params or device.type == "cpu"
        filling = Filling(
            torch.device("cpu") if offload else device,
            device,
            layout.tp_rank,
            Sharers(layout.batch_group, tp_group),
        )
        fill = partial(fill_from_checkpoint, folder=checkpoint_folder, filling=filling)
        return FSDP2Engine(module, make_optimizer, settings, layout, device, fill)
    when_filled = None
    if isinstance(settings, ZeROSettings) and settings.stage == 3 and settings.zero3_init:
        when_filled = Partitioner(settings, layout)
    filling = Filling(
        torch.device("cpu"), device, layout.tp_rank, Sharers(None, tp_group), when_filled=when_filled
    )
    fill_from_checkpoint(module, checkpoint_folder, filling)
    if isinstance(settings, ZeROSettings):
        return ZeROEngine(
            module,
            make_optimizer,
            settings,
            layout,
            device,
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_grad_norm=max_grad_norm,
        )
    return DDPEngine(module, make_optimizer, settings, layout, device)
