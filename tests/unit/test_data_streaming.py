"""Streams: windows of rows in place of epochs, the same on every rank, every row once a pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.data.build import Recipe
from hfpar.data.cache import TokenRequest
from hfpar.data.reading.sources import resolve
from hfpar.data.streaming import StreamLoader, WindowReader
from hfpar.errors import BadRowsError, DataError
from hfpar.models.tiny import build_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny_model(folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return AutoTokenizer.from_pretrained(folder)


def texts(path: Path, names: list[Any]) -> Path:
    rows = [{"text": f"row {name} of many"} if isinstance(name, str) else name for name in names]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def reader(
    tokenizer: PreTrainedTokenizerBase,
    *paths: Path,
    rows: int,
    weights: list[float] | None = None,
    skip: bool = False,
    check: Any = lambda block: None,
) -> WindowReader:
    sources = [DataSource(path=str(path)) for path in paths]
    requests = [TokenRequest(resolve(s), Recipe.of(SFTConfig(max_length=64), s), skip) for s in sources]
    return WindowReader(requests, weights or [1.0] * len(paths), tokenizer, rows=rows, check=check)


def names(samples: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    return [tokenizer.decode(sample.input_ids).split()[1] for sample in samples]


def test_windows_follow_each_other_and_the_data_begins_again(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    windows = reader(tokenizer, texts(tmp_path / "a.jsonl", list("abcde")), rows=2)
    read = [names(windows.read(number), tokenizer) for number in range(5)]
    assert read == [["a", "b"], ["c", "d"], ["e", "a"], ["b", "c"], ["d", "e"]]
    assert (windows.report.num_rows, windows.report.num_samples) == (10, 10)


def test_a_window_may_be_longer_than_the_data(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    windows = reader(tokenizer, texts(tmp_path / "a.jsonl", list("abc")), rows=7)
    assert names(windows.read(0), tokenizer) == list("abcabca")


@pytest.mark.parametrize("first", [0, 1, 2, 3])
def test_a_resumed_stream_goes_on_where_it_was(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, first: int
) -> None:
    path = texts(tmp_path / "a.jsonl", [str(number) for number in range(11)])
    straight = reader(tokenizer, path, rows=3)
    expected = [names(straight.read(number), tokenizer) for number in range(6)]
    resumed = reader(tokenizer, path, rows=3)
    resumed.read(0)  # a loader asks for the first window before it knows where to go on
    start = max(first, 1)
    assert [names(resumed.read(number), tokenizer) for number in range(start, 6)] == expected[start:]


def test_weights_are_shares_of_a_window(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = texts(tmp_path / "a.jsonl", [f"a{number}" for number in range(100)])
    second = texts(tmp_path / "b.jsonl", [f"b{number}" for number in range(3)])
    windows = reader(tokenizer, first, second, rows=8, weights=[3.0, 1.0])
    assert names(windows.read(0), tokenizer) == [*(f"a{n}" for n in range(6)), "b0", "b1"]
    assert names(windows.read(1), tokenizer) == [*(f"a{n}" for n in range(6, 12)), "b2", "b0"]
    thirds = reader(tokenizer, first, second, rows=4, weights=[2.0, 1.0])
    counts = [[name[0] for name in names(thirds.read(number), tokenizer)].count("b") for number in range(6)]
    assert sum(counts) == 8 and max(counts) - min(counts) == 1


def test_bad_rows_stop_the_stream_or_are_counted(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = texts(tmp_path / "a.jsonl", ["a", {"text": ""}, "b", 5, "c", "d"])
    with pytest.raises(BadRowsError, match=r"a\.jsonl, line 2: .*"):
        reader(tokenizer, path, rows=2).read(0)
    windows = reader(tokenizer, path, rows=3, skip=True)
    assert [names(windows.read(number), tokenizer) for number in (0, 1)] == [["a", "b"], ["c", "d"]]
    assert windows.report.num_rows == 6 and windows.report.num_bad_rows == 2


def test_a_window_without_a_sample_is_an_error(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = texts(tmp_path / "a.jsonl", ["a", "b", 5, 5])
    windows = reader(tokenizer, path, rows=2, skip=True)
    windows.read(0)
    with pytest.raises(DataError, match=r"^dataset: not one sample in rows 3 to 4 of the stream; "):
        windows.read(1)


def test_every_window_is_checked(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    lengths: list[list[int]] = []
    windows = reader(
        tokenizer,
        texts(tmp_path / "a.jsonl", list("ab")),
        rows=1,
        check=lambda block: lengths.append(block.lengths.tolist()),
    )
    samples = [windows.read(0), windows.read(1)]
    assert lengths == [window.lengths.tolist() for window in samples]


def steps(loader: StreamLoader, number: int) -> list[list[int]]:
    """The tokens of each of the next steps."""
    found: list[list[int]] = []
    while len(found) < number:
        for micro_batches in loader:
            batches = [
                batch for batch in micro_batches if batch.num_tokens
            ]  # without the stand-in of a rank with none
            found.append(sorted(token for batch in batches for token in batch.input_ids.flatten().tolist()))
            if len(found) == number:
                break
    return found


def loader(windows: WindowReader, dp_size: int = 1, dp_rank: int = 0, **changes: Any) -> StreamLoader:
    options: dict[str, Any] = {
        "seed": 0,
        "dp_size": dp_size,
        "dp_rank": dp_rank,
        "gradient_accumulation_steps": 1,
        "per_device_train_batch_size": 4 // dp_size,
        "max_tokens_per_batch": None,
        "pad_token_id": 0,
    }
    return StreamLoader(windows, **(options | changes))


@pytest.mark.parametrize("packed", [False, True])
def test_ranks_share_the_steps_of_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, packed: bool
) -> None:
    path = texts(tmp_path / "a.jsonl", [str(number) for number in range(23)])

    def changes(dp_size: int) -> dict[str, Any]:
        if not packed:
            return {}
        accumulation = 2 // dp_size
        return {
            "per_device_train_batch_size": None,
            "max_tokens_per_batch": 64,
            "gradient_accumulation_steps": accumulation,
        }

    alone = steps(loader(reader(tokenizer, path, rows=9), **changes(1)), 7)
    shares = [steps(loader(reader(tokenizer, path, rows=9), 2, rank, **changes(2)), 7) for rank in range(2)]
    assert [sorted(a + b) for a, b in zip(*shares, strict=True)] == alone


def test_a_loader_resumes_by_window_and_step(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = texts(tmp_path / "a.jsonl", [str(number) for number in range(23)])
    straight = loader(reader(tokenizer, path, rows=9))
    expected = steps(straight, 8)
    assert (straight.epoch, straight.step) == (2, 2)  # three steps a window: 9 rows, 4 at a time
    resumed = loader(reader(tokenizer, path, rows=9))
    assert resumed.num_steps(0) == 3
    resumed.epoch, resumed.step = 1, 2
    assert steps(resumed, 3) == expected[5:]


def test_the_fingerprint_is_of_what_is_streamed(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first, second = (texts(tmp_path / f"{name}.jsonl", ["a"]) for name in "ab")
    fingerprints = {
        loader(reader(tokenizer, *paths, rows=rows, weights=weights)).fingerprint
        for paths, rows, weights in (
            ((first,), 5, None),
            ((first,), 6, None),
            ((second,), 5, None),
            ((first, second), 5, None),
            ((first, second), 5, [1.0, 2.0]),
        )
    }
    assert len(fingerprints) == 5
    assert loader(reader(tokenizer, first, rows=5)).fingerprint in fingerprints
