"""The trained model as Transformers or PEFT loads it, written from any engine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from hfpar.engine.base import Engine
from hfpar.models.adapter_init import save_adapter
from hfpar.models.stored import persistent_buffers
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.files import explained_write_errors, files_in, make_fresh, sync

INDEX_FILE = "model.safetensors.index.json"


def export_model(
    engine: Engine,
    tokenizer: Any,
    output_dir: Path,
    layout: Layout,
    *,
    stop_token: int | None = None,
    max_shard_size: str = "50GB",
) -> None:
    """Write what Transformers (or PEFT) loads: weights, config, tokenizer, chat template. All ranks together.

    Weights are gathered one at a time and kept on rank 0 only.

    Args:
        engine: holds the model.
        tokenizer: saved beside it.
        output_dir: where to. A model that is there stays whole until the new one takes its place.
        layout: the rank's place.
        stop_token: ends what was trained, so that generation is to stop there too. An adapter can't say so: its
            base has that setting.
        max_shard_size: of a safetensors file.

    Raises:
        ConfigError: it can't be written.
    """
    module: Any = engine.module
    is_peft = hasattr(module, "peft_config")
    weights = {}
    for name, weight in engine.parameters(trainable_only=is_peft):
        if layout.rank == 0:
            weights[name] = weight
    if not is_peft:
        weights.update((name, buffer.detach().cpu()) for name, buffer in persistent_buffers(module).items())

    if stop_token is not None and not is_peft:
        _stop_at(module.generation_config, stop_token)

    def write() -> None:
        partial = output_dir / ".export.partial"
        with explained_write_errors(output_dir):
            make_fresh(partial)
            if is_peft:
                save_adapter(module, weights, partial)
            else:
                module.save_pretrained(partial, state_dict=weights, max_shard_size=max_shard_size)
            tokenizer.save_pretrained(partial)
            mode = (partial / ("adapter_config.json" if is_peft else "config.json")).stat().st_mode
            for _, path in files_in(partial):
                path.chmod(mode)  # safetensors files come readable by their owner alone
            _publish(partial, output_dir)

    on_main(layout, write)


def _stop_at(generation_config: Any, token: int) -> None:
    """Add a token to those that end a generation."""
    eos = generation_config.eos_token_id
    known = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if token not in known:
        generation_config.eos_token_id = [*known, token] if known else token


def _publish(partial: Path, output_dir: Path) -> None:
    """Move an export into place, so that at each moment `output_dir` holds the old model, none, or the new one.

    Several weight files belong together through their index, which is replaced at once; until then the new
    ones need names of their own. A config comes last: without it, a folder holds no model yet.
    """
    index = partial / INDEX_FILE
    if index.is_file() and (output_dir / INDEX_FILE).is_file():
        _rename_shards(partial, {path.name for path in output_dir.iterdir()})
    for _, path in files_in(partial):
        sync(path)
    last = ("config.json", "adapter_config.json")
    for path in sorted(partial.iterdir(), key=lambda path: (path.name in last, path == index, path.name)):
        os.replace(path, output_dir / path.name)
    partial.rmdir()
    sync(output_dir)
    if (output_dir / INDEX_FILE).is_file():
        used = set(json.loads((output_dir / INDEX_FILE).read_text())["weight_map"].values())
        for path in output_dir.glob("model*.safetensors"):
            if path.name not in used:
                path.unlink()


def _rename_shards(partial: Path, taken: set[str]) -> None:
    """Give weight files names that aren't taken, in the folder and its index."""
    index = json.loads((partial / INDEX_FILE).read_text())
    generation = 1
    while any(name.startswith(f"model-v{generation}-") for name in taken):
        generation += 1
    names = {
        name: name.replace("model-", f"model-v{generation}-", 1) for name in set(index["weight_map"].values())
    }
    for old, new in names.items():
        os.replace(partial / old, partial / new)
    index["weight_map"] = {weight: names[name] for weight, name in index["weight_map"].items()}
    (partial / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
