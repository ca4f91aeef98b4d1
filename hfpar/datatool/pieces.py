"""Tokens as pieces of text that can be printed: a token that is part of a character stands with its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
"""What decoders put where bytes are no character, or not a whole one."""
_MOST_TOKENS = 255
"""So many tokens may make a piece: a text that is all replacement characters has no better place to cut it."""


class Piece(NamedTuple):
    """One or several tokens."""

    text: str
    trained: bool
    special: bool


def to_pieces(
    input_ids: Sequence[int], trained: Sequence[bool], tokenizer: PreTrainedTokenizerBase
) -> list[Piece]:
    """Decode tokens to whole characters.

    Args:
        input_ids: of a sample.
        trained: for each token, whether it is learnt; the first never is.
        tokenizer: that made them.

    Returns:
        Pieces whose texts together are the tokenizer's own decoding of all tokens.
    """
    special_ids = special_token_ids(tokenizer)
    pieces: list[Piece] = []
    before: list[int] = []  # the last piece's tokens: some decoders treat a first token otherwise
    pending: list[int] = []
    learnt = False
    for position, (token, is_trained) in enumerate(zip(input_ids, trained, strict=True)):
        is_special = token in special_ids
        if pending and (is_special or _stays_broken(tokenizer, before, pending, token)):
            pieces.append(Piece(_addition(tokenizer, before, pending), learnt, False))
            before, pending, learnt = pending, [], False
        pending = [*pending, token]
        learnt = learnt or (is_trained and position > 0)
        text = _addition(tokenizer, before, pending)
        is_last = position == len(input_ids) - 1
        if is_special or is_last or not text.endswith(_REPLACEMENT) or len(pending) >= _MOST_TOKENS:
            pieces.append(Piece(text, learnt, is_special))
            before, pending, learnt = pending, [], False
    return pieces


def _stays_broken(
    tokenizer: PreTrainedTokenizerBase, before: list[int], pending: list[int], token: int
) -> bool:
    """Whether a token is no part of the broken character before it: one that a sample's begin cut through."""
    together = _addition(tokenizer, before, [*pending, token])
    return together.startswith(_REPLACEMENT) and _REPLACEMENT not in decode(tokenizer, [token])


def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """The ids of all special tokens."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added.union(tokenizer.all_special_ids)


def decode(tokenizer: PreTrainedTokenizerBase, input_ids: Sequence[int]) -> str:
    """The text of tokens, special ones included, nothing tidied up."""
    return str(
        tokenizer.decode(list(input_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    )


def _addition(tokenizer: PreTrainedTokenizerBase, before: list[int], tokens: list[int]) -> str:
    """What tokens add to the text of those before them."""
    return decode(tokenizer, before + tokens)[len(decode(tokenizer, before)) :]
