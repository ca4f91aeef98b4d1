"""Every engine and layout against one plain process; and each deliberate error makes a cell fail."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from hfpar.attention import interface, ring, sharded, ulysses
from hfpar.data.stream import shift_labels
from hfpar.engine import clip
from hfpar.engine.ddp import DDPEngine
from hfpar.parallel.layout import Layout
from hfpar.train import step
from hfpar.verify import worker as verify_worker
from hfpar.verify.cells import BATCHINGS, DEFAULT_ADAPTERS, ENGINES, Cell, make_cells
from hfpar.verify.processes import Worker
from hfpar.verify.run import verify

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """Qwen2: biases, and nothing else that the tiny Qwen3 has not; 4 layers of it, tied."""
    folder = tmp_path_factory.mktemp("model")
    Qwen2Config(
        hidden_size=896, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True
    ).save_pretrained(folder)
    return str(folder)


def run(cells: list[Cell], folder: Path, model: str | None, **options) -> list:
    return verify(cells, folder, model_name_or_path=model, device="cpu", **options)


def assert_pass(cells: list[Cell], folder: Path, model: str | None) -> None:
    results = run(cells, folder, model)
    assert [result.cell for result in results] == cells
    for result in results:
        assert result.status == "pass", (result.cell, result.reason, result.errors, result.details)
        assert 0 < result.errors.gradient < 1e-5


def test_every_engine_adapter_and_batching(tmp_path, model):
    """With packed streams on both kinds of sequence parallelism, too: these come after the batching."""
    engines, adapters = ",".join(ENGINES), DEFAULT_ADAPTERS
    cells = make_cells(engines, "dp2", adapters, ",".join(BATCHINGS))
    cells += make_cells(engines, "sp2,cp2", adapters, "packed")
    assert len(cells) == 40
    assert_pass(cells, tmp_path, model)


def test_a_quantized_base(tmp_path):
    """Against plain PEFT and bitsandbytes; tensor parallelism quantizes parts, and has the numbers of the whole.

    On the built-in model: of the 14 heads above, blocks make a copy so wide (896) that rounding alone comes to 1e-5 of
    the smallest gradients.
    """
    cells = make_cells(",".join(ENGINES), "dp2,sp2,cp2,tp2", "qlora", "packed")
    cells += make_cells("zero3,fsdp2", "dp2,tp2", "qlora", "padded")
    cells += make_cells("ddp,fsdp2", "tp2sp2", "qlora", "packed")
    assert len(cells) == 26
    assert_pass(cells, tmp_path, None)


def test_three_ranks(tmp_path, model):
    """An odd number: nothing divides evenly, not even the 14 heads."""
    cells = make_cells("ddp,zero3,fsdp2", "dp3", "full", "packed")
    assert_pass([*cells, *make_cells("ddp", "sp3,cp3", "full", "packed")], tmp_path, model)


def test_four_ranks(tmp_path, model):
    """Larger groups, and products of them, on every engine."""
    layouts = {
        "sp2cp2": ("zero3", "fsdp2"),
        "sp4": ("zero2", "ddp"),
        "cp4": ("fsdp2", "zero1"),
        "dp2sp2": ("ddp", "zero1"),
        "cp2dp2": ("zero2", "ddp"),
    }
    cells = [
        Cell(engine, layout, adapter, batching)
        for layout, engines in layouts.items()
        for engine, adapter, batching in zip(engines, ("full", "lora"), BATCHINGS, strict=True)
    ]
    assert_pass(cells, tmp_path, model)


# Deliberate errors, each put into the processes around one cell.


def scale_one_ranks_loss(patch, rank):
    forward = DDPEngine.forward
    factor = 1.001 if rank == 1 else 1.0
    patch.setattr(DDPEngine, "forward", lambda self, **inputs: forward(self, **inputs) * factor)


def average_without_the_group_size(patch, rank):
    patch.setattr(Layout, "batch_size", property(lambda self: 1))


def count_only_own_labels(patch, rank):
    def own_counts(streams, layout, device):
        return step.Counts(1, max(sum(stream.num_label_tokens for stream in streams), 1))

    patch.setattr(step, "global_counts", own_counts)


def drop_one_gradient_reduction(patch, rank):
    """The first parameter keeps the gradient that this rank alone has computed."""
    backward = DDPEngine.backward

    def backward_then_restore(self, loss, *, last_micro_batch):
        parameter = next(p for p in self.module.parameters() if p.requires_grad)
        before = None if parameter.grad is None else parameter.grad.clone()
        own = []
        handle = parameter.register_hook(lambda gradient: own.append(gradient.clone()))
        backward(self, loss, last_micro_batch=last_micro_batch)
        handle.remove()
        if last_micro_batch:
            parameter.grad.copy_(sum(own) if before is None else sum(own) + before)

    patch.setattr(DDPEngine, "backward", backward_then_restore)


def drop_the_norms_reduction(patch, rank):
    norm_of = clip.global_grad_norm
    patch.setattr(clip, "global_grad_norm", lambda gradients, group, *tp: norm_of(gradients, None, *tp))


def shift_labels_twice(patch, rank):
    make_stream = verify_worker.make_stream

    def shifted(documents, batching):
        stream = make_stream(documents, batching)
        return replace(stream, labels=shift_labels(stream.labels))

    patch.setattr(verify_worker, "make_stream", shifted)


def let_documents_leak(patch, rank):
    stream_arguments = interface.stream_arguments
    patch.setattr(
        interface, "stream_arguments", lambda cu_seqlens, sharding: stream_arguments(cu_seqlens[[0, -1]])
    )


def double_the_positions(patch, rank):
    make_stream = verify_worker.make_stream

    def counted(documents, batching):
        stream = make_stream(documents, batching)
        return replace(stream, position_ids=stream.position_ids * 2)

    patch.setattr(verify_worker, "make_stream", counted)


def clip_a_little_less(patch, rank):
    clip_to = clip.clip_gradients

    def looser(gradients, norm, bound):
        clip_to(gradients, norm, bound * 1.001)

    patch.setattr(clip, "clip_gradients", looser)


def let_replicas_drift(patch, rank):
    """Rank 0, the one that a lazy check looks at, is right."""
    step_ = DDPEngine.step

    def drifting(self, max_grad_norm):
        norm = step_(self, max_grad_norm)
        if rank == 1:
            next(self.module.parameters()).data.mul_(1.001)
        return norm

    patch.setattr(DDPEngine, "step", drifting)


def forget_a_parameter(patch, rank):
    gradients = DDPEngine.gradients
    patch.setattr(DDPEngine, "gradients", lambda self: list(gradients(self))[1:])


def train_the_frozen_base(patch, rank):
    add_lora = verify_worker.add_lora

    def unfrozen(model, **options):
        model = add_lora(model, **options)
        next(p for p in model.parameters() if not p.requires_grad).requires_grad_(True)
        return model

    patch.setattr(verify_worker, "add_lora", unfrozen)


# Deliberate errors in what ranks that share a stream do.


def attend_within_the_slice(patch, rank):
    """With the boundaries that the slice itself has."""
    shard_stream = step.shard_stream

    def alone(stream, layout):
        shard = shard_stream(stream, layout)
        begins = torch.cat([shard.position_ids[0] == 0, torch.tensor([True])])
        begins[0] = True
        return replace(shard, sharding=None, cu_seqlens=begins.nonzero()[:, 0].int())

    patch.setattr(step, "shard_stream", alone)


def count_positions_in_the_slice(patch, rank):
    shard_stream = step.shard_stream

    def counted(stream, layout):
        shard = shard_stream(stream, layout)
        first = shard.position_ids[0, 0]
        begin = (
            (shard.position_ids[0] == 0).long().cummax(0).values.eq(0)
        )  # the document cut by the slice's start
        return replace(shard, position_ids=shard.position_ids - first * begin)

    patch.setattr(step, "shard_stream", counted)


def shift_labels_in_the_slice(patch, rank):
    """The last token's target is on another rank."""
    shard_stream = step.shard_stream

    def shifted(stream, layout):
        shard = shard_stream(stream, layout)
        labels = shard.labels.clone()
        labels[0, -1] = -100
        return replace(shard, labels=labels, num_label_tokens=int((labels != -100).sum()))

    patch.setattr(step, "shard_stream", shifted)


