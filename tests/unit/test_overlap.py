"""Benchmark items in rows: words, common runs, near matches, and what tells nothing."""

from __future__ import annotations

import pickle
import time

import numpy as np
import pytest

from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.data.overlap.grams import find_families
from hfpar.data.overlap.index import BenchmarkIndex, Hit, RowText
from hfpar.data.overlap.rows import TemplateCounter, text_of_row
from hfpar.data.overlap.score import align, common_runs, cover
from hfpar.data.overlap.words import Vocabulary, display_form, split_words, word_spans

ORCHARD = (
    "A gardener plants 14 rows of pear trees behind the old mill. Each row holds 23 trees, and a storm fells 37 of "
    "them in the first winter. How many pear trees still stand when the spring begins?"
)
TRIANGLE = (
    r"Let $ABC$ be a triangle whose sides measure $\frac{7}{2}$, $1{,}080$ and $\sqrt{19}$. Determine the distance "
    r"from the midpoint of its longest side to the circumcentre $\left(O\right)$."
)
FERRY = (
    "The ferry to the island leaves every 40 minutes and carries up to 65 passengers together with 12 lorries. "
    "What is the largest number of passengers that can cross before noon if the first ferry sails at six?"
)
SHORT = r"Simplify $\sqrt{4563}$ quickly."
ENDING = "Write your result as a reduced fraction and explain each step of the way in full sentences."


def benchmark(*questions: str, solutions: tuple[str, ...] = ()) -> Benchmark:
    items = tuple(
        BenchmarkItem(str(number), f"b, line {number + 1}", question, "1", solution)
        for number, (question, solution) in enumerate(
            zip(questions, solutions or [None] * len(questions), strict=True)
        )
    )
    return Benchmark("b", items, "math", "b", "0", 0)


@pytest.fixture(scope="module")
def index() -> BenchmarkIndex:
    return BenchmarkIndex([benchmark(ORCHARD, TRIANGLE, FERRY, SHORT)])


def find(index: BenchmarkIndex, *texts: str) -> list[Hit]:
    return index.find([RowText(texts, texts[0])])[0]


def only(index: BenchmarkIndex, *texts: str) -> tuple[str, str]:
    (hit,) = find(index, *texts)
    return hit.item.item_id, hit.kind


# Words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("It's  3.5\nKM", "it s 3 5 km"),
        (r"$\dfrac{1}{2}$", "1 2"),
        ("½ and 1/2", "1 2 and 1 2"),
        (r"1,080 = 1{,}080 = 1,\!080", "1080 1080 1080"),
        ("1,08", "1 08"),
        (r"\left( \sin x \right) \cdot \text{feet}", "sin x feet"),
        ("ﬁne “ＡＢＣ”", "fine abc"),
        (r"\begin{align*} x &= 2 \end{align*}", "x 2"),
        ("[asy]\ndraw((0,0)--(1,1)); x[0] = 3;\n[/asy] area", "area"),
        ("[asy] one [asy] two [/asy] three", "asy one three"),
        ("面积是3", "面 积 是 3"),
    ],
)
def test_words(text: str, words: str) -> None:
    assert split_words(text) == words.split()
    vocabulary = Vocabulary([words.split()])
    ids, starts = vocabulary.encode([text, "x"])
    assert ids[: starts[1]].tolist() == [*vocabulary.ids(words.split()), 0]


def test_figures_without_an_end_cost_no_more_than_their_length() -> None:
    before = time.process_time()
    assert len(split_words("[asy] draw " * 30_000)) == 60_000
    assert time.process_time() - before < 10


@pytest.mark.parametrize("text", ["Two words", "ﬁne ½ straße", "groẞe x", "two ŉ three ﬃ"])
def test_where_words_are(text: str) -> None:
    words, spans = word_spans(text)
    shown = display_form(text)
    assert words == split_words(text)
    assert [shown[start:end].casefold() for start, end in spans] == words


# Runs


def test_common_runs_are_whole_and_not_counted_twice() -> None:
    part = [1, 2, 3, 4, 5, 6]
    assert common_runs([9, 1, 2, 3, 4, 9, 4, 5, 6, 9], part, 3) == [(1, 0, 4), (6, 3, 3)]
    assert common_runs([1, 2, 9, 3, 4], part, 3) == []
    assert common_runs([7, 7, 7, 7], [7, 7, 7], 2) == [(0, 0, 3), (0, 1, 2), (1, 0, 3), (2, 0, 2)]


