"""Tokens that the chat template writes and the model was never taught.

Base models often ship such tokens for their chat markers: the tokenizer knows them, but their rows of the embedding
are zero, or what they were made with. An adapter of the layers can't mend that, so their rows are trained beside it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from hfpar.config.schema import SFTConfig
from hfpar.data.stream import Sample
from hfpar.errors import ConfigError
from hfpar.models import load
from hfpar.models.adapters import modules_named
from hfpar.models.stored import SafetensorsSource, WeightPart
from hfpar.models.token_rows import Fresh
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.model import ModelSource, TokenRows

logger = logging.getLogger(__name__)

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

_SAMPLES = 1000
_BLOCKS, _BLOCK_ROWS = 64, 64


def choose_rows(
    config: SFTConfig, source: ModelSource, samples: Sequence[Sample], layout: Layout
) -> TokenRows:
    """The rows that are to be trained beside adapters, by `trainable_token_indices` and `train_tokens`.

    All ranks together; rank 0 reads rows of the checkpoint, and says what it found.

    Args:
        config: the run's.
        source: the model's folder, config and tokenizer.
        samples: to train on.
        layout: the rank's place.

    Raises:
        ConfigError: a token that the tokenizer doesn't have, or rows that this layout can't train.
    """
    rows = TokenRows.of(config)
    if not config.lora_r:
        return rows
    matrices = _Matrices(config, source)
    named = _named_tokens(config, source.tokenizer)
    found = on_main(layout, lambda: _look(matrices, named, samples, source.tokenizer))
    chosen = named or (list(found.reasons) if config.train_tokens == "auto" else [])
    if chosen and layout.tp_size > 1:
        tokens = _texts(chosen, source.tokenizer)
        raise ConfigError(
            f"train_tokens: the rows of {tokens} would be trained alone, which hfpar can't do with tp_size "
            f"{layout.tp_size}; set train_tokens: none, or leave tp_size at 1"
        )
    if layout.rank == 0:
        _tell(config, found, source.tokenizer, matrices)
    return matrices.rows(rows, chosen, found, is_asked_for=bool(named)) if chosen else rows


def _named_tokens(config: SFTConfig, tokenizer: Any) -> list[int]:
    """The tokens that `train_tokens` lists."""
    if config.train_tokens in ("auto", "none"):
        return []
    texts = [config.train_tokens] if isinstance(config.train_tokens, str) else config.train_tokens
    vocabulary = tokenizer.get_vocab()
    unknown = next((text for text in texts if text not in vocabulary), None)
    if unknown is not None:
        raise ConfigError(
            f"train_tokens: {unknown} is no token of this model's tokenizer; name tokens such as "
            f"{tokenizer.eos_token or next(iter(vocabulary))}, or auto"
        )
    return [vocabulary[text] for text in texts]


def _tell(config: SFTConfig, found: _Found, tokenizer: Any, matrices: _Matrices) -> None:
    if not found.reasons:
        return
    kinds = {
        kind: _texts([token for token, other in found.reasons.items() if other == kind], tokenizer)
        for kind in dict.fromkeys(found.reasons.values())
    }
    listed = "; ".join(f"{tokens} ({kind})" for kind, tokens in kinds.items())
    if config.train_tokens == "none":
        what = "they stay as they are, by train_tokens: none"
    elif matrices.all_trained:
        what = "their rows are trained with the whole matrix"
    else:
        what = "their rows are trained beside the adapters"
        what += ", zeros from the vocabulary's mean on" if found.fresh else ""
    where = "" if _named_tokens(config, tokenizer) else " of the data"
    logger.warning("train_tokens: tokens%s that this model was never taught: %s; %s", where, listed, what)


def _texts(tokens: Sequence[int], tokenizer: Any) -> str:
    return ", ".join(tokenizer.convert_ids_to_tokens(list(tokens)))


# What the checkpoint says


def tokens_in_use(samples: Sequence[Sample], tokenizer: Any) -> list[int]:
    """The special and added tokens in a thousand samples, spread over all."""
    added = set(tokenizer.added_tokens_decoder)
    step = max(1, len(samples) // _SAMPLES)
    used: set[int] = set()
    for index in range(0, len(samples), step):
        used |= added.intersection(samples[index].input_ids)
    return sorted(used)


@dataclass(frozen=True)
class _Found:
    """What the checkpoint says of tokens."""

    reasons: dict[int, str]
    """Why a token counts as never trained."""
    fresh: dict[str, Fresh]
    """By `embedding` or `head`: rows that are next to nothing there."""


def why_untrained(row: Tensor, vocabulary: Tensor, others: Tensor) -> str | None:
    """What shows that a row was never trained, or None.

    Args:
        row: [H].
        vocabulary: [n], norms of other tokens' rows.
        others: [k, H], rows of other special and added tokens.
    """
    norm, usual = float(row.norm()), vocabulary[vocabulary > 0].log()
    if norm == 0:
        return ZEROS
    if len(usual):
        away = math.log(norm) - float(usual.median())
        deviation = max(1.4826 * float((usual - usual.median()).abs().median()), SMALLEST_DEVIATION)
        if away < math.log(NEXT_TO_NOTHING):
            return ZEROS
        if abs(away) > FAR_OFF * deviation:
            return f"norms far from the vocabulary's {float(usual.median().exp()):.2g}"
    if len(others) and float((others - row).norm(dim=1).min()) < COPY * norm:
        return "copies of other tokens"
    return None


def _look(matrices: _Matrices, named: Sequence[int], samples: Sequence[Sample], tokenizer: Any) -> _Found:
    """Which of the named tokens, or of those in use, were never trained."""
    tokens = sorted(named) or tokens_in_use(samples, tokenizer)
    found = _Found({}, {})
    if not tokens:
        return found
    if not matrices.all:
        logger.warning(
            "train_tokens: nobody has looked whether this model was taught the chat template's tokens: its embedding "
            "isn't stored in a form that hfpar reads by rows"
        )
    for matrix in matrices.all:
        outside = [token for token in tokens if token >= matrix.num_rows]
        if outside:
            raise ConfigError(
                f"train_tokens: token {outside[0]}, but the model's tokens are 0 to {matrix.num_rows - 1}"
            )
        present = sorted(
            token for token in {*tokens, *tokenizer.added_tokens_decoder} if token < matrix.num_rows
        )
        rows = dict(zip(present, matrix.read(present), strict=True))
        usual = matrix.sample(excluded=set(present))
        reasons = {}
        for token in tokens:
            others = [row for other, row in rows.items() if other != token]
            reason = why_untrained(
                rows[token], usual.norm(dim=1), torch.stack(others) if others else torch.empty(0, 0)
            )
            if reason is not None:
                reasons[token] = found.reasons.setdefault(token, reason)
        zeros = tuple(token for token, reason in reasons.items() if reason == ZEROS)
        if zeros:
            found.fresh[matrix.name] = Fresh(zeros, usual.mean(dim=0))
    return found


@dataclass(frozen=True)
class _Matrix:
    """The embedding or the head, in a checkpoint."""

    name: str
    """embedding or head."""
    source: SafetensorsSource
    found: str
    like: Tensor

    @property
    def num_rows(self) -> int:
        """Tokens, padding of the vocabulary included."""
        return self.like.shape[0]

    def read(self, rows: Sequence[int]) -> Tensor:
        """Some rows in rising order, fp32."""
        parts = []
        for _, run in groupby(enumerate(rows), key=lambda pair: pair[1] - pair[0]):
            numbers = [row for _, row in run]
            part = WeightPart(self.like, None, 0, slice(numbers[0], numbers[-1] + 1))
            parts.append(self.source.read(self.found, part).float())
        return torch.cat(parts) if parts else torch.empty(0, self.like.shape[1])

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


class _Matrices:
    """The embedding and the head of a model, where they are stored, and which of them is trained anyway."""

    def __init__(self, config: SFTConfig, source: ModelSource) -> None:
        """Lay the model out without weights, and look up its matrices."""
        model = load.skeleton(source.config, trust_remote_code=config.trust_remote_code)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {id(module): name for name, module in model.named_modules()}
        self.is_tied = head is None or head.weight is embedding.weight
        modules = [embedding] if head is None else [embedding, head]
        keys = [f"{names[id(module)]}.weight" for module in modules]
        stored = SafetensorsSource(source.folder, model, keys)
        groups = [keys] if self.is_tied else [[key] for key in keys]
        self.all: list[_Matrix] = []
        for name, group, module in zip(("embedding", "head"), groups, modules, strict=False):
            found = stored.find(group)
            if found is not None:
                self.all.append(_Matrix(name, stored, found, module.weight))
        wanted = [*_as_list(config.modules_to_save), *_as_list(config.lora_target_modules)]
        trained = {id(module) for name in wanted for _, module in modules_named(model, name)}
        self.embedding_trained, self.head_trained = id(embedding) in trained, id(head) in trained

    @property
    def all_trained(self) -> bool:
        """Whether each is trained anyway."""
        if self.is_tied:
            return self.embedding_trained or self.head_trained
        return self.embedding_trained and self.head_trained

    def rows(
        self, given: TokenRows, tokens: Sequence[int], found: _Found, *, is_asked_for: bool
    ) -> TokenRows:
        """Rows that are named by number, and those of tokens, but for matrices that are trained anyway."""
        if self.all_trained:
            if is_asked_for:
                raise ConfigError(
                    "train_tokens: modules_to_save or lora_target_modules trains the embedding or the head already; "
                    "leave train_tokens out"
                )
            return given
        embedding = given.embedding if self.embedding_trained else (*given.embedding, *tokens)
        head = given.head if self.is_tied or self.head_trained else (*given.head, *tokens)
        return TokenRows(
            tuple(sorted(set(embedding))),
            tuple(sorted(set(head))),
            found.fresh.get("embedding"),
            found.fresh.get("head"),
        )


def _as_list(names: str | list[str] | None) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names or ())
