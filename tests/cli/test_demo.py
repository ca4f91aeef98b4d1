"""`hfpar demo` from end to end, made short: it trains on little but what is planted, and the audit finds that."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from hfpar import demo
from hfpar.data.demo_benchmark import BENCHMARK_NAME, generate_stories
from hfpar.data.word_problems import generate_conversations, write_jsonl
from hfpar.train import quiet
from hfpar.train.demo_assets import DemoAssets

ROOT = Path(__file__).parents[2]


@pytest.fixture
def short_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains in one process without a launcher, and leaves this one's logging alone."""
    command_of = demo.training_command

    def without_launcher(config_file: str, output_dir: Path, flags: Sequence[str]) -> list[str]:
        command = command_of(config_file, output_dir, flags)
        assert command[3:6] == ["launch", "--config_file", config_file]
        return [sys.executable, *command[6:]]

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(demo, "training_command", without_launcher)
    monkeypatch.setattr(quiet, "quiet_libraries", lambda is_main: None)
    if not torch.cuda.is_available():
        monkeypatch.setenv("DS_ACCELERATOR", "cpu")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("short_demo")
def test_the_audit_at_the_end_finds_what_was_planted_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assets = DemoAssets.beside(run)
    assets.build()
    write_jsonl(assets.eval_data, generate_conversations(8, 0, "eval"))
    write_jsonl(assets.train_data, generate_conversations(64, 0, "train"))
    assert demo.main(["--output_dir", str(run), "--", "--max_steps", "40"]) == 0
    output = capfd.readouterr().out
    assert re.search(r"loss +│ +7\.\d+ │", output)
    assert "Auditing: python eval/contamination.py --model_name_or_path" in output
    assert (
        "held 10 of the benchmark's 60 items. The audit found 10 of them (grade A or B), and 0 of the 50 others."
        in output
    )
    report = json.loads((run / "audit" / "report.json").read_text())
    assert [(one["benchmark"], one["level"]) for one in report["verdicts"]] == [(BENCHMARK_NAME, "strong")]
    (control,) = (one for one in report["sets"] if one["role"] == "control")
    assert control["grades"] == {"A": 0, "B": 0, "C": 0}
    items = [json.loads(line) for line in (run / "audit" / "items.jsonl").read_text().splitlines()]
    found = {item["item_id"] for item in items if item["set"] == BENCHMARK_NAME and item["grade"] is not None}
    assert found == {story.id for story in generate_stories() if story.planted}
    assert str(run / "audit" / "report.html") in output
    assert (run / "audit" / "report.html").stat().st_size > 10_000
