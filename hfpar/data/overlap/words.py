r"""Text as words for comparison: whatever people change when they copy a problem is left out.

Letters and digits are words; punctuation, signs, white space and LaTeX's layout aren't. `$\dfrac{1}{2}$`, `1/2` and `½`
are the words `1 2`; `1,080` and `1{,}080` are `1080`; what stands in an `[asy]` figure counts for nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

import numpy as np

UNKNOWN = 0
"""The id of words that no benchmark has, and of the gap between two texts."""
NUMBER = 1
"""The id of numbers that no benchmark has, and of any number where numbers don't count."""
_LAYOUT = -1

_NUMBER = r"\d+(?:(?:,\\!|\{,\}|,)\d{3}(?!\d))*"
_LATEX = r"\\(?:begin|end)\s*\{[a-z]*\*?\}|\\[a-z]+|\[asy\](?:[^\[]|\[(?!/?asy\]))*\[/asy\]"
_ASCII_TOKEN = re.compile(rf"[a-z]+|{_NUMBER}|{_LATEX}", re.DOTALL)
_CHARACTER = r"\u3040-\u30ff\u3400-\u9fff"
_TOKEN = re.compile(rf"[^\W\d_{_CHARACTER}]+|{_NUMBER}|{_LATEX}|[{_CHARACTER}]", re.DOTALL)
"""Scripts without spaces have a word for each character."""
_LAYOUT_COMMANDS = frozenset(
    "left right big bigg displaystyle textstyle limits quad qquad text textbf textit textrm mathrm mathbf "
    "mathit mathsf mathcal mathbb mbox hbox operatorname emph underline boxed frac dfrac tfrac cfrac cdot "
    "times div circ degree le leq leqslant ge geq geqslant ne neq pm mp ldots cdots dots to rightarrow "
    "longrightarrow hspace vspace phantom hfill noindent item label tag overline lfloor rfloor lceil "
    "rceil langle rangle lvert rvert mid".split()
)
"""What draws a sign, sets a font or moves something; its argument stays."""


def split_words(text: str) -> list[str]:
    """The words of a text, in order."""
    return [word for word, _, _ in _words(fold(text))]


def word_spans(text: str) -> tuple[list[str], list[tuple[int, int]]]:
    """The words of a text, and where each stands in `display_form(text)`: `[start, end)` in characters."""
    shown = display_form(text)
    folded = shown.casefold()
    found = list(_words(folded))
    if len(folded) != len(shown):
        origin = [index for index, char in enumerate(shown) for _ in char.casefold()]
        found = [(word, origin[start], origin[end - 1] + 1) for word, start, end in found]
    return [word for word, _, _ in found], [(start, end) for _, start, end in found]


def display_form(text: str) -> str:
    """The text in which `word_spans` counts characters."""
    return text if text.isascii() else unicodedata.normalize("NFKC", text)


def fold(text: str) -> str:
    """The form in which words are looked for."""
    return display_form(text).casefold()


def _words(folded: str) -> Iterable[tuple[str, int, int]]:
    for match in _pattern(folded).finditer(folded):
        word = _canonical(match[0])
        if word:
            yield word, match.start(), match.end()


def _pattern(folded: str) -> re.Pattern[str]:
    return _ASCII_TOKEN if folded.isascii() else _TOKEN


def _canonical(token: str) -> str:
    """The word that a token of `_TOKEN` stands for; nothing for layout."""
    first = token[0]
    if first == "\\":
        name = token[1:]
        return "" if name in _LAYOUT_COMMANDS or not name.isalpha() else name
    if first == "[":
        return ""
    return "".join(filter(str.isdigit, token)) if first.isdigit() else token


class Vocabulary(dict[str, int]):
    """Ids of the benchmarks' words, from 2; looked up by tokens as they stand in a text.

    A plain look-up finds words; other tokens take the slower way through `__missing__`.
    """

    def __init__(self, texts: Iterable[Iterable[str]]) -> None:
        """Of texts that are split into words."""
        super().__init__()
        for words in texts:
            for word in words:
                if word not in self:
                    dict.__setitem__(self, word, len(self) + 2)

    def __missing__(self, token: str) -> int:
        if token.isalpha():
            return UNKNOWN
        word = _canonical(token)
        if not word:
            return _LAYOUT
        found = self.get(word)
        if found is not None:
            return found
        return NUMBER if word.isdigit() else UNKNOWN

    def numbers(self) -> np.ndarray:
        """`(ids,)` bool: which ids are numbers."""
        is_number = np.zeros(len(self) + 2, dtype=bool)
        is_number[NUMBER] = True
        for word, number in self.items():
            is_number[number] = word.isdigit()
        return is_number

    def long_words(self) -> np.ndarray:
        """`(ids,)` bool: which ids are words of several letters; scripts without spaces need one."""
        is_long = np.zeros(len(self) + 2, dtype=bool)
        for word, number in self.items():
            is_long[number] = not word.isdigit() and (len(word) > 1 or not word.isascii())
        return is_long

    def ids(self, words: Iterable[str]) -> np.ndarray:
        """`(words,)` int32: of words that are split already."""
        return np.array([self[word] for word in words], dtype=np.int32)

    def encode(self, texts: Iterable[str]) -> tuple[np.ndarray, np.ndarray]:
        """Split many texts.

        Returns:
            `(words,)` int32 ids of all texts' words, one `UNKNOWN` after each text, and `(texts + 1,)` int64 where each
            begins.
        """
        ids: list[int] = []
        starts = [0]
        look_up = self.__getitem__
        for text in texts:
            folded = fold(text)
            ids.extend(map(look_up, _pattern(folded).findall(folded)))
            ids.append(UNKNOWN)
            starts.append(len(ids))
        found = np.array(ids, dtype=np.int32)
        is_word = found != _LAYOUT
        before = np.concatenate([[0], np.cumsum(is_word)])
        return found[is_word], before[np.array(starts)]
