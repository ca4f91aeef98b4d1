"""The token cache: the same tokens from any number of processes, a key of all that decides them, whole or not there."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.resource_tracker
import multiprocessing.spawn
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfpar.config.schema import DataSource, SFTConfig
from hfpar.data import cache as cache_module
from hfpar.data.build import Recipe, encode_chunk, map_chunks, useful_processes
from hfpar.data.cache import TokenCache, TokenRequest
from hfpar.data.reading.rows import Place
from hfpar.data.reading.sources import DataFile, read_chunks, resolve
from hfpar.data.store import TokenStore
from hfpar.errors import BadRowsError, ConfigError, DataError
from hfpar.models.tiny import build_tiny_model


def row(number: int) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": f"What is {number}?"},
            {"role": "assistant", "content": f"It is {number}."},
        ]
    }


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path, hidden_size=64, intermediate_size=128, num_hidden_layers=1)
    return path


@pytest.fixture
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", [row(number) for number in range(50)])


@pytest.fixture
def cache(tmp_path: Path, model: Path, tokenizer: PreTrainedTokenizerBase) -> TokenCache:
    return TokenCache(tmp_path / "cache", tokenizer, model)


def request(path: Path, skip: bool = False, **settings: Any) -> TokenRequest:
    source = DataSource(path=str(path))
    return TokenRequest(resolve(source), Recipe.of(SFTConfig(**settings), source), skip)


def entries(cache: TokenCache) -> list[str]:
    return sorted(path.name for path in cache.folder.iterdir() if not path.name.endswith(".lock"))


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("built again")


def test_tokens_are_those_of_the_rows_in_their_order(cache: TokenCache, data: Path) -> None:
    store = cache.get(request(data))
    decoded = [cache.tokenizer.decode(sample.input_ids) for sample in store]
    assert [f"What is {number}?" in text for number, text in enumerate(decoded)] == [True] * 50
    learnt = [[label for label in sample.labels if label != -100] for sample in store]
    assert [cache.tokenizer.decode(labels) for labels in learnt] == [
        f"It is {n}.<|im_end|>" for n in range(50)
    ]
    assert [store.place(index) for index in (0, 49)] == [
        Place(str(data), "line", 1),
        Place(str(data), "line", 50),
    ]
    assert (store.report.num_rows, store.report.num_samples, store.report.num_bad_rows) == (50, 50, 0)
    assert store.report.num_tokens == sum(len(sample.input_ids) for sample in store)
    assert store.report.num_label_tokens == sum(map(len, learnt))
    assert store.report.max_token_id == max(max(sample.input_ids) for sample in store)


def test_a_second_time_nothing_is_read(
    cache: TokenCache, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = list(cache.get(request(data)))
    monkeypatch.setattr(cache_module, "write_tokens", never)
    monkeypatch.setattr(DataFile, "fingerprint", never)
    assert list(cache.get(request(data))) == first


def test_a_copy_of_the_data_has_the_same_key(cache: TokenCache, data: Path, tmp_path: Path) -> None:
    cache.folder.mkdir()
    copy = tmp_path / "copy.jsonl"
    shutil.copy(data, copy)
    assert cache.key(request(copy)) == cache.key(request(data))


def test_other_content_has_another_key_whatever_the_clock_says(cache: TokenCache, data: Path) -> None:
    cache.folder.mkdir()
    key, status = cache.key(request(data)), data.stat()
    text = data.read_text()
    data.write_text(text.replace("It is 7.", "It is 8."))
    os.utime(data, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert data.stat().st_size == status.st_size
    assert cache.key(request(data)) != key
    data.write_text(text)
    assert cache.key(request(data)) == key


@pytest.mark.parametrize(
    "settings",
    [
        {"max_length": 999},
        {"on_overflow": "split"},
        {"train_on": "all"},
        {"earlier_turns": "mask"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"dataset_format": "messages"},
        {"dataset_columns": {"messages": "messages"}},
        {"skip": True},
    ],
)
def test_every_setting_that_decides_tokens_is_in_the_key(
    cache: TokenCache, data: Path, settings: dict[str, Any]
) -> None:
    cache.folder.mkdir()
    assert cache.key(request(data, **settings)) != cache.key(request(data))


def test_the_tokenizer_and_its_template_are_in_the_key(
    cache: TokenCache, data: Path, model: Path, tmp_path: Path
) -> None:
    cache.folder.mkdir()
    keys = {cache.key(request(data))}
    other = AutoTokenizer.from_pretrained(model)
    other.chat_template = other.chat_template + " "
    keys.add(TokenCache(cache.folder, other, model).key(request(data)))
    folder = tmp_path / "tokenizer"
    shutil.copytree(model, folder)
    assert TokenCache(cache.folder, cache.tokenizer, folder).key(request(data)) in keys
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    (folder / "tokenizer.json").write_text(json.dumps(content))
    keys.add(TokenCache(cache.folder, cache.tokenizer, folder).key(request(data)))
    assert len(keys) == 3


def test_the_code_is_in_the_key(cache: TokenCache, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.folder.mkdir()
    key = cache.key(request(data))
    monkeypatch.setattr(cache_module, "code_fingerprint", lambda: "other code")
    assert cache.key(request(data)) != key


def test_several_processes_make_the_same_tokens(cache: TokenCache, tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.jsonl", [row(n) for n in range(1500)]) for name in ("a", "b")]
    wanted = request(tmp_path / "[ab].jsonl")
    assert [file.path for file in wanted.files] == [str(path) for path in files]
    seen: list[tuple[str, int]] = []
    two = cache.get(wanted, num_proc=2, progress=lambda chunk, rows: seen.append((chunk.path, rows)))
    other = TokenCache(tmp_path / "other", cache.tokenizer, tmp_path)
    one = other.get(wanted, num_proc=1)
    for name in ("tokens", "trained", "lengths", "rows", "files"):
        assert (cache.folder / two.key / f"{name}.bin").read_bytes() == (
            other.folder / one.key / f"{name}.bin"
        ).read_bytes()
    assert vars(two.report) == vars(one.report)
    assert two.place(2999) == Place(str(files[1]), "line", 1500)
    assert sum(rows for _, rows in seen) == 3000 and [path for path, _ in seen] == sorted(p for p, _ in seen)


def test_processes_are_started_where_there_is_much_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    assert [useful_processes(size, None) for size in (0, 1 << 20, 1 << 26, 1 << 40)] == [1, 1, 4, 8]
    assert useful_processes(0, 3) == 3


def die(*_: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_is_an_error(data: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    wanted = request(data)
    with pytest.raises(
        DataError, match=r"^dataset_num_proc: a process that tokenizes was killed .* fewer than 2$"
    ):
        list(map_chunks(die, read_chunks(wanted.files), tokenizer, wanted.recipe, num_proc=2))


@pytest.mark.timeout(30)
def test_a_process_that_is_killed_before_it_has_read_what_it_is_given(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer: Any = "as large as a real one, larger than a pipe" * 10_000
    multiprocessing.resource_tracker.ensure_running()  # a process, too
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    wanted = request(data)
    with pytest.raises(DataError, match=r"^dataset_num_proc: a process that tokenizes was killed"):
        list(map_chunks(encode_chunk, read_chunks(wanted.files), tokenizer, wanted.recipe, num_proc=2))


def test_bad_rows_are_listed_and_nothing_is_kept(cache: TokenCache, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [row(0), {"messages": [{"role": "user", "content": ""}]}, row(1), 5])
    with pytest.raises(BadRowsError) as raised:
        cache.get(request(bad))
    lines = str(raised.value).splitlines()
    assert lines[0] == "2 bad rows; mend them, or leave such rows out with --bad_rows skip:"
    assert [line.split(": ")[0] for line in lines[1:]] == [f"  {bad}, line 2", f"  {bad}, line 4"]
    assert raised.value.exit_code == 1
    assert entries(cache) == ["fingerprints"]


def test_only_twenty_bad_rows_are_listed_and_reading_stops(cache: TokenCache, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [5] * 30_000)
    seen = []
    with pytest.raises(BadRowsError) as raised:
        cache.get(request(bad), num_proc=1, progress=lambda chunk, rows: seen.append(rows))
    lines = str(raised.value).splitlines()
    assert lines[0] == (
        "20 bad rows; there may be more, `hfpar data check` finds all; mend them, or leave such rows out with "
        "--bad_rows skip:"
    )
    assert len(lines) == 21 and len(seen) == 1


def test_bad_rows_that_are_skipped_are_counted(cache: TokenCache, tmp_path: Path) -> None:
    bad = write(tmp_path / "bad.jsonl", [row(0), 5, row(1), 6])
    store = cache.get(request(bad, skip=True))
    assert len(store) == 2 and store.report.num_rows == 4 and store.report.num_bad_rows == 2
    assert [store.place(index).number for index in range(2)] == [1, 3]


def test_what_a_killed_builder_left_is_removed(cache: TokenCache, data: Path) -> None:
    cache.folder.mkdir()
    partial = cache.folder / f".{cache.key(request(data))}.partial"
    partial.mkdir()
    (partial / "tokens.bin").write_bytes(b"half")
    assert len(cache.get(request(data))) == 50
    assert not partial.exists()


def test_data_that_changes_while_it_is_read_is_not_kept(cache: TokenCache, data: Path) -> None:
    with pytest.raises(DataError, match=r"data\.jsonl: the data changed while it was read; start again$"):
        cache.get(request(data), progress=lambda chunk, rows: data.write_text(json.dumps(row(1)) + "\n"))
    assert entries(cache) == ["fingerprints"]
    assert len(cache.get(request(data))) == 1


def test_arguments_of_the_template_may_be_anything(cache: TokenCache, data: Path) -> None:
    cache.folder.mkdir()
    keys = {
        cache.key(request(data, chat_template_kwargs={"opts": value})) for value in ({1: "a", "b": 2}, [None])
    }
    assert len(keys) == 2


def test_a_full_disk_is_one_line_and_leaves_nothing(cache: TokenCache, data: Path) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError) as raised:
        cache.get(request(data), progress=full)
    assert str(raised.value) == (
        f"token_cache: {cache.folder} can't be used (No space left on device); make room, or name another folder "
        "with --token_cache"
    )
    assert entries(cache) == ["fingerprints"]


def get_slowly(folder: str, model: str, data: str, queue: Any) -> None:
    """In another process: build slowly, and say how many chunks were built here."""
    chunks = []

    def progress(chunk: Any, rows: int) -> None:
        chunks.append(rows)
        time.sleep(1.0)

    cache = TokenCache(Path(folder), AutoTokenizer.from_pretrained(model), Path(model))
    store = cache.get(request(Path(data)), progress=progress, say=lambda line: None)
    queue.put((len(chunks), len(store)))


def test_two_jobs_at_once_build_once(cache: TokenCache, model: Path, data: Path) -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    jobs = [
        context.Process(target=get_slowly, args=(str(cache.folder), str(model), str(data), queue))
        for _ in range(2)
    ]
    for job in jobs:
        job.start()
    answers = sorted(queue.get(timeout=100) for _ in jobs)
    for job in jobs:
        job.join()
    assert answers == [(0, 50), (1, 50)]


def test_a_builder_that_is_killed_is_replaced(
    cache: TokenCache, model: Path, data: Path, tmp_path: Path
) -> None:
    code = (
        "import sys, time; from pathlib import Path; from transformers import AutoTokenizer\n"
        "from tests.unit.test_data_cache import request, TokenCache\n"
        f"cache = TokenCache(Path({str(cache.folder)!r}), AutoTokenizer.from_pretrained({str(model)!r}), "
        f"Path({str(model)!r}))\n"
        "def progress(*_): print('building', flush=True); time.sleep(600)\n"
        f"cache.get(request(Path({str(data)!r})), progress=progress)\n"
    )
    root = Path(__file__).resolve().parents[2]
    builder = subprocess.Popen(
        [sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert builder.stdout is not None and builder.stdout.readline() == "building\n"
    builder.kill()
    builder.wait()
    left = [name for name in entries(cache) if name.endswith(".partial")]
    assert len(left) == 1
    said: list[str] = []
    assert len(cache.get(request(data), say=said.append)) == 50
    assert said == [] and not [name for name in entries(cache) if name.endswith(".partial")]


def test_an_entry_is_used_by_its_key_alone(cache: TokenCache, data: Path) -> None:
    store = cache.get(request(data))
    assert cache.find("0" * 32) is None
    found = cache.find(store.key)
    assert isinstance(found, TokenStore) and list(found) == list(store)


def test_files_of_one_source_are_told_apart(cache: TokenCache, tmp_path: Path) -> None:
    write(tmp_path / "x1.jsonl", [row(0)])
    (tmp_path / "x2.csv").write_text("text\nhello\nworld\n")
    both = request(tmp_path / "x*")
    store = cache.get(replace(both, files=sorted(both.files, key=lambda file: file.path)))
    assert [str(store.place(index)) for index in range(3)] == [
        f"{tmp_path}/x1.jsonl, line 1",
        f"{tmp_path}/x2.csv, row 1",
        f"{tmp_path}/x2.csv, row 2",
    ]


def test_blocks_never_train_the_first_token(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    texts = write(tmp_path / "texts.jsonl", [{"text": "one two"}, {"text": "three"}])
    wanted = request(texts)
    (chunk,) = read_chunks(wanted.files)
    block = encode_chunk(chunk, tokenizer, wanted.recipe)
    starts = [0, int(block.lengths[0])]
    assert [bool(block.trained[start]) for start in starts] == [False, False]
    assert int(block.trained.sum()) == len(block.input_ids) - 2 == block.report.num_label_tokens
