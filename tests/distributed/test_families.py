"""Every family of models in every layout of ranks that share streams or layers, against one plain process.

One run of four processes goes through all of it. By default the families that most people train take all layouts and
the check before a run; the others take one layout of each kind. With HFPAR_WRITE_DOCS=1 all take all,
and docs/families.md is written anew from what they gave.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hfpar.attention import blocks, interface, ring, sharded, ulysses
from hfpar.attention.placement import place
from hfpar.attention.varlen import Scores
from hfpar.config.engine import DDPSettings
from hfpar.data.stream import IGNORE_INDEX, Sample, TokenStream, build_stream
from hfpar.errors import ConfigError
from hfpar.models.adapters import add_lora
from hfpar.models.cuts import cuts_of
from hfpar.models.load import load_model, load_model_config
from hfpar.models.shrink import SLIDING_WINDOW
from hfpar.parallel import sequence, tensor
from hfpar.parallel.collectives import gather_whole
from hfpar.parallel.layout import Layout
from hfpar.train import loss
from hfpar.train.probe import check_family
from hfpar.train.step import model_inputs
from hfpar.verify.compare import compare_gradients, norm, relative, worst_of
from hfpar.verify.documents import Document, count_labels
from hfpar.verify.processes import Worker
from hfpar.verify.reference import (
    LORA,
    accumulate_gradients,
    build_checkpoint,
    draw_adapter_state,
    gradients_of,
    load_plain,
    set_parameters,
)
from tests import family_table  # noqa: TID251
from tests.distributed.spawn import spawn  # noqa: TID251
from tests.families import EVERYDAY, FAMILIES, REFUSED, STATEFUL  # noqa: TID251
from tests.family_table import COLUMNS, Cell  # noqa: TID251

pytestmark = [
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="the server of processes loads DeepSpeed"),
    pytest.mark.timeout(1800),
]

EVERYTHING = os.environ.get("HFPAR_WRITE_DOCS") == "1"
BOTH = "cp 2 x sp 2"
TENSOR = "tp 2"
WITH_ATTENTION_DROPOUT = ("biogpt", "gpt_bigcode", "seed_oss")
"""Refused in rings, and under tensor parallelism for this or another reason."""
ONLY_THE_PROBE_SEES = ("codegen", "gemma3n")
"""Families whose plan says too little: rows in another order, a quantile over all features of a layer."""
WORLD_SIZE = 4
TOLERANCE = 1e-5
CPU = torch.device("cpu")
ALONE = Layout(rank=0, world_size=1)

LENGTHS = (61, 47, 3, 17, 1, 2, 9, 5)
"""Of two groups, the first has the odd ones; each has one document that every ring cuts."""


@dataclass(frozen=True)
class Errors:
    """How far a step is from the plain one; relative."""

    loss: float
    grad_norm: float
    gradient: float
    worst: str | None

    @property
    def largest(self) -> float:
        return max(self.loss, self.grad_norm, self.gradient)


@dataclass(frozen=True)
class Reference:
    """What one plain process gave."""

    loss: float
    gradients: dict[str, torch.Tensor]


def make_documents(vocab_size: int) -> list[Document]:
    """Of the global batch; every second one has few labels, one has none."""
    rng = random.Random(0)
    documents = []
    for index, length in enumerate(LENGTHS):
        tokens = [rng.randrange(vocab_size) for _ in range(length)]
        prompt = length if index == 3 else max(length - 2, 0) if index % 2 else length // 4
        documents.append(Document(tokens, [IGNORE_INDEX] * prompt + tokens[prompt:]))
    return documents


def stream_of(documents: Sequence[Document], layout: Layout) -> TokenStream:
    mine = documents[layout.dp_rank :: layout.dp_size]
    return build_stream([Sample(document.tokens, document.labels) for document in mine])


# In the processes


class Run:
    """What a process does; each family's checkpoint and reference are one process's to make, and to compare with."""

    def __init__(self, worker: Worker, folder: Path) -> None:
        self.worker, self.folder = worker, folder
        self.layouts = {
            title: Layout(rank=worker.rank, world_size=worker.world_size, **sizes)
            for title, sizes in COLUMNS.items()
        }
        self.references: dict[str, Reference] = {}

    def owner(self, family: str) -> int:
        return list(FAMILIES).index(family) % self.worker.world_size

    def prepare(self) -> dict[str, dict[str, str | None]]:
        """Checkpoints and references; returns what is said of families that are refused, of this process's share."""
        refusals: dict[str, dict[str, str | None]] = {}
        if self.worker.rank == 0:  # Transformers writes a checkpoint on the first rank alone
            for name, family in FAMILIES.items():
                build_checkpoint(
                    family.config(), self.folder / name, fewest_heads=WORLD_SIZE, tp_sizes=[2, WORLD_SIZE]
                )
        else:
            for name in list(REFUSED)[self.worker.rank - 1 :: self.worker.world_size - 1]:
                refusals[name] = refusals_of(name)
        dist.barrier()
        for name in FAMILIES:
            if self.owner(name) == self.worker.rank:
                self.references[name] = self.plain(name, None)
        dist.barrier()
        self.worker.send("prepared")
        return refusals

    def plain(self, family: str, adapter_state: Any) -> Reference:
        model = load_plain(self.folder / family, adapter_state)
        mean = accumulate_gradients(model, self.documents(family), CPU)
        return Reference(mean, gradients_of(model))

    def documents(self, family: str) -> list[Document]:
        return make_documents(load_model_config(self.folder / family).vocab_size)

    def model(self, family: str, dtype: torch.dtype = torch.float32) -> Any:
        folder = self.folder / family
        name = interface.interface_name("auto")
        model = load_model(
            folder,
            load_model_config(folder),
            settings=DDPSettings(),
            dtype=dtype,
            attn_implementation=name,
        )
        return model.train()

    def errors(self, family: str, model: Any, layout: Layout, reference: Reference | None) -> Errors | None:
        """Of one step; None where another process compares. All together, unless the layout is one process."""
        documents = self.documents(family)
        patch = sequence.apply(model, layout)
        if layout.tp_size > 1:
            tensor.apply(model, layout)
            loss.install(model)
        try:
            shard = sequence.shard_stream(stream_of(documents, layout), layout)
            mean = model(**model_inputs(shard, CPU)) / count_labels(documents)
            mean.backward()
        finally:
            patch.undo()
        cuts = cuts_of(model)
        gradients = {
            name: gather_whole(gradient, cuts[name], layout.tp_group, CPU) if name in cuts else gradient
            for name, gradient in gradients_of(model).items()
        }
        model.zero_grad()
        sums = torch.cat([mean.detach().view(1), *(gradient.flatten() for gradient in gradients.values())])
        if layout.world_size > 1:
            dist.reduce(sums, self.owner(family))
            sums /= layout.tp_size  # all of whose ranks have it
        if reference is None:
            return None
        parts = sums[1:].split([gradient.numel() for gradient in gradients.values()])
        summed = {
            name: part.view_as(gradient)
            for (name, gradient), part in zip(gradients.items(), parts, strict=True)
        }
        worst, gradient_error = worst_of(compare_gradients(summed.items(), reference.gradients))
        grad_norm, expected_norm = (
            float(norm(torch.stack([norm(g) for g in of.values()]))) for of in (summed, reference.gradients)
        )
        return Errors(
            relative(float(sums[0]), reference.loss),
            relative(grad_norm, expected_norm),
            gradient_error,
            worst,
        )

    def family(self, family: str) -> dict[str, Any]:
        """[column] -> the message of a refusal, or errors (None: another process compares)."""
        config = FAMILIES[family].config()
        model, results = None, {}
        for column in columns_of(family):
            layout = self.layouts[column]
            probe = EVERYTHING or (family in EVERYDAY and column in (BOTH, TENSOR))
            results[column] = refusal(config, layout, probe=probe or family in ONLY_THE_PROBE_SEES)
            if results[column] is None:
                if layout.tp_size == 1:
                    model = model or installed(self.model(family))
                mine = model if layout.tp_size == 1 else self.model(family)
                results[column] = self.errors(family, mine, layout, self.references.get(family))
        return results

    # Beside the families

    def lora(self, family: str) -> Errors | None:
        draw = draw_adapter_state(self.folder / family)
        reference = self.plain(family, draw) if self.owner(family) == self.worker.rank else None
        model = add_lora(
            self.model(family),
            r=LORA["r"],
            alpha=LORA["lora_alpha"],
            dropout=LORA["lora_dropout"],
            target_modules=LORA["target_modules"],
            modules_to_save=None,
            seed=0,
        )
        set_parameters(model, draw)
        return self.errors(family, installed(model), self.layouts[BOTH], reference)

    def checkpointing(self, family: str) -> Errors | None:
        model = self.model(family)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return self.errors(family, installed(model), self.layouts[BOTH], self.references.get(family))

    def bf16(self, family: str) -> tuple[Errors | None, Errors | None]:
        """Shared, and in one process."""
        model, reference = installed(self.model(family, torch.bfloat16)), self.references.get(family)
        return (
            self.errors(family, model, self.layouts[BOTH], reference),
            self.errors(family, model, ALONE, reference),
        )

    def broken(self, sabotage: Callable[[pytest.MonkeyPatch, int], None]) -> Errors | None:
        family, column = SABOTAGES[sabotage]
        with pytest.MonkeyPatch.context() as patch:
            sabotage(patch, self.worker.rank)
            model = installed(self.model(family))
            return self.errors(family, model, self.layouts[column], self.references.get(family))


