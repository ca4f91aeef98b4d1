"""Training speed and memory beside Transformers' Trainer (padded batches) and TRL's SFTTrainer (packing).

    python benchmarks/train_throughput.py --model MODEL_FOLDER --data gsm8k_train.jsonl --json throughput.json

Each run is a fresh launch of the same number of processes on the same model and rows, full fine-tuning in fp32 with
AdamW; the contestants take turns. A rate counts real tokens (prompt and answer, no padding) of all processes over
the steps after the first `--warmup_steps`, so neither start-up, nor reading, nor saving is in it. Peak memory is the
resident set of the process that needed most, when its last step ends.

With `--qlora` both train adapters on a base in 4 bits, with gradient checkpointing.

Without `--model` (or HFPAR_REAL_MODEL) it runs the demo's tiny model and data, which shows no more than that it works.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MEMORY_GOES_BACK = {"MALLOC_MMAP_THRESHOLD_": "16000000", "MALLOC_TRIM_THRESHOLD_": "200000000"}
"""Large memory is given back when it is freed, or a peak of some hundred MiB would tell of the C library's habits."""
ROOT = Path(__file__).resolve().parents[1]
CONTESTANTS = ("hfpar", "trl", "padded")
TITLES = {"hfpar": "hfpar", "trl": "TRL SFTTrainer, packing", "padded": "Transformers Trainer, padded"}


@dataclass(frozen=True)
class Run:
    """What one launch measured."""

    contestant: str
    tokens_per_second: float
    """Real tokens of all processes."""
    peak_memory_bytes: int
    tokens_per_step: float
    """Real tokens of all processes."""
    seconds_in_all: float
    load_before: float
    """Load average of the last minute: what else the machine was doing."""


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=os.environ.get("HFPAR_REAL_MODEL"))
    parser.add_argument("--data", type=Path, help="JSONL: GSM8K's question and answer, or messages")
    parser.add_argument("--samples", type=int, default=400, help="first rows of the data that are used")
    parser.add_argument("--num_processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="OMP_NUM_THREADS of each process")
    parser.add_argument("--max_tokens", type=int, default=1024, help="packed tokens a process and step")
    parser.add_argument(
        "--batch_size", type=int, help="padded samples a process and step; default: as many real tokens"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup_steps", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=CONTESTANTS, default=CONTESTANTS)
    parser.add_argument(
        "--qlora",
        action="store_true",
        help="LoRA of rank 16 on a base in NF4 (TRL with PEFT and bitsandbytes)",
    )
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    if args.qlora and args.only == CONTESTANTS:
        args.only = ("hfpar", "trl")
    if args.steps <= args.warmup_steps:
        parser.error("--steps must be more than --warmup_steps")
    return args


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Settle the model, and write the rows as conversations that all contestants read."""
    if args.model is None or not (Path(args.model) / "config.json").is_file():
        from hfpar.train.demo_assets import DemoAssets

        print(f"No model in {args.model}: the demo's tiny model and data")
        assets = DemoAssets.beside(folder / "runs" / "demo")
        assets.build()
        args.model, args.data = assets.model, assets.train_data
    if args.data is None:
        sys.exit(
            "train_throughput: --data names no file; it needs GSM8K's gsm8k_train.jsonl or conversations"
        )
    args.model, rows = Path(args.model).resolve(), []
    for line in args.data.read_text(encoding="utf-8").splitlines()[: args.samples]:
        row = json.loads(line)
        messages = row.get("messages") or [
            {"role": "user", "content": row["question"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        rows.append({"messages": messages})
    args.data = folder / "conversations.jsonl"
    args.data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    if args.batch_size is None:
        args.batch_size = max(1, round(args.max_tokens / mean_length(args)))


def mean_length(args: argparse.Namespace) -> float:
    from transformers import AutoTokenizer

    from hfpar.data.build import Recipe, encode_rows
    from hfpar.data.chat.encode import EncodeOptions

    rows = [json.loads(line) for line in args.data.read_text(encoding="utf-8").splitlines()]
    recipe = Recipe("messages", None, EncodeOptions(max_length=args.max_tokens))
    return float(encode_rows(rows, AutoTokenizer.from_pretrained(args.model), recipe).lengths.mean())


def hfpar_command(args: argparse.Namespace, folder: Path) -> list[str]:
    launch: list[str] = []
    if args.num_processes > 1:
        config = ROOT / "accelerate_configs" / "ddp.yaml"
        launch = ["-m", "accelerate.commands.launch", "--config_file", str(config)]
        launch += ["--num_processes", str(args.num_processes), "--main_process_port", "0"]
    flags = {
        "model_name_or_path": args.model,
        "dataset": args.data,
        "output_dir": folder / "run",
        "max_length": args.max_tokens,
        "max_tokens_per_batch": args.max_tokens,
        "max_steps": args.steps,
    }
    if args.qlora:
        flags |= {"quantization": "nf4", "lora_r": 16, "gradient_checkpointing": "true"}
    script = str(ROOT / "sft" / "train.py")
    return [
        sys.executable,
        *launch,
        script,
        *(str(part) for key in flags for part in (f"--{key}", flags[key])),
    ]


def peer_command(args: argparse.Namespace, folder: Path, peer: str) -> list[str]:
    launch: list[str] = []
    if args.num_processes > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.num_processes}"]
    flags = {
        "peer": peer,
        "model": args.model,
        "data": args.data,
        "output": folder,
        "max_tokens": args.max_tokens,
        "batch_size": args.batch_size,
        "steps": args.steps,
        "qlora": int(args.qlora),
    }
    script = str(Path(__file__).with_name("peer.py"))
    return [
        sys.executable,
        *launch,
        script,
        *(str(part) for key in flags for part in (f"--{key}", flags[key])),
    ]


def measure(contestant: str, args: argparse.Namespace, folder: Path) -> Run:
    """Launch a contestant once in a fresh folder."""
    folder.mkdir()
    command = hfpar_command(args, folder) if contestant == "hfpar" else peer_command(args, folder, contestant)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(args.threads),
        **(MEMORY_GOES_BACK if args.qlora else {}),
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    load, begin = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        sys.exit(f"train_throughput: {contestant} failed:\n{done.stdout[-4000:]}")
    read = read_hfpar if contestant == "hfpar" else read_peer
    tokens, train_seconds, peak = read(folder, args)
    num_steps = args.steps - args.warmup_steps
    shutil.rmtree(folder, ignore_errors=True)
    return Run(contestant, tokens / train_seconds, peak, tokens / num_steps, seconds, load)


def read_hfpar(folder: Path, args: argparse.Namespace) -> tuple[int, float, int]:
    """(Tokens, seconds, peak bytes) after the warm-up, from hfpar's own metrics, which rank 0 writes for all ranks."""
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if "loss" in row]
    tokens, seconds = 0, 0.0
    for before, row in zip(rows[args.warmup_steps - 1 :], rows[args.warmup_steps :], strict=False):
        step_tokens = row["num_tokens"] - before["num_tokens"]
        tokens += step_tokens
        seconds += step_tokens / row["tokens_per_second"]
    return tokens, seconds, max(row["peak_memory_bytes"] for row in rows)


def read_peer(folder: Path, args: argparse.Namespace) -> tuple[int, float, int]:
    """The same, from what `peer.py` wrote on each rank."""
    ranks = [json.loads(path.read_text()) for path in sorted(folder.glob("rank_*.json"))]
    assert len(ranks) == args.num_processes
    tokens = sum(sum(rank["tokens"][args.warmup_steps :]) for rank in ranks)
    ends = ranks[0]["step_ends"]
    return tokens, ends[-1] - ends[args.warmup_steps - 1], max(rank["peak_memory_bytes"] for rank in ranks)


def environment_snapshot(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].split(":", 1)[1].strip() if names else cpu
    packages = ("torch", "transformers", "accelerate", "trl", "datasets")
    return {
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: importlib.metadata.version(name) for name in packages},
        "model": args.model.name,
        "settings": {
            name: getattr(args, name)
            for name in ("samples", "num_processes", "threads", "max_tokens", "batch_size", "steps", "qlora")
            + ("warmup_steps", "repeats")
        },
    }


