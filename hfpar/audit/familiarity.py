"""Weaker signs of exposure: log-probabilities against controls, and answers that belong to another question."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

from hfpar.audit.results import Intrusion, ItemResult, ScoreComparison
from hfpar.audit.statistics import auc, mcnemar
from hfpar.audit.summarize import SetInfo

LEAST_SCORES = 20
"""Items of either group, for an AUC."""


def compare_scores(
    sets: Sequence[SetInfo], items: Mapping[str, Sequence[ItemResult]]
) -> list[ScoreComparison]:
    """The AUC of every log-probability method, for each benchmark and control; small sets are left out.

    Above 0.5 the benchmark's items are the more familiar ones. That they have been seen is one explanation; that the
    control's texts are of another kind is another.
    """
    found = []
    for benchmark in (info for info in sets if info.role == "benchmark"):
        for control in (
            info for info in sets if info.role == "control" and benchmark.name in info.applies_to
        ):
            for method in methods_of(items[benchmark.name]):
                ours, theirs = (
                    [item.logprobs[method] for item in items[name] if method in item.logprobs]
                    for name in (benchmark.name, control.name)
                )
                if min(len(ours), len(theirs)) >= LEAST_SCORES:
                    value, low, high = auc(ours, theirs)
                    found.append(ScoreComparison(benchmark.name, control.name, method, value, low, high))
    return found


def methods_of(items: Sequence[ItemResult]) -> list[str]:
    """Names of the scores that any of the items has, in the order in which they come."""
    return list(dict.fromkeys(method for item in items for method in item.logprobs))


def find_intrusion(
    benchmark: str,
    control: str,
    items: Sequence[ItemResult],
    control_items: Sequence[ItemResult],
    answers: Mapping[str, str | None],
    control_answers: Mapping[str, str | None],
    equal: Callable[[str, str], bool],
) -> Intrusion | None:
    """Whether perturbed questions are given the answers of their originals.

    A model that is merely confused gives the perturbed copy's answer to the original as often as the other way round;
    one that knows the original's answer by heart doesn't. Each original counts once, with one of its copies chosen by a
    hash, because McNemar's test needs independent pairs.

    Args:
        benchmark: Name of the originals' set.
        control: Name of the copies' set.
        items: Originals.
        control_items: Copies; `pair_id` says of what.
        answers: Right answers of the originals by `item_id`.
        control_answers: Right answers of the copies by `item_id`.
        equal: Whether two answers are the same.

    Returns:
        None where no pair with different right answers was asked both questions.
    """
    asked = {item.item_id: item for item in items if item.own_answer_right is not None}
    chosen: dict[str, ItemResult] = {}
    for copy in sorted(control_items, key=lambda item: hashlib.sha256(item.item_id.encode()).digest()):
        if copy.pair_id is None or copy.pair_id not in asked or copy.own_answer_right is None:
            continue
        if copy.pair_set not in (None, benchmark):  # another benchmark's item with the same id
            continue
        first, second = answers.get(copy.pair_id), control_answers.get(copy.item_id)
        if first is not None and second is not None and not equal(first, second):
            chosen.setdefault(copy.pair_id, copy)
    if not chosen:
        return None
    pairs = [(asked[name], copy) for name, copy in chosen.items()]
    right = [(bool(original.own_answer_right), bool(copy.own_answer_right)) for original, copy in pairs]
    given = [
        (
            _gives(copy, answers[original.item_id], equal),
            _gives(original, control_answers[copy.item_id], equal),
        )
        for original, copy in pairs
    ]
    return Intrusion(
        benchmark=benchmark,
        control=control,
        num_pairs=len(pairs),
        original_right=sum(first for first, _ in right),
        perturbed_right=sum(second for _, second in right),
        p_accuracy=mcnemar(*_only(right), "two-sided"),
        original_answer_given=sum(first for first, _ in given),
        perturbed_answer_given=sum(second for _, second in given),
        p_intrusion=mcnemar(*_only(given), "greater"),
    )


def _gives(item: ItemResult, answer: str | None, equal: Callable[[str, str], bool]) -> bool:
    return item.own_answer is not None and answer is not None and equal(answer, item.own_answer)


def _only(pairs: Sequence[tuple[bool, bool]]) -> tuple[int, int]:
    """How many pairs only the first holds of, and only the second."""
    return sum(first and not second for first, second in pairs), sum(
        second and not first for first, second in pairs
    )
