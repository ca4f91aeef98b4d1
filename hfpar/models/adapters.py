"""LoRA and its kin through PEFT, started the same on every rank and every engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfpar.errors import ConfigError, first_line
from hfpar.models import adapter_init, token_rows
from hfpar.models.quantized import quantized_weights
from hfpar.models.token_rows import Fresh


@dataclass(frozen=True, kw_only=True)
class LoraChoices:
    """What is put on a model; the names are PEFT's where it has one."""

    r: int
    alpha: float
    """The update is scaled by alpha / r, or with `use_rslora` by alpha / sqrt(r)."""
    dropout: float = 0.0
    """On the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Module names, or `all-linear` (all but the head)."""
    modules_to_save: list[str] | None = None
    """Modules that are trained whole."""
    use_rslora: bool = False
    use_dora: bool = False
    init_lora_weights: str = "default"
    """default, gaussian, pissa, olora or loftq."""
    dtype: torch.dtype = torch.float32
    """Of the adapters' weights and of trained rows."""
    embedding_rows: tuple[int, ...] = ()
    """Tokens whose rows of the embedding are trained; the head's, too, where the two are tied."""
    head_rows: tuple[int, ...] = ()
    """Tokens whose rows of the head are trained, where it has its own."""
    fresh_embedding: Fresh | None = None
    fresh_head: Fresh | None = None
    """Of these rows, those that don't begin as the checkpoint has them."""


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
    """Freeze the model and put plain LoRA adapters in fp32 on it; see `LoraChoices` and `add_adapters`.

    Raises:
        ConfigError: names that match no module.
    """
    choices = LoraChoices(
        r=r, alpha=alpha, dropout=dropout, target_modules=target_modules, modules_to_save=modules_to_save
    )
    return add_adapters(model, choices, seed=seed)


def add_adapters(model: Any, choices: LoraChoices, *, seed: int, folder: Path | None = None) -> Any:
    """Freeze the model and put adapters on it. All ranks together.

    The base keeps its dtype. The adapters' first values depend on the seed and the checkpoint alone: not on the
    rank, nor on whether the base is whole, cut or still on the meta device.

    Args:
        model: a Transformers model.
        choices: what.
        seed: of the first values.
        folder: the model's checkpoint, for first values that depend on it.

    Raises:
        ConfigError: names that match no module, or choices that don't go together on this model.
    """
    peft_model = _wrap(model, choices)
    generator_state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    adapter_init.initialize(peft_model, choices.init_lora_weights, choices.dtype, folder)
    torch.random.set_rng_state(generator_state)
    token_rows.initialize(peft_model, choices.dtype, folder, choices.fresh_embedding, choices.fresh_head)
    return peft_model


def check_adapters(skeleton: Any, choices: LoraChoices) -> None:
    """Refuse what `add_adapters` would, before weights load.

    Args:
        skeleton: the Transformers model on the meta device; of no use afterwards.
        choices: what.

    Raises:
        ConfigError: names that match no module, or choices that don't go together on this model.
    """
    with torch.random.fork_rng(devices=[]):
        _wrap(skeleton, choices)


def _wrap(model: Any, choices: LoraChoices) -> Any:
    """What PEFT makes of the model; first values come later."""
    from peft import LoraConfig, TaskType, get_peft_model

    targets = "all-linear" if choices.target_modules == "all-linear" else _as_list(choices.target_modules)
    _check_names(model, "modules_to_save", choices.modules_to_save or [])
    _check_trained_whole(model, choices)
    _check_rows(model, choices)
    if targets != "all-linear":
        _check_names(model, "lora_target_modules", targets)
        _check_vocabulary(model, targets, choices)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=choices.r,
        lora_alpha=choices.alpha,  # type: ignore[arg-type]
        lora_dropout=choices.dropout,
        target_modules=targets,
        modules_to_save=choices.modules_to_save,
        use_rslora=choices.use_rslora,
        use_dora=choices.use_dora,
        trainable_token_indices=token_rows.indices(model, choices.embedding_rows, choices.head_rows),
    )
    try:
        with _whole_shapes(model, choices):
            peft_model: Any = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(f"lora_target_modules: {choices.target_modules}: {first_line(error)}") from error
    adapter_init.check_layers(peft_model, choices.init_lora_weights)
    return peft_model