def test_cover_counts_what_tells() -> None:
    telling = np.array([True, True, False, False])  # of six words in runs of three: the first four tell
    found = cover(common_runs([1, 2, 3, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6], 3), telling, 3)
    assert (found.share, found.longest, found.telling_words) == (0.75, (0, 0, 3), 3)
    assert found.left_out.tolist() == []


def test_align_takes_the_best_place() -> None:
    row = [5, 6, *[0] * 20, 5, 6, 7, 0, 8, *[0] * 20]
    found = align(row, [5, 6, 7, 8], [(0, 0), (22, 0), (23, 1)])
    assert found.common.tolist() == [True] * 4
    assert (found.row_start, found.row_end) == (22, 27)


# Kinds


@pytest.mark.parametrize(("number", "question"), list(enumerate([ORCHARD, TRIANGLE, FERRY, SHORT])))
def test_verbatim(index: BenchmarkIndex, number: int, question: str) -> None:
    expected = (str(number), "verbatim")
    assert only(index, question) == expected
    assert only(index, question.replace(" ", "\n ").replace(r"\frac", r"\dfrac").upper()) == expected
    assert only(index, f"Here is one more. {question} Now, what would you do?") == expected
    assert only(index, "You are kind.", f"Problem 3: {question}\n\nThink first.", "It is 7.") == expected


def test_numbers_changed_is_no_verbatim_copy(index: BenchmarkIndex) -> None:
    (hit,) = find(index, ORCHARD.replace("14", "41").replace("23", "32").replace("37", "73"))
    assert (hit.item.item_id, hit.kind) == ("0", "long_run")
    assert hit.num_words == 16
    (hit,) = find(index, ORCHARD.replace("37", "73"))
    assert hit.kind == "long_run"
    assert hit.score > 0.95


