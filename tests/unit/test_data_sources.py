"""Reading rows: what is accepted, and for everything else the file, the line and the reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hfpar.data.sources import load_conversations
from hfpar.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def write(path: Path, *lines: str | bytes) -> str:
    path.write_bytes(b"".join((line.encode() if isinstance(line, str) else line) + b"\n" for line in lines))
    return str(path)


def test_all_kinds_of_rows_in_order(tmp_path: Path) -> None:
    rows = [
        GOOD,
        {"prompt": "a", "completion": "b"},
        {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:]},
        {"text": "é"},
        {
            "messages": [
                {"role": "assistant", "tool_calls": [{"name": "f"}]},
                {"role": "tool", "content": [{}]},
            ]
        },
    ]
    first = write(tmp_path / "a.jsonl", *(json.dumps(row, ensure_ascii=False) for row in rows[:3]))
    second = write(tmp_path / "b.ndjson", *(json.dumps(row, ensure_ascii=False) for row in rows[3:]))
    assert load_conversations([first, second]) == rows
    assert load_conversations(first) == rows[:3]


def test_parquet_rows_are_those_of_the_same_jsonl(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    calls = [[{"name": "f", "arguments": {"p": 1}}], [{"name": "g", "arguments": {"q": 2}}]]
    rows = [
        {"messages": [GOOD["messages"][0], {"role": "assistant", "content": "", "tool_calls": call}]}
        for call in calls
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    lines = write(tmp_path / "a.jsonl", *(json.dumps(row) for row in rows))
    assert load_conversations(str(tmp_path / "a.parquet")) == load_conversations(lines) == rows


def test_blank_lines_and_byte_order_mark_are_skipped(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode(), "", "  ", '{"text": "x"}\r'
    )
    assert load_conversations(path) == [GOOD, {"text": "x"}]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"text": "x"', "not valid JSON: Expecting ',' delimiter at column 13"),
        (b'{"text": "\xff"}', "not UTF-8 (byte 11 of the line)"),
        ('{"text": ' + "[" * 100_000, "JSON nested too deeply to be read"),
        ("[1, 2]", "list where an object is needed"),
        ("3", "int where an object is needed"),
        ('{"question": "a", "answer": "b"}', 'needs "messages", or "prompt" and "completion", or "text"; '),
        ('{"messages": "hi"}', '"messages" must be a list of at least one message'),
        ('{"messages": []}', '"messages" must be a list of at least one message'),
        ('{"messages": ["hi"]}', '"messages" 1 is not an object'),
        ('{"messages": [{"role": "user", "content": "a"}, {"content": "b"}]}', '"messages" 2 has no "role"'),
        ('{"messages": [{"role": "user"}]}', '"messages" 1 has no "content"'),
        ('{"messages": [{"role": "user", "content": 5}]}', '"messages" 1 has no "content"'),
        ('{"messages": null, "text": null}', "its keys are: none"),
        ('{"prompt": "a"}', "its keys are: prompt"),
        ('{"prompt": "a", "completion": []}', '"prompt" and "completion" must both be strings'),
        ('{"prompt": [], "completion": [{"role": "user", "content": ""}]}', '"prompt" must be a list'),
        ('{"text": 5}', '"text" must be a string'),
    ],
)
def test_bad_line_is_named(tmp_path: Path, line: str | bytes, reason: str) -> None:
    # The blank line counts: the number is the one that an editor shows.
    path = write(tmp_path / "bad.jsonl", json.dumps(GOOD), "", line, json.dumps(GOOD), json.dumps(GOOD))
    with pytest.raises(DataError) as caught:
        load_conversations(path)
    assert str(caught.value).startswith(f"{path}, line 3: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.jsonl")
    with pytest.raises(DataError, match="missing.jsonl: no such file"):
        load_conversations(missing)
    with pytest.raises(DataError, match="missing.parquet: no such file"):
        load_conversations(str(tmp_path / "missing.parquet"))
    for content in ((), ("", " ")):
        with pytest.raises(DataError, match="empty.jsonl: the data set is empty"):
            load_conversations(
                [write(tmp_path / "good.jsonl", '{"text": "x"}'), write(tmp_path / "empty.jsonl", *content)]
            )
    with pytest.raises(DataError, match="no file is named"):
        load_conversations([])
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(DataError, match="is a folder, not a file"):
        load_conversations(str(tmp_path / "folder.jsonl"))
    with pytest.raises(
        DataError, match=r"data.txt: unknown kind of file; allowed are .jsonl, .ndjson, .json"
    ):
        load_conversations(write(tmp_path / "data.txt", "x"))


def test_other_formats_through_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    as_json = write(tmp_path / "a.json", json.dumps([GOOD, GOOD]))
    assert load_conversations(as_json) == [GOOD, GOOD]
    table = datasets.Dataset.from_list(
        [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": None}]
    )
    table.to_parquet(str(tmp_path / "a.parquet"))
    with pytest.raises(DataError, match=r"a.parquet, row 2: needs .* its keys are: prompt"):
        load_conversations(str(tmp_path / "a.parquet"))
    table.select([0]).to_csv(str(tmp_path / "a.csv"))
    assert load_conversations(str(tmp_path / "a.csv")) == [{"prompt": "a", "completion": "b"}]
    with pytest.raises(DataError, match=r"b.json: cannot be read as json: ") as caught:
        load_conversations(write(tmp_path / "b.json", "{nonsense"))
    assert "\n" not in str(caught.value)


def test_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        asked.append((name, split))
        if name == "no/such":
            raise FileNotFoundError("no hub\nhere")
        return [{"text": "x"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert load_conversations(["some/name", "some/name:test"]) == [{"text": "x"}] * 2
    with pytest.raises(DataError, match="no/such: no such file, and the hub does not give it: no hub here"):
        load_conversations("no/such")
    assert asked == [("some/name", "train"), ("some/name", "test"), ("no/such", "train")]
