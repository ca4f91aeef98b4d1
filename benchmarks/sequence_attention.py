"""Attention of one layer, forward and backward, shared by ranks: hfpar's Ulysses and ring beside DeepSpeed's Ulysses.

    python benchmarks/sequence_attention.py --json sequence_attention.json

One causal document on CPU ranks over gloo, one thread each, fp32. All three end in the same kernel of torch. The peer
is what Transformers and Accelerate use for `sp_size` (`UlyssesSPAttentionHF` of DeepSpeed's ALST); it knows no packed
documents on this kernel, so the document is one. Rounds alternate; told is the median, and what a rank has sent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hfpar.verify.processes import Worker, run_processes


def measure(worker: Worker, num_tokens: int, heads: tuple[int, int, int], rounds: int) -> None:
    """One rank: every variant in turn."""
    import torch
    import torch.distributed as dist

    from hfpar.accelerator import prepare_deepspeed

    prepare_deepspeed(on_gpu=False)
    worker.join_group()
    torch.set_num_threads(1)
    num_heads, num_kv_heads, head_dim = heads
    generator = torch.Generator().manual_seed(worker.rank)
    size = worker.world_size

    def draw(num: int) -> torch.Tensor:
        return torch.randn(1, num, num_tokens // size, head_dim, generator=generator).requires_grad_()

    states = [draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)]
    variants = {
        "hfpar sp": hfpar_variant(worker, num_tokens, {"sp_size": size}),
        "hfpar cp": hfpar_variant(worker, num_tokens, {"cp_size": size}),
        "DeepSpeed sp": deepspeed_variant(worker, num_tokens, heads),
    }
    sent = count_sent_bytes()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    num_bytes: dict[str, int] = {}
    for _ in range(rounds + 1):  # the first warms up
        for name, attend in variants.items():
            dist.barrier()
            before, begin = sum(sent), time.perf_counter()
            attend(*states).sum().backward()
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
            num_bytes[name] = sum(sent) - before
    worker.send({name: (statistics.median(seconds[name][1:]), num_bytes[name]) for name in variants})


def hfpar_variant(worker: Worker, num_tokens: int, sizes: dict[str, int]) -> Callable[..., Any]:
    """hfpar's attention function, as a layer calls it."""
    import torch
    from torch import nn

    from hfpar.attention.interface import attention_forward
    from hfpar.data.stream import Sample, build_stream
    from hfpar.parallel.layout import Layout
    from hfpar.parallel.sequence import shard_stream

    layout = Layout(rank=worker.rank, world_size=worker.world_size, **sizes)
    stream = build_stream([Sample([0] * num_tokens, [0] * num_tokens)])
    arguments = shard_stream(stream, layout).arguments(torch.device("cpu"))
    arguments = {
        name: value for name, value in arguments.items() if name not in ("input_ids", "position_ids")
    }
    layer = nn.Module()
    return lambda query, key, value: attention_forward(layer, query, key, value, None, **arguments)[0]


def deepspeed_variant(worker: Worker, num_tokens: int, heads: tuple[int, int, int]) -> Callable[..., Any]:
    """DeepSpeed's, around Transformers' SDPA."""
    import deepspeed
    import torch
    import torch.distributed as dist
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from torch import nn
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    deepspeed.init_distributed(dist_init_required=False)
    num_heads, num_kv_heads, head_dim = heads
    attention = UlyssesSPAttentionHF(
        attn=sdpa_attention_forward,
        batch_size=1,
        attn_head_count=num_heads,
        attn_head_size=head_dim,
        kv_head_count=num_kv_heads,
        num_hidden_layers=1,
        process_group=dist.group.WORLD,
        local_seq_length=num_tokens // worker.world_size,
        global_seq_length=num_tokens,
    )
    layer: Any = nn.Module()
    layer.num_key_value_groups = num_heads // num_kv_heads
    layer.is_causal = True
    local = num_tokens // worker.world_size
    positions = torch.arange(worker.rank * local, (worker.rank + 1) * local)[None]
    return lambda query, key, value: attention(layer, query, key, value, None, position_ids=positions)[0]


def count_sent_bytes() -> list[int]:
    """A list that grows by what this rank sends to others, from now on."""
    import torch.distributed as dist

    sent: list[int] = []
    all_to_all, exchange = dist.all_to_all_single, dist.batch_isend_irecv

    def counting_all_to_all(
        output: Any,
        input: Any,  # noqa: A002 - torch's name, which DeepSpeed gives
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        **options: Any,
    ) -> Any:
        if input_split_sizes:
            own = input_split_sizes[dist.get_rank()]
        else:
            own = input.numel() // dist.get_world_size()
        sent.append((input.numel() - own) * input.element_size())
        return all_to_all(output, input, output_split_sizes, input_split_sizes, **options)

    def counting_exchange(operations: Any) -> Any:
        sent.extend(
            operation.tensor.numel() * operation.tensor.element_size()
            for operation in operations
            if operation.op is dist.isend
        )
        return exchange(operations)

    dist.all_to_all_single, dist.batch_isend_irecv = counting_all_to_all, counting_exchange
    return sent


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", default="16,4,64", help="query heads, key-value heads, head size")
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for num_ranks in map(int, args.ranks.split(",")):
        told: dict[int, Any] = {}
        with tempfile.TemporaryDirectory() as folder:
            run_processes(
                measure,
                num_ranks,
                (args.tokens, tuple(map(int, args.heads.split(","))), args.rounds),
                folder=Path(folder),
                timeout=1200,
                environment={"OMP_NUM_THREADS": "1"},
                on_message=told.__setitem__,
            )
        peer = told[0]["DeepSpeed sp"][0]
        for name, (seconds, num_bytes) in told[0].items():
            ratio = peer / seconds
            print(
                f"{num_ranks} ranks  {name:13} {1000 * seconds:8.1f} ms  {ratio:5.2f} x  {num_bytes / 2**20:7.2f} MiB"
            )
            rows.append({"ranks": num_ranks, "variant": name, "seconds": seconds, "sent_bytes": num_bytes})
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
