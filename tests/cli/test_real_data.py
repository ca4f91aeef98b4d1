"""Real questions and answers, named by two lines, through a real model's tokenizer and template.

The model's folder is named by HFPAR_REAL_MODEL, as for test_real.py.
"""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"
MODEL = Path(os.environ.get("HFPAR_REAL_MODEL", "missing"))
MAX_LENGTH = 400
TWO_LINES = "dataset_format: alpaca\ndataset_columns: {instruction: question, output: answer}\n"
SYSTEM = "system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="HFPAR_REAL_MODEL names no model"),
    pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K isn't there"),
]


def by_hand(question: str, answer: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """The template's parts, each tokenized by itself: the special tokens keep them apart."""
    start, end = (tokenizer.convert_tokens_to_ids(f"<|im_{edge}|>") for edge in ("start", "end"))

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    prompt = [start, *ids(SYSTEM), end, *ids("\n"), start, *ids(f"user\n{question}"), end, *ids("\n"), start]
    # The line break after "assistant" and the answer meet in one piece of text, so they are tokenized together.
    turn = ids(f"assistant\n{answer}")
    header = ids("assistant\n")
    assert turn[: len(header)] == header
    tokens = [*prompt, *turn, end, *ids("\n")]
    trained = [*turn[len(header) :], end]
    labels = [-100] * (len(prompt) + len(header)) + trained + [-100] * len(ids("\n"))
    return tokens, labels


def test_every_row_is_what_its_parts_are(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    from hfpar.config.load import parse_sft_config
    from hfpar.data.build import Recipe
    from hfpar.data.cache import TokenCache, TokenRequest
    from hfpar.data.reading.sources import resolve
    from hfpar.train.data import data_sources

    (tmp_path / "gsm8k.yaml").write_text(TWO_LINES)
    flags = ["--dataset", str(GSM8K), "--max_length", str(MAX_LENGTH)]
    config = parse_sft_config(["--config", str(tmp_path / "gsm8k.yaml"), *flags])
    (source,) = data_sources(config.dataset)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    request = TokenRequest(resolve(source), Recipe.of(config, source), skip_bad_rows=False)
    store = TokenCache(tmp_path / "cache", tokenizer, MODEL).get(request)

    items = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    expected = [by_hand(item["question"], item["answer"], tokenizer) for item in items]
    kept = [(tokens, labels) for tokens, labels in expected if len(tokens) <= MAX_LENGTH]
    assert [(sample.input_ids, sample.labels) for sample in store] == kept
    assert store.report.counts["too long"] == len(items) - len(kept) > 0
    assert store.report.num_bad_rows == 0 and store.report.num_rows == len(items)


def test_it_trains(
    tmp_path: Path,
    start_training: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    (tmp_path / "gsm8k.yaml").write_text(TWO_LINES)
    flags = {
        "config": "gsm8k.yaml",
        "dataset": GSM8K,
        "model_name_or_path": MODEL,
        "output_dir": "run",
        "max_length": MAX_LENGTH,
        "max_tokens_per_batch": 512,
        "max_steps": 3,
        "lora_r": 8,
        "learning_rate": "1e-3",
        "lr_scheduler_type": "constant",
    }
    program = start_training("ddp", *(str(part) for key in flags for part in (f"--{key}", flags[key])))
    assert program.wait(timeout=1000) == 0, program.output
    losses = [row["loss"] for row in metrics(tmp_path / "run") if "loss" in row]
    assert len(losses) == 3 and all(map(math.isfinite, losses)) and losses[-1] < losses[0]
