"""Two models' rows of the same tokens, matched by text: which were trained in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from hfpar.errors import ConfigError
from hfpar.models.token_matrices import COPIES
from hfpar.tokentool.measure import Measured, Model

Change = Literal["taught", "untaught", "moved", "as others", "same"]
"""taught: never trained in the first model, trained in the second; untaught: the other way round; moved: changed more
than 99 % of the vocabulary; as others: no more than these; same: not at all."""

_MOST_SAMPLED = 4096
_FAR = 0.99


@dataclass(frozen=True)
class Pair:
    """A token's rows in both models.

    Attributes:
        text: the token's.
        first: its id in the first model; None: it isn't there.
        second: in the second.
        cosine: between its rows as they are; None: one is zero or missing, or their widths differ.
        distance: between its rows, by the longer one's norm: 0 to 2.
        change: what became of it.
    """

    text: str
    first: int | None
    second: int | None
    cosine: float | None = None
    distance: float | None = None
    change: Change | None = None


@dataclass(frozen=True)
class MatrixComparison:
    """An embedding or a head beside the other model's.

    Attributes:
        name: embedding or head.
        pairs: of the special and added tokens of both.
        num_sampled: ordinary tokens in both that were compared.
        median_distance: of these; None: the widths differ, or no token is in both.
        far_distance: that 99 % of these don't exceed.
        share_changed: of these.
    """

    name: str
    pairs: list[Pair]
    num_sampled: int = 0
    median_distance: float | None = None
    far_distance: float | None = None
    share_changed: float | None = None


@dataclass(frozen=True)
class Comparison:
    """Two models.

    Attributes:
        num_matching: tokens of the vocabularies that both have.
        num_first: tokens of the first.
        num_second: of the second.
        num_same_id: of the matching ones, those of the same number.
        matrices: the embeddings, and the heads if either has a matrix of its own.
    """

    num_matching: int
    num_first: int
    num_second: int
    num_same_id: int
    matrices: list[MatrixComparison]


def compare(first: Model, second: Model) -> Comparison:
    """Compare two measured models, of which each has looked at the other's special and added tokens, too.

    Raises:
        ConfigError: no token is in both.
    """
    matching = {text: token for text, token in first.vocabulary.items() if text in second.vocabulary}
    if not matching:
        raise ConfigError(
            f"--compare: {second.source.name} and {first.source.name} have no token in common, by their texts"
        )
    sides = [(Side(first, 0), Side(second, 0))]
    if len(first.measured) > 1 or len(second.measured) > 1:
        sides.append((Side(first, -1), Side(second, -1)))  # a tied head is the embedding
    return Comparison(
        len(matching),
        len(first.vocabulary),
        len(second.vocabulary),
        sum(second.vocabulary[text] == token for text, token in matching.items()),
        [
            _compare(name, one, other, list(matching))
            for name, (one, other) in zip(("embedding", "head"), sides, strict=False)
        ],
    )


@dataclass(frozen=True)
class Side:
    """A model's embedding or head.

    Attributes:
        model: whose.
        number: of the matrix.
    """

    model: Model
    number: int

    @property
    def measured(self) -> Measured:
        """The matrix."""
        return self.model.measured[self.number]

    def row(self, text: str) -> int | None:
        """A token's number, if it has a row."""
        token = self.model.vocabulary.get(text)
        return token if token is not None and token < self.measured.matrix.num_rows else None

    def is_ordinary(self, text: str) -> bool:
        """Whether a token has a row, and is neither special nor added."""
        row = self.row(text)
        return row is not None and bool(self.measured.ordinary[row])

    def rows(self, texts: Sequence[str]) -> Tensor:
        """[n, H], in this order, of tokens that have rows."""
        wanted = torch.tensor([self.row(text) for text in texts], dtype=torch.long)
        numbers, places = wanted.unique(return_inverse=True)
        return self.measured.matrix.read(numbers.tolist())[places]


def _compare(name: str, one: Side, other: Side, matching: list[str]) -> MatrixComparison:
    tokens = (*one.model.tokens.values(), *other.model.tokens.values())
    texts = list(dict.fromkeys(token.text for token in tokens))
    if one.measured.matrix.width != other.measured.matrix.width:
        pairs = [
            Pair(text, one.row(text), other.row(text), change=_change(text, one, other, None, None))
            for text in texts
        ]
        return MatrixComparison(name, pairs)
    ordinary = [text for text in matching if one.is_ordinary(text) and other.is_ordinary(text)]
    ordinary = sorted(ordinary, key=lambda text: one.row(text) or 0)[
        :: -(-len(ordinary) // _MOST_SAMPLED) or 1
    ]
    usual = _distances(one.rows(ordinary), other.rows(ordinary)).numpy()
    usual = usual[np.isfinite(usual)]
    far = float(np.quantile(usual, _FAR)) if len(usual) else None
    both = [text for text in texts if one.row(text) is not None and other.row(text) is not None]
    first, second = one.rows(both), other.rows(both)
    distances = dict(zip(both, _distances(first, second).tolist(), strict=True))
    cosines = dict(zip(both, _cosines(first, second).tolist(), strict=True))
    pairs = [
        Pair(
            text,
            one.row(text),
            other.row(text),
            _finite(cosines.get(text)),
            _finite(distances.get(text)),
            _change(text, one, other, distances.get(text), far),
        )
        for text in texts
    ]
    if not len(usual):
        return MatrixComparison(name, pairs)
    return MatrixComparison(name, pairs, len(usual), float(np.median(usual)), far, float((usual > 0).mean()))


def _change(text: str, one: Side, other: Side, distance: float | None, far: float | None) -> Change | None:
    first, second = one.row(text), other.row(text)
    if first is None or second is None:
        return None
    was, is_now = one.measured.reasons.get(first), other.measured.reasons.get(second)
    if distance is not None and not math.isfinite(distance):
        distance = None
    is_far = distance is None or far is None or distance > far
    # Copies are told apart by the noise of any training; they have to have moved.
    if bool(was) != bool(is_now) and (is_far or (was or is_now) != COPIES):
        return "taught" if was else "untaught"
    if distance is None:
        return None
    return "same" if distance == 0 else "moved" if is_far else "as others"


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """[n]; 0 between rows of zeros."""
    longer = torch.maximum(first.norm(dim=1), second.norm(dim=1))
    return (first - second).norm(dim=1) / longer.clamp_min(torch.finfo(torch.float32).tiny)


def _cosines(first: Tensor, second: Tensor) -> Tensor:
    """[n]; not a number where a row is zero."""
    return (first * second).sum(dim=1) / (first.norm(dim=1) * second.norm(dim=1))


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None
