"""Controls that hfpar makes: copies with other numbers and names, and calculations."""

import random
import re
from collections import Counter
from fractions import Fraction
from pathlib import Path

import pytest

from hfpar.audit.controls import perturbed_copies, random_calculation
from hfpar.audit.perturb import find_sites, perturb
from hfpar.audit.tails import last_change
from hfpar.data.benchmarks import Benchmark, BenchmarkItem, load_benchmark

SHARED = Path(__file__).parents[3] / "shared" / "data"


def changed(text: str, seed: int = 0) -> str:
    return perturb(text, random.Random(seed)).text


def benchmark(*questions: str) -> Benchmark:
    items = tuple(
        BenchmarkItem(str(number), f"b.jsonl:{number + 1}", question, "7", None)
        for number, question in enumerate(questions)
    )
    return Benchmark("own", items, "math", "b.jsonl", "0" * 64, 0)


# Numbers


@pytest.mark.parametrize("seed", range(20))
def test_equal_numbers_stay_equal_in_digits_and_words(seed):
    text = "A crate holds 6 melons. Six crates hold 6 times as many, and six melons weigh 14 kg."
    first, word, second, third, weight = re.fullmatch(
        r"A crate holds (\d) melons\. (\w+) crates hold (\d) times as many, and (\w+) melons weigh (\d\d) kg\.",
        changed(text, seed),
    ).groups()
    assert first == second != "6"
    assert word == third.capitalize()
    assert word.lower() == "zero one two three four five six seven eight nine".split()[int(first)]
    assert weight != "14" and int(weight) % 2 == 0


@pytest.mark.parametrize("seed", range(20))
def test_numbers_keep_their_form(seed):
    text = "Lots of 80,000 and 1,250 and 10{,}000, of 2.50 and 0.75 and .5, of -35 and 700, in 1987, at 7:45."
    found = re.fullmatch(
        r"Lots of (\d\d,000) and (\d,\d\d0) and (\d\d\{,\}000), of (\d\.50) and (0\.\d5) and (\.\d), "
        r"of -(\d5) and (\d00), in (19\d\d), at (\d+):45\.",
        changed(text, seed),
    )
    assert found, changed(text, seed)
    old = ("80,000", "1,250", "10{,}000", "2.50", "0.75", ".5", "35", "700", "1987", "7")
    assert all(new != before for new, before in zip(found.groups(), old, strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_larger_numbers_stay_larger(seed):
    text = "Of 48 coins 12 are new, 30 are old, and 5 are lost."
    total, new, old, lost = map(int, re.findall(r"\d+", changed(text, seed)))
    assert lost < new < old < total


@pytest.mark.parametrize(
    "text",
    [
        "Let $x^2 + y^{-1} = 0$ in base 1, with $a_1, a_{12}$ and $\\sqrt[3]{k}$.",
        '[asy]\ndraw((0,0)--(14,25)); label("$37$", (3,4), N);\n[/asy]',
        "The set {1, 2, 3, 4} is a run, as is 5, 6, 7, ...",
        "\\begin{array}{c|c} \\hspace{12pt} \\end{array}",
        "It is 100% wool, for 24 hours and 7 days.",
        "The 3rd and the 21st came.",
        "An angle of $90^\\circ$ or of $360$ degrees.",
    ],
)
def test_what_a_number_cannot_change_in_stays(text):
    for seed in range(10):
        copy = changed(text, seed)
        assert re.findall(r"\d+", copy) == re.findall(r"\d+", text)


def test_a_number_does_not_become_one_that_stays():
    text = "Let $z^3$ be a cube. In the end there are $2$ of them."
    assert {re.findall(r"\d", changed(text, seed))[1] for seed in range(20)} == {"4"}


def test_latex_stays_whole():
    text = r"Find $\frac{1}{2} + \frac34 \cdot 5x^2 - \sqrt7$ where $y\leq15$ and $\left(\frac{11}{9}, 8\right)$."
    for seed in range(20):
        copy = changed(text, seed)
        assert re.sub(r"\d+", "N", copy) == re.sub(r"\d+", "N", text)
        numbers, old = re.findall(r"\d+", copy), re.findall(r"\d+", text)
        assert numbers[0] == "1" and numbers[1] != "2" and numbers[4] == "2"
        assert all(len(new) == len(before) for new, before in zip(numbers, old, strict=True))
        assert numbers[6] != "15"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Half of it went.", "A third of it went."),
        ("She has twice as many.", "She has three times as many."),
        ("One-third of the class left.", "One-fourth of the class left."),
        ("Two thirds of the class left.", "Three fourths of the class left."),
        ("It took an hour and a half.", "It took an hour and a half."),
        ("The first half was dull.", "The first half was dull."),
    ],
)
def test_shares_in_words(text, expected):
    assert changed(text) == expected


