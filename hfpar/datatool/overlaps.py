"""What is found of benchmarks in the rows of one chunk, small enough to come back from another process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hfpar.data.build import Recipe
from hfpar.data.overlap.index import BenchmarkIndex, Hit, RowText
from hfpar.data.overlap.rows import text_of_row
from hfpar.data.overlap.words import display_form, word_spans
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.rows import Place, Problem

CONTEXT = 2000
"""Characters of a row that are listed on each side of a match."""


@dataclass
class ChunkOverlaps:
    """What a chunk holds."""

    num_rows: int = 0
    problems: list[Problem] = field(default_factory=list)
    """Rows that can't be read, in which nothing can be found."""
    dropped: set[int] = field(default_factory=set)
    """Numbers of the rows that hold an item, or can't be read."""
    num_found: int = 0
    """Rows that hold an item."""
    found: list[dict[str, Any]] = field(default_factory=list)
    """Each item in each row; see docs/data.md for the keys."""
    kept: bytes | None = None
    """The rows without one as JSON lines, where the chunk doesn't hold them as such."""


def inspect_overlaps(chunk: Chunk, index: BenchmarkIndex, recipe: Recipe) -> ChunkOverlaps:
    """Look for benchmark items in the rows of a chunk.

    Args:
        chunk: rows.
        index: of the benchmarks.
        recipe: what the rows' columns mean.
    """
    result = ChunkOverlaps()
    places: list[Place] = []
    rows: list[dict[str, Any]] = []
    for place, value in chunk.rows():
        result.num_rows += 1
        if isinstance(value, Problem):
            result.problems.append(value)
            result.dropped.add(place.number)
        else:
            places.append(place)
            rows.append(value)
    texts = [text_of_row(row, recipe.format, recipe.columns) for row in rows]
    for place, text, hits in zip(places, texts, index.find(texts), strict=True):
        if hits:
            result.num_found += 1
            result.dropped.add(place.number)
            result.found += [record(place, text, hit) for hit in hits]
    if chunk.form != "lines":
        kept = [row for place, row in zip(places, rows, strict=True) if place.number not in result.dropped]
        result.kept = b"".join(_json_line(row) for row in kept)
    return result


def record(place: Place, row: RowText, hit: Hit) -> dict[str, Any]:
    """A hit with both texts, as `--list` has it."""
    text, row_span = _located(row.texts, hit.row_span)
    item_text = hit.item.question if hit.field == "question" else hit.item.solution or ""
    item_shown, item_span = _located((item_text,), hit.item_span)
    begin = max(0, row_span[0] - CONTEXT)
    return {
        "file": place.path,
        place.unit: place.number,
        "benchmark": hit.benchmark,
        "item_id": hit.item.item_id,
        "item_place": hit.item.place,
        "field": hit.field,
        "kind": hit.kind,
        "score": hit.score,
        "num_words": hit.num_words,
        "row_text": text[begin : row_span[1] + CONTEXT],
        "row_span": [row_span[0] - begin, row_span[1] - begin],
        "item_text": item_shown,
        "item_span": list(item_span),
    }


def _located(texts: Sequence[str], words: tuple[int, int]) -> tuple[str, tuple[int, int]]:
    """The text in which a span of words begins, and the span in its characters; one more word ends each text."""
    start, end = words
    for text in texts:
        _, spans = word_spans(text)
        if start < len(spans):
            last = min(end, len(spans)) - 1
            return display_form(text), (spans[start][0], spans[last][1])
        start, end = start - len(spans) - 1, end - len(spans) - 1
    return "", (0, 0)


def _json_line(row: dict[str, Any]) -> bytes:
    text = json.dumps(row, ensure_ascii=False, default=str) + "\n"
    return text.encode("utf-8", "surrogatepass")
