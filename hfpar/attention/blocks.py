"""Attention of pieces of documents, in log-sum-exp form: what a ring step computes.

A kernel merges the attention of some queries to some keys into a running result, and can do so for one set of
keys after another:

    new = logaddexp(lse, l);  out = out * exp(lse - new) + o * exp(l - new)

Given the merged out and lse, backward yields each set's share of the gradients: the weights are exp(score - lse),
whatever else took part in the softmax. So a sink that the caller merges needs nothing here, and `Scores.sinks` is
not read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from hfpar.attention import segments, tiles, varlen
from hfpar.attention.placement import Pair
from hfpar.attention.segments import VarlenBackward, VarlenForward, plan_segments
from hfpar.attention.tiles import is_causal_square, sees_everything
from hfpar.attention.varlen import Scores
from hfpar.errors import ConfigError

Refusal = Callable[[Tensor, Tensor, Scores], str | None]
Forward = Callable[[Tensor, Tensor, Tensor, Sequence[Pair], Scores, Tensor, Tensor], None]
Backward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Sequence[Pair], Scores, Tensor], tuple[Tensor, Tensor]
]


@dataclass(frozen=True)
class BlockKernel:
    """A way to compute the attention of pairs.

    Shapes: query [1, H, C, D]; key [1, Hkv, M, D]; value [1, Hkv, M, Dv]; out and its gradient [1, H, C, Dv];
    lse [1, H, C]. Query head h uses key-value head h // (H // Hkv).
    """

    name: str
    refusal: Refusal
    """(query, value, scores) -> why this kernel can't compute that, or None."""
    forward: Forward
    """(query, key, value, pairs, scores, out, lse): merges into out (at first 0) and lse (at first -inf) in place,
    both fp32."""
    backward: Backward
    """(grad_out, query, key, value, out, lse, pairs, scores, grad_query) -> (grad_key, grad_value), with the
    merged out and lse. Adds to grad_query in place; all three gradients are fp32."""


def choose_block_kernel(
    attn_implementation: str, query: Tensor, value: Tensor, scores: Scores
) -> BlockKernel:
    """The kernel of that name; `auto`: the fastest that is installed and can compute this.

    Raises:
        ConfigError: it can't.
    """
    scores = replace(scores, sinks=None)
    for kernel in KERNELS:
        if attn_implementation in ("auto", kernel.name):
            reason = kernel.refusal(query, value, scores)
            if reason is None:
                return kernel
            if attn_implementation != "auto":
                raise ConfigError(
                    f"attn_implementation: {attn_implementation} can't compute {reason} under cp_size > 1; use auto"
                )
    names = ", ".join(["auto", *(kernel.name for kernel in KERNELS)])
    raise ConfigError(f"attn_implementation: {attn_implementation} isn't one of {names}")


