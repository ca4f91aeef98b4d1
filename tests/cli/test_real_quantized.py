"""QLoRA of a real model on 256 GSM8K conversations: every engine takes the same steps and leaves the same model.

What is left is judged by Transformers, bitsandbytes and PEFT alone: from the original checkpoint and the exported
adapter they get the loss that training reported on held-out conversations, so that the base hasn't moved. `-s` shows
a table row a run, with the peak memory of a rank.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_real import (  # noqa: TID251
    GSM8K,
    MODEL,
    pytestmark,  # noqa: F401 - skips where there is no model
)

NUM_TRAINED, NUM_HELD_OUT = 256, 16
LORA_R, LORA_ALPHA, RATE, BUDGET = 8, 16.0, 1e-3, 1024
SAME_LOSS = 1e-3
"""Relative. In fp32 what limits it is the order of sums alone: 1e-5 and less."""

CELLS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp": ("ddp", "2", {}),
    "fsdp2": ("fsdp2", "2", {}),
    "zero2": ("zero2", "2", {}),
    "zero3": ("zero3", "2", {}),
    "fsdp2 sp3": ("fsdp2", "3", {"sp_size": 3, "gradient_accumulation_steps": 2}),
}
CHECKPOINTING = {"gradient_checkpointing": "true", "max_steps": 2}
BESIDE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ddp, nf4": ("ddp", "2", CHECKPOINTING),
    "ddp, LoRA": ("ddp", "2", {**CHECKPOINTING, "quantization": "none"}),
    "ddp, full": ("ddp", "2", {**CHECKPOINTING, "quantization": "none", "lora_r": 0, "learning_rate": 2e-5}),
    "fsdp2, nf4": ("fsdp2", "2", CHECKPOINTING),
}
"""For the table of memory."""
MEMORY_GOES_BACK = {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""At once when it is freed, or a peak would tell of the C library's habits; slow."""


def conversations(first: int, last: int) -> list[dict[str, Any]]:
    """Some of GSM8K's items, the shortest first."""
    items = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    items.sort(key=lambda item: len(item["question"]) + len(item["answer"]))
    return [
        {
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": item["question"]},
                {"role": "assistant", "content": item["answer"]},
            ]
        }
        for item in items[first:last]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the data, and the runs."""
    path = tmp_path_factory.mktemp("qlora")
    for name, rows in (
        ("train", conversations(0, NUM_TRAINED)),
        ("held_out", conversations(NUM_TRAINED, NUM_TRAINED + NUM_HELD_OUT)),
    ):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Train = Callable[[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def done() -> dict[str, list[dict[str, Any]]]:
    """The metrics of runs so far."""
    return {}


@pytest.fixture
def train(
    folder: Path,
    done: dict[str, list[dict[str, Any]]],
    start_training: Callable[..., Any],
    metrics: Callable[..., Any],
) -> Train:
    """The metrics of a run, which is trained once."""

    def run(name: str) -> list[dict[str, Any]]:
        if name in done:
            return done[name]
        engine, processes, changes = (CELLS | BESIDE)[name]
        flags: dict[str, Any] = {
            "model_name_or_path": MODEL,
            "dataset": folder / "train.jsonl",
            "eval_dataset": folder / "held_out.jsonl",
            "output_dir": folder / name,
            "max_tokens_per_batch": BUDGET,
            "learning_rate": RATE,
            "lr_scheduler_type": "constant",
            "lora_r": LORA_R,
            "lora_alpha": LORA_ALPHA,
            "quantization": "nf4",
            **changes,
        }
        if not flags["lora_r"]:
            del flags["lora_alpha"]
        program = start_training(
            engine,
            *(str(part) for key in flags for part in (f"--{key}", flags[key])),
            launcher_flags=("--num_processes", processes),
            **(MEMORY_GOES_BACK if name in BESIDE else {}),
        )
        assert program.wait(timeout=1100) == 0, program.output
        rows = done[name] = metrics(folder / name)
        losses = [row["loss"] for row in rows if "loss" in row]
        held_out = [row["eval_loss"] for row in rows if "eval_loss" in row][-1]
        memory = max(row.get("peak_memory_bytes", 0) for row in rows) / 2**20
        speed = sorted(row["tokens_per_second"] for row in rows if "loss" in row)[len(losses) // 2]
        cells = (f"{losses[0]:.6f}", f"{losses[-1]:.6f}", f"{held_out:.6f}", f"{memory:.0f}", f"{speed:.0f}")
        print("\n| " + " | ".join((name, *cells)) + " |")
        return rows

    return run


def plain_model(adapter: Path) -> Any:
    """The original checkpoint, quantized by bitsandbytes, with an exported adapter on it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    base = AutoModelForCausalLM.from_pretrained(
        MODEL,
        dtype=torch.float32,
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.float32,
        ),
        device_map={"": "cpu"},
    )
    # There is no dropout; in `eval` mode, bitsandbytes computes in bf16 on some CPUs.
    return PeftModel.from_pretrained(base, adapter).train()


