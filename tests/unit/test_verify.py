"""The parts of `hfpar verify` that need no processes."""

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from hfpar.attention.placement import place
from hfpar.errors import ConfigError, HfparError
from hfpar.models.load import load_model_config
from hfpar.verify import extensions, report, run
from hfpar.verify.cells import Cell, Errors, Result, layout_refusal, layout_sizes, make_cells
from hfpar.verify.compare import compare_gradients, compare_parameters, relative, worst_of
from hfpar.verify.documents import IGNORE_INDEX, count_labels, deal, make_windows
from hfpar.verify.processes import WorkerError
from hfpar.verify.reference import build_checkpoint
from hfpar.verify.worker import make_stream

CELL = Cell("ddp", "dp2", "full", "packed")


def test_cells_are_every_combination_layout_by_layout():
    cells = make_cells("ddp,fsdp2", "dp2,dp4", "full", "padded,packed")
    assert len(cells) == 8
    assert [cell.layout for cell in cells] == ["dp2"] * 4 + ["dp4"] * 4
    assert [cell.world_size for cell in cells[::4]] == [2, 4]
    assert make_cells("ddp, ddp ,", "dp2", "full", "packed") == [CELL]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dpp", "dp2", "full", "packed"), r"--engines: dpp; allowed: ddp, zero1, .*; did you mean ddp\?"),
        (("ddp", "dp2", "dora", "packed"), r"--adapters: dora; allowed: full, lora, qlora"),
        (("ddp", "dp2", "full", "packing"), r"--batching: packing; allowed: padded, packed"),
        (
            ("ddp", "dp0", "full", "packed"),
            r"--layouts: dp0 is no layout; allowed: dp, cp, sp and tp, each with",
        ),
        (("ddp", "sp2cp", "full", "packed"), r"--layouts: sp2cp is no layout"),
        (("ddp", "dp2dp2", "full", "packed"), r"--layouts: dp2dp2 is no layout"),
        (("ddp", "2", "full", "packed"), r"--layouts: 2 is no layout"),
        (("", "dp2", "full", "packed"), r"--engines: names nothing; allowed: ddp"),
        (("ddp", ",", "full", "packed"), r"--layouts: names nothing; allowed: dp2"),
    ],
)
def test_a_name_that_does_not_exist(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_cells(*arguments)


@pytest.mark.parametrize(("layout", "axis"), [("pp2", "pp_size 2"), ("dp2pp4", "pp_size 4")])
def test_layouts_to_come_are_refused_with_the_reason(layout, axis):
    assert layout_refusal(layout).startswith(axis)


@pytest.mark.parametrize(
    ("layout", "processes"), [("dp4", 4), ("sp2", 2), ("cp2dp3", 6), ("sp2cp2", 4), ("dp2cp2sp2tp2", 16)]
)
def test_layouts_are_products_in_any_order(layout, processes):
    assert layout_refusal(layout) is None
    assert Cell("ddp", layout, "full", "packed").world_size == processes


def test_errors_merge_to_the_worse():
    a = Errors(loss=1e-6, grad_norm=0.0, gradient=1e-3, parameter=0.0, worst="a")
    b = Errors(loss=0.0, grad_norm=1e-7, gradient=0.0, parameter=1e-2, worst="b")
    merged = a.merge(b)
    assert merged == b.merge(a) == Errors(1e-6, 1e-7, 1e-3, 1e-2, "b")
    assert merged.largest == 1e-2
    assert Errors().merge(a) == a


# What a tensor's error is measured against


def test_gradients_are_compared_relative_to_the_reference():
    reference = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([30.0])}
    errors = compare_gradients({"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([30.0])}.items(), reference)
    assert errors == pytest.approx({"a": 0.1, "b": 0.0})
    assert worst_of(errors) == ("a", pytest.approx(0.1))


def test_rounding_of_a_zero_gradient_is_measured_against_the_typical_one():
    reference = {"w": torch.full((100,), 1.0), "zero": torch.full((100,), 1e-9)}
    errors = compare_gradients([("w", reference["w"]), ("zero", torch.full((100,), -1e-9))], reference)
    assert 0 < errors["zero"] < 1e-6
    # ... but a gradient that ought to be zero and isn't is found
    errors = compare_gradients([("w", reference["w"]), ("zero", torch.full((100,), 1e-4))], reference)
    assert errors["zero"] > 1e-3


def test_parameters_are_compared_relative_to_how_far_they_moved():
    before, after = {"a": torch.tensor([1.0])}, {"a": torch.tensor([1.1])}
    assert compare_parameters([("a", torch.tensor([1.11]))], after, before)["a"] == pytest.approx(
        0.1, rel=1e-3
    )
    # one that didn't move: a twentieth of itself
    assert compare_parameters([("a", torch.tensor([1.01]))], before, before)["a"] == pytest.approx(
        0.2, rel=1e-3
    )


@pytest.mark.parametrize(
    "gradients",
    [
        {},
        {"a": torch.ones(2), "b": torch.ones(1)},
        {"a": torch.ones(1)},
        {"a": torch.tensor([1.0, math.nan])},
        {"a": torch.tensor([1.0, math.inf])},
    ],
    ids=["missing", "too many", "other shape", "nan", "inf"],
)
def test_what_cannot_be_compared_is_infinitely_wrong(gradients):
    _, error = worst_of(compare_gradients(gradients.items(), {"a": torch.ones(2)}))
    assert error == math.inf


def test_relative():
    assert relative(1.1, 1.0) == pytest.approx(0.1)
    assert relative(math.nan, 1.0) == math.inf


# The documents


@pytest.mark.parametrize("dp_size", [1, 2, 3, 4])
def test_every_document_is_dealt_once(dp_size):
    windows = make_windows(64)
    dealt = deal(windows, dp_size)
    for documents, window in zip(windows, dealt, strict=True):
        handed = [document.tokens for ranks in window for rank in ranks for document in rank]
        assert sorted(handed) == sorted(document.tokens for document in documents)
        assert all(len(ranks) == dp_size for ranks in window)
    assert [len(window) for window in dealt] == [2, 1]


def test_the_documents_are_as_uneven_as_they_come():
    windows = make_windows(64)
    whole = windows[0]
    assert 1 in [len(document.tokens) for document in whole]
    assert [] in [[x for x in document.labels if x != IGNORE_INDEX] for document in whole]
    window = deal(windows, 2)[0]
    per_rank = [sum(count_labels(ranks[rank]) for ranks in window) for rank in (0, 1)]
    assert per_rank[0] > 4 * per_rank[1] > 0
    assert deal(windows, 2)[1][0][1] == []  # in the last window, a rank without anything


def slices(layout):
    """What each rank holds of each stream: (documents, index, shifted labels), index into the padded stream."""
    sizes = layout_sizes(layout)
    cp_size, sp_size = sizes.get("cp", 1), sizes.get("sp", 1)
    for window in deal(make_windows(64), sizes.get("dp", 1)):
        for documents in itertools.chain.from_iterable(window):
            stream = make_stream(documents, "packed")
            lengths = stream.cu_seqlens.diff().tolist()
            placement = place(lengths, cp_size, sp_size)
            padding = sum(placement.lengths) - stream.num_tokens
            labels = torch.cat([stream.labels[0], torch.full((padding,), IGNORE_INDEX)])
            for cp_rank in range(cp_size):
                ranges = placement.ranges(cp_rank)
                held = torch.cat([torch.arange(start, stop) for start, stop in ranges])
                for index in held.chunk(sp_size):
                    yield documents, index, labels[index]


@pytest.mark.parametrize("layout", ["sp2", "sp4", "cp2", "cp4", "sp2cp2", "dp2sp2", "dp2cp2"])
def test_the_documents_are_cut_wherever_it_hurts(layout):
    shards = [(documents, index.tolist(), labels.tolist()) for documents, index, labels in slices(layout)]
    starts = mid_document = padded = 0
    for documents, index, _ in shards:
        firsts = [0, *itertools.accumulate(len(document.tokens) for document in documents)][:-1]
        real = sum(len(document.tokens) for document in documents)
        starts += any(token in firsts for token in index[1:])
        mid_document += index[0] < real and index[0] not in firsts
        padded += any(token >= real for token in index)
    assert starts >= 4, "documents that start mid-slice"
    assert mid_document >= 3, "slices that start mid-document"
    assert padded >= 1, "a rank with padding"
    if layout not in ("sp2", "cp2"):
        unlabelled = [labels for _, _, labels in shards if set(labels) == {IGNORE_INDEX}]
        assert unlabelled, "a slice without a label"
    if layout.startswith("dp2"):
        assert any(not documents for documents, _, _ in shards), "a stand-in stream, cut"


# What the processes are told


def test_processes_are_grouped_by_number_and_the_copy_has_heads_for_all_layouts(tmp_path, monkeypatch):
    started = []

    def run_processes(function, world_size, arguments, **options):
        started.append((world_size, arguments))

    monkeypatch.setattr(run, "run_processes", run_processes)
    cells = make_cells("ddp", "sp4,dp2,cp2,pp2,cp2sp2", "full", "packed")
    with pytest.raises(HfparError, match="no result for ddp dp2 full packed, ddp cp2 full packed"):
        run.verify(cells, tmp_path, device="cpu")
    assert started[0] == (1, (None, ["full"], 4, [1], tmp_path))
    assert started[1] == (2, ([(1, cells[1]), (2, cells[2])], tmp_path))


def test_the_copy_keeps_enough_heads(tmp_path):
    config = Qwen2Config(hidden_size=64, num_attention_heads=8, num_key_value_heads=8)
    build_checkpoint(config, tmp_path, fewest_heads=6)
    assert load_model_config(tmp_path).num_attention_heads >= 6


# DeepSpeed's op


@pytest.fixture
def built_op(tmp_path, monkeypatch):
    """A finished build in torch's cache."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "cache" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    (folder / "deepspeed_shm_comm.so").write_bytes(b"so")
    return folder


@pytest.fixture
def builds(monkeypatch):
    """Stands in for the process that compiles, and keeps the time limits that it was given."""
    calls = []
    monkeypatch.setattr(extensions, "run_processes", lambda *args, timeout, **kwargs: calls.append(timeout))
    return calls


def test_a_finished_build_is_copied_not_shared(tmp_path, built_op, builds):
    environment, refusal = extensions.prepare_extensions(tmp_path)
    assert refusal is None and builds == []
    own = Path(environment["TORCH_EXTENSIONS_DIR"])
    assert own != built_op.parent
    assert (own / "deepspeed_shm_comm" / "deepspeed_shm_comm.so").read_bytes() == b"so"


def test_a_lock_that_was_left_behind_is_not_waited_for(tmp_path, built_op, builds):
    (built_op / "lock").touch()
    environment, _ = extensions.prepare_extensions(tmp_path)
    assert builds == [extensions.SECONDS_TO_BUILD]
    assert not list(Path(environment["TORCH_EXTENSIONS_DIR"]).iterdir())


def test_a_failed_build_is_a_refusal(tmp_path, built_op, monkeypatch):
    def fail(*args, **kwargs):
        raise WorkerError("rank 0: RuntimeError: ninja isn't installed")

    (built_op / "deepspeed_shm_comm.so").unlink()
    monkeypatch.setattr(extensions, "run_processes", fail)
    _, refusal = extensions.prepare_extensions(tmp_path)
    assert refusal.startswith("DeepSpeed can't build its CPU op") and "ninja isn't installed" in refusal


# The report


def test_json_is_as_documented(tmp_path):
    errors = Errors(1e-7, 2e-7, 3e-7, 4e-7, "w")
    results = [
        Result(CELL, "pass", errors),
        Result(CELL, "refused", reason="no"),
        Result(CELL, "fail", Errors(gradient=math.inf, worst="w"), reason="off"),
    ]
    report.write_json(results, tmp_path / "out.json")
    rows = json.loads((tmp_path / "out.json").read_text())
    keys = {"engine", "layout", "adapter", "batching", "status", "worst", "reason"}
    assert keys | {"max_rel_grad_error", "max_rel_param_error"} <= set(rows[0])
    assert (rows[0]["max_rel_grad_error"], rows[0]["max_rel_param_error"]) == (3e-7, 4e-7)
    assert (rows[0]["worst"], rows[0]["reason"]) == ("w", None)
    assert (rows[1]["max_rel_grad_error"], rows[1]["reason"]) == (None, "no")
    assert (rows[2]["status"], rows[2]["max_rel_grad_error"]) == ("fail", None)


def test_json_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="--json: .* can't be written"):
        report.write_json([], tmp_path)


def test_a_narrow_table_says_the_reasons_underneath():
    results = [Result(CELL, "pass", Errors(gradient=2e-6, worst="w"))]
    results += [Result(CELL, "refused", reason="no"), Result(CELL, "refused", reason="no")]
    lines = report.notes(results)
    assert lines == [
        "largest error: 2.0e-06 in ddp dp2 full packed (w)",
        "refused: ddp dp2 full packed and 1 more: no",
    ]
    assert report.summary(results, 1e-5, 3.2) == "1 of 3 equal one process within 1e-05, 2 refused (3 s)"