def installed(model: Any) -> Any:
    loss.install(model)
    return model


def columns_of(family: str) -> list[str]:
    if EVERYTHING or family in EVERYDAY:
        return list(COLUMNS)
    return ["sp 2", BOTH, TENSOR] if family in WITH_ATTENTION_DROPOUT else [BOTH, TENSOR]


def refusal(config: Any, layout: Layout, *, probe: bool) -> str | None:
    """As a run decides before weights load; without the probe only by the config."""
    try:
        if probe:
            check_family(config, layout=layout)
        else:
            sequence.check_sequence(config, layout)
            tensor.check_tensor(config, layout)
    except ConfigError as error:
        return str(error)
    return None


def refusals_of(name: str) -> dict[str, str | None]:
    """In each column of the table of refusals; of families with a state by default only what needs no model."""
    alone, sharing = family_table.REFUSAL_COLUMNS
    config = REFUSED[name].config()
    reasons = {}
    if EVERYTHING or name not in STATEFUL:
        reasons[alone] = refusal(config, ALONE, probe=True)
    shared = Layout(rank=0, world_size=WORLD_SIZE, **COLUMNS[BOTH])
    reasons[sharing] = refusal(config, shared, probe=False) or reasons.get(alone)
    return reasons


def run(worker: Worker, folder: Path) -> dict[str, dict[str, Any]]:
    interface.register()
    here = Run(worker, folder)
    results: dict[str, dict[str, Any]] = {"refused": here.prepare(), "families": {}}
    for family in FAMILIES:
        with named(family):
            results["families"][family] = here.family(family)
        worker.send(family)
    results["lora"] = {family: here.lora(family) for family in LORA_FAMILIES}
    results["checkpointing"] = {family: here.checkpointing(family) for family in CHECKPOINTED_FAMILIES}
    results["bf16"] = {family: here.bf16(family) for family in BF16_FAMILIES}
    results["broken"] = {sabotage.__name__: here.broken(sabotage) for sabotage in SABOTAGES}
    return results


