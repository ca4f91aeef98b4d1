"""Tokens in mapped files: what is written is read back, sample by sample, with the place it came from."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from hfpar.data.reading.rows import Place
from hfpar.data.store import DataReport, Selection, TokenBlock, TokenStore, TokenWriter
from hfpar.data.stream import Sample

SAMPLES = [Sample([5, 6, 7], [-100, 6, 7]), Sample([70_000, 2], [-100, 2]), Sample([9], [-100])]


def block(samples: list[Sample], rows: list[int], **report: object) -> TokenBlock:
    tokens = [token for sample in samples for token in sample.input_ids]
    labels = [label for sample in samples for label in sample.labels]
    lengths = np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)
    trained = np.array(labels, dtype=np.int64) != -100
    counted = DataReport(
        num_rows=len(rows),
        num_samples=len(samples),
        num_tokens=len(tokens),
        num_label_tokens=int(trained.sum()),
    )
    counted.add(DataReport(**report))  # type: ignore[arg-type]
    return TokenBlock(np.array(tokens, dtype=np.uint32), trained, lengths, np.array(rows), counted)


def store(folder: Path, *blocks: tuple[TokenBlock, int], files: list[tuple[str, str]]) -> TokenStore:
    folder.mkdir()
    writer = TokenWriter(folder)
    for part, file_number in blocks:
        writer.write(part, file_number)
    writer.close(files)
    return TokenStore(folder)


@pytest.fixture
def three(tmp_path: Path) -> TokenStore:
    first = block(SAMPLES[:2], [1, 3], counts=Counter({"too long": 2}), max_token_id=70_000)
    second = block(
        SAMPLES[2:], [8], problems=Counter({"broken JSON": 1}), listed_problems=["b, row 2: broken"]
    )
    return store(tmp_path / "three", (first, 0), (second, 1), files=[("a.jsonl", "line"), ("b.csv", "row")])


def test_samples_come_back(three: TokenStore) -> None:
    assert list(three) == SAMPLES
    assert three[-1] == SAMPLES[2] and three[0:2] == SAMPLES[:2]
    assert three.lengths.tolist() == [3, 2, 1]
    for index in (3, -4):
        with pytest.raises(IndexError):
            three[index]


def test_places_come_back(three: TokenStore) -> None:
    assert [three.place(index) for index in range(3)] == [
        Place("a.jsonl", "line", 1),
        Place("a.jsonl", "line", 3),
        Place("b.csv", "row", 8),
    ]


def test_counts_come_back(three: TokenStore) -> None:
    assert three.report == DataReport(
        num_rows=3,
        num_samples=3,
        num_tokens=6,
        num_label_tokens=3,
        max_token_id=70_000,
        counts=Counter({"too long": 2}),
        problems=Counter({"broken JSON": 1}),
        listed_problems=["b, row 2: broken"],
    )
    assert isinstance(three.report.counts, Counter) and three.report.counts["never"] == 0


def test_twenty_problems_are_listed_at_most() -> None:
    report = DataReport()
    for number in range(30):
        report.add(DataReport(problems=Counter({"broken JSON": 1}), listed_problems=[str(number)]))
    assert report.num_bad_rows == 30
    assert report.listed_problems == [str(number) for number in range(20)]


def test_an_empty_store_opens(tmp_path: Path) -> None:
    empty = store(tmp_path / "empty", files=[])
    assert len(empty) == 0 and list(empty) == [] and empty.lengths.tolist() == []


def test_a_selection_joins_stores_and_leaves_out(tmp_path: Path, three: TokenStore) -> None:
    other = store(tmp_path / "other", (block(SAMPLES[1:], [4, 5]), 0), files=[("c", "line")])
    assert list(Selection([three, other])) == [*SAMPLES, *SAMPLES[1:]]
    some = Selection([three, other], [np.array([2, 0]), np.array([1])])
    assert list(some) == [SAMPLES[2], SAMPLES[0], SAMPLES[2]]
    assert some.lengths.tolist() == [1, 3, 1] and some.sizes == [2, 1]
    assert some[-1] == SAMPLES[2] and some[1:] == [SAMPLES[0], SAMPLES[2]]
    assert some.locate(1) == (three, 0) and some.locate(2) == (other, 1)
    none_of_the_first = Selection([three, other], [np.array([], dtype=int), np.array([0])])
    assert list(none_of_the_first) == [SAMPLES[1]]
    assert list(Selection([])) == []
    with pytest.raises(IndexError):
        some[3]
