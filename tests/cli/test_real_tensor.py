"""Real conversations on layers that ranks share: every engine takes the steps of one plain process.

The real model has 9 query and 3 key-value heads: `tp_size 3`, one key-value head each. A small one with the real
vocabulary has 4 and 2: `tp_size 2`, and 4, where two ranks share each key-value head. What is exported gives the plain
process's logits in plain Transformers. `-s` shows a table row a run.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_real import (  # noqa: TID251
    LEARNING_RATES,
    LORA_ALPHA,
    LORA_R,
    MAX_LENGTH,
    MODEL,
    NUM_CONVERSATIONS,
    NUM_STEPS,
    SEED,
    TOLERANCE,
    Steps,
    data,  # noqa: F401 - a fixture
    output_dir,  # noqa: F401 - a fixture
    plain_steps,
    planned_steps,
    pytestmark,  # noqa: F401 - skips where there is no model
    table_row,
)

Cell = tuple[str, str, dict[str, Any]]
"""(engine, adapter, flags)"""

REAL: list[Cell] = [
    *((engine, "full", {"tp_size": 3}) for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    ("ddp", "lora", {"tp_size": 3}),
    ("zero3", "lora", {"tp_size": 3}),
    ("fsdp2", "full", {"tp_size": 3, "tp_sequence": True}),
]
FOUR_HEADS: list[Cell] = [
    *((engine, "full", {"tp_size": 2}) for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    *((engine, "full", {"tp_size": 4}) for engine in ("ddp", "zero1", "zero2", "zero3", "fsdp2")),
    ("fsdp2", "lora", {"tp_size": 4}),
    ("ddp", "full", {"tp_size": 2, "sp_size": 2}),
    ("zero1", "full", {"tp_size": 2, "cp_size": 2, "tp_sequence": True}),
]


@dataclass(frozen=True)
class Reference:
    """Of one plain process."""

    steps: Steps
    logits: Any
    """Of the first conversation, after the last step."""


def first_tokens() -> Any:
    import torch

    return torch.tensor([planned_steps()[0][0].input_ids])


def logits_of(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(first_tokens(), use_cache=False).logits


@pytest.fixture(scope="module")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with the real tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("four_heads")
    config = AutoConfig.from_pretrained(MODEL)
    config.update(
        {
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "dtype": "float32",
        }
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def reference() -> Callable[[Path, str], Reference]:
    known: dict[tuple[Path, str], Reference] = {}

    def of(folder: Path, adapter: str) -> Reference:
        if (folder, adapter) not in known:
            steps, model = plain_steps(adapter, planned_steps(), folder=folder)
            known[folder, adapter] = Reference(steps, logits_of(model))
        return known[folder, adapter]

    return of


def name_of(cell: Cell) -> str:
    engine, adapter, flags = cell
    return "-".join([engine, adapter, *(f"{key}{value}" for key, value in flags.items())])


@pytest.mark.parametrize(
    ("heads", "cell"),
    [*(("real", cell) for cell in REAL), *(("four", cell) for cell in FOUR_HEADS)],
    ids=lambda value: value if isinstance(value, str) else name_of(value),
)
def test_ranks_that_share_layers_take_the_steps_of_one_process(
    heads: str,
    cell: Cell,
    four_heads: Path,
    data: Path,  # noqa: F811
    reference: Callable[[Path, str], Reference],
    start_training: Callable[..., Any],
    metrics: Callable[[Path], list[dict[str, Any]]],
    output_dir: Path,  # noqa: F811
) -> None:
    model = MODEL if heads == "real" else four_heads
    engine, adapter, layout = cell
    flags = {
        "model_name_or_path": model,
        "dataset": data,
        "output_dir": output_dir,
        "max_length": MAX_LENGTH,
        "per_device_train_batch_size": NUM_CONVERSATIONS // NUM_STEPS,
        "max_steps": NUM_STEPS,
        "learning_rate": LEARNING_RATES[adapter],
        "lr_scheduler_type": "constant",
        "max_grad_norm": 1.0,
        "seed": SEED,
        "lora_r": LORA_R if adapter == "lora" else 0,
        "lora_alpha": LORA_ALPHA,
        **layout,
    }
    world_size = layout["tp_size"] * layout.get("sp_size", 1) * layout.get("cp_size", 1)
    program = start_training(
        engine,
        *(str(part) for key in flags for part in (f"--{key}", flags[key])),
        launcher_flags=("--num_processes", str(world_size)),
    )
    assert program.wait(timeout=1100) == 0, program.output
    steps = [(row["loss"], row["grad_norm"]) for row in metrics(output_dir) if "loss" in row]
    plain = reference(model, adapter)
    print("\n" + table_row("one plain process", adapter, plain.steps))
    print(table_row(name_of(cell), adapter, steps))
    assert len(steps) == NUM_STEPS
    for (loss, norm), (plain_loss, plain_norm) in zip(steps, plain.steps, strict=True):
        assert loss == pytest.approx(plain_loss, rel=TOLERANCE)
        assert norm == pytest.approx(plain_norm, rel=TOLERANCE)

    logits = exported_logits(model, output_dir, adapter)
    assert logits.shape == plain.logits.shape
    assert float((logits - plain.logits).norm() / plain.logits.norm()) < TOLERANCE


def exported_logits(model: Path, output_dir: Path, adapter: str) -> Any:  # noqa: F811
    """Of what was exported, in plain Transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    shutil.rmtree(next(output_dir.glob("checkpoint-*")), ignore_errors=True)
    if adapter == "lora":
        base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        return logits_of(PeftModel.from_pretrained(base, output_dir))
    return logits_of(AutoModelForCausalLM.from_pretrained(output_dir, dtype=torch.float32))
