"""Pairs of queries and keys as calls of a variable-length kernel: few calls for all pairs.

Which rows a call reads and where its results belong is worked out on the host, once for all layers; the calls
themselves are thin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from hfpar.attention import varlen
from hfpar.attention.placement import Pair
from hfpar.attention.tiles import Window, varlen_tiles
from hfpar.attention.varlen import Scores


@dataclass(frozen=True)
class Segments:
    """Pairs that one varlen call computes."""

    window: Window
    query_index: Tensor | slice
    """Which queries, one segment after another. A query may be in several segments."""
    key_index: Tensor | slice
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_q: int
    max_k: int
    rounds: tuple[tuple[slice, Tensor | slice], ...]
    """Rows of the call's result and the queries that they belong to, each query at most once in a round."""


# Flash-attn counts a segment's queries from the end of its keys: query i of n stands at key i + m - n of m. There
# it sees as many keys before and after as `window` says.
VarlenForward = Callable[[Tensor, Tensor, Tensor, Segments, Scores], tuple[Tensor, Tensor]]
"""(query [T, H, D], key [S, Hkv, D], value, segments, scores) -> (out [T, H, D], lse [H, T])"""
VarlenBackward = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Segments, Scores], tuple[Tensor, Tensor, Tensor]
]
"""(grad_out, query, key, value, out, lse, segments, scores) -> gradients of query, key, value"""


@lru_cache(maxsize=64)  # every layer asks for the same
def plan_segments(pairs: tuple[Pair, ...], window: int | None, device: torch.device) -> tuple[Segments, ...]:
    """What the varlen calls of these pairs, at most three, read and where their results belong."""
    groups: dict[Window, list[Pair]] = {}
    for pair in pairs:
        for tile_window, tile in varlen_tiles(pair, window):
            groups.setdefault(tile_window, []).append(tile)
    return tuple(_segments(tile_window, tiles, device) for tile_window, tiles in groups.items())


def _segments(window: Window, tiles: Sequence[Pair], device: torch.device) -> Segments:
    ordered: list[list[Pair]] = []  # a round's tiles have no query in common
    for tile in sorted(tiles, key=lambda tile: (tile.query_start, tile.key_start)):
        free = (tiles for tiles in ordered if tiles[-1].query_stop <= tile.query_start)
        tiles_of_round = next(free, None)
        if tiles_of_round is None:
            ordered.append([tile])
        else:
            tiles_of_round.append(tile)
    queries = [[(tile.query_start, tile.query_stop) for tile in tiles] for tiles in ordered]
    keys = [(tile.key_start, tile.key_stop) for tiles in ordered for tile in tiles]
    query_lengths = [stop - start for ranges in queries for start, stop in ranges]
    key_lengths = [stop - start for start, stop in keys]
    round_ends = list(accumulate(sum(stop - start for start, stop in ranges) for ranges in queries))
    rounds = [
        (slice(begin, end), _index(ranges, device))
        for begin, end, ranges in zip([0, *round_ends], round_ends, queries, strict=False)
    ]
    return Segments(
        window,
        _index([limits for ranges in queries for limits in ranges], device),
        _index(keys, device),
        torch.tensor([0, *accumulate(query_lengths)], dtype=torch.int32, device=device),
        torch.tensor([0, *accumulate(key_lengths)], dtype=torch.int32, device=device),
        # Not 1: flash-attn then puts heads in the place of queries, a path for generation.
        max(2, *query_lengths),
        max(key_lengths),
        tuple(rounds),
    )


def _index(ranges: Sequence[tuple[int, int]], device: torch.device) -> Tensor | slice:
    """The tokens of these ranges: a slice if they follow one another, so that nothing is gathered."""
    if all(stop == start for (_, stop), (start, _) in zip(ranges, ranges[1:], strict=False)):
        return slice(ranges[0][0], ranges[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in ranges]).to(device)


def torch_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why torch's own varlen kernel can't compute this, or None."""
    reason = varlen.varlen_refusal(query, value, scores)
    if reason is None and not varlen.torch_varlen_installed():
        return f"attention with torch {torch.__version__}"
    return reason


def flash_refusal(query: Tensor, value: Tensor, scores: Scores) -> str | None:
    """Why flash-attn can't compute this, or None."""
    reason = varlen.flash_refusal(query, value, scores)
    return "attention without flash-attn" if reason is None and not varlen.flash_attn_installed() else reason


def torch_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Torch's own, as a `VarlenForward`."""
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_q,
        segments.max_k,
        0.0,
        segments.window == (-1, 0),
        False,
        scale=scores.scaling,
        window_size_left=segments.window[0],
        window_size_right=segments.window[1],
    )
    return out, lse


def torch_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own, as a `VarlenBackward`."""
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_q,
        segments.max_k,
        0.0,
        segments.window == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=query.device),  # read by dropout alone
        torch.empty(0, device=query.device),
        scale=scores.scaling,
        window_size_left=segments.window[0],
        window_size_right=segments.window[1],
    )
    return gradients


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, scores: Scores
) -> tuple[Tensor, Tensor]:
    """Flash-attn's, as a `VarlenForward`."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out, lse, *_ = _flash_attn_varlen_forward(
        query,
        key,
        value,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_q,
        segments.max_k,
        dropout_p=0.0,
        softmax_scale=scores.scaling,
        causal=segments.window == (-1, 0),
        window_size_left=segments.window[0],
        window_size_right=segments.window[1],
        softcap=scores.softcap or 0.0,
    )
    return out, lse


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Segments,
    scores: Scores,
) -> tuple[Tensor, Tensor, Tensor]:
    """Flash-attn's, as a `VarlenBackward`."""
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    _flash_attn_varlen_backward(
        grad_out,
        query,
        key,
        value,
        out,
        lse,
        *gradients,
        segments.cu_seqlens_q,
        segments.cu_seqlens_k,
        segments.max_q,
        segments.max_k,
        dropout_p=0.0,
        softmax_scale=scores.scaling,
        causal=segments.window == (-1, 0),
        window_size_left=segments.window[0],
        window_size_right=segments.window[1],
        softcap=scores.softcap or 0.0,
        alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return gradients
