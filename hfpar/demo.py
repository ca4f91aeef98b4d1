"""`hfpar demo`: a real fine-tuning run on two processes in a few minutes, what it taught the model, and an audit.

Some items of a made-up benchmark are planted in the training data. The audit isn't told which, and finds them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfpar.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from hfpar.train.demo_assets import DemoAssets

NUM_SHOWN = 3
AUDIT_FOLDER = "audit"


@dataclass(frozen=True)
class Planted:
    """What the audit knows of items that were planted, and of those that weren't."""

    found: int
    total: int
    others_found: int
    others_total: int


@dataclass(frozen=True)
class Answers:
    """A model's greedy answers to the held-out problems."""

    texts: list[str]
    exact_rate: float
    """Share of answers that end in the right number."""


def main(argv: Sequence[str]) -> int:
    """Build the assets, answer, train with `accelerate launch`, answer again, and audit what was trained.

    Args:
        argv: see `--help`.

    Returns:
        0, or the exit code of the training or the audit.

    Raises:
        ConfigError: not called from a clone of the repository.
    """
    parser = argparse.ArgumentParser(
        prog="hfpar demo",
        description="Train a tiny model, built on the spot, on made-up word problems, show what it learned, and find "
        "the benchmark items that were planted in its training data.",
    )
    parser.add_argument("--output_dir", default="runs/demo", help="run folder; one that exists is replaced")
    parser.add_argument(
        "--config_file", default="accelerate_configs/ddp.yaml", help="an Accelerate config file"
    )
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="more flags for sft/train.py, after --")
    arguments = parser.parse_args(list(argv))
    if not Path("sft/train.py").is_file():
        raise ConfigError("hfpar demo: sft/train.py isn't here; call it in the folder of a clone of hfpar")

    import torch

    from hfpar.train.demo_assets import DemoAssets
    from hfpar.train.quiet import quiet_libraries

    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # or DeepSpeed, where installed, says that it found no GPU
    quiet_libraries(is_main=True)
    output_dir = Path(arguments.output_dir)
    assets = DemoAssets.beside(output_dir)
    print("Building a tiny model and its data ...", flush=True)
    output_dir.parent.mkdir(parents=True, exist_ok=True)
    assets.build()
    problems = [json.loads(line) for line in _lines(assets.eval_data)]
    before = answer(assets.model, problems)
    command = training_command(arguments.config_file, output_dir, arguments.flags)
    print("Training:", " ".join(command[3:]), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    exit_code = subprocess.run(command, env=environment).returncode
    if exit_code:
        return exit_code
    console = _console()
    _show_answers(console, output_dir, problems, before, answer(output_dir, problems))
    command = audit_command(output_dir, assets.benchmark)
    print("\nAuditing: python", " ".join(command[1:]), flush=True)
    exit_code = subprocess.run(command, env=environment).returncode
    if exit_code:
        return exit_code
    _show_audit(console, compare_with_planted(output_dir / AUDIT_FOLDER, assets), assets)
    _show_paths(console, output_dir, assets)
    return 0


def training_command(config_file: str, output_dir: Path, flags: Sequence[str]) -> list[str]:
    """What a user would type, with `hfpar launch` in place of `accelerate launch`."""
    launch = [sys.executable, "-m", "hfpar.cli", "launch", "--config_file", config_file]
    rest = [flag for flag in flags if flag != "--"]
    return [*launch, "sft/train.py", "--output_dir", str(output_dir), "--overwrite", *rest]


def audit_command(checkpoint: Path, benchmark: Path) -> list[str]:
    """What a user would type; of the controls that hfpar makes, only perturbed copies read like the stories."""
    flags = {
        "--model_name_or_path": checkpoint,
        "--benchmarks": benchmark,
        "--builtin_controls": "perturbed",
        "--output_dir": checkpoint / AUDIT_FOLDER,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "eval/contamination.py", *words, "--overwrite"]


def compare_with_planted(audit_folder: Path, assets: DemoAssets) -> Planted:
    """Count the items that have grade A or B, those that were planted and the others.

    Args:
        audit_folder: of a finished audit.
        assets: the only place that says what was planted.
    """
    from hfpar.data.demo_benchmark import BENCHMARK_NAME

    planted = {json.loads(line)["id"] for line in _lines(assets.planted_data)}
    items = [json.loads(line) for line in _lines(audit_folder / "items.jsonl")]
    items = [item for item in items if item["set"] == BENCHMARK_NAME]  # others are controls
    found = {item["item_id"] for item in items if item["grade"] in ("A", "B")}
    return Planted(len(found & planted), len(planted), len(found - planted), len(items) - len(planted))


def answer(model_folder: Path, problems: Sequence[dict[str, Any]], batch_size: int = 50) -> Answers:
    """Let the model of a plain Hugging Face folder answer each problem, greedily.

    Args:
        model_folder: any causal language model with a chat template.
        problems: conversations whose last message is the right answer.
        batch_size: problems a batch.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from hfpar.data.word_problems import extract_answer

    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    texts: list[str] = []
    for start in range(0, len(problems), batch_size):
        prompts = [
            tokenizer.apply_chat_template(row["messages"][:-1], tokenize=False, add_generation_prompt=True)
            for row in problems[start : start + batch_size]
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
        with torch.inference_mode():
            outputs = model.generate(**inputs, do_sample=False, max_new_tokens=64)
        texts += tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [
        extract_answer(text) == extract_answer(row["messages"][-1]["content"])
        for text, row in zip(texts, problems, strict=True)
    ]
    return Answers(texts, sum(right) / len(right))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _show_answers(
    console: Console, output_dir: Path, problems: Sequence[dict[str, Any]], before: Answers, after: Answers
) -> None:
    from rich.table import Table

    from hfpar.train.progress import METRICS_FILE, read_metrics

    eval_losses = [row["eval_loss"] for row in read_metrics(output_dir / METRICS_FILE) if "eval_loss" in row]
    table = Table(title=f"{len(problems)} held-out problems", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("loss", f"{eval_losses[0]:.4f}", f"[green]{eval_losses[-1]:.4f}[/]")
    table.add_row("exact answers", f"{before.exact_rate:.1%}", f"[green]{after.exact_rate:.1%}[/]")
    console.print()
    console.print(table)
    for row, text in list(zip(problems, after.texts, strict=True))[:NUM_SHOWN]:
        console.print(f"[cyan]{row['messages'][0]['content']}[/]", soft_wrap=True)
        console.print(f"  {text.strip()}", markup=False, soft_wrap=True)


def _show_audit(console: Console, planted: Planted, assets: DemoAssets) -> None:
    console.print(
        f"\nThe training data held [bold]{planted.total}[/] of the benchmark's {planted.total + planted.others_total} "
        f"items. The audit found [bold]{planted.found}[/] of them (grade A or B), and {planted.others_found} of the "
        f"{planted.others_total} others.",
        soft_wrap=True,
    )
    console.print(
        f"The rows that hold them: hfpar data decontaminate {assets.planted_data} {assets.train_data} "
        f"--against {assets.benchmark}",
        soft_wrap=True,
    )


def _show_paths(console: Console, output_dir: Path, assets: DemoAssets) -> None:
    from hfpar.train.progress import METRICS_FILE

    console.print(f"\nModel, tokenizer, checkpoint   {output_dir}", soft_wrap=True)
    console.print(f"Loss curve                     {output_dir / 'loss.png'}", soft_wrap=True)
    console.print(f"Figures of every step          {output_dir / METRICS_FILE}", soft_wrap=True)
    console.print(
        f"Audit, item by item            {output_dir / AUDIT_FOLDER / 'report.html'}", soft_wrap=True
    )
    console.print(f"Untrained model, data          {assets.folder}", soft_wrap=True)
