"""Tokenizing with labels, beside TRL; memory as the data grows; and starting from a warm cache.

    python benchmarks/tokenizing.py --data gsm8k_train.jsonl --model SmolLM2-135M-Instruct --json tokenizing.json

The data is repeated `--times` times over, and each contestant makes tokens and labels of it with two processes, in a
process of its own, in turns; of `--repeats` times the median counts.

- **hfpar** is timed from the file to the finished cache entry: hashing, reading, starting its processes, checking,
  rendering, tokenizing, writing.
- **TRL** is timed in `SFTTrainer._prepare_dataset` alone, on prompts and completions that are in a `datasets.Dataset`
  already: rendering, tokenizing and truncating, which ends with an Arrow table in `datasets`' cache.

Memory is the peak over time of the sum of all processes' proportional sizes (PSS), for the data repeated `--times / 10`
and `--times` times.

The warm start is what a rank does of its data before the first step: finding the key and the cache entry, and planning
the epoch. It is timed on a data set of `--samples` rows whose tokens are zeros, packed to 8,192 tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

NUM_PROC, MAX_LENGTH = 2, 1024


def tokenize_hfpar(data: Path, model: str, folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    from hfpar.config.schema import DataSource, SFTConfig
    from hfpar.data.build import Recipe
    from hfpar.data.cache import TokenCache, TokenRequest
    from hfpar.data.reading.sources import resolve

    columns = {"instruction": "question", "output": "answer"}
    source = DataSource(path=str(data), format="alpaca", columns=columns)
    tokenizer = AutoTokenizer.from_pretrained(model)
    begin = time.perf_counter()
    cache = TokenCache(folder / "cache", tokenizer, Path(model))
    recipe = Recipe.of(SFTConfig(max_length=MAX_LENGTH), source)
    store = cache.get(TokenRequest(resolve(source), recipe, False), num_proc=NUM_PROC)
    seconds = time.perf_counter() - begin
    report = store.report
    return {"seconds": seconds, "samples": len(store), "label_tokens": report.num_label_tokens}


def tokenize_trl(data: Path, model: str, folder: Path) -> dict[str, Any]:
    import datasets
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from hfpar.models.shrink import shrink_config

    datasets.disable_progress_bars()
    rows = datasets.load_dataset("json", data_files=str(data), split="train", cache_dir=str(folder / "rows"))
    rows = rows.map(
        lambda row: {
            "prompt": [{"role": "user", "content": row["question"]}],
            "completion": [{"role": "assistant", "content": row["answer"]}],
        },
        remove_columns=["question", "answer"],
        num_proc=NUM_PROC,
    )
    seconds = []

    class TimedTrainer(SFTTrainer):
        def _prepare_dataset(self, *args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            dataset = super()._prepare_dataset(*args, **options)
            seconds.append(time.perf_counter() - begin)
            return dataset

    tiny = AutoModelForCausalLM.from_config(shrink_config(AutoConfig.from_pretrained(model)))
    settings = SFTConfig(
        output_dir=str(folder / "out"),
        dataset_num_proc=NUM_PROC,
        max_length=MAX_LENGTH,
        use_cpu=True,
        report_to="none",
        bf16=False,
    )
    trainer = TimedTrainer(
        tiny, settings, train_dataset=rows, processing_class=AutoTokenizer.from_pretrained(model)
    )
    return {"seconds": seconds[0], "samples": len(trainer.train_dataset)}


def warm_start(num_samples: int, model: str, folder: Path) -> dict[str, Any]:
    """Time a rank's start, after an entry has been put into the cache."""
    from transformers import AutoConfig, AutoTokenizer

    from hfpar.config.schema import SFTConfig
    from hfpar.parallel.layout import Layout
    from hfpar.train import data, loop
    from hfpar.train.model import ModelSource

    path = folder / "million.jsonl"
    with path.open("w") as file:
        for number in range(num_samples):
            file.write(f'{{"text": "sample {number} of a million, with some words of its own"}}\n')
    config = SFTConfig(
        dataset=str(path),
        token_cache=str(folder / "warm"),
        max_length=8192,
        max_tokens_per_batch=8192,
        gradient_accumulation_steps=1,
    )
    model_config = AutoConfig.from_pretrained(model)
    model_config.max_position_embeddings = 8192
    source = ModelSource(Path(model), model_config, AutoTokenizer.from_pretrained(model))
    start_group()

    def start() -> float:
        begin = time.perf_counter()
        layout = Layout(rank=0, world_size=1)
        run_data = data.read_data(config, source, layout)
        loader = data.make_loader(config, run_data, layout, pad_token_id=0)
        loop.Schedule.of(config, loader, layout)
        _ = loader.fingerprint, loader.padding_saved
        next(iter(loader))
        return time.perf_counter() - begin

    real_build, data.TokenCache._build = data.TokenCache._build, build_zeros  # type: ignore[method-assign, assignment]
    build_zeros.num_samples = num_samples  # type: ignore[attr-defined]
    cold = start()
    data.TokenCache._build = real_build  # type: ignore[method-assign]
    return {
        "seconds": statistics.median(start() for _ in range(3)),
        "first_seconds": cold,
        "samples": num_samples,
    }


