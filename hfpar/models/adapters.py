"""LoRA through PEFT, started the same on every rank and every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from hfpar.errors import ConfigError


def add_lora(
    model: Any,
    *,
    r: int,
    alpha: float,
    dropout: float,
    target_modules: str | list[str],
    modules_to_save: list[str] | None,
    seed: int,
) -> Any:
    """Freeze the model and put LoRA adapters on it.

    The base keeps its dtype; adapters are fp32. Their first values depend on the seed alone: not on the rank,
    nor on whether the base is whole, cut or still on the meta device.

    Args:
        model: a Transformers model.
        r: rank of the update.
        alpha: the update is scaled by alpha / r.
        dropout: on the adapters' input.
        target_modules: module names, or `all-linear` (all but the head).
        modules_to_save: modules that are trained whole.
        seed: of the first values.

    Raises:
        ConfigError: names that match no module.
    """
    from peft import LoraConfig, TaskType, get_peft_model

    targets = target_modules if target_modules == "all-linear" else _as_list(target_modules)
    _check_names(model, "modules_to_save", modules_to_save or [])
    if targets != "all-linear":
        _check_names(model, "lora_target_modules", targets)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=targets,
        modules_to_save=modules_to_save,
    )
    try:
        peft_model = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules: {target_modules}: {str(error).splitlines()[0]}") from error
    initialize_adapters(peft_model, seed)
    return peft_model


def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Set every adapter's values from the seed, in module order; those on the meta device become real.

    Args:
        model: a PEFT model.
        seed: of the values.
    """
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    for module in model.modules():
        if not hasattr(module, "reset_lora_parameters"):
            continue
        for container_name in module.adapter_layer_names:  # type: ignore[union-attr]
            _make_real(getattr(module, container_name))
        for adapter_name in (*module.lora_A, *module.lora_embedding_A):  # type: ignore[misc]
            module.reset_lora_parameters(adapter_name, init_lora_weights=True)  # type: ignore[operator]
    torch.random.set_rng_state(generator_state)


def _make_real(container: Any) -> None:
    if isinstance(container, nn.Module) and any(p.is_meta for p in container.parameters()):
        container.to_empty(device="cpu")


def _as_list(names: str | list[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _check_names(model: nn.Module, key: str, names: Sequence[str]) -> None:
    """Every name must be the last part(s) of some module's name."""
    modules = [name for name, _ in model.named_modules()]
    for wanted in names:
        if not any(name == wanted or name.endswith("." + wanted) for name in modules):
            linear = {
                name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)
            }
            raise ConfigError(
                f"{key}: {wanted} matches no module; linear layers here: {', '.join(sorted(linear))}"
            )
