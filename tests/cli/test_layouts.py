"""`--sp_size`, `--cp_size`, `--tp_size` in a command: one process's numbers, resuming, mistakes, a dead rank."""

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sequence_parallel.py"
SECONDS_TO_END = 10

# Many runs in one launch: an ending that would end the process goes on to the next run instead.
RUNS_PROGRAM = """
import contextlib, io, json, os, shutil, sys
from pathlib import Path
import torch
import torch.distributed as dist
from hfpar.train import checkpoint, endings, loop, run

rank = os.environ.get("RANK", "0")
endings._leave = lambda exit_code: exit_code
take_step = loop.train_step

def train_step(*args):
    seeds.append(torch.initial_seed())
    return take_step(*args)

loop.train_step = train_step
for number, case in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    if "copy" in case and rank == "0":
        shutil.copytree(*case["copy"])
    if dist.is_initialized():
        dist.barrier()
    seeds, said, printed = [], io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(printed):
        exit_code = run.main(case["flags"], Path("no demo"))
    outcome = {"exit_code": exit_code, "said": said.getvalue(), "printed": printed.getvalue(), "seeds": seeds}
    Path(sys.argv[2], f"{number}-{rank}.json").write_text(json.dumps(outcome))
    if dist.is_initialized():
        dist.barrier()
        if rank == "0":
            dist.distributed_c10d._get_default_store().delete_key("hfpar/said")
        dist.barrier()
"""
ONE_PROCESS = (
    "--num_processes",
    "1",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
)
TWO_PROCESSES = ("--multi_gpu", "--num_processes", "2", "--main_process_port", "0")

PADDED = ["--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"]
PACKED = ["--max_tokens_per_batch", "160", "--max_length", "80"]
# A large epsilon: AdamW would otherwise blow up the rounding of gradients that are nearly zero.
OPTIMIZER = ["--learning_rate", "1e-2", "--adam_epsilon", "1e-3", "--lr_scheduler_type", "constant"]
COMMON = ["--max_steps", "4", *OPTIMIZER, "--seed", "3"]
LORA = ["--lora_r", "4", "--lora_dropout", "0.2"]

QLORA = ["--lora_r", "4", "--quantization", "nf4"]

REFERENCES = {"padded": PADDED, "packed": PACKED, "lora": [*PADDED, *LORA], "qlora": [*PADDED, *QLORA]}
"""By one process."""
RUNS: dict[str, dict[str, Any]] = {
    "sp2, padded": {"flags": ["--sp_size", "2", *PADDED], "like": "padded"},
    "cp2, packed": {"flags": ["--cp_size", "2", *PACKED], "like": "packed"},
    "sp2, nf4, saved": {
        "flags": ["--sp_size", "2", *PADDED, *QLORA, "--max_steps", "2", "--output_dir", "nf4 saved"]
    },
    "sp2, nf4, resumed": {
        "copy": ["nf4 saved", "nf4 resumed"],
        "flags": ["--sp_size", "2", *PADDED, *QLORA, "--resume", "--output_dir", "nf4 resumed"],
        "like": "qlora",
    },
    "sp2, saved": {"flags": ["--sp_size", "2", *PADDED, "--max_steps", "2", "--output_dir", "sp2 saved"]},
    "sp2, resumed": {
        "copy": ["sp2 saved", "sp2 resumed"],
        "flags": ["--sp_size", "2", *PADDED, "--resume", "--output_dir", "sp2 resumed"],
        "like": "padded",
    },
    "cp2 from sp2": {
        "copy": ["sp2 saved", "cp2 from sp2"],
        "flags": ["--cp_size", "2", *PADDED, "--resume", "--output_dir", "cp2 from sp2"],
        "like": "padded",
    },
    "dp2 from sp2": {
        "copy": ["sp2 saved", "dp2 from sp2"],
        "flags": [*PADDED, "--gradient_accumulation_steps", "1", "--resume", "--output_dir", "dp2 from sp2"],
        "like": "padded",
    },
    "LoRA with dropout": {"flags": ["--sp_size", "2", *PADDED, *LORA]},
    "tp2, packed": {"flags": ["--tp_size", "2", *PACKED], "like": "packed"},
    "tp2, tokens too": {"flags": ["--tp_size", "2", "--tp_sequence", *PADDED], "like": "padded"},
    "tp2, LoRA with dropout": {"flags": ["--tp_size", "2", *PADDED, *LORA], "like": "lora"},
    "tp2, saved": {"flags": ["--tp_size", "2", *PADDED, "--max_steps", "2", "--output_dir", "tp2 saved"]},
    "tp2, resumed": {
        "copy": ["tp2 saved", "tp2 resumed"],
        "flags": ["--tp_size", "2", *PADDED, "--resume", "--output_dir", "tp2 resumed"],
        "like": "padded",
    },
}
AFTERWARDS = {
    "sp2 from tp2": {
        "copy": ["tp2 saved", "sp2 from tp2"],
        "flags": ["--sp_size", "2", *PADDED, "--resume", "--output_dir", "sp2 from tp2"],
        "line": "resume: sp2 from tp2 was started with tp_size: 2 there, 1 here; resume with the settings it has",
    }
}
"""A mistake that needs a run before it."""


