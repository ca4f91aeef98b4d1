"""From items to verdicts: comparisons, tests, sentences, intrusion, two checkpoints, and the plan before it all."""

import io
import re
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from hfpar.audit import conclude, power
from hfpar.audit.familiarity import compare_scores, find_intrusion
from hfpar.audit.limitations import limitations
from hfpar.audit.paired import compare_checkpoints
from hfpar.audit.plan import make_plan, plain_cut, print_plan
from hfpar.audit.prefix import TailLimits
from hfpar.audit.results import CutResult, ItemResult
from hfpar.audit.summarize import SetInfo, grade, summarize_set
from hfpar.audit.wording import p_value
from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.errors import DataError

TEXT = (
    "Ida packs 14 boxes. "
    + "Then some words follow that nobody counts. " * 3
    + "At last she packs 37 more boxes."
)
PLAIN = "A question begins here. " + "Then some words follow that nobody counts. " * 3 + "And here it ends."


def cut(ratio=0.6, mode="bare", words=12, exact=False, **others) -> CutResult:
    return CutResult(ratio, mode, cut=40, tail_words=words, exact=exact, exact_normalized=exact, **others)


def item(name: str, number: int, *cuts: CutResult, text: str = TEXT, **others) -> ItemResult:
    values = {
        "hits": [],
        "longest_run": 3,
        "longest_run_span": [0, 5],
        "logprobs": {},
        "num_tokens": 40,
        **others,
    }
    return ItemResult(
        set=name, item_id=str(number), place=f"{name}:{number}", text=text, cuts=list(cuts), **values
    )


def many(
    name: str, total: int, num_hits: int, *, ratios=(0.6,), mode="bare", words=12, **others
) -> list[ItemResult]:
    """The first `num_hits` items are completed; no two texts end alike."""
    return [
        item(
            name,
            number,
            *(cut(ratio, mode, words, number < num_hits) for ratio in ratios),
            **{**others, "text": f"{others.get('text', TEXT)} So it was in {a_word(name, number)}."},
        )
        for number in range(total)
    ]


def a_word(name: str, number: int) -> str:
    return "".join("bdfghjklmn"[int(digit)] for digit in str(number)) + "a" + name.replace("-", "")


BENCHMARK = SetInfo("own", "benchmark", "benchmark", "own.jsonl", "0" * 64)


def control(name: str, kind: str = "file") -> SetInfo:
    return SetInfo(name, "control", kind, f"{name}.jsonl", "1" * 64, applies_to=("own",))


def graded(items: list[ItemResult]) -> list[ItemResult]:
    return [ItemResult(**{**vars(one), "grade": grade(one)}) for one in items]


def verdict_of(sets, items):
    comparisons = conclude.compare(sets, items)
    tests = conclude.test_ratios(comparisons)
    (verdict,) = conclude.conclude(sets, items, comparisons, tests)
    return verdict, comparisons, tests


# Grades and summaries


@pytest.mark.parametrize(
    ("cuts", "others", "expected"),
    [
        ([cut(0.4, words=15, exact=True)], {}, "A"),
        ([cut(0.3, words=15, exact=True)], {}, "A"),
        ([cut(0.4, words=14, exact=True)], {}, "B"),
        ([cut(0.6, words=40, exact=True)], {}, "B"),
        ([cut(0.8, words=40, exact=True)], {}, None),
        ([cut(0.4), cut(0.6, answer_right=True)], {}, "C"),
        ([cut(0.4), cut(0.6, answer_right=False)], {}, None),
        ([CutResult(0.4, "bare", skipped="short_tail", exact=True, tail_words=20)], {}, None),
        ([cut(0.6)], {"longest_run": 20, "longest_run_span": [0, 90]}, "B"),
        ([cut(0.6)], {"longest_run": 19, "longest_run_span": [0, 90]}, None),
        ([cut(0.6)], {"longest_run": 30, "longest_run_span": [0, 20]}, None),
        ([cut(0.6)], {"longest_run": 30, "longest_run_span": [0, 90], "text": "[asy] draw " + TEXT}, None),
    ],
)
def test_grades(cuts, others, expected):
    assert grade(item("own", 0, *cuts, **others)) == expected


