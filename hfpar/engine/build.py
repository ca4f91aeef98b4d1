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
from hfpar.engine.zero import ZeROEngine
from hfpar.models.slices import fill_from_checkpoint
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
    if isinstance(settings, FSDP2Settings):
        offload = settings.offload_params or device.type == "cpu"
        fill = partial(
            fill_from_checkpoint,
            folder=checkpoint_folder,
            device=torch.device("cpu") if offload else device,
            tp_rank=layout.tp_rank,
        )
        return FSDP2Engine(module, make_optimizer, settings, layout, device, fill)
    fill_from_checkpoint(module, checkpoint_folder, device=torch.device("cpu"), tp_rank=layout.tp_rank)
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
