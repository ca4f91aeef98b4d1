"""Reading rows from files: what they hold, and for what can't be read its line and its reason."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import pickle
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import DataSource
from hfpar.data.reading import byte_source, text_files
from hfpar.data.reading.rows import Problem
from hfpar.data.reading.sources import Chunk, read_chunks, resolve
from hfpar.errors import DataError, MissingDependencyError

A, B, C = {"text": "a"}, {"text": "é"}, {"text": "c"}


def chunks(path: Path | str, rows: int = 1000, size: int = 4 << 20) -> list[Chunk]:
    files = resolve(DataSource(path=str(path)))
    return [
        pickle.loads(pickle.dumps(c)) for c in read_chunks(files, rows_per_chunk=rows, bytes_per_chunk=size)
    ]


def flat(given: list[Chunk]) -> list[tuple[int, Any]]:
    """Each row's number and what it is: an object, or a problem as (kind, reason)."""
    found = []
    for chunk in given:
        for place, row in chunk.rows():
            assert (place.path, place.unit) == (chunk.path, chunk.unit)
            if isinstance(row, Problem):
                assert row.place == place
                row = (row.kind, row.reason)
            found.append((place.number, row))
    return found


def rows_of(path: Path | str, **limits: int) -> list[tuple[int, Any]]:
    return flat(chunks(path, **limits))


def write(path: Path, data: bytes | str) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


# JSON lines


def test_json_lines_with_byte_order_mark_and_windows_line_ends(tmp_path: Path) -> None:
    data = b"\xef\xbb\xbf" + lines(A, B, C).replace(b"\n", b"\r\n").rstrip()
    assert rows_of(write(tmp_path / "a.jsonl", data)) == [(1, A), (2, B), (3, C)]
    assert rows_of(write(tmp_path / "a.NDJSON", data)) == [(1, A), (2, B), (3, C)]


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    row = {"text": "a\u2028b\u0085c"}
    assert rows_of(write(tmp_path / "a.jsonl", lines(row, A))) == [(1, row), (2, A)]


EMPTY = ("empty line", "the line is empty")


@pytest.mark.parametrize("rows", [1, 2, 3, 1000])
def test_empty_lines_are_problems_but_not_at_the_end(tmp_path: Path, rows: int) -> None:
    data = lines(A) + b"\n \t\r\n" + lines(B, C) + b"\n" + lines(A) + b"\n\r\n  "
    expected = [(1, A), (2, EMPTY), (3, EMPTY), (4, B), (5, C), (6, EMPTY), (7, A)]
    assert rows_of(write(tmp_path / "a.jsonl", data), rows=rows) == expected