def learn_the_padding(patch, rank):
    shard_stream = step.shard_stream

    def labelled(stream, layout):
        shard = shard_stream(stream, layout)
        labels = shard.labels.clone()
        labels[0, shard.num_tokens :] = 0
        return replace(shard, labels=labels, num_label_tokens=int((labels != -100).sum()))

    patch.setattr(step, "shard_stream", labelled)


def scale_by_the_sequence_group(patch, rank):
    backward = DDPEngine.backward
    patch.setattr(
        DDPEngine,
        "backward",
        lambda self, loss, *, last_micro_batch: backward(self, loss * 2, last_micro_batch=last_micro_batch),
    )


def keep_the_gradients_of_other_ranks_heads(patch, rank):
    """The backward of the first all-to-all returns only what this rank's heads contribute."""
    backward = ulysses._TokensToHeads.backward

    def own(ctx, *gradients):
        ranges, group, *whole = backward(ctx, *gradients)
        for gradient, of_ranks in zip(whole, ctx.ranges, strict=True):
            gradient[:, slice(*of_ranks[1 - rank])] = 0
        return ranges, group, *whole

    patch.setattr(ulysses._TokensToHeads, "backward", staticmethod(own))


def merge_without_log_sum_exp(patch, rank):
    """As if each set of keys had the same weight."""
    choose = sharded.choose_block_kernel

    def averaging(*options):
        kernel = choose(*options)

        def forward(query, key, value, pairs, scores, out, lse):
            before = out.clone()
            kernel.forward(query, key, value, pairs, scores, out, lse)
            if before.any():
                out.copy_((out + before) / 2)

        return replace(kernel, forward=forward)

    patch.setattr(sharded, "choose_block_kernel", averaging)


