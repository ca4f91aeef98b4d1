"""Memory of a training step whose layers 1, 2 and 4 ranks share: weights and what comes with them, and activations.

    OMP_NUM_THREADS=1 python benchmarks/tensor_memory.py --json tensor_memory.json

Each row is one set of processes: on GPUs where there are at least two, else on the CPU. Bytes of parameters,
gradients and optimizer state are counted, tensor by tensor. A rank's peak is how far its memory (on a CPU, the resident
set) rises during a step over what it is with weights and optimizer state in place: activations, and gradients as they
are made. Told is the rank that needed most.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sequence_memory import ENVIRONMENT, MODEL, make_stream, resident

from hfpar.verify.processes import Worker, run_processes

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"tp_size": 1},
    {"tp_size": 2},
    {"tp_size": 4},
    {"tp_size": 2, "tp_sequence": True},
    {"tp_size": 4, "tp_sequence": True},
)
KINDS = ("parameters", "gradients", "optimizer")
GOAL = 0.05
"""How far a rank's share of what is cut may be from 1/n, relative."""


def measure(worker: Worker, folder: Path, sizes: dict[str, Any], num_tokens: int, length: int) -> None:
    """One rank: two small steps, then the one that counts."""
    import torch

    from hfpar.accelerator import prepare_deepspeed
    from hfpar.attention import interface
    from hfpar.config.engine import DDPSettings
    from hfpar.engine.build import build_engine
    from hfpar.models.cuts import cuts_of
    from hfpar.models.load import load_model, load_model_config
    from hfpar.parallel import sequence, tensor
    from hfpar.parallel.layout import Layout
    from hfpar.train import loss
    from hfpar.train.step import train_step

    on_gpu = worker.device_type == "cuda"
    prepare_deepspeed(on_gpu=on_gpu)
    worker.join_group()
    torch.set_num_threads(1)
    interface.register()
    device = torch.device(f"cuda:{worker.rank}" if on_gpu else "cpu")
    layout = Layout(rank=worker.rank, world_size=worker.world_size, **sizes)
    model = load_model(
        folder,
        load_model_config(folder),
        settings=DDPSettings(),
        dtype=torch.float32,
        attn_implementation=interface.interface_name("auto"),
        tp_size=layout.tp_size,
    )
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-4)

    engine = build_engine(
        DDPSettings(),
        model.train(),
        optimizer,
        layout,
        device,
        checkpoint_folder=folder,
        gradient_accumulation_steps=1,
        max_grad_norm=1.0,
    )
    gradients: dict[str, int] = {}
    step = engine.step

    def count_and_step(max_grad_norm: float | None) -> float:
        gradients.update((name, p.grad.nbytes) for name, p in model.named_parameters() if p.grad is not None)
        return step(max_grad_norm)

    for _ in range(2):
        train_step(engine, [make_stream(256, 128)], layout, 1.0)
    engine.step = count_and_step  # type: ignore[method-assign]
    before = torch.cuda.memory_allocated() if on_gpu else resident("VmRSS")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")
    result = train_step(engine, [make_stream(num_tokens, length)], layout, 1.0)
    peak = torch.cuda.max_memory_allocated() if on_gpu else resident("VmHWM")
    cuts = cuts_of(model)
    worker.send(
        {
            "bytes": {
                name: {
                    "parameters": parameter.nbytes,
                    "gradients": gradients[name],
                    "optimizer": state_bytes(engine.optimizer, parameter),
                }
                for name, parameter in model.named_parameters()
            },
            "cut": [name for name, _ in model.named_parameters() if name in cuts],
            "peak_bytes": peak - before,
            "loss": result.loss,
            "norm": result.grad_norm,
        }
    )


def state_bytes(optimizer: Any, parameter: Any) -> int:
    """Of the optimizer's tensors for a parameter, its count of steps left out."""
    return sum(value.nbytes for value in optimizer.state[parameter].values() if value.dim())


def run_layout(
    folder: Path, sizes: dict[str, Any], tokens: int, length: int, device_type: str
) -> list[dict[str, Any]]:
    """What each rank tells."""
    sent: dict[int, dict[str, Any]] = {}
    run_processes(
        measure,
        sizes["tp_size"],
        (folder / "model", sizes, tokens, length),
        folder=folder,
        device_type=device_type,
        timeout=1200,
        on_message=sent.__setitem__,
    )
    return [sent[rank] for rank in sorted(sent)]


def summarize(name: str, ranks: list[dict[str, Any]], cut: set[str]) -> dict[str, Any]:
    """One row: bytes of the rank that has most, of what is cut and of what every rank holds."""
    row: dict[str, Any] = {"layout": name, "ranks": len(ranks)}
    for kind in KINDS:
        for part, is_cut in (("cut", True), ("whole", False)):
            row[f"{kind}_{part}_bytes"] = max(
                sum(size[kind] for key, size in told["bytes"].items() if (key in cut) == is_cut)
                for told in ranks
            )
    peak = max(told["peak_bytes"] for told in ranks)
    return row | {"peak_bytes": peak, "loss": ranks[0]["loss"], "norm": ranks[0]["norm"]}


def add_shares(row: dict[str, Any], first: dict[str, Any]) -> None:
    """Of what one rank has."""
    for kind in KINDS:
        row[f"{kind}_cut_share"] = row[f"{kind}_cut_bytes"] / first[f"{kind}_cut_bytes"]
    row["peak_share"] = row["peak_bytes"] / first["peak_bytes"]
    row["goal_met"] = all(abs(row[f"{kind}_cut_share"] * row["ranks"] - 1) <= GOAL for kind in KINDS)


def print_row(row: dict[str, Any]) -> None:
    counted = "  ".join(
        f"{kind} {row[f'{kind}_cut_bytes']:,} + {row[f'{kind}_whole_bytes']:,} ({row[f'{kind}_cut_share']:.4f})"
        for kind in KINDS
    )
    goal = f"within {GOAL:.0%} of 1/n" if row["goal_met"] else f"NOT within {GOAL:.0%} of 1/n"
    print(f"{row['layout']:16} bytes cut + whole: {counted}  {goal}")
    print(
        f"{'':16} peak of a step {row['peak_bytes'] / 2**20:.0f} MiB, {row['peak_share']:.3f} of one rank's  "
        f"loss {row['loss']:.6f}  norm {row['norm']:.6f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--length", type=int, default=4096, help="tokens of a document")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import torch

    from hfpar.models.tiny import build_tiny_model

    os.environ.update(ENVIRONMENT)  # here, because the allocator reads it as its process starts
    num_gpus = torch.cuda.device_count()
    device_type = "cuda" if num_gpus > 1 else "cpu"
    told: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build_tiny_model(folder / "model", **MODEL, **HEADS)
        for sizes in LAYOUTS:
            layout = f"tp{sizes['tp_size']}" + (" tp_sequence" if "tp_sequence" in sizes else "")
            if device_type == "cuda" and sizes["tp_size"] > num_gpus:
                print(f"{layout}: left out, with {num_gpus} GPUs")
                continue
            told[layout] = run_layout(folder, sizes, args.tokens, args.length, device_type)
    cut = {name for ranks in told.values() for name in ranks[0]["cut"]}
    rows = [summarize(layout, ranks, cut) for layout, ranks in told.items()]
    for row in rows:
        add_shares(row, rows[0])
        print_row(row)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
