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
from math import isqrt

import torch
from torch import Tensor

from hfpar.attention import varlen
from hfpar.attention.placement import Pair
from hfpar.attention.varlen import Scores
from hfpar.errors import ConfigError

MAX_SCORES = 2**22
"""Scores, over all heads, that `eager` holds at once."""
WINDOW_ROWS = (64, 512)
"""Fewest and most queries of a tile where `sdpa` needs a mask; in between, the window's size."""

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
    if attn_implementation == "auto":
        return SDPA if sdpa_refusal(query, value, scores) is None else EAGER
    if attn_implementation == "eager":
        return EAGER
    kernel, refusal = SDPA, sdpa_refusal
    reason = refusal(query, value, scores)
    if reason:
        raise ConfigError(f"attn_implementation: {attn_implementation} can't compute {reason}; use auto")
    return kernel


def sdpa_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why `SDPA` can't compute this, or None."""
    if query.device.type != "cpu":
        return f"a ring's steps on {query.device.type}"
    if query.shape[-1] != value.shape[-1]:
        return f"head sizes {query.shape[-1]} and {value.shape[-1]} in a ring"
    return varlen.sdpa_refusal(query, value, scores)


# Cutting pairs. A part of a pair is a pair.


def sees_everything(pair: Pair, window: int | None) -> bool:
    """Whether every query of the pair sees every key."""
    num_keys = pair.key_stop - pair.key_start
    last = pair.query_stop - pair.query_start - 1
    return pair.offset >= num_keys - 1 and (window is None or last + pair.offset < window)


def is_causal_square(pair: Pair, window: int | None) -> bool:
    """Whether the pair is a piece against itself, without a window that binds."""
    num_queries = pair.query_stop - pair.query_start
    return (
        pair.offset == 0
        and pair.key_stop - pair.key_start == num_queries
        and (window is None or num_queries <= window)
    )


def part(pair: Pair, first: int, last: int, window: int | None) -> Pair:
    """Queries [first, last) of the pair and those of its keys that they see."""
    num_keys = pair.key_stop - pair.key_start
    begin = 0 if window is None else max(0, first + pair.offset - window + 1)
    end = min(num_keys, last + pair.offset)
    return Pair(
        pair.query_start + first,
        pair.query_start + last,
        pair.key_start + begin,
        pair.key_start + end,
        pair.offset + first - begin,
    )


def row_tiles(pair: Pair, window: int | None, num_rows: int) -> list[Pair]:
    """Tiles of that many queries, each with the keys that it sees."""
    num_queries = pair.query_stop - pair.query_start
    return [
        part(pair, first, min(first + num_rows, num_queries), window)
        for first in range(0, num_queries, num_rows)
    ]


def without_mask(pair: Pair) -> list[Pair]:
    """A pair without a window as at most one causal square and two rectangles where all see all."""
    if sees_everything(pair, None) or is_causal_square(pair, None):
        return [pair]
    num_queries, num_keys = pair.query_stop - pair.query_start, pair.key_stop - pair.key_start
    square = min(num_queries, num_keys - pair.offset)
    edge = pair.key_start + pair.offset
    tiles = [Pair(pair.query_start, pair.query_start + square, edge, edge + square, 0)]
    if pair.offset:  # keys before the first query's own place
        tiles.append(replace(pair, key_stop=edge))
    if square < num_queries:  # queries after the last key's
        tiles.append(Pair(pair.query_start + square, pair.query_stop, edge, pair.key_stop, square))
    return tiles


def sdpa_tiles(pair: Pair, window: int | None) -> list[Pair]:
    """A pair as what the fused kernel does without a mask, and small tiles where a window begins inside."""
    num_queries = pair.query_stop - pair.query_start
    free = num_queries if window is None else min(max(0, window - pair.offset), num_queries)
    if sees_everything(pair, window) or free == num_queries:
        return without_mask(pair)
    assert window is not None
    rows = min(max(window, WINDOW_ROWS[0]), WINDOW_ROWS[1])
    tiles = without_mask(part(pair, 0, free, None)) if free else []
    return tiles + row_tiles(part(pair, free, num_queries, window), window, rows)


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
    return [tile for pair in pairs for tile in sdpa_tiles(pair, scores.sliding_window)]


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
    tiles = []
    window = scores.sliding_window
    for pair in pairs:
        num_rows = eager_rows(pair.key_stop - pair.key_start, window, num_heads)
        tiles += row_tiles(pair, window, num_rows)
    return tiles


def eager_rows(num_keys: int, window: int | None, num_heads: int) -> int:
    """As many queries as keep a tile within `MAX_SCORES`; at least one."""
    area = MAX_SCORES // num_heads
    rows = area // num_keys
    if window is not None:  # n queries see at most n + window - 1 keys: n * (n + window - 1) <= area
        rows = max(rows, (isqrt((window - 1) ** 2 + 4 * area) - (window - 1)) // 2)
    return max(1, rows)


EAGER = BlockKernel("eager", _eager_forward, _eager_backward)
SDPA = BlockKernel("sdpa", _sdpa_forward, _sdpa_backward)
