"""One set's items in figures: a benchmark's or a control's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from hfpar.audit.results import CutResult, CutSummary, Estimate, Grade, ItemResult, Mode, Role, SetSummary
from hfpar.audit.statistics import mean, share
from hfpar.audit.text import count_words, normalize

Kind = Literal["benchmark", "perturbed", "random_calculation", "file"]
A_RATIO, B_RATIO = 0.4, 0.6
A_WORDS = 15
B_RUN = 20
"""Tokens."""
B_RUN_WORDS = 12
"""Fewer words make no run of 20 tokens evidence: a drawing's code and lists of numbers have many tokens a word."""


@dataclass(frozen=True)
class SetInfo:
    """What a set is, beside its items."""

    name: str
    role: Role
    kind: Kind
    source: str
    sha256: str
    num_duplicates: int = 0
    applies_to: tuple[str, ...] = ()
    """Of a control: the benchmarks it is held against."""


def is_hit(cut: CutResult) -> bool:
    """Whether the tail was completed; white space and the kind of quotes make no difference."""
    return cut.skipped is None and (cut.exact or cut.exact_normalized)


def grade(item: ItemResult) -> Grade | None:
    """How strong the evidence is that the model has seen this item.

    A: from 40 % of the text or less, a tail of 15 words or more is completed. B: from 60 % or less the tail is, or 20
    tokens of running text in a row are each the model's first choice. C: from a prefix the right answer is reached
    without completing the problem; a guess does that, too.
    """
    found = _evidence_but_runs(item) or ("B" if _has_long_run(item) else None)
    return found or ("C" if _is_answered(item) else None)


def _evidence_but_runs(item: ItemResult) -> Grade | None:
    hits = [cut for cut in item.cuts if is_hit(cut)]
    if any(cut.ratio <= A_RATIO + 1e-9 and cut.tail_words >= A_WORDS for cut in hits):
        return "A"
    return "B" if any(cut.ratio <= B_RATIO + 1e-9 for cut in hits) else None


def _is_answered(item: ItemResult) -> bool:
    return any(cut.answer_right for cut in item.cuts if cut.skipped is None and not is_hit(cut))


def _has_long_run(item: ItemResult) -> bool:
    if item.longest_run < B_RUN:
        return False
    start, end = item.longest_run_span
    run = item.text[start:end]
    return "[asy]" not in item.text[:end] and count_words(run) >= B_RUN_WORDS


def without_shared_runs(items: Sequence[ItemResult]) -> list[ItemResult]:
    """One set's items, graded again where grade B rests on a run of words that another item has, too.

    Benchmarks have items that begin or end alike. A model that has seen one of them is at home in the other, so that a
    stretch of 12 words or more that both have tells nothing of either; what else there is of the run must be long
    enough. Copies of the same original don't count as others.
    """
    doubtful = [item for item in items if item.grade == "B" and _evidence_but_runs(item) is None]
    if not doubtful:
        return list(items)
    owners: dict[tuple[str, ...], set[str]] = {}
    for item in items:
        for words in _stretches(normalize(item.text).split()):
            owners.setdefault(words, set()).add(item.pair_id or item.item_id)
    weak = {item.item_id for item in doubtful if _is_shared(item, owners)}
    return [
        replace(item, grade="C" if _is_answered(item) else None) if item.item_id in weak else item
        for item in items
    ]


def _stretches(words: Sequence[str]) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + B_RUN_WORDS]) for start in range(len(words) - B_RUN_WORDS + 1)]


def _is_shared(item: ItemResult, owners: Mapping[tuple[str, ...], set[str]]) -> bool:
    """Whether too little of the run is left without the stretches that are another item's, too."""
    start, end = item.longest_run_span
    words = normalize(item.text[start:end]).split()
    shared: set[int] = set()
    for first, stretch in enumerate(_stretches(words)):
        if owners.get(stretch, set()) - {item.pair_id or item.item_id}:
            shared.update(range(first, first + B_RUN_WORDS))
    return bool(shared) and len(words) - len(shared) < B_RUN_WORDS


def cuts_of(items: Iterable[ItemResult]) -> list[tuple[float, Mode]]:
    """Every ratio and mode that was tried, bare ones first, from small to large."""
    found = {(cut.mode, cut.ratio) for item in items for cut in item.cuts}
    return [(ratio, mode) for mode, ratio in sorted(found)]


def cut_at(item: ItemResult, ratio: float, mode: Mode) -> CutResult | None:
    """What was found at one cut, skipped or not."""
    return next((cut for cut in item.cuts if cut.ratio == ratio and cut.mode == mode), None)


def summarize_set(info: SetInfo, items: Sequence[ItemResult], seed: int = 0) -> SetSummary:
    """One set's figures, each with its 95 % interval."""
    runs = [item.longest_run for item in items]
    losses = [-item.logprobs["loss"] for item in items if "loss" in item.logprobs]
    answered = [item for item in items if item.own_answer_right is not None]
    grades = Counter(item.grade for item in items if item.grade is not None)
    return SetSummary(
        name=info.name,
        role=info.role,
        kind=info.kind,
        applies_to=list(info.applies_to),
        source=info.source,
        sha256=info.sha256,
        num_items=len(items),
        num_duplicates=info.num_duplicates,
        cuts=[_summarize_cut(items, ratio, mode, seed) for ratio, mode in cuts_of(items)],
        longest_run=mean(runs, seed),
        longest_run_quantiles={
            str(part): float(np.quantile(runs, part, method="inverted_cdf")) if runs else 0.0
            for part in (0.5, 0.95, 1)
        },
        loss=mean(losses, seed),
        own_answer=share(sum(bool(item.own_answer_right) for item in answered), len(answered))
        if answered
        else None,
        grades={name: grades[name] for name in ("A", "B", "C")},
    )


def _summarize_cut(items: Sequence[ItemResult], ratio: float, mode: Mode, seed: int) -> CutSummary:
    cuts = [cut for item in items if (cut := cut_at(item, ratio, mode)) is not None]
    probed = [cut for cut in cuts if cut.skipped is None]
    answered = [cut for cut in probed if cut.answer_right is not None]
    return CutSummary(
        ratio=ratio,
        mode=mode,
        exact=share(sum(cut.exact for cut in probed), len(probed)),
        exact_normalized=share(sum(is_hit(cut) for cut in probed), len(probed)),
        matched_tokens=mean([cut.matched_tokens for cut in probed], seed),
        rouge_l=_mean_of([cut.rouge_l for cut in probed], seed),
        edit_similarity=_mean_of([cut.edit_similarity for cut in probed], seed),
        answer=share(sum(bool(cut.answer_right) for cut in answered), len(answered)) if answered else None,
        skipped=dict(Counter(cut.skipped for cut in cuts if cut.skipped is not None)),
        num_near_ties=sum(cut.near_tie for cut in probed),
        num_settled_by_generation=sum(cut.settled_by == "generation" for cut in probed),
    )


def _mean_of(values: Sequence[float | None], seed: int) -> Estimate | None:
    found = [value for value in values if value is not None]
    return mean(found, seed) if found else None
