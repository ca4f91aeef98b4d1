"""A real model on real conversations: every engine takes the steps of one plain process.

The model's folder is named by HFPAR_REAL_MODEL, which the Makefile exports. `-s` shows a table row a run.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GSM8K = ROOT.parent / "shared" / "data" / "gsm8k_train.jsonl"
MODEL = Path(os.environ.get("HFPAR_REAL_MODEL", "missing"))
NUM_CONVERSATIONS, NUM_STEPS, SEED, MAX_LENGTH, LORA_R, LORA_ALPHA = 64, 4, 42, 256, 8, 16.0
LEARNING_RATES = {"full": 2e-5, "lora": 1e-3}
TOLERANCE = 1e-4

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not (MODEL / "config.json").is_file(), reason="HFPAR_REAL_MODEL names no model"),
    pytest.mark.skipif(not GSM8K.is_file(), reason="GSM8K isn't there"),
]

Steps = list[tuple[float, float]]
"""(loss, gradient norm) of each step."""


def conversations() -> list[dict[str, Any]]:
    """GSM8K's shortest items, without its calculator marks, as conversations."""
    items = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    pairs = [(item["question"], re.sub(r"<<.*?>>", "", item["answer"])) for item in items]
    pairs.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
    return [
        {
            "messages": [
                {"role": "system", "content": ""},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
        }
        for question, answer in pairs[:NUM_CONVERSATIONS]
    ]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gsm8k") / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    return path


@pytest.fixture
def output_dir(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)  # two gigabytes


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Steps]:
    """The steps of one plain process, worked out once for each adapter."""
    known: dict[str, Steps] = {}

    def steps(adapter: str) -> Steps:
        if adapter not in known:
            known[adapter] = plain_training(adapter)
        return known[adapter]

    return steps


def plain_training(adapter: str) -> Steps:
    """What one plain process makes of the conversations."""
    steps, _ = plain_steps(adapter, planned_steps())
    return steps


def planned_steps() -> list[list[Any]]:
    """The batches that one data-parallel rank trains on."""
    from transformers import AutoTokenizer

    from hfpar.data.build import Recipe, encode_rows
    from hfpar.data.chat.encode import EncodeOptions
    from hfpar.data.plan import plan_epoch

    recipe = Recipe("messages", None, EncodeOptions(max_length=MAX_LENGTH))
    samples = encode_rows(conversations(), AutoTokenizer.from_pretrained(MODEL), recipe)
    plan = plan_epoch(
        samples.lengths,
        seed=SEED,
        epoch=0,
        dp_size=1,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=NUM_CONVERSATIONS // NUM_STEPS,
        max_tokens_per_batch=None,
    )
    return [[samples[index] for index in indices] for ((indices,),) in plan.steps]


def plain_steps(
    adapter: str, steps: list[list[Any]], rows_at_once: int = 8, folder: Path = MODEL
) -> tuple[Steps, Any]:
    """Transformers' own model, attention and padding, full logits, one sum, one divisor; also the trained model.

    The cross-entropy is taken in float64: torch's float32 one adds up 49,152 small terms in a row, and is off by more
    than the engines are.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from hfpar.data.stream import pad_batch
    from hfpar.models.adapters import add_lora

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    if adapter == "lora":
        model = add_lora(
            model,
            r=LORA_R,
            alpha=LORA_ALPHA,
            dropout=0.0,
            target_modules="all-linear",
            modules_to_save=None,
            seed=SEED,
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATES[adapter], weight_decay=0.0)
    taken: Steps = []
    for step in steps:
        num_label_tokens = sum(label != -100 for sample in step for label in sample.labels[1:])
        total = 0.0
        for start in range(0, len(step), rows_at_once):
            batch = pad_batch(step[start : start + rows_at_once], pad_token_id=0)
            logits = model(batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).double(), batch.labels[:, 1:].flatten(), reduction="sum"
            )
            (loss / num_label_tokens).backward()
            total += loss.item()
        # torch's own clip_grad_norm_ is 2e-5 off on the embedding's fp32 gradient
        norm = torch.stack([p.grad.double().norm() for p in parameters]).norm().item()
        for parameter in parameters:
            parameter.grad.mul_(min(1.0, 1.0 / (norm + 1e-6)))
        optimizer.step()
        optimizer.zero_grad()
        taken.append((total / num_label_tokens, norm))
    return taken, model


def table_row(name: str, adapter: str, steps: Steps) -> str:
    cells = [name, adapter, *(f"{loss:.6f}" for loss, _ in steps), *(f"{norm:.5f}" for _, norm in steps)]
    return "| " + " | ".join(cells) + " |"


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("engine", ["ddp", "zero1", "zero2", "zero3", "fsdp2"])
def test_every_engine_takes_the_steps_of_one_process(
    engine: str,
    adapter: str,
    data: Path,
    reference: Callable[[str], Steps],
    start_training: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
    output_dir: Path,
) -> None:
    flags = {
        "model_name_or_path": MODEL,
        "dataset": data,
        "output_dir": output_dir,
        "max_length": MAX_LENGTH,
        "per_device_train_batch_size": NUM_CONVERSATIONS // NUM_STEPS // 2,
        "max_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATES[adapter],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": SEED,
        "lora_r": LORA_R if adapter == "lora" else 0,
        "lora_alpha": LORA_ALPHA,
    }
    program = start_training(engine, *(str(part) for key in flags for part in (f"--{key}", flags[key])))
    assert program.wait(timeout=1000) == 0, program.output

    steps = [(row["loss"], row["grad_norm"]) for row in metrics(output_dir) if "loss" in row]
    plain = reference(adapter)
    print("\n" + table_row("one plain process", adapter, plain))
    print(table_row(engine, adapter, steps))
    assert len(steps) == NUM_STEPS
    for (loss, norm), (plain_loss, plain_norm) in zip(steps, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
        assert norm == pytest.approx(plain_norm, rel=TOLERANCE)
    assert steps[-1][0] != pytest.approx(steps[0][0], rel=0.01), "nothing was learnt"
