"""Texts as they are compared: the model always sees the original."""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

_SAME = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛′ʼ`´", "'"),
        **dict.fromkeys("“”„‟″", '"'),
        **dict.fromkeys("‐‑‒–—―−", "-"),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad"),
    }
)
_WITHOUT_SPACES = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
"""Japanese, Chinese and Thai letters: words aren't set apart by spaces."""
_WORD = re.compile(rf"[{_WITHOUT_SPACES}]|[^\s{_WITHOUT_SPACES}]+")
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Match(NamedTuple):
    """Whether a continuation begins with a tail; None: it does so far, and isn't long enough to tell."""

    strict: bool | None
    """Character by character."""
    normalized: bool | None
    """As `normalize` leaves both."""

    @property
    def is_open(self) -> bool:
        """Whether more of the continuation could change either."""
        return self.strict is None or self.normalized is None


def normalize(text: str) -> str:
    """NFKC, one kind of quotes and dashes, nothing invisible, single spaces, none at the ends."""
    return " ".join(unicodedata.normalize("NFKC", text.translate(_SAME)).split())


def count_words(text: str) -> int:
    """Words between white space; in scripts without it each letter counts."""
    return len(_WORD.findall(text))


def word_spans(text: str) -> list[tuple[int, int]]:
    """Where each word of `count_words` stands: `(start, end)` in characters."""
    return [found.span() for found in _WORD.finditer(text)]


def is_unspaced(character: str) -> bool:
    """Whether a letter's script has no spaces between words."""
    return re.fullmatch(f"[{_WITHOUT_SPACES}]", character) is not None


def match(tail: str, written: str, *, ended: bool = False) -> Match:
    """Compare what a model has written so far with the true tail.

    Args:
        tail: what stands in the benchmark after the cut, its leading space included.
        written: the continuation so far; a character of which only some bytes are there is left out.
        ended: nothing more will come.
    """
    written = written.rstrip(_UNFINISHED)
    strict = _begins(tail, written)
    if strict:
        return Match(True, True)
    mine, its = normalize(tail), normalize(written)
    normalized = True if its.startswith(mine) else None if _may_become(its, mine) else False
    if ended:
        return Match(bool(strict), bool(normalized))
    return Match(strict, normalized)


def _may_become(written: str, tail: str) -> bool:
    """Whether more text could turn the one into the other's beginning; an accent may yet follow a last letter."""
    if tail.startswith(written):
        return True
    last = len(written) - 1
    return tail.startswith(written[:last]) and _letter(tail[last : last + 1]) == _letter(written[last:])


def _letter(character: str) -> str:
    return unicodedata.normalize("NFD", character)[:1]


def _begins(tail: str, written: str) -> bool | None:
    if written.startswith(tail):
        return True
    return None if tail.startswith(written) else False
