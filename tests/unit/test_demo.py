"""The demo's benchmark and what of it is planted; how the audit's items are counted."""

from __future__ import annotations

import json
import re
from pathlib import Path

from transformers import AutoTokenizer

from hfpar import demo
from hfpar.audit.answers import gold_answer
from hfpar.audit.controls import perturbed_copies
from hfpar.audit.prefix import TailLimits, TextTokenizer, find_cut
from hfpar.audit.statistics import MIN_CONTROL_ITEMS
from hfpar.data.benchmarks import load_benchmarks
from hfpar.data.demo_benchmark import BENCHMARK_NAME, NUM_COPIES, generate_stories, write_benchmark
from hfpar.models.tiny import build_tiny_model
from hfpar.train import demo_assets
from hfpar.train.demo_assets import DemoAssets


def test_answers_are_right_and_use_the_numbers_of_the_question() -> None:
    stories = generate_stories()
    assert stories == generate_stories()
    assert len({story.question for story in stories}) == len({story.id for story in stories}) == 60
    for story in stories:
        match = re.fullmatch(r"(\d+(?: [+-] \d+){5}) = (\d+)\n#### (\d+)", story.answer)
        assert match, story.answer
        terms, total, answer = match.groups()
        assert sum(int(term) for term in re.findall(r"[+-]?\d+", terms.replace(" ", ""))) == int(total)
        assert int(answer) == int(total) > 0
        assert re.findall(r"\d+", story.question) == re.findall(r"\d+", terms)


def test_a_sixth_is_planted_word_for_word_and_the_benchmark_does_not_tell(tmp_path: Path) -> None:
    stories = generate_stories()
    write_benchmark(tmp_path, stories)
    planted = [json.loads(line) for line in (tmp_path / "planted.jsonl").read_text().splitlines()]
    ids = [story.id for story in stories if story.planted]
    assert [row["id"] for row in planted] == ids * NUM_COPIES
    assert len(ids) == 10
    (benchmark,) = load_benchmarks([str(tmp_path / "benchmark.yaml")], {})
    assert (benchmark.name, benchmark.answer_kind, len(benchmark.items)) == (BENCHMARK_NAME, "gsm8k", 60)
    texts = {row["id"]: row["text"] for row in planted}
    for item, story in zip(benchmark.items, stories, strict=True):
        assert item.item_id == story.id
        assert gold_answer(item, "gsm8k") == story.answer.rpartition(" ")[2]
        assert (item.item_id in texts) == story.planted
        if story.planted:
            assert texts[item.item_id] == f"{item.question} The answer is {gold_answer(item, 'gsm8k')}."
    keys = {
        key for line in (tmp_path / "benchmark.jsonl").read_text().splitlines() for key in json.loads(line)
    }
    assert keys == {"id", "question", "answer"}


def test_every_item_can_be_probed_and_has_controls_with_power(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model")
    write_benchmark(tmp_path, generate_stories())
    (benchmark,) = load_benchmarks([str(tmp_path / "benchmark.yaml")], {})
    tokenizer = TextTokenizer(AutoTokenizer.from_pretrained(tmp_path / "model"))
    copies = perturbed_copies(benchmark, 300, 42)
    assert len(copies.items) >= MIN_CONTROL_ITEMS
    for text in tokenizer([item.question for item in (*benchmark.items, *copies.items)]):
        for ratio in (0.4, 0.6):
            cut = find_cut(text, ratio, tokenizer, TailLimits())
            assert cut.skipped is None
            assert len(re.findall(r"\d+", text.text[cut.position :])) >= 2  # guessed once in thousands
            assert ratio > 0.4 or cut.tail_words >= 15


def test_assets_of_an_earlier_version_get_the_benchmark(tmp_path: Path, monkeypatch) -> None:
    def no_folder(folder: Path) -> None:
        folder.mkdir(parents=True)

    monkeypatch.setattr("hfpar.models.tiny.build_tiny_model", no_folder)
    assets = DemoAssets.beside(tmp_path / "run")
    assets.folder.mkdir()
    assets.eval_data.write_text("{}\n")
    assets.build()
    assert assets.eval_data.read_text() == "{}\n"
    assert assets.benchmark.is_file()
    assert assets.planted_data.is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["demo-assets"]
    monkeypatch.setattr(demo_assets.shutil, "rmtree", None)
    assets.build()  # nothing to do any more


def test_planted_items_and_others_are_counted_by_grade(tmp_path: Path) -> None:
    assets = DemoAssets(tmp_path)
    assets.planted_data.write_text(
        "".join(json.dumps({"id": name, "text": "-"}) + "\n" for name in "aabbcdd")
    )
    grades = {"a": "A", "b": "B", "c": "C", "d": None, "e": "B", "f": "C", "g": None}
    items = [{"set": BENCHMARK_NAME, "item_id": name, "grade": grade} for name, grade in grades.items()]
    items.append({"set": f"{BENCHMARK_NAME}-perturbed", "item_id": "c", "grade": "A"})
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    assert demo.compare_with_planted(tmp_path, assets) == demo.Planted(2, 4, 1, 3)
