"""Whether what a model wrote gives the right answer: the four questions that an audit asks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hfpar.audit.answers.equality import math_equal, numbers_equal
from hfpar.audit.answers.extract import extract_choice, extract_math, extract_number, extract_text
from hfpar.audit.answers.symbolic import shared_worker
from hfpar.audit.text import normalize

if TYPE_CHECKING:
    from hfpar.data.benchmarks import AnswerKind, BenchmarkItem


def gold_answer(item: BenchmarkItem, kind: AnswerKind) -> str | None:
    """The answer that an item of a benchmark should be given.

    Args:
        item: with its answer field as the file has it.
        kind: how answers are read. For `gsm8k` a worked answer that ends in `#### N` or a number alone.

    Returns:
        None where there is none, or it isn't of that kind (a problem marked as unanswerable).
    """
    if item.answer is None or kind == "none":
        return None
    answer = item.answer.strip()
    if kind == "gsm8k":
        return extract_number("#### " + answer.rpartition("####")[2].strip())
    if kind == "choice":
        return extract_choice(answer)
    return answer or None


def extract_answer(text: str, kind: AnswerKind) -> str | None:
    """The answer in what a model wrote, before it started a new problem; None where it gave none."""
    extract: dict[str, Callable[[str], str | None]] = {
        "math": extract_math,
        "gsm8k": extract_number,
        "choice": extract_choice,
        "exact": extract_text,
    }
    return extract[kind](text) if kind in extract else None


def answers_equal(gold: str, answer: str, kind: AnswerKind, symbolic: bool = True) -> bool:
    """Whether two answers are the same.

    Args:
        gold: the right answer.
        answer: the one to judge, extracted.
        kind: how answers are read.
        symbolic: ask math-verify, where it is installed, about expressions that hfpar's own rules can't decide.

    Returns:
        False also where it couldn't be decided.
    """
    if kind == "math":
        return math_equal(gold, answer, shared_worker().equal if symbolic else None)
    if kind == "gsm8k":
        return numbers_equal(gold, answer)
    if kind == "choice":
        return bool(gold) and gold.strip("() ").upper() == answer.strip("() ").upper()
    if kind == "exact":
        left, right = (normalize(text).rstrip(". ") for text in (gold, answer))
        return bool(left) and left == right
    return False


def is_right(gold: str, text: str, kind: AnswerKind, symbolic: bool = True) -> bool:
    """Whether what a model wrote gives the right answer."""
    answer = extract_answer(text, kind)
    return answer is not None and answers_equal(gold, answer, kind, symbolic)
