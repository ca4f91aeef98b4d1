"""Every gold answer of the public files equals itself and what its reference solution says, and no other."""

import json
import time
from itertools import combinations
from pathlib import Path

import pytest

from hfpar.audit.answers import answers_equal, gold_answer, is_right
from hfpar.audit.answers.parse import parse
from hfpar.data.benchmarks import BenchmarkItem

DATA = Path(__file__).parents[3] / "shared" / "data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the public benchmark files aren't here")


def rows(name):
    return [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]


def golds(name, kind):
    fields = {"item_id": "0", "place": name, "question": "?", "solution": None}
    return [gold_answer(BenchmarkItem(answer=row["answer"], **fields), kind) for row in rows(name)]


def test_math500():
    found = rows("math500.jsonl")
    assert len(found) == 500
    for row, gold in zip(found, golds("math500.jsonl", "math"), strict=True):
        assert answers_equal(gold, gold, "math", symbolic=False)
        assert is_right(gold, row["solution"], "math", symbolic=False), gold
        assert is_right(
            gold, f"So it is $\\boxed{{{gold}}}.$\n\nProblem: $\\boxed{{-77}}$", "math", symbolic=False
        )
        assert is_right(gold, f"The answer is ${gold}$.", "math", symbolic=False), gold
        assert parse(gold).value is not None


@pytest.mark.parametrize(("name", "count"), [("gsm8k_test.jsonl", 1319), ("gsm8k_train.jsonl", 7473)])
def test_gsm8k(name, count):
    found = rows(name)
    assert len(found) == count
    for row, gold in zip(found, golds(name, "gsm8k"), strict=True):
        assert answers_equal(gold, gold, "gsm8k")
        assert is_right(gold, row["answer"], "gsm8k"), row["answer"]
        assert is_right(gold, row["answer"] + "\n\nQuestion: 3?\n#### 77777", "gsm8k")


def test_unanswerable_questions_have_no_gold_answer():
    answers = golds("gsm_plus_mini.jsonl", "gsm8k")
    assert len(answers) == 2400
    assert sum(answer is None for answer in answers) == sum(
        row["answer"] == "None" for row in rows("gsm_plus_mini.jsonl")
    )


def test_different_gold_answers_differ():
    answers = sorted(set(golds("math500.jsonl", "math")))
    start = time.process_time()
    pairs = list(combinations(answers, 2))
    hits = [pair for pair in pairs if answers_equal(*pair, "math", symbolic=False)]
    assert len(pairs) / (time.process_time() - start) > 10_000
    # Each was looked at: units, currencies and spaces (9), one label, one list in two orders, one number's commas.
    assert len(hits) == 12
