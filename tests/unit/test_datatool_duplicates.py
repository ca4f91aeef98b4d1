"""Rows that say the same, by digests."""

import numpy as np
import pytest

from hfpar.data.build import Recipe
from hfpar.data.chat.encode import EncodeOptions
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.rows import Place
from hfpar.datatool.duplicates import MOST_PAIRS, Repeats, RowDigests
from hfpar.datatool.facts import inspect_chunk

RECIPE = Recipe("auto", None, EncodeOptions(max_length=100))


def chunk(*rows, path="a.jsonl", first=1):
    return Chunk(path, "line", first, "values", list(enumerate(rows, start=first)))


def digests(*chunks):
    found = RowDigests()
    for item in chunks:
        found.add(item.path, item.unit, inspect_chunk(item, None, RECIPE))
    return found


def chat(question, answer, **more):
    return {
        "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    }


def line(number, path="a.jsonl"):
    return Place(path, "line", number)


def test_the_first_of_equal_rows_is_named():
    rows = [chat("a", "b"), chat("c", "d"), chat("a", "b"), {"bad": 1}, chat("a", "b"), chat("c", "d")]
    same, other = digests(chunk(*rows)).repeats()
    assert same == Repeats(3, [(line(3), line(1)), (line(5), line(1)), (line(6), line(2))])
    assert other == Repeats(0, [])


def test_equal_prompts_with_other_answers_are_counted_apart():
    rows = [chat("a", "b"), chat("a", "c"), chat("a", "b"), chat("a", "d"), chat("x", "b")]
    same, other = digests(chunk(*rows)).repeats()
    assert same == Repeats(1, [(line(3), line(1))])
    assert other == Repeats(2, [(line(2), line(1)), (line(4), line(1))])


@pytest.mark.parametrize(
    ("row", "is_equal"),
    [
        (chat("a", "b", train=False), True),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, True),
        ({"prompt": chat("a", "b")["messages"][:1], "completion": chat("a", "b")["messages"][1:]}, True),
        ({**chat("a", "b"), "tools": [{"name": "search"}]}, False),
        ({**chat("a", "b"), "chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"prompt": "a", "completion": "b"}, False),
        (chat("a ", "b"), False),
    ],
)
def test_what_counts_as_equal(row, is_equal):
    same, _ = digests(chunk(chat("a", "b"), row)).repeats()
    assert same.count == is_equal


def test_prompts_of_text_and_text_without_a_prompt():
    rows = [
        {"prompt": "a", "completion": "b"},
        {"prompt": "a", "completion": "c"},
        {"text": "x"},
        {"text": "y"},
    ]
    same, other = digests(chunk(*rows)).repeats()
    assert (same.count, other) == (0, Repeats(1, [(line(2), line(1))]))


def test_a_system_message_belongs_to_the_prompt():
    system = {"role": "system", "content": "Be kind."}
    with_system = {"messages": [system, *chat("a", "c")["messages"]]}
    assert digests(chunk(chat("a", "b"), with_system)).repeats()[1].count == 0


def test_over_chunks_and_files():
    found = digests(
        chunk(chat("a", "b")), chunk(chat("c", "d"), first=2), chunk(chat("a", "b"), path="b.jsonl")
    )
    assert found.repeats()[0] == Repeats(1, [(line(1, "b.jsonl"), line(1))])


def test_only_the_first_pairs_are_kept():
    same, _ = digests(chunk(*[chat("a", "b")] * 20)).repeats()
    assert (same.count, same.pairs) == (19, [(line(row), line(1)) for row in range(2, 2 + MOST_PAIRS)])


def test_rows_of_another_data_set():
    train = digests(chunk(chat("a", "b"), chat("c", "d"), chat("c", "d")))
    held_out = digests(chunk(chat("x", "y"), chat("c", "d"), chat("x", "y"), path="e.jsonl"))
    assert held_out.rows_shared_with(train) == Repeats(1, [(line(2, "e.jsonl"), line(2))])
    assert train.rows_shared_with(held_out).count == 2


def test_no_rows():
    nothing = RowDigests()
    assert nothing.repeats() == (Repeats(), Repeats())
    assert nothing.rows_shared_with(nothing) == Repeats()


def test_many_rows_agree_with_a_dictionary():
    numbers = np.random.default_rng(0).integers(0, 400, (1000, 2)).tolist()
    rows = [chat(f"q{question // 10}", f"a{answer // 40}") for question, answer in numbers]
    same, other = digests(chunk(*rows)).repeats()
    whole, asked = {}, {}
    num_same = num_other = 0
    for row in rows:
        question, answer = (message["content"] for message in row["messages"])
        if (question, answer) in whole:
            num_same += 1
        elif question in asked:
            num_other += 1
        whole[question, answer] = asked[question] = True
    assert (same.count, other.count) == (num_same, num_other)
    assert num_same > 100 and num_other > 100
