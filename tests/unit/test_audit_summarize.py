"""Grades that an item can only be given beside the others of its set."""

from dataclasses import replace

import pytest

from hfpar.audit.results import CutResult, ItemResult
from hfpar.audit.summarize import grade, without_shared_runs

SHARED = "two walkers leave the old mill at dawn and reach the sea by noon"
"""14 words."""
OWN = "where a heron waits for them with seven letters and a very small brass key"
"""15 words."""


def item(number, text, run, *, pair_id=None, cuts=()):
    start = text.index(run)
    made = ItemResult(
        set="walks",
        item_id=f"w{number}",
        place=f"walks:{number}",
        text=text,
        num_tokens=60,
        hits=[[start, start + len(run)]],
        longest_run=30,
        longest_run_span=[start, start + len(run)],
        logprobs={},
        cuts=list(cuts),
        pair_id=pair_id,
    )
    return replace(made, grade=grade(made))


def grades(*items):
    return [one.grade for one in without_shared_runs(items)]


def test_a_run_that_another_item_has_too_is_no_evidence():
    first = item(0, f"At what speed do {SHARED}?", SHARED)
    second = item(1, f"If {SHARED}, how far is it?", SHARED)
    assert grade(first) == grade(second) == "B"
    assert grades(first, second) == [None, None]
    assert grades(first) == ["B"]


@pytest.mark.parametrize(
    "run, expected",
    [(f"{SHARED} {OWN}", "B"), (SHARED + " " + " ".join(OWN.split()[:11]), None), (OWN, "B")],
)
def test_what_else_there_is_of_the_run_must_be_12_words(run, expected):
    first = item(0, f"When {SHARED} {OWN}, who is first?", run)
    second = item(1, f"Do {SHARED} or not?", "or not")
    assert grades(first, second)[0] == expected


def test_spacing_makes_no_difference():
    first = item(0, f"At what speed do {SHARED}?", SHARED)
    second = item(1, "If " + SHARED.replace(" ", "\n ") + " as well, who waits?", "who waits")
    assert grades(first, second)[0] is None


def test_a_completed_tail_stays_evidence():
    tail = CutResult(0.6, "bare", None, 10, 9, exact=True)
    first = item(0, f"At what speed do {SHARED}?", SHARED, cuts=[tail])
    second = item(1, f"If {SHARED}, how far is it?", SHARED)
    assert grades(first, second) == ["B", None]


def test_an_answer_that_was_reached_stays_grade_c():
    reached = CutResult(0.6, "bare", None, 10, 9, answer_right=True)
    first = item(0, f"At what speed do {SHARED}?", SHARED, cuts=[reached])
    second = item(1, f"If {SHARED}, how far is it?", SHARED)
    assert grades(first, second) == ["C", None]


def test_copies_of_one_original_are_no_other_items():
    first = item(0, f"At what speed do {SHARED}?", SHARED, pair_id="o")
    second = item(1, f"At what speed did {SHARED}?", SHARED, pair_id="o")
    assert grades(first, second) == ["B", "B"]


def test_texts_without_spaces_keep_their_grade():
    run = "大きな船が港を出て三日目の朝に小さな島へ着いた"
    first, second = item(0, f"{run}か", run), item(1, f"もし{run}なら", run)
    assert grades(first, second) == ["B", "B"]