def test_a_summary_counts_and_estimates():
    items = graded(
        [
            item(
                "own",
                0,
                cut(0.4, words=20, exact=True),
                longest_run=30,
                logprobs={"loss": -1.0},
                own_answer_right=True,
            ),
            item(
                "own",
                1,
                cut(0.4, near_tie=True),
                longest_run=5,
                logprobs={"loss": -3.0},
                own_answer_right=False,
            ),
            item(
                "own", 2, CutResult(0.4, "bare", skipped="short_tail"), longest_run=4, logprobs={"loss": -2.0}
            ),
            item("own", 3, cut(0.4, answer_right=True, settled_by="generation"), longest_run=6),
        ]
    )
    found = summarize_set(BENCHMARK, items)
    (at,) = found.cuts
    assert (at.exact.hits, at.exact.total, at.skipped) == (1, 3, {"short_tail": 1})
    assert (at.num_near_ties, at.num_settled_by_generation) == (1, 1)
    assert (at.answer.hits, at.answer.total, at.rouge_l) == (1, 1, None)
    assert (found.own_answer.hits, found.own_answer.total) == (1, 2)
    assert found.loss.value == pytest.approx(2.0) and found.loss.total == 3
    assert found.longest_run_quantiles == {"0.5": 5, "0.95": 30, "1": 30}
    assert found.grades == {"A": 1, "B": 0, "C": 1}
    assert summarize_set(BENCHMARK, []).cuts == []


# Comparisons and tests


def test_numbers_of_one_control_are_those_of_fishers_test():
    sets = [BENCHMARK, control("new")]
    items = {"own": graded(many("own", 210, 38)), "new": many("new", 310, 1)}
    verdict, (comparison,), (test,) = verdict_of(sets, items)
    expected = stats.fisher_exact([[38, 172], [1, 309]], "greater")[1]
    assert comparison.p_value == pytest.approx(expected) and test.p_holm == comparison.p_value
    assert (verdict.level, verdict.headline) == ("strong", "Strong evidence")
    assert verdict.text == (
        "38 of 210 tails (18.1 %) were completed word for word from 60 % of the problem against 1 of 310 (0.32 %) of "
        f"new, with tails of about the same length: an excess of 17.8 points ({100 * comparison.low:.1f} to "
        f"{100 * comparison.high:.1f}), p = {p_value(expected)} after Holm. 38 items have grade B evidence."
    )
    assert 0.12 < comparison.low < 0.14 and 0.23 < comparison.high < 0.24


def test_no_excess_says_what_would_have_been_found():
    sets = [BENCHMARK, control("own-perturbed", "perturbed")]
    items = {"own": many("own", 300, 1), "own-perturbed": many("own-perturbed", 300, 1)}
    verdict, _, (test,) = verdict_of(sets, items)
    assert verdict.level == "none" and verdict.headline == "No evidence at this power"
    assert verdict.smallest_detectable_share == test.smallest_detectable_share
    assert 0.01 < test.smallest_detectable_share < 0.05
    found = f"{100 * test.smallest_detectable_share:.1f} % or more is completed from memory 4 times in 5"
    assert found in verdict.text and "of perturbed copies" in verdict.text
    assert "clean" not in verdict.text


def test_few_graded_items_are_no_strong_evidence():
    sets = [BENCHMARK, control("new")]
    items = {"own": many("own", 300, 40, ratios=(0.8,)), "new": many("new", 300, 0, ratios=(0.8,))}
    verdict, _, _ = verdict_of(sets, items)
    assert verdict.level == "some" and "No item has grade A or B" in verdict.text


