"""Memory of a base in 16, 8 and 4 bits, on engines and layouts: what ranks keep, and how much more loading takes.

    OMP_NUM_THREADS=1 python benchmarks/quantized_memory.py --json quantized_memory.json

A model with random bf16 weights is written to disk in shards, and loaded as training loads it. Bytes are counted,
tensor by tensor; the rise is how far a rank's memory (on a CPU, the resident set) rises while weights are read and
quantized, over what it is afterwards, in decoder layers of bf16. Told is the rank that needed most.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from sequence_memory import ENVIRONMENT, resident

from hfpar.verify.processes import Worker, run_processes

SIZES: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
METHODS: dict[str, dict[str, Any] | None] = {
    "bf16": None,
    "int8": {"method": "int8"},
    "nf4, one scale": {"method": "nf4", "double_quant": False},
    "nf4": {"method": "nf4"},
}
ONE: tuple[str, int, dict[str, int]] = ("ddp", 1, {})
LAYOUTS: tuple[tuple[str, int, dict[str, int]], ...] = (
    ONE,
    ("fsdp2", 2, {}),
    ("fsdp2", 4, {}),
    ("zero3", 2, {}),
    ("ddp", 2, {"tp_size": 2}),
    ("fsdp2", 4, {"tp_size": 2}),
)


def measure(worker: Worker, folder: Path, engine_name: str, sizes: dict[str, int], options: Any) -> None:
    """One rank: load, count."""
    import torch

    from hfpar.accelerator import prepare_deepspeed
    from hfpar.attention import interface
    from hfpar.engine.build import build_engine
    from hfpar.models.adapters import add_lora
    from hfpar.models.load import load_model, load_model_config
    from hfpar.models.quantization import Quantization
    from hfpar.parallel import tensor
    from hfpar.parallel.layout import Layout
    from hfpar.verify.worker import engine_settings

    prepare_deepspeed(on_gpu=False)
    worker.join_group()
    torch.set_num_threads(1)
    interface.register()
    settings = engine_settings(engine_name)
    layout = Layout(rank=worker.rank, world_size=worker.world_size, **sizes)
    model = load_model(
        folder,
        load_model_config(folder),
        settings=settings,
        dtype=torch.bfloat16,
        attn_implementation=interface.interface_name("auto"),
        tp_size=layout.tp_size,
        quantization=Quantization(**options) if options else None,
    )
    model = add_lora(
        model, r=8, alpha=16.0, dropout=0.0, target_modules="all-linear", modules_to_save=None, seed=0
    )
    tensor.apply(model, layout)
    torch.nn.functional.linear(torch.ones(1, 64), torch.ones(64, 64))  # libraries' own buffers
    Path("/proc/self/clear_refs").write_text("5")
    engine = build_engine(
        settings,
        model,
        lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.0),
        layout,
        torch.device("cpu"),
        checkpoint_folder=folder,
        gradient_accumulation_steps=1,
        max_grad_norm=None,
    )
    peak, after = resident("VmHWM"), resident("VmRSS")
    kept = {name: bytes_here(p) for name, p in engine.module.named_parameters() if not p.requires_grad}
    in_layers = sum(size for name, size in kept.items() if ".layers." in name)
    worker.send({"bytes": sum(kept.values()), "layer_bytes": in_layers, "rise": peak - after})
    engine.close()


def bytes_here(parameter: Any) -> int:
    """Of a parameter that this rank keeps between steps."""
    if hasattr(parameter, "ds_tensor"):
        return int(parameter.ds_tensor.numel() * parameter.element_size())
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return int(local.numel() * local.element_size())


def build_model(folder: Path, num_layers: int) -> tuple[int, int]:
    """Write it; returns the numbers of parameters in all layers' quantized weights, and in one layer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(num_hidden_layers=num_layers, **SIZES)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="100MB")
    layer = sum(p.numel() for p in model.model.layers[0].parameters() if p.dim() == 2)
    return layer * num_layers, layer


def run_row(
    folder: Path, engine: str, ranks: int, sizes: dict[str, int], options: Any
) -> list[dict[str, int]]:
    """What each rank tells."""
    sent: dict[int, dict[str, int]] = {}
    run_processes(
        measure,
        ranks,
        (folder / "model", engine, sizes, options),
        folder=folder,
        device_type="cpu",
        timeout=1200,
        on_message=sent.__setitem__,
    )
    return [sent[rank] for rank in sorted(sent)]


def main() -> None:
    """Measure every method on every layout and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12, help="decoder layers (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    rows = []
    with tempfile.TemporaryDirectory(prefix="hfpar_quantized_") as name:
        folder = Path(name)
        quantized, layer = build_model(folder / "model", args.layers)
        print(
            f"{args.layers} layers of {layer / 1e6:.1f} M parameters, {2 * layer / 2**20:.1f} MiB each in bf16"
        )
        print(
            "| base | engine | layout | MiB a rank | bytes a parameter in layers | rise while loading, layers |"
        )
        print("| --- | --- | --- | --- | --- | --- |")
        for method, options in METHODS.items():
            for engine, ranks, sizes in LAYOUTS if method == "nf4" else (ONE,):
                found = run_row(folder, engine, ranks, sizes, options)
                worst = {key: max(rank[key] for rank in found) for key in found[0]}
                tp_size = sizes.get("tp_size", 1)
                shares = ranks if engine in ("fsdp2", "zero3") else tp_size
                row = {
                    "method": method,
                    "engine": engine,
                    "layout": f"tp {tp_size} of {ranks}" if tp_size > 1 else f"{ranks}",
                    "mib": worst["bytes"] / 2**20,
                    "bytes_a_parameter": worst["layer_bytes"] * shares / quantized,
                    "rise_in_layers": worst["rise"] / (2 * layer),
                }
                rows.append(row)
                print(
                    f"| {method} | {engine} | {row['layout']} | {row['mib']:.1f} | {row['bytes_a_parameter']:.4f} | "
                    f"{row['rise_in_layers']:.2f} |",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