@pytest.fixture
def patience() -> float:
    """Stretches time limits on a machine that has more to do than this."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def spoil(model: Path, folder: Path, **changes: Any) -> Path:
    """A copy without weights: whatever is refused is refused before they load."""
    shutil.copytree(model, folder)
    (folder / "model.safetensors").unlink()
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def make_mistakes(inputs: Any, folder: Path) -> dict[str, dict[str, Any]]:
    """Each with its flags and the whole line."""
    from transformers import GPT2Config, Qwen3NextConfig

    def model(name: str, **changes: Any) -> list[str]:
        return ["--model_name_or_path", str(spoil(inputs.model, folder / name, **changes))]

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [2.0] * 8,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    state_space = spoil(inputs.model, folder / "state space")
    Qwen3NextConfig(vocab_size=896).save_pretrained(state_space)
    without_plan = spoil(inputs.model, folder / "without plan")
    GPT2Config(vocab_size=896, n_embd=32, n_head=2, n_layer=2).save_pretrained(without_plan)
    return {
        "more than the world": {
            "flags": ["--sp_size", "3"],
            "line": "sp_size 3 doesn't divide the 2 processes; with 2, it can be 1 or 2; or use --num_processes 3",
        },
        "together more than the world": {
            "flags": ["--sp_size", "2", "--cp_size", "2"],
            "line": "cp_size 2 x sp_size 2 = 4 doesn't divide the 2 processes; with 2, it can be 1 or 2; or use "
            "--num_processes 4",
        },
        "none": {"flags": ["--sp_size", "0"], "line": "sp_size: 0.*at least 1"},
        "more ranks than heads": {
            "flags": ["--sp_size", "2", *model("one head", num_attention_heads=1, num_key_value_heads=1)],
            "line": "sp_size: 2 ranks share the model's 1 attention heads, so that some would have none; use sp_size "
            "1 or less, and cp_size for more ranks",
        },
        "attention dropout in a ring": {
            "flags": ["--cp_size", "2", *model("dropout", attention_dropout=0.1)],
            "line": "cp_size: 2 with the model's attention dropout of 0.1; ring attention has no dropout: set it to 0 "
            "in the model's config.json, or use sp_size",
        },
        "state-space layers": {
            "flags": ["--sp_size", "2", "--model_name_or_path", str(state_space)],
            "line": "sp_size: qwen3_next has layers of type linear_attention, and hfpar knows .*, so ranks can't share "
            "its streams; leave sp_size at 1",
        },
        "factors by length": {
            "flags": ["--cp_size", "2", *model("longrope", rope_parameters=rope)],
            "line": r"max_length: dataset has a sample of \d+ tokens, but the model's longrope computes those above 16 "
            "in another way, which none of the 2 ranks that share it can tell from its slice; set max_length to 16 or "
            "less, or leave out sp_size and cp_size",
        },
        "heads that don't divide": {
            "flags": ["--tp_size", "2", *model("three heads", num_attention_heads=3, num_key_value_heads=3)],
            "line": "tp_size: 2 doesn't divide the model's 3 attention heads; it can be 1",
        },
        "a width that doesn't divide": {
            "flags": ["--tp_size", "2", *model("odd", intermediate_size=511)],
            "line": r"tp_size: 2 doesn't divide the model's intermediate size \(layers.0.mlp.gate_proj\) of 511; it "
            "can be 1",
        },
        "attention dropout of heads": {
            "flags": ["--tp_size", "2", *model("drawn heads", attention_dropout=0.1)],
            "line": "tp_size: 2 with the model's attention dropout of 0.1, .*; set it to 0 in the model's config.json, "
            "or use sp_size",
        },
        "no plan": {
            "flags": ["--tp_size", "2", "--model_name_or_path", str(without_plan)],
            "line": "tp_size: Transformers has no tensor-parallel plan for the layers of gpt2; leave tp_size at 1",
        },
        "tokens of nobody": {
            "flags": ["--tp_sequence"],
            "line": "tp_sequence: true with tp_size 1, so that no ranks share tokens; set tp_size",
        },
        "an optimizer of whole matrices": {
            "flags": ["--tp_size", "2", "--optim", "adafactor"],
            "line": "optim: adafactor looks at whole matrices or blocks of them, which tp_size 2 cuts; use "
            "adamw_torch, or leave tp_size at 1",
        },
    }


Outcome = dict[str, Any]


@pytest.fixture
def launch_runs(
    start: Callable[..., Any], inputs: Any, tmp_path: Path, launchers: Any
) -> Callable[..., dict[str, list[Outcome]]]:
    """`launch_runs(arguments of the launcher, cases)`: every rank's outcome of each."""

    def launch(arguments: tuple[str, ...], cases: dict[str, dict[str, Any]]) -> dict[str, list[Outcome]]:
        data = ["--model_name_or_path", str(inputs.model), "--dataset", str(inputs.data)]
        data += ["--eval_dataset", str(inputs.small_data), "--save_total_limit", "1"]
        listed = []
        for name, case in cases.items():
            output_dir = [] if "--output_dir" in case["flags"] else ["--output_dir", name]
            listed.append({**case, "flags": [*data, *COMMON, *case["flags"], *output_dir]})
        outcomes = tmp_path / f"outcomes of {len(cases)}"
        outcomes.mkdir()
        (tmp_path / "runs.json").write_text(json.dumps(listed))
        (tmp_path / "runs.py").write_text(RUNS_PROGRAM)
        program = start(*launchers["hfpar"], *arguments, "runs.py", "runs.json", str(outcomes))
        assert program.wait(timeout=300) == 0, program.output
        return {
            name: [json.loads(path.read_text()) for path in sorted(outcomes.glob(f"{number}-*.json"))]
            for number, name in enumerate(cases)
        }

    return launch


