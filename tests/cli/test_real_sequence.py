"""A real model on long streams that ranks share: every engine takes the steps of one plain process.

9 query and 3 key-value heads: `sp_size 3` on three processes, one key-value head each; `sp_size 2` deals heads
unevenly; `cp_size 2` cuts documents. `-s` shows a table row a run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_real import (  # noqa: TID251
    GSM8K,
    LEARNING_RATES,
    LORA_ALPHA,
    LORA_R,
    MODEL,
    NUM_STEPS,
    SEED,
    TOLERANCE,
    Steps,
    output_dir,  # noqa: F401 - a fixture
    plain_steps,
    pytestmark,  # noqa: F401 - skips where there is no model
    table_row,
)

MATH = GSM8K.with_name("math500.jsonl")
BUDGET, MAX_LENGTH = 1536, 1400

CELLS = [
    ("ddp", "sp3", "full"),
    ("zero1", "sp3", "full"),
    ("zero2", "sp3", "full"),
    ("zero3", "sp3", "full"),
    ("fsdp2", "sp3", "full"),
    ("ddp", "cp2", "full"),
    ("zero1", "cp2", "full"),
    ("zero2", "cp2", "full"),
    ("zero3", "cp2", "full"),
    ("fsdp2", "cp2", "full"),
    ("ddp", "sp2", "full"),
    ("fsdp2", "sp3", "lora"),
    ("zero3", "cp2", "lora"),
]


def conversations() -> list[dict[str, Any]]:
    """Long ones: many questions in a row, of GSM8K and of MATH; and short ones, so that a pack has both."""

    def items(path: Path, question: str, answer: str) -> list[tuple[str, str]]:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [(row[question], row[answer]) for row in rows]

    gsm8k, math = items(GSM8K, "question", "answer"), items(MATH, "problem", "solution")
    groups = [gsm8k[start : start + 5] for start in range(0, 20, 5)]
    groups += [math[start : start + 4] for start in range(0, 16, 4)]
    groups += [[pair] for pair in gsm8k[100:108]]
    return [
        {
            "messages": [
                {"role": "system", "content": ""},
                *(
                    {"role": role, "content": text}
                    for question, answer in group
                    for role, text in (("user", question), ("assistant", answer))
                ),
            ]
        }
        for group in groups
    ]


def planned_steps() -> list[list[Any]]:
    """The packs that one data-parallel rank trains on."""
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
        per_device_train_batch_size=None,
        max_tokens_per_batch=BUDGET,
    )
    steps = [[samples[index] for index in indices] for ((indices,),) in list(plan.steps)[:NUM_STEPS]]
    assert len(steps) == NUM_STEPS
    assert max(len(sample.input_ids) for step in steps for sample in step) > 700
    return steps


@pytest.fixture(scope="module")
def reference() -> Callable[[str], Steps]:
    known: dict[str, Steps] = {}

    def steps(adapter: str) -> Steps:
        if adapter not in known:
            known[adapter], _ = plain_steps(adapter, planned_steps(), rows_at_once=1)
        return known[adapter]

    return steps


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long") / "conversations.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in conversations()))
    return path


@pytest.mark.parametrize("engine, layout, adapter", CELLS)
def test_ranks_that_share_streams_take_the_steps_of_one_process(
    engine: str,
    layout: str,
    adapter: str,
    data: Path,
    reference: Callable[[str], Steps],
    start_training: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
    output_dir: Path,  # noqa: F811
) -> None:
    axis, size = layout[:2], layout[2:]
    flags = {
        "model_name_or_path": MODEL,
        "dataset": data,
        "output_dir": output_dir,
        "max_length": MAX_LENGTH,
        "max_tokens_per_batch": BUDGET,
        "max_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATES[adapter],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": SEED,
        "lora_r": LORA_R if adapter == "lora" else 0,
        "lora_alpha": LORA_ALPHA,
        f"{axis}_size": size,
    }
    program = start_training(
        engine,
        *(str(part) for key in flags for part in (f"--{key}", flags[key])),
        launcher_flags=("--num_processes", size),
    )
    assert program.wait(timeout=1100) == 0, program.output
    steps = [(row["loss"], row["grad_norm"]) for row in metrics(output_dir) if "loss" in row]
    plain = reference(adapter)
    print("\n" + table_row("one plain process", adapter, plain))
    print(table_row(f"{engine} {layout}", adapter, steps))
    assert len(steps) == NUM_STEPS
    for (loss, norm), (plain_loss, plain_norm) in zip(steps, plain, strict=True):
        assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
        assert norm == pytest.approx(plain_norm, rel=TOLERANCE)