# Names and variables


@pytest.mark.parametrize("seed", range(10))
def test_names_change_everywhere_and_keep_their_gender(seed):
    from hfpar.audit.names import FEMALE, MALE

    text = (
        "Clara met Bruno on Monday in May. If Bruno lends Clara's sister a pen, does Clara still have hers?"
    )
    found = re.fullmatch(
        r"(\w+) met (\w+) on Monday in May\. If (\w+) lends (\w+)'s sister a pen, does (\w+) still have hers\?",
        changed(text, seed),
    )
    first, second, third, fourth, fifth = found.groups()
    assert first == fourth == fifth != "Clara" and first in FEMALE
    assert second == third or second == "Bruno"
    assert second not in FEMALE or second in MALE


def test_a_name_of_no_list_changes_where_it_stands_as_a_persons():
    text = "The pen of Quorvath's aunt broke."
    assert "Quorvath" not in changed(text)
    for kept in ("They flew to New Zarland has a plan.", "A French pen, from the Zib company."):
        assert changed(kept) == kept


@pytest.mark.parametrize("seed", range(10))
def test_variables_change_only_where_nothing_else_late_does(seed):
    text = r"Let $x$ and $y$ be real. What is the largest $\sin(x) \cdot y$ that $\text{max}$ allows, with $dx$ fixed?"
    copy = changed(text, seed)
    first, second = re.match(r"Let \$(.)\$ and \$(.)\$", copy).groups()
    assert first not in "xe" and second not in "ye" and first != second
    assert rf"$\sin({first}) \cdot {second}$ that $\text{{max}}$ allows, with $dx$" in copy
    with_number = text + " At most $17$?"
    assert "$x$ and $y$" in changed(with_number, seed) and changed(with_number, seed) != with_number


@pytest.mark.parametrize(
    "text",
    [
        "In the figure $A$ lies on $BC$. [asy] label(A); [/asy]",
        r"What are $e$ and $i$, and $\int d$?",
        "Here the point A lies on $A$, and AB is a line in which $B$ lies.",
        "Give the line as $y = mx + b$.",
    ],
)
def test_letters_that_stay(text):
    assert changed(text) == text
    assert last_change(text) == 0


def test_spans_say_what_was_changed():
    text = "Otto bought 12 eggs and 30 plums."
    copy = perturb(text, random.Random(3))
    assert [text[start:end] for start, end in copy.spans] == ["Otto", "12", "30"]
    assert perturb("Nothing here can be another.", random.Random(0)).spans == []
    assert perturb("", random.Random(0)).text == ""
    assert last_change(text) == text.index("30") + 2
    assert last_change("Nothing here can be another.") == 0


def test_sites_do_not_overlap():
    text = (
        r"Ada has one-third of 3/4 of 1,200 at 7:30; twenty-five or 25 of $\frac12$, thirty two, and three."
    )
    sites = find_sites(text)
    assert all(first.end <= second.start for first, second in zip(sites, sites[1:], strict=False))
    assert [text[site.start : site.end] for site in sites if site.kind == "word"] == [
        "twenty-five",
        "thirty two",
        "three",
    ]


