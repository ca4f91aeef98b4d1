"""Packing and planning an epoch: time, fill and balance, beside TRL's best-fit-decreasing packing.

    python benchmarks/packing.py --json packing.json

Lengths are drawn from a log-normal and clipped to 1 and the budget. Every contestant packs the same ones, in turns, in
this process; of `--repeats` times, in seconds of the processor, the median counts.

- **hfpar** packs as training does (`pack_evenly`); the plan is all that a rank does before its first step: order,
  packs, steps, number of steps, fingerprint and padding saved.
- **TRL** is `trl.pack_dataset(strategy="bfd")` on a `datasets.Dataset` in memory, in two settings. "one batch" packs
  over the whole data set (`batch_size` = number of samples), which gives TRL its best fill. "batches of 1000" is what
  `SFTTrainer` does, whose default is `datasets`' own. The tokens are of Arrow's null type, which takes no memory, so
  that TRL, which moves tokens while it packs, has none to move: the time is that of packing alone.

Balance is the largest over the mean, among the ranks of a step, of the sum of squared document lengths: 1.00 is even.
"Spread" tells what a step's documents have in common: the standard deviation over steps (of a step of one
micro-batch) of the token-weighted mean of log2(length).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from hfpar.data.loader import StepLoader  # noqa: E402
from hfpar.data.packing import Packs, pack, pack_evenly  # noqa: E402
from hfpar.data.plan import EpochPlan, plan_epoch  # noqa: E402

SHAPES = ((400, 1.0), (400, 0.5), (400, 1.5), (1500, 1.0))
"""(median, sigma) of the log-normals; packing is timed on the first."""


def draw_lengths(num: int, median: float, sigma: float, budget: int, seed: int = 0) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(math.log(median), sigma, num)
    return np.clip(lengths.astype(np.int64), 1, budget)


def make_trl(lengths: np.ndarray, budget: int, batch_size: int) -> Callable[[], int] | None:
    """What packs with TRL and returns the number of packs, or None where TRL isn't installed."""
    try:
        from trl import pack_dataset
    except ImportError:
        return None
    import datasets
    import pyarrow as pa

    datasets.disable_progress_bars()
    offsets, nulls = np.concatenate(([0], np.cumsum(lengths))), pa.nulls(int(lengths.sum()))
    if offsets[-1] < 2**31:
        tokens = pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), nulls)
    else:
        tokens = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), nulls)
    dataset = datasets.Dataset(pa.table({"input_ids": tokens}))

    def run() -> int:
        packed = pack_dataset(
            dataset,
            budget,
            "bfd",
            {"batch_size": batch_size, "keep_in_memory": True, "load_from_cache_file": False},
        )
        sizes = packed.data.column("seq_lengths").combine_chunks().values.to_numpy()
        assert np.array_equal(np.sort(sizes), np.sort(lengths)), "TRL lost tokens"
        return len(packed)

    return run


def plan_everything(lengths: np.ndarray, budget: int) -> int:
    loader = StepLoader(
        range(len(lengths)),  # type: ignore[arg-type]
        seed=0,
        dp_size=8,
        dp_rank=0,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=None,
        max_tokens_per_batch=budget,
        pad_token_id=0,
        lengths=lengths,
    )
    assert loader.fingerprint and loader.padding_saved > 0 and loader.plan(0).step(0)
    assert loader.num_steps(0) == loader.total_steps(1)
    return loader.plan(0).items.num_packs


def time_packing(lengths: np.ndarray, budget: int, repeats: int) -> list[dict[str, Any]]:
    contestants: dict[str, Callable[[], int] | None] = {
        "hfpar": lambda: pack_evenly(lengths, budget).num_packs,
        "hfpar, best fit alone": lambda: len(pack(lengths, budget)),
        "hfpar, the whole plan": lambda: plan_everything(lengths, budget),
        "TRL bfd, one batch": make_trl(lengths, budget, len(lengths)),
        "TRL bfd, batches of 1000": make_trl(lengths, budget, 1000),
    }
    seconds: dict[str, list[float]] = {name: [] for name, run in contestants.items() if run}
    packs: dict[str, int] = {}
    for _ in range(repeats):
        for name in seconds:
            run = contestants[name]
            assert run is not None
            begin = time.process_time()
            packs[name] = run()
            seconds[name].append(time.process_time() - begin)
    return [
        {
            "contestant": name,
            "seconds": statistics.median(times),
            "packs": packs[name],
            "fill": float(lengths.sum() / (packs[name] * budget)),
        }
        for name, times in seconds.items()
    ]


def imbalance(lengths: np.ndarray, steps: Sequence[list[list[list[int]]]], dp_size: int) -> np.ndarray:
    """Of each step."""
    squares = lengths**2
    found = []
    for step in steps:
        work = [sum(int(squares[micro_batch[rank]].sum()) for micro_batch in step) for rank in range(dp_size)]
        found.append(max(work) / statistics.mean(work))
    return np.array(found)


