"""From a path to files and hub data sets, and columnar files to rows."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from hfpar.config.schema import DataSource
from hfpar.data.reading.rows import Problem
from hfpar.data.reading.sources import DataFile, read_chunks, resolve
from hfpar.errors import DataError

A, B = {"text": "a"}, {"text": "b"}


def write(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    return path


def found(path: Path | str, **settings: Any) -> list[DataFile]:
    return resolve(DataSource(path=str(path), **settings))


def rows_of(files: list[DataFile], **limits: Any) -> list[tuple[int, Any]]:
    rows = []
    for chunk in read_chunks(files, **limits):
        for place, row in pickle.loads(pickle.dumps(chunk)).rows():
            assert (place.path, place.unit) == (chunk.path, chunk.unit)
            rows.append((place.number, (row.kind, row.reason) if isinstance(row, Problem) else row))
    return rows


def error_of(path: Path | str, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        list(read_chunks(found(path, **settings)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# What a path names


@pytest.mark.parametrize(
    ("name", "kind", "compression"),
    [
        ("a.jsonl", "jsonl", None),
        ("a.b.NDJSON", "jsonl", None),
        ("a.json.gz", "json", "gzip"),
        ("a.csv.bz2", "csv", "bzip2"),
        ("a.tsv.xz", "csv", "xz"),
        ("a.jsonl.zst", "jsonl", "zstd"),
        ("a.parquet", "parquet", None),
        ("a.arrow", "arrow", None),
    ],
)
def test_a_file_is_known_by_its_name(tmp_path: Path, name: str, kind: Any, compression: str | None) -> None:
    path = write(tmp_path / name, A)
    assert found(path) == [DataFile(str(path), kind, compression)]


def test_patterns_give_sorted_files_of_all_kinds(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl.gz", "deep/er/c.jsonl", "deep/d.jsonl", "x.csv"):
        write(tmp_path / name, A)

    def names(pattern: str) -> list[str]:
        return [os.path.relpath(file.path, tmp_path) for file in found(tmp_path / pattern)]

    assert names("*.jsonl*") == ["a.jsonl.gz", "b.jsonl"]
    assert names("**/*.jsonl") == ["b.jsonl", "deep/d.jsonl", "deep/er/c.jsonl"]
    assert names("**") == ["a.jsonl.gz", "b.jsonl", "deep/d.jsonl", "deep/er/c.jsonl", "x.csv"]
    assert names("[ab].jsonl") == ["b.jsonl"]
    assert error_of(tmp_path / "*.parquet") == f"{tmp_path}/*.parquet: no file matches"


def test_a_name_with_brackets_is_a_file_if_it_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "a[1].jsonl", A)
    assert found(path) == [DataFile(str(path), "jsonl")]


def test_the_same_file_twice_is_read_twice(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", A, B)
    assert rows_of(found(path) + found(path)) == [(1, A), (2, B)] * 2


def test_links(tmp_path: Path) -> None:
    path = write(tmp_path / "real.jsonl", A)
    (tmp_path / "link.jsonl").symlink_to(path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "up").symlink_to(tmp_path)
    (tmp_path / "broken.json").symlink_to(tmp_path / "gone.json")
    link = found(tmp_path / "link.jsonl")
    assert rows_of(link) == [(1, A)]
    assert link[0].fingerprint() == found(path)[0].fingerprint()
    reason = f"{tmp_path}/broken.json: a link to a file that doesn't exist"
    assert error_of(tmp_path / "broken.json") == reason
    assert error_of(tmp_path / "*.json") == reason


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path / "a.jsonl", A)
    assert found("~/a.jsonl") == found("~/*.jsonl") == [DataFile(str(path), "jsonl")]


def test_what_cannot_be_read(tmp_path: Path) -> None:
    allowed = (
        "allowed are .jsonl, .ndjson, .json, .csv, .tsv, .parquet, .arrow; "
        "all but the last two also with .gz, .bz2, .xz, .zst"
    )
    assert error_of(tmp_path / "a.jsonl") == f"{tmp_path}/a.jsonl: no such file"
    assert error_of("train.jsonl") == "train.jsonl: no such file"
    assert error_of("data/train.jsonl.gz") == "data/train.jsonl.gz: no such file"
    assert error_of("./data/train") == "./data/train: no such file"
    for name in ("a.txt", "a", "a.gz", "a.zip"):
        path = write(tmp_path / name, A)
        assert error_of(path) == f"{path}: unknown kind of file; {allowed}"
    path = write(tmp_path / "a.parquet.gz", A)
    assert error_of(path) == f"{path}: a .parquet file is compressed inside; unpack it once with gz"
    os.mkfifo(tmp_path / "pipe.jsonl")
    assert error_of(tmp_path / "pipe.jsonl") == f"{tmp_path}/pipe.jsonl: not a regular file"
    path = write(tmp_path / "empty.jsonl")
    assert error_of(path) == f"{path}: the data set is empty"
    path = write(tmp_path / "good.jsonl", A)
    assert error_of(path, split="test") == f"{path}: a file has no split, so that split: test can't be chosen"
    assert error_of(path, name="x") == f"{path}: a file has no name, so that name: x can't be chosen"


def test_an_empty_file_among_others_is_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.jsonl")
    write(tmp_path / "b.jsonl", A)
    assert rows_of(found(tmp_path / "*.jsonl")) == [(1, A)]
    write(tmp_path / "b.jsonl")
    assert (
        error_of(tmp_path / "*.jsonl") == f"{tmp_path}/a.jsonl: the data set is empty (and so are 1 others)"
    )


def test_a_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", A)

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refuse)
    with pytest.raises(DataError) as caught:
        found(path)
    monkeypatch.undo()
    assert str(caught.value) == f"{path}: cannot be read: Permission denied"


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    reason = (
        f"{tmp_path}: is a folder, not a file, and not one that datasets saved; "
        f"name its files by a pattern, such as {tmp_path}/*.jsonl"
    )
    assert error_of(tmp_path) == reason


# Fingerprints


def test_a_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    first = found(write(tmp_path / "a.jsonl", A))[0].fingerprint()
    assert len(first) == 64
    assert found(write(tmp_path / "x/b.jsonl", A))[0].fingerprint() == first
    assert found(write(tmp_path / "a.jsonl", B))[0].fingerprint() != first
    # The same bytes are other rows under another name.
    others = {
        found(write(tmp_path / f"a.{kind}", A))[0].fingerprint()
        for kind in ("json", "csv", "tsv", "jsonl.gz")
    }
    assert len(others | {first}) == 5


def test_old_pythons_hash_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = found(write(tmp_path / "a.jsonl", {"text": "x" * (3 << 20)}))[0]
    first = file.fingerprint()
    monkeypatch.setattr(sys, "version_info", (3, 10, 0))
    assert file.fingerprint() == first


def test_a_fingerprint_of_a_file_that_went_away(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", A)
    file = found(path)[0]
    path.unlink()
    with pytest.raises(DataError) as caught:
        file.fingerprint()
    assert str(caught.value) == f"{path}: cannot be read: No such file or directory"
    with pytest.raises(DataError, match="a.jsonl: cannot be read: No such file or directory"):
        list(read_chunks([file]))


# Parquet and Arrow


ROWS = [
    {
        "messages": [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {"p": 1}}]},
        ],
        "tools": [{"name": "f", "parameters": {"x": {"type": "int"}}}],
    },
    {
        "messages": [{"role": "user", "content": "b", "weight": 0}, {"role": "assistant", "content": "c"}],
        "tools": [{"name": "g", "parameters": {"y": {"type": "str", "enum": ["a", None]}}}],
    },
    {
        "messages": [
            {"role": "assistant", "content": "", "tool_calls": [{"name": "g", "arguments": {"q": "x"}}]}
        ]
    },
]
EXPECTED = [(1, ROWS[0]), (2, ROWS[1]), (3, {**ROWS[2], "tools": None})]


@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_keys_that_columns_filled_with_null_are_absent(tmp_path: Path, rows: int) -> None:
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    with (
        pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink,
        pyarrow.ipc.new_file(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    with (
        pyarrow.OSFile(str(tmp_path / "b.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow", "b.arrow"):
        assert rows_of(found(tmp_path / name), rows_per_chunk=rows) == EXPECTED


def test_large_columnar_rows_are_cut_into_small_chunks(tmp_path: Path) -> None:
    table = pyarrow.table({"text": ["x" * 10_000] * 100})
    parquet.write_table(table, tmp_path / "a.parquet")
    given = list(read_chunks(found(tmp_path / "a.parquet"), bytes_per_chunk=100_000))
    assert [chunk.first for chunk in given] == list(range(1, 101, 9))
    assert max(len(chunk.payload) for chunk in given) < 100_000
    assert rows_of(found(tmp_path / "a.parquet"), bytes_per_chunk=5) == [
        (number, {"text": "x" * 10_000}) for number in range(1, 101)
    ]


def test_row_groups_and_their_rows_are_counted_through(tmp_path: Path) -> None:
    table = pyarrow.table({"text": [str(index) for index in range(100)]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7)
    expected = [(index + 1, {"text": str(index)}) for index in range(100)]
    assert rows_of(found(tmp_path / "a.parquet"), rows_per_chunk=10) == expected


def test_text_of_a_table_that_is_not_utf8(tmp_path: Path) -> None:
    cells = pyarrow.array([b"a", b"\xff", b"b"]).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": cells}), tmp_path / "a.parquet")
    assert rows_of(found(tmp_path / "a.parquet")) == [
        (1, A),
        (2, ("not UTF-8", "a text is not UTF-8")),
        (3, B),
    ]


def test_a_parquet_file_cut_short_or_empty(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([A] * 1000), tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(data[:-20])
    assert error_of(tmp_path / "a.parquet").startswith(
        f"{tmp_path}/a.parquet: cannot be read as Parquet: Parquet magic"
    )
    (tmp_path / "a.parquet").write_bytes(data[:4] + b"\0" * 50 + data[54:])
    assert error_of(tmp_path / "a.parquet").startswith(f"{tmp_path}/a.parquet: cannot be read as Parquet: ")
    (tmp_path / "a.parquet").write_bytes(b"")
    assert error_of(tmp_path / "a.parquet").startswith(
        f"{tmp_path}/a.parquet: cannot be read as Parquet: Parquet file size"
    )
    parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), tmp_path / "b.parquet")
    assert error_of(tmp_path / "b.parquet") == f"{tmp_path}/b.parquet: the data set is empty"


@pytest.mark.parametrize("kind", ["new_file", "new_stream"])
def test_an_arrow_file_cut_short(tmp_path: Path, kind: str) -> None:
    table = pyarrow.table({"text": ["x" * 100] * 1000})
    path = tmp_path / "a.arrow"
    with pyarrow.OSFile(str(path), "wb") as sink, getattr(pyarrow.ipc, kind)(sink, table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes()[:-2000])
    assert error_of(path).startswith(f"{path}: cannot be read as Arrow: ")


def test_saved_data_sets(tmp_path: Path) -> None:
    table = datasets.Dataset.from_list(ROWS)
    table.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert rows_of(found(tmp_path / "one")) == EXPECTED
    datasets.DatasetDict(train=table, test=table.select([1])).save_to_disk(str(tmp_path / "two"))
    assert found(tmp_path / "two") == [DataFile(f"{tmp_path}/two/train", "arrow", split="train")]
    assert rows_of(found(tmp_path / "two")) == EXPECTED
    assert rows_of(found(tmp_path / "two", split="test")) == [(1, ROWS[1])]
    assert error_of(tmp_path / "two", split="dev") == f"{tmp_path}/two: has no split dev; it has train, test"
    assert error_of(tmp_path / "one", split="dev") == (
        f"{tmp_path}/one: a file has no split, so that split: dev can't be chosen"
    )
    patterned = found(tmp_path / "**")
    assert [file.path for file in patterned] == [
        f"{tmp_path}/{name}" for name in ("one", "two/test", "two/train")
    ]
    first = found(tmp_path / "one")[0]
    fingerprint = first.fingerprint()
    assert first.num_bytes == sum(path.stat().st_size for path in (tmp_path / "one").glob("*.arrow"))
    table.select([0, 1]).save_to_disk(str(tmp_path / "three"), num_shards=2)
    assert found(tmp_path / "three")[0].fingerprint() != fingerprint


def test_saved_data_sets_that_lack_something(tmp_path: Path) -> None:
    datasets.DatasetDict(train=datasets.Dataset.from_list([A])).save_to_disk(str(tmp_path / "a"))
    state = tmp_path / "a" / "train" / "state.json"
    content = state.read_text()
    state.write_text("{")
    assert error_of(tmp_path / "a").startswith(f"{state}: cannot be read: Expecting property name")
    state.write_text(content)
    next((tmp_path / "a" / "train").glob("*.arrow")).unlink()
    assert error_of(tmp_path / "a").startswith(f"{tmp_path}/a/train: cannot be read as Arrow: ")
    state.unlink()
    assert error_of(tmp_path / "a") == f"{tmp_path}/a/train: not a saved data set: it has no state.json"
    (tmp_path / "a" / "dataset_dict.json").write_text("[]")
    assert error_of(tmp_path / "a").startswith(f"{tmp_path}/a/dataset_dict.json: cannot be read: ")


def test_columns_of_mixed_types_which_datasets_keeps_as_json(tmp_path: Path) -> None:
    if not hasattr(datasets, "Json"):
        pytest.skip("this datasets has no such columns")
    rows = [{"x": [{"a": 1, "b": None}, "s"], "y": {"z": "t"}}, {"x": None, "y": {"z": None}}]
    features = datasets.Features({"x": datasets.List(datasets.Json()), "y": {"z": datasets.Json()}})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "a"))
    assert rows_of(found(tmp_path / "a")) == [
        (1, {"x": [{"a": 1}, "s"], "y": {"z": "t"}}),
        (2, {"x": None, "y": {}}),
    ]


# The hub


def test_ids_of_the_hub() -> None:
    assert found("owner/na-me.v1") == [DataFile("owner/na-me.v1", "hub", split="train")]
    assert found("squad", name="plain", split="dev") == [DataFile("squad", "hub", split="dev", name="plain")]
    assert found("owner/name:test") == [DataFile("owner/name", "hub", split="test")]
    assert found("owner/name:train[:10%]") == [DataFile("owner/name", "hub", split="train[:10%]")]
    assert (
        error_of("owner/name:test", split="train")
        == "owner/name:test: names one split, and split: train another"
    )
    assert found("owner/name")[0].num_bytes == 0


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    real, asked = datasets.load_dataset, []

    def load_dataset(path: str, name: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((path, name, split, streaming))
        files, cache = {split: str(tmp_path / "a.parquet")}, str(tmp_path / "cache")
        return real("parquet", data_files=files, split=split, streaming=streaming, cache_dir=cache)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    files = found("owner/name:dev", name="main")
    assert rows_of(files, rows_per_chunk=2, streaming=streaming) == EXPECTED
    assert asked == [("owner/name", "main", "dev", streaming)]


def test_a_hub_fingerprint_is_of_its_version_and_what_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    class Builder:
        hash = "1"

        class config:  # noqa: N801
            name = "default"

    monkeypatch.setattr(datasets, "load_dataset_builder", lambda path, name: Builder)
    files = [*found("a/b"), *found("a/b:test"), *found("a/c"), *found("a/b", name="x")]
    first = [file.fingerprint() for file in files]
    assert len(set(first)) == 4
    assert [file.fingerprint() for file in files] == first
    Builder.hash = "2"
    assert not set(first) & {file.fingerprint() for file in files}


def test_what_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        try:
            raise KeyError("no hub\nhere")
        except KeyError as error:
            raise RuntimeError("wrapped") from error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    reason = "no/such: no such file, and the hub does not give it: "
    assert error_of("no/such").startswith(reason)
    with pytest.raises(DataError, match=reason):
        found("no/such")[0].fingerprint()


def test_offline(tmp_path: Path) -> None:
    code = (
        "from hfpar.config.schema import DataSource\n"
        "from hfpar.data.reading.sources import resolve, read_chunks\n"
        "from hfpar.errors import DataError\n"
        "for call in (lambda f: list(read_chunks([f])), lambda f: list(read_chunks([f], streaming=True)),\n"
        "             lambda f: f.fingerprint()):\n"
        "    try:\n"
        "        call(resolve(DataSource(path='no/such'))[0])\n"
        "    except DataError as error:\n"
        "        print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    line = (
        "no/such: no such file, and the hub does not give it: "
        "Couldn't reach 'no/such' on the Hub (OfflineModeIsEnabled)"
    )
    assert (result.returncode, result.stdout.splitlines()) == (0, [line] * 3)


def test_a_link_that_leads_back_is_followed_once(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.jsonl").write_text('{"text": "a"}\n')
    (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
    files = resolve(DataSource(path=f"{tmp_path}/**/*.jsonl"))
    assert [file.path for file in files] == [f"{tmp_path}/data/a.jsonl"]
