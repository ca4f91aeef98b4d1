"""What a user can get wrong, and what can go wrong from outside: one line, the right exit code, nothing left over."""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

psutil = pytest.importorskip("psutil")

SECONDS_TO_END = 10
STOPPED = "hfpar: stopped; whole checkpoints are kept, --resume continues from the last one"

# Many mistakes in one launch of two ranks: an ending that would end the process goes on to the next case instead.
CASES_PROGRAM = """
import contextlib, io, json, os, sys, time
from pathlib import Path
import peft
import torch.distributed as dist
from hfpar.train import checkpoint, data, endings, export, loop, model, optim, run, summary, trackers

cases = json.loads(Path(sys.argv[1]).read_text())
endings._leave = lambda exit_code: exit_code
for number, case in enumerate(cases):
    os.environ.update(case.get("environment", {}))
    said, begin = io.StringIO(), time.monotonic()
    with contextlib.redirect_stderr(said):
        exit_code = run.main(case["flags"], Path("no demo"))
    seconds = time.monotonic() - begin
    for name in case.get("environment", {}):
        del os.environ[name]
    outcome = {"exit_code": exit_code, "said": said.getvalue(), "seconds": seconds}
    Path(sys.argv[2], f"{number}-{os.environ['RANK']}.json").write_text(json.dumps(outcome))
    if dist.is_initialized():
        dist.barrier()
        if os.environ["RANK"] == "0":
            dist.distributed_c10d._get_default_store().delete_key("hfpar/said")
        dist.barrier()
"""


@pytest.fixture
def patience() -> float:
    """Stretches time limits on a machine that has more to do than this."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


@pytest.fixture
def broken(inputs: Any, tmp_path: Path) -> Callable[..., Path]:
    """`broken(name, spoil)`: a copy of the model that `spoil(folder)` has spoilt."""

    def copy(name: str, spoil: Callable[[Path], object]) -> Path:
        folder = tmp_path / name
        shutil.copytree(inputs.model, folder)
        spoil(folder)
        return folder

    return copy


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def halve(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def say_it_holds_nf4(folder: Path) -> None:
    """In the config alone: whoever asks for something else is stopped before weights load."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
    }
    (folder / "config.json").write_text(json.dumps(config))