def test_empty_lines_at_the_start(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.jsonl", b"\n\n" + lines(A))) == [(1, EMPTY), (2, EMPTY), (3, A)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"text": "x"', ("broken JSON", "not valid JSON: Expecting ',' delimiter at column 13")),
        (b'  {"text" "x"}', ("broken JSON", "not valid JSON: Expecting ':' delimiter at column 11")),
        (b'{"text": "x"} {}', ("broken JSON", "not valid JSON: Extra data at column 15")),
        (b'{"text": "\xff"}', ("not UTF-8", "not UTF-8 (byte 11 of the line)")),
        (b'{"text": "\xed\xa0\x80"}', ("not UTF-8", "not UTF-8 (byte 11 of the line)")),
        (b'{"text": ' + b"[" * 100_000, ("broken JSON", "JSON nested too deeply to be read")),
        (b"[1, 2]", ("wrong type", "a list where an object is needed")),
        (b"3", ("wrong type", "a number where an object is needed")),
        (b'"text"', ("wrong type", "a string where an object is needed")),
        (b"null", ("wrong type", "null where an object is needed")),
        (b"true", ("wrong type", "a boolean where an object is needed")),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(
    tmp_path: Path, line: bytes, problem: tuple[str, str]
) -> None:
    path = write(tmp_path / "bad.jsonl", lines(A, B) + line + b"\n" + lines(C, A))
    assert rows_of(path) == [(1, A), (2, B), (3, problem), (4, C), (5, A)]
    assert rows_of(path, rows=1) == [(1, A), (2, B), (3, problem), (4, C), (5, A)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_how_deep_a_row_may_be_nested(tmp_path: Path, name: str) -> None:
    def row(depth: int) -> str:
        return '{"x": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"

    wide = json.dumps({"x": [[]] * 1000})
    rows = [row(128), row(129), row(600), wide]
    text = "\n".join(rows) if name == "a.jsonl" else "[" + ",\n".join(rows) + "]"
    bad = ("broken JSON", "JSON nested too deeply to be read")
    expected = [(1, json.loads(rows[0])), (2, bad), (3, bad), (4, json.loads(wide))]
    assert rows_of(write(tmp_path / name, text)) == expected


def test_a_number_of_too_many_digits_is_broken_json(tmp_path: Path) -> None:
    if sys.version_info < (3, 11):
        pytest.skip("this Python reads it")
    found = rows_of(write(tmp_path / "a.jsonl", b'{"text": %s}\n' % (b"9" * 5000)))
    assert found[0][1][0] == "broken JSON"


def test_a_problem_reads_as_file_line_and_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(A) + b"[\n")
    *_, (_, problem) = chunks(path)[0].rows()
    assert str(problem) == f"{path}, line 2: not valid JSON: Expecting value at column 2"


def test_types_may_differ_between_rows(tmp_path: Path) -> None:
    calls = [
        {"text": "a", "arguments": '{"x": 1}'},
        {"text": "b", "arguments": {"x": [1, None]}},
        {"text": ["c"]},
    ]
    expected = list(enumerate(calls, start=1))
    assert rows_of(write(tmp_path / "a.jsonl", lines(*calls))) == expected
    assert [row for _, row in rows_of(write(tmp_path / "a.json", json.dumps(calls)))] == calls


def test_a_long_line_is_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(text_files, "SKIP_BYTES", 1 << 16)
    path = write(tmp_path / "a.jsonl", lines(A, {"text": "x" * (30 << 20)}, B))
    assert rows_of(path) == [
        (1, A),
        (2, ("line too long", "the line is longer than 1,048,576 bytes")),
        (3, B),
    ]
    tracemalloc.start()
    list(read_chunks(resolve(DataSource(path=str(path)))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_line_may_be_as_long_as_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", len(lines(A)))
    path = write(tmp_path / "a.jsonl", lines(A, B, A))  # B's letter has two bytes
    assert rows_of(path) == [(1, A), (2, ("line too long", "the line is longer than 14 bytes")), (3, A)]


def test_memory_is_flat_while_a_large_file_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines({"text": "x" * 1000}) * 40_000)
    tracemalloc.start()
    for _ in read_chunks(resolve(DataSource(path=str(path))), bytes_per_chunk=1 << 18):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20


def test_chunks_end_at_either_limit_and_tell_how_far_the_reader_is(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*[A] * 7))
    assert [(c.first, len(list(c.rows()))) for c in chunks(path, rows=3)] == [(1, 3), (4, 3), (7, 1)]
    assert [(c.first, len(list(c.rows()))) for c in chunks(path, size=2 * len(lines(A)))] == [
        (1, 2),
        (3, 2),
        (5, 2),
        (7, 1),
    ]
    assert sum(chunk.num_bytes for chunk in chunks(path, rows=3)) == path.stat().st_size


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", lines(*[{"text": "x" * 100_000}] * 20))
    given = read_chunks(resolve(DataSource(path=str(path))), rows_per_chunk=1)
    read = [next(given)]
    with path.open("r+b") as file:
        file.truncate(10 * 100_013)
    read += list(given)
    *good, last = flat(read)
    assert last == (len(good) + 1, ("file cut short", "the file became shorter while it was read"))
    assert [number for number, _ in good] == list(range(1, len(good) + 1))
    assert 10 <= len(good) <= 11


# Compressed files


COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
}


def zstd(data: bytes) -> bytes:
    return pytest.importorskip("zstandard").ZstdCompressor().compress(data)


