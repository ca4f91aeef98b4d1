"""Runs on data of several kinds: the same figures on one rank and on two, and what a user is told."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Several runs in one launch: an ending that would end the process goes on to the next run instead.
PROGRAM = """
import contextlib, io, json, os, sys
from pathlib import Path
import torch.distributed as dist
from hfpar.train import endings, run

endings._leave = lambda exit_code: exit_code
outcomes = []
for flags in json.loads(Path(sys.argv[1]).read_text()):
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        exit_code = run.main(flags, Path("no demo"))
    outcomes.append({"exit_code": exit_code, "said": said.getvalue()})
    dist.barrier()
    if os.environ["RANK"] == "0":
        store = dist.distributed_c10d._get_default_store()
        for key in ("hfpar/said", "hfpar/done/dataset", "hfpar/done/eval_dataset", "hfpar/done/stream"):
            store.delete_key(key)
    dist.barrier()
Path(sys.argv[2], f"outcomes-{os.environ['RANK']}.json").write_text(json.dumps(outcomes))
"""

END_OF_TEXT, IM_END = 0, 2  # a base model stops at the first, ChatML's turns end with the second

MIX = (
    "[{path: data.jsonl, weight: 0.75}, "
    "{path: qa.csv, weight: 2, format: alpaca, columns: {instruction: q, output: a}}]"
)


@pytest.fixture(scope="module")
def flags(inputs: Any) -> Callable[..., list[str]]:
    def flags(name: str, ranks: int, **changes: str) -> list[str]:
        options = {
            "model_name_or_path": str(inputs.model),
            "token_cache": "cache",
            "max_length": "64",
            "learning_rate": "1e-3",
            "output_dir": f"{name}-{ranks}",
            **changes,
        }
        return [word for key, value in options.items() for word in (f"--{key}", value)]

    return flags


@pytest.fixture
def folder(tmp_path: Path, inputs: Any) -> Path:
    shutil.copy(inputs.data, tmp_path / "data.jsonl")
    rows = "".join(f'"Say {number}, {number % 3}","Said ""{number}"""\n' for number in range(40))
    (tmp_path / "qa.csv").write_text("q,a\n" + rows)
    (tmp_path / "bad.jsonl").write_text('{"messages": []}\n\n{"text": "good"}\n')
    shutil.copytree(inputs.model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    generation_config = tmp_path / "base" / "generation_config.json"
    generation_config.write_text(json.dumps({"eos_token_id": END_OF_TEXT}))
    return tmp_path


def runs(flags: Callable[..., list[str]], ranks: int) -> list[list[str]]:
    packed = {"max_tokens_per_batch": "128", "gradient_accumulation_steps": str(4 // ranks)}
    padded = {"per_device_train_batch_size": str(8 // ranks)}
    stream = {"dataset": MIX, "streaming": "true", "streaming_window": "20", **padded}
    return [
        flags("mix", ranks, dataset=MIX, eval_fraction="0.1", num_train_epochs="1.5", **packed),
        flags("stream", ranks, max_steps="5", lr_scheduler_type="constant", **stream),
        flags("resumed", ranks, max_steps="2", save_steps="2", lr_scheduler_type="constant", **stream),
        [*flags("resumed", ranks, max_steps="5", lr_scheduler_type="constant", **stream), "--resume"],
        flags("bad", ranks, dataset="bad.jsonl", **padded),
        flags("skip", ranks, dataset="[data.jsonl, bad.jsonl]", bad_rows="skip", max_steps="2", **padded),
        flags(
            "chatml",
            ranks,
            model_name_or_path="base",
            dataset="data.jsonl",
            chat_template="chatml",
            max_steps="2",
            **padded,
        ),
    ]


def figures(rows: list[dict[str, Any]]) -> list[tuple[float, ...]]:
    keys = ("step", "loss", "grad_norm", "eval_loss", "num_tokens", "num_label_tokens")
    return [tuple(row.get(key, 0.0) for key in keys) for row in rows]


@pytest.mark.slow
def test_one_rank_and_two(
    folder: Path,
    start_training: Callable[..., Any],
    flags: Callable[..., list[str]],
    metrics: Callable[[Path], list[dict[str, Any]]],
) -> None:
    (folder / "program.py").write_text(PROGRAM)
    outcomes = {}
    for ranks in (1, 2):
        (folder / "runs.json").write_text(json.dumps(runs(flags, ranks)))
        launched = start_training(
            "ddp",
            "runs.json",
            ".",
            script=folder / "program.py",
            launcher_flags=("--num_processes", str(ranks)),
        )
        assert launched.wait() == 0, launched.output
        for rank in range(ranks):
            outcomes[ranks, rank] = json.loads((folder / f"outcomes-{rank}.json").read_text())
    for found in outcomes.values():
        assert [outcome["exit_code"] for outcome in found] == [0, 0, 0, 0, 1, 0, 0], found
    for name in ("mix", "stream", "resumed", "skip", "chatml"):
        one, two = (figures(metrics(folder / f"{name}-{ranks}")) for ranks in (1, 2))
        assert len(one) == len(two) > 1
        for row, other in zip(one, two, strict=True):
            assert other == pytest.approx(row, rel=1e-5)
    said = outcomes[2, 0][4]["said"]
    assert said.splitlines() == [
        "hfpar: error: 2 bad rows; mend them, or leave such rows out with --bad_rows skip:",
        '  bad.jsonl, line 1: "messages" has no message',
        "  bad.jsonl, line 2: the line is empty",
    ]
    assert outcomes[2, 1][4]["said"] == ""
    # A stream that was stopped and resumed sees what one that wasn't sees.
    whole = {row[0]: row[4:] for row in figures(metrics(folder / "stream-2"))}
    assert {row[0]: row[4:] for row in figures(metrics(folder / "resumed-2"))} == whole
    template = (folder / "chatml-2" / "chat_template.jinja").read_text()
    assert "<|im_start|>" in template and "generation" in template
    stops = json.loads((folder / "chatml-2" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == [END_OF_TEXT, IM_END]
