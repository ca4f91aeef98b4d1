"""An audit's folder and sets where something is in the way."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from hfpar.audit.build import _intrusions as find_intrusions
from hfpar.audit.comparing import _labels as checkpoint_labels
from hfpar.audit.folder import AuditFolder
from hfpar.audit.main import main
from hfpar.audit.results import ItemResult, Stratum
from hfpar.audit.sets import load_sets
from hfpar.audit.statistics import newcombe
from hfpar.config.audit_schema import AuditConfig
from hfpar.data.benchmarks import load_benchmark
from hfpar.errors import ConfigError, DataError
from hfpar.parallel.layout import Layout

ALONE = Layout(rank=0, world_size=1)


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One process needs nobody to tell."""
    monkeypatch.setattr(dist, "broadcast_object_list", lambda *_, **__: None)


def config(folder: Path, **settings: Any) -> AuditConfig:
    return AuditConfig(model_name_or_path="model", output_dir=str(folder), **settings)


def test_a_full_disk_at_the_beginning_leaves_a_folder_that_can_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(
            ConfigError, match=r"^output_dir: .*/audit can't be written \(No space left"
        ) as caught:
            AuditFolder(config(tmp_path / "audit"), ["a"], ALONE)
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "audit").glob("*.json*"))
    AuditFolder(config(tmp_path / "audit"), ["a"], ALONE).release()
    assert (tmp_path / "audit" / "audit.json").is_file()


def test_lines_made_by_other_rules_are_not_mixed_with_new_ones(tmp_path: Path) -> None:
    AuditFolder(config(tmp_path), ["a"], ALONE).release()
    (tmp_path / ".items.jsonl.1.partial").write_text("left by a process that was killed")
    AuditFolder(config(tmp_path), ["a"], ALONE).release()
    assert not list(tmp_path.glob(".*.partial"))
    path = tmp_path / "audit.json"
    path.write_text(path.read_text().replace('"rules": 2', '"rules": 1'))
    with pytest.raises(ConfigError, match="audit of another version of hfpar"):
        AuditFolder(config(tmp_path), ["a"], ALONE)


def test_files_of_others_are_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text("mine\n")
    with pytest.raises(ConfigError, match="holds other files"):
        AuditFolder(config(tmp_path), ["a"], ALONE)
    assert (tmp_path / "items.jsonl").read_text() == "mine\n"


@pytest.mark.parametrize("below", ["", "/folder"])
def test_an_output_dir_that_is_a_file_is_named(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=rf"^output_dir: .*/file{below} can't be written"):
        AuditFolder(config(Path(f"{tmp_path}/file{below}")), ["a"], ALONE)