@pytest.mark.parametrize("suffix", [*COMPRESS, "zst"])
def test_compressed_files(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS.get(suffix, zstd)
    expected = [(1, A), (2, B), (3, C)]
    assert rows_of(write(tmp_path / f"a.jsonl.{suffix}", compress(lines(A, B, C)))) == expected
    parts = compress(lines(A, B)) + compress(lines(C))
    assert rows_of(write(tmp_path / f"b.jsonl.{suffix}", parts)) == expected
    assert rows_of(write(tmp_path / f"a.csv.{suffix}", compress(b"text\na\n"))) == [(1, A)]
    assert rows_of(write(tmp_path / f"a.json.{suffix}", compress(b'[{"text": "a"}]'))) == [(1, A)]


KINDS = {"gz": "gzip", "bz2": "bzip2", "xz": "xz", "zst": "zstd"}


@pytest.mark.parametrize("suffix", [*COMPRESS, "zst"])
def test_a_compressed_file_cut_short(tmp_path: Path, suffix: str) -> None:
    compress = COMPRESS.get(suffix, zstd)
    # The end of the last row's block is cut off. The rows before it come from blocks of their own.
    data = compress(lines(A, B)) + compress(lines(C))[:-6]
    found = rows_of(write(tmp_path / f"a.jsonl.{suffix}", data))
    problem = ("file cut short", f"the {KINDS[suffix]} file is cut short here")
    assert found in ([(1, A), (2, B), (3, problem)], [(1, A), (2, B), (3, C), (4, problem)])


def test_a_long_gzip_file_cut_in_the_middle(tmp_path: Path) -> None:
    rows = [{"text": f"{index} {index * 7919 % 10007}"} for index in range(50_000)]
    data = gzip.compress(lines(*rows))
    found = rows_of(write(tmp_path / "a.jsonl.gz", data[: len(data) // 2]))
    *good, (number, problem) = found
    assert problem == ("file cut short", "the gzip file is cut short here")
    assert number == len(good) + 1
    assert [row for _, row in good] == rows[: len(good)]
    assert 20_000 < len(good) < 30_000


def test_a_gzip_file_broken_in_the_middle(tmp_path: Path) -> None:
    data = gzip.compress(lines(A)) + b"garbage" * 10
    assert rows_of(write(tmp_path / "a.jsonl.gz", data)) == [
        (1, A),
        (2, ("broken compression", "cannot be read as gzip from here on")),
    ]


@pytest.mark.parametrize("suffix", ["gz", "bz2", "xz"])
def test_a_file_that_is_not_compressed_as_it_says(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a.jsonl.{suffix}", lines(A))
    with pytest.raises(DataError, match=rf"a.jsonl.{suffix}: cannot be read as {KINDS[suffix]}: \w"):
        chunks(path)


def test_the_package_for_zstd_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    path = write(tmp_path / "a.jsonl.zst", b"x")
    with pytest.raises(MissingDependencyError) as caught:
        chunks(path)
    assert str(caught.value) == f"{path}: needs zstandard: pip install 'hfpar[zstd]'"


def test_an_error_of_the_disk_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.jsonl", lines(A))

    class Broken(io.BytesIO):
        def readline(self, *_: Any) -> bytes:
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(byte_source, "_decompressed", lambda *_: Broken())
    with pytest.raises(DataError) as caught:
        chunks(path)
    assert str(caught.value) == f"{path}: cannot be read: Input/output error"


# JSON lists


@pytest.mark.parametrize("block", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize("rows", [1, 2, 1000])
def test_a_json_list_in_any_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int, rows: int
) -> None:
    monkeypatch.setattr("hfpar.data.reading.json_list._BLOCK", block)
    row = {"text": 'a ]},{[ "\\ é \U0001f600', "n": [1, 2.5e3, {"x": None}]}
    flat_text = json.dumps([A, row, C])
    assert rows_of(write(tmp_path / "a.json", flat_text), rows=rows) == [(1, A), (2, row), (3, C)]
    pretty = "\ufeff\n" + json.dumps([A, row, C], indent=2, ensure_ascii=False).replace("\n", "\r\n") + "\n\n"
    assert rows_of(write(tmp_path / "b.json", pretty), rows=rows) == [(1, A), (2, row), (3, C)]


def test_json_lines_under_the_name_of_json(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path / "a.json", lines(A, B))) == [(1, A), (2, B)]
    broken = write(tmp_path / "b.json", b'{"text": \n' + lines(B))
    assert rows_of(broken) == [
        (1, ("broken JSON", "not valid JSON: Expecting value at column 9")),
        (2, B),
    ]


def test_one_pretty_object_is_no_list(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", json.dumps({"data": [A, B]}, indent=2))
    with pytest.raises(DataError) as caught:
        chunks(path)
    assert str(caught.value) == (
        f"{path}: one JSON object over several lines, where a list of rows or one row a line is needed"
    )


REST = "; the rest of the file isn't read"


@pytest.mark.parametrize("block", [1, 1 << 20])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", None),
        ('[\n{"text": "a"},\n3\n]', [(1, A), (2, ("wrong type", "a number where an object is needed"))]),
        (
            '[{"text": "a"},\n\n{"text": x}, {"text": "c"}]',
            [(1, A), (2, ("broken JSON", f"not valid JSON: Expecting value at line 3, column 10{REST}"))],
        ),
        (
            '[{"text": "a"}, {"text": x}, {"text": "c"}]',
            [(1, A), (2, ("broken JSON", f"not valid JSON: Expecting value at line 1, column 26{REST}"))],
        ),
        (
            '[{"text": "a"}\n{"text": "c"}]',
            [(1, A), (2, ("broken JSON", f"not valid JSON: a comma or ] is needed{REST}"))],
        ),
        (
            '[{"text": "a"},\n]',
            [(1, A), (2, ("broken JSON", f"not valid JSON: Expecting value at line 2, column 1{REST}"))],
        ),
        (
            '[{"text": "a"},\n {"te',
            [(1, A), (2, ("file cut short", "the file ends before its list is closed"))],
        ),
        ('[{"text": "a"},\n', [(1, A), (2, ("file cut short", "the file ends before its list is closed"))]),
        ('[{"text": "a"}\n', [(1, A), (2, ("file cut short", "the file ends before its list is closed"))]),
        ("[", [(1, ("file cut short", "the file ends before its list is closed"))]),
        (
            '[{"text": "a"}]\n[]',
            [(1, A), (2, ("broken JSON", "not valid JSON: more text behind the end of the list"))],
        ),
        (
            '[{"text": "a"},\n' + "[" * 100_000 + "]" * 100_000 + "]",
            [(1, A), (2, ("broken JSON", "JSON nested too deeply to be read" + REST))],
        ),
    ],
)
def test_a_bad_json_list(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: Any, block: int
) -> None:
    monkeypatch.setattr("hfpar.data.reading.json_list._BLOCK", max(block, len(text) // 100))
    path = write(tmp_path / "a.json", text)
    if expected is None:
        with pytest.raises(DataError, match=r"a.json: the data set is empty$"):
            chunks(path)
    else:
        assert rows_of(path) == expected


def test_bytes_of_a_json_list_that_are_not_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", b'[{"text": "a"},\n{"text": "\xff"},\n{"text": "c"}]')
    assert rows_of(path) == [(1, A), (2, ("not UTF-8", "not UTF-8")), (3, C)]


def test_a_long_row_of_a_json_list_ends_the_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 1 << 20)
    path = write(tmp_path / "a.json", json.dumps([A, {"text": "x" * (20 << 20)}, C]))
    assert rows_of(path) == [(1, A), (2, ("line too long", f"the row is longer than 1,048,576 bytes{REST}"))]
    tracemalloc.start()
    list(read_chunks(resolve(DataSource(path=str(path)))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_a_gzip_json_list_cut_short(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json.gz", gzip.compress(lines([A, C]))[:-4])
    assert rows_of(path)[-1][1] == ("file cut short", "the gzip file is cut short here")


# CSV


def test_csv_with_line_breaks_quotes_and_empty_cells(tmp_path: Path) -> None:
    table = [["prompt", "completion"], ["a,b", 'say "hi"\n\nthere'], ["é", ""], ["c", "d"]]
    out = io.StringIO()
    csv.writer(out).writerows(table)
    path = write(tmp_path / "a.csv", "\ufeff" + out.getvalue())
    expected = [
        (1, {"prompt": "a,b", "completion": 'say "hi"\n\nthere'}),
        (2, {"prompt": "é", "completion": None}),
        (3, {"prompt": "c", "completion": "d"}),
    ]
    assert rows_of(path) == rows_of(path, rows=1) == expected
    assert {chunk.unit for chunk in chunks(path)} == {"row"}


def test_tsv(tmp_path: Path) -> None:
    expected = [(1, {"prompt": "a,b", "completion": "c"})]
    assert rows_of(write(tmp_path / "a.tsv", "prompt\tcompletion\na,b\tc\n")) == expected
    assert rows_of(write(tmp_path / "a.TSV.gz", gzip.compress(b"prompt\tcompletion\na,b\tc\n"))) == expected


def test_csv_cells_that_are_lists_of_messages(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "c"}]
    turns = [{"from": "human", "value": "a"}]
    out = io.StringIO()
    csv.writer(out).writerows(
        [["messages", "x", "y"], [json.dumps(messages), json.dumps(turns), '[{"a": 1}]']]
    )
    assert rows_of(write(tmp_path / "a.csv", out.getvalue())) == [
        (1, {"messages": messages, "x": turns, "y": '[{"a": 1}]'})
    ]


@pytest.mark.parametrize("rows", [1, 1000])
def test_bad_csv_rows(tmp_path: Path, rows: int) -> None:
    data = b'x,y\na,b\n\nc\nd,e,f\n"g"h,i\nj,\xff\nk,l\n\n'
    path = write(tmp_path / "a.csv", data)
    assert rows_of(path, rows=rows) == [
        (1, {"x": "a", "y": "b"}),
        (2, EMPTY),
        (3, ("wrong number of cells", "1 cells under 2 columns")),
        (4, ("wrong number of cells", "3 cells under 2 columns")),
        (5, ("broken CSV", "not valid CSV: ',' expected after '\"'")),
        (6, ("not UTF-8", 'not UTF-8 (column "y")')),
        (7, {"x": "k", "y": "l"}),
    ]


def test_a_csv_quote_that_is_never_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.csv", 'text\na\n"b\n' + "c\n" * 3)
    assert rows_of(path) == [(1, A), (2, ("broken CSV", "not valid CSV: unexpected end of data"))]
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 3)
    reason = "not valid CSV: field larger than field limit (3)" + REST
    path = write(tmp_path / "b.csv", 'xyz\na\n"b\n' + "c\n" * 30)
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 4)
    reason = reason.replace("3", "4")
    assert rows_of(path)[1:] == [(2, ("broken CSV", reason))]


def test_a_long_csv_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "MAX_LINE_BYTES", 200_000)
    good = {"text": "x" * 150_000}  # more than the csv module takes by itself
    path = write(tmp_path / "a.csv", f"text\n{good['text']}\n{'y' * 200_001}\nz\n")
    assert rows_of(path) == [(1, good), (2, ("line too long", f"a line is longer than 200,000 bytes{REST}"))]


def test_csv_headers_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'a.csv: two columns are named "x"'):
        chunks(write(tmp_path / "a.csv", "x,y,x\n1,2,3\n"))
    with pytest.raises(DataError, match=r"b.csv: its header cannot be read: ',' expected after"):
        chunks(write(tmp_path / "b.csv", '"x"y\n1\n'))
    with pytest.raises(DataError, match=r"c.csv: the data set is empty$"):
        chunks(write(tmp_path / "c.csv", "x,y\n"))
    with pytest.raises(DataError, match=r"d.csv: the data set is empty$"):
        chunks(write(tmp_path / "d.csv", ""))
