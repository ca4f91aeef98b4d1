"""Audits of several checkpoints beside each other: what was learnt by heart between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hfpar.audit.results import Estimate, ItemResult, Mode
from hfpar.audit.statistics import holm, mcnemar, mean, newcombe_paired, share
from hfpar.audit.summarize import cut_at, cuts_of, is_hit
from hfpar.errors import DataError

Audits = Mapping[str, Mapping[str, Sequence[ItemResult]]]
"""By a checkpoint's label, then by a set's name."""


@dataclass(frozen=True)
class PairedRate:
    """Exact completions of one set by two checkpoints, at one ratio."""

    set: str
    ratio: float
    mode: Mode
    first: str
    second: str
    """Labels."""
    num_items: int
    """Whose tails were probed in both."""
    both: int
    only_first: int
    only_second: int
    first_rate: Estimate
    second_rate: Estimate
    difference: float | None
    """Second less first, with Newcombe's paired 95 % interval."""
    low: float | None
    high: float | None
    p_value: float | None
    """McNemar, exact, two-sided; None where no item differs."""
    p_holm: float | None
    """Over all of these of a comparison."""
    newly_completed: list[str]
    """Ids of items that only the second completes."""
    lost: list[str]
    """Ids of items that only the first completes."""


@dataclass(frozen=True)
class LogprobChange:
    """How much likelier a set's texts have become."""

    set: str
    first: str
    second: str
    change: Estimate
    """Mean log-probability of a token, second less first, over items, with a bootstrap interval."""
    share_up: float | None
    """Of items that became likelier."""


@dataclass(frozen=True)
class TrajectoryPoint:
    """A set's rate at one checkpoint."""

    set: str
    ratio: float
    mode: Mode
    checkpoint: str
    rate: Estimate
    loss: Estimate


@dataclass(frozen=True)
class CheckpointComparison:
    """What `compare_checkpoints` finds."""

    checkpoints: list[str]
    rates: list[PairedRate]
    """Of every later checkpoint against the first."""
    logprobs: list[LogprobChange]
    trajectory: list[TrajectoryPoint]
    warnings: list[str]


def compare_checkpoints(audits: Audits, seed: int = 0) -> CheckpointComparison:
    """Compare two or more audits of the same sets, each later one with the first.

    Items are paired by set and id; those whose text isn't the same in both, or that only one has, are left out and told
    of in `warnings`.

    Raises:
        DataError: There are fewer than two audits, or they have no item in common.
    """
    labels = list(audits)
    if len(labels) < 2:
        raise DataError(
            "compare: needs two audits or more; run eval/contamination.py for each checkpoint first"
        )
    names = [name for name in audits[labels[0]] if all(name in audits[label] for label in labels)]
    warnings = [
        f"{name}: only in some of the audits, left out"
        for name in dict.fromkeys(name for label in labels for name in audits[label])
        if name not in names
    ]
    rates: list[PairedRate] = []
    logprobs: list[LogprobChange] = []
    trajectory: list[TrajectoryPoint] = []
    num_common = 0
    for name in names:
        for label in labels[1:]:
            pairs, warning = _pairs(name, labels[0], label, audits)
            warnings += warning
            num_common += len(pairs)
            rates += [_paired_rate(name, cut, labels[0], label, pairs) for cut in _cuts(pairs)]
            logprobs.append(_logprob_change(name, labels[0], label, pairs, seed))
        trajectory += _trajectory(name, audits, seed)
    if not num_common:
        raise DataError(
            f"compare: {' and '.join(labels)} have no item in common; audit the same benchmarks with both"
        )
    adjusted = holm([rate.p_value for rate in rates])
    rates = [
        PairedRate(**{**vars(rate), "p_holm": p_holm}) for rate, p_holm in zip(rates, adjusted, strict=True)
    ]
    return CheckpointComparison(labels, rates, logprobs, trajectory, warnings)


Pair = tuple[ItemResult, ItemResult]


def _pairs(name: str, first: str, second: str, audits: Audits) -> tuple[list[Pair], list[str]]:
    ours = {item.item_id: item for item in audits[first][name]}
    theirs = {item.item_id: item for item in audits[second][name]}
    pairs = [
        (item, theirs[key]) for key, item in ours.items() if key in theirs and theirs[key].text == item.text
    ]
    left_out = len(ours.keys() | theirs.keys()) - len(pairs)
    warning = (
        f"{name}: {left_out} items of {first} and {second} have no counterpart with the same text, left out"
    )
    return pairs, [warning] if left_out else []


def _cuts(pairs: Sequence[Pair]) -> list[tuple[float, Mode]]:
    later = cuts_of(second for _, second in pairs)
    return [cut for cut in cuts_of(first for first, _ in pairs) if cut in later]


def _paired_rate(
    name: str, cut: tuple[float, Mode], first: str, second: str, pairs: Sequence[Pair]
) -> PairedRate:
    ratio, mode = cut
    hits: dict[str, tuple[bool, bool]] = {}
    for one, other in pairs:
        before, after = cut_at(one, ratio, mode), cut_at(other, ratio, mode)
        if before is not None and after is not None and before.skipped is None and after.skipped is None:
            hits[one.item_id] = (is_hit(before), is_hit(after))
    lost = [key for key, (before, after) in hits.items() if before and not after]
    new = [key for key, (before, after) in hits.items() if after and not before]
    both = sum(before and after for before, after in hits.values())
    neither = len(hits) - both - len(lost) - len(new)
    difference = low = high = None
    if hits:
        difference, low, high = newcombe_paired(both, len(new), len(lost), neither)
    return PairedRate(
        set=name,
        ratio=ratio,
        mode=mode,
        first=first,
        second=second,
        num_items=len(hits),
        both=both,
        only_first=len(lost),
        only_second=len(new),
        first_rate=share(both + len(lost), len(hits)),
        second_rate=share(both + len(new), len(hits)),
        difference=difference,
        low=low,
        high=high,
        p_value=mcnemar(len(new), len(lost), "two-sided"),
        p_holm=None,
        newly_completed=new,
        lost=lost,
    )


def _logprob_change(name: str, first: str, second: str, pairs: Sequence[Pair], seed: int) -> LogprobChange:
    changes = [
        other.logprobs["loss"] - one.logprobs["loss"]
        for one, other in pairs
        if "loss" in one.logprobs and "loss" in other.logprobs
    ]
    share_up = sum(change > 0 for change in changes) / len(changes) if changes else None
    return LogprobChange(name, first, second, mean(changes, seed), share_up)


def _trajectory(name: str, audits: Audits, seed: int) -> list[TrajectoryPoint]:
    points = []
    for label, sets in audits.items():
        loss = mean([-item.logprobs["loss"] for item in sets[name] if "loss" in item.logprobs], seed)
        for ratio, mode in cuts_of(sets[name]):
            cuts = [cut for item in sets[name] if (cut := cut_at(item, ratio, mode)) and cut.skipped is None]
            rate = share(sum(is_hit(cut) for cut in cuts), len(cuts))
            points.append(TrajectoryPoint(name, ratio, mode, label, rate, loss))
    return points