def test_strong_evidence_keeps_to_a_smaller_alpha():
    sets = [BENCHMARK, control("new")]
    items = {"own": many("own", 400, 10), "new": many("new", 400, 0)}
    items["own"] = graded(items["own"])
    comparisons = conclude.compare(sets, items)
    levels = {}
    for alpha in (0.05, 0.0001):
        tests = conclude.test_ratios(comparisons, alpha)
        assert 0.0001 < tests[0].p_holm <= 0.001
        levels[alpha] = conclude.conclude(sets, items, comparisons, tests, alpha)[0].level
    assert levels == {0.05: "strong", 0.0001: "none"}


def test_an_ending_that_a_control_has_too_stands_for_nobody():
    """Half of the benchmark's hits, and none of the control's, are of a sentence that the control has as well."""
    sets = [BENCHMARK, control("new")]
    end = "Give the letter of the one of the 4 choices that is correct."
    items = {"own": many("own", 300, 2), "new": many("new", 300, 2)}
    known = [item("own", 1000 + n, cut(exact=True), text=f"{'x' * 40}{n} {end}") for n in range(20)]
    known = [replace(one, cuts=[replace(one.cuts[0], cut=len(one.text) - len(end) - 1)]) for one in known]
    items["own"] += known
    assert verdict_of(sets, items)[0].level == "some"
    items["new"].append(
        item("new", 1000, CutResult(0.6, "bare", skipped="same_as_benchmark"), text=f"An 8. {end}")
    )
    verdict, (comparison,), _ = verdict_of(sets, items)
    assert verdict.level == "none" and comparison.num_unmatched == 20
    # What varies the item itself is no other text.
    items["new"][-1] = replace(items["new"][-1], pair_set="own", pair_id="1000")
    assert verdict_of(sets, items)[1][0].num_unmatched == 19


def test_variants_of_few_items_count_once():
    sets = [BENCHMARK, control("new")]
    items = {"own": many("own", 500, 10), "new": many("new", 400, 0)}
    for num_originals, expected in ((100, 100), (200, 200), (250, 400)):
        items["new"] = [
            replace(one, pair_set="own", pair_id=str(n % num_originals)) for n, one in enumerate(items["new"])
        ]
        _, (comparison,), _ = verdict_of(sets, items)
        assert sum(one.control_total for one in comparison.strata) == expected
        assert (comparison.p_value is None) == (expected < 200)
    # A few others among them change nothing for those.
    items["new"] += [
        replace(item("new", 900 + n, cut()), text=f"{TEXT} {a_word('z', n)}", varies="seed") for n in range(9)
    ]
    assert sum(one.control_total for one in verdict_of(sets, items)[1][0].strata) == 401
    # Another benchmark's items are none of these, nor are any that aren't at hand.
    items["new"] = [
        replace(one, pair_id=None, varies=f"seed {n % 250}") for n, one in enumerate(items["new"][:400])
    ]
    assert sum(one.control_total for one in verdict_of(sets, items)[1][0].strata) == 250
    items["new"] = [
        replace(one, pair_set="other", pair_id=str(n % 250)) for n, one in enumerate(items["new"])
    ]
    assert sum(one.control_total for one in verdict_of(sets, items)[1][0].strata) == 250


@pytest.mark.parametrize("total", [199, 200])
def test_200_control_tails_make_a_test(total):
    sets = [BENCHMARK, control("new")]
    items = {"own": many("own", 300, 40), "new": many("new", total, 0)}
    verdict, (comparison,), (test,) = verdict_of(sets, items)
    assert (comparison.p_value is None) == (total < 200)
    assert (verdict.level == "untested") == (total < 200)
    if total < 200:
        assert "no power: 199 tails" in comparison.note and test.deciding_control is None
        assert comparison.difference == pytest.approx(40 / 300)
        assert verdict.text.startswith("Not tested, because none of its controls has 200 tails that match")
        assert "40 of 300 from 60 % of the problem" in verdict.text and "p =" not in verdict.text