@contextmanager
def _whole_shapes(model: nn.Module, choices: LoraChoices) -> Iterator[None]:
    """Show PEFT weights that DeepSpeed has cut as they are when whole, without their values, where it looks at them."""
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    shown: dict[int, nn.Parameter] = {}
    if choices.use_dora or choices.embedding_rows or choices.head_rows:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and hasattr(parameter, "ds_shape"):
                    places.append((module, name, parameter))
    for module, name, parameter in places:
        if id(parameter) not in shown:
            whole = torch.empty(parameter.ds_shape, dtype=parameter.dtype, device="meta")  # type: ignore[attr-defined]
            shown[id(parameter)] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
        module._parameters[name] = shown[id(parameter)]
    try:
        yield
    finally:
        for module, name, parameter in places:
            parameter.requires_grad_(shown[id(parameter)].requires_grad)
            module._parameters[name] = parameter


def _as_list(names: str | list[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def modules_named(model: nn.Module, wanted: str) -> list[tuple[str, nn.Module]]:
    """The modules of which a name is the last part(s)."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if name == wanted or name.endswith("." + wanted)
    ]


# Refusals


def _check_names(model: nn.Module, key: str, names: Sequence[str]) -> None:
    """Every name must be the last part(s) of some module's name."""
    for wanted in names:
        if not modules_named(model, wanted):
            linear = {
                name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)
            }
            raise ConfigError(
                f"{key}: {wanted} matches no module; linear layers here: {', '.join(sorted(linear))}"
            )


def _check_trained_whole(model: Any, choices: LoraChoices) -> None:
    """What is trained whole has weights of its own, in full precision."""
    vocabulary = {
        id(model.get_input_embeddings()): choices.embedding_rows,
        id(model.get_output_embeddings()): choices.head_rows,
    }
    for wanted in choices.modules_to_save or []:
        for name, module in modules_named(model, wanted):
            held = next((inner for inner, m in module.named_modules() if quantized_weights(m)), None)
            if held is not None:
                inner_name = f"{name}.{held}" if held else name
                raise ConfigError(
                    f"modules_to_save: {wanted}, but {inner_name} is quantized, so that it can't be trained whole; "
                    "leave it to lora_target_modules, or add it to llm_int8_skip_modules"
                )
            if vocabulary.get(id(module)):
                raise ConfigError(
                    f"trainable_token_indices: rows of {name}, which modules_to_save: {wanted} trains whole; keep one"
                )


def _check_rows(model: Any, choices: LoraChoices) -> None:
    """Each token that is named by number has a row."""
    weight = model.get_input_embeddings().weight
    num_rows = getattr(weight, "ds_shape", weight.shape)[0]
    outside = [row for row in (*choices.embedding_rows, *choices.head_rows) if row >= num_rows]
    if outside:
        raise ConfigError(
            f"trainable_token_indices: {outside[0]}, but the model's tokens are 0 to {num_rows - 1}"
        )


def _check_vocabulary(model: Any, targets: Sequence[str], choices: LoraChoices) -> None:
    """An adapter on the embedding or the head needs a matrix that only it changes."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    for wanted in targets:
        for name, module in modules_named(model, wanted):
            if module is head and is_tied:
                raise ConfigError(
                    f"lora_target_modules: {wanted}, but the model's head is tied to its embedding, which an adapter "
                    f"on one of them would untie; leave {wanted} out, or train it whole with modules_to_save"
                )
            rows = choices.embedding_rows if module is embedding else choices.head_rows
            if rows and (module is embedding or module is head):
                raise ConfigError(
                    f"trainable_token_indices: rows of {name}, on which lora_target_modules: {wanted} puts an adapter; "
                    "keep one"
                )
