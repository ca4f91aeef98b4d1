"""DDP: whole weights on every rank of the batch group, gradients averaged in buckets during the backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hfpar.config.engine import DDPSettings
from hfpar.engine import state
from hfpar.engine.base import Engine, OptimizerFactory, autocast, trainable, weights, with_cuts
from hfpar.engine.clip import clip_and_step
from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout


class DDPEngine(Engine):
    """torch's DistributedDataParallel over the batch group; on one rank, the plain model."""

    name = "ddp"

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: OptimizerFactory,
        settings: DDPSettings,
        layout: Layout,
        device: torch.device,
    ) -> None:
        """Move the model to its device and wrap it."""
        super().__init__(layout, device)
        self.settings = settings
        self.module = module.to(device)
        self.wrapped: nn.Module = self.module
        if layout.batch_size > 1:
            self.wrapped = DistributedDataParallel(
                self.module,
                device_ids=[device] if device.type == "cuda" else None,
                process_group=layout.batch_group,
                broadcast_buffers=False,
                gradient_as_bucket_view=True,
            )
        self.optimizer = make_optimizer(trainable(self.module))
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.mixed_precision == "fp16")
        self._sync_next = True

    def forward(self, **inputs: Any) -> Tensor:
        """See `Engine`."""
        with autocast(self.device, self.settings.mixed_precision):
            result: Tensor = self.wrapped(**inputs)
        return result

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """See `Engine`."""
        self.scaler.scale(loss).backward()

    def accumulate(self, *, last_micro_batch: bool) -> Any:
        """Around forward and backward: DDP averages only after the window's last micro-batch."""
        if last_micro_batch or not isinstance(self.wrapped, DistributedDataParallel):
            return nullcontext()
        return self.wrapped.no_sync()

    def step(self, max_grad_norm: float | None) -> float:
        """See `Engine`.

        Raises:
            ConfigError: a trained parameter that the model doesn't use: DDP leaves its bucket unaveraged.
        """
        unused = [name for name, p in trainable(self.module) if p.grad is None]
        if unused and isinstance(self.wrapped, DistributedDataParallel):
            raise ConfigError(
                f"distributed_type: MULTI_GPU (DDP) can't train {unused[0]}, which the model doesn't use; "
                "take accelerate_configs/fsdp2.yaml, or LoRA on the modules that are used"
            )
        return clip_and_step(
            self.optimizer,
            self.scaler,
            with_cuts(self.module),
            max_grad_norm,
            group=None,
            tp_group=self.layout.tp_group if self.layout.tp_size > 1 else None,
        )

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        return self._whole(
            (name, (torch.zeros_like(p) if p.grad is None else p.grad).detach().float())
            for name, p in trainable(self.module)
        )

    def parameters(self, *, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        return self._whole(
            (weight.name, weight.assemble([p.detach() for p in weight.parameters]))
            for weight in weights(self.module)
            if weight.requires_grad or not trainable_only
        )

    def save_state(self, folder: Path) -> None:
        """See `Engine`."""
        state.save(self.module, self.optimizer, folder, sharded=False, layout=self.layout, scaler=self.scaler)

    def load_state(self, folder: Path) -> None:
        """See `Engine`."""
        state.load(self.module, self.optimizer, folder, layout=self.layout, scaler=self.scaler)
