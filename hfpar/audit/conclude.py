"""From items to verdicts: comparisons with controls, tests, and what they say in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hfpar.audit import wording
from hfpar.audit.power import smallest_detectable_share
from hfpar.audit.results import (
    Comparison,
    ItemResult,
    Level,
    Mode,
    RatioTest,
    Verdict,
)
from hfpar.audit.statistics import MIN_CONTROL_ITEMS, exact_excess, holm, newcombe, reweighted, share
from hfpar.audit.summarize import SetInfo, cut_at, cuts_of, is_hit
from hfpar.audit.tails import ProbedTails, match_tails

OTHERS = "others"
"""Several controls together that are too small alone."""
STRONG_P_VALUE = 0.001
STRONG_ITEMS = 3
_HALF = 0.5
_HEADLINES: Mapping[Level, str] = {
    "strong": "Strong evidence",
    "some": "Some evidence",
    "none": "No evidence at this power",
    "untested": "Not tested",
}


def compare(sets: Sequence[SetInfo], items: Mapping[str, Sequence[ItemResult]]) -> list[Comparison]:
    """Every benchmark beside its controls, at every ratio and mode.

    Tails are compared with others of about the same length, those that hold numbers or names with others that do.
    A control stands alone if at least 200 of its tails have counterparts; the others are taken together as `others`. A
    comparison with fewer than 200 has no p-value, and says so.

    Args:
        sets: Benchmarks and controls.
        items: By a set's name.
    """
    tails = ProbedTails(items)
    comparisons = []
    for benchmark in (info for info in sets if info.role == "benchmark"):
        controls = [
            info.name for info in sets if info.role == "control" and benchmark.name in info.applies_to
        ]
        for ratio, mode in cuts_of(items[benchmark.name]):
            key = (benchmark.name, ratio, mode)
            num_ours = len(tails.of(*key))
            made = {name: _compare(*key, name, tails, [name], num_ours) for name in controls}
            small = [name for name, comparison in made.items() if comparison.p_value is None]
            if len(small) > 1:
                together = _compare(*key, OTHERS, tails, small, num_ours)
                made[OTHERS] = _with_note(together, f"{', '.join(small)} together")
            comparisons += _with_unheard(list(made.values()))
    return comparisons


def _with_unheard(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The same, with a note on those that aren't heard; see `test_ratios`."""
    heard = _deciding(comparisons)
    note = "not heard: another control has counterparts for more tails"
    return [one if one.p_value is None or one in heard else _with_note(one, note) for one in comparisons]


def _with_note(comparison: Comparison, note: str) -> Comparison:
    notes = [note] if comparison.note is None else [note, comparison.note]
    return replace(comparison, note="; ".join(notes))


def _compare(
    benchmark: str,
    ratio: float,
    mode: Mode,
    control: str,
    tails: ProbedTails,
    controls: Sequence[str],
    num_ours: int,
) -> Comparison:
    strata = match_tails(*tails.pair(benchmark, controls, ratio, mode))
    num_unmatched = num_ours - sum(stratum.total for stratum in strata)
    num_controls = sum(stratum.control_total for stratum in strata)
    difference = low = high = p_value = note = None
    if strata:
        difference, low, high = newcombe(strata)
    if num_controls >= MIN_CONTROL_ITEMS:
        p_value = exact_excess(strata)
        if num_unmatched > _HALF * num_ours:
            note = f"{num_unmatched} of {num_ours} tails have no counterpart in the control"
    else:
        note = (
            f"no power: {num_controls} tails of the control have counterparts, and fewer than {MIN_CONTROL_ITEMS} "
            "test nothing"
        )
    return Comparison(
        benchmark=benchmark,
        control=control,
        ratio=ratio,
        mode=mode,
        rate=share(sum(stratum.hits for stratum in strata), sum(stratum.total for stratum in strata)),
        control_rate=reweighted(strata),
        difference=difference,
        low=low,
        high=high,
        p_value=p_value,
        strata=strata,
        num_unmatched=num_unmatched,
        note=note,
    )


# Tests


def test_ratios(comparisons: Sequence[Comparison], alpha: float = 0.05) -> list[RatioTest]:
    """One test for every benchmark, ratio and mode, with Holm's adjustment over all of them.

    The excess must hold over every control that is heard, so the largest p-value counts (an intersection-union test,
    which needs no adjustment for their number). A control that leaves more than half of the benchmark's tails without a
    counterpart is only heard where no other has power.
    """
    groups: dict[tuple[str, float, Mode], list[Comparison]] = {}
    for comparison in comparisons:
        groups.setdefault((comparison.benchmark, comparison.ratio, comparison.mode), []).append(comparison)
    deciding = {key: _deciding(found) for key, found in groups.items()}
    worst = {
        key: max(found, key=lambda comparison: comparison.p_value or 0.0) if found else None
        for key, found in deciding.items()
    }
    p_values = [found.p_value if found else None for found in worst.values()]
    adjusted = holm(p_values)
    num_tests = sum(value is not None for value in p_values)
    tests = []
    for (key, found), p_holm in zip(worst.items(), adjusted, strict=True):
        # All of them must find it: each may miss it only so often that together they do 4 times in 5.
        power = 1 - 0.2 / max(1, len(deciding[key]))
        shares = [
            smallest_detectable_share(one.strata, alpha / max(1, num_tests), power) for one in deciding[key]
        ]
        known = [one for one in shares if one is not None]
        tests.append(
            RatioTest(
                benchmark=key[0],
                ratio=key[1],
                mode=key[2],
                p_value=found.p_value if found else None,
                p_holm=p_holm,
                deciding_control=found.control if found else None,
                smallest_detectable_share=max(known) if known and len(known) == len(shares) else None,
            )
        )
    return tests


