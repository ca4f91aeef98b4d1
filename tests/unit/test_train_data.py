"""From the config to samples: entries, held-out rows, weights, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from transformers import AutoConfig, AutoTokenizer

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.data.loader import StepLoader
from hfpar.data.store import Selection
from hfpar.data.stream import Sample
from hfpar.data.streaming import StreamLoader
from hfpar.errors import BadRowsError, ConfigError, DataError
from hfpar.models.tiny import build_tiny_model
from hfpar.parallel.layout import Layout
from hfpar.train.data import (
    RunData,
    cache_folder,
    data_sources,
    make_loader,
    read_data,
    stop_token,
    warn_of_overlaps,
)
from hfpar.train.loop import Schedule
from hfpar.train.model import ModelSource
from hfpar.train.summary import dropped


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return ModelSource(folder, AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield Layout(rank=0, world_size=1)
    dist.destroy_process_group()


def texts(path: Path, names: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": f"row {name} of many"}) + "\n" for name in names))
    return str(path)


@pytest.fixture
def config(tmp_path: Path) -> SFTConfig:
    return SFTConfig(
        dataset=texts(tmp_path / "a.jsonl", [str(number) for number in range(100)]),
        token_cache=str(tmp_path / "cache"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
    )


def names(samples: Any, source: ModelSource) -> list[int]:
    return [int(source.tokenizer.decode(sample.input_ids).split()[1]) for sample in samples]


def test_entries_of_dataset() -> None:
    full = DataSource(path="b", weight=2.0)
    assert data_sources("a") == [DataSource(path="a")]
    assert data_sources(["a", full]) == [DataSource(path="a"), full]
    assert data_sources(None) == []


def test_where_the_cache_is(tmp_path: Path) -> None:
    assert cache_folder(SFTConfig(token_cache=str(tmp_path))) == tmp_path
    assert cache_folder(SFTConfig()).parts[-2:] == ("hfpar", "tokens")


def test_all_rows_in_their_order(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    data = read_data(config, source, layout)
    assert names(data.samples, source) == list(range(100))
    assert len(data.eval_samples) == 0 and data.segments == [(100, 1.0)]
    assert data.report.num_rows == 100


def test_held_out_rows_are_drawn_by_seed_and_never_trained(
    config: SFTConfig, source: ModelSource, layout: Layout
) -> None:
    config = replace(config, eval_fraction=0.07)
    data = read_data(config, source, layout)
    held_out, kept = names(data.eval_samples, source), names(data.samples, source)
    assert len(held_out) == 7 and sorted(held_out + kept) == list(range(100))
    assert kept == sorted(kept)
    again = read_data(config, source, layout)
    assert names(again.eval_samples, source) == held_out
    other = read_data(replace(config, seed=1), source, layout)
    assert names(other.eval_samples, source) != held_out


def test_samples_of_one_row_are_held_out_together(
    config: SFTConfig, source: ModelSource, layout: Layout, tmp_path: Path
) -> None:
    rows = [{"text": f"{number} " * 12} for number in range(30)]
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_data(
        replace(config, dataset=str(path), max_length=10, on_overflow="split", eval_fraction=0.5),
        source,
        layout,
    )

    def rows_of(samples: Selection) -> list[int]:
        places = [samples.locate(index) for index in range(len(samples))]
        return [store.place(number).number for store, number in places]

    kept, held_out = rows_of(data.samples), rows_of(data.eval_samples)
    assert len(held_out) > 15 and len(set(held_out)) == 15 and len(set(kept)) == 15
    assert not set(kept) & set(held_out)


def test_copies_of_what_is_held_out_are_not_trained(
    config: SFTConfig, source: ModelSource, layout: Layout, tmp_path: Path
) -> None:
    twice = [
        texts(tmp_path / f"{name}.jsonl", [str(n % 20) for n in range(start, start + 60)])
        for name, start in (("b", 0), ("c", 7))
    ]
    data = read_data(replace(config, dataset=list(twice), eval_fraction=0.2), source, layout)
    held_out, kept = set(names(data.eval_samples, source)), set(names(data.samples, source))
    assert len(held_out) == 4 and held_out | kept == set(range(20)) and not held_out & kept
    assert len(data.eval_samples) == 4 * 6


def test_equal_content_is_told_from_other(
    config: SFTConfig, source: ModelSource, layout: Layout, tmp_path: Path
) -> None:
    rows = ["a b c", "a c b", "a b c", "b b c", "a b", "a b c d", "c b a", "a b c"]
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    (store,) = read_data(replace(config, dataset=str(path)), source, layout).samples.stores
    found = store.contents().tolist()
    assert [[i for i, other in enumerate(found) if other == value] for value in found] == [
        [i for i, other in enumerate(rows) if other == row] for row in rows
    ]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_on_other_data_has_another_fingerprint(
    config: SFTConfig, source: ModelSource, layout: Layout, tmp_path: Path, streaming: bool
) -> None:
    config = replace(config, streaming=streaming, max_steps=1)

    def fingerprint(config: SFTConfig) -> str:
        return make_loader(config, read_data(config, source, layout), layout, pad_token_id=0).fingerprint

    first = fingerprint(config)
    assert fingerprint(config) == first
    path = Path(str(config.dataset))
    path.write_text(path.read_text().replace("row 7 of", "row 8 of"))  # as many tokens as before
    assert fingerprint(config) != first


@pytest.mark.parametrize(("fraction", "missing"), [(0.999, "train on"), (0.001, "evaluate")])
def test_a_fraction_that_leaves_nothing_on_one_side(
    config: SFTConfig, source: ModelSource, layout: Layout, fraction: float, missing: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        read_data(replace(config, eval_fraction=fraction), source, layout)
    assert str(raised.value) == f"eval_fraction: {fraction} of 100 samples leaves nothing to {missing}"


def test_weights_go_with_their_samples(
    config: SFTConfig, source: ModelSource, layout: Layout, tmp_path: Path
) -> None:
    second = DataSource(path=texts(tmp_path / "b.jsonl", ["1000", "1001"]), weight=3.0)
    data = read_data(
        replace(config, dataset=[str(config.dataset), second], eval_fraction=0.5), source, layout
    )
    assert data.segments == [(49, 1.0), (2, 3.0)]
    loader = make_loader(config, data, layout, pad_token_id=0)
    assert isinstance(loader, StepLoader)
    taken = [sample for step in loader for batch in step for sample in documents(batch)]
    assert (
        len(taken) == 55 and sum("1000" in text or "1001" in text for text in map(decode(source), taken)) == 6
    )


def documents(batch: Any) -> list[list[int]]:
    edges = batch.cu_seqlens.tolist()
    tokens = batch.input_ids[0].tolist()
    return [tokens[begin:end] for begin, end in zip(edges, edges[1:], strict=False)]


def decode(source: ModelSource) -> Any:
    return source.tokenizer.decode


def test_steps_are_counted_before_training(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    data = read_data(config, source, layout)
    loader = make_loader(config, data, layout, pad_token_id=0)
    assert Schedule.of(replace(config, num_train_epochs=1.5), loader, layout).total_steps == 38
    assert Schedule.of(replace(config, max_steps=3), loader, layout).total_steps == 3


def test_streams(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    config = replace(config, streaming=True, streaming_window=10, max_steps=7, eval_dataset=config.dataset)
    data = read_data(config, source, layout)
    assert isinstance(data, RunData) and len(data.samples) == 0 and len(data.eval_samples) == 100
    loader = make_loader(config, data, layout, pad_token_id=0)
    assert isinstance(loader, StreamLoader)
    schedule = Schedule.of(config, loader, layout)
    assert (schedule.total_steps, schedule.steps_per_epoch) == (7, 3)
    window = [document for step in loader for batch in step for document in documents(batch)]
    assert sorted(int(text.split()[1]) for text in map(decode(source), window)) == list(range(10))


@pytest.mark.parametrize("streaming", [False, True])
def test_bad_rows_are_errors_or_counted(
    config: SFTConfig, source: ModelSource, layout: Layout, streaming: bool
) -> None:
    path = Path(str(config.dataset))
    path.write_text(path.read_text() + '{"text": 5}\n')
    config = replace(config, streaming=streaming, max_steps=1 if streaming else -1, streaming_window=200)

    def read(config: SFTConfig) -> RunData:
        data = read_data(config, source, layout)
        make_loader(config, data, layout, pad_token_id=0).num_steps(0)
        return data

    with pytest.raises(BadRowsError) as raised:
        read(config)
    assert f"{path}, line 101: " in str(raised.value)
    data = read(replace(config, bad_rows="skip"))
    report = data.windows.report if data.windows is not None else data.report
    assert report.num_bad_rows == 1


def test_nothing_to_train_on_is_an_error(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    with pytest.raises(DataError) as raised:
        read_data(replace(config, max_length=2), source, layout)
    assert str(raised.value) == (
        "dataset: none of the 100 rows can be trained on; 100 are longer than max_length 2, 0 have nothing to learn"
    )


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_a_missing_file_is_named_with_its_setting(
    config: SFTConfig, source: ModelSource, layout: Layout, key: str
) -> None:
    with pytest.raises(DataError, match=rf"^{key}: .*no/such\.jsonl: no such file$"):
        read_data(replace(config, **{key: "no/such.jsonl"}), source, layout)


def test_more_positions_than_the_model_has(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    bounded = AutoConfig.from_pretrained(source.folder)
    bounded.max_position_embeddings = 4
    with pytest.raises(
        ConfigError, match="^max_length: a sample of dataset has .* but the model has 4 positions"
    ):
        read_data(config, replace(source, config=bounded), layout)
    streamed = replace(config, streaming=True, max_steps=1)
    data = read_data(streamed, replace(source, config=bounded), layout)
    with pytest.raises(
        ConfigError, match="^max_length: a sample of dataset has .* but the model has 4 positions"
    ):
        make_loader(streamed, data, layout, pad_token_id=0).num_steps(0)


def test_lengths_are_an_array(config: SFTConfig, source: ModelSource, layout: Layout) -> None:
    samples = read_data(config, source, layout).samples
    assert isinstance(samples.lengths, np.ndarray)
    assert samples.lengths.tolist() == [len(sample.input_ids) for sample in samples]


def test_where_generation_is_to_stop(source: ModelSource) -> None:
    im_end = source.tokenizer.convert_tokens_to_ids("<|im_end|>")
    closed = Sample([5, 6, im_end, 7], [-100, 6, im_end, -100])
    assert stop_token([closed, closed], source.tokenizer) == im_end
    assert stop_token([closed, Sample([5, 6], [-100, 6])], source.tokenizer) is None
    assert (
        stop_token([Sample([5, 6], [-100, 6])], source.tokenizer) is None
    )  # a word that all happen to end with


# Benchmark items

HELD = "A glassblower fills eleven crates with bottles, nine to a crate, and drops two of them on the way to town."


@pytest.fixture
def screened(tmp_path: Path, config: SFTConfig) -> SFTConfig:
    """Rows of which 7 and 40 hold an item, in the data for evaluation, too."""
    benchmark = tmp_path / "g.jsonl"
    benchmark.write_text(json.dumps({"question": HELD, "answer": "#### 97"}) + "\n")
    rows = [f"row {number} of many{' ' + HELD if number in (7, 40) else ''}" for number in range(60)]
    data = tmp_path / "held.jsonl"
    data.write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    return replace(
        config,
        dataset=str(data),
        eval_dataset=str(data),
        decontaminate_against="gsm8k",
        benchmark_files={"gsm8k": str(benchmark)},
    )


def test_benchmark_items_are_told_of(
    screened: SFTConfig, source: ModelSource, layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in ("made", "from the cache"):
        data = read_data(screened, source, layout)
        assert names(data.samples, source) == list(range(60))
        assert data.report.counts == {"hold a benchmark item": 2}
        caplog.clear()
        warn_of_overlaps(screened, data, layout)
        (line,) = caplog.messages
        assert line.startswith(
            "dataset: 2 of 60 rows hold a benchmark's item and are trained on (--decontaminate drop"
        )
        assert f"{screened.dataset}, line 8: question of gsm8k 0 (verbatim, 1.00); " in line
    warn_of_overlaps(screened, data, Layout(rank=1, world_size=2))
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("streaming", [False, True])
def test_benchmark_items_in_all_rows_are_told_of(
    screened: SFTConfig,
    source: ModelSource,
    layout: Layout,
    caplog: pytest.LogCaptureFixture,
    streaming: bool,
) -> None:
    """They are in the template, such as a system prompt, so that no row is named or left out for them."""
    rows = [f"{HELD} row {number} of many" for number in range(60)]
    Path(str(screened.dataset)).write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    screened = replace(
        screened,
        decontaminate="drop",
        streaming=streaming,
        max_steps=2 if streaming else -1,
        eval_dataset=None,
    )
    for _ in ("made", "from the cache"):
        data = read_data(screened, source, layout)
        caplog.clear()
        warn_of_overlaps(screened, data, layout)
        assert caplog.messages == [
            "dataset: 1 of the benchmarks' items stands in what most rows have in common (a system prompt, examples), "
            "and is trained on with every row: gsm8k 0"
        ]


def test_benchmark_items_are_left_out_but_of_eval_data(
    screened: SFTConfig, source: ModelSource, layout: Layout
) -> None:
    read_data(screened, source, layout)  # what is cached by another setting is no matter
    data = read_data(replace(screened, decontaminate="drop"), source, layout)
    assert names(data.samples, source) == [number for number in range(60) if number not in (7, 40)]
    assert names(data.eval_samples, source) == list(range(60))
    assert (data.report.num_rows, data.report.counts) == (60, {"benchmark items": 2})
    assert "2 with benchmark items" in dropped(data.report)


def test_another_benchmark_is_another_key(screened: SFTConfig, source: ModelSource, layout: Layout) -> None:
    screened = replace(screened, decontaminate="drop")
    read_data(screened, source, layout)
    Path(screened.benchmark_files["gsm8k"]).write_text(
        json.dumps({"question": "Why?", "answer": "#### 1"}) + "\n"
    )
    assert len(read_data(screened, source, layout).samples) == 60


def test_nothing_but_benchmark_items(screened: SFTConfig, source: ModelSource, layout: Layout) -> None:
    Path(str(screened.dataset)).write_text(json.dumps({"text": HELD}) + "\n")
    with pytest.raises(DataError, match="dataset: none of the 1 rows .* 1 hold a benchmark's item"):
        read_data(replace(screened, decontaminate="drop", eval_dataset=None), source, layout)


def test_streamed_rows_are_left_out_alike(screened: SFTConfig, source: ModelSource, layout: Layout) -> None:
    config = replace(screened, decontaminate="drop", streaming=True, streaming_window=30, max_steps=1)
    data = read_data(config, source, layout)
    assert data.windows is not None
    read = [names(data.windows.read(window), source) for window in range(3)]
    first = [number for number in range(30) if number != 7]
    assert read == [first, [number for number in range(30, 60) if number != 40], first]
    assert data.windows.report.counts["benchmark items"] == 3
    plain = read_data(replace(config, decontaminate="warn"), source, layout)
    assert plain.windows is not None
    assert plain.windows.fingerprint != data.windows.fingerprint


def test_a_benchmark_that_cannot_be_read(screened: SFTConfig, source: ModelSource, layout: Layout) -> None:
    with pytest.raises(DataError, match="^decontaminate_against: .*no.jsonl: no such file$"):
        read_data(replace(screened, benchmark_files={"gsm8k": "no.jsonl"}), source, layout)
