"""A server's tokens laid over the text that they spell, with what the in-process probe knows of each token.

Nothing here talks to a server. What servers do differently, as their sources have it:

- `text_offset` is -1 with SGLang, and counts the BOS token's text with vLLM, so the texts of the tokens are laid
  over the text instead.
- A token that holds a part of a character's bytes is U+FFFD (vLLM, SGLang), nothing (llama-cpp-python) or
  begins with `bytes:` (OpenAI). All the tokens of such a run get the span of the whole run.
- A token decoded alone may have lost its leading space (SentencePiece).
- The true token may be missing from `top_logprobs` (SGLang), or stand there beside another of the same text. So
  whether it is the best is decided by log-probabilities, and by texts only within `TIE_TOLERANCE`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hfpar.errors import HfparError

TIE_TOLERANCE = 1e-4
"""Natural-log units within which two tokens are taken to be equally likely."""
_SAME = 1e-6


@dataclass(frozen=True)
class ServerToken:
    """A token of a text as the server sees it, with what the model expected in its place."""

    text: str
    logprob: float | None
    """None: the server gives none (of the first token of all, always)."""
    best: str | None
    """Text of the most likely token here, given the true text before."""
    best_logprob: float | None
    second_logprob: float | None = None
    """Of the second most likely token, where the server told it."""


@dataclass(frozen=True)
class ScoredText:
    """What one teacher-forced pass says of a text's tokens; the lists are equally long.

    A BOS token that the server put before the text is left out. The first token of a text without one has no
    prediction: its hit is False, its log-probability and gap are NaN.
    """

    spans: list[tuple[int, int]]
    """`(start, end)` in characters of the text; tokens that share a character share a span."""
    hits: list[bool]
    """Whether the token is the model's first choice."""
    logprobs: list[float]
    gaps: list[float]
    """Best minus true log-probability; 0 where hit."""
    best_texts: list[str | None]
    near_ties: list[bool]
    """Whether another token is within the tolerance of the best, so that a greedy decoder may take either."""


class SpellingError(HfparError):
    """The server's tokens don't spell the text that it was given."""