def in_turn(packs: Packs, order: np.ndarray, dp_size: int, accumulation: int) -> list[list[list[list[int]]]]:
    """Full steps of packs as they come, with no dealing."""
    groups = packs.take(order).to_lists()
    size = dp_size * accumulation
    return [
        [groups[first : first + dp_size] for first in range(begin, begin + size, dp_size)]
        for begin in range(0, len(groups) - size + 1, size)
    ]


def spread_of_steps(lengths: np.ndarray, steps: Sequence[list[list[list[int]]]]) -> float:
    means = []
    for step in steps:
        sizes = lengths[[index for micro_batch in step for rank in micro_batch for index in rank]]
        means.append(float((sizes * np.log2(sizes)).sum() / sizes.sum()))
    return statistics.stdev(means)


def compare_orders(lengths: np.ndarray, budget: int, dp_size: int, accumulation: int) -> dict[str, Any]:
    """Balance of hfpar's plan, of its packs dealt at random, and of best fit's packs, sorted by work."""

    def full_steps(plan: EpochPlan) -> list[list[list[list[int]]]]:
        return [plan.step(number) for number in range(plan.items.num_packs // plan.items_per_step)]

    sizes = {"dp_size": dp_size, "gradient_accumulation_steps": accumulation}
    plan = plan_epoch(
        lengths, seed=0, epoch=0, **sizes, per_device_train_batch_size=None, max_tokens_per_batch=budget
    )
    random_order = np.random.default_rng(1).permutation(plan.items.num_packs)
    groups = pack(lengths, budget)
    by_work = sorted(groups, key=lambda group: int((lengths[group] ** 2).sum()))
    plain = Packs(
        np.array([index for group in by_work for index in group]),
        np.cumsum([0, *(len(group) for group in by_work)]),
    )
    step_size = dp_size * accumulation
    orders = {
        "hfpar": full_steps(plan),
        "its packs, at random": in_turn(plan.items, random_order, dp_size, accumulation),
        "best fit's packs, by work": full_steps(EpochPlan(plain, lengths, dp_size, 1, step_size)),
        "best fit's packs, at random": in_turn(
            plain, np.random.default_rng(1).permutation(plain.num_packs), dp_size, accumulation
        ),
    }
    figures = {}
    for name, steps in orders.items():
        uneven = imbalance(lengths, steps, dp_size)
        figures[name] = {
            "median": float(np.median(uneven)),
            "p95": float(np.quantile(uneven, 0.95)),
            "spread": spread_of_steps(lengths, steps),
        }
    return figures


def show_packing(console: Console, rows: list[dict[str, Any]], title: str) -> None:
    table = Table(title=title)
    for column in ("", "seconds", "packs", "fill"):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row["contestant"], f"{row['seconds']:.2f}", f"{row['packs']:,}", f"{100 * row['fill']:.4f} %"
        )
    console.print(table)


def show_balance(console: Console, rows: list[dict[str, Any]], dp_size: int) -> None:
    table = Table(title=f"Balance of {dp_size} ranks: largest / mean of the sum of squared document lengths")
    for column in ("lengths", "accum.", "order of packs", "median", "p95", "spread"):
        table.add_column(column, justify="left" if column == "order of packs" else "right", no_wrap=True)
    for row in rows:
        for name, figures in row["orders"].items():
            table.add_row(
                f"{row['median']}, {row['sigma']}",
                str(row["accumulation"]),
                name,
                f"{figures['median']:.3f}",
                f"{figures['p95']:.3f}",
                f"{figures['spread']:.2f}",
            )
        table.add_section()
    console.print(table)


def environment() -> dict[str, Any]:
    versions = {}
    for name in ("numpy", "datasets", "trl"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return {"python": platform.python_version(), "machine": platform.machine(), **versions}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument(
        "--balance_samples", type=int, default=200_000, help="lengths that balance is measured on"
    )
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dp_size", type=int, default=8)
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args(argv)
    console = Console()
    median, sigma = SHAPES[0]
    lengths = draw_lengths(args.samples, median, sigma, args.budget)
    packing = time_packing(lengths, args.budget, args.repeats)
    show_packing(
        console, packing, f"{args.samples:,} lengths, median {median}, sigma {sigma}, budget {args.budget}"
    )
    if not any(row["contestant"].startswith("TRL") for row in packing):
        console.print(
            "TRL isn't installed, so it is left out: pip install 'hfpar\\[benchmark]', or pip install trl"
        )
    balance = []
    for median, sigma in SHAPES:
        lengths = draw_lengths(args.balance_samples, median, sigma, args.budget)
        for accumulation in (1, 4):
            orders = compare_orders(lengths, args.budget, args.dp_size, accumulation)
            balance.append({"median": median, "sigma": sigma, "accumulation": accumulation, "orders": orders})
    show_balance(console, balance, args.dp_size)
    if args.json:
        figures = {
            "environment": environment(),
            "arguments": vars(args),
            "packing": packing,
            "balance": balance,
        }
        args.json.write_text(json.dumps(figures, indent=2, default=str) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
