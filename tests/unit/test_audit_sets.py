"""What an audit is made of: sets and their cuts, kept lines, batches, orders."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hfpar.audit.answering import judge_answers, with_own_answer
from hfpar.audit.order import make_shards, order_test, rank_of
from hfpar.audit.prefix import TailLimits, TextTokenizer
from hfpar.audit.probe import PlannedItem
from hfpar.audit.ranks import batches_of
from hfpar.audit.results import CutResult, ItemResult
from hfpar.audit.sets import AuditSet, load_sets, plan_items, spread
from hfpar.audit.store import LineStore, key_of
from hfpar.audit.summarize import SetInfo
from hfpar.config.audit_schema import AuditConfig
from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.errors import ConfigError
from hfpar.models.tiny import build_tiny_model


def benchmark(name: str, questions: Sequence[str], answer: str | None = None) -> Benchmark:
    items = tuple(BenchmarkItem(str(n), f"line {n}", q, answer, None) for n, q in enumerate(questions))
    return Benchmark(name, items, "gsm8k" if answer else "none", f"{name}.jsonl", "0", 0)


def audit_set(name: str, questions: Sequence[str], applies_to: tuple[str, ...] = ()) -> AuditSet:
    info = SetInfo(name, "control" if applies_to else "benchmark", "file", "", "", 0, applies_to)
    return AuditSet(info, benchmark(name, questions))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder, hidden_size=16, intermediate_size=16, num_hidden_layers=1)
    return TextTokenizer(AutoTokenizer.from_pretrained(folder))


# Sets


def test_a_controls_tail_that_a_benchmark_ends_with_isnt_probed(tokenizer: TextTokenizer) -> None:
    end = "and then all of them go home together, in the evening at six?"
    sets = [
        audit_set("bench", [f"Ada has 12 plums {end}", "Ben has nothing to do with any of this here at all"]),
        audit_set("other", [f"Ada has 12 pears  {end.replace(',', ',  ')}"]),
        audit_set("copies", [f"Zoe has 47 figs {end}", f"Zoe {end[:-4]} ten past 47?"], ("bench",)),
        audit_set("elsewhere", [f"Zoe has 47 figs {end}"], ("other",)),
    ]
    planned = plan_items(sets, tokenizer, [0.4], TailLimits(3, 8), None)
    skipped = {(item.set, item.item.item_id): item.cuts[0].skipped for item in planned}
    assert skipped == {
        ("bench", "0"): None,
        ("bench", "1"): None,
        ("other", "0"): None,
        ("copies", "0"): "same_as_benchmark",
        ("copies", "1"): None,
        ("elsewhere", "0"): "same_as_benchmark",  # white space makes no difference
    }


def test_a_short_tail_that_a_benchmark_ends_with_isnt_probed_either(tokenizer: TextTokenizer) -> None:
    sets = [
        audit_set("bench", ["Ada has 12 plums. How many?"]),
        audit_set("c", ["Zoe, 47? How many?"], ("bench",)),
    ]
    planned = plan_items(sets, tokenizer, [0.5], TailLimits(1, 4), None)
    assert [item.cuts[0].skipped for item in planned] == [None, "same_as_benchmark"]


def test_a_tail_that_several_items_of_a_set_have_isnt_probed(tokenizer: TextTokenizer) -> None:
    end = "give the letter of the one choice that is correct, on a line of its own."
    variants = benchmark(
        "copies", [f"Zoe has 47 figs, {end}", f"Zoe has 9 figs, {end}", f"Bo has 8 pears, {end}"]
    )
    variants = replace(
        variants,
        items=tuple(
            replace(item, pair_set="bench", pair_id="0" if n < 2 else "1")
            for n, item in enumerate(variants.items)
        ),
    )
    sets = [
        audit_set(
            "bench",
            [f"Ada has 12 plums; {end}", f"Ben, who is 9, asks: {end}", "An item of its own, and no other"],
        ),
        AuditSet(SetInfo("copies", "control", "file", "", "", 0, ()), variants),
    ]
    planned = plan_items(sets, tokenizer, [0.5], TailLimits(3, 8), None)
    assert [item.cuts[0].skipped for item in planned] == [
        "shared_tail", "shared_tail", None, "shared_tail", "shared_tail", "shared_tail"
    ]  # fmt: skip
    # Variants of one item don't count as others.
    alone = [AuditSet(sets[1].info, replace(variants, items=variants.items[:2]))]
    planned = plan_items(alone, tokenizer, [0.5], TailLimits(3, 8), None)
    assert [item.cuts[0].skipped for item in planned] == [None, None]


def test_texts_that_the_model_cant_read(tokenizer: TextTokenizer) -> None:
    [item] = plan_items(
        [audit_set("bench", ["one two three four five six"])], tokenizer, [0.4, 0.6], TailLimits(), 3
    )
    assert item.is_too_long and [cut.skipped for cut in item.cuts] == ["too_long", "too_long"]


def test_spread_over_a_file() -> None:
    whole = benchmark("bench", [f"q{n}" for n in range(10)])
    assert [item.item_id for item in spread(whole, 4).items] == ["0", "2", "5", "7"]
    assert spread(whole, 10) is whole and spread(whole, None) is whole


def test_of_a_control_what_varies_a_benchmarks_items_comes_first() -> None:
    whole = benchmark("c", [f"q{n}" for n in range(20)])
    items = [replace(item, pair_id="p" if n in (1, 4, 5, 9) else None) for n, item in enumerate(whole.items)]
    control = replace(whole, items=tuple(items))
    assert [item.item_id for item in spread(control, 6).items] == ["0", "1", "4", "5", "9", "12"]
    assert [item.item_id for item in spread(control, 3).items] == ["1", "4", "5"]
    # Copies of each item in the same order: each kind of copy is drawn.
    of_each = replace(
        whole, items=tuple(replace(item, pair_id=str(n // 4)) for n, item in enumerate(whole.items))
    )
    assert [item.item_id for item in spread(of_each, 5).items] == ["0", "5", "10", "15", "16"]


def test_a_thinned_control_varies_the_items_that_are_left(tmp_path: Path) -> None:
    originals = [{"question": f"Ada has {n} plums."} for n in range(20)]
    copies = [{"question": f"Bo has {n} plums.", "of": row["question"]} for n, row in enumerate(originals)]
    for name, rows in (("bench", originals), ("copies", copies[::-1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "bench.yaml").write_text("name: bench\npath: bench.jsonl\nfields: {question: question}\n")
    (tmp_path / "copies.yaml").write_text(
        "name: copies\npath: copies.jsonl\nfields: {question: question, pair: of}\n"
    )
    config = AuditConfig(
        model_name_or_path="m",
        benchmarks=str(tmp_path / "bench.yaml"),
        controls={"copies": str(tmp_path / "copies.yaml")},
        builtin_controls="none",
        max_items=5,
    )
    kept, varied = (one.benchmark.items for one in load_sets(config))
    assert {item.pair_id for item in varied} == {item.item_id for item in kept} and len(kept) == 5


def test_controls_of_an_audit(tmp_path: Path) -> None:
    rows = [
        {"question": f"Ada has {n} plums and gives {n + 3} pears to each of {n + 7} friends."}
        for n in range(20)
    ]
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = f"name: {name}\npath: {name}.jsonl\nfields: {{question: question}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    config = AuditConfig(
        model_name_or_path="m",
        benchmarks=[str(tmp_path / "one.yaml"), str(tmp_path / "two.yaml")],
        controls={"mine": str(tmp_path / "one.jsonl"), "two/own": str(tmp_path / "two.jsonl")},
        num_control_items=12,
    )
    found = {
        one.name: (one.info.kind, one.info.applies_to, len(one.benchmark.items)) for one in load_sets(config)
    }
    assert found == {
        "one": ("benchmark", (), 20),
        "two": ("benchmark", (), 20),
        "one-perturbed": ("perturbed", ("one",), 12),
        "two-perturbed": ("perturbed", ("two",), 12),
        "random_calculation": ("random_calculation", ("one", "two"), 12),
        "mine": ("file", ("one", "two"), 20),
        "own": ("file", ("two",), 20),
    }


# Batches and kept lines


def test_batches_hold_every_text_once_and_keep_to_the_budget() -> None:
    lengths = [5, 90, 3, 40, 40, 41, 200, 1]
    batches = batches_of(lengths, 100)
    assert sorted(index for batch in batches for index in batch) == list(range(8))
    assert all(sum(lengths[index] for index in batch) <= 100 for batch in batches if batch != [6])


def lines(*keys: str) -> list[dict[str, object]]:
    return [{"set": "s", "item_id": key, "value": key * 2} for key in keys]


def test_lines_of_a_stopped_run_are_brought_together(tmp_path: Path) -> None:
    store = LineStore(tmp_path, "items")
    store.append(lines("a", "b"), rank=0)
    store.append(lines("c"), rank=1)
    store.append(lines("d"), rank=1)
    with store.part(1).open("a") as file:
        file.write('{"set": "s", "item_id": "e", "val')
    assert set(store.collect()) == {("s", key) for key in "abcd"}
    assert not list(tmp_path.glob(".*")) and len(store.path.read_text().splitlines()) == 4
    store.append([{**lines("a")[0], "value": "another"}, *lines("f")], rank=0)
    assert store.read()["s", "a"]["value"] == "aa"  # what is there already isn't replaced
    assert [key_of(line)[1] for line in store.read().values()] == ["a", "b", "c", "d", "f"]
    store.drop_part(0)
    assert len(store.read()) == 4


def test_a_full_disk_keeps_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LineStore(tmp_path, "items")
    store.write(lines("a"))

    def full(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hfpar.whole_path.os.replace", full)
    with pytest.raises(ConfigError, match=r"No space left on device.*what was finished is kept"):
        store.write(lines("a", "b"))
    assert len(store.read()) == 1


# Orders


def test_orders_of_a_shard() -> None:
    one = audit_set("bench", [f"question {n}" for n in range(50)])
    shards = make_shards(one, lambda texts: [3] * len(texts), 100)
    assert len(shards) == 6 and shards[1].questions[0] == "question 8"
    orders = shards[0].orders(19, seed=1)
    assert len(set(orders)) == 20 and orders == shards[0].orders(19, seed=1) != shards[1].orders(19, seed=1)
    assert orders[0].split("\n\n") == [f"question {n}" for n in range(8)]
    assert all(sorted(order.split("\n\n")) == sorted(orders[0].split("\n\n")) for order in orders)
    assert make_shards(one, lambda texts: [3] * len(texts), 39) == []  # eight items and what is between them


def test_the_files_own_order_may_be_the_likeliest() -> None:
    assert rank_of([-1.0, -2.0, -3.0]) == 0
    assert rank_of([-2.0, -2.0, -1.0, -3.0]) == 2  # as likely doesn't count for it
    assert order_test("b", [0, 0, 0, 0], 9).p_value == pytest.approx(1e-4)
    assert order_test("b", [0, 0], 9).p_value is None


# Answers


def test_answers_are_judged() -> None:
    item = BenchmarkItem("0", "", "How many?", "2+3=5\n#### 5", None)
    cuts = [
        CutResult(0.4, "bare", written=" many? 2+3=5\n#### 5", is_complete=True),
        CutResult(0.6, "bare", written="? It is 6.", is_complete=True),
        CutResult(0.8, "bare", written=" many? 5"),
    ]
    result = ItemResult("s", "0", "", "How many?", 3, [], 0, [0, 0], {}, cuts)
    planned = PlannedItem("s", item, None, [])  # type: ignore[arg-type]
    [judged] = judge_answers([result], [planned], lambda name: "gsm8k")
    assert [(cut.answer, cut.answer_right) for cut in judged.cuts] == [
        ("5", True),
        ("6", False),
        (None, None),
    ]
    assert judged.grade == "C"
    [unjudged] = judge_answers([result], [planned], lambda name: "none")
    assert unjudged.grade is None and all(cut.answer_right is None for cut in unjudged.cuts)
    own = with_own_answer(judged, planned, " 2 + 3 = 5\n#### 5\nQuestion: How few?\n#### 9", "gsm8k")
    assert (own.own_answer, own.own_answer_right) == ("5", True)
