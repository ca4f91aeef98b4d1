"""An adapter without the weights of its base: what PEFT makes of each weight that it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfpar.errors import ConfigError, first_line
from hfpar.models.adapter_init import Taken
from hfpar.models.stored import checkpoint_key

_NAME = "default"
_ONLY_ZEROS = (True, False, None, "gaussian", "eva")
"""Initializations that leave the base as it is."""
_FROM_THE_BASE = ("pissa", "olora", "orthogonal", "mica")
"""Those that take something out of the base, and find it there again."""


@dataclass(frozen=True)
class Change:
    """What becomes of a weight of the base."""

    kind: str
    """lora, tokens or module."""
    apply: Callable[[Tensor], Tensor]
    """From the base's values in float32, to the merged ones."""


@dataclass
class Adapter:
    """An adapter on a model whose own weights take no memory.

    Attributes:
        config: PEFT's.
        changes: by the name of the weight in the Transformers model; to be done one after another.
    """

    config: Any
    changes: dict[str, list[Change]] = field(default_factory=dict)
    layers: dict[str, Any] = field(default_factory=dict)
    """PEFT's LoRA layers by the name of their weight."""

    def count(self, kind: str) -> int:
        """Weights that are changed in this way."""
        return sum(any(change.kind == kind for change in changes) for changes in self.changes.values())

    def began_with(self, name: str, rank: int) -> Taken | None:
        """What an adapter of `rank` began with, which its export holds negated behind what was trained.

        Args:
            name: of a weight.
            rank: with which it was trained.
        """
        layer = self.layers.get(name)
        if layer is None:
            return None
        a, b = layer.lora_A[_NAME].weight.detach(), layer.lora_B[_NAME].weight.detach()
        return Taken(a[rank:], -b[:, rank:], layer.scaling[_NAME])

    def merge(self, name: str, values: Tensor) -> Tensor:
        """A weight of the base, changed in float32.

        Raises:
            ConfigError: what comes out isn't finite, or PEFT can't merge it.
        """
        merged = values.float()
        for change in self.changes.get(name, ()):
            try:
                merged = change.apply(merged)
            except (ValueError, RuntimeError) as error:
                raise ConfigError(f"{name}: the adapter can't be merged: {first_line(error)}") from error
        return merged


def load_adapter(model: Any, folder: Path) -> Adapter:
    """Put an adapter on a model and read its values.

    Args:
        model: of Transformers, on the meta device; it is changed.
        folder: of the adapter.

    Raises:
        ConfigError: of a kind that can't be merged, or values that don't belong to this model.
    """
    from peft import PeftConfig, get_peft_model

    try:
        config = PeftConfig.from_pretrained(str(folder))
        kind = getattr(config.peft_type, "value", config.peft_type)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{folder}: its adapter_config.json can't be read: {first_line(error)}") from error
    if kind not in ("LORA", "TRAINABLE_TOKENS"):
        raise ConfigError(f"{folder}: an adapter of type {kind}; only LoRA and trained tokens can be merged")
    config.inference_mode = False  # what is trained is what the adapter holds
    config.base_model_name_or_path = None  # it may have moved
    init = getattr(config, "init_lora_weights", None)
    if hasattr(config, "init_lora_weights"):
        _check_init(init, folder)
        config.init_lora_weights = True
    try:
        peft_model: Any = get_peft_model(model, config)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{folder}: the adapter doesn't fit the base: {first_line(error)}") from error
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = init
    _make_adapter_real(peft_model)
    _read_values(peft_model, folder)
    adapter = Adapter(config)
    _find_changes(peft_model, adapter)
    return adapter


def _check_init(init: Any, folder: Path) -> None:
    name = str(init).lower()
    if init not in _ONLY_ZEROS and not name.startswith(_FROM_THE_BASE):
        raise ConfigError(
            f"{folder}: init_lora_weights {init} has changed the base in a way that can't be found again; save the "
            "adapter as plain LoRA (PEFT: save_pretrained with path_initial_model_for_weight_conversion)"
        )