def figures(folder: Path, metrics: Callable[[Path], list[dict[str, Any]]]) -> list[tuple[Any, ...]]:
    names = (
        "step",
        "epoch",
        "loss",
        "grad_norm",
        "learning_rate",
        "num_tokens",
        "num_label_tokens",
        "eval_loss",
    )
    return [tuple(row.get(name, 0.0) for name in names) for row in metrics(folder)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_runs_on_two_ranks(
    launch_runs: Callable[..., dict[str, list[Outcome]]],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    from safetensors.torch import load_file

    references = {name: {"flags": flags} for name, flags in REFERENCES.items()}
    for name, ranks in launch_runs(ONE_PROCESS, references).items():
        assert ranks[0]["exit_code"] == 0, f"{name}: {ranks}"
    (tmp_path / "mistakes").mkdir()
    mistakes = make_mistakes(inputs, tmp_path / "mistakes")
    for name, case in mistakes.items():
        case["flags"] += ["--output_dir", f"refused/{name}"]
    outcomes = launch_runs(TWO_PROCESSES, {**mistakes, **RUNS, **AFTERWARDS})
    mistakes |= AFTERWARDS

    for name, case in mistakes.items():
        ranks = outcomes[name]
        said = "".join(rank["said"] for rank in ranks)
        assert [rank["exit_code"] for rank in ranks] == [2, 2], f"{name}: {said}"
        assert re.fullmatch(f"hfpar: error: {case['line']}\n", said), f"{name}: {said}"

    for name, case in RUNS.items():
        ranks = outcomes[name]
        assert [rank["exit_code"] for rank in ranks] == [0, 0], f"{name}: {ranks}"
        if "like" not in case:
            continue
        folder = tmp_path / (name if "copy" not in case else case["copy"][1])
        expected, found = figures(tmp_path / case["like"], metrics), figures(folder, metrics)
        if "copy" in case:  # the shorter run evaluated when it ended
            found = [row for row in found if row[0] != 2 or row[2]]
        assert len(found) == len(expected) == 6
        for row, right in zip(found, expected, strict=True):
            assert row == pytest.approx(right, rel=1e-5), name
        (weights_file,) = (path.name for path in folder.glob("*model.safetensors"))
        weights = load_file(folder / weights_file)
        for key, right in load_file(tmp_path / case["like"] / weights_file).items():
            assert float((weights[key] - right).abs().max()) <= 1e-5 * float(right.abs().max()), (name, key)

    resumed = outcomes["sp2, resumed"][0]["printed"]
    assert "resume: continuing from sp2 resumed/checkpoint-2 (step 2)" in resumed
    # Dropout is drawn anew for each step and rank: two that share a stream mustn't drop the same units.
    first, second = (rank["seeds"] for rank in outcomes["LoRA with dropout"])
    assert len({*first, *second}) == 8
    losses = [row["loss"] for row in metrics(tmp_path / "LoRA with dropout") if "loss" in row]
    assert len(losses) == 4 and losses[-1] < losses[0]


def test_a_killed_rank(
    start_training: Callable[..., Any], inputs: Any, tmp_path: Path, patience: float, launchers: Any
) -> None:
    """Under a launcher that says nothing of use, the rank that waits for a killed one's keys says it."""
    flags = ["--model_name_or_path", str(inputs.model), "--dataset", str(inputs.data), "--output_dir", "run"]
    flags += ["--cp_size", "2", "--max_steps", "100000", "--save_steps", "1", "--save_total_limit", "2"]
    program = start_training("ddp", *flags, launcher=launchers["accelerate"])
    program.wait_for(lambda: (tmp_path / "run" / "checkpoint-2").is_dir())
    begin = time.monotonic()
    program.workers()[1].kill()
    assert program.wait() == 1
    assert time.monotonic() - begin < SECONDS_TO_END * patience
    (line,) = program.lines("hfpar")
    assert line.startswith("hfpar: error: another process of this run ended (")


# The example


SIZES_PROGRAM = """
import runpy, sys

example, model, texts = sys.argv[1:]
for sp_size in ("1", "2"):
    sys.argv = [example, model, texts, sp_size]
    runpy.run_path(example, run_name="__main__")
"""


@pytest.mark.slow
def test_the_example(start: Callable[..., Any], inputs: Any, tmp_path: Path, launchers: Any) -> None:
    """One process, and two of which each has its own batch, or which share one: the same figures."""
    assert len(EXAMPLE.read_text().splitlines()) <= 45
    rows = [{"text": f"{number} plus {number % 7} " * (1 + number % 5)} for number in range(24)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "sizes.py").write_text(SIZES_PROGRAM)
    arguments = (str(EXAMPLE), str(inputs.model), "texts.jsonl")
    one = start(sys.executable, *arguments, "1")
    assert one.wait() == 0, one.output
    config = ("--config_file", str(EXAMPLE.parents[1] / "accelerate_configs" / "ddp.yaml"))
    options = ("--num_processes", "2", "--main_process_port", "0")
    two = start(*launchers["accelerate"], *config, *options, "sizes.py", *arguments)
    assert two.wait() == 0, two.output
    pattern = re.compile(r"^step (\d+): loss ([\d.]+), gradient norm ([\d.]+)$", re.MULTILINE)
    expected = [tuple(map(float, row)) for row in pattern.findall(one.output)]
    found = [tuple(map(float, row)) for row in pattern.findall(two.output)]
    assert [row[0] for row in expected] == [1, 2, 3]
    for row, right in zip(found, expected * 2, strict=True):
        assert row == pytest.approx(right, rel=1e-5, abs=1e-6)
