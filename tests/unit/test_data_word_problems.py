"""The demo's word problems: right answers, disjoint parts, equal output for equal seeds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hfpar.data import word_problems
from hfpar.data.word_problems import extract_answer, generate_conversations, write_demo_data


def questions(rows: list[word_problems.Conversation]) -> list[str]:
    return [row["messages"][0]["content"] for row in rows]


def test_parts_are_disjoint_for_any_seeds() -> None:
    train = {
        question for seed in (0, 1) for question in questions(generate_conversations(8000, seed, "train"))
    }
    held_out = {
        question for seed in (0, 7) for question in questions(generate_conversations(500, seed, "eval"))
    }
    assert len(held_out) > 900
    assert not train & held_out


def test_no_problem_twice_and_equal_for_equal_seeds() -> None:
    rows = generate_conversations(5000, 3, "train")
    assert len(set(questions(rows))) == 5000
    assert rows == generate_conversations(5000, 3, "train")
    assert rows != generate_conversations(5000, 4, "train")


def test_answers_are_right_and_use_the_numbers_of_the_question() -> None:
    kinds = set()
    for row in generate_conversations(2000, 0, "eval"):
        user, assistant = row["messages"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        match = re.fullmatch(r"(\d+) ([-+*/]) (\d+) = (\d+)\. The answer is (\d+)\.", assistant["content"])
        assert match, assistant["content"]
        a, sign, b, result, answer = match.groups()
        kinds.add(sign)
        exact = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b), "/": int(a) / int(b)}[sign]
        assert exact == int(result) == int(answer) > 0
        assert sorted(re.findall(r"\d+", user["content"])) == sorted([a, b])
        assert extract_answer(assistant["content"]) == answer
    assert kinds == set("+-*/")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is 3. No: the answer is -12.", "-12"),
        ("The answer is 07", "7"),
        ("7", None),
        ("The answer is seven.", None),
        ("", None),
    ],
)
def test_extract_answer(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


def test_more_problems_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, values in {"NAMES": ["Ada", "Ben"], "THINGS": ["pens"]}.items():
        monkeypatch.setattr(word_problems, name, values)
    with pytest.raises(ValueError, match=r"only \d+ of 1000 distinct eval problems"):
        generate_conversations(1000, 0, "eval")


def test_files_appear_whole(tmp_path: Path) -> None:
    train, held_out = write_demo_data(tmp_path / "demo", num_train=30, num_eval=5, seed=1)
    assert sorted(path.name for path in (tmp_path / "demo").iterdir()) == ["eval.jsonl", "train.jsonl"]
    rows = [json.loads(line) for line in train.read_text().splitlines()]
    assert rows == generate_conversations(30, 1, "train")
    assert [json.loads(line) for line in held_out.read_text().splitlines()] == generate_conversations(
        5, 1, "eval"
    )
