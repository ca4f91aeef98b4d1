"""`hfpar data decontaminate`: what it writes and prints, and what it refuses."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hfpar.data.benchmarks import load_benchmark
from hfpar.data.overlap.words import split_words
from hfpar.datatool import overlap_report
from hfpar.datatool.main import main
from hfpar.datatool.whole_file import WholeFile
from hfpar.errors import ConfigError

SHIP = "A lighthouse keeper counts 48 ships on Monday and three times as many on Tuesday. How many ships pass in all?"
BREAD = "The baker of a hill village sells 17 loaves before sunrise and keeps 5 for the school. How many were baked?"
CLEAN = "Which of the seven rivers reaches the sea last when all of them begin at the same glacier?"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    rows = [
        {"problem": SHIP, "answer": "192", "solution": "48 + 144"},
        {"problem": BREAD, "answer": "22", "solution": "17 + 5"},
    ]
    path = tmp_path / "bench.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--against", "math500", "--benchmark_files", f"math500={path}"]


def chat(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": "Fine."}]}


def odd_line(row: dict[str, Any]) -> bytes:
    """As no encoder of ours would write it."""
    return json.dumps(row, indent=None, separators=(" , ", ":  ")).encode() + b" \r\n"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["decontaminate", *words, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_rows_stay_byte_for_byte(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        odd_line(chat(CLEAN)),
        odd_line(chat(SHIP)),
        odd_line(chat("\u00e9 " + CLEAN)),
        odd_line(chat(BREAD)),
    ]
    data, output, listed = tmp_path / "d.jsonl", tmp_path / "out.jsonl", tmp_path / "hits.jsonl"
    data.write_bytes(b"".join(lines).rstrip())
    before = data.read_bytes()
    found = run(capsys, str(data), *files, "--output", str(output), "--list", str(listed))
    assert output.read_bytes() == lines[0] + lines[2]
    assert data.read_bytes() == before
    assert (found["rows"], found["rows_with_items"]) == (4, 2)
    (bench,) = found["benchmarks"]
    assert (bench["name"], bench["items"], bench["items_found"]) == ("math500", 2, 2)
    assert bench["found"]["question"] == {"verbatim": 2, "long_run": 0, "near": 0}
    hits = [json.loads(line) for line in listed.read_text().splitlines()]
    assert [(hit["line"], hit["item_id"], hit["kind"], hit["score"]) for hit in hits] == [
        (2, "0", "verbatim", 1.0),
        (4, "1", "verbatim", 1.0),
    ]
    for hit, question in zip(hits, (SHIP, BREAD), strict=True):
        assert hit["row_text"] == hit["item_text"] == question
        start, end = hit["row_span"]
        assert split_words(hit["row_text"][start:end]) == split_words(question)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bench.jsonl",
        "d.jsonl",
        "hits.jsonl",
        "out.jsonl",
    ]


def test_files_of_several_kinds(tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    zipped, table, output = tmp_path / "a.jsonl.gz", tmp_path / "b.csv", tmp_path / "out.jsonl"
    zipped.write_bytes(gzip.compress(odd_line(chat(SHIP)) + odd_line(chat(CLEAN))))
    table.write_text(f'question,answer\n"{BREAD}",22\n"{CLEAN} Say.",none\n')
    found = run(capsys, str(zipped), str(table), *files, "--output", str(output))
    assert output.read_bytes() == (
        odd_line(chat(CLEAN)) + json.dumps({"question": f"{CLEAN} Say.", "answer": "none"}).encode() + b"\n"
    )
    assert found["rows_with_items"] == 2


def test_rows_that_cannot_be_read(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "d.jsonl", tmp_path / "out.jsonl"
    data.write_bytes(odd_line(chat(CLEAN)) + b"{broken\n" + odd_line(chat(SHIP)))
    found = run(capsys, str(data), *files, "--output", str(output))
    assert (found["rows"], found["unreadable_rows"]) == (3, {"broken JSON": 1})
    assert output.read_bytes() == odd_line(chat(CLEAN))


def test_several_processes_find_the_same(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data, output = tmp_path / "d.jsonl", tmp_path / "out.jsonl"
    lines = [odd_line(chat(f"{SHIP if number % 700 == 0 else CLEAN} ({number})")) for number in range(2100)]
    data.write_bytes(b"".join(lines))
    found = run(capsys, str(data), *files, "--output", str(output), "--dataset_num_proc", "2")
    assert found["rows_with_items"] == 3
    assert output.read_bytes() == b"".join(line for number, line in enumerate(lines) if number % 700)


def test_neither_it_nor_its_processes_load_torch() -> None:
    code = (
        "import sys, hfpar.datatool.decontaminate, hfpar.datatool.overlaps\n"
        "sys.exit(bool({'torch', 'transformers', 'datasets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_a_template_is_no_hit_and_is_told(
    tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "d.jsonl"
    data.write_bytes(
        b"".join(odd_line(chat(f"{SHIP} It is an example. Now do {number}.")) for number in range(40))
    )
    found = run(capsys, str(data), *files)
    assert found["rows_with_items"] == 0
    assert found["benchmarks"][0]["items_in_templates"] == ["0"]
    assert found["template_runs"] > 5


def test_what_people_see(tmp_path: Path, files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "d.jsonl"
    data.write_bytes(odd_line(chat(f"\x1b]0;title\x07 {SHIP}\x1b[2J")) + b"[]\n")
    assert main(["decontaminate", str(data), *files]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 rows (50.00 %) hold a benchmark's item" in printed
    assert f"{data}, line 1 holds the question of math500 0" in printed
    assert "1 row can't be read" in printed
    assert f"\u27e6{SHIP[:-1]}\u27e7?" in printed
    assert "\x1b" not in printed and "\x07" not in printed


def test_a_match_is_highlighted_in_colours() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, color_system="truecolor", width=200)
    console.print(overlap_report._marked("before the match after", [7, 16], console))
    assert "\x1b[30;48;2;255;213;79mthe match\x1b[0m" in stream.getvalue()
    assert "before " in stream.getvalue()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["d.jsonl"], "--against: missing; name the benchmarks, such as --against math500,gsm8k"),
        (["--against", "math500"], "dataset: missing; name the files to look at"),
        (["no.jsonl", "--against", "math500"], "dataset: no.jsonl: no such file"),
        (
            ["d.jsonl", "--against", "mth500"],
            "decontaminate_against: benchmark mth500: unknown; did you mean math500?",
        ),
        (
            ["d.jsonl", "--against", ","],
            "decontaminate_against: names no benchmark; name some, such as math500",
        ),
        (["d.jsonl", "--output", "d.jsonl"], "--output: d.jsonl is read, too; name another file"),
        (["d.jsonl", "--list", "link.jsonl"], "--list: link.jsonl is read, too; name another file"),
        (["d.jsonl", "--output", "bench.jsonl"], "--output: bench.jsonl is read, too; name another file"),
        (["d.jsonl", "--output", "x.jsonl", "--list", "x.jsonl"], "--list: x.jsonl is --output, too"),
        (["d.jsonl", "--output", "x.csv"], "--output: x.csv must end in .jsonl"),
        (["d.jsonl", "--output", "no/x.jsonl"], "--output: no is no folder"),
        (["d.jsonl", "--output", "d.folder.jsonl"], "--output: d.folder.jsonl is a folder; name a file"),
        (["d.jsonl", "--min_words", "2"], "--min_words: 2; must be a whole number of at least 3"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, words: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_bytes(odd_line(chat(SHIP)))
    Path("link.jsonl").symlink_to("d.jsonl")
    Path("d.folder.jsonl").mkdir()
    before = Path("d.jsonl").read_bytes(), Path("bench.jsonl").read_bytes()
    against = [] if "--against" in words or len(words) == 1 else files
    with pytest.raises(ConfigError) as caught:
        main(["decontaminate", *words, *against])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert (Path("d.jsonl").read_bytes(), Path("bench.jsonl").read_bytes()) == before
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("where", ["bench.jsonl", "ben*.jsonl"])
def test_the_data_of_a_benchmark_described_by_yaml_stays(
    tmp_path: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("d.jsonl").write_bytes(odd_line(chat(SHIP)))
    Path("own.yaml").write_text(f"name: own\npath: {where}\nfields: {{question: problem}}\n")
    before = Path("bench.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"^--output: bench\.jsonl is read, too; name another file$"):
        main(["decontaminate", "d.jsonl", "--against", "own.yaml", "--output", "bench.jsonl"])
    assert Path("bench.jsonl").read_bytes() == before


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.jsonl"
    target.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"--output: .* can't be written \(no space left on device\)"):
        with WholeFile("output", target) as file:
            file.write(b"new")
            monkeypatch.setattr(os, "fsync", full)
    assert target.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


def test_what_killed_processes_left_goes_and_what_others_write_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, others = tmp_path / ".out.jsonl.1.partial", tmp_path / ".x.jsonl.1.partial"
    for path in (left, others):
        path.write_text("half")
    with WholeFile("output", tmp_path / "out.jsonl") as first:
        assert not left.exists() and others.exists()
        monkeypatch.setattr(os, "getpid", lambda: 2)
        with WholeFile("output", tmp_path / "out.jsonl") as second:
            assert first._partial.exists()
            second.write(b"other")
        first.write(b"whole")
    assert (tmp_path / "out.jsonl").read_bytes() == b"whole"


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"--list: .* can't be written \(permission denied\)"):
        WholeFile("list", tmp_path / "x.jsonl")


# On real benchmarks, where they are beside the checkout

SHARED = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the benchmarks' files beside the checkout")
def test_what_is_found_in_real_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = {"math500": SHARED / "math500.jsonl", "gsm8k": SHARED / "gsm8k_test.jsonl"}
    planted = load_benchmark("math500", {"math500": str(paths["math500"])}).items[::10]
    train = (SHARED / "gsm8k_train.jsonl").read_bytes().splitlines(True)
    rows = [json.dumps(chat(f"{item.question}\n\nThink step by step.")).encode() + b"\n" for item in planted]
    data, listed = tmp_path / "d.jsonl", tmp_path / "hits.jsonl"
    data.write_bytes(b"".join(train[:1500] + rows))
    given = [f"{name}={path}" for name, path in paths.items()]
    words = [str(data), "--against", "math500,gsm8k", "--list", str(listed), "--benchmark_files", *given]
    run(capsys, *words)
    hits = [json.loads(line) for line in listed.read_text().splitlines()]
    found = Counter(hit["item_id"] for hit in hits if hit["line"] > 1500 and hit["kind"] == "verbatim")
    assert found == Counter(item.item_id for item in planted)
    assert len({hit["line"] for hit in hits if hit["line"] <= 1500}) <= 3
