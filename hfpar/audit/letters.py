"""Other letters for the variables and points of a problem in LaTeX, each everywhere the same."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

_MATH = re.compile(
    r"\$\$.*?\$\$|(?<!\\)\$.*?(?<!\\)\$|\\\[.*?\\\]|\\\(.*?\\\)|\\begin\{(?:align|equation|gather|cases)\*?\}.*?\\end",
    re.DOTALL,
)
_NO_LETTERS = re.compile(
    r"\\(?:text|mathrm|textbf|textit|mbox|operatorname|emph|begin|end)\*?\{[^{}]*\}(?:\{[clr|]+\})?|\\[A-Za-z]+"
)
_RUN = re.compile(r"[A-Za-z]+")
_UNITS = frozenset("cm mm km kg ml dx dy dt lb ft mi".split())
_FAMILIES = ("xyztuvw", "abcpqrs", "mnkjhl", "fgh", "ABCDEFGH", "MNPQRSTUVWXYZKL")
"""Without d (differentials), e, i, and what reads as 0 and 1."""
_CHANGEABLE = frozenset("".join(_FAMILIES))
_SEQUENCES = {
    "xyztuvw": ("uvw", "tuv", "yzw", "pqr", "zwt", "stu"),
    "abcpqrs": ("pqr", "bcd", "rst", "uvw", "hkl", "mnp"),
    "mnkjhl": ("kmn", "jkl", "npq", "hkm", "rst"),
    "fgh": ("gh", "hk", "pq"),
    "ABCDEFGH": ("PQRSTUVW", "WXYZ", "KLMN", "STUVWXYZ", "BCDEFGHJ"),
    "MNPQRSTUVWXYZKL": ("ABCDEFGH", "KLMN", "EFGH", "CDEFGH"),
}


def find_letters(text: str) -> Iterator[tuple[int, int]]:
    """Places of letters that could be others; none where a drawing or a set form of equation names them, too."""
    if "[asy]" in text or re.search(r"m ?x ?\+ ?[bc]\b", text):
        return
    outside = _MATH.sub(" ", text)
    named_outside = set("".join(re.findall(r"\b[A-Z]{1,4}\b", outside))) - {"A", "I"}
    named_outside |= set(re.findall(r"(?<=[a-z,] )A\b", outside))  # within a sentence it's no article
    for region in _MATH.finditer(text):
        blank = _NO_LETTERS.sub(lambda match: " " * len(match[0]), region[0])
        for run in _RUN.finditer(blank):
            word = run[0]
            if word in _UNITS or (len(word) > 2 and not word.isupper()):
                continue
            for place, letter in enumerate(word, region.start() + run.start()):
                if letter in _CHANGEABLE and letter not in named_outside:
                    yield place, place + 1


def new_letters(letters: set[str], taken: set[str], rng: random.Random) -> dict[str, str]:
    """Other letters of the same kind, in the same order.

    Args:
        letters: To be replaced.
        taken: Other letters of the text.
        rng: Chooses among what's usual.
    """
    chosen: dict[str, str] = {}
    for family in _FAMILIES:
        members = sorted((letters & set(family)) - set(chosen), key=family.index)
        if not members:
            continue
        used = taken | (letters - set(members)) | set(chosen.values())
        free = [
            sequence[: len(members)]
            for sequence in _SEQUENCES[family]
            if len(sequence) >= len(members)
            and not set(sequence[: len(members)]) & used
            and not any(new == old for new, old in zip(sequence, members, strict=False))
        ]
        if free:
            chosen.update(zip(members, rng.choice(free[:3]), strict=True))
    return chosen