def test_small_controls_are_tested_together():
    sets = [BENCHMARK, control("a"), control("b"), control("c")]
    items = (
        {"own": many("own", 300, 40)} | {name: many(name, 120, 0) for name in "ab"} | {"c": many("c", 400, 2)}
    )
    _, comparisons, (test,) = verdict_of(sets, items)
    by_name = {one.control: one for one in comparisons}
    assert list(by_name) == ["a", "b", "c", "others"]
    assert by_name["others"].strata[0].control_total == 240 and by_name["others"].note == "a, b together"
    assert by_name["a"].p_value is None and by_name["others"].p_value is not None
    assert test.p_value == max(by_name["c"].p_value, by_name["others"].p_value)


def test_an_excess_must_hold_over_every_control():
    sets = [BENCHMARK, control("easy"), control("hard")]
    items = {"own": many("own", 300, 40), "easy": many("easy", 300, 38), "hard": many("hard", 300, 0)}
    verdict, comparisons, (test,) = verdict_of(sets, items)
    assert test.deciding_control == "easy" and verdict.level == "none"
    assert min(one.p_value for one in comparisons) < 1e-9
    assert verdict.smallest_detectable_share > 0.05  # over the easy one, little can be found
    # Together they miss it as seldom as one alone may.
    alone = power.smallest_detectable_share(comparisons[0].strata, 0.05, 0.8)
    assert (
        verdict.smallest_detectable_share
        == power.smallest_detectable_share(comparisons[0].strata, 0.05, 0.9)
        > alone
    )


def test_nothing_to_be_found_is_explained():
    sets = [BENCHMARK, control("known")]
    verdict, _, _ = verdict_of(sets, {"own": many("own", 300, 300), "known": many("known", 300, 300)})
    assert verdict.text.endswith(
        "it needs more items, or another control than known, of which the model knows most."
    )
    (verdict,) = conclude.conclude(
        [BENCHMARK], {"own": [item("own", 0, CutResult(0.6, "bare", "short_tail"))]}, [], []
    )
    assert verdict.text.startswith("Not tested, because there is no control to compare with.")


def test_a_control_that_matches_few_tails_does_not_decide():
    sets = [BENCHMARK, control("short"), control("like")]
    own = many("own", 60, 0, words=9) + [
        ItemResult(**{**vars(one), "item_id": f"long{one.item_id}"}) for one in many("own", 300, 60, words=40)
    ]
    items = {"own": own, "short": many("short", 300, 0, words=9), "like": many("like", 300, 0, words=40)}
    verdict, comparisons, (test,) = verdict_of(sets, items)
    short = next(one for one in comparisons if one.control == "short")
    assert (short.p_value, short.num_unmatched) == (1.0, 300) and "have no counterpart" in short.note
    assert test.deciding_control == "like" and verdict.level != "none"
    assert short.note.startswith(
        "not heard: another control has counterparts for more tails; 300 of 360 tails"
    )
    # Alone, it's all there is.
    _, _, (test,) = verdict_of(sets[:2], {name: items[name] for name in ("own", "short")})
    assert test.deciding_control == "short"


def test_tails_without_numbers_are_compared_with_their_like_only():
    sets = [BENCHMARK, control("own-perturbed", "perturbed")]
    easy = [
        ItemResult(**{**vars(one), "item_id": f"plain{one.item_id}"})
        for one in many("own", 150, 60, text=PLAIN)
    ]
    items = {"own": many("own", 250, 2) + easy, "own-perturbed": many("own-perturbed", 250, 2)}
    verdict, (comparison,), _ = verdict_of(sets, items)
    assert (comparison.num_unmatched, comparison.rate.hits, comparison.rate.total) == (150, 2, 250)
    assert verdict.level == "none"
    items["own-perturbed"] += [
        ItemResult(**{**vars(one), "item_id": f"plain{one.item_id}"})
        for one in many("own-perturbed", 100, 1, text=PLAIN)
    ]
    verdict, (comparison,), _ = verdict_of(sets, items)
    assert [one.holds_numbers for one in comparison.strata] == [True, False] and comparison.num_unmatched == 0
    assert verdict.level != "none"