def test_half_of_it_is_a_long_run(index: BenchmarkIndex) -> None:
    (hit,) = find(index, FERRY[: len(FERRY) // 2])
    assert (hit.kind, hit.item_span) == ("long_run", (0, hit.num_words))
    assert 0.4 < hit.score < 0.6


def test_small_edits_are_near(index: BenchmarkIndex) -> None:
    edited = (
        "A farmer plants 9 rows of pear trees behind the mill. Every row holds 20 trees, and one storm fells 5 of them "
        "in that first winter. How many pear trees stand when spring begins?"
    )
    (hit,) = find(index, "No match in here at all, only talk.", edited)
    assert (hit.item.item_id, hit.kind, hit.num_words) == ("0", "near", 0)
    assert 0.8 <= hit.score < 1


def test_where_the_match_is(index: BenchmarkIndex) -> None:
    (hit,) = find(index, "One two three.", f"Four. {FERRY} Five.")
    words = [*split_words("One two three."), "", *split_words(f"Four. {FERRY} Five.")]
    start, end = hit.row_span
    assert words[start:end] == split_words(FERRY)
    assert hit.item_span == (0, end - start)


def test_other_texts_are_no_hits(index: BenchmarkIndex) -> None:
    assert find(index, "How many pear trees does a gardener need for the garden behind the old mill?") == []
    assert find(index, "Simplify $\\sqrt{4563}$ quickly by hand.") == []
    assert find(index, "First simplify $\\sqrt{4563}$ quickly by hand.") == []
    assert find(index, "") == index.find([RowText((), "")])[0] == []


def test_a_run_does_not_cross_texts(index: BenchmarkIndex) -> None:
    words = ORCHARD.split()
    pieces = (" ".join(words[start : start + 7]) for start in range(0, len(words), 7))
    assert [hit.kind for hit in find(index, *pieces)] == ["near"]


def test_solutions_need_a_good_part() -> None:
    solution = (
        "The mill stands beside fourteen rows, so that multiplying rows by trees gives the whole orchard. Subtracting "
        "what the storm has felled leaves the number that we want, as nothing else changes before spring comes. "
        "Checking by estimation shows that this is plausible, since ten rows alone would already hold over two hundred."
    )
    index = BenchmarkIndex([benchmark(ORCHARD, solutions=(solution,))])
    (hit,) = find(index, "How many are left?", solution)
    assert (hit.field, hit.kind) == ("solution", "verbatim")
    assert [hit.field for hit in find(index, " ".join(solution.split()[:25]))] == ["solution"]
    assert find(index, " ".join(solution.split()[:14])) == []


def test_an_item_is_hit_once_by_its_surest_match() -> None:
    index = BenchmarkIndex([benchmark(ORCHARD, solutions=(FERRY,))])
    (hit,) = find(index, FERRY, ORCHARD)
    assert (hit.field, hit.kind) == ("question", "verbatim")


# What tells nothing


def test_boilerplate_of_many_items_is_no_hit() -> None:
    questions = [f"{text} {ENDING}" for text in (ORCHARD, TRIANGLE, FERRY)]
    row = "How old is the tallest oak in the valley, measured by its rings? " + ENDING
    few = BenchmarkIndex([benchmark(*questions[:2])])
    assert {hit.kind for hit in find(few, row)} == {"long_run"}
    many = BenchmarkIndex([benchmark(*questions)])
    assert find(many, row) == []
    assert only(many, questions[1]) == ("1", "verbatim")


def test_variations_of_one_item_keep_their_weight() -> None:
    variations = [FERRY.replace("40", str(number)) for number in (40, 25, 30, 35)]
    vocabulary = Vocabulary(map(split_words, variations))
    texts = [vocabulary.ids(split_words(text)) for text in [*variations]]
    assert find_families(texts, 5).tolist() == [0, 0, 0, 0]
    index = BenchmarkIndex([benchmark(*variations)])
    assert {hit.item.item_id for hit in find(index, FERRY)} >= {"0"}


def rows_with(template: str, count: int) -> list[RowText]:
    return [RowText((f"{template} Tell me about matter {number}.",), str(number)) for number in range(count)]


def test_a_template_of_the_rows_is_no_hit(index: BenchmarkIndex) -> None:
    counter = TemplateCounter(index)
    counter.add(rows_with(FERRY, 15))
    assert not counter.templates().runs.any()
    counter.add(rows_with(FERRY, 25))
    templates = counter.templates()
    screened = index.without(templates)
    assert find(screened, FERRY) == []
    assert only(screened, ORCHARD) == ("0", "verbatim")
    assert [item.item_id for _, item in index.hidden_by(templates)] == ["2"]
    assert only(index, FERRY) == ("2", "verbatim")


def test_many_answers_to_one_prompt_are_no_template(index: BenchmarkIndex) -> None:
    counter = TemplateCounter(index)
    counter.add([RowText((FERRY, f"Answer {number}."), FERRY) for number in range(100)])
    assert not counter.templates().runs.any()


# Rows and benchmarks of all shapes


@pytest.mark.parametrize(
    "row",
    [
        {"text": ORCHARD},
        {"prompt": ORCHARD, "completion": "It is 285."},
        {"instruction": "Solve this.", "input": ORCHARD, "output": "285"},
        {"messages": [{"role": "user", "content": ORCHARD}, {"role": "assistant", "content": "285"}]},
        {"conversations": [{"from": "human", "value": "Hm?"}, {"from": "gpt", "value": ORCHARD}]},
        {"question": ORCHARD, "answer": "285"},
        {"messages": [{"role": "user", "content": ORCHARD}]},
        {"meta": {"list": [1, None, {"deep": ORCHARD}]}},
    ],
)
def test_any_row(index: BenchmarkIndex, row: dict[str, object]) -> None:
    (hit,) = index.find([text_of_row(row, "auto", None)])[0]
    assert (hit.item.item_id, hit.kind) == ("0", "verbatim")


def test_no_row_and_short_benchmarks() -> None:
    index = BenchmarkIndex([benchmark(SHORT, "Why?")])
    assert index.find([]) == []
    assert only(index, f"Look. {SHORT}") == ("0", "verbatim")
    assert find(index, "Why?") == []
    counter = TemplateCounter(index)
    counter.add(rows_with(SHORT, 30))
    assert find(index.without(counter.templates()), FERRY) == []


def test_min_words() -> None:
    question = "Which ferry sails to the island first?"
    row = f"Somebody asked me: {question} I had no answer."
    assert find(BenchmarkIndex([benchmark(question)]), row)[0].kind == "verbatim"
    row = "somebody asked which ferry sails to the island first of all"
    assert find(BenchmarkIndex([benchmark(question)]), row) == []
    assert find(BenchmarkIndex([benchmark(question)], min_words=5), row)[0].num_words == 7


def test_an_index_travels_to_other_processes(index: BenchmarkIndex) -> None:
    assert only(pickle.loads(pickle.dumps(index)), ORCHARD) == ("0", "verbatim")
