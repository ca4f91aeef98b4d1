"""Where a text is cut into what the model is given and what it is hoped not to know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hfpar.audit.results import SkipReason
from hfpar.audit.text import count_words, is_unspaced
from hfpar.errors import ConfigError

_IN_COMMAND = re.compile(r"\\$|\\[A-Za-z]+\*?\s*[{\[]$")
"""A prefix that would end within a LaTeX command: after its backslash, or after the brace it opens."""
_DIGITS_BEFORE = re.compile(r"\d$")
_DIGITS_AFTER = re.compile(r"\s\d{3}(?!\d)")
"""The rest of a number whose thousands are set apart by spaces."""
_CONTEXT_TOKENS = 8
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What bytes that make no character are decoded as."""


@dataclass(frozen=True)
class TailLimits:
    """Shorter tails are completed by any model, and aren't probed."""

    min_words: int = 8
    min_chars: int = 32


@dataclass(frozen=True)
class Cut:
    """A place where a text is cut, or why it can't be."""

    ratio: float
    position: int = 0
    """Characters of the prefix."""
    num_prefix_tokens: int = 0
    """The tokens of the text that the prefix consists of, special ones at its beginning included."""
    tail_words: int = 0
    skipped: SkipReason | None = None


@dataclass(frozen=True)
class TokenizedText:
    """A text as the model reads it."""

    text: str
    input_ids: list[int]
    """Special tokens that the tokenizer puts at the beginning included, at the end not."""
    offsets: list[tuple[int, int]]
    """Characters of each token; `(0, 0)` for special ones."""
    num_special: int
    """Special tokens at the beginning."""


class TextTokenizer:
    """A tokenizer as the probe needs it: offsets, and special tokens only in front.

    What looks like a special token within a text is read as the text that it is: no model can be expected to write the
    token that ends its texts, and then go on.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "is_fast", False):
            raise ConfigError(
                f"model_name_or_path: {type(tokenizer).__name__} is a tokenizer in Python, which doesn't say where in "
                "a text its tokens lie; use a model folder with a tokenizer.json"
            )
        empty = tokenizer("").input_ids
        probe = tokenizer("a").input_ids
        self._num_first = _common(empty, probe)
        self._num_last = len(empty) - self._num_first

    def __call__(self, texts: Sequence[str]) -> list[TokenizedText]:
        """Tokenize several texts at once."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), return_offsets_mapping=True, split_special_tokens=True, verbose=False
        )
        return [
            self._without_end(text, ids, [tuple(pair) for pair in offsets])
            for text, ids, offsets in zip(texts, encoded.input_ids, encoded.offset_mapping, strict=True)
        ]

    def _without_end(self, text: str, ids: list[int], offsets: list[tuple[int, int]]) -> TokenizedText:
        end = len(ids) - self._num_last
        return TokenizedText(text, ids[:end], offsets[:end], self._num_first)

    def ids(self, text: str) -> list[int]:
        """The tokens of one text, as above."""
        ids: list[int] = self.tokenizer(text, split_special_tokens=True, verbose=False).input_ids
        return ids[: len(ids) - self._num_last]

    def plain_ids(self, text: str) -> list[int]:
        """The same without special tokens."""
        ids: list[int] = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        ).input_ids
        return ids

    def continuation(self, before: Sequence[int], new: Sequence[int]) -> str:
        """The text that `new` tokens add to those `before` them.

        Some tokens of context are decoded with them: alone, some tokenizers drop a first token's space. They begin with
        a whole character: others decode bytes that aren't all there, and all that follow them, as unknown.
        """
        length = min(_CONTEXT_TOKENS, len(before))
        while _INCOMPLETE in (head := self._decode(before[len(before) - length :])) and length < len(before):
            length = min(2 * length, len(before))
        whole = self._decode([*before[len(before) - length :], *new])
        return whole[len(head) :]

    def _decode(self, ids: Sequence[int]) -> str:
        text: str = self.tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many special tokens an empty text and another begin with alike."""
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


def find_cut(tokenized: TokenizedText, ratio: float, tokenizer: TextTokenizer, limits: TailLimits) -> Cut:
    """The last word boundary at or before `ratio` of the text's characters.

    Never within a LaTeX command or a number, and only where the tokens of the prefix alone are the first tokens of the
    whole text: otherwise the model would be given tokens that no text it has read holds at that place.
    """
    text = tokenized.text
    for position in range(int(ratio * len(text) + 1e-9), 0, -1):
        if not is_boundary(text, position):
            continue
        words = count_words(text[position:])
        if words < limits.min_words or len(text[position:].strip()) < limits.min_chars:
            return Cut(ratio, skipped="short_tail")
        ids = tokenizer.ids(text[:position])
        if ids == tokenized.input_ids[: len(ids)]:
            return Cut(ratio, position, len(ids), words)
    return Cut(ratio, skipped="no_cut")


def is_boundary(text: str, position: int) -> bool:
    """Whether a word ends at `position`, and no LaTeX command or number goes on behind it."""
    before, after = text[position - 1], text[position : position + 1]
    if before.isspace() or not after:
        return False
    if not after.isspace() and not (is_unspaced(before) and is_unspaced(after)):
        return False
    prefix = text[max(0, position - 40) : position]
    if _IN_COMMAND.search(prefix):
        return False
    return not (_DIGITS_BEFORE.search(prefix) and _DIGITS_AFTER.match(text[position : position + 6]))
