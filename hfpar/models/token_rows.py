"""Rows of the embedding and of the head that are trained alone, for some tokens.

The layers are PEFT's (`trainable_token_indices`), and so is what is saved. But PEFT copies the whole matrix for each
call and computes a gradient for all of it; here the frozen matrix is used as it is, and the trained rows take the
place of its results.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from hfpar.models.adapter_init import ADAPTER
from hfpar.models.stored import SafetensorsSource, WeightPart, WholeSource, checkpoint_key

_SLOTS = "hfpar_slots"


@dataclass(frozen=True, eq=False)
class Fresh:
    """Rows of one matrix that don't begin with what the checkpoint has there, which is next to nothing.

    A row of zeros stays zero through every layer that has no bias, and each norm on the way multiplies its gradient
    by a thousand (1 / sqrt(eps)): training would end at the first step.
    """

    tokens: tuple[int, ...]
    start: Tensor
    """[H], the mean of the vocabulary's rows."""


def indices(model: Any, embedding: tuple[int, ...], head: tuple[int, ...]) -> dict[str, list[int]] | None:
    """PEFT's `trainable_token_indices`: rows by the module's name in the model; None: no row is trained."""
    names = {id(module): name for name, module in model.named_modules()}
    chosen = {}
    if embedding:
        chosen[names[id(model.get_input_embeddings())]] = sorted(set(embedding))
    if head:
        chosen[names[id(model.get_output_embeddings())]] = sorted(set(head))
    return chosen or None


def initialize(
    model: Any,
    dtype: torch.dtype,
    folder: Path | None,
    fresh_embedding: Fresh | None = None,
    fresh_head: Fresh | None = None,
) -> None:
    """Give trained rows the values that the checkpoint has there, and let the layers use them.

    Args:
        model: a PEFT model; its base may be on the meta device.
        dtype: of the trained rows.
        folder: the base's checkpoint. None: its weights are there.
        fresh_embedding: rows of the embedding that begin otherwise.
        fresh_head: rows of a head with a matrix of its own that do.
    """
    for name, wrapper in _wrappers(model):
        adapter = wrapper.token_adapter
        if adapter.tied_adapter is None:
            rows = adapter.token_indices[ADAPTER]
            if folder is None:
                values = adapter.get_base_layer().weight.detach()[rows].clone()
            else:
                values = _stored_rows(model, name, wrapper, rows, folder)
            adapter.trainable_tokens_original[ADAPTER] = values
            is_embedding = isinstance(adapter.get_base_layer(), nn.Embedding)
            first = _begin(values.to(dtype), rows, fresh_embedding if is_embedding else fresh_head)
            adapter.trainable_tokens_delta[ADAPTER] = nn.Parameter(first)
    for _, wrapper in _wrappers(model):
        _use_rows(wrapper)


def _begin(values: Tensor, rows: list[int], fresh: Fresh | None) -> Tensor:
    values = values.clone()
    for place, row in enumerate(rows):
        if fresh is not None and row in fresh.tokens:
            values[place] = fresh.start
    return values


def _wrappers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.utils.other import TrainableTokensWrapper

    for name, module in model.named_modules():
        if isinstance(module, TrainableTokensWrapper):
            yield name, module


def _stored_rows(model: Any, name: str, wrapper: Any, rows: list[int], folder: Path) -> Tensor:
    """Rows of a checkpoint's matrix, in the dtype that it has in the model."""
    base = wrapper.token_adapter.get_base_layer()
    # A tied matrix is stored under one of its names.
    tied = [
        other
        for other, module in _wrappers(model)
        if module.token_adapter.tied_adapter is wrapper.token_adapter
    ]
    keys = [f"{checkpoint_key(place)}.weight" for place in (name, *tied)]
    source: SafetensorsSource | WholeSource = SafetensorsSource(folder, model, keys)
    if source.find(keys) is None:
        source = WholeSource(model, folder, base.weight.dtype)
    shape = getattr(base.weight, "ds_shape", base.weight.shape)
    like = torch.empty(shape, dtype=base.weight.dtype, device="meta")
    parts = [WeightPart(like, None, 0, slice(row, row + 1)) for row in rows]
    return torch.cat([source.read(source.find(keys), part) for part in parts]).to(base.weight.dtype)


# The layers


def _use_rows(wrapper: Any) -> None:
    """Replace the forward of PEFT's wrapper."""
    adapter = wrapper.token_adapter
    base, rows = adapter.get_base_layer(), torch.tensor(adapter.token_indices[ADAPTER])
    is_embedding = isinstance(base, nn.Embedding)
    if is_embedding:
        slots = torch.full((base.num_embeddings,), len(rows))
        slots[rows] = torch.arange(len(rows))
    wrapper.register_buffer(_SLOTS, slots if is_embedding else rows, persistent=False)
    wrapper.forward = MethodType(_embed if is_embedding else _project, wrapper)


def _embed(self: Any, input_ids: Tensor) -> Tensor:
    """Token ids of any shape -> [..., H]."""
    states: Tensor = self.token_adapter.base_layer(input_ids)
    if self.disable_adapters or not self.active_adapters:
        return states
    trained = self.token_adapter.trainable_tokens_delta[ADAPTER].to(states.dtype)
    scale = self.token_adapter._get_embed_scale()  # what some layers multiply their rows by
    if scale is not None:
        trained = trained * scale.to(trained)
    slots = getattr(self, _SLOTS)[input_ids]
    with_spare = torch.cat([trained, trained.new_zeros(1, trained.shape[1])])
    return torch.where(
        (slots < len(trained)).unsqueeze(-1), nn.functional.embedding(slots, with_spare), states
    )


def _project(self: Any, hidden: Tensor) -> Tensor:
    """Hidden states [..., H] -> logits [..., V]."""
    base = self.token_adapter.base_layer
    logits: Tensor = base(hidden)
    if self.disable_adapters or not self.active_adapters:
        return logits
    rows = getattr(self, _SLOTS)
    trained = self.token_adapter.trainable_tokens_delta[ADAPTER]
    bias = None if base.bias is None else base.bias[rows].to(hidden.dtype)
    own = nn.functional.linear(hidden, trained.to(hidden.dtype), bias)
    return logits.index_copy(-1, rows, own.to(logits.dtype))