def _make_adapter_real(model: nn.Module) -> None:
    """Give what the adapter holds memory, in float32."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.requires_grad:
                module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape, dtype=torch.float32))


def _read_values(model: Any, folder: Path) -> None:
    from peft.utils.save_and_load import load_peft_weights, set_peft_model_state_dict
    from safetensors import SafetensorError

    try:
        weights = load_peft_weights(str(folder), device="cpu")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(f"{folder}: the adapter's weights can't be read: {first_line(error)}") from error
    try:
        result = set_peft_model_state_dict(model, weights, adapter_name=_NAME)
    except KeyError as error:
        raise ConfigError(
            f"{folder}: the adapter doesn't hold {error.args[0]}, as its config says"
        ) from error
    except RuntimeError as error:
        mismatch = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        reason = mismatch[0] if mismatch else first_line(error)
        raise ConfigError(f"{folder}: the adapter doesn't fit the base: {reason.rstrip('.')}") from error
    expected = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(expected & set(result.missing_keys))
    if missing:
        raise ConfigError(f"{folder}: the adapter doesn't hold {_some(missing)}, as its config says")
    if result.unexpected_keys:
        raise ConfigError(
            f"{folder}: the adapter's {_some(sorted(result.unexpected_keys))} belongs to no module of the base; is it "
            "the base that was trained on?"
        )


def _find_changes(model: Any, adapter: Adapter) -> None:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    used: set[int] = set()
    for path, module in model.named_modules():
        name = checkpoint_key(path)
        if isinstance(module, ModulesToSaveWrapper):
            for key, value in module.modules_to_save[_NAME].state_dict(keep_vars=True).items():
                used.add(id(value))
                _add(adapter, f"{name}.{key}", "module", _replacement(value.detach()))
        elif isinstance(module, BaseTunerLayer):
            weight = getattr(module, "parameter_name", "weight")
            kind = "tokens" if hasattr(module, "token_indices") else "lora"
            if kind == "lora":
                adapter.layers[f"{name}.{weight}"] = module
            _add(adapter, f"{name}.{weight}", kind, _merging(module, weight, adapter.config))
            if getattr(module, "lora_bias", {}).get(_NAME):
                _add(adapter, f"{name}.bias", kind, _bias_merging(module))
            own = [
                getattr(module, container)
                for container in module.adapter_layer_names
                if hasattr(module, container)
            ]
            used.update(id(parameter) for container in own for parameter in container.parameters())
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad and id(parameter) not in used:  # biases (PEFT's `bias`)
            _add(adapter, checkpoint_key(path), "module", _replacement(parameter.detach()))


def _add(adapter: Adapter, name: str, kind: str, apply: Callable[[Tensor], Tensor]) -> None:
    adapter.changes.setdefault(name, []).append(Change(kind, apply))


def _replacement(value: Tensor) -> Callable[[Tensor], Tensor]:
    def apply(base: Tensor) -> Tensor:
        if base.shape != value.shape:
            raise ValueError(f"it is {tuple(base.shape)} in the base and {tuple(value.shape)} in the adapter")
        return value

    return apply


def _merging(module: Any, weight: str, config: Any) -> Callable[[Tensor], Tensor]:
    """PEFT's own merging, of one layer that has its weight for that moment only."""

    def apply(values: Tensor) -> Tensor:
        owner = module.get_base_layer()
        empty, bias = owner._parameters[weight], owner._parameters.get("bias")
        if values.shape != empty.shape:
            raise ValueError(
                f"it is {tuple(values.shape)} in the base and {tuple(empty.shape)} in its config.json"
            )
        owner._parameters[weight] = nn.Parameter(values, requires_grad=False)
        try:
            if bias is not None:
                owner._parameters["bias"] = nn.Parameter(torch.zeros(bias.shape), requires_grad=False)
            _take_out_what_the_adapter_began_with(module, config)
            module.merge(safe_merge=True, adapter_names=[_NAME])
            merged: Tensor = owner._parameters[weight].data
        finally:
            owner._parameters[weight] = empty
            if bias is not None:
                owner._parameters["bias"] = bias
            module.merged_adapters.clear()
            getattr(module, "_caches", {}).clear()
        return merged

    return apply


def _take_out_what_the_adapter_began_with(module: Any, config: Any) -> None:
    """PiSSA and its kin train on what they leave of the base: PEFT finds it by initializing once more."""
    init = getattr(config, "init_lora_weights", None)
    if init in _ONLY_ZEROS or not hasattr(module, "lora_A"):
        return
    trained = {
        name: parameter.data.clone() for name, parameter in module.named_parameters() if "lora_" in name
    }
    module.update_layer(_NAME, module.r[_NAME], lora_alpha=module.lora_alpha[_NAME], config=config)
    for name, parameter in module.named_parameters():
        if name in trained:
            parameter.data = trained[name]


def _bias_merging(module: Any) -> Callable[[Tensor], Tensor]:
    def apply(bias: Tensor) -> Tensor:
        merged: Tensor = bias + module.lora_B[_NAME].bias.detach() * module.scaling[_NAME]
        return merged

    return apply


def _some(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")
