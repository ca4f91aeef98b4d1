"""Attention written out: slow, exact, and able to do everything the fast kernels can't."""

from __future__ import annotations

import torch
from torch import Tensor


def repeat_kv(states: Tensor, num_query_heads: int) -> Tensor:
    """Repeat key or value heads for grouped queries: [B, Hkv, S, D] -> [B, H, S, D]."""
    repeats = num_query_heads // states.shape[1]
    return states if repeats == 1 else states.repeat_interleave(repeats, dim=1)


def causal_mask(
    query_length: int, key_length: int, sliding_window: int | None, device: torch.device
) -> Tensor:
    """True where a query may look, [Sq, Sk]; the last query stands at the last key."""
    query = torch.arange(key_length - query_length, key_length, device=device)[:, None]
    key = torch.arange(key_length, device=device)[None, :]
    mask = key <= query
    if sliding_window is not None:
        mask &= key > query - sliding_window
    return mask


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float,
    mask: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Plain attention in fp32 softmax.

    Args:
        query: [B, H, Sq, D].
        key: [B, Hkv, Sk, D].
        value: [B, Hkv, Sk, Dv].
        scaling: factor on the scores.
        mask: boolean, broadcastable to [B, H, Sq, Sk], True = may look; or an additive float mask; or None.
        softcap: scores become `softcap * tanh(scores / softcap)`.
        sinks: [H], a logit per head that takes part in the softmax and carries no value.
        dropout: probability of dropping an attention weight.

    Returns:
        [B, H, Sq, Dv].
    """
    num_heads = query.shape[1]
    key, value = repeat_kv(key, num_heads), repeat_kv(value, num_heads)
    scores = (query @ key.transpose(-1, -2) * scaling).float()
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        sink_scores = sinks.float().view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sink_scores], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    weights = torch.nan_to_num(weights)  # a padding row that sees no key
    if dropout:
        weights = torch.nn.functional.dropout(weights, dropout)
    return weights.to(value.dtype) @ value
