"""The adapter of a run that was stopped before its end, from its last whole checkpoint."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.exporting.run import Run
from hfpar.models import load
from hfpar.models.adapter_init import ADAPTER, TAKEN_FROM_BASE, save_adapter
from hfpar.models.adapters import add_adapters
from hfpar.train.checkpoint import STATE_FILE
from hfpar.train.model import TokenRows, lora_choices

_WHOLE, _SHARDED = "state.pt", "sharded"
"""As `hfpar.engine.state` names them."""


def write_adapter(run: Run, checkpoint: Path, folder: Path) -> None:
    """Write the PEFT folder that the run would have written had it ended at this checkpoint.

    Args:
        run: the run.
        checkpoint: one of its folders, whole.
        folder: where to.

    Raises:
        ConfigError: written by an engine whose parts can't be put together here.
    """
    assert run.config is not None
    engine = json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["engine"]
    tp_size = run.config.tp_size or 1
    if engine.startswith("zero") or tp_size > 1:
        who = f"tp_size {tp_size}" if tp_size > 1 else engine
        raise _launch_again(
            run, checkpoint, f"what the ranks of {who} left in it can only be put together by them"
        )
    weights = _read(checkpoint)
    model = _make_model(run, run.config)
    every_name = dict(model.named_parameters(remove_duplicate=False))
    for name, weight in weights.items():
        if "trainable_tokens_delta" in name and (
            name not in every_name or weight.shape != every_name[name].shape
        ):
            raise _launch_again(
                run, checkpoint, "which tokens' rows it holds can only be told from the run's data"
            )
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    missing = sorted(trained - weights.keys())
    if missing:
        raise ConfigError(f"{checkpoint}: doesn't hold {missing[0]}, unlike what the run's settings say")
    # What is tied may be there twice.
    weights = {name: weight for name, weight in weights.items() if name in trained}
    save_adapter(model, weights, folder)
    with_template = load.load_tokenizer(
        run.base, chat_template=run.config.chat_template, trust_remote_code=run.trust_remote_code
    )
    with_template.save_pretrained(folder)


def _launch_again(run: Run, checkpoint: Path, reason: str) -> ConfigError:
    return ConfigError(
        f"{run.folder}: a run that didn't get to its end; it has {checkpoint.name}, but {reason}: launch it again with "
        f"--resume --max_steps {checkpoint.name.rpartition('-')[2]}, which exports it"
    )


def _make_model(run: Run, config: SFTConfig) -> Any:
    """The run's PEFT model, with a base that takes no memory and what the adapters began with where that matters."""
    model = load.skeleton(
        run.base_config,
        dtype=load.weights_dtype(config.dtype, run.base_config),
        trust_remote_code=run.trust_remote_code,
    )
    choices = lora_choices(config, TokenRows.of(config))
    if choices.init_lora_weights not in TAKEN_FROM_BASE:
        choices = replace(choices, init_lora_weights="default")
    peft_model = add_adapters(model, choices, seed=config.seed, folder=run.base)
    peft_model.peft_config[ADAPTER].base_model_name_or_path = run.base_name
    return peft_model


def _read(checkpoint: Path) -> dict[str, Tensor]:
    """What was trained, whole, by its names in the model."""
    if (checkpoint / _WHOLE).is_file():
        state = torch.load(checkpoint / _WHOLE, map_location="cpu", weights_only=True)
        weights: dict[str, Tensor] = state["module"]
        return weights
    folder = checkpoint / _SHARDED
    saved = dcp.FileSystemReader(str(folder)).read_metadata().state_dict_metadata
    prefix = "module."
    weights = {
        name.removeprefix(prefix): torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load({"module": weights}, checkpoint_id=str(folder), no_dist=True)
    return weights
