"""A model's tokenizer, and where its embedding and head are: of a checkpoint, or of a base with an adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfpar.errors import ConfigError
from hfpar.exporting.adapter import Adapter, load_adapter
from hfpar.exporting.run import ADAPTER_CONFIG, open_run
from hfpar.models import load
from hfpar.models.stored import SafetensorsSource, checkpoint_key
from hfpar.models.token_matrices import Layers, TokenMatrix, find_matrices
from hfpar.train.checkpoint import CONFIG_FILE

_NO_WEIGHTS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]


@dataclass(frozen=True, eq=False)
class ChangedMatrix(TokenMatrix):
    """A base's matrix as an adapter changes it."""

    rows: dict[int, Tensor]
    """Those that were trained alone, each [H]."""
    whole: Tensor | None
    """[V, H], where more was trained than single rows."""

    def read_stored(self, start: int, stop: int) -> Tensor:
        """Rows one after another; the caller's own."""
        if self.whole is not None:
            return self.whole[start:stop].clone()
        values = super().read_stored(start, stop)
        changed = [row for row in range(start, stop) if row in self.rows] if self.rows else []
        for row in changed:
            values[row - start] = self.rows[row].to(values.dtype)
        return values


@dataclass(frozen=True, eq=False)
class TokenSource:
    """What is looked at of a model.

    Attributes:
        name: as the user gave it.
        description: for people: the folder, and an adapter's base.
        tokenizer: its own, or the base's.
        matrices: the embedding, and the head if it has a matrix of its own.
        notes: what couldn't be looked at.
    """

    name: str
    description: str
    tokenizer: Any
    matrices: list[TokenMatrix]
    notes: list[str]


@dataclass(frozen=True)
class SourceOptions:
    """How models are opened.

    Attributes:
        base: of an adapter, if not where it says.
        chat_template: in place of the tokenizers' own.
        trust_remote_code: whether a model's code may run.
    """

    base: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False


@contextmanager
def open_source(name: str, options: SourceOptions) -> Iterator[TokenSource]:
    """Find a model; what is read of it is there until the end of the context.

    Args:
        name: a folder or hub id of a model, or the folder of a run or an adapter.
        options: how.

    Raises:
        ConfigError: no model, no tokenizer, or an embedding that isn't stored by rows.
    """
    folder = Path(name).expanduser()
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    if is_adapter or ((folder / CONFIG_FILE).is_file() and not (folder / "config.json").is_file()):
        with open_run(folder, options.base, trust_remote_code=options.trust_remote_code) as run:
            own = (run.adapter / "tokenizer_config.json").is_file()
            yield _make(
                name,
                f"{folder} on {run.base_name}" + (f" ({run.note})" if run.note else ""),
                run.base,
                run.adapter if own else run.base,
                run.adapter,
                options,
                run.trust_remote_code,
            )
    else:
        folder = load.resolve_folder(name, files=_NO_WEIGHTS)
        is_hub = folder != Path(name).expanduser()
        yield _make(
            name,
            name,
            folder,
            folder,
            None,
            options,
            options.trust_remote_code,
            hub_id=name if is_hub else None,
        )


def _make(
    name: str,
    description: str,
    folder: Path,
    tokenizer_folder: Path,
    adapter_folder: Path | None,
    options: SourceOptions,
    trust_remote_code: bool,
    hub_id: str | None = None,
) -> TokenSource:
    config = load.load_model_config(folder, trust_remote_code=trust_remote_code)
    tokenizer = load.load_tokenizer(
        tokenizer_folder, chat_template=options.chat_template, trust_remote_code=trust_remote_code
    )
    model = load.skeleton(config, trust_remote_code=trust_remote_code)
    layers = Layers.of(model)
    if hub_id is not None:
        _download_weights(hub_id, folder, model, layers)
    matrices = find_matrices(model, folder)
    _check_stored(folder, layers, matrices)
    notes = []
    if not layers.is_tied and len(matrices) == 1:
        notes.append(f"the head isn't looked at: {folder} holds no {layers.names[1]} as plain numbers")
    if adapter_folder is not None:
        matrices = _with_adapter(model, layers, matrices, adapter_folder)
    return TokenSource(name, description, tokenizer, matrices, notes)


def _download_weights(hub_id: str, folder: Path, model: Any, layers: Layers) -> None:
    """Bring the files that hold the matrices, and no other weights."""
    files: Sequence[str] = ["*.safetensors"]
    if (folder / "model.safetensors.index.json").is_file():
        stored = SafetensorsSource(folder, model, layers.names)
        names = [
            found for found in (stored.find([name]) for name in layers.names) if found in stored.sections
        ]
        files = sorted({stored.where[stored.sections[name][0][0]] for name in names if name})
    if files:
        load.resolve_folder(hub_id, files=files)


def _check_stored(folder: Path, layers: Layers, matrices: list[TokenMatrix]) -> None:
    """Refuse what can't be read by rows, as plain numbers."""
    if not list(folder.glob("*.safetensors")):
        pickled = any(folder.glob("*.bin"))
        raise ConfigError(
            f"{folder} has no safetensors files"
            + (", only pickled ones (.bin)" if pickled else "")
            + "; save it once with Transformers' save_pretrained"
        )
    if (
        not matrices
        or matrices[0].name != "embedding"
        or matrices[0].found not in matrices[0].source.sections
    ):
        raise ConfigError(
            f"{folder} holds no {layers.names[0]} as plain numbers; if it is quantized, name the unquantized model"
        )
    for matrix in matrices:
        values = matrix.read_stored(0, 1)
        if values.element_size() < 2:
            dtype = str(values.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{folder} holds {matrix.found} in few bits ({dtype}); name the unquantized model"
            )


# Adapters


def _with_adapter(model: Any, layers: Layers, matrices: list[TokenMatrix], folder: Path) -> list[TokenMatrix]:
    """The matrices as the adapter changes them; a tied head that it changes otherwise has one of its own."""
    is_tied = layers.is_tied
    adapter = load_adapter(model, folder)
    changed = [name for name in layers.names if name in adapter.changes]
    by_name = dict(zip(layers.names, matrices[:1] * 2 if is_tied else matrices, strict=False))
    result = [
        _change(model, adapter, name, matrix, "embedding" if number == 0 else "head")
        for number, (name, matrix) in enumerate(by_name.items())
    ]
    only_rows = all(change.kind == "tokens" for name in changed for change in adapter.changes[name])
    if is_tied and (not changed or (len(changed) == len(layers.names) and only_rows)):
        return result[:1]
    return result


def _change(model: Any, adapter: Adapter, weight: str, matrix: TokenMatrix, name: str) -> TokenMatrix:
    place = (name, matrix.source, matrix.found, matrix.like)
    changes = adapter.changes.get(weight, [])
    if not changes:
        return TokenMatrix(*place)
    if all(change.kind == "tokens" for change in changes):
        return ChangedMatrix(*place, rows=_trained_rows(model, weight), whole=None)
    values = matrix.read_stored(0, matrix.num_rows)
    return ChangedMatrix(*place, rows={}, whole=adapter.merge(weight, values).to(values.dtype))


def _trained_rows(model: Any, weight: str) -> dict[int, Tensor]:
    rows: dict[int, Tensor] = {}
    for path, module in model.named_modules():
        if hasattr(module, "token_indices") and f"{checkpoint_key(path)}.weight" == weight:
            for key, tokens in module.token_indices.items():
                values = module.trainable_tokens_delta[key].detach().to(torch.float32)
                rows |= dict(zip(tokens, values, strict=True))
    return rows
