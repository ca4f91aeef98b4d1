"""The embedding and the head in a checkpoint, row by row, and which rows were never trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from hfpar.models.stored import SafetensorsSource, WeightPart

FAR_OFF = 5.0
"""Robust standard deviations of the logarithm of a row's norm. Those of a trained vocabulary lie within (SmolLM2's
49,152 between -3.2 and 4.9); a zero row is infinitely far."""

SMALLEST_DEVIATION = 0.1
"""Of that logarithm: where all rows have about the same norm, 5 of these are still a factor of 1.6."""

COPY = 0.01
"""Relative distance below which a row is another token's: rows made alike, and moved alike ever since."""

NEXT_TO_NOTHING = 1e-3
"""Of the vocabulary's usual norm: rows below don't begin as they are (see `Fresh`)."""

ZEROS = "rows of zeros"
COPIES = "copies of other tokens"

_SAMPLES = 1000
_BLOCKS, _BLOCK_ROWS = 64, 64
_AT_A_TIME = 256
_CHUNK_NUMBERS = 2**24
"""Numbers that are held at a time: 64 MiB in fp32."""


# Which tokens


class HasTokens(Protocol):
    """A sample."""

    @property
    def input_ids(self) -> list[int]:
        """Its tokens."""


def tokens_in_use(samples: Sequence[HasTokens], tokenizer: Any) -> list[int]:
    """The special and added tokens in a thousand samples, spread over all."""
    added = set(tokenizer.added_tokens_decoder)
    step = max(1, len(samples) // _SAMPLES)
    used: set[int] = set()
    for index in range(0, len(samples), step):
        used |= added.intersection(samples[index].input_ids)
    return sorted(used)


# Where their rows are


@dataclass(frozen=True, eq=False)
class TokenMatrix:
    """The embedding or the head, in a checkpoint."""

    name: str
    """embedding or head."""
    source: SafetensorsSource
    found: str
    like: Tensor
    """Of its shape, on the meta device."""

    @property
    def num_rows(self) -> int:
        """Tokens, padding of the vocabulary included."""
        return self.like.shape[0]

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.like.shape[1]

    def read(self, rows: Sequence[int]) -> Tensor:
        """Some rows in rising order, fp32."""
        parts = []
        for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
            numbers = [row for _, row in run]
            parts.append(self.read_stored(numbers[0], numbers[-1] + 1).float())
        if len(parts) == 1:
            return parts[0]
        return torch.cat(parts) if parts else torch.empty(0, self.width)

    def read_stored(self, start: int, stop: int) -> Tensor:
        """Rows one after another, in the dtype that they are stored in; the caller's own."""
        return self.source.read(self.found, WeightPart(self.like, None, 0, slice(start, stop)))

    def chunks(self, most_numbers: int = _CHUNK_NUMBERS) -> Iterator[tuple[int, Tensor]]:
        """All rows, some at a time: the first one's number, and their values in fp32."""
        step = max(1, most_numbers // self.width)
        for start in range(0, self.num_rows, step):
            yield start, self.read(range(start, min(start + step, self.num_rows)))

    def sample(self, excluded: set[int]) -> Tensor:
        """Rows that are spread over all, or all where there are few, but for some."""
        size = self.num_rows
        if size <= _BLOCKS * _BLOCK_ROWS:
            chosen = range(size)
            rows = [row for row in chosen if row not in excluded]
        else:
            starts = [number * (size - _BLOCK_ROWS) // (_BLOCKS - 1) for number in range(_BLOCKS)]
            spread = {start + row for start in starts for row in range(_BLOCK_ROWS)}
            rows = sorted(spread - excluded)
        return self.read(rows)


class Layers(NamedTuple):
    """The two layers of a model that have a row for each token."""

    embedding: Any
    head: Any
    """None if there is none."""
    names: tuple[str, ...]
    """Of their weights: the embedding's, and the head's if there is one."""

    @classmethod
    def of(cls, model: Any) -> Layers:
        """A Transformers model's; it may be on the meta device."""
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        modules = [embedding] if head is None else [embedding, head]
        return cls(embedding, head, tuple(f"{names[id(module)]}.weight" for module in modules))

    @property
    def is_tied(self) -> bool:
        """Whether one matrix serves as both."""
        return self.head is None or self.head.weight is self.embedding.weight


def find_matrices(model: Any, folder: Path) -> list[TokenMatrix]:
    """The embedding, and the head if it has a matrix of its own, as far as they are stored by rows.

    Args:
        model: of Transformers, on the meta device, without adapters.
        folder: with its safetensors files.
    """
    layers = Layers.of(model)
    stored = SafetensorsSource(folder, model, layers.names)
    groups = [list(layers.names)] if layers.is_tied else [[name] for name in layers.names]
    matrices = []
    for name, group, module in zip(
        ("embedding", "head"), groups, (layers.embedding, layers.head), strict=False
    ):
        found = stored.find(group)
        if found is not None:
            matrices.append(TokenMatrix(name, stored, found, module.weight))
    return matrices


# Which were never trained


class Usual(NamedTuple):
    """What is usual of the norms of a vocabulary's rows, in logarithms."""

    median: float
    deviation: float
    """As the standard deviation would be, had the norms' logarithms a normal distribution; not too small."""

    @classmethod
    def of(cls, norms: Tensor) -> Usual | None:
        """Of those that aren't zero; None: there are none."""
        usual = norms[norms > 0].log()
        if not len(usual):
            return None
        deviation = 1.4826 * float((usual - usual.median()).abs().median())
        return cls(float(usual.median()), max(deviation, SMALLEST_DEVIATION))

    def deviations(self, norm: float) -> float:
        """How far off a norm is; minus infinity for 0."""
        return (math.log(norm) - self.median) / self.deviation if norm else -math.inf

    def why_untrained(self, norm: float) -> str | None:
        """What a norm shows of its row, or None."""
        if norm == 0 or math.log(norm) - self.median < math.log(NEXT_TO_NOTHING):
            return ZEROS
        if abs(self.deviations(norm)) > FAR_OFF:
            return f"norms far from the vocabulary's {math.exp(self.median):.2g}"
        return None


def why_untrained(row: Tensor, usual: Usual | None, others: Tensor) -> str | None:
    """What shows that a row was never trained, or None.

    Args:
        row: [H].
        usual: of the norms of other tokens' rows; None: they are all zero.
        others: [k, H], rows of other special and added tokens.
    """
    norm = float(row.norm())
    if norm == 0:
        return ZEROS
    reason = None if usual is None else usual.why_untrained(norm)
    if reason is None and len(others) and float((others - row).norm(dim=1).min()) < COPY * norm:
        return COPIES
    return reason


@dataclass(frozen=True)
class Judged:
    """What a matrix shows of some tokens."""

    reasons: dict[int, str]
    """Why a token counts as never trained."""
    usual: Usual | None
    sampled: Tensor
    """[n, H], rows of the vocabulary that they were compared with."""


def judge(matrix: TokenMatrix, tokens: Sequence[int], tokenizer: Any) -> Judged:
    """Which tokens a matrix was never trained on.

    Args:
        matrix: to look into; it has a row for each of the tokens.
        tokens: to judge.
        tokenizer: whose special and added tokens they may be copies of.
    """
    present = sorted(token for token in {*tokens, *tokenizer.added_tokens_decoder} if token < matrix.num_rows)
    rows = matrix.read(present)
    sampled = matrix.sample(excluded=set(present))
    usual = Usual.of(sampled.norm(dim=1))
    place_of = {token: place for place, token in enumerate(present)}
    places = torch.tensor([place_of[token] for token in tokens], dtype=torch.long)
    reasons = {}
    for token, place, near in zip(tokens, places.tolist(), _near(rows, places), strict=True):
        reason = why_untrained(rows[place], usual, rows[near])
        if reason is not None:
            reasons[token] = reason
    return Judged(reasons, usual, sampled)


def _near(rows: Tensor, places: Tensor) -> Iterator[Tensor]:
    """For some rows, [k] places, one after another: which of all may be their copies, [n] of bool.

    Distances by products are quick for many rows, and a little off.
    """
    squares = rows.square().sum(dim=1)
    for some in places.split(_AT_A_TIME):
        distances = squares[some].unsqueeze(1) + squares - 2 * (rows[some] @ rows.T)
        near = distances < 4 * COPY**2 * squares[some].unsqueeze(1)
        near[torch.arange(len(some)), some] = False
        yield from near
