"""The engine of a run, by its config."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hfpar.config.engine import EngineSettings
from hfpar.config.schema import SFTConfig
from hfpar.engine.base import Engine
from hfpar.engine.build import build_engine
from hfpar.parallel.layout import Layout
from hfpar.train import optim


def wrap(
    config: SFTConfig,
    settings: EngineSettings,
    module: nn.Module,
    checkpoint_folder: Path,
    layout: Layout,
    device: torch.device,
) -> Engine:
    """Read the weights that are still missing, and wrap the model with its optimizer."""
    return build_engine(
        settings,
        module,
        lambda parameters: optim.make_optimizer(parameters, config),
        layout,
        device,
        checkpoint_folder=checkpoint_folder,
        gradient_accumulation_steps=config.gradient_accumulation_steps or 1,
        max_grad_norm=config.max_grad_norm or None,
    )
