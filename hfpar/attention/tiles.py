"""Cutting pairs of queries and keys into what a kernel can compute. A part of a pair is a pair."""

from __future__ import annotations

from dataclasses import replace
from math import isqrt

from hfpar.attention.placement import Pair

MAX_SCORES = 2**22
"""Scores, over all heads, that `eager` holds at once."""
WINDOW_ROWS = (64, 256)
"""Fewest and most queries of a tile where `sdpa` needs a mask; in between, the window's size."""

Window = tuple[int, int]
"""How many keys a query sees before and after its place; -1: all."""


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


def eager_tiles(pair: Pair, window: int | None, num_heads: int) -> list[Pair]:
    """Tiles of at most `MAX_SCORES` scores over all heads, but of one query at least."""
    area = MAX_SCORES // num_heads
    rows = area // (pair.key_stop - pair.key_start)
    if window is not None:  # n queries see at most n + window - 1 keys: n * (n + window - 1) <= area
        rows = max(rows, (isqrt((window - 1) ** 2 + 4 * area) - (window - 1)) // 2)
    return row_tiles(pair, window, max(1, rows))


def varlen_tiles(pair: Pair, window: int | None) -> list[tuple[Window, Pair]]:
    """A pair as tiles that a varlen call can compute, of at most three sorts."""
    everything = (-1, -1)
    if sees_everything(pair, window):
        return [(everything, pair)]
    num_queries, num_keys = pair.query_stop - pair.query_start, pair.key_stop - pair.key_start
    tiles = []
    inside = min(num_queries, max(0, num_keys - pair.offset))  # queries that stand at one of the keys
    if inside:
        # The last of them stands at the last key it sees, as flash-attn has it.
        tiles.append(((-1 if window is None else window - 1, 0), part(pair, 0, inside, window)))
    if inside == num_queries:
        return tiles
    after = part(pair, inside, num_queries, window)  # queries that stand behind the last key
    if sees_everything(after, window):
        return [*tiles, (everything, after)]
    assert window is not None
    num_queries, num_keys = after.query_stop - after.query_start, after.key_stop - after.key_start
    early = window - 1 - after.offset
    if early:
        tiles.append((everything, part(after, 0, early, window)))
    # From here on, each query sees one key less than the one before: a triangle, and the keys that all see.
    late = part(after, early, num_queries, window)
    edge = late.key_start + late.query_stop - late.query_start
    tiles.append(((0, -1), replace(late, key_stop=edge)))
    if edge < late.key_stop:
        rest = replace(late, key_start=edge, offset=late.offset - (edge - late.key_start))
        tiles.append((everything, rest))
    return tiles
