"""Finding the answer in what a model wrote, before it went on to a problem of its own making."""

from __future__ import annotations

import re
from collections import deque

from hfpar.audit.answers.latex import unify

# A label of a new problem, or a turn of a conversation that the model made up. Always an end.
_NEW_PROBLEM = re.compile(
    r"(?:^|\n)[ \t>#*_\-]*(?:"
    r"(?:question|problem|exercise|example|Q)[ \t]*(?:(?:no\.?[ \t]*|\#[ \t]*)?\d{1,4}[ \t]*)?"
    r"(?:[*_]{0,3}[ \t]*[:.)][*_]{0,3}|[*_]{0,3}(?=[ \t]*(?:\n|$)))"
    r"|(?:user|human|input|instruction|\[problem\])[ \t]*:)"
    r"|<\|[a-z_]{2,30}\|>|</s>|<eos>|<end_of_turn>|\[INST\]|I hope (?:it|this) is correct",
    re.IGNORECASE,
)
# How a problem or another worked solution opens without a label. An end where an answer stands before it.
_UNLABELLED = re.compile(
    r"\n[ \t#*]*solution[ \t\d]*[*_]*[:.]|\n[ \t]*(?:-{3,}|={3,}|\*{3,})[ \t]*\n"
    r"|\n[ \t]*\n[ \t]*(?:find the|find all|what is the|what are the|how many|evaluate|simplify"
    r"|determine the|compute the)\b",
    re.IGNORECASE,
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?![A-Za-z])\s*")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE_BOX = re.compile(r"(-?\\?[A-Za-z0-9.]+)")
_ANSWER_IS = re.compile(
    r"(?:answer|result)(?:\s+to\s+[^\n.:]{0,60})?[*_]*\s*(?:is|are|was|:|=|would\s+be|must\s+be)[*_]*"
    r"(?:\s+(?:equal\s+to|simply|therefore|thus))?(?:\s*:)?[*_]*\s*",
    re.IGNORECASE,
)
_NUMBERS = re.compile(
    # A minus sign between two operands is none of the number's.
    r"(?P<sign>(?<![\w)\]}%.\-])[-+])?(?:\$\s?(?P<minus>-?))?"
    r"(?P<whole>\d{1,9} (?=\d{1,9}/\d))?"
    r"(?P<number>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|(?<!\d)\.\d+)(?P<below>/\d+(?![\d,/]|\.\d))?"
)
_FRACTIONS = re.compile(r"\\[dt]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_LETTER_AFTER = re.compile(
    r"[\s*$_]*(?:(?:option|choice)\s+)?\\?\(?\s*(?:\\(?:text|textbf|mathrm)\s*\{\s*)?\(?([A-Ja-j])(?![A-Za-z'])"
)
_LONE_LETTER = re.compile(r"\s*[*_]*\(?([A-J])(?:[).:*]|\s*(?:\n|$))")
_MARKED_LETTER = re.compile(r"\(([A-J])\)")


def own_answer(text: str) -> str:
    """What the model wrote before it started a new problem."""
    start = len(text) - len(text.lstrip())
    found = next((match for match in _NEW_PROBLEM.finditer(text) if match.start() > start), None)
    return text[: found.start()] if found else text


def extract_number(text: str) -> str | None:
    """The number behind the first `####`, else the last number, of the model's own answer; None: it wrote none."""
    text = _FRACTIONS.sub(
        r"\1/\2", unify(own_answer(text)).replace("\\$", "$").replace("{,}", ",").replace(",\\!", ",")
    )
    for marked in re.finditer(r"####+([^\n]*)", text):
        line = re.sub(
            r"(?i)\\boxed|\b(?:the )?(?:final )?answer(?: is)?:?|[*{}\\()]|~|≈", " ", marked[1][:200]
        ).strip()
        if re.match(r"\d+\s*[.):]\s+[A-Za-z]", line):
            continue  # a heading
        line = re.sub(r"^([-+])\s+", r"\1", line.lstrip("=:€£ "))
        if number := _NUMBERS.match(line):
            return _plain(number)
    last = deque(_NUMBERS.finditer(text), maxlen=1)
    return _plain(last[0]) if last else None


def _plain(found: re.Match[str]) -> str:
    sign = "-" if "-" in (found["sign"] or "") or found["minus"] else ""
    return sign + (found["whole"] or "") + found["number"].replace(",", "") + (found["below"] or "")


def extract_math(text: str) -> str | None:
    r"""What stands in the last matched `\boxed{}` of the model's own answer, else behind "the answer is"."""
    text = own_answer(text)
    boxes = _boxes(text)
    if boxes:
        first_end = boxes[0][1]
        unlabelled = _UNLABELLED.search(text, first_end)
        if unlabelled:
            boxes = [box for box in boxes if box[0] < unlabelled.start()]
        return boxes[-1][2].strip() or None
    if _BOX.search(text):
        return None  # it began a box and never finished
    stated = _stated(text)
    if stated is None and (marked := re.search(r"####[ \t]*([^\n#]+)", text)):
        stated = marked[1].strip() or None
    return stated


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """Every box: where it starts and ends, and what it holds."""
    starts = [(found.start(), found.end()) for found in _BOX.finditer(text)]
    if not starts:
        return []
    closed: dict[int, int] = {}
    stack: list[int] = []
    for found in _BRACES.finditer(text, starts[0][0]):
        if found[0] == "{":
            stack.append(found.start())
        elif found[0] == "}" and stack:
            closed[stack.pop()] = found.start()
    boxes = []
    for start, end in starts:
        if text[end : end + 1] == "{":
            if end in closed:
                boxes.append((start, closed[end], text[end + 1 : closed[end]]))
        elif bare := _BARE_BOX.match(text, end):
            boxes.append((start, bare.end(), bare[1]))
    return boxes


def _stated(text: str) -> str | None:
    """What the last "the answer is" says."""
    for found in reversed(list(_ANSWER_IS.finditer(text))):
        rest = text[found.end() : found.end() + 2000]
        quoted = re.match(
            r"[*_]*(?:\$\$(.+?)\$\$|\$(.+?)(?<!\\)\$|\\\((.+?)\\\)|\\\[(.+?)\\\])", rest, re.DOTALL
        )
        stated = (
            next(group for group in quoted.groups() if group)
            if quoted
            else re.split(r"\n|[.;!?](?:\s|$)|, (?:which|so|because|since)\b", rest, maxsplit=1)[0]
        )
        stated = stated.strip().strip("*_\"'`").strip()
        if stated:
            return stated
    return None


def extract_choice(text: str) -> str | None:
    """The letter that the model chose, A to J."""
    text = own_answer(text)
    boxes = _boxes(text)
    if boxes and (found := _LETTER_AFTER.match(boxes[-1][2])):
        return found[1].upper()
    for stated in reversed(list(_ANSWER_IS.finditer(text))):
        if found := _LETTER_AFTER.match(text, stated.end()):
            return found[1].upper()
    if found := _LONE_LETTER.match(text):
        return found[1]
    letters = _MARKED_LETTER.findall(text)
    return letters[-1] if letters else None


def extract_text(text: str) -> str | None:
    """What is boxed, or stated as the answer, else the first line."""
    text = own_answer(text)
    boxes = _boxes(text)
    if boxes:
        return boxes[-1][2].strip() or None
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return _stated(text) or (lines[0] if lines else None)