def _deciding(comparisons: Sequence[Comparison]) -> list[Comparison]:
    tested = [one for one in comparisons if one.p_value is not None]
    wide = [one for one in tested if one.rate.total >= one.num_unmatched]
    return wide or tested


# Verdicts


def conclude(
    sets: Sequence[SetInfo],
    items: Mapping[str, Sequence[ItemResult]],
    comparisons: Sequence[Comparison],
    tests: Sequence[RatioTest],
    alpha: float = 0.05,
) -> list[Verdict]:
    """A verdict for every benchmark, in words."""
    return [
        _verdict(
            info.name,
            items[info.name],
            [one for one in comparisons if one.benchmark == info.name],
            [one for one in tests if one.benchmark == info.name],
            alpha,
        )
        for info in sets
        if info.role == "benchmark"
    ]


def _verdict(
    name: str,
    items: Sequence[ItemResult],
    comparisons: Sequence[Comparison],
    tests: Sequence[RatioTest],
    alpha: float,
) -> Verdict:
    grades = [item.grade for item in items]
    num_evidence = grades.count("A") + grades.count("B")
    tested = [one for one in tests if one.p_holm is not None]
    best = min(tested, key=lambda one: (one.p_holm or 0.0, one.p_value or 0.0)) if tested else None
    level: Level = "untested"
    if best is not None and best.p_holm is not None:
        level = "some" if best.p_holm <= alpha else "none"
        if best.p_holm <= min(alpha, STRONG_P_VALUE) and num_evidence >= STRONG_ITEMS:
            level = "strong"
    shares = [one.smallest_detectable_share for one in tested if one.smallest_detectable_share is not None]
    smallest = min(shares) if shares else None
    sentences = []
    if best is not None:
        sentences.append(_figures(_of(best, comparisons), best, alpha))
    else:
        sentences.append(_untested(items, comparisons))
    sentences.append(_evidence(grades))
    if level == "none" and best is not None:
        sentences.append(_power(smallest, _of(best, comparisons)))
    return Verdict(
        benchmark=name,
        level=level,
        headline=_HEADLINES[level],
        text=" ".join(sentence for sentence in sentences if sentence),
        p_holm=best.p_holm if best else None,
        smallest_detectable_share=smallest,
    )


def _of(test: RatioTest, comparisons: Sequence[Comparison]) -> Comparison:
    return next(
        one
        for one in comparisons
        if (one.ratio, one.mode, one.control) == (test.ratio, test.mode, test.deciding_control)
    )


def _figures(found: Comparison, test: RatioTest, alpha: float) -> str:
    rate, control = found.rate, found.control_rate
    assert rate.value is not None and control.value is not None and found.difference is not None
    assert found.low is not None and found.high is not None and test.p_holm is not None
    template = ", given in the chat template," if found.mode == "chat" else ""
    weight = ", reweighted to the same lengths" if wording.is_reweighted(control) else ""
    word = "an excess of" if found.difference >= 0 else "a difference of"
    difference, low, high = (
        wording.decimal(100 * value) for value in (found.difference, found.low, found.high)
    )
    return (
        f"{rate.hits} of {rate.total} tails ({wording.percent(rate.value)}) were completed word for word from "
        f"{100 * found.ratio:.0f} % of the problem{template} against {control.hits} of {control.total} "
        f"({wording.percent(control.value)}{weight}) of {_control_words(found)}: {word} "
        f"{difference} points ({low} to {high}), {wording.p_equals(test.p_holm, alpha)} after Holm."
    )


def _control_words(found: Comparison) -> str:
    if found.control.endswith("-perturbed"):
        return "perturbed copies with tails of about the same length"
    if found.control == OTHERS:
        return "the smaller controls together, with tails of about the same length"
    return f"{found.control}, with tails of about the same length"


def _evidence(grades: Sequence[str | None]) -> str:
    counts = [(grades.count(name), name) for name in ("A", "B")]
    parts = [
        f"{count} {'item has' if count == 1 else 'items have'} grade {name} evidence"
        for count, name in counts
    ]
    found = [part for part, (count, _) in zip(parts, counts, strict=True) if count]
    return f"{', '.join(found)}." if found else "No item has grade A or B evidence."


def _power(smallest: float | None, found: Comparison) -> str:
    if smallest is None:
        needed = "more items"
        if (found.control_rate.value or 0.0) > _HALF:
            needed += f", or another control than {found.control}, of which the model knows most"
        return f"A run like this finds nothing, whatever share was seen: it needs {needed}."
    return (
        f"A run like this finds a benchmark of which {wording.percent(smallest)} or more is completed from memory 4 "
        "times in 5; less than that, or exposure without word-for-word memory, it can't see."
    )


def _untested(items: Sequence[ItemResult], comparisons: Sequence[Comparison]) -> str:
    found = []
    most = 0
    for ratio, mode in cuts_of(items):
        cuts = [cut for item in items if (cut := cut_at(item, ratio, mode)) and cut.skipped is None]
        template = " in the chat template" if mode == "chat" else ""
        found.append(f"{sum(map(is_hit, cuts))} of {len(cuts)} from {100 * ratio:.0f} %{template}")
        most = max(most, len(cuts))
    why = f"none of its controls has {MIN_CONTROL_ITEMS} tails that match the benchmark's"
    if not comparisons:
        why = "there is no control to compare with"
    elif not most:
        why = "none of its items has a tail that can be tested"
    figures = f" Tails completed word for word: {', '.join(found)} of the problem." if found else ""
    return f"Not tested, because {why}.{figures}"
