"""Real runs, exported: merged, alone, and from what a killed run has left."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from hfpar.cli import main

EXPORT = (sys.executable, "-m", "hfpar.cli", "export")
IDS = torch.arange(3, 63).view(2, 30)


@pytest.fixture
def train(start_training: Callable[..., Any], inputs: Any, tmp_path: Path) -> Callable[..., Path]:
    def train(engine: str, *flags: str) -> Path:
        run = tmp_path / "run"
        common = ["--output_dir", str(run), "--max_steps", "2", "--learning_rate", "3e-2", "--lora_r", "4"]
        assert start_training(engine, *inputs.flags, *common, *flags).wait() == 0
        return run

    return train


@pytest.fixture
def export(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said; in this process, since a new one needs seconds to start."""

    def export(run: Path, *flags: str, exit_code: int = 0) -> str:
        capsys.readouterr()
        assert main(["export", str(run), *flags]) == exit_code
        captured = capsys.readouterr()
        return captured.out if exit_code == 0 else captured.err

    return export


@torch.no_grad()
def logits_of(folder: Path, adapter: Path | None = None, **options: Any) -> torch.Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    logits: torch.Tensor = model.eval()(IDS).logits
    return logits


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def as_if_killed(run: Path) -> Path:
    """What the run would have left without its export; gives the folder of that."""
    exported = run.with_name("exported")
    exported.mkdir()
    for path in [
        *run.glob("adapter_*"),
        *run.glob("tokenizer*"),
        run / "chat_template.jinja",
        run / "README.md",
    ]:
        if path.exists():
            shutil.move(path, exported / path.name)
    return exported


def test_qlora_run(
    train: Callable[..., Path],
    export: Callable[..., str],
    start: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
) -> None:
    pytest.importorskip("bitsandbytes")
    run = train("ddp", "--quantization", "nf4")
    program = start(*EXPORT, str(run), "--merge", "--output", "merged")
    assert program.wait() == 0, program.output
    lines = program.output.splitlines()
    assert lines[0] == "hfpar export" and len(lines) == 9  # and nothing that libraries say
    assert "the nf4 weights that were trained on, dequantized" in program.output
    assert "LoRA of 14 weights (rank 4, alpha 16)" in program.output
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    )
    options = {"quantization_config": quantization, "dtype": torch.float32}
    expected = logits_of(inputs.model, run, **options)
    assert error(logits_of(inputs.model, **options), expected) > 1e-2  # it has learnt something
    assert error(logits_of(tmp_path / "merged"), expected) < 1e-5

    text = export(run, "--merge", "--output", str(tmp_path / "merged"), exit_code=2)
    assert text.strip().splitlines() == [
        f"hfpar: error: --output: {tmp_path / 'merged'} holds an export; replace it with --overwrite, or use another "
        "folder"
    ]
    exported = as_if_killed(run)
    text = export(run, "--adapter", "--output", str(tmp_path / "adapter"))
    assert "checkpoint-2, since the run didn't get to its end" in text
    found, last = (
        load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "adapter", exported)
    )
    assert found.keys() == last.keys() and all(torch.equal(found[name], last[name]) for name in last)
    saved = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert saved["base_model_name_or_path"] == str(inputs.model)


def test_fsdp2_run_that_began_with_a_part_of_the_base(
    train: Callable[..., Path], export: Callable[..., str], inputs: Any, tmp_path: Path
) -> None:
    pytest.importorskip("bitsandbytes")
    flags = ["--quantization", "nf4", "--init_lora_weights", "pissa", "--trainable_token_indices", "5", "9"]
    run = train("fsdp2", *flags)
    export(run, "--merge", "--output", str(tmp_path / "merged"))
    exported = as_if_killed(run)
    assert (run / "checkpoint-2" / "sharded").is_dir()
    export(run, "--merge", "--output", str(tmp_path / "again"))
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "again"))
    for name in first:
        torch.testing.assert_close(again[name], first[name], rtol=1e-4, atol=1e-5)
    stored = load_file(inputs.model / "model.safetensors")["model.embed_tokens.weight"]
    changed = (first["model.embed_tokens.weight"] != stored).any(dim=1).nonzero().flatten().tolist()
    assert changed == [5, 9]
    assert (exported / "adapter_model.safetensors").is_file()


def test_run_that_only_its_ranks_can_put_together(
    train: Callable[..., Path], export: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    run = train("zero2")
    as_if_killed(run)
    text = export(run, "--adapter", "--output", str(tmp_path / "adapter"), exit_code=2)
    assert text.count("\n") == 1 and "launch it again with --resume --max_steps 2" in text
    train("zero2", "--resume")
    export(run, "--adapter", "--output", str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