def forget_the_gradients_of_keys_that_travelled(patch, rank):
    def waited(self, grad_key, grad_value):
        for work in self.works:
            work.wait()

    patch.setattr(ring._Return, "add_to", waited)


def mix_up_the_pieces(patch, rank):
    """Keys arrive in another order than the plan says."""
    wait = ring._Visit.wait

    def reversed_keys(self):
        return tuple(states.flip(2) for states in wait(self))

    patch.setattr(ring._Visit, "wait", reversed_keys)


SABOTAGES = {
    scale_one_ranks_loss: Cell("ddp", "dp2", "full", "packed"),
    average_without_the_group_size: Cell("fsdp2", "dp2", "full", "packed"),
    count_only_own_labels: Cell("ddp", "dp2", "full", "packed"),
    drop_one_gradient_reduction: Cell("ddp", "dp2", "full", "packed"),
    drop_the_norms_reduction: Cell("fsdp2", "dp2", "full", "packed"),
    shift_labels_twice: Cell("ddp", "dp2", "full", "packed"),
    let_documents_leak: Cell("ddp", "dp2", "full", "packed"),
    double_the_positions: Cell("ddp", "dp2", "full", "padded"),
    clip_a_little_less: Cell("ddp", "dp2", "full", "packed"),
    let_replicas_drift: Cell("ddp", "dp2", "full", "packed"),
    forget_a_parameter: Cell("ddp", "dp2", "full", "packed"),
    train_the_frozen_base: Cell("ddp", "dp2", "lora", "packed"),
    attend_within_the_slice: Cell("ddp", "sp2", "full", "packed"),
    count_positions_in_the_slice: Cell("ddp", "sp2", "full", "packed"),
    shift_labels_in_the_slice: Cell("ddp", "sp2", "full", "packed"),
    learn_the_padding: Cell("ddp", "cp2", "full", "packed"),
    scale_by_the_sequence_group: Cell("ddp", "sp2", "full", "packed"),
    keep_the_gradients_of_other_ranks_heads: Cell("ddp", "sp2", "full", "packed"),
    merge_without_log_sum_exp: Cell("ddp", "cp2", "full", "packed"),
    forget_the_gradients_of_keys_that_travelled: Cell("ddp", "cp2", "full", "packed"),
    mix_up_the_pieces: Cell("ddp", "cp2", "full", "packed"),
}


def run_sabotaged(worker: Worker, cells: list, folder: Path) -> None:
    """What each process runs: the cells in order, each with its own error."""
    run_cell = verify_worker.run_cell
    sabotages = iter(SABOTAGES)

    def run_one(worker, cell, layout, folder):
        with pytest.MonkeyPatch.context() as patch:
            next(sabotages)(patch, worker.rank)
            return run_cell(worker, cell, layout, folder)

    verify_worker.run_cell = run_one
    verify_worker.run_cells(worker, cells, folder)


@pytest.fixture(scope="module")
def sabotaged(tmp_path_factory, model) -> dict:
    cells = list(SABOTAGES.values())
    results = run(cells, tmp_path_factory.mktemp("sabotaged"), model, run_cells=run_sabotaged)
    return dict(zip(SABOTAGES, results, strict=True))


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda function: function.__name__)
def test_a_deliberate_error_fails(sabotaged, sabotage):
    result = sabotaged[sabotage]
    assert result.status == "fail"
    assert result.errors is not None, result.details  # it ran, and was found wrong
    assert result.errors.largest > 1e-5
    assert "is off by" in result.reason


def crash_in_the_third_cell(worker: Worker, cells: list, folder: Path) -> None:
    original = verify_worker.run_cell

    def crashing(worker, cell, layout, folder):
        if cell.adapter == "lora" and worker.rank == 1:
            raise ZeroDivisionError("a deliberate error")
        return original(worker, cell, layout, folder)

    verify_worker.run_cell = crashing
    verify_worker.run_cells(worker, cells, folder)


def test_a_refusal_or_a_crash_costs_one_cell_and_the_others_go_on(tmp_path):
    """The shrunk copy has more heads than this model."""
    Qwen2Config(hidden_size=64, num_attention_heads=1, num_key_value_heads=1).save_pretrained(tmp_path / "m")
    cells = [Cell("ddp", "sp2", "full", "packed")]
    cells += [Cell("ddp", "dp2", adapter, "packed") for adapter in ("full", "lora")]
    cells.append(Cell("fsdp2", "cp2", "full", "packed"))
    results = run(cells, tmp_path, str(tmp_path / "m"), run_cells=crash_in_the_third_cell)
    assert [result.status for result in results] == ["refused", "pass", "fail", "pass"]
    assert results[0].reason.startswith("sp_size: 2 ranks share the model's 1 attention heads")
    assert results[2].reason == "rank 1: ZeroDivisionError: a deliberate error"
    assert "Traceback" in results[2].details