def summarize(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians, and hfpar's ratios to the others: more than 1 is faster, or needs more memory."""
    by_name = {name: [run for run in runs if run.contestant == name] for name in CONTESTANTS}
    by_name = {name: found for name, found in by_name.items() if found}
    speed = {name: statistics.median(run.tokens_per_second for run in by_name[name]) for name in by_name}
    memory = {name: max(run.peak_memory_bytes for run in by_name[name]) for name in by_name}
    result: dict[str, Any] = {"tokens_per_second": speed, "peak_memory_bytes": memory}
    for peer in ("trl", "padded"):
        if peer in speed and "hfpar" in speed:
            result[f"ratio_vs_{peer}"] = speed["hfpar"] / speed[peer]
            result[f"memory_ratio_vs_{peer}"] = memory["hfpar"] / memory[peer]
            pairs = zip(by_name["hfpar"], by_name[peer], strict=False)
            result[f"ratios_vs_{peer}"] = [a.tokens_per_second / b.tokens_per_second for a, b in pairs]
    result["runs"] = [asdict(run) for run in runs]
    return result


def print_table(summary: dict[str, Any]) -> None:
    print(f"\n{'':30}{'tokens/s':>10}{'peak MiB':>10}{'speed of hfpar':>16}{'memory of hfpar':>17}")
    for name, speed in summary["tokens_per_second"].items():
        ratio, memory = summary.get(f"ratio_vs_{name}"), summary.get(f"memory_ratio_vs_{name}")
        ratios = f"{ratio:15.2f}x{memory:16.2f}x" if ratio is not None else ""
        print(f"{TITLES[name]:30}{speed:10.1f}{summary['peak_memory_bytes'][name] / 2**20:10.0f}{ratios}")


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    runs: list[Run] = []
    with tempfile.TemporaryDirectory(prefix="hfpar_throughput_") as temporary:
        folder = Path(temporary)
        prepare(args, folder)
        for repeat in range(args.repeats):
            # The order turns round, so that a drift of the machine hits all alike.
            for contestant in args.only if repeat % 2 == 0 else list(args.only)[::-1]:
                run = measure(contestant, args, folder / f"{contestant}_{repeat}")
                runs.append(run)
                print(
                    f"{contestant:8} {run.tokens_per_second:8.1f} tokens/s, {run.tokens_per_step:.0f} tokens a step, "
                    f"peak {run.peak_memory_bytes / 2**20:.0f} MiB, {run.seconds_in_all:.0f} s in all, "
                    f"load {run.load_before:.1f}",
                    flush=True,
                )
    summary = summarize(runs) | {"environment": environment_snapshot(args)}
    print_table(summary)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
