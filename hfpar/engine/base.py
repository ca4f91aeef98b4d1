"""The verbs that training needs of an engine.

An engine averages gradients over the batch group. It never scales a loss: the divisor and the factor that
undoes the average are the step's business (`hfpar.train.step`), so they are the same everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hfpar.config.engine import EngineSettings
from hfpar.models.cuts import Cut, cuts_of
from hfpar.models.quantized import QuantizedWeight, quantized_weights
from hfpar.parallel.collectives import gather_whole
from hfpar.parallel.layout import Layout

OptimizerFactory = Callable[[list[tuple[str, nn.Parameter]]], Optimizer]
"""Makes the optimizer from the trainable (name, parameter) pairs of the wrapped model."""


class Engine(ABC):
    """A wrapped model with its optimizer.

    Attributes:
        name: as in tables, `ddp`, `fsdp2`, `zero1` to `zero3`.
        module: the Transformers or PEFT model, under whatever the engine put around it.
        optimizer: what a learning-rate schedule works on.
        device: this rank's device.
        settings: what the engine was made with.
    """

    name: str
    module: nn.Module
    optimizer: Optimizer
    device: torch.device
    settings: EngineSettings

    def __init__(self, layout: Layout, device: torch.device) -> None:
        """Keep the rank's place."""
        self.layout = layout
        self.device = device

    def _whole(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Of each tensor, named as a parameter, the parts of all tp ranks put together; on the CPU."""
        cuts = cuts_of(self.module)
        for name, tensor in tensors:
            cut = cuts.get(name)
            if cut is not None:
                tensor = gather_whole(tensor, cut, self.layout.tp_group, self.device)
            yield name, tensor.cpu()

    @abstractmethod
    def forward(self, **inputs: Any) -> Tensor:
        """Call the wrapped model; with `labels` it returns the summed loss (see `hfpar.train.loss`)."""

    def accumulate(self, *, last_micro_batch: bool) -> AbstractContextManager[Any]:
        """Around the forward and backward of one micro-batch: engines that can wait with averaging do so."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """Add the gradients of `loss`, averaged over the batch group once the last micro-batch is in."""

    @abstractmethod
    def step(self, max_grad_norm: float | None) -> float:
        """Clip, update the weights and drop the gradients.

        Args:
            max_grad_norm: bound on the global norm; None: no clipping.

        Returns:
            The global gradient norm before clipping, the same on every rank. Not finite if fp16 overflowed
            and the update was skipped.
        """

    @abstractmethod
    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every trainable parameter's whole gradient, fp32 on the CPU. All ranks iterate together.

        Valid after the last micro-batch's backward and before `step`.
        """

    @abstractmethod
    def parameters(self, *, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, on the CPU, by its name in `module`. All ranks iterate together."""

    @abstractmethod
    def save_state(self, folder: Path) -> None:
        """Write trainable weights and optimizer state so that `load_state` continues bit for bit."""

    @abstractmethod
    def load_state(self, folder: Path) -> None:
        """Read what `save_state` wrote.

        Raises:
            ConfigError: written by another engine, or another number of ranks where that matters.
        """

    def inference(self) -> AbstractContextManager[Any]:
        """Around evaluation: no gradients."""
        return torch.no_grad()

    def close(self) -> None:  # noqa: B027 - most engines have nothing to release
        """Release what outlives the object."""


def autocast(device: torch.device, mixed_precision: str) -> AbstractContextManager[Any]:
    """Autocast to the engine's mixed precision; nothing for `no`."""
    if mixed_precision == "no":
        return nullcontext()
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float16
    return torch.autocast(device.type, dtype=dtype)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything that is trained, tied ones once."""
    return [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


@dataclass(frozen=True)
class Weight:
    """A weight of the model, and the parameters in which an engine holds it."""

    name: str
    parameters: tuple[nn.Parameter, ...]
    requires_grad: bool
    assemble: Callable[[Sequence[Tensor]], Tensor]
    """The weight, of those parameters whole; dequantized, if they are bytes."""
    quantized: QuantizedWeight | None = None
    """What is known of the bytes."""


def weights(module: nn.Module) -> Iterator[Weight]:
    """Every weight by its name in `module`, tied ones once."""
    held: dict[str, tuple[str, nn.Module, str, QuantizedWeight] | None] = {}
    for prefix, owner in module.named_modules():
        for name, quantized in quantized_weights(owner).items():
            full = f"{prefix}.{name}"
            held[f"{full}_packed"] = (full, owner, name, quantized)
            held[f"{full}_scales"] = None
    for name, parameter in module.named_parameters():
        if name not in held:
            yield Weight(name, (parameter,), parameter.requires_grad, lambda tensors: tensors[0])
            continue
        entry = held[name]
        if entry is not None:
            full, owner, own_name, quantized = entry
            scales = owner._parameters[f"{own_name}_scales"]
            assert scales is not None
            assemble = partial(_dequantize, owner, own_name, quantized)
            yield Weight(full, (parameter, scales), False, assemble, quantized)


def _dequantize(owner: nn.Module, name: str, quantized: QuantizedWeight, tensors: Sequence[Tensor]) -> Tensor:
    nested = owner._buffers.get(f"{name}_nested")
    packed, scales = tensors
    if nested is not None:
        nested = nested.to(packed.device)
    return quantized.dequantize(packed, scales, nested, quantized.dtype)


def with_cuts(module: nn.Module) -> list[tuple[nn.Parameter, Cut | None]]:
    """Everything that is trained, and which of it is a part for a tp rank."""
    cuts = cuts_of(module)
    return [(parameter, cuts.get(name)) for name, parameter in trainable(module)]