def test_holm_goes_over_benchmarks_ratios_and_modes():
    sets = [BENCHMARK, SetInfo("two", "benchmark", "benchmark", "two", "2"), control("new")]
    sets[2] = SetInfo("new", "control", "file", "new", "3", applies_to=("own", "two"))
    items = {
        "own": many("own", 250, 9, ratios=(0.4, 0.6)),
        "two": many("two", 250, 1, ratios=(0.4, 0.6)),
        "new": many("new", 250, 0, ratios=(0.4, 0.6)),
    }
    comparisons = conclude.compare(sets, items)
    tests = conclude.test_ratios(comparisons)
    assert [(one.benchmark, one.ratio) for one in tests] == [
        ("own", 0.4),
        ("own", 0.6),
        ("two", 0.4),
        ("two", 0.6),
    ]
    assert tests[0].p_holm == pytest.approx(4 * tests[0].p_value)
    (alone,) = conclude.test_ratios(comparisons[:1])
    assert alone.smallest_detectable_share < tests[0].smallest_detectable_share
    first, second = conclude.conclude(sets, items, comparisons, tests)
    assert (first.level, second.level) == ("some", "none")
    chat = {name: many(name, 250, 9 if name == "own" else 0, mode="chat") for name in ("own", "two", "new")}
    both = {
        name: [
            ItemResult(**{**vars(bare), "cuts": bare.cuts + other.cuts})
            for bare, other in zip(items[name], chat[name], strict=True)
        ]
        for name in items
    }
    assert [one.mode for one in conclude.test_ratios(conclude.compare(sets, both))] == [
        "bare",
        "bare",
        "chat",
    ] * 2


def test_without_a_control_nothing_is_tested():
    verdict, comparisons, tests = verdict_of([BENCHMARK], {"own": many("own", 100, 5)})
    assert (comparisons, tests, verdict.level) == ([], [], "untested")
    assert "there is no control" in verdict.text
    verdict, _, _ = verdict_of([BENCHMARK, control("new")], {"own": [], "new": []})
    assert verdict.level == "untested"
    skipped = [item("own", n, CutResult(0.6, "bare", skipped="short_tail")) for n in range(300)]
    verdict, _, _ = verdict_of([BENCHMARK, control("new")], {"own": skipped, "new": many("new", 300, 0)})
    assert verdict.level == "untested"


def test_verdicts_on_models_that_have_seen_nothing_are_rarely_wrong():
    rng = np.random.default_rng(11)
    sets = [BENCHMARK, control("own-perturbed", "perturbed"), control("new")]
    wrong = 0
    for _ in range(30):
        items = {}
        for name, total in (("own", 250), ("own-perturbed", 250), ("new", 220)):
            lengths = 8 + rng.gamma(2, 6 if name != "new" else 10, total).astype(int)
            hits = rng.random(total) < 0.4 * np.exp(-0.3 * (lengths - 8))
            items[name] = [
                item(name, number, cut(0.6, words=int(words), exact=bool(hit)))
                for number, (words, hit) in enumerate(zip(lengths, hits, strict=True))
            ]
        verdict, _, _ = verdict_of(sets, items)
        wrong += verdict.level in ("some", "strong")
    assert wrong <= 3


# Log-probabilities and answers


def test_scores_are_compared_method_by_method():
    sets = [BENCHMARK, control("new"), control("tiny")]
    items = {
        "own": [item("own", n, logprobs={"loss": n / 10, "zlib": 1.0}) for n in range(40)],
        "new": [item("new", n, logprobs={"loss": -n / 10, "zlib": 1.0}) for n in range(40)],
        "tiny": [item("tiny", n, logprobs={"loss": 0.0}) for n in range(5)],
    }
    loss, zlib = compare_scores(sets, items)
    assert (loss.method, loss.control, zlib.method, zlib.auc) == ("loss", "new", "zlib", 0.5)
    assert loss.auc == pytest.approx(1 - 0.5 / 1600)