def write_questions(path: Path, numbers: range) -> str:
    """Questions that can be varied."""
    rows = [
        {
            "question": f"Ann has {number + 20} apples and {number + 30} pears. How many fruits has Ann in all of "
            f"her {number + 2} bags?",
            "answer": f"#### {number}",
        }
        for number in numbers
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize(
    "names", [("gsm8k-perturbed",), ("gsm8k/hard", "gsm8k_train/hard"), ("gsm8k/gsm8k_train-perturbed",)]
)
def test_two_sets_of_one_name_are_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    """One's items would be counted as the other's."""
    files = {
        "gsm8k": write_questions(tmp_path / "test.jsonl", range(5)),
        "gsm8k_train": write_questions(tmp_path / "train.jsonl", range(10, 15)),
    }
    control = write_questions(tmp_path / "control.jsonl", range(20, 25))
    with pytest.raises(
        ConfigError, match=rf"^controls: {names[0].partition('/')[2] or names[0]} is the name of two"
    ):
        load_sets(
            config(
                tmp_path,
                benchmarks="gsm8k,gsm8k_train",
                benchmark_files=files,
                controls=dict.fromkeys(names, control),
            )
        )


def test_pairs_know_whose_items_they_vary(tmp_path: Path) -> None:
    """Both benchmarks number their items from 0."""
    files = {
        "gsm8k": write_questions(tmp_path / "test.jsonl", range(5)),
        "gsm8k_train": write_questions(tmp_path / "train.jsonl", range(10, 15)),
    }
    seeds = [
        json.loads(line)["question"]
        for path in files.values()
        for line in Path(path).read_text().splitlines()
    ]
    rows = [
        {"question": f"{seed} Why?", "answer": "1", "seed_question": seed} for seed in (seeds[3], seeds[6])
    ]
    (tmp_path / "varied.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = load_sets(
        config(
            tmp_path,
            benchmarks="gsm8k,gsm8k_train",
            benchmark_files=files,
            controls={"varied": str(tmp_path / "varied.jsonl")},
        )
    )
    found = {one.name: [(item.pair_set, item.pair_id) for item in one.benchmark.items] for one in sets}
    assert found["varied"] == [("gsm8k", "3"), ("gsm8k_train", "1")]
    assert set(found["gsm8k_train-perturbed"]) <= {("gsm8k_train", str(number)) for number in range(5)}
    items = {
        one.name: [
            ItemResult(
                one.name, item.item_id, "", "", 0, [], 0, [0, 0], {}, [], own_answer="7", own_answer_right=False,
                pair_id=item.pair_id,
            )
            for item in one.benchmark.items
        ]
        for one in sets
    }  # fmt: skip
    assert [(one.benchmark, one.num_pairs) for one in find_intrusions(sets, items)] == [
        ("gsm8k", 1),
        ("gsm8k_train", 1),
    ]


def test_checkpoints_beside_each_other_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`.` would be the comparison's own folder, and `..` the one above it."""
    (tmp_path / "run" / "last").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "run" / "last")
    assert checkpoint_labels([".", "..", "org/model"]) == ["last", "run", "model"]
    with pytest.raises(ConfigError, match="each may stand once"):
        checkpoint_labels([".", "../last"])


def test_a_comparison_fails_where_one_of_its_checkpoints_has_seen_something(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [SimpleNamespace(benchmark="exam", level=level) for level in ("none", "strong")]
    reports = [(name, SimpleNamespace(verdicts=[one])) for name, one in zip("ab", verdicts, strict=True)]
    monkeypatch.setattr("hfpar.audit.comparing.run_comparison", lambda *_: reports)
    flags = ["--compare", "a", "b"]
    assert main([*flags, "--fail_on", "some"]) == 1
    assert "seen b: exam (strong evidence)" in capsys.readouterr().err
    assert main(flags) == 0


def test_a_stopped_audit_is_told_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hfpar.audit.comparing.run_comparison", stop)
    monkeypatch.setattr("hfpar.train.endings._ignore_interrupts", lambda: None)
    assert main(["--compare", "a", "b"]) == 130
    assert "the same command again" in capsys.readouterr().err


def test_no_more_orders_are_asked_for_than_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight items have 40,320; looking for another would never end."""
    assert main(["--model_name_or_path", "m", "--order_test", "--order_permutations", "50000"]) == 2
    assert "order_permutations: 50000; must be at most 10000" in capsys.readouterr().err


def test_half_a_character_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "half.jsonl").write_text('{"question": "Who has \\ud83d 3 cups?", "answer": "#### 3"}\n')
    with pytest.raises(DataError, match=r"half\.jsonl, line 1: \"question\", .* half a surrogate pair"):
        load_benchmark("gsm8k", {"gsm8k": str(tmp_path / "half.jsonl")})


def test_a_difference_of_shares_stays_within_one() -> None:
    for stratum in (Stratum(8, 9, 29, 29, 0, 199), Stratum(8, 9, 0, 24, 78, 78)):
        difference, low, high = newcombe([stratum])
        assert -1 <= low <= difference <= high <= 1
    assert newcombe([Stratum(8, 9, 1, 2, 220, 220), Stratum(10, 11, 0, 10, 135, 135)])[1] == -1