def make_cases(inputs: Any, tmp_path: Path, broken: Callable[..., Path]) -> dict[str, dict[str, Any]]:
    """Each with its flags and the beginning of its line. Later flags win over the common ones."""
    files = tmp_path / "files"
    files.mkdir()
    empty = write_rows(files / "empty.jsonl", [])
    question = {"role": "user", "content": "Why?"}
    unlabelled = write_rows(files / "unlabelled.jsonl", [{"messages": [question]}] * 4)
    one = write_rows(files / "one.jsonl", [{"messages": [question, {"role": "assistant", "content": "So."}]}])
    broken_line = files / "broken.jsonl"
    broken_line.write_text(inputs.small_data.read_text() + "{broken\n")
    cut = broken("cut", lambda folder: halve(folder / "model.safetensors"))
    garbage = broken("garbage", lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 64))
    no_weights = broken("no_weights", lambda folder: (folder / "model.safetensors").unlink())
    no_config = broken("no_config", lambda folder: (folder / "config.json").write_text("{"))
    stored = broken("stored", say_it_holds_nf4)
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LamaLayer"}
    return {
        "missing model": {
            "flags": ["--model_name_or_path", "no/such/folder"],
            "line": "model_name_or_path: ",
        },
        "config.json": {"flags": ["--model_name_or_path", str(no_config)], "line": "model_name_or_path: "},
        "cut weights": {"flags": ["--model_name_or_path", str(cut)], "line": "model_name_or_path: "},
        "garbage weights": {"flags": ["--model_name_or_path", str(garbage)], "line": "model_name_or_path: "},
        "no weights": {"flags": ["--model_name_or_path", str(no_weights)], "line": "model_name_or_path: "},
        "garbage weights, FSDP2": {
            "flags": ["--model_name_or_path", str(garbage)],
            "environment": {**fsdp, "FSDP_TRANSFORMER_CLS_TO_WRAP": ""},
            "line": "model_name_or_path: ",
        },
        "missing data": {
            "flags": ["--dataset", "nowhere.jsonl"],
            "line": "dataset: nowhere.jsonl: no such file",
        },
        "empty data": {"flags": ["--dataset", str(empty)], "line": ".*empty.jsonl"},
        "broken line": {
            "flags": ["--dataset", str(broken_line)],
            "line": "1 bad row; mend them, or leave such rows out with --bad_rows skip:",
            "then": ["  .*broken.jsonl, line 9: not valid JSON: .*"],
            "exit_code": 1,
        },
        "no labels": {
            "flags": ["--dataset", str(unlabelled), "--bad_rows", "skip"],
            "line": r"dataset: none of the 4 rows can be trained on; .* 4 are bad \(no assistant message\)",
        },
        "all too long": {"flags": ["--max_length", "3"], "line": ".*max_length"},
        "one sample": {"flags": ["--dataset", str(one)], "line": "dataset: 1 usable samples for 2 "},
        "max_steps": {"flags": ["--max_steps", "0"], "line": "max_steps: 0; "},
        "below a file": {
            "flags": ["--output_dir", f"{empty}/run"],
            "line": "output_dir: .* can't be written ",
        },
        "not a run": {"flags": ["--output_dir", str(files)], "line": "output_dir: .* isn't a run of hfpar"},
        "the model's folder": {
            "flags": ["--output_dir", str(inputs.model), "--overwrite"],
            "line": "output_dir: .* is model_name_or_path, too",
        },
        "template": {"flags": ["--chat_template", "no.jinja"], "line": "chat_template: "},
        "LoRA target": {
            "flags": ["--lora_r", "4", "--lora_target_modules", "q_porj"],
            "line": "lora_target_modules: .*q_porj",
        },
        "full fine-tuning of a quantized base": {
            "flags": ["--quantization", "nf4"],
            "line": "quantization: nf4 without lora_r; a quantized base can't be trained itself",
        },
        "LoRA target, quantized": {
            "flags": ["--quantization", "nf4", "--lora_r", "4", "--lora_target_modules", "q_porj"],
            "line": "lora_target_modules: q_porj matches no module; .*q_proj",
        },
        "nothing skipped": {
            "flags": ["--quantization", "int8", "--lora_r", "4", "--llm_int8_skip_modules", "q_porj"],
            "line": "llm_int8_skip_modules: q_porj names no layer of Qwen3ForCausalLM that would be quantized",
        },
        "mxfp4 of another checkpoint": {
            "flags": ["--quantization", "mxfp4", "--lora_r", "4"],
            "line": "quantization: mxfp4 is for checkpoints that hold it",
        },
        "another quantization than the checkpoint's": {
            "flags": ["--model_name_or_path", str(stored), "--quantization", "fp4", "--lora_r", "4"],
            "line": "quantization: fp4, but the checkpoint holds nf4",
        },
        "full fine-tuning of a quantized checkpoint": {
            "flags": ["--model_name_or_path", str(stored)],
            "line": "lora_r: 0, but the base is quantized",
        },
        "LoRA on a tied head": {
            "flags": ["--lora_r", "4", "--lora_target_modules", "lm_head"],
            "line": "lora_target_modules: lm_head",
        },
        "a quantized module trained whole": {
            "flags": ["--quantization", "nf4", "--lora_r", "4", "--modules_to_save", "q_proj"],
            "line": "modules_to_save: q_proj, but .* is quantized",
        },
        "unknown tracker": {"flags": ["--report_to", "wandbb"], "line": "report_to: "},
        "missing tracker": {
            "flags": ["--report_to", "clearml"],
            "line": "report_to: clearml isn't installed: pip install clearml",
        },
        "class to wrap": {
            "flags": [],
            "environment": fsdp,
            "line": "fsdp_transformer_layer_cls_to_wrap: LamaLayer isn't in this model",
        },
        "run": {"flags": ["--output_dir", "run"], "line": None},
        "same run": {
            "flags": ["--output_dir", "run"],
            "line": "output_dir: run already holds a run; .*--resume",
        },
        "other settings": {
            "flags": ["--output_dir", "run", "--learning_rate", "0.5"],
            "line": "output_dir: run already holds a run with other settings .*--resume.*--overwrite",
        },
        "resume with other settings": {
            "flags": ["--output_dir", "run", "--learning_rate", "0.5", "--resume"],
            "line": "resume: run was started with learning_rate",
        },
        "LoRA target, overwrite": {
            "flags": [
                "--output_dir",
                "run",
                "--overwrite",
                "--lora_r",
                "4",
                "--lora_target_modules",
                "q_porj",
            ],
            "line": "lora_target_modules: ",
        },
        "locked": {
            "flags": ["--output_dir", "busy"],
            "line": "output_dir: another run is writing into busy; ",
        },
    }


