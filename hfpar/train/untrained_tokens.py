"""Tokens that the chat template writes and the model was never taught.

Base models often ship such tokens for their chat markers: the tokenizer knows them, but their rows of the embedding
are zero, or what they were made with. An adapter of the layers can't mend that, so their rows are trained beside it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfpar.config.schema import SFTConfig
from hfpar.data.stream import Sample
from hfpar.errors import ConfigError
from hfpar.models import load
from hfpar.models.adapters import modules_named
from hfpar.models.token_matrices import ZEROS, Layers, find_matrices, judge, tokens_in_use
from hfpar.models.token_rows import Fresh
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.model import ModelSource, TokenRows

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class _Found:
    """What the checkpoint says of tokens."""

    reasons: dict[int, str]
    """Why a token counts as never trained."""
    fresh: dict[str, Fresh]
    """By `embedding` or `head`: rows that are next to nothing there."""


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
        judged = judge(matrix, tokens, tokenizer)
        reasons = {token: found.reasons.setdefault(token, reason) for token, reason in judged.reasons.items()}
        zeros = tuple(token for token, reason in reasons.items() if reason == ZEROS)
        if zeros:
            found.fresh[matrix.name] = Fresh(zeros, judged.sampled.mean(dim=0))
    return found


class _Matrices:
    """The embedding and the head of a model, where they are stored, and which of them is trained anyway."""

    def __init__(self, config: SFTConfig, source: ModelSource) -> None:
        """Lay the model out without weights, and look up its matrices."""
        model = load.skeleton(source.config, trust_remote_code=config.trust_remote_code)
        layers = Layers.of(model)
        self.is_tied = layers.is_tied
        self.all = find_matrices(model, source.folder)
        wanted = [*_as_list(config.modules_to_save), *_as_list(config.lora_target_modules)]
        trained = {id(module) for name in wanted for _, module in modules_named(model, name)}
        self.embedding_trained, self.head_trained = (
            id(layers.embedding) in trained,
            id(layers.head) in trained,
        )

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