def test_intrusion_counts_each_original_once_and_both_directions():
    def answered(name, number, answer, right, **others):
        return item(name, number, own_answer=answer, own_answer_right=right, **others)

    originals = [answered("own", n, "5" if n < 8 else "6" if n == 8 else None, n < 8) for n in range(10)]
    copies = [answered("new", n, "5" if n < 4 else "6", n >= 4, pair_id=str(n)) for n in range(9)]
    copies += [answered("new", 100, "6", True, pair_id="0"), answered("new", 101, "5", True, pair_id="1")]
    copies += [answered("new", 104 + n, "6", True, pair_id="2") for n in range(5)]
    copies += [answered("new", 102, "5", False, pair_id="nowhere"), item("new", 103, pair_id="2")]
    right = {str(n): "5" for n in range(10)}
    theirs = {str(n): "6" for n in range(120)} | {"100": "5", "101": "5", "102": "6", "103": "6"}
    found = find_intrusion("own", "new", originals, copies, right, theirs, lambda one, other: one == other)
    assert found.num_pairs == 9
    assert found.original_right == 8
    assert found.perturbed_answer_given == 1
    given = found.original_answer_given
    assert given in (3, 4)  # by which of the copies of 2 was chosen
    assert found.perturbed_right == 9 - given
    assert found.p_intrusion == pytest.approx(stats.binomtest(given, given + 1, 0.5, "greater").pvalue)
    assert found.p_accuracy == pytest.approx(stats.binomtest(given, given + 1, 0.5).pvalue)
    assert find_intrusion("own", "new", originals, [], right, theirs, lambda one, other: True) is None
    same = find_intrusion("own", "new", originals, copies, right, theirs, lambda one, other: True)
    assert same is None


# Limitations


def test_limitations_are_those_of_the_run():
    sets = [BENCHMARK]
    items = {"own": [item("own", n, CutResult(0.6, "bare", skipped="short_tail")) for n in range(10)]}
    text = " ".join(limitations(sets, items, [], []))
    assert "There is no control" in text and "10 of 10 items have tails too short" in text
    assert "AUC" not in text and "Perturbed copies" not in text and "chat" not in text
    sets = [BENCHMARK, control("own-perturbed", "perturbed"), control("new")]
    items = {
        "own": many("own", 100, 0, mode="chat", logprobs={"loss": 1.0}),
        "own-perturbed": many("own-perturbed", 100, 0, mode="chat", pair_id="1"),
        "new": many("new", 100, 0, mode="chat"),
    }
    _, comparisons, tests = verdict_of(sets, items)
    text = " ".join(limitations(sets, items, comparisons, tests))
    assert "There is no control" not in text and "several variants in a control" in text
    for part in ("Perturbed copies", "Controls from files", "AUC", "Only the chat template"):
        assert part in text
    assert "too short" not in text and "clean" not in text


# Two checkpoints


def test_two_checkpoints_are_compared_item_by_item():
    before = [item("own", n, cut(exact=n < 2), logprobs={"loss": -3.0}) for n in range(50)]
    after = [item("own", n, cut(exact=1 <= n < 12), logprobs={"loss": -2.0 - n / 100}) for n in range(50)]
    found = compare_checkpoints({"base": {"own": before}, "tuned": {"own": after}})
    (rate,) = found.rates
    assert (rate.both, rate.only_first, rate.only_second, rate.num_items) == (1, 1, 10, 50)
    assert rate.newly_completed == [str(n) for n in range(2, 12)] and rate.lost == ["0"]
    assert rate.p_value == pytest.approx(stats.binomtest(10, 11, 0.5).pvalue) == rate.p_holm
    assert rate.difference == pytest.approx(0.18) and 0 < rate.low < 0.18 < rate.high
    assert (rate.first_rate.value, rate.second_rate.value) == (0.04, 0.22)
    (change,) = found.logprobs
    assert change.change.value == pytest.approx(1 - 24.5 / 100) and change.share_up == 1.0
    assert [point.rate.value for point in found.trajectory] == [0.04, 0.22]
    assert found.warnings == []


