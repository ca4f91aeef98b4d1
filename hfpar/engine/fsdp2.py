"""FSDP2: torch's `fully_shard` over the batch group, with the FSDP settings of the Accelerate file."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from hfpar.config.engine import FSDP2Settings
from hfpar.engine import state
from hfpar.engine.base import Engine, OptimizerFactory, trainable, weights, with_cuts
from hfpar.engine.clip import clip_and_step
from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout


class FSDP2Engine(Engine):
    """Each rank keeps a slice of every weight, its gradient and its optimizer state."""

    name = "fsdp2"
    settings: FSDP2Settings

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: OptimizerFactory,
        settings: FSDP2Settings,
        layout: Layout,
        device: torch.device,
        load_weights: Callable[[nn.Module], None],
    ) -> None:
        """Shard the model, then let each rank read its own slices.

        Args:
            module: weights may be on the meta device.
            make_optimizer: called on the sharded parameters.
            settings: from the Accelerate file.
            layout: the rank's place.
            device: where shards are computed with.
            load_weights: fills the shards of the weights that are still on the meta device.
        """
        super().__init__(layout, device)
        self.settings = settings
        self.module = module
        offload = settings.offload_params and device.type == "cuda"
        self.keep_device = torch.device("cpu") if offload else device
        _shard(module, settings, layout, offload=offload)
        load_weights(module)
        _move_rest(module, device, self.keep_device)
        self.optimizer = make_optimizer(trainable(module))
        self.scaler = torch.amp.GradScaler(device.type, enabled=settings.mixed_precision == "fp16")

    def forward(self, **inputs: Any) -> Tensor:
        """See `Engine`."""
        result: Tensor = self.module(**inputs)
        return result

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """See `Engine`. Gradients are reduced after every micro-batch, so only shards of them are kept."""
        self.scaler.scale(loss).backward()

    def step(self, max_grad_norm: float | None) -> float:
        """See `Engine`."""
        return clip_and_step(
            self.optimizer,
            self.scaler,
            with_cuts(self.module),
            max_grad_norm,
            group=self.layout.batch_group,
            tp_group=self.layout.tp_group if self.layout.tp_size > 1 else None,
        )

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        return self._whole(
            (name, _unsharded(torch.zeros_like(p) if p.grad is None else p.grad, self.device).float())
            for name, p in trainable(self.module)
        )

    def parameters(self, *, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        return self._whole(
            (weight.name, weight.assemble([_unsharded(p, self.device) for p in weight.parameters]))
            for weight in weights(self.module)
            if weight.requires_grad or not trainable_only
        )

    def save_state(self, folder: Path) -> None:
        """See `Engine`."""
        sharded = self.settings.state_dict_type == "SHARDED_STATE_DICT"
        state.save(
            self.module, self.optimizer, folder, sharded=sharded, layout=self.layout, scaler=self.scaler
        )

    def load_state(self, folder: Path) -> None:
        """See `Engine`."""
        state.load(self.module, self.optimizer, folder, layout=self.layout, scaler=self.scaler)


def _shard(module: nn.Module, settings: FSDP2Settings, layout: Layout, *, offload: bool) -> None:
    dtypes = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
    param_dtype = dtypes[settings.mixed_precision]
    options: dict[str, Any] = {
        "mesh": layout.batch_mesh,
        "reshard_after_forward": settings.reshard_after_forward,
        # Gradients are summed over ranks in fp32 whatever the compute dtype: bf16 sums depend on their order.
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=param_dtype, reduce_dtype=torch.float32 if param_dtype is not None else None
        ),
        "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
    }
    for layer in layers_to_wrap(module, settings.transformer_layer_cls_to_wrap):
        fully_shard(layer, **options)
    fully_shard(module, **options)


def layers_to_wrap(module: nn.Module, class_names: tuple[str, ...] | None) -> list[nn.Module]:
    """The layers that are gathered one at a time.

    Args:
        module: a Transformers or PEFT model.
        class_names: from the Accelerate file; None: the model's own `_no_split_modules`.

    Raises:
        ConfigError: a class that the model doesn't have.
    """
    wanted = class_names
    if wanted is None:
        no_split = [getattr(m, "_no_split_modules", None) or () for m in module.modules()]
        wanted = tuple(sorted({name for names in no_split for name in names}))
    layers = [m for m in module.modules() if type(m).__name__ in wanted]
    if class_names:
        missing = set(class_names) - {type(layer).__name__ for layer in layers}
        if missing:
            has = sorted({type(m).__name__ for m in module.modules() if type(m).__name__.endswith("Layer")})
            raise ConfigError(
                f"fsdp_transformer_layer_cls_to_wrap: {', '.join(sorted(missing))} isn't in this model; "
                f"it has {', '.join(has)}"
            )
    return layers


def _move_rest(module: nn.Module, device: torch.device, keep_device: torch.device) -> None:
    """Buffers go where the computing is; sharded parameters where they are kept."""
    for owner in module.modules():
        for name, buffer in owner.named_buffers(recurse=False):
            persistent = name not in owner._non_persistent_buffers_set
            owner.register_buffer(name, buffer.to(device), persistent=persistent)
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            raise AssertionError(f"{name} was never loaded")
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        assert local.device.type == keep_device.type, f"{name} is on {local.device}"


def _unsharded(tensor: Tensor, device: torch.device) -> Tensor:
    """The full tensor of a DTensor, gathered on `device`."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    if tensor.to_local().device.type != device.type:
        tensor = tensor.to(device)
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
    return whole
