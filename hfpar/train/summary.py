"""What a person sees before the first step."""

from __future__ import annotations

from pathlib import Path

import torch

from hfpar.accelerator import Launch
from hfpar.config.schema import SFTConfig
from hfpar.data.loader import StepLoader
from hfpar.engine.base import Engine
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import TrainerState
from hfpar.train.data import RunData
from hfpar.train.loop import Schedule, peak_memory_bytes
from hfpar.train.loss import unwrap_peft
from hfpar.train.plots import plot_loss
from hfpar.train.progress import METRICS_FILE, format_bytes, format_count, print_summary


def show(
    config: SFTConfig,
    launch: Launch,
    layout: Layout,
    engine: Engine,
    loader: StepLoader,
    schedule: Schedule,
    run_data: RunData,
    position: TrainerState,
) -> None:
    """Print the run in a table on rank 0. All ranks together."""
    memory = peak_memory_bytes(engine.device, layout)
    parameters = [
        (getattr(p, "ds_numel", None) or p.numel(), p.requires_grad) for p in engine.module.parameters()
    ]
    num_all = sum(count for count, _ in parameters)
    num_trained = sum(count for count, trained in parameters if trained)
    report = run_data.report
    dropped = f"{report.num_too_long} too long, {report.num_without_label} without a label"
    if config.max_tokens_per_batch is not None:
        batches = f"packed to {config.max_tokens_per_batch} tokens"
    else:
        batches = f"{config.per_device_train_batch_size} samples"
    devices = f"{layout.world_size} x {engine.device.type}"
    rows = [
        (
            "engine",
            f"{engine.name} on {devices}, layout {layout.name}, mixed precision {launch.settings.mixed_precision}",
        ),
        ("model", f"{config.model_name_or_path} ({type(_base(engine)).__name__}, {config.dtype})"),
        ("parameters", f"{format_count(num_trained)} trained of {format_count(num_all)}"),
        ("data", f"{report.num_samples} samples (dropped: {dropped}), {len(run_data.eval_samples)} held out"),
        (
            "tokens",
            f"{format_count(report.num_tokens)}, of them {format_count(report.num_label_tokens)} labels",
        ),
        ("batch", f"{batches} x {config.gradient_accumulation_steps} x {layout.dp_size} ranks"),
        ("padding saved", f"{100 * loader.padding_saved:.0f} % of what padded batches would compute"),
        ("steps", f"{schedule.total_steps} ({schedule.steps_per_epoch} an epoch), from {position.step}"),
        ("memory", f"{format_bytes(memory)} on the fullest rank, before the first step"),
        ("run folder", str(config.output_dir)),
    ]
    if layout.rank == 0:
        print_summary(rows, "hfpar fine-tuning")


def _base(engine: Engine) -> torch.nn.Module:
    return unwrap_peft(engine.module)


def finish(output_dir: Path, layout: Layout) -> None:
    """Draw the loss curve and say where everything is. Rank 0."""
    if layout.rank != 0:
        return
    plot_loss(output_dir / METRICS_FILE, output_dir / "loss.png")
    print(f"Finished: model, metrics.jsonl and loss.png are in {output_dir}")
