"""Merged models stop where the run taught them to."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from hfpar.config.schema import SFTConfig
from hfpar.exporting.generation import write_generation_config
from hfpar.exporting.run import Run
from hfpar.models.tiny import build_tiny_model

RUN = SFTConfig(dataset="data.jsonl", lora_r=4)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Of a base that ends its texts with another token (0) than the one that ends a turn (2)."""
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    build_tiny_model(base, hidden_size=32, num_hidden_layers=1)
    shutil.copytree(base, adapter)
    config = json.loads((base / "config.json").read_text()) | {"eos_token_id": 0}
    (base / "config.json").write_text(json.dumps(config))
    GenerationConfig(eos_token_id=0, max_new_tokens=9).save_pretrained(base)
    (tmp_path / "out").mkdir()
    return Run(adapter, adapter, RUN, str(base), base, False)


def written(run: Run) -> dict[str, Any]:
    folder = run.base.parent / "out"
    write_generation_config(run, folder)
    path = folder / "generation_config.json"
    settings: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return settings


def test_the_end_of_a_turn_joins_that_of_the_base(run: Run) -> None:
    assert AutoTokenizer.from_pretrained(run.adapter).decode([2]) == "<|im_end|>"
    settings = written(run)
    assert settings["eos_token_id"] == [0, 2] and settings["max_new_tokens"] == 9


def test_it_is_there_already(run: Run) -> None:
    GenerationConfig(eos_token_id=[2, 7]).save_pretrained(run.base)
    assert written(run)["eos_token_id"] == [2, 7]


def test_base_without_settings(run: Run) -> None:
    (run.base / "generation_config.json").unlink()
    assert AutoConfig.from_pretrained(run.base).eos_token_id == 0
    assert written(run) == {"eos_token_id": [0, 2]}


def test_adapters_of_others_and_without_turns_change_nothing(run: Run) -> None:
    assert written(replace(run, config=None))["eos_token_id"] == 0
    (run.adapter / "chat_template.jinja").unlink()
    assert written(replace(run))["eos_token_id"] == 0