@pytest.mark.timeout(600)
def test_mistakes_on_two_ranks(
    start: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    broken: Callable[..., Path],
    launchers: Any,
    patience: float,
) -> None:
    import fcntl

    cases = make_cases(inputs, tmp_path, broken)
    common = [*inputs.flags, "--max_steps", "1", "--per_device_train_batch_size", "2"]
    for name, case in cases.items():
        output_dir = [] if "--output_dir" in case["flags"] else ["--output_dir", f"refused/{name}"]
        case["flags"] = [*common, *output_dir, *case["flags"]]
    (tmp_path / "cases.json").write_text(json.dumps(list(cases.values())))
    (tmp_path / "cases.py").write_text(CASES_PROGRAM)
    outcomes = tmp_path / "outcomes"
    outcomes.mkdir()
    (tmp_path / "busy").mkdir()
    with open(tmp_path / "busy" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        program = start(
            *launchers["hfpar"],
            *("--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
            "cases.py",
            "cases.json",
            str(outcomes),
        )
        assert program.wait(timeout=200) == 0, program.output

    for number, (name, case) in enumerate(cases.items()):
        ranks = [json.loads((outcomes / f"{number}-{rank}.json").read_text()) for rank in (0, 1)]
        said = "".join(rank["said"] for rank in ranks)
        if case["line"] is None:
            assert [rank["exit_code"] for rank in ranks] == [0, 0], f"{name}: {said}"
            continue
        assert [rank["exit_code"] for rank in ranks] == [case.get("exit_code", 2)] * 2, f"{name}: {said}"
        lines = [line for line in said.splitlines() if not line.startswith("step ")]
        then = case.get("then", [])
        assert len(lines) == 1 + len(then), f"{name}: {said}"
        assert all(re.fullmatch(*pair) for pair in zip(then, lines[1:], strict=True)), f"{name}: {said}"
        assert re.match(f"hfpar: error: {case['line']}", lines[0]), f"{name}: {said}"
        assert max(rank["seconds"] for rank in ranks) < SECONDS_TO_END * patience, name
    # What was whole is as it was.
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-1"]
    assert (tmp_path / "run" / "model.safetensors").stat().st_size > 100_000
    assert "learning_rate: 2.0e-05" in (tmp_path / "run" / "run_config.yaml").read_text()


# One rank's own error, and ends from outside

ONE_RANK_PROGRAM = """
import os, sys
from pathlib import Path
from hfpar.errors import ConfigError
from hfpar.train import data, run

def read_data(*args, **kwargs):
    if os.environ["RANK"] == "1":
        raise ConfigError("dataset: only this node lacks it")
    return original(*args, **kwargs)

original, data.read_data = data.read_data, read_data
sys.exit(run.main(sys.argv[1:], Path("no demo")))
"""


def test_an_error_of_one_rank_is_not_lost(
    start_training: Callable[..., Any], inputs: Any, tmp_path: Path, patience: float
) -> None:
    script = tmp_path / "one_rank.py"
    script.write_text(ONE_RANK_PROGRAM)
    program = start_training("ddp", *inputs.flags, "--output_dir", "run", script=script)
    assert program.wait() == 2
    assert program.output == "hfpar: error: dataset: only this node lacks it (rank 1)\n"


FULL_DISK_PROGRAM = """
import resource, sys
from pathlib import Path
from hfpar.train import loop, run

def save_checkpoint(engine, state, *args, **kwargs):
    if state.step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    return original(engine, state, *args, **kwargs)

original, loop.save_checkpoint = loop.save_checkpoint, save_checkpoint
sys.exit(run.main(sys.argv[1:], Path("no demo")))
"""


def test_a_full_disk(start_training: Callable[..., Any], inputs: Any, tmp_path: Path) -> None:
    script = tmp_path / "full_disk.py"
    script.write_text(FULL_DISK_PROGRAM)
    program = start_training("ddp", *long_training(inputs), script=script)
    assert program.wait() == 2
    (line,) = program.lines("hfpar")
    assert re.match(r"hfpar: error: output_dir: run/checkpoint-4 can't be written \(.*--resume", line)
    assert "Traceback" not in program.output
    assert_whole_checkpoints(tmp_path)


def long_training(inputs: Any) -> list[str]:
    data = ["--model_name_or_path", str(inputs.model), "--dataset", str(inputs.data)]
    return [
        *data,
        "--output_dir",
        "run",
        "--max_steps",
        "100000",
        "--save_steps",
        "2",
        "--save_total_limit",
        "2",
    ]


def is_training(folder: Path) -> bool:
    return (folder / "run" / "checkpoint-4").is_dir()


def assert_whole_checkpoints(folder: Path) -> None:
    from hfpar.train.checkpoint import whole_checkpoints

    assert whole_checkpoints(folder / "run"), "none is whole"


def test_ctrl_c_in_training(
    start_training: Callable[..., Any], inputs: Any, tmp_path: Path, patience: float
) -> None:
    program = start_training("ddp", *long_training(inputs))
    program.wait_for(lambda: is_training(tmp_path))
    begin = time.monotonic()
    program.signal_group(signal.SIGINT)
    assert program.wait() == 130
    assert time.monotonic() - begin < SECONDS_TO_END * patience
    assert program.lines("hfpar") == [STOPPED]
    assert "Traceback" not in program.output
    assert_whole_checkpoints(tmp_path)


def test_ctrl_c_under_accelerate_launch_while_loading(
    start_training: Callable[..., Any], inputs: Any, tmp_path: Path, patience: float, launchers: Any
) -> None:
    program = start_training("fsdp2", *long_training(inputs), launcher=launchers["accelerate"])
    program.wait_for(
        lambda: len(program.workers()) == 2 and all(has_loaded(w, "libtorch_cpu") for w in program.workers())
    )
    begin = time.monotonic()
    program.process.send_signal(signal.SIGINT)  # the launcher alone
    program.wait()
    assert time.monotonic() - begin < SECONDS_TO_END * patience
    assert program.lines("hfpar") == [STOPPED]
    assert not (tmp_path / "run" / "run_config.yaml").exists()


def has_loaded(process: Any, library: str) -> bool:
    return any(library in region.path for region in process.memory_maps())


@pytest.mark.parametrize("name", ["hfpar", "accelerate"])
def test_a_killed_rank(
    start_training: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    patience: float,
    launchers: Any,
    name: str,
) -> None:
    program = start_training(
        "zero1" if name == "hfpar" else "ddp", *long_training(inputs), launcher=launchers[name]
    )
    program.wait_for(lambda: is_training(tmp_path))
    begin = time.monotonic()
    program.workers()[1].kill()
    exit_code = program.wait()
    assert time.monotonic() - begin < SECONDS_TO_END * patience
    lines = program.lines("hfpar") + program.lines("hfpar launch")
    if name == "hfpar":
        assert exit_code == 128 + signal.SIGKILL
        assert lines == ["hfpar launch: rank 1 was killed by SIGKILL (often: the machine is out of memory)"]
    else:
        assert exit_code == 1
        assert len(lines) == 1 and lines[0].startswith("hfpar: error: another process of this run ended (")
    assert_whole_checkpoints(tmp_path)