def hidden(tile: Pair, window: int | None, device: torch.device) -> Tensor | None:
    """True where a query doesn't see a key, [n, m]; None if all see all."""
    if sees_everything(tile, window):
        return None
    query = torch.arange(tile.query_stop - tile.query_start, device=device)[:, None] + tile.offset
    key = torch.arange(tile.key_stop - tile.key_start, device=device)[None, :]
    mask = key > query
    if window is not None:
        mask |= key <= query - window
    return mask


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention to further keys into out [..., Dv] and lse [...], in place."""
    merged = torch.logaddexp(lse, part_lse)
    out.mul_((lse - merged).exp_().unsqueeze(-1))
    out.addcmul_(part_out.to(out.dtype), (part_lse - merged).exp_().unsqueeze(-1))
    lse.copy_(merged)


# Torch's fused CPU kernel


def _sdpa_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    if query.device.type != "cpu":
        return f"a {query.device.type} tensor"
    if query.shape[-1] != value.shape[-1]:
        return f"head sizes {query.shape[-1]} and {value.shape[-1]}"
    return varlen.sdpa_refusal(query, value, scores)


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    out: Tensor,
    lse: Tensor,
) -> None:
    for tile in _all_sdpa_tiles(pairs, scores):
        rows, keys = slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop)
        causal = is_causal_square(tile, scores.sliding_window)
        part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            0.0,
            causal,
            attn_mask=None if causal else _float_mask(tile, scores, query),
            scale=scores.scaling,
        )
        merge(out[:, :, rows], lse[:, :, rows], part_out, part_lse)


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    grad_query: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_key = torch.zeros_like(key, dtype=grad_query.dtype)
    grad_value = torch.zeros_like(value, dtype=grad_query.dtype)
    grad_out, out = grad_out.to(query.dtype), out.to(query.dtype)
    for tile in _all_sdpa_tiles(pairs, scores):
        rows, keys = slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop)
        causal = is_causal_square(tile, scores.sliding_window)
        shares = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out[:, :, rows],
            query[:, :, rows],
            key[:, :, keys],
            value[:, :, keys],
            out[:, :, rows],
            lse[:, :, rows],
            0.0,
            causal,
            attn_mask=None if causal else _float_mask(tile, scores, query),
            scale=scores.scaling,
        )
        grad_query[:, :, rows] += shares[0]
        grad_key[:, :, keys] += shares[1]
        grad_value[:, :, keys] += shares[2]
    return grad_key, grad_value


def _all_sdpa_tiles(pairs: Sequence[Pair], scores: Scores) -> list[Pair]:
    return [tile for pair in pairs for tile in tiles.sdpa_tiles(pair, scores.sliding_window)]


def _float_mask(tile: Pair, scores: Scores, query: Tensor) -> Tensor | None:
    mask = hidden(tile, scores.sliding_window, query.device)
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=query.dtype, device=query.device).masked_fill_(mask, float("-inf"))


# Written out


def _eager_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    out: Tensor,
    lse: Tensor,
) -> None:
    for tile in _all_eager_tiles(pairs, scores, query.shape[1]):
        rows, keys = slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop)
        q = _by_kv_head(query[:, :, rows], key.shape[1]).to(out.dtype)
        logits = _logits(q, key[0, :, keys].to(out.dtype), tile, scores)
        part_lse = logits.logsumexp(-1)  # [Hkv, group * n]
        part_out = logits.sub_(part_lse.unsqueeze(-1)).exp_() @ value[0, :, keys].to(out.dtype)
        part_shape = out[:, :, rows].shape
        merge(out[:, :, rows], lse[:, :, rows], part_out.view(part_shape), part_lse.view(part_shape[:-1]))


def _eager_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    grad_query: Tensor,
) -> tuple[Tensor, Tensor]:
    dtype, num_kv_heads = grad_query.dtype, key.shape[1]
    grad_key = torch.zeros_like(key, dtype=dtype)
    grad_value = torch.zeros_like(value, dtype=dtype)
    delta = (grad_out.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)  # [1, H, C, 1]
    for tile in _all_eager_tiles(pairs, scores, query.shape[1]):
        rows, keys = slice(tile.query_start, tile.query_stop), slice(tile.key_start, tile.key_stop)
        q = _by_kv_head(query[:, :, rows], num_kv_heads).to(dtype)
        k, v = key[0, :, keys].to(dtype), value[0, :, keys].to(dtype)
        grad_o = _by_kv_head(grad_out[:, :, rows], num_kv_heads).to(dtype)
        logits = _logits(q, k, tile, scores)
        weights = (logits - _by_kv_head(lse[:, :, rows, None], num_kv_heads)).exp_()
        grad_value[0, :, keys] += weights.transpose(1, 2) @ grad_o
        grad_logits = grad_o @ v.transpose(1, 2)
        grad_logits.sub_(_by_kv_head(delta[:, :, rows], num_kv_heads)).mul_(weights)
        if scores.softcap is not None:
            # d(cap * tanh(x / cap)) / dx; where nothing is seen, the gradient is 0 already and stays so.
            slope = 1 - (logits.clamp_(min=-scores.softcap) / scores.softcap).square_()
            grad_logits.mul_(slope)
        grad_q = (grad_logits @ k).mul_(scores.scaling)
        grad_query[:, :, rows] += grad_q.view(query[:, :, rows].shape)
        grad_key[0, :, keys] += (grad_logits.transpose(1, 2) @ q).mul_(scores.scaling)
    return grad_key, grad_value


def _by_kv_head(states: Tensor, num_kv_heads: int) -> Tensor:
    """[1, H, n, D] -> [Hkv, H / Hkv * n, D]: the query heads of one key-value head are just more rows."""
    return states.reshape(num_kv_heads, -1, states.shape[-1])


def _logits(query: Tensor, key: Tensor, tile: Pair, scores: Scores) -> Tensor:
    """Capped and masked scores of a tile: [Hkv, group * n, D], [Hkv, m, D] -> [Hkv, group * n, m]."""
    logits = (query @ key.transpose(1, 2)).mul_(scores.scaling)
    if scores.softcap is not None:
        logits.div_(scores.softcap).tanh_().mul_(scores.softcap)
    mask = hidden(tile, scores.sliding_window, query.device)
    if mask is not None:
        logits.view(key.shape[0], -1, *mask.shape).masked_fill_(mask, float("-inf"))
    return logits


def _all_eager_tiles(pairs: Sequence[Pair], scores: Scores, num_heads: int) -> list[Pair]:
    return [tile for pair in pairs for tile in tiles.eager_tiles(pair, scores.sliding_window, num_heads)]


# Variable-length kernels


def varlen_kernel(
    name: str, refusal: Refusal, forward: VarlenForward, backward: VarlenBackward
) -> BlockKernel:
    """A kernel that computes all pairs in a few calls of a varlen function."""
    return BlockKernel(name, refusal, partial(_varlen_forward, forward), partial(_varlen_backward, backward))


def _varlen_forward(
    call: VarlenForward,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    out: Tensor,
    lse: Tensor,
) -> None:
    for plan in plan_segments(tuple(pairs), scores.sliding_window, query.device):
        q = _gather(query, plan.query_index)
        k, v = _gather(key, plan.key_index), _gather(value, plan.key_index)
        call_out, call_lse = call(q, k, v, plan, scores)
        call_out = call_out.transpose(0, 1)[None]  # [T, H, Dv] -> [1, H, T, Dv]
        for rows, index in plan.rounds:
            part_out, part_lse = out[:, :, index], lse[:, :, index]  # views for a slice, else copies
            merge(part_out, part_lse, call_out[:, :, rows], call_lse[None, :, rows])
            if isinstance(index, Tensor):
                out[:, :, index], lse[:, :, index] = part_out, part_lse


def _varlen_backward(
    call: VarlenBackward,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Sequence[Pair],
    scores: Scores,
    grad_query: Tensor,
) -> tuple[Tensor, Tensor]:
    grad_key = torch.zeros_like(key, dtype=grad_query.dtype)
    grad_value = torch.zeros_like(value, dtype=grad_query.dtype)
    grad_out, out = grad_out.to(query.dtype), out.to(query.dtype)
    for plan in plan_segments(tuple(pairs), scores.sliding_window, query.device):
        queries, keys = plan.query_index, plan.key_index
        shares = call(
            _gather(grad_out, queries),
            _gather(query, queries),
            _gather(key, keys),
            _gather(value, keys),
            _gather(out, queries),
            lse[0, :, queries].contiguous(),
            plan,
            scores,
        )
        _add(grad_query, queries, shares[0])
        _add(grad_key, keys, shares[1])
        _add(grad_value, keys, shares[2])
    return grad_key, grad_value


def _gather(states: Tensor, index: Tensor | slice) -> Tensor:
    """The rows at `index`: [1, H, C, D] -> [T, H, D]."""
    rows = states[0].transpose(0, 1)
    return (rows[index] if isinstance(index, slice) else rows.index_select(0, index)).contiguous()


def _add(states: Tensor, index: Tensor | slice, share: Tensor) -> None:
    """Add [T, H, D] to the rows of [1, H, C, D] that it belongs to; a row may occur more than once."""
    rows = states[0].transpose(0, 1)
    if isinstance(index, slice):
        rows[index] += share
    else:
        rows.index_add_(0, index, share.to(states.dtype))


EAGER = BlockKernel("eager", lambda query, value, scores: None, _eager_forward, _eager_backward)
SDPA = BlockKernel("sdpa", _sdpa_refusal, _sdpa_forward, _sdpa_backward)
VARLEN = varlen_kernel("varlen", segments.torch_refusal, segments.torch_forward, segments.torch_backward)
FLASH_ATTENTION_2 = varlen_kernel(
    "flash_attention_2", segments.flash_refusal, segments.flash_forward, segments.flash_backward
)
KERNELS = (FLASH_ATTENTION_2, VARLEN, SDPA, EAGER)
"""Fastest first; the last does everything."""
