"""Peak memory of a training step on one long stream, shared by 1, 2 and 4 ranks.

    python benchmarks/sequence_memory.py --json sequence_memory.json

Each row is one set of processes on the CPU. A rank's peak is how far its resident set rises during a step over what
it is with weights, gradients and optimizer state in place: the activations. Told is the rank that needed most.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from hfpar.verify.processes import Worker, run_processes

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    # Freed memory goes back to the system at once, so that the resident set is what is used.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 18),
}
MODEL = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "max_position_embeddings": 1 << 20,
}


def measure(worker: Worker, folder: Path, sizes: dict[str, int], num_tokens: int, length: int) -> None:
    """One rank: two small steps, then the one that counts."""
    import torch

    from hfpar.accelerator import prepare_deepspeed
    from hfpar.attention import interface
    from hfpar.config.engine import DDPSettings
    from hfpar.engine.ddp import DDPEngine
    from hfpar.models.load import load_model, load_model_config
    from hfpar.parallel import sequence
    from hfpar.parallel.layout import Layout
    from hfpar.train import loss
    from hfpar.train.step import train_step

    prepare_deepspeed(on_gpu=False)
    worker.join_group()
    torch.set_num_threads(1)
    interface.register()
    layout = Layout(rank=worker.rank, world_size=worker.world_size, **sizes)
    model = load_model(
        folder,
        load_model_config(folder),
        settings=DDPSettings(),
        dtype=torch.float32,
        attn_implementation=interface.interface_name("auto"),
    )
    sequence.apply(model, layout)
    loss.install(model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-4)

    engine = DDPEngine(model.train(), optimizer, DDPSettings(), layout, torch.device("cpu"))
    for _ in range(2):
        train_step(engine, [make_stream(256, 128)], layout, 1.0)
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    result = train_step(engine, [make_stream(num_tokens, length)], layout, 1.0)
    worker.send({"peak_bytes": resident("VmHWM") - before, "loss": result.loss, "norm": result.grad_norm})


def make_stream(num_tokens: int, length: int) -> Any:
    """Documents of one length."""
    import random

    from hfpar.data.stream import Sample, build_stream

    rng = random.Random(0)
    samples = []
    for _ in range(num_tokens // length):
        tokens = [rng.randrange(256) for _ in range(length)]
        samples.append(Sample(tokens, tokens))
    return build_stream(samples)


def resident(field: str) -> int:
    """Bytes of the resident set now (VmRSS) or at its highest (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--length", type=int, default=8192, help="tokens of a document")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)  # here, because the allocator reads it as a process starts
    from hfpar.models.tiny import build_tiny_model

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        build_tiny_model(model, **MODEL)
        layouts = [
            {},
            {"sp_size": 2},
            {"sp_size": 4},
            {"cp_size": 2},
            {"cp_size": 4},
            {"cp_size": 2, "sp_size": 2},
        ]
        for sizes in layouts:
            num_ranks = sizes.get("sp_size", 1) * sizes.get("cp_size", 1)
            sent: dict[int, dict[str, Any]] = {}
            run_processes(
                measure,
                num_ranks,
                (model, sizes, args.tokens, args.length),
                folder=Path(folder),
                timeout=1200,
                on_message=sent.__setitem__,
            )
            peak = max(row["peak_bytes"] for row in sent.values())
            name = (
                "".join(f"{axis.removesuffix('_size')}{size}" for axis, size in sizes.items()) or "one rank"
            )
            first = rows[0]["peak_bytes"] if rows else peak
            rows.append(
                {"layout": name, "ranks": num_ranks, **sent[0], "peak_bytes": peak, "share": peak / first}
            )
            bound = 1 / num_ranks + 0.15
            print(
                f"{name:10} {peak / 2**20:8.0f} MiB  {peak / first:5.3f} of one rank's (bound {bound:.3f})  "
                f"loss {sent[0]['loss']:.6f}",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
