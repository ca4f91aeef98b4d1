"""The rows of special and added tokens, measured against those of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hfpar.models.token_matrices import ZEROS, TokenMatrix, Usual, judge
from hfpar.tokentool.source import TokenSource
from hfpar.tokentool.template import TemplateUse, tokens_of_template

NOT_FINITE = "rows that aren't finite"
_ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
_MOST_PRODUCTS = 2**24
"""Cosines that are held at a time."""


@dataclass(frozen=True)
class Token:
    """A special or added token, or one that the other model has as such.

    Attributes:
        id: its number.
        text: as the tokenizer's vocabulary has it.
        is_special: whether decoding can leave it out.
        is_added: special or added here.
        roles: bos, eos, pad and so on.
        template: how the chat template uses it; None: it doesn't.
    """

    id: int
    text: str
    is_special: bool
    is_added: bool
    roles: tuple[str, ...]
    template: TemplateUse | None


@dataclass(frozen=True)
class Neighbor:
    """A token near another."""

    id: int
    text: str
    cosine: float


@dataclass(frozen=True, eq=False)
class Measured:
    """What a matrix shows.

    Attributes:
        matrix: the embedding or the head.
        norms: [V], of all rows.
        ordinary: [V], whether a row belongs to a token of the vocabulary that isn't special or added.
        padding: [V], whether it belongs to no token.
        mean: of the ordinary tokens' norms.
        deviation: standard deviation of these.
        center: [H], the mean of the ordinary tokens' rows.
        usual: what training compares rows with.
        reasons: why a token of `Model.tokens` counts as never trained, by id.
    """

    matrix: TokenMatrix
    norms: np.ndarray
    ordinary: np.ndarray
    padding: np.ndarray
    mean: float
    deviation: float
    center: Tensor
    usual: Usual | None
    reasons: dict[int, str]

    def z(self, token: int) -> float | None:
        """Standard deviations between a row's norm and the vocabulary's mean norm."""
        return (float(self.norms[token]) - self.mean) / self.deviation if self.deviation else None

    def robust_z(self, token: int) -> float | None:
        """What decides: by the logarithm, median and median deviation; minus infinity for a row of zeros."""
        return None if self.usual is None else self.usual.deviations(float(self.norms[token]))

    @property
    def dtype(self) -> str:
        """As it is stored."""
        return str(self.matrix.read_stored(0, 1).dtype).removeprefix("torch.")

    @property
    def ordinary_norms(self) -> np.ndarray:
        """Of the ordinary tokens, those that are finite."""
        norms: np.ndarray = self.norms[self.ordinary]
        return norms[np.isfinite(norms)]

    def odd_ordinary(self) -> dict[int, str]:
        """Ordinary tokens whose norm says that they were never trained, by id."""
        far = ~np.isfinite(self.norms) | (self.norms == 0)
        if self.usual is not None:
            with np.errstate(divide="ignore", invalid="ignore"):
                far |= np.abs(np.log(self.norms) - self.usual.median) > self.usual.deviation
        found = {}
        for token in np.flatnonzero(far & self.ordinary).tolist():
            norm = float(self.norms[token])
            reason: str | None = NOT_FINITE
            if np.isfinite(norm):
                reason = ZEROS if self.usual is None else self.usual.why_untrained(norm)
            if reason is not None:
                found[token] = reason
        return found


@dataclass(frozen=True, eq=False)
class Model:
    """A model, measured.

    Attributes:
        source: what was read.
        vocabulary: ids by text.
        texts: texts by id.
        tokens: special and added tokens by id, and those that the other model has as such.
        measured: the embedding, and the head if it has a matrix of its own.
        neighbors: of a token, by id; only of those that were asked for.
    """

    source: TokenSource
    vocabulary: Mapping[str, int]
    texts: Mapping[int, str]
    tokens: dict[int, Token]
    measured: list[Measured]
    neighbors: dict[int, list[Neighbor]] = field(default_factory=dict)

    @property
    def untrained(self) -> dict[int, str]:
        """Why a special or added token counts as never trained: by the embedding, or else by the head."""
        reasons: dict[int, str] = {}
        for measured in reversed(self.measured):
            reasons |= measured.reasons
        return {token: reason for token, reason in sorted(reasons.items()) if self.tokens[token].is_added}


def find_tokens(source: TokenSource, others: set[str]) -> dict[int, Token]:
    """The special and added tokens of a tokenizer, and others by their texts, by id.

    Raises:
        ConfigError: the chat template can't be rendered.
    """
    tokenizer = source.tokenizer
    added, vocabulary = tokenizer.added_tokens_decoder, tokenizer.get_vocab()
    use = tokens_of_template(tokenizer)
    roles: dict[str, list[str]] = {}
    for role in _ROLES:
        text = getattr(tokenizer, f"{role}_token", None)
        if text is not None:
            roles.setdefault(str(text), []).append(role)
    texts = {token: str(entry.content) for token, entry in added.items()}
    texts |= {vocabulary[text]: text for text in others if vocabulary.get(text) not in (None, *texts)}
    return {
        token: Token(
            token,
            text,
            is_special=token in added and bool(added[token].special),
            is_added=token in added,
            roles=tuple(roles.get(text, ())),
            template=use.get(token),
        )
        for token, text in sorted(texts.items())
    }


def measure(source: TokenSource, others: set[str]) -> Model:
    """Measure a model.

    Args:
        source: where it is.
        others: texts of tokens to look at beside its own special and added ones.

    Raises:
        ConfigError: the chat template can't be rendered.
    """
    vocabulary = source.tokenizer.get_vocab()
    tokens = find_tokens(source, others)
    texts = {token: text for text, token in vocabulary.items()}
    measured = [_measure(matrix, texts, tokens, source.tokenizer) for matrix in source.matrices]
    return Model(source, vocabulary, texts, tokens, measured)


def _measure(
    matrix: TokenMatrix, texts: Mapping[int, str], tokens: Mapping[int, Token], tokenizer: Any
) -> Measured:
    size = matrix.num_rows
    ordinary, padding = np.zeros(size, dtype=bool), np.ones(size, dtype=bool)
    known = np.array([token for token in {*texts, *tokens} if token < size], dtype=np.int64)
    ordinary[known], padding[known] = True, False
    ordinary[[token for token in tokenizer.added_tokens_decoder if token < size]] = False
    norms = np.empty(size, dtype=np.float32)
    total = torch.zeros(matrix.width, dtype=torch.float64)
    num_summed = 0
    for start, rows in matrix.chunks():
        own = rows.norm(dim=1)
        norms[start : start + len(rows)] = own.numpy()
        usable = torch.from_numpy(ordinary[start : start + len(rows)]) & torch.isfinite(own)
        if not torch.isfinite(own).all():
            rows[~torch.isfinite(own)] = 0
        total += usable.to(rows.dtype) @ rows
        num_summed += int(usable.sum())
    present = [token for token in tokens if token < size]
    judged = judge(matrix, present, tokenizer)
    broken = {token: NOT_FINITE for token in present if not np.isfinite(norms[token])}
    usual_norms = norms[ordinary & np.isfinite(norms)].astype(np.float64)
    return Measured(
        matrix,
        norms,
        ordinary,
        padding,
        float(usual_norms.mean()) if len(usual_norms) else 0.0,
        float(usual_norms.std()) if len(usual_norms) else 0.0,
        (total / max(num_summed, 1)).float(),
        judged.usual,
        {**judged.reasons, **broken},
    )


def find_neighbors(model: Model, tokens: list[int], count: int) -> dict[int, list[Neighbor]]:
    """The nearest tokens by the cosine between rows of the embedding from which the vocabulary's mean is taken.

    Rows of zeros have no direction, and padding no token: neither has or is a neighbour.

    Args:
        model: measured.
        tokens: ids to find neighbours of.
        count: how many for each.

    Returns:
        The nearest first, by id, of those tokens that can have some.
    """
    measured = model.measured[0]
    usable = np.isfinite(measured.norms) & ~measured.padding & (measured.norms > 0)
    usable[[token for token, reason in measured.reasons.items() if reason == ZEROS]] = False
    asked = sorted(token for token in tokens if token < len(usable) and usable[token])
    if not asked or not count:
        return {}
    queries = torch.nn.functional.normalize(measured.matrix.read(asked) - measured.center)
    best = torch.empty(len(asked), 0)
    ids = torch.empty(len(asked), 0, dtype=torch.long)
    numbers = min(_MOST_PRODUCTS, _MOST_PRODUCTS // len(asked) * measured.matrix.width)
    for start, rows in measured.matrix.chunks(max(numbers, measured.matrix.width)):
        rows -= measured.center
        cosines = (queries @ rows.T) / rows.norm(dim=1).clamp_min(torch.finfo(rows.dtype).tiny)
        allowed = torch.from_numpy(usable[start : start + len(rows)])
        cosines[:, ~allowed] = -torch.inf
        for place, token in enumerate(asked):
            if start <= token < start + len(rows):
                cosines[place, token - start] = -torch.inf
        own = torch.arange(start, start + len(rows)).expand(len(asked), -1)
        best, ids = torch.cat([best, cosines], dim=1), torch.cat([ids, own], dim=1)
        best, places = best.topk(min(count, best.shape[1]), dim=1)
        ids = ids.gather(1, places)
    return {
        token: [
            Neighbor(near, model.texts.get(near, ""), cosine)
            for near, cosine in zip(ids[place].tolist(), best[place].tolist(), strict=True)
            if cosine > -torch.inf
        ]
        for place, token in enumerate(asked)
    }
