"""Local kernels: causal attention within the documents of one packed stream.

Each takes query [1, H, T, D], key [1, Hkv, T, D], value [1, Hkv, T, Dv] and the document bounds, and returns
[1, T, H, Dv]. They differ in speed and in what they can do (`refusal`), never in the numbers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hfpar.attention.reference import causal_mask, reference_attention


@dataclass(frozen=True)
class Documents:
    """Where the documents of a stream begin and end."""

    cu_seqlens: Tensor
    """(n+1,) int32, on the stream's device."""
    lengths: tuple[int, ...]
    """The same bounds as plain lengths, for kernels that loop on the host."""

    @property
    def max_seqlen(self) -> int:
        """Length of the longest document."""
        return max(self.lengths)


@dataclass(frozen=True)
class Scores:
    """What happens between query x key and the softmax."""

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    """[H]"""
    dropout: float = 0.0


Kernel = Callable[[Tensor, Tensor, Tensor, Documents, Scores], Tensor]

_FIRST_CAPABILITY = (8, 0)
"""Of the oldest GPUs that flash-attn's kernels, which torch's varlen function calls as well, are made for (Ampere)."""


def eager(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Written-out attention, document by document. Does everything."""
    outputs = []
    lengths = list(documents.lengths)
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        mask = causal_mask(q.shape[2], k.shape[2], scores.sliding_window, q.device)
        output = reference_attention(
            q,
            k,
            v,
            scaling=scores.scaling,
            mask=mask,
            softcap=scores.softcap,
            sinks=scores.sinks,
            dropout=scores.dropout,
        )
        outputs.append(output.transpose(1, 2))  # [1, H, t, D] -> [1, t, H, D]
    return torch.cat(outputs, dim=1)


def sdpa(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Torch's fused attention, document by document: no score crosses a boundary, no T x T mask exists."""
    outputs = []
    lengths = list(documents.lengths)
    # One split each, not a slice a document: its backward is one concatenation.
    for q, k, v in zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True):
        window = scores.sliding_window
        banded = window is not None and q.shape[2] > window
        output = scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=causal_mask(q.shape[2], k.shape[2], window, q.device) if banded else None,
            dropout_p=scores.dropout,
            is_causal=not banded,
            scale=scores.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(output.transpose(1, 2))  # [1, H, t, D] -> [1, t, H, D]
    return torch.cat(outputs, dim=1)


def flash_attention_2(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores
) -> Tensor:
    """flash-attn's varlen function: all documents in one call."""
    from flash_attn import flash_attn_varlen_func

    window = (-1, -1) if scores.sliding_window is None else (scores.sliding_window - 1, 0)
    output = flash_attn_varlen_func(
        query[0].transpose(0, 1),  # [1, H, T, D] -> [T, H, D]
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        cu_seqlens_q=documents.cu_seqlens,
        cu_seqlens_k=documents.cu_seqlens,
        max_seqlen_q=documents.max_seqlen,
        max_seqlen_k=documents.max_seqlen,
        dropout_p=scores.dropout,
        softmax_scale=scores.scaling,
        causal=True,
        window_size=window,
        softcap=scores.softcap or 0.0,
    )
    return output[None]


def torch_varlen(query: Tensor, key: Tensor, value: Tensor, documents: Documents, scores: Scores) -> Tensor:
    """Torch's own varlen function: all documents in one call, nothing to install."""
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if scores.sliding_window is None else (scores.sliding_window - 1, 0)
    output: Any = varlen_attn(
        query[0].transpose(0, 1).contiguous(),  # [1, H, T, D] -> [T, H, D]
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        documents.cu_seqlens,
        documents.cu_seqlens,
        documents.max_seqlen,
        documents.max_seqlen,
        scale=scores.scaling,
        window_size=window,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[None]


def sdpa_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why `sdpa` can't compute this, or None."""
    if scores.softcap is not None:
        return "logit soft-capping"
    return "attention sinks" if scores.sinks is not None else None


def flash_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why `flash_attention_2` can't compute this, or None."""
    if not query.is_cuda:
        return "a CPU tensor"
    major, minor = torch.cuda.get_device_capability(query.device)
    if (major, minor) < _FIRST_CAPABILITY:
        return f"on a GPU of compute capability {major}.{minor} (8.0 or newer only)"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"{query.dtype} (fp16 or bf16 only)"
    if query.shape[-1] > 256 or query.shape[-1] != value.shape[-1]:
        return f"head sizes {query.shape[-1]} and {value.shape[-1]}"
    if query.shape[-1] % 8:
        return f"head size {query.shape[-1]}, not a multiple of 8"
    return "attention sinks" if scores.sinks is not None else None


def varlen_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why `torch_varlen` can't compute this, or None."""
    if scores.softcap is not None:
        return "logit soft-capping"
    if scores.dropout:
        return "attention dropout"
    return flash_refusal(query, value, scores)


@lru_cache(maxsize=1)
def flash_attn_installed() -> bool:
    """Whether flash-attn can really be imported: a wheel built for another torch raises at import."""
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:
        from flash_attn import flash_attn_varlen_func  # noqa: F401
    except (ImportError, OSError):
        return False
    return True


@lru_cache(maxsize=1)
def torch_varlen_installed() -> bool:
    """Whether this torch has `torch.nn.attention.varlen` with windows and grouped queries."""
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return False
    import inspect

    from torch.nn.attention.varlen import varlen_attn

    return {"window_size", "enable_gqa", "scale"} <= set(inspect.signature(varlen_attn).parameters)


def best_kernel(query: Tensor, value: Tensor, scores: Scores) -> Kernel:
    """The fastest kernel that is installed and can compute this."""
    if flash_refusal(query, value, scores) is None and flash_attn_installed():
        return flash_attention_2
    if varlen_refusal(query, value, scores) is None and torch_varlen_installed():
        return torch_varlen
    return sdpa if sdpa_refusal(query, value, scores) is None else eager