# Sets


def test_copies_are_paired_deterministic_and_of_what_can_change():
    own = benchmark(
        "Ida picks 14 pears a day for 6 days. How many pears does Ida have?",
        "Nothing at all in this question could ever be another thing, could it?",
        "There are 38 hens. Every other part of this long text stays just the way it has always been.",
        "Otto has 25 nails and loses 10 of them. How many nails has Otto?",
    )
    first, again = perturbed_copies(own, None, 7), perturbed_copies(own, None, 7)
    assert first == again and first.sha256 != perturbed_copies(own, None, 8).sha256
    assert [item.pair_id for item in first.items] == ["0", "3"]
    assert first.answer_kind == "none" and all(item.answer is None for item in first.items)
    assert first.items[0].question != own.items[0].question
    one = perturbed_copies(own, 1, 7)
    assert len(one.items) == 1 and one.items[0] in first.items


def test_a_copy_is_no_item_of_the_benchmark():
    own = benchmark(*(f"There are {number} hens in this barn and {number} ducks." for number in range(2, 10)))
    assert perturbed_copies(own, None, 0).items == ()


def test_a_small_benchmark_has_several_copies_of_each_item():
    own = benchmark("Ida picks 14 pears a day for 6 days. How many pears does Ida have?")
    copies = perturbed_copies(own, 100, 0)
    assert len(copies.items) == 4 == len({item.question for item in copies.items})
    assert len({item.item_id for item in copies.items}) == 4
    assert {item.pair_id for item in copies.items} == {"0"}
    assert perturbed_copies(own, 0, 0).items == ()


def evaluated(question: str) -> Fraction:
    expression = re.search(r"\$(.*)\$", question)[1]
    expression = re.sub(r"\\frac\{(\d+)\}\{(\d+)\}", r"Fraction(\1, \2)", expression)
    expression = re.sub(r"(?<![\d(, ])(?<!\()\b|(?<=x)", "", expression)
    expression = expression.replace(r"\times", "*").replace(r"\div", "/").replace("^", "**")
    expression = re.sub(r"(?<![\w(])(\d+)(?![\d)]*,)", r"Fraction(\1)", expression)
    return eval(expression, {"Fraction": Fraction})


def test_random_calculations_are_distinct_and_their_answers_right():
    found = random_calculation(200, 3)
    assert len(found.items) == 200 == len({item.question for item in found.items})
    assert found == random_calculation(200, 3) != random_calculation(200, 4)
    steps = Counter()
    for item in found.items:
        steps[len(re.findall(r" \+ | - | \\times | \\div ", item.question))] += 1
        fraction = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}|(-?\d+)", item.answer)
        value = (
            Fraction(int(item.answer))
            if fraction[4]
            else Fraction(int(fraction[1] + fraction[2]), int(fraction[3]))
        )
        assert evaluated(item.question) == value
    assert steps == {number: 10 for number in range(1, 21)}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the benchmarks' files are not here")
@pytest.mark.parametrize(
    ("name", "file", "most_unchanged"), [("math500", "math500", 0.2), ("gsm8k", "gsm8k_test", 0.05)]
)
def test_most_items_of_a_benchmark_have_a_copy(name, file, most_unchanged):
    own = load_benchmark(name, {name: str(SHARED / f"{file}.jsonl")})
    copies = perturbed_copies(own, None, 0)
    assert len(copies.items) >= (1 - most_unchanged) * len(own.items)
    originals = {item.item_id: item.question for item in own.items}
    for copy in copies.items:
        original = originals[copy.pair_id]
        assert copy.question != original
        assert 0.8 < len(copy.question) / len(original) < 1.25
        # What LaTeX is made of stays.
        assert re.findall(r"\\[A-Za-z]+|[{}$\[\]]", copy.question) == re.findall(
            r"\\[A-Za-z]+|[{}$\[\]]", original
        )
