"""Answers that a model reached from a part of a question, and to whole questions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from hfpar.audit.answers import answers_equal, extract_answer, gold_answer
from hfpar.audit.probe import PlannedItem
from hfpar.audit.results import CutResult, ItemResult
from hfpar.audit.summarize import grade
from hfpar.data.benchmarks import AnswerKind

NEXT_QUESTION = "\nQuestion:"
"""With this a model that goes on begins a question of its own."""


def question_prompt(question: str) -> str:
    """What a base model is given to answer."""
    return f"Question: {question}\nAnswer:"


def is_answered(text: str) -> bool:
    """Whether the model has gone on to another question."""
    return NEXT_QUESTION in text


def judge_answers(
    results: Sequence[ItemResult], planned: Sequence[PlannedItem], kinds: Callable[[str], AnswerKind]
) -> list[ItemResult]:
    """Results with their answers judged where whole continuations were written, and with grades.

    Args:
        results: of the items, in their order.
        planned: the items.
        kinds: how answers of a set are read.
    """
    return [_judge(result, item, kinds(item.set)) for result, item in zip(results, planned, strict=True)]


def _judge(result: ItemResult, planned: PlannedItem, kind: AnswerKind) -> ItemResult:
    gold = gold_answer(planned.item, kind)
    if gold is None:
        return replace(result, grade=grade(result))
    judged = replace(result, cuts=[_judge_cut(cut, gold, kind) for cut in result.cuts])
    return replace(judged, grade=grade(judged))


def _judge_cut(cut: CutResult, gold: str, kind: AnswerKind) -> CutResult:
    if not cut.is_complete or cut.written is None:
        return cut
    answer = extract_answer(cut.written, kind)
    right = answer is not None and answers_equal(gold, answer, kind)
    return replace(cut, answer=answer, answer_right=right)


def with_own_answer(result: ItemResult, planned: PlannedItem, written: str, kind: AnswerKind) -> ItemResult:
    """A result with what the model answered to the whole question."""
    gold = gold_answer(planned.item, kind)
    assert gold is not None
    answer = extract_answer(written.partition(NEXT_QUESTION)[0], kind)
    right = answer is not None and answers_equal(gold, answer, kind)
    return replace(result, own_answer=answer, own_answer_right=right)
