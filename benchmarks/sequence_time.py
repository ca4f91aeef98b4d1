"""Time of a training step on one stream of 65,536 tokens, shared by 4 CPU ranks, by the length of its documents.

    python benchmarks/sequence_time.py --json sequence_time.json

Every row has the same number of tokens. Time is a constant for them plus a part that grows with the sum of squared
document lengths: what is computed is what queries see, not the square of the stream.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from sequence_memory import make_stream

from hfpar.verify.processes import Worker, run_processes


def measure(worker: Worker, folder: Path, sizes: dict[str, int], num_tokens: int, lengths: list[int]) -> None:
    """One rank: a small step, then one for each length."""
    import torch
    import torch.distributed as dist

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
    name = interface.interface_name("auto")
    config = load_model_config(folder)
    model = load_model(folder, config, settings=DDPSettings(), dtype=torch.float32, attn_implementation=name)
    sequence.apply(model, layout)
    loss.install(model)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW([parameter for _, parameter in parameters], lr=1e-4)

    engine = DDPEngine(model.train(), optimizer, DDPSettings(), layout, torch.device("cpu"))
    train_step(engine, [make_stream(2048, 256)], layout, 1.0)
    for length in lengths:
        stream = make_stream(num_tokens, length)
        dist.barrier()
        begin = time.perf_counter()
        result = train_step(engine, [stream], layout, 1.0)
        worker.send({"length": length, "seconds": time.perf_counter() - begin, "loss": result.loss})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--lengths", default="1024,4096,16384,65536")
    parser.add_argument("--cp_size", type=int, default=4)
    parser.add_argument("--sp_size", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from hfpar.models.tiny import build_tiny_model

    rows: list[dict[str, Any]] = []

    def tell(rank: int, row: dict[str, Any]) -> None:
        if rank != 0:
            return
        rows.append(row)
        squares = args.tokens * row["length"]
        print(
            f"{args.tokens // row['length']:5} x {row['length']:6} tokens  {row['seconds']:8.1f} s  "
            f"sum of squares {squares:.2e}  loss {row['loss']:.5f}",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "model")
        build_tiny_model(model, max_position_embeddings=1 << 20)
        run_processes(
            measure,
            args.cp_size * args.sp_size,
            (
                model,
                {"cp_size": args.cp_size, "sp_size": args.sp_size},
                args.tokens,
                [int(length) for length in args.lengths.split(",")],
            ),
            folder=Path(folder),
            timeout=3600,
            environment={"OMP_NUM_THREADS": "1"},
            on_message=tell,
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
