"""What the processes of `hfpar verify` do: build each cell as training does, step, and compare."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PretrainedConfig

from hfpar.accelerator import prepare_deepspeed
from hfpar.attention import interface
from hfpar.config.engine import DDPSettings, EngineSettings, FSDP2Settings, ZeROSettings
from hfpar.data.stream import Sample, TokenStream, build_stream, pad_batch, unpad_batch
from hfpar.engine.base import Engine
from hfpar.engine.build import build_engine
from hfpar.errors import ConfigError
from hfpar.models.adapters import add_lora
from hfpar.models.formats import BLOCK
from hfpar.models.load import load_model, load_model_config, resolve_folder, skeleton
from hfpar.models.quantization import Quantization, quantize_skeleton
from hfpar.models.quantized import quantized_weights
from hfpar.parallel import sequence, tensor
from hfpar.parallel.layout import Layout
from hfpar.parallel.plan import plan_model
from hfpar.train import loss
from hfpar.train.step import train_step
from hfpar.verify.cells import Cell, Errors, layout_sizes
from hfpar.verify.compare import compare_gradients, compare_parameters, relative, worst_of
from hfpar.verify.documents import GRADIENT_ACCUMULATION_STEPS, Document, deal, make_windows
from hfpar.verify.processes import Worker
from hfpar.verify.reference import (
    LORA,
    MAX_GRAD_NORM,
    Pieces,
    build_checkpoint,
    draw_adapter_state,
    make_optimizer,
    run_reference,
    set_parameters,
)

QUANTIZATIONS = {"qlora": "nf4"}
"""Of the base, by adapter."""


def prepare_references(
    worker: Worker,
    model_name_or_path: str | None,
    adapters: Sequence[str],
    fewest_heads: int,
    tp_sizes: Sequence[int],
    folder: Path,
) -> None:
    """Write the shrunk checkpoint, the adapters' values and what one plain process makes of them.

    Args:
        worker: a process of its own.
        model_name_or_path: whose config is shrunk; None: the tiny model's.
        adapters: `full`, `lora`, `qlora`.
        fewest_heads: query heads that the shrunk model must keep, if the model has them.
        tp_sizes: numbers of ranks that are each to share it evenly, if they can share the model's own heads.
        folder: where to.
    """
    checkpoint = folder / "checkpoint"
    config = load_model_config(_model_folder(model_name_or_path, folder))
    config.save_pretrained(folder / "original")
    block = BLOCK if set(adapters) & set(QUANTIZATIONS) else 1
    build_checkpoint(config, checkpoint, fewest_heads=fewest_heads, tp_sizes=tp_sizes, block=block)
    windows = make_windows(load_model_config(checkpoint).vocab_size)
    device = torch.device(worker.device_type)
    for adapter in adapters:
        worker.send(adapter)
        state = draw_adapter_state(checkpoint) if adapter != "full" else None
        if state is not None:
            torch.save(state, folder / "adapter_state.pt")
        quantization = QUANTIZATIONS.get(adapter)
        torch.save(
            run_reference(checkpoint, windows, state, device, quantization),
            folder / f"reference_{adapter}.pt",
        )
        for tp_size in tp_sizes if quantization is not None else ():
            pieces = pieces_of(load_model_config(checkpoint), tp_size)
            if pieces:
                in_pieces = run_reference(checkpoint, windows, state, device, quantization, pieces)
                torch.save(in_pieces, folder / f"reference_{adapter}_tp{tp_size}.pt")


def pieces_of(config: PretrainedConfig, tp_size: int) -> Pieces:
    """The weights that this many tp ranks cut through blocks of 4-bit numbers, so that each quantizes its own part."""
    if tp_size == 1:
        return {}
    model = skeleton(config, dtype=torch.float32)
    quantize_skeleton(model, Quantization("nf4"))
    try:
        cuts = plan_model(model, tp_size).cuts
    except ConfigError:
        return {}  # the cells are refused
    names = {module: name for name, module in model.named_modules()}
    pieces = {}
    for owner, leaf, cut in cuts:
        weight = quantized_weights(owner).get(leaf)
        if weight is not None and weight.part(cut, 0).cuts_through_blocks:
            ranks = range(0, tp_size, cut.copies)
            assert all(len(cut.slices(rank)) == 1 for rank in ranks), (
                f"{names[owner]} is cut into several pieces"
            )
            pieces[names[owner]] = [cut.slices(rank)[0] for rank in ranks]
    return pieces


def _model_folder(model_name_or_path: str | None, folder: Path) -> Path:
    if model_name_or_path is not None:
        return resolve_folder(model_name_or_path)
    from hfpar.models.tiny import build_tiny_model

    tiny = folder / "tiny"
    build_tiny_model(tiny)
    return tiny


def run_cells(worker: Worker, cells: Sequence[tuple[int, Cell]], folder: Path) -> None:
    """Run cells of one world size, one after another.

    Sends ("start", number), then ("result", number, errors), or ("refused", number, reason) of a layout that this
    model can't have.

    Args:
        worker: one rank.
        cells: with their numbers.
        folder: where `prepare_references` has been.
    """
    warnings.simplefilter("ignore")
    if any(cell.engine.startswith("zero") for _, cell in cells):
        prepare_deepspeed(on_gpu=worker.device_type == "cuda")
    worker.join_group()
    interface.register()
    layouts = {cell.layout: make_layout(worker, cell) for _, cell in cells}  # one set of groups each
    refusals = {name: _refusal(layout, folder) for name, layout in layouts.items()}
    for number, cell in cells:
        worker.send(("start", number))
        refusal = refusals[cell.layout]
        if refusal is not None:
            worker.send(("refused", number, refusal))
            continue
        worker.send(("result", number, run_cell(worker, cell, layouts[cell.layout], folder)))
        dist.barrier()  # or a rank that is ahead could crash in the next cell before this one has been told


def _refusal(layout: Layout, folder: Path) -> str | None:
    """Why the model, or its shrunk copy, can't have a layout, or None. All ranks find the same."""
    try:
        for name in ("original", "checkpoint"):
            config = load_model_config(folder / name)
            sequence.check_sequence(config, layout)
            tensor.check_tensor(config, layout)
    except ConfigError as error:
        return str(error)
    return None