def held_out_loss(model: Any) -> float:
    import torch
    from transformers import AutoTokenizer

    from hfpar.data.build import Recipe, encode_rows
    from hfpar.data.chat.encode import EncodeOptions

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    rows = conversations(NUM_TRAINED, NUM_TRAINED + NUM_HELD_OUT)
    samples = encode_rows(rows, tokenizer, Recipe("messages", None, EncodeOptions(max_length=1024)))
    total, count = 0.0, 0
    for number in range(NUM_HELD_OUT):
        sample = samples[number]
        logits = model(input_ids=torch.tensor([sample.input_ids]), use_cache=False).logits[0, :-1].double()
        labels = torch.tensor(sample.labels[1:])
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)
        total, count = total + float(loss.detach()), count + int((labels != -100).sum())
    return total / count


@pytest.mark.parametrize("name", CELLS)
def test_every_engine_takes_the_same_steps(name: str, train: Train) -> None:
    expected = [row["loss"] for row in train("ddp") if "loss" in row]
    losses = [row["loss"] for row in train(name) if "loss" in row]
    assert len(losses) == len(expected) >= 10
    assert losses == pytest.approx(expected, rel=SAME_LOSS)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3]), "nothing was learnt"


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_the_base_is_unchanged_and_the_adapter_is_the_one_that_was_trained(
    name: str, folder: Path, train: Train
) -> None:
    reported = [row["eval_loss"] for row in train(name) if "eval_loss" in row][-1]
    assert held_out_loss(plain_model(folder / name)) == pytest.approx(reported, rel=1e-5)


def test_the_merged_model_answers_as_the_adapter_does(folder: Path, train: Train) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    train("ddp")
    command = [
        sys.executable,
        "-m",
        "hfpar.cli",
        "export",
        str(folder / "ddp"),
        "--merge",
        "--dtype",
        "float32",
    ]
    done = subprocess.run(
        [*command, "--output", str(folder / "merged")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged", dtype=torch.float32).eval()
    adapted = plain_model(folder / "ddp")
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    question = conversations(NUM_TRAINED, NUM_TRAINED + 1)[0]["messages"][:2]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answers = [
        model.generate(**prompt, max_new_tokens=60, do_sample=False)[0].tolist()
        for model in (merged, adapted)
    ]
    print(tokenizer.decode(answers[0]))
    assert answers[0] == answers[1]
    logits = [model(**prompt, use_cache=False).logits.detach() for model in (merged, adapted)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-3 * float(logits[0].abs().max())


def test_memory_beside_lora_and_full_fine_tuning(train: Train) -> None:
    peak = {name: max(row.get("peak_memory_bytes", 0) for row in train(name)) for name in BESIDE}
    assert peak["fsdp2, nf4"] < peak["ddp, LoRA"] < peak["ddp, full"]
    assert peak["ddp, nf4"] < 0.75 * peak["ddp, LoRA"]
