"""Take padding out of a batch and put it back.

flash-attn's own functions do it on CUDA where that package is installed; otherwise the plain torch
ones below, with equal results. The attention mask alone decides what padding is.
"""

from __future__ import annotations

import functools
from types import ModuleType

import torch
from torch import Tensor


def unpad_input(hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """Drop the positions that the mask leaves out.

    Args:
        hidden: `(B, S, ...)`, any dtype.
        attention_mask: `(B, S)`, nonzero at tokens and zero at padding. A row may have no token at all.

    Returns:
        hidden: `(T, ...)`, the T tokens in row order; differentiable.
        indices: `(T,)` int64, where each token stood in the flattened `(B * S)` batch.
        cu_seqlens: `(B + 1,)` int32, where each row's tokens begin; a row without tokens has length 0.
        max_seqlen: tokens in the longest row.

    Raises:
        ValueError: The mask's shape is not the first two sizes of `hidden`.
    """
    if hidden.shape[:2] != attention_mask.shape:
        raise ValueError(f"attention_mask {tuple(attention_mask.shape)} does not fit {tuple(hidden.shape)}")
    flash = _flash_attn_padding() if hidden.is_cuda else None
    if flash is None:
        return _unpad_input(hidden, attention_mask)
    # flash-attn wants at least one dimension after (B, S), and newer versions return a fifth value.
    rows = hidden.unsqueeze(-1) if hidden.dim() == 2 else hidden
    tokens, indices, cu_seqlens, max_seqlen = flash.unpad_input(rows, (attention_mask != 0).int())[:4]
    return tokens.reshape(-1, *hidden.shape[2:]), indices, cu_seqlens, int(max_seqlen)


def pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """Put tokens back where `unpad_input` found them, with zeros at the padding.

    Args:
        hidden: `(T, ...)`.
        indices: `(T,)`, as `unpad_input` returned them.
        batch: Rows B of the padded batch.
        seqlen: Positions S of a row.

    Returns:
        `(B, S, ...)`; differentiable.
    """
    flash = _flash_attn_padding() if hidden.is_cuda else None
    if flash is None:
        return _pad_input(hidden, indices, batch, seqlen)
    tokens = hidden.unsqueeze(-1) if hidden.dim() == 1 else hidden
    padded: Tensor = flash.pad_input(tokens, indices, batch, seqlen)
    return padded.reshape(batch, seqlen, *hidden.shape[1:])


def _unpad_input(hidden: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    present = attention_mask != 0
    indices = present.flatten().nonzero().flatten()
    lengths = present.sum(dim=1, dtype=torch.int32)
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    max_seqlen = int(lengths.max()) if len(lengths) else 0
    return hidden.flatten(0, 1).index_select(0, indices), indices, cu_seqlens, max_seqlen


def _pad_input(hidden: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    flat = hidden.new_zeros(batch * seqlen, *hidden.shape[1:])
    return flat.index_copy(0, indices, hidden).unflatten(0, (batch, seqlen))


@functools.cache
def _flash_attn_padding() -> ModuleType | None:
    try:
        from flash_attn import bert_padding
    except ImportError:  # not installed, or built for another torch (undefined symbol)
        return None
    module: ModuleType = bert_padding
    return module