def test_three_checkpoints_make_a_trajectory_against_the_first():
    audits = {str(n): {"own": many("own", 30, 5 * n, ratios=(0.4, 0.6))} for n in range(3)}
    found = compare_checkpoints(audits)
    assert [(one.first, one.second, one.ratio) for one in found.rates] == [
        ("0", "1", 0.4), ("0", "1", 0.6), ("0", "2", 0.4), ("0", "2", 0.6),
    ]  # fmt: skip
    assert [one.rate.hits for one in found.trajectory if one.ratio == 0.6] == [0, 5, 10]
    # Holm over the four.
    assert found.rates[2].p_holm == pytest.approx(4 * found.rates[2].p_value)


def test_what_cannot_be_paired_is_told_of():
    first = {"own": many("own", 20, 2), "gone": many("gone", 3, 0)}
    second = {"own": many("own", 18, 2)[1:] + [item("own", 0, cut(), text="another text")]}
    found = compare_checkpoints({"a": first, "b": second})
    assert found.rates[0].num_items == 17
    assert found.warnings == [
        "gone: only in some of the audits, left out",
        "own: 3 items of a and b have no counterpart with the same text, left out",
    ]
    with pytest.raises(DataError, match="two audits"):
        compare_checkpoints({"a": first})
    with pytest.raises(DataError, match="no item in common"):
        compare_checkpoints({"a": first, "b": {"own": [item("own", 900, cut())]}})


# The plan


def test_a_plan_counts_tails_and_says_what_can_be_found():
    def benchmark(name, texts):
        items = tuple(BenchmarkItem(str(n), f"{name}:{n}", text, None, None) for n, text in enumerate(texts))
        return Benchmark(name, items, "none", name, "0", 0)

    own = benchmark("own", [TEXT.replace("37", str(n)) for n in range(100, 400)] + ["Too short a text."] * 5)
    other = benchmark("new", [TEXT.replace("37", str(n)) for n in range(300, 700)])
    sets = [(BENCHMARK, own), (control("new"), other), (control("tiny"), benchmark("tiny", [TEXT] * 9))]
    plan = make_plan(sets, (0.4, 0.6), lambda text, ratio: plain_cut(text, ratio, TailLimits()))
    assert plan.num_tests == 2 and not plan.tokens_are_counted
    assert plan.num_tokens == sum(round(len(one.question) / 3.5) for _, found in sets for one in found.items)
    first = plan.ratios[0]
    assert (first.num_items, first.num_tails, first.skipped) == (305, 300, {"short_tail": 5})
    new, tiny = first.controls
    # 100 texts are in both, and stand for neither.
    assert (new.num_matched, new.num_benchmark_matched) == (300, 200)
    assert list(new.detectable) == [0.0, 0.005, 0.01, 0.05]
    shares = list(new.detectable.values())
    assert shares == sorted(shares) and 0.01 < shares[0] < 0.04
    assert not tiny.has_power and tiny.detectable == {}
    counted = make_plan(sets, (0.4,), lambda text, ratio: plain_cut(text, ratio, TailLimits()),
                        modes=("bare", "chat"), count_tokens=lambda texts: [7] * len(texts))  # fmt: skip
    assert (
        counted.num_tokens == 2 * 7 * (305 + 400 + 9)
        and counted.tokens_are_counted
        and counted.num_tests == 2
    )
    out = io.StringIO()
    print_plan(plan, Console(file=out, width=140))
    assert "no power" in out.getvalue() and re.search(
        r"own\s+40 %\s+300\s+5\s+new\s+200 : 300", out.getvalue()
    )
