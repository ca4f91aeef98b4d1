"""What a person sees before the first step."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from hfpar.accelerator import Launch
from hfpar.config.schema import SFTConfig
from hfpar.data.loader import StepLoader
from hfpar.data.overlap.screen import DROPPED
from hfpar.data.store import DataReport
from hfpar.data.streaming import StreamLoader
from hfpar.engine.base import Engine, Weight, weights
from hfpar.models.cuts import Cut, cuts_of
from hfpar.parallel.layout import Layout
from hfpar.parallel.sequence import unwrap_peft
from hfpar.train.checkpoint import TrainerState
from hfpar.train.data import RunData
from hfpar.train.loop import Schedule, peak_memory_bytes
from hfpar.train.progress import METRICS_FILE, format_bytes, format_count, print_summary

_DROPPED = ("too long", "without label", DROPPED)


def show(
    config: SFTConfig,
    launch: Launch,
    layout: Layout,
    engine: Engine,
    loader: StepLoader | StreamLoader,
    schedule: Schedule,
    run_data: RunData,
    position: TrainerState,
) -> None:
    """Print the run in a table on rank 0. All ranks together."""
    memory = peak_memory_bytes(engine.device)
    cuts = cuts_of(engine.module)
    all_weights = list(weights(engine.module))
    parameters = [
        (_whole_size(weight, cuts.get(weight.name)), weight.requires_grad, weight.name in cuts)
        for weight in all_weights
    ]
    num_all = sum(count for count, _, _ in parameters)
    num_trained = sum(count for count, trained, _ in parameters if trained)
    num_cut = sum(count for count, _, is_cut in parameters if is_cut)
    if config.max_tokens_per_batch is not None:
        batches = f"packed to {config.max_tokens_per_batch} tokens"
    else:
        batches = f"{config.per_device_train_batch_size} samples"
    per = "in the first window" if config.streaming else "an epoch"
    ranks = "ranks" if layout.sequence_size == 1 else "data-parallel ranks"
    devices = f"{layout.world_size} x {engine.device.type}"
    rows = [
        (
            "engine",
            f"{engine.name} on {devices}, layout {layout.name}, mixed precision {launch.settings.mixed_precision}",
        ),
        ("model", f"{config.model_name_or_path} ({type(_base(engine)).__name__}, {config.dtype})"),
        ("parameters", f"{format_count(num_trained)} trained of {format_count(num_all)}"),
        *_quantization_rows(all_weights, num_all),
        *_data_rows(config, run_data),
        ("batch", f"{batches} x {config.gradient_accumulation_steps} x {layout.dp_size} {ranks}"),
        *_sharing_rows(layout, num_cut / num_all),
        ("padding saved", f"{100 * loader.padding_saved:.0f} % of what padded batches would compute"),
        ("steps", f"{schedule.total_steps} ({schedule.steps_per_epoch} {per}), from {position.step}"),
        ("memory", f"{format_bytes(memory)} on the fullest rank, before the first step"),
        ("run folder", str(config.output_dir)),
    ]
    if layout.rank == 0:
        print_summary(rows, "hfpar fine-tuning")


def _quantization_rows(all_weights: list[Weight], num_all: int) -> list[tuple[str, str]]:
    """What is held in few bits, where something is."""
    held = [weight for weight in all_weights if weight.quantized is not None]
    if not held:
        return []
    first = held[0].quantized
    assert first is not None
    share = sum(_whole_size(weight, None) for weight in held) / num_all
    kind = first.format.name + (
        ", double quantization" if getattr(first.format, "double_quant", False) else ""
    )
    text = f"{kind}: {100 * share:.1f} % of the weights, computed in {str(first.compute_dtype).removeprefix('torch.')}"
    pieces = sum(weight.quantized is not None and weight.quantized.cuts_through_blocks for weight in held)
    if pieces:
        text += f"; {pieces} of {len(held)} cut through blocks, each part quantized by itself"
    return [("quantized", text)]


def _whole_size(weight: Weight, cut: Cut | None) -> int:
    """Numbers in a weight of which engines and tp ranks have parts."""
    if weight.quantized is not None:
        return math.prod(weight.quantized.whole_shape)
    parameter = weight.parameters[0]
    size: int = getattr(parameter, "ds_numel", None) or parameter.numel()
    return size if cut is None else size // cut.local_size * cut.size


def _sharing_rows(layout: Layout, cut_share: float) -> list[tuple[str, str]]:
    """Who shares layers and streams, where somebody does; and how much of the weights are cut."""
    rows = []
    if layout.tp_size > 1:
        tokens = " and, between layers, the tokens" if layout.tp_sequence else ""
        rows.append(
            ("tensor", f"{layout.tp_size} ranks share {100 * cut_share:.1f} % of the weights{tokens}")
        )
    if layout.sequence_size == 1:
        return rows
    sizes = {"cp": layout.cp_size, "sp": layout.sp_size}
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1)
    return [*rows, ("sequence", f"{layout.sequence_size} ranks share a stream: {product}")]


def _data_rows(config: SFTConfig, run_data: RunData) -> list[tuple[str, str]]:
    held_out = f"{len(run_data.eval_samples)} held out"
    if run_data.windows is not None:
        return [("data", f"streamed in windows of {config.streaming_window} rows, {held_out}")]
    report = run_data.report
    samples = f"{len(run_data.samples)} samples ({dropped(report)}), {held_out}"
    weights = [weight for _, weight in run_data.segments]
    rows = [("data", samples)]
    if any(weight != 1 for weight in weights):
        parts = [f"{count} x {weight:g}" for count, weight in run_data.segments]
        rows.append(("an epoch", " + ".join(parts) + " samples"))
    tokens = f"{format_count(report.num_tokens)}, of them {format_count(report.num_label_tokens)} labels"
    rows.append(("tokens", f"{tokens} (train_on {config.train_on})"))
    return rows + notes(report)


def dropped(report: DataReport) -> str:
    """What was left out, in words."""
    text = f"dropped: {report.counts['too long']} too long, {report.counts['without label']} without a label"
    text += f", {report.counts[DROPPED]} with {DROPPED}" if report.counts[DROPPED] else ""
    return text + (f"; {report.num_bad_rows} bad rows skipped" if report.num_bad_rows else "")


def notes(report: DataReport) -> list[tuple[str, str]]:
    """What else was done to rows that are used, and what was wrong with the others."""
    done = [f"{count} {kind}" for kind, count in report.counts.most_common() if kind not in _DROPPED]
    bad = [f"{kind} ({count})" for kind, count in report.problems.most_common()]
    return [(name, ", ".join(parts)) for name, parts in (("rows", done), ("bad rows", bad)) if parts]


def _base(engine: Engine) -> torch.nn.Module:
    return unwrap_peft(engine.module)


def finish(output_dir: Path, run_data: RunData, layout: Layout) -> None:
    """Draw the loss curve and say where everything is, and what became of a stream's rows. Rank 0."""
    if layout.rank != 0:
        return
    from hfpar.train.plots import plot_loss  # Matplotlib takes its time, which no other rank needs to spend

    if run_data.windows is not None:
        report = run_data.windows.report
        rows = [("data", f"{report.num_samples} samples of {report.num_rows} rows read ({dropped(report)})")]
        print_summary(rows + notes(report), "streamed")
    plot_loss(output_dir / METRICS_FILE, output_dir / "loss.png")
    print(f"Finished: model, metrics.jsonl and loss.png are in {output_dir}")
