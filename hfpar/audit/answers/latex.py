"""What an answer's notation has that its value hasn't: dollar signs, spacing, fonts, units' words; and its tokens."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import Literal

MAX_LENGTH = 400
"""Characters of the longest answer that is read as mathematics; longer ones are texts."""
WRAPPERS = "text|textbf|textit|textrm|textsf|texttt|textnormal|mbox|hbox|emph"

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_SYMBOLS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∗": "*",
    "÷": "/", "⁄": "/", "∕": "/", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∓": r"\mp ", "°": r"^\circ ", "∅": r"\emptyset ",
    "√": r"\sqrt ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "φ": r"\phi ", "∠": r"\angle ",
    "⟨": r"\langle ", "⟩": r"\rangle ",
    "‘": "'", "’": "'", "“": '"', "”": '"', "£": "", "€": "", "¥": "", "\u200b": "", "\ufeff": "",
}  # fmt: skip
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_NOISE = re.compile(
    r"\\(?:left|right|displaystyle|textstyle|limits|[bB]igg?[lrm]?|quad|qquad|boldsymbol|mathbf|mathrm|mathit|mathsf"
    r"|mathcal|mathbb|bf|rm|it|phantom|hspace\s*\{[^{}]*\}|nonumber|degrees?(?=\s*$))(?![A-Za-z])"
)
_THIN_THOUSANDS = re.compile(r"(?<=\d)\s*(?:,\s*\\!|\{,\}|,\{\}|\\,|\\!)\s*(?=\d{3}(?!\d))")
_COMMA_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_SPACES = re.compile(r"(?<!\\)\\[,;:!>\s]|~|\s+")


def unify(text: str) -> str:
    """Unicode's ways of writing what ASCII and LaTeX can: digits, minus signs, superscripts, fractions, symbols."""
    if text.isascii():
        return text
    text = re.sub("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+", lambda found: "^{" + found[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub("[₀-₉]+", lambda found: "_{" + found[0].translate(_SUBSCRIPTS) + "}", text)
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found[0]), text)
    text = "".join(_SYMBOLS.get(char, char) for char in text)
    text = "".join(_SYMBOLS.get(char, char) for char in unicodedata.normalize("NFKC", text))
    # Digits of other scripts are digits; others of Unicode's numbers aren't.
    return "".join(str(unicodedata.decimal(char)) if char.isdecimal() else char for char in text)


