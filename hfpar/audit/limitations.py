"""What an audit can't see: the sentences that apply to a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from hfpar.audit.results import Comparison, ItemResult, RatioTest
from hfpar.audit.summarize import SetInfo, cuts_of


def limitations(
    sets: Sequence[SetInfo],
    items: Mapping[str, Sequence[ItemResult]],
    comparisons: Sequence[Comparison],
    tests: Sequence[RatioTest],
    *,
    has_orders: bool = False,
) -> list[str]:
    """Plain sentences, the most general first; only those that apply to this run.

    Args:
        sets: benchmarks and controls.
        items: by a set's name.
        comparisons: of benchmarks with controls.
        tests: of them.
        has_orders: whether the order of a file was tested.
    """
    found = [
        "Only word-for-word memory of the questions is tested. A model that has seen them paraphrased, translated, "
        "reformatted or with other numbers, or has seen them too seldom to complete them, looks as if it had not.",
        "Solutions and answers are not probed: a model trained on them without the questions is not found.",
        "A completed tail shows that the text was learnt from somewhere: the benchmark itself, or a page that quotes "
        "it or that it was taken from.",
    ]
    benchmarks = [info for info in sets if info.role == "benchmark"]
    found += _skipped(benchmarks, items)
    found += _modes(benchmarks, items)
    found += _controls(sets, items)
    found += _matching(comparisons, tests)
    if any(len(item.logprobs) for found_items in items.values() for item in found_items):
        found.append(
            "Log-probability scores compare texts of different origin: an AUC above 0.5 can come from style, topic or "
            "age of the texts as well as from exposure. The verdicts don't use them."
        )
    if has_orders:
        found.append(
            "A file that is sorted by topic, source or difficulty is likelier in its own order even to a model that "
            "has never read it: the test of the order can't tell the two apart. The verdicts don't use it."
        )
    if any(item.grade == "C" for info in benchmarks for item in items[info.name]):
        found.append("Grade C (the right answer from a part of the question) is often a lucky guess.")
    return found


def _skipped(benchmarks: Sequence[SetInfo], items: Mapping[str, Sequence[ItemResult]]) -> list[str]:
    found = []
    for info in benchmarks:
        for ratio, mode in cuts_of(items[info.name]):
            if mode != "bare":
                continue
            cuts = [
                cut
                for item in items[info.name]
                for cut in item.cuts
                if (cut.ratio, cut.mode) == (ratio, mode)
            ]
            reasons = Counter[str](cut.skipped for cut in cuts if cut.skipped is not None)
            num_short, num_shared = reasons["short_tail"], reasons["shared_tail"]
            num_other = reasons["no_cut"] + reasons["too_long"]
            if num_short > 0.05 * len(cuts):
                found.append(
                    f"{info.name}: at {100 * ratio:.0f} %, {num_short} of {len(cuts)} items have tails too short to "
                    "tell memory from luck; they are not tested there."
                )
            if num_shared:
                found.append(
                    f"{info.name}: at {100 * ratio:.0f} %, {num_shared} of {len(cuts)} items end as another one does; "
                    "completing such an ending says nothing of the item, so they are not tested there."
                )
            if num_other:
                found.append(
                    f"{info.name}: at {100 * ratio:.0f} %, {num_other} of {len(cuts)} items could not be cut, or are "
                    "longer than the model's context."
                )
    return found


def _modes(benchmarks: Sequence[SetInfo], items: Mapping[str, Sequence[ItemResult]]) -> list[str]:
    modes = {mode for info in benchmarks for _, mode in cuts_of(items[info.name])}
    if modes == {"chat"}:
        return ["Only the chat template was used, which hides memory that the bare text shows."]
    if "chat" in modes:
        return [
            "In the chat template memory shows less than in the bare text; a low rate there means little."
        ]
    return []


def _controls(sets: Sequence[SetInfo], items: Mapping[str, Sequence[ItemResult]]) -> list[str]:
    controls = {info.kind: info for info in sets if info.role == "control"}
    found = []
    if not controls:
        found.append("There is no control: how much of this a model completes by luck is unknown.")
    if "perturbed" in controls:
        found.append(
            "Perturbed copies are slightly less natural than their originals, and a model that knows the original may "
            "complete some of them from memory, too, which hides a part of the excess."
        )
    if any(_several_variants(items[info.name]) for info in sets if info.role == "control"):
        found.append(
            "Some items have several variants in a control, which are not independent of each other; where they vary "
            "fewer than half as many items as the benchmark has, one of each is compared."
        )
    if "file" in controls:
        found.append(
            "Controls from files may have been published before the model was trained, and be memorised themselves: "
            "that hides an excess."
        )
    if set(controls) == {"random_calculation"}:
        found.append(
            "Random calculations are the only control: they are no prose, and harder to guess than a benchmark's text."
        )
    return found


def _several_variants(items: Sequence[ItemResult]) -> bool:
    owners = [item.owner for item in items if item.pair_id is not None]
    return len(set(owners)) < len(owners)


def _matching(comparisons: Sequence[Comparison], tests: Sequence[RatioTest]) -> list[str]:
    found = []
    for test in tests:
        if test.deciding_control is None:
            continue
        key = (test.benchmark, test.ratio, test.mode, test.deciding_control)
        chosen = next(one for one in comparisons if (one.benchmark, one.ratio, one.mode, one.control) == key)
        total = chosen.rate.total + chosen.num_unmatched
        if chosen.num_unmatched > 0.1 * total:
            found.append(
                f"{test.benchmark}: at {100 * test.ratio:.0f} % ({test.mode}), {chosen.num_unmatched} of {total} tails "
                "have no counterpart in the deciding control (no tail as long, or none without numbers and names), "
                "and are not in its test."
            )
    if any(test.p_value is None for test in tests):
        found.append("Where fewer than 200 control tails match a benchmark's, there is no test.")
    return found