def make_layout(worker: Worker, cell: Cell) -> Layout:
    """This rank's place in a cell."""
    sizes = layout_sizes(cell.layout)
    return Layout(
        rank=worker.rank,
        world_size=worker.world_size,
        cp_size=sizes.get("cp", 1),
        sp_size=sizes.get("sp", 1),
        tp_size=sizes.get("tp", 1),
    )


def run_cell(worker: Worker, cell: Cell, layout: Layout, folder: Path) -> Errors:
    """One row of the table, as this rank sees it."""
    in_pieces = folder / f"reference_{cell.adapter}_tp{layout.tp_size}.pt"
    whole = folder / f"reference_{cell.adapter}.pt"
    reference = torch.load(in_pieces if in_pieces.is_file() else whole, weights_only=True)
    device = torch.device(f"cuda:{worker.rank}" if worker.device_type == "cuda" else "cpu")
    checkpoint = folder / "checkpoint"
    windows = deal(make_windows(load_model_config(checkpoint).vocab_size), layout.dp_size)
    engine = build_cell_engine(cell, checkpoint, folder, layout, device, set(reference["decayed"]))
    try:
        errors = Errors()
        before = reference["initial"]
        for window, step in zip(windows, reference["steps"], strict=True):
            mine = [ranks[layout.dp_rank] for ranks in window]
            streams = [make_stream(documents, cell.batching) for documents in mine]
            errors = errors.merge(_step_and_compare(engine, streams, layout, step, before))
            before = step["parameters"]
        return errors
    finally:
        engine.close()


def engine_settings(name: str) -> EngineSettings:
    """The settings of an engine in fp32; ZeRO's with sizes that fit the model, as Accelerate fills them in."""
    if name == "ddp":
        return DDPSettings()
    if name == "fsdp2":
        return FSDP2Settings()
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    stage = int(name.removeprefix("zero"))
    return ZeROSettings(
        deepspeed_config={"zero_optimization": {"stage": stage, **dict.fromkeys(sizes, "auto")}}
    )


def build_cell_engine(
    cell: Cell, checkpoint: Path, folder: Path, layout: Layout, device: torch.device, decayed: set[str]
) -> Engine:
    """Load, patch and wrap the model as training does."""
    settings = engine_settings(cell.engine)
    quantization = None
    if cell.adapter in QUANTIZATIONS:
        quantization = Quantization(QUANTIZATIONS[cell.adapter], compute_dtype=torch.float32)
    model = load_model(
        checkpoint,
        load_model_config(checkpoint),
        settings=settings,
        dtype=torch.float32,
        attn_implementation=interface.interface_name("auto"),
        tp_size=layout.tp_size,
        quantization=quantization,
    )
    if cell.adapter != "full":
        model = add_lora(
            model,
            r=LORA["r"],
            alpha=LORA["lora_alpha"],
            dropout=LORA["lora_dropout"],
            target_modules=LORA["target_modules"],
            modules_to_save=None,
            seed=0,
        )
        set_parameters(model, torch.load(folder / "adapter_state.pt", weights_only=True))
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)
    model.train()
    return build_engine(
        settings,
        model,
        lambda parameters: make_optimizer(parameters, decayed),
        layout,
        device,
        checkpoint_folder=checkpoint,
        gradient_accumulation_steps=GRADIENT_ACCUMULATION_STEPS,
        max_grad_norm=MAX_GRAD_NORM,
    )


def make_stream(documents: Sequence[Document], batching: str) -> TokenStream:
    """A rank's micro-batch by one of the two ways that training has."""
    samples = [Sample(document.tokens, document.labels) for document in documents]
    return build_stream(samples) if batching == "packed" else unpad_batch(pad_batch(samples, pad_token_id=0))


def _step_and_compare(
    engine: Engine,
    streams: Sequence[TokenStream],
    layout: Layout,
    expected: dict[str, Any],
    before: dict[str, Tensor],
) -> Errors:
    """The step that training makes, with a look at the gradients between backward and update."""
    gradient_errors: dict[str, float] = {}
    step = engine.step

    def compare_and_step(max_grad_norm: float | None) -> float:
        gradient_errors.update(compare_gradients(engine.gradients(), expected["gradients"]))
        return step(max_grad_norm)

    engine.step = compare_and_step  # type: ignore[method-assign]
    try:
        result = train_step(engine, streams, layout, MAX_GRAD_NORM)
    finally:
        engine.step = step  # type: ignore[method-assign]
    parameter_errors = compare_parameters(engine.parameters(), expected["parameters"], before)
    worst_gradient, gradient = worst_of(gradient_errors)
    worst_parameter, parameter = worst_of(parameter_errors)
    return Errors(
        loss=relative(result.loss, expected["loss"]),
        grad_norm=relative(result.grad_norm, expected["grad_norm"]),
        gradient=gradient,
        parameter=parameter,
        worst=worst_gradient if gradient >= parameter else worst_parameter,
    )
