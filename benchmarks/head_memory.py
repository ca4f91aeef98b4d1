"""Peak memory and time of the head and its loss: hfpar's, in chunks, beside full logits and torch's cross-entropy.

    python benchmarks/head_memory.py --json head_memory.json

Each variant runs forward and backward in a fresh process. Its peak is how far the resident set rises over what it is
with inputs and weights in place, so the gradients are in it, and so is all that the pass keeps on the way.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SIZES = ((4096, 576, 150_000), (4096, 1024, 150_000))
"""(tokens, hidden size, vocabulary)"""


def run_variant(variant: str, num_tokens: int, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """Forward and backward of one variant in this process.

    The warm-up on a few tokens loads the kernels and, by its weight gradient of full size, already pays for what
    both variants must return; its memory is freed before the measuring starts.
    """
    import torch

    from hfpar.train.loss import head_cross_entropy

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, hidden_size, generator=generator, requires_grad=True)
    weight = torch.randn(vocab_size, hidden_size, generator=generator).mul_(0.02).requires_grad_()
    targets = torch.randint(0, vocab_size, (num_tokens,), generator=generator)

    def loss(rows: int) -> torch.Tensor:
        if variant == "chunked":
            return head_cross_entropy(hidden[:rows], weight, None, targets[:rows])
        return torch.nn.functional.cross_entropy(hidden[:rows] @ weight.T, targets[:rows], reduction="sum")

    loss(8).backward()
    hidden.grad = weight.grad = None
    reset_peak()
    before, begin = resident("VmRSS"), time.perf_counter()
    value = loss(num_tokens)
    value.backward()
    seconds = time.perf_counter() - begin
    assert weight.grad is not None
    return {
        "variant": variant,
        "peak_bytes": resident("VmHWM") - before,
        "seconds": seconds,
        "loss": float(value.detach()),
        "grad_norm": float(torch.linalg.vector_norm(weight.grad)),
    }


def resident(field: str) -> int:
    """Bytes of the resident set now (VmRSS) or at its highest (VmHWM)."""
    status = Path("/proc/self/status")
    if not status.is_file():  # without /proc the peak is all there is
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    for line in status.read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in {status}")


def reset_peak() -> None:
    """Let the highest resident set count from here."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def measure(variant: str, size: Sequence[int], threads: int) -> dict[str, Any]:
    """The same in a fresh process."""
    command = [sys.executable, __file__, "--variant", variant, "--size", *map(str, size)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(size: Sequence[int], threads: int) -> dict[str, Any]:
    """Both variants at one size; the ratios are chunked / full."""
    full, chunked = (measure(variant, size, threads) for variant in ("full", "chunked"))
    return {
        "num_tokens": size[0],
        "hidden_size": size[1],
        "vocab_size": size[2],
        "full": full,
        "chunked": chunked,
        "memory_ratio": chunked["peak_bytes"] / full["peak_bytes"],
        "time_ratio": chunked["seconds"] / full["seconds"],
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--size", type=int, nargs=3, action="append", metavar=("TOKENS", "HIDDEN", "VOCABULARY")
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--variant", choices=["full", "chunked"], help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = args.size or SIZES
    if args.variant:
        print(json.dumps(run_variant(args.variant, *sizes[0])))
        return
    results = []
    for size in sizes:
        result = compare(size, args.threads)
        results.append(result)
        full, chunked = result["full"], result["chunked"]
        print(
            f"{size[0]} tokens, hidden {size[1]}, vocabulary {size[2]}: "
            f"{full['peak_bytes'] / 2**20:.0f} MiB with full logits, {chunked['peak_bytes'] / 2**20:.0f} MiB in chunks "
            f"(x {result['memory_ratio']:.3f}), {full['seconds']:.1f} s and {chunked['seconds']:.1f} s "
            f"(x {result['time_ratio']:.2f})",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
