"""The optimizer and its schedule, by Transformers' names."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from hfpar.config.engine import EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError, MissingDependencyError


def check_optimizer(config: SFTConfig, settings: EngineSettings, device: torch.device) -> None:
    """Refuse, before weights load, an optimizer that this engine or machine can't run.

    Raises:
        MissingDependencyError: bitsandbytes isn't installed.
        ConfigError: the combination doesn't work.
    """
    eight_bit = "8bit" in config.optim or "paged" in config.optim
    if eight_bit and importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError(
            f"optim: {config.optim} needs bitsandbytes: pip install 'hfpar[quantization]'"
        )
    if eight_bit and isinstance(settings, FSDP2Settings):
        raise ConfigError(
            f"optim: {config.optim} can't update FSDP2's sharded parameters; use adamw_torch, or DDP or ZeRO"
        )
    if config.optim == "adafactor" and isinstance(settings, FSDP2Settings | ZeROSettings):
        raise ConfigError(
            f"optim: adafactor needs whole matrices, which {settings.name} cuts; use adamw_torch, or DDP"
        )
    if (config.tp_size or 1) > 1 and (config.optim == "adafactor" or "8bit" in config.optim):
        raise ConfigError(
            f"optim: {config.optim} looks at whole matrices or blocks of them, which tp_size {config.tp_size} cuts; "
            "use adamw_torch, or leave tp_size at 1"
        )
    is_scaled = isinstance(settings, ZeROSettings) and settings.mixed_precision == "fp16"
    if config.adapter_dtype == "float16" and config.lora_r and not is_scaled:
        raise ConfigError(
            "adapter_dtype: float16 loses small gradients, which only ZeRO with mixed_precision fp16 scales up for "
            "such weights; use float32, or bfloat16"
        )
    if config.optim.startswith("paged") and device.type != "cuda":
        raise ConfigError(f"optim: {config.optim} needs a GPU; use adamw_bnb_8bit or adamw_torch")


def make_optimizer(parameters: list[tuple[str, nn.Parameter]], config: SFTConfig) -> Optimizer:
    """The optimizer that `optim` names, decaying matrices and embeddings but no norms and biases.

    Args:
        parameters: (name, parameter) of everything trained, as the engine keeps it.
        config: the run's.
    """
    decayed = [p for name, p in parameters if is_decayed(name)]
    rest = [p for name, p in parameters if not is_decayed(name)]
    groups: list[dict[str, Any]] = [
        {"params": decayed, "weight_decay": config.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    adam: dict[str, Any] = {
        "lr": config.learning_rate,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_epsilon,
    }
    if config.optim == "adamw_torch":
        # On a CPU torch's own choice is a loop of small operations, several times slower than its fused kernel.
        on_cpu = all(p.device.type == "cpu" for _, p in parameters)
        return torch.optim.AdamW(groups, fused=True if on_cpu else None, **adam)
    if config.optim == "adamw_torch_fused":
        return torch.optim.AdamW(groups, fused=True, **adam)
    if config.optim == "sgd":
        return torch.optim.SGD(groups, lr=config.learning_rate)
    if config.optim == "adafactor":
        from transformers.optimization import Adafactor

        return Adafactor(groups, lr=config.learning_rate, scale_parameter=False, relative_step=False)
    import bitsandbytes as bnb

    classes = {
        "adamw_bnb_8bit": bnb.optim.AdamW8bit,
        "paged_adamw_8bit": bnb.optim.PagedAdamW8bit,
        "paged_adamw_32bit": bnb.optim.PagedAdamW32bit,
    }
    optimizer: Optimizer = classes[config.optim](groups, **adam)
    return optimizer


def is_decayed(parameter_name: str) -> bool:
    """Whether weight decay applies: not to biases, sinks and norms (by name: a shard has lost its shape)."""
    *owners, kind = parameter_name.lower().split(".")
    if kind.endswith("bias") or kind == "sinks":
        return False
    return not any("norm" in owner or owner.startswith("ln_") for owner in owners)


def make_schedule(optimizer: Optimizer, config: SFTConfig, total_steps: int) -> LRScheduler:
    """The schedule that `lr_scheduler_type` names; one `step()` an optimizer step."""
    from transformers import get_scheduler

    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * total_steps)  # as Transformers rounds
    schedule: LRScheduler = get_scheduler(
        config.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps
    )
    return schedule
