"""What is noted of a chunk, and how it piles up."""

import pickle

import numpy as np
import pytest

from hfpar.config.schema import DataSource
from hfpar.data.build import Recipe
from hfpar.data.chat.encode import EncodeOptions
from hfpar.data.reading.chunks import Chunk
from hfpar.data.reading.rows import Place
from hfpar.datatool.facts import inspect_chunk
from hfpar.datatool.gather import MOST_PLACES, DataFacts, SourceFacts
from hfpar.datatool.plot import plot_lengths, uses_log_axis
from hfpar.datatool.report import quantiles
from hfpar.errors import ConfigError

RECIPE = Recipe("auto", None, EncodeOptions(max_length=100))
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "a"},
]


def chunk(*rows, path="a.jsonl"):
    return Chunk(path, "line", 1, "values", list(enumerate(rows, start=1)))


def test_what_needs_no_tokenizer():
    rows = [
        {"messages": MESSAGES},
        {"text": "x"},
        {"instruction": "i", "output": "o"},
        {"prompt": "p", "completion": "c"},
        {"conversations": [{"from": "human", "value": "q"}]},
        {"nothing": 1},
        3,
    ]
    facts = inspect_chunk(chunk(*rows), None, RECIPE)
    assert facts.num_rows == 7
    assert facts.formats == {
        "messages": 1,
        "text": 1,
        "alpaca": 1,
        "prompt_completion": 1,
        "sharegpt": 1,
        "unrecognised": 1,
    }
    assert facts.roles == {"system": 1, "user": 3, "assistant": 3}
    assert facts.turns.tolist() == [2, 1]
    assert facts.row_numbers.tolist() == [1, 2, 3, 4]
    assert [(problem.kind, problem.place) for problem in facts.problems] == [
        ("no assistant message", Place("a.jsonl", "line", 5)),
        ("unrecognised columns", Place("a.jsonl", "line", 6)),
        ("wrong type", Place("a.jsonl", "line", 7)),
    ]
    assert facts.report is None and not len(facts.lengths)


def test_a_named_format_is_what_all_rows_are_of():
    recipe = Recipe("alpaca", {"instruction": "q", "output": "a"}, EncodeOptions(max_length=100))
    facts = inspect_chunk(chunk({"q": "x", "a": "y"}, {"text": "z"}), None, recipe)
    assert facts.formats == {"alpaca": 2}
    assert [problem.kind for problem in facts.problems] == ["missing field"]


def test_facts_travel_between_processes():
    facts = inspect_chunk(chunk({"messages": MESSAGES}), None, RECIPE)
    assert pickle.loads(pickle.dumps(inspect_chunk)) is inspect_chunk
    copy = pickle.loads(pickle.dumps(facts))
    assert (copy.digests, copy.roles, copy.turns.tolist()) == (facts.digests, facts.roles, [2])


@pytest.mark.parametrize(("keep_all", "num_kept"), [(False, MOST_PLACES), (True, 12)])
def test_problems_pile_up_only_if_all_are_wanted(keep_all, num_kept):
    facts = DataFacts("dataset", has_tokens=False, keep_all_problems=keep_all)
    facts.sources.append(SourceFacts(DataSource(path="a.jsonl")))
    for path in ("a.jsonl", "b.jsonl"):
        facts.add(path, "line", inspect_chunk(chunk(*[1] * 6, path=path), None, RECIPE))
    facts.sources[0].finish()
    assert facts.sources[0].report.problems == {"wrong type": 12}
    places = [problem.place for problem in facts.problems]
    every = [Place(path, "line", row) for path in ("a.jsonl", "b.jsonl") for row in range(1, 7)]
    assert places == every[:num_kept]


def test_quantiles_are_values_that_occur():
    found = quantiles(np.arange(1, 201))
    assert found == {
        "min": 1,
        "p1": 2,
        "p5": 10,
        "p25": 50,
        "p50": 100,
        "p75": 150,
        "p95": 190,
        "p99": 198,
        "max": 200,
        "mean": 100.5,
    }
    assert quantiles(np.array([7])) == {**dict.fromkeys(found, 7), "mean": 7.0}
    assert quantiles(np.zeros(0)) is None


def test_the_axis_follows_the_spread():
    assert not uses_log_axis(np.array([90, 100, 400, 600]))
    assert uses_log_axis(np.array([10] * 50 + [100] * 40 + [5000] * 10))


def lengths_of(values):
    facts = DataFacts("dataset", has_tokens=True, keep_all_problems=False)
    facts.whole_lengths.add(np.array(values))
    facts.whole_label_lengths.add(np.array(values) // 2 + 1)
    return facts


@pytest.mark.parametrize("values", [[5], [3, 4, 5000, 70_000], []])
def test_any_lengths_can_be_drawn(tmp_path, values):
    plot_lengths(lengths_of(values), 1024, tmp_path / "lengths.png")
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"


def test_a_picture_that_can_t_be_written(tmp_path):
    with pytest.raises(ConfigError, match="^--plot: .*lengths.png can't be written"):
        plot_lengths(lengths_of([3, 4]), 1024, tmp_path / "missing" / "lengths.png")