def parse_tokens(choice: Mapping[str, Any], prompt: str, num_written: int) -> list[ServerToken] | None:
    """The tokens of an echoed text without those written after it; None where log-probabilities are hidden."""
    logprobs = choice.get("logprobs")
    if not isinstance(logprobs, dict):
        return None
    texts, values, tops = (logprobs.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
    if not (isinstance(texts, list) and isinstance(values, list) and isinstance(tops, list)):
        return None
    if not len(texts) == len(values) == len(tops):
        return None
    # llama-cpp-python without a BOS token counts what it wrote, but doesn't list it.
    end = len(texts) if "".join(map(str, texts)) == prompt else len(texts) - num_written
    if end <= 0:
        return None
    tokens = [_parse_token(*item) for item in zip(texts[:end], values[:end], tops[:end], strict=True)]
    # A text of one token has no predictions, whatever the server.
    return None if len(tokens) > 1 and all(token.best is None for token in tokens) else tokens


def _parse_token(text: Any, value: Any, top: Any) -> ServerToken:
    """One token; the true one counts as listed even where the server lists only the best."""
    text = str(text)
    logprob = float(value) if isinstance(value, (int, float)) else None
    numbers = top if isinstance(top, dict) else {}
    listed = [
        (float(number), str(key)) for key, number in numbers.items() if isinstance(number, (int, float))
    ]
    if not listed or logprob is None:
        return ServerToken(text, logprob, None, None)
    others = [(number, key) for number, key in listed if key != text or abs(number - logprob) > 1e-6]
    ranked = sorted([(logprob, text), *others], key=lambda entry: -entry[0])
    return ServerToken(
        text,
        logprob,
        best=ranked[0][1],
        best_logprob=ranked[0][0],
        second_logprob=ranked[1][0] if len(ranked) > 1 else None,
    )


def scored_text(text: str, tokens: Sequence[ServerToken], tolerance: float = TIE_TOLERANCE) -> ScoredText:
    """The facts of each token that has characters in the text.

    Raises:
        SpellingError: The tokens are of another text.
    """
    scored = ScoredText([], [], [], [], [], [])
    for token, span in zip(tokens, align(text, tokens), strict=True):
        if span is None:
            continue
        hit, gap, near_tie = _verdict(token, tolerance)
        scored.spans.append(span)
        scored.hits.append(hit)
        scored.logprobs.append(math.nan if token.logprob is None else token.logprob)
        scored.gaps.append(gap)
        scored.best_texts.append(token.best)
        scored.near_ties.append(near_tie)
    return scored


def _verdict(token: ServerToken, tolerance: float) -> tuple[bool, float, bool]:
    """Hit, gap and near tie of a token."""
    if token.logprob is None or token.best_logprob is None:
        return False, math.nan, False
    gap = token.best_logprob - token.logprob
    is_same = token.best == token.text
    # Numbers first: two different tokens may have one text (parts of characters).
    if gap <= 0:
        hit = True
    elif _is_broken(token.text):
        hit = gap <= _SAME
    else:
        hit = is_same and gap <= tolerance
    if not hit:
        return False, gap, gap <= tolerance
    is_close = token.second_logprob is not None and token.logprob - token.second_logprob <= tolerance
    return True, 0.0, is_close or (not is_same and abs(gap) <= tolerance)


def align(text: str, tokens: Sequence[ServerToken]) -> list[tuple[int, int] | None]:
    """The span of each token in the text; None of those that have none (a BOS token, and what follows the text).

    Raises:
        SpellingError: The tokens are of another text.
    """
    spans: list[tuple[int, int] | None] = [None] * len(tokens)
    position = 0
    waiting: list[int] = []
    first = 1 if tokens and _is_bos(text, tokens) else 0
    for i in range(first, len(tokens)):
        piece = tokens[i].text
        if position == len(text) and not waiting:
            break
        if _is_broken(piece) and not (piece and not waiting and text.startswith(piece, position)):
            waiting.append(i)
            continue
        place = _find(text, piece, position, [tokens[j].text for j in waiting])
        if (
            place is None
            and position == 0
            and not waiting
            and text.startswith(piece[1:])
            and piece[:1] == " "
        ):
            # SentencePiece puts a space before the first word.
            place, piece = 0, piece[1:]
        if place is None:
            raise SpellingError(
                f"the server's token {i}, {piece!r}, does not fit the text at character {position}: "
                f"{text[position : position + 40]!r}"
            )
        for j in waiting:
            spans[j] = (position, place)
        # White space that decoding alone has lost belongs to the token behind it.
        spans[i] = (place if waiting else position, place + len(piece))
        position = place + len(piece)
        waiting = []
    for j in waiting:
        spans[j] = (position, len(text))
    if position < len(text) and not waiting and not text[position:].isspace():
        raise SpellingError(
            f"the server's tokens end at character {position} of {len(text)}, before {text[position:][:40]!r}: "
            "was the text cut to fit the context?"
        )
    return spans


def _is_broken(piece: str) -> bool:
    """Whether a token's text doesn't say which characters it covers."""
    if not piece or piece.startswith("bytes:"):
        return True
    return any(character == "\ufffd" or "\ud800" <= character <= "\udfff" for character in piece)


def _is_bos(text: str, tokens: Sequence[ServerToken]) -> bool:
    """Whether the first token was put before the text by the server."""
    first = tokens[0]
    if first.logprob is not None or "\ufffd" in first.text:
        return False
    if first.text and not text.startswith(first.text.removeprefix(" ")):
        return True
    following = tokens[1].text if len(tokens) > 1 else ""
    return not first.text and bool(following) and text.startswith(following.removeprefix(" "))


def _find(text: str, piece: str, position: int, waiting: Sequence[str]) -> int | None:
    """Where a piece begins at or shortly after a position, or None.

    Characters may be passed over where tokens of unknown text wait for theirs, or where decoding alone has lost them:
    white space, and the character of whose bytes this token has the last.
    """
    start = position
    if any(waiting):
        start += 1
        limit = position + sum(max(4, len(piece)) for piece in waiting)
    else:
        limit = position + 2 + 2 * len(waiting)
    for place in range(start, min(limit, len(text)) + 1):
        if text.startswith(piece, place):
            return place
        if not waiting and place < len(text) and text[place].isascii() and not text[place].isspace():
            return None
    return None
