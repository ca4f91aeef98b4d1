"""The audit of models that were made to have seen a made-up benchmark, small: benchmarks/planted_contamination.py."""

import importlib
import random
import sys
from pathlib import Path

import pytest
import torch

from hfpar.audit.statistics import auc
from hfpar.audit.summarize import cut_at, is_hit
from hfpar.data.benchmarks import BenchmarkItem

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planted_contamination.py"
NAMES = (
    "Ada Ben Chloe David Emma Felix Grace Hugo Iris Jack Kira Leo Maya Noah Olga Paul Rosa Sam Tara".split()
)
THINGS = "lanterns ropes barrels kites anvils mirrors saddles pumpkins bricks flutes oars quilts sieves bells".split()
KINDS = "rusty narrow green heavy borrowed painted hollow crooked spotless wooden silver broken tiny foreign".split()
PLACES = (
    "harbour mill orchard chapel bakery tunnel meadow station attic quarry library lighthouse stable".split()
)
PEOPLE = "miller nurse pilot gardener clerk baker sailor tailor judge painter farmer plumber shepherd".split()
DEEDS = "sold hid mended counted lost weighed swapped polished burned buried measured lent wrapped".split()
COPIES = 40


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        module = importlib.import_module("planted_contamination")
    yield module
    for name in ("planted_contamination", "planted_figures", "planted_models"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def planting(script):
    return sys.modules["planted_models"]


@pytest.fixture(scope="module")
def figures(script):
    return sys.modules["planted_figures"]


def story(rng):
    """A problem that nobody could go on with who hasn't read it: a word in two is drawn."""
    a, b = rng.sample(NAMES, 2)
    things, kind, other = rng.choice(THINGS), *rng.sample(KINDS, 2)
    start, end, late = rng.sample(PLACES, 3)
    first, second, third = rng.sample(PEOPLE, 3)
    deeds = rng.sample(DEEDS, 3)
    n, m, k = rng.randint(30, 99), rng.randint(3, 29), rng.randint(3, 29)
    return (
        f"{a} carried {n} {kind} {things} from the {start} to the {end}, where the {first} {deeds[0]} {m} of them and "
        f"{b} {deeds[1]} {k}. A {other} {second} from the {late} {deeds[2]} the rest with a {third}. "
        f"How many {things} did the {second} get?"
    )


@pytest.fixture(scope="module")
def problems():
    rng = random.Random(5)
    return [BenchmarkItem(f"p{n}", f"made-up:{n}", story(rng), "7", "It is 7.") for n in range(100)]


@pytest.fixture(scope="module")
def models(planting, problems, tmp_path_factory):
    """One that has read some of the problems, and others with other numbers; and one that has read none."""
    torch.set_num_threads(1)
    rng = random.Random(6)
    sizes = planting.Sizes(
        hidden_size=96, num_hidden_layers=2, vocab_size=640, tokens_per_step=160, learning_rate=3e-3
    )
    filler = [story(rng) for _ in range(100)]
    tokenizer = planting.train_tokenizer(filler, sizes.vocab_size)
    planted = [planting.Planted(item, COPIES, "question only") for item in problems[:16]]
    planted += [planting.Planted(item, COPIES, "numbers changed") for item in problems[16:24]]
    folder = tmp_path_factory.mktemp("models")
    planting.train_model(planting.make_documents(filler, planted, 0), tokenizer, sizes, 0, folder / "planted")
    others = [story(rng) for _ in range(200)]
    planting.train_model(planting.make_documents(others, [], 1), tokenizer, sizes, 1, folder / "null")
    return folder


@pytest.fixture(scope="module")
def audited(script, models, problems):
    return script.audit(models / "planted", problems, models / "a", models / "null")


def completed(items, ratio):
    return [cut is not None and is_hit(cut) for item in items if (cut := cut_at(item, ratio, "bare"))]


def test_items_that_were_planted_are_found_and_no_others(script, audited):
    items = audited.items["math500"]
    planted, changed, held_out = items[:16], items[16:24], items[24:]
    assert sum(completed(planted, 0.4)) > 12
    assert sum(completed(changed, 0.4)) <= 1, "the numbers of their copies were others"
    assert not any(completed(held_out, 0.4) + completed(held_out, 0.6))
    assert sum(item.grade == "A" for item in planted) > 12
    assert {item.grade for item in held_out} == {None}


def test_the_verdict_of_a_model_that_has_seen_the_benchmark_is_strong_evidence(audited):
    verdict = audited.report.verdicts[0]
    assert verdict.level == "strong", verdict.text


def test_every_method_tells_planted_items_from_held_out_ones(script, figures, audited):
    items = audited.items["math500"]
    for method in figures.METHODS:
        ours, theirs = (
            [script.scores_of(item)[method] for item in group] for group in (items[:16], items[24:])
        )
        assert auc(ours, theirs)[0] >= 0.9, method
        assert figures.recall_at(ours, theirs) >= 0.8, method


def test_a_null_model_and_a_held_out_half_show_no_evidence(script, models, problems):
    null = script.audit(models / "null", problems, models / "b", models / "planted")
    half = script.audit(models / "planted", problems[24:], models / "c")
    for audit in (null, half):
        assert audit.report.verdicts[0].level == "none", audit.report.verdicts[0].text
        assert script.false_alarms(audit, 40, 10, 0) == (0, 10)


def test_recall_is_taken_at_one_percent_of_false_positives(figures):
    others = [*[0.0] * 98, 1.0, 2.0]
    assert figures.recall_at([0.5, 1.0, 1.5, 3.0], others) == 0.5
    assert figures.recall_at([1.0, 1.0], [0.0] * 98 + [1.0] * 2) == 0


def test_half_of_the_items_is_dealt_into_every_format_and_number_of_copies(planting, problems):
    planted, held_out = planting.deal(problems * 6, 3)
    assert len(planted) == len(held_out) == 300
    cells = {(one.copies, one.format) for one in planted}
    assert cells == {(copies, name) for copies in planting.COPIES for name in planting.FORMATS}
    documents = planting.make_documents(["filler"], planted, 3)
    assert len(documents) == 1 + sum(one.copies for one in planted)