def start_group() -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())


def build_zeros(self: Any, key: str, request: Any, *_: Any) -> None:
    """In place of tokenizing: an entry of zeros, whose files take no room on most file systems."""
    from hfpar.data.store import DataReport, TokenBlock, TokenWriter

    num: int = build_zeros.num_samples  # type: ignore[attr-defined]
    lengths = np.random.default_rng(0).lognormal(math.log(400), 1.0, num)
    lengths = np.clip(lengths.astype(np.int64), 2, 8192)
    total = int(lengths.sum())
    folder = self.folder / key
    folder.mkdir()
    writer = TokenWriter(folder)
    none = np.zeros(0, dtype=np.uint32)
    report = DataReport(num_rows=num, num_samples=num, num_tokens=total, num_label_tokens=total - num)
    writer.write(TokenBlock(none, none, lengths, np.arange(1, num + 1), report), 0)
    writer.close([(request.files[0].path, "line")])
    for name, width in (("tokens", 4), ("trained", 1)):
        with (folder / f"{name}.bin").open("r+b") as file:
            file.truncate(total * width)


CONTESTANTS = {"hfpar": tokenize_hfpar, "trl": tokenize_trl}


def measure(contestant: str, data: Path, model: str) -> dict[str, Any]:
    """Run a contestant in a process of its own; adds the peak of its and its children's memory."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--worker", contestant, "--data", str(data), "--model", model]
        process = subprocess.Popen([*command, "--folder", folder], stdout=subprocess.PIPE, text=True)
        peak = PeakMemory(process.pid)
        output, _ = process.communicate()
        if process.returncode:
            raise SystemExit(f"{contestant} failed")
        return {**json.loads(output.splitlines()[-1]), "peak_bytes": peak.stop()}


class PeakMemory:
    """The largest sum of the sizes of a process and its children, looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        self.process, self.peak, self.stopped = psutil.Process(pid), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()

    def _watch(self) -> None:
        while not self.stopped.wait(0.1):
            total = 0
            try:
                for process in [self.process, *self.process.children(recursive=True)]:
                    total += process.memory_full_info().pss
            except psutil.Error:
                continue
            self.peak = max(self.peak, total)

    def stop(self) -> int:
        self.stopped.set()
        self.thread.join()
        return self.peak


def repeat_file(data: Path, times: int, folder: Path) -> Path:
    path = folder / f"times_{times}.jsonl"
    content = data.read_bytes()
    with path.open("wb") as file:
        for _ in range(times):
            file.write(content)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="JSONL with question and answer")
    parser.add_argument("--model", required=True, help="folder whose tokenizer and template are used")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker == "warm":
        print(json.dumps(warm_start(args.samples, args.model, args.folder)))
    elif args.worker:
        print(json.dumps(CONTESTANTS[args.worker](args.data, args.model, args.folder)))
    else:
        compare(args)


def compare(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = repeat_file(args.data, max(1, args.times // 10), folder)
        large = repeat_file(args.data, args.times, folder)
        results: dict[str, list[dict[str, Any]]] = {contestant: [] for contestant in CONTESTANTS}
        for _ in range(args.repeats):
            for contestant in CONTESTANTS:
                results[contestant].append(measure(contestant, large, args.model))
        small_results = {contestant: measure(contestant, small, args.model) for contestant in CONTESTANTS}
        warm_command = [
            sys.executable,
            __file__,
            "--worker",
            "warm",
            "--data",
            str(args.data),
            "--model",
            args.model,
        ]
        warm_command += ["--samples", str(args.samples), "--folder", str(folder)]
        warm = json.loads(subprocess.run(warm_command, check=True, stdout=subprocess.PIPE, text=True).stdout)
    table = Table("", "samples/s", "ratio", "peak memory", f"of a tenth ({small.name})")
    rates = {
        contestant: statistics.median(run["samples"] / run["seconds"] for run in runs)
        for contestant, runs in results.items()
    }
    for contestant, runs in results.items():
        table.add_row(
            contestant,
            f"{rates[contestant]:,.0f}",
            f"{rates[contestant] / rates['trl']:.2f}",
            f"{max(run['peak_bytes'] for run in runs) / 2**20:,.0f} MiB",
            f"{small_results[contestant]['peak_bytes'] / 2**20:,.0f} MiB",
        )
    console = Console()
    console.print(table)
    console.print(f"warm start of {warm['samples']:,} samples: {warm['seconds']:.2f} s")
    if args.json:
        machine = {"python": platform.python_version(), "processor": platform.processor()}
        content = {"runs": results, "small": small_results, "rates": rates, "warm": warm, "machine": machine}
        args.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