def clean(text: str) -> str:
    r"""The answer without dollars, fonts, spacing and a final period; words keep their `\text{}`."""
    if len(text) > 50 * MAX_LENGTH:
        return " ".join(text.split())
    text = unify(text).strip()
    text = re.sub(r"\\\$|(?<!\\)\$|\\[()\[\]](?![A-Za-z])", "", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(rf"\\(?:{WRAPPERS})\s*(?=\{{)", r"\\text", text)
    text = re.sub(r"\\(?:mathrm|operatorname\*?)\s*(?=\{(?:[^{}]{2,}|[msghlLNJWVK])\})", r"\\text", text)
    text = _THIN_THOUSANDS.sub("", text)
    text = _SPACES.sub(" ", _NOISE.sub(" ", text))
    text = re.sub(r"\^\s*(?:\\circ|\{\s*\\circ\s*\}|\\degree)(?![A-Za-z])|\\degree(?![A-Za-z])", " ", text)
    return re.sub(" +", " ", text).strip("*` ").rstrip(".,;:*` ")


def strip_words_wrapper(text: str) -> str:
    r"""The content of a `\text{}` around all of it."""
    while found := re.fullmatch(r"\\text\{([^{}]*)\}|\{([^{}]*)\}", text):
        text = (found[1] if found[1] is not None else found[2]).strip().rstrip(".").strip()
    return text


def join_thousands(text: str) -> str:
    """Commas between groups of three digits left out, save within brackets, where they separate."""
    if "," not in text:
        return text
    depth, pieces, last = 0, [], 0
    marks = re.finditer(r"[(\[{)\]}]", text)
    for found in marks:
        if depth == 0:
            pieces.append(
                _COMMA_THOUSANDS.sub(lambda group: group[0].replace(",", ""), text[last : found.start()])
            )
        else:
            pieces.append(text[last : found.start()])
        pieces.append(found[0])
        last = found.end()
        depth = max(0, depth + (1 if found[0] in "([{" else -1))
    rest = text[last:]
    pieces.append(rest if depth else _COMMA_THOUSANDS.sub(lambda group: group[0].replace(",", ""), rest))
    return "".join(pieces)


def text_key(cleaned: str) -> str:
    r"""What two texts have in common that say the same: white space, `\text{}` and the case of words don't count."""
    text = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", cleaned)
    text = re.sub(r"(?<![0-9A-Za-z])\s+|\s+(?![0-9A-Za-z])", "", text).strip(" .")
    is_words = "\\" not in text and re.search("[A-Za-z]{3}", text) and not re.search("[0-9]", text)
    return text.casefold() if is_words else text


def as_latex(text: str) -> str:
    """Plain functions' names as commands, for others' readers."""
    for _ in range(4):  # one in another
        text = re.sub(r"(?<![A-Za-z])\\?sqrt ?\(([^()]*)\)", r"\\sqrt{\1}", text)
    names = "|".join(sorted(_PLAIN_COMMANDS, key=len, reverse=True))
    return re.sub(rf"(?<![\\A-Za-z])({names})(?![A-Za-z])", r"\\\1 ", text)


# Tokens

TokenKind = Literal["number", "command", "letter", "name", "words", "mark", "end"]


@dataclass
class Token:
    """A piece of notation, and where it is."""

    kind: TokenKind
    text: str
    start: int
    end: int


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?(?:[eE][+-]\d{2,3}(?!\d))?|\.\d+)|\\text\s*\{(?P<words>[^{}]*)\}"
    r"|(?P<command>\\[A-Za-z]+|\\.)|(?P<run>[A-Za-z]+)|(?P<mark>.))"
)
FUNCTIONS = frozenset(
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln exp max min gcd lcm".split()
)
_PLAIN_COMMANDS = FUNCTIONS | {"pi", "infty", "sqrt"}
_SHORT_WORDS = frozenset(
    "cm mm km kg mg ml mL ft in hr hrs am pm oz lb lbs mi yd min sec mph or no on of is".split()
)
_PRODUCTS = re.compile("[abcxyz]{2,4}")


def tokenize(text: str) -> list[Token]:
    """The tokens of a cleaned text, an `end` last."""
    tokens: list[Token] = []
    position, end = 0, len(text.rstrip())
    while position < end:
        found = _TOKEN.match(text, position)
        assert found is not None
        kind = found.lastgroup
        assert kind is not None
        start, position = found.start(kind), found.end()
        value = found[kind]
        if kind == "run":
            tokens += _letters(value, start)
        else:
            tokens.append(Token(kind, value, start, position))  # type: ignore[arg-type]
    tokens.append(Token("end", "", end, end))
    return tokens


def _letters(run: str, start: int) -> list[Token]:
    """Letters side by side: a function, a name (AB), words, or a product."""
    end = start + len(run)
    if run in _PLAIN_COMMANDS:
        return [Token("command", f"\\{run}", start, end)]
    if run.lower() in ("infinity", "inf"):
        return [Token("command", "\\infty", start, end)]
    if len(run) == 1:
        return [Token("letter", run, start, end)]
    if run.isupper():
        return [Token("name", run, start, end)]
    if run in _SHORT_WORDS or (len(run) >= 3 and not _PRODUCTS.fullmatch(run)):
        return [Token("words", run, start, end)]
    return [Token("letter", char, start + i, start + i + 1) for i, char in enumerate(run)]