@contextmanager
def named(family: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise AssertionError(f"{family}: {type(error).__name__}: {error}") from error


# Deliberate errors, each in the family that has the feature.


def change_scores(patch: pytest.MonkeyPatch, change: Callable[[Scores], Scores]) -> None:
    """Of what a rank computes; the reference keeps them."""
    attend = sharded._attend

    def changed(
        query: Any, key: Any, value: Any, sharding: Any, cu_seqlens: Any, scores: Any, *rest: Any
    ) -> Any:
        return attend(query, key, value, sharding, cu_seqlens, change(scores), *rest)

    patch.setattr(sharded, "_attend", changed)


def take_the_next_heads_sinks(patch: pytest.MonkeyPatch, rank: int) -> None:
    change_scores(patch, lambda scores: replace(scores, sinks=scores.sinks.roll(1)))


def forget_the_window(patch: pytest.MonkeyPatch, rank: int) -> None:
    change_scores(patch, lambda scores: replace(scores, sliding_window=None))


def forget_the_cap(patch: pytest.MonkeyPatch, rank: int) -> None:
    change_scores(patch, lambda scores: replace(scores, softcap=None))


def deal_kv_heads_in_turn(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Head h uses h % n, not h // group."""

    def in_turn(self: Any, sp_rank: int) -> list[int]:
        (first, last), (first_kv, last_kv) = self.query[sp_rank], self.kv[sp_rank]
        return [head % (last_kv - first_kv) for head in range(last - first)]

    patch.setattr(ulysses.HeadSplit, "kv_of_query", in_turn)


def merge_by_the_mean(patch: pytest.MonkeyPatch, rank: int) -> None:
    merge = blocks.merge

    def mean(out: Any, lse: Any, part_out: Any, part_lse: Any) -> None:
        merge(out, lse, part_out, torch.where(lse.isinf(), part_lse, lse))

    patch.setattr(blocks, "merge", mean)


def mix_up_what_travels(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Keys and values travel as one; the value begins where the key ends."""
    wait = ring._Visit.wait

    def shifted(self: Any) -> Any:
        key, value = wait(self)
        return key, value.roll(1, -1)

    patch.setattr(ring._Visit, "wait", shifted)


SABOTAGES: dict[Callable[[pytest.MonkeyPatch, int], None], tuple[str, str]] = {
    take_the_next_heads_sinks: ("gpt_oss", "sp 2"),
    forget_the_window: ("mistral", "cp 2"),
    forget_the_cap: ("gemma2", "cp 2"),
    deal_kv_heads_in_turn: ("smollm2", "sp 2"),
    merge_by_the_mean: ("llama", "cp 2"),
    mix_up_what_travels: ("deepseek_v3", "cp 2"),
}
LORA_FAMILIES = ("qwen2", "gpt_oss", "deepseek_v3")
CHECKPOINTED_FAMILIES = ("gemma2", "qwen3_moe")
BF16_FAMILIES = ("qwen3",)


# Here


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Of all processes; where several have one, that of the process that compared."""
    folder = tmp_path_factory.mktemp("families")
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in spawn(run, WORLD_SIZE, folder, folder):
        for kind, values in of_rank.items():
            for name, value in values.items():
                merged.setdefault(kind, {}).setdefault(name, value)
                if kind == "families" and any(isinstance(cell, Errors) for cell in value.values()):
                    merged[kind][name] = value
                elif kind in ("lora", "checkpointing", "broken") and value is not None:
                    merged[kind][name] = value
                elif kind == "bf16" and value[0] is not None:
                    merged[kind][name] = value
    return merged


@pytest.mark.parametrize("column", COLUMNS)
def test_documents_are_cut_and_begin_in_the_middle(column: str) -> None:
    sizes = {"cp_size": 1, "sp_size": 1, "tp_size": 1, **COLUMNS[column]}
    dp_size = WORLD_SIZE // (sizes["cp_size"] * sizes["sp_size"] * sizes["tp_size"])
    for dp_rank in range(dp_size):
        lengths = LENGTHS[dp_rank::dp_size]
        placement = place(lengths, sizes["cp_size"], sizes["sp_size"])
        assert max(lengths) > 2 * SLIDING_WINDOW * sizes["cp_size"]  # pieces are longer than the window
        for held in placement.pieces:
            whole = [piece for piece in held if piece.position == 0 and piece.document < len(lengths)]
            assert sizes["cp_size"] == 1 or len(whole) < len(held)  # every rank has a part of a cut document
        starts = {piece.start for held in placement.pieces for piece in held}
        slice_size = placement.tokens_per_rank // sizes["sp_size"]
        assert sizes["sp_size"] == 1 or any(start % slice_size for start in starts)


@pytest.mark.parametrize("family", FAMILIES)
def test_equals_one_process(results: dict[str, Any], family: str) -> None:
    cells = results["families"][family]
    assert list(cells) == columns_of(family)
    for column, cell in cells.items():
        if isinstance(cell, str):
            assert cell.startswith(
                ("cp_size: ", "sp_size: ", "tp_size: ", "tp_sequence: ", "model_name_or_path: ")
            )
            assert "model_name_or_path" not in cell or EVERYTHING or family in ONLY_THE_PROBE_SEES, (
                column,
                cell,
            )
        else:
            assert 0 < cell.largest < TOLERANCE, (column, cell)
    assert any(isinstance(cell, Errors) for cell in cells.values())


@pytest.mark.parametrize("family", REFUSED)
def test_is_refused_by_name(results: dict[str, Any], family: str) -> None:
    for reason in results["refused"][family].values():
        assert reason is not None and "\n" not in reason
        names = (REFUSED[family].model_type, "Attention")
        assert any(name in reason for name in names), reason


@pytest.mark.parametrize("family", STATEFUL)
def test_a_family_with_a_state_is_refused_by_its_config_alone(family: str) -> None:
    """Whatever keeps packed documents apart on some device: a slice would lack the state of the one before."""
    for sizes in COLUMNS.values():
        layout = Layout(rank=0, world_size=WORLD_SIZE, **sizes)
        if layout.sequence_size == 1:
            continue
        reason = refusal(REFUSED[family].config(), layout, probe=False)
        assert reason is not None
        assert "has layers of type" in reason or "has no attention heads" in reason


@pytest.mark.parametrize("family", LORA_FAMILIES)
def test_adapters(results: dict[str, Any], family: str) -> None:
    assert 0 < results["lora"][family].largest < TOLERANCE


@pytest.mark.parametrize("family", CHECKPOINTED_FAMILIES)
def test_activation_checkpointing(results: dict[str, Any], family: str) -> None:
    assert 0 < results["checkpointing"][family].largest < TOLERANCE


@pytest.mark.parametrize("family", BF16_FAMILIES)
def test_bf16_is_as_near_as_one_process_is(results: dict[str, Any], family: str) -> None:
    """Against fp32. bf16 rounds at 2**-9 wherever a value is stored; ranks that share may add nothing to that."""
    shared, alone = results["bf16"][family]
    assert 1e-3 < alone.gradient < 0.1
    assert shared.gradient < 1.5 * alone.gradient
    assert shared.loss < 2**-8


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda function: function.__name__)
def test_a_deliberate_error_is_seen(results: dict[str, Any], sabotage: Callable[..., None]) -> None:
    assert results["broken"][sabotage.__name__].gradient > 100 * TOLERANCE


def test_the_table_in_the_docs_is_what_the_run_gave(results: dict[str, Any]) -> None:
    cells: dict[str, dict[str, Cell]] = {}
    for name, of_columns in results["families"].items():
        cells[name] = {
            column: Cell(refusal=cell) if isinstance(cell, str) else Cell(error=cell.gradient)
            for column, cell in of_columns.items()
        }
    for name, reasons in results["refused"].items():
        cells[name] = {column: Cell(refusal=reason) for column, reason in reasons.items()}
    if EVERYTHING:
        family_table.DOCS.write_text(family_table.render(cells), encoding="utf-8")
    written = family_table.read(family_table.DOCS.read_text(encoding="utf-8"))
    known = FAMILIES | REFUSED
    assert list(written) == [family.title for family in known.values()], family_table.REWRITE
    for name, of_columns in cells.items():
        row = written[known[name].title]
        assert row["What is special"] == known[name].special, family_table.REWRITE
        for column, text in family_table.row(name, of_columns).items():
            assert row[column] == family_table.verdict(text), (name, column, family_table.REWRITE)
