"""Benchmarks and controls: from files to items, and one line for what can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hfpar.data import benchmarks as module
from hfpar.data.benchmarks import (
    Benchmark,
    load_benchmark,
    load_benchmarks,
    load_control,
    parse_benchmark_files,
)
from hfpar.errors import ConfigError, DataError

BALLS = "Ada has three balls and finds four more. How many has she?"
BOATS = "A boat carries nine people on each of two trips. How many cross?"
SHEEP = "Of twelve sheep a third are black. How many are not?"


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def math_row(question: str, answer: str = "7", **more: Any) -> dict[str, Any]:
    return {"problem": question, "answer": answer, "solution": f"It is {answer}.", **more}


def gsm8k(tmp_path: Path, *questions: str) -> Benchmark:
    rows = [{"question": question, "answer": "2 and 2 is 4\n#### 4"} for question in questions]
    return load_benchmark("gsm8k", {"gsm8k": write(tmp_path / "gsm8k.jsonl", *rows)})


def error_of(name: str, files: dict[str, str]) -> str:
    with pytest.raises(DataError) as caught:
        load_benchmark(name, files)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_math500_from_a_file(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", math_row(BALLS, unique_id="algebra/1"), math_row(BOATS, "18"))
    found = load_benchmark("math500", {"math500": path, "other": "unused"})
    assert (found.name, found.answer_kind, found.source, found.num_duplicates) == ("math500", "math", path, 0)
    assert len(found.sha256) == 64
    first, second = found.items
    assert (first.item_id, first.question, first.answer) == ("algebra/1", BALLS, "7")
    assert (first.solution, first.place, first.pair_id) == ("It is 7.", f"{path}, line 1", None)
    assert second.item_id == "1"


def test_gsm8k_solution_is_its_answer(tmp_path: Path) -> None:
    item = gsm8k(tmp_path, BALLS).items[0]
    assert item.answer == item.solution == "2 and 2 is 4\n#### 4"
    assert item.item_id == "0"


def test_same_question_twice_is_kept_once(tmp_path: Path) -> None:
    found = gsm8k(tmp_path, BALLS, BOATS, BALLS.replace(" ", "  ") + "\n", SHEEP)
    assert [item.item_id for item in found.items] == ["0", "1", "3"]
    assert found.num_duplicates == 1


def test_same_id_with_another_question(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", math_row(BALLS, unique_id="x"), math_row(BOATS, unique_id="x"))
    assert error_of("math500", {"math500": path}) == (
        f"{path}, line 2: has the id x of {path}, line 1, but another question"
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"answer": "1", "solution": "s"}, 'has no "problem", the question'),
        ({"problem": BALLS, "answer": None, "solution": "s"}, 'has no value in "answer", the answer'),
        ({"problem": " ", "answer": "1", "solution": "s"}, '"problem", the question, is empty'),
        ({"problem": [BALLS], "answer": "1", "solution": "s"}, '"problem" is a list where text is needed'),
        ([1], "a list where an object is needed"),
    ],
)
def test_rows_that_are_no_items(tmp_path: Path, row: Any, reason: str) -> None:
    path = write(tmp_path / "m.jsonl", math_row(BALLS), row)
    error = error_of("math500", {"math500": path})
    assert error.startswith(f"{path}, line 2: ")
    assert reason in error


def test_files_that_are_none(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.jsonl")
    assert error_of("gsm8k", {"gsm8k": empty}) == f"{empty}: the data set is empty"
    missing = str(tmp_path / "none.jsonl")
    assert error_of("gsm8k", {"gsm8k": missing}) == f"{missing}: no such file"


def test_unknown_benchmark() -> None:
    assert "did you mean math500?" in error_of("math-500", {})
    assert "there are math500, gsm8k, gsm8k_train" in error_of("zzz", {})


def test_without_the_hub_the_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> str:
        raise DataError("HuggingFaceH4/MATH-500: no such file, and the hub does not give it: offline")

    monkeypatch.setattr(module, "_fingerprint", unreachable)
    assert error_of("math500", {}) == (
        "HuggingFaceH4/MATH-500: no such file, and the hub does not give it: offline; "
        "give a file: --benchmark_files math500=PATH"
    )


def test_several_at_once(tmp_path: Path) -> None:
    files = {
        "math500": write(tmp_path / "m.jsonl", math_row(BALLS)),
        "gsm8k": write(tmp_path / "g.jsonl", {"question": BOATS, "answer": "#### 18"}),
    }
    assert [found.name for found in load_benchmarks(["gsm8k", "math500"], files)] == ["gsm8k", "math500"]
    with pytest.raises(DataError, match="benchmark gsm8k: given twice"):
        load_benchmarks(["gsm8k", "gsm8k"], files)
    with pytest.raises(DataError, match="benchmark_files math500: no such benchmark here; there are gsm8k"):
        load_benchmarks(["gsm8k"], files)


def test_name_and_path() -> None:
    assert parse_benchmark_files(["a=x=y.jsonl", "b = c"]) == {"a": "x=y.jsonl", "b": "c"}
    for wrong in (["a"], ["=x"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(ConfigError, match="--benchmark_files"):
            parse_benchmark_files(wrong)


# YAML


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return str(path)


OWN = "name: riddles\npath: data/r.jsonl\nfields: {question: q, answer: a, id: key}\nanswer_kind: exact\n"


def test_yaml_describes_a_benchmark(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "r.jsonl", {"q": BALLS, "a": 7, "key": "k1"})
    found = load_benchmark(yaml_file(tmp_path, OWN), {})
    assert (found.name, found.answer_kind) == ("riddles", "exact")
    assert (found.items[0].item_id, found.items[0].answer, found.items[0].solution) == ("k1", "7", None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OWN + "nmae: x\n", "line 5: unknown key nmae; did you mean name?"),
        (OWN + "name: x\n", "name is set twice, in lines 1 and 5"),
        (OWN.replace("question: q", "queston: q"), "unknown key queston; did you mean question?"),
        (OWN.replace("question: q, ", ""), "fields has no question"),
        (OWN.replace("name: riddles\n", ""), "has no name"),
        (OWN.replace("riddles", "3"), "name is 3; must be text"),
        (OWN + "hub: a/b\n", "needs one of path (a file) and hub (an id)"),
        (OWN + "split: test\n", "split is for a data set of the hub"),
        (OWN.replace("exact", "regex"), "answer_kind is regex; allowed are math, gsm8k, choice, exact, none"),
        (OWN.replace("answer_kind: exact\n", ""), "answer_kind is missing"),
        (OWN.replace("answer: a, ", ""), "answer_kind exact needs an answer in fields"),
        (OWN.replace("{question: q, answer: a, id: key}", "q"), "fields must be lines"),
        (OWN.replace("answer: a", "answer: 1"), "answer is 1; must be the name of a column"),
        ("name: [", "not valid YAML"),
    ],
)
def test_yaml_that_is_wrong(tmp_path: Path, text: str, reason: str) -> None:
    path = yaml_file(tmp_path, text)
    error = error_of(path, {})
    assert error.startswith(path)
    assert reason in error


def test_yaml_that_is_missing(tmp_path: Path) -> None:
    path = str(tmp_path / "no.yaml")
    assert error_of(path, {}) == f"{path}: no such file"


# Controls


@pytest.mark.parametrize("column", ["problem", "question", "prompt", "text"])
def test_control_finds_its_question(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "c.jsonl", {column: BALLS, "answer": 3})
    found = load_control("mine", path, [gsm8k(tmp_path, BOATS)])
    assert (found.name, found.answer_kind, found.items[0].question) == ("mine", "gsm8k", BALLS)
    assert (found.items[0].answer, found.items[0].pair_id) == ("3", None)


def test_control_is_paired_by_question_or_id(tmp_path: Path) -> None:
    benchmark = gsm8k(tmp_path, BALLS, BOATS)
    rows = [
        {"question": SHEEP, "seed_question": BOATS + " "},
        {"question": SHEEP + "!", "seed_question": "?"},
    ]
    by_question = load_control("a", write(tmp_path / "a.jsonl", *rows), [benchmark])
    assert [item.pair_id for item in by_question.items] == ["1", None]
    assert by_question.answer_kind == "none"
    by_id = load_control("b", write(tmp_path / "b.jsonl", {"text": SHEEP, "seed_id": 0}), [benchmark])
    assert by_id.items[0].pair_id == "0"


def test_control_of_an_ambiguous_id(tmp_path: Path) -> None:
    first = gsm8k(tmp_path, BALLS)
    second = load_benchmark("gsm8k_train", {"gsm8k_train": first.source})
    path = write(tmp_path / "c.jsonl", {"text": SHEEP, "seed_id": "0"})
    with pytest.raises(DataError, match="varies item 0, which gsm8k and gsm8k_train have"):
        load_control("c", path, [first, second])


def test_control_without_a_question(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", {"ask": BALLS})
    with pytest.raises(DataError, match="line 1: has no question; its keys are ask; one must be of problem"):
        load_control("c", path, [])


def test_control_by_yaml(tmp_path: Path) -> None:
    write(tmp_path / "r.jsonl", {"q": SHEEP, "of": BALLS})
    path = yaml_file(tmp_path, "name: r\npath: r.jsonl\nfields: {question: q, pair: of}\n")
    found = load_control("c", path, [gsm8k(tmp_path, BALLS)])
    assert (found.name, found.answer_kind, found.items[0].pair_id) == ("c", "none", "0")
