"""A loop of one's own whose ranks share streams: loss and gradients are those of one plain process.

Every batch goes through `layout.shard` into a patched Transformers model with its own loss, as users call it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hfpar.data.stream import Sample
from hfpar.parallel import sequence
from tests.distributed.spawn import VOCAB_SIZE, make_samples, spawn  # noqa: TID251

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cases of a whole module

SIZES = {"dp4": (1, 1), "sp2": (1, 2), "sp4": (1, 4), "cp2": (2, 1), "cp4": (4, 1), "cp2sp2": (2, 2)}
"""(cp_size, sp_size) of 4 ranks; what is left is data-parallel."""
SHARED = [name for name in SIZES if name != "dp4"]
PAD = 2
"""The model's end of text, too, and an ordinary token of these documents."""


@cache
def documents_of(name: str) -> list[Sample]:
    """The documents of a global batch."""

    def random(*lengths: int) -> list[Sample]:
        rng = Random(sum(lengths))
        rows = [[*(rng.randrange(VOCAB_SIZE) for _ in range(length - 1)), PAD] for length in lengths]
        return [Sample(row, row) for row in rows]

    def labelled(samples: list[Sample], labels: dict[int, range]) -> list[Sample]:
        """Only these positions of these documents keep their labels."""
        return [
            Sample(s.input_ids, [t if n in labels.get(d, ()) else -100 for n, t in enumerate(s.input_ids)])
            for d, s in enumerate(samples)
        ]

    return {
        "varied": make_samples(9, seed=5),
        "three in a row": random(10, 12, 10),
        "lengths 1, 7, 17": random(1, 7, 17),
        "begins in the middle of a slice": random(5, 11),
        "one token": random(1),
        "two tokens": random(2),
        "labels of one slice alone": labelled(random(24), {0: range(1, 6)}),
        "slices without labels": labelled(random(12, 12), {1: range(6, 12)}),
        # The only label is the first token of a slice; its prediction is made at the end of the one before.
        "a label at the edge of two": labelled(random(16), {0: range(8, 9)}),
        "a label at the edge of four": labelled(random(16), {0: range(4, 5)}),
        "no label": labelled(random(9, 7), {}),
    }[name]


DOCUMENTS = (
    "varied",
    "three in a row",
    "lengths 1, 7, 17",
    "begins in the middle of a slice",
    "one token",
    "two tokens",
    "labels of one slice alone",
    "slices without labels",
    "a label at the edge of two",
    "a label at the edge of four",
    "no label",
)
FORMS = ("packed", "packed, with bounds", "padded left", "padded right")


def make_batch(documents: Sequence[Sample], form: str) -> dict[str, Any]:
    """As a collator would; a rank without documents has a row of padding."""
    import torch
    from transformers import DataCollatorWithFlattening

    if documents and form.startswith("packed"):
        collate = DataCollatorWithFlattening(return_flash_attn_kwargs=form != "packed", return_seq_idx=True)
        batch: dict[str, Any] = collate([vars(document) for document in documents])
        return batch
    longest = max((len(document.input_ids) for document in documents), default=1)
    rows: dict[str, list[list[int]]] = {"input_ids": [], "attention_mask": [], "labels": []}
    for document in documents or [Sample([], [])]:
        fill = longest - len(document.input_ids)
        mask = [1] * len(document.input_ids)
        for name, values, filler in (
            ("input_ids", document.input_ids, PAD),
            ("attention_mask", mask, 0),
            ("labels", document.labels, PAD),  # at padding it mustn't count
        ):
            left = form == "padded left"
            rows[name].append([filler] * fill + values if left else values + [filler] * fill)
    return {name: torch.tensor(values) for name, values in rows.items()}


# What runs in the processes


def make_model(**changes: Any) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "initializer_range": 0.1,
        "pad_token_id": PAD,
        "bos_token_id": None,
        "eos_token_id": PAD,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**values | changes))


def with_lora(model: Any) -> Any:
    import peft
    import torch

    torch.manual_seed(1)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and with it the gradient of lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def gradients_of(model: Any) -> dict[str, Any]:
    import torch

    named = model.named_parameters()
    return {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in named
        if p.requires_grad
    }


def plain_step(model: Any, documents: Sequence[Sample]) -> tuple[float, dict[str, Any]]:
    """Document after document, whole logits, divided by all labels."""
    import torch

    model.zero_grad()
    num_labels = sum(label != -100 for document in documents for label in document.labels[1:])
    total = 0.0
    for document in documents:
        logits = model(input_ids=torch.tensor([document.input_ids])).logits[0, :-1].float()
        targets = torch.tensor(document.labels[1:], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / max(num_labels, 1)
        loss.backward()
        total += float(loss.detach())
    return total, gradients_of(model)


def shared_step(
    model: Any, layout: Any, micro_batches: Sequence[Sequence[Sample]], form: str, count: int | None = None
) -> tuple[float, dict[str, Any]]:
    """One step of a user's loop; gradients and losses are averaged over all ranks, as engines do."""
    import torch
    import torch.distributed as dist

    model.zero_grad()
    total = torch.zeros(())
    for documents in micro_batches:
        mine = documents[layout.dp_rank :: layout.dp_size]
        loss = model(**layout.shard(make_batch(mine, form), num_items_in_batch=count)).loss
        loss.backward()
        total += loss.detach()
    gradients = gradients_of(model)
    values = (total, *gradients.values())
    flat = torch.cat([value.flatten() for value in values])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for value, mean in zip(values, flat.split([value.numel() for value in values]), strict=True):
        value.copy_(mean.view_as(value))
    return float(total), gradients


def errors_of(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    from hfpar.verify.compare import compare_gradients, relative, worst_of

    name, error = worst_of(compare_gradients(found[1].items(), expected[1]))
    return {"loss": relative(found[0], expected[0]), "gradient": error, "name": name, "value": found[0]}


Check = Callable[[Any, dict[str, Any]], Any]


def check_batches(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """Every kind of documents as a packed row; one kind in every form."""

    cases = [(documents, "packed") for documents in DOCUMENTS] + [("varied", form) for form in FORMS[1:]]
    results: dict[Any, Any] = {}
    plain = make_model(num_hidden_layers=1)
    expected = {name: plain_step(plain, documents_of(name)) for name in DOCUMENTS}
    for name, layout in layouts.items():
        model = make_model(num_hidden_layers=1)
        sequence.apply(model, layout)
        for documents, form in cases:
            found = shared_step(model, layout, [documents_of(documents)], form)
            results[name, documents, form] = errors_of(found, expected[documents])
    return results


def check_windows(worker: Any, layouts: dict[str, Any]) -> dict[str, Any]:
    """Two micro-batches of unequal labels, divided by the labels of both."""

    results = {}
    micro_batches = [documents_of("varied"), documents_of("labels of one slice alone")]
    everything = [document for documents in micro_batches for document in documents]
    count = sum(label != -100 for document in everything for label in document.labels[1:])
    expected = plain_step(make_model(), everything)
    for name, layout in layouts.items():
        model = make_model()
        sequence.apply(model, layout)
        results[name] = errors_of(shared_step(model, layout, micro_batches, "packed", count), expected)
    return results


def check_models(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """What people do to a model before or after they patch it."""
    import torch

    def checkpointed(model: Any, layout: Any, *, use_reentrant: bool) -> Any:
        sequence.apply(model, layout)
        model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        return model.train()

    def wrapped_first(model: Any, layout: Any) -> Any:
        sequence.apply(model, layout)
        return model

    def patched_first(model: Any, layout: Any) -> Any:
        base = make_model()
        sequence.apply(base, layout)
        return with_lora(base)

    def under_ddp(model: Any, layout: Any) -> Any:
        sequence.apply(model, layout)
        return torch.nn.parallel.DistributedDataParallel(model)

    changes: dict[str, tuple[Callable[[], Any], Callable[..., Any], dict[str, Any]]] = {
        "checkpointing": (make_model, checkpointed, {"use_reentrant": False}),
        "reentrant checkpointing": (make_model, checkpointed, {"use_reentrant": True}),
        "LoRA": (lambda: with_lora(make_model()), wrapped_first, {}),
        "LoRA on a patched model": (lambda: with_lora(make_model()), patched_first, {}),
        "DDP": (make_model, under_ddp, {}),
        "uneven heads": (
            lambda: make_model(hidden_size=48, num_attention_heads=6, num_key_value_heads=3),
            wrapped_first,
            {},
        ),
        "one key-value head": (lambda: make_model(num_key_value_heads=1), wrapped_first, {}),
    }
    results: dict[Any, Any] = {}
    for change, (make, prepare, options) in changes.items():
        expected = plain_step(make(), documents_of("varied"))
        for name in ("sp2", "cp2sp2"):
            model = prepare(make(), layouts[name], **options)
            loss, gradients = shared_step(model, layouts[name], [documents_of("varied")], "padded right")
            gradients = {key.removeprefix("module."): value for key, value in gradients.items()}  # DDP's
            worker.send(change)
            results[change, name] = errors_of((loss, gradients), expected)
    return results


def check_undo(worker: Any, layouts: dict[str, Any]) -> dict[str, Any]:
    """One model under one layout after another."""

    model, results = make_model(), {}
    expected = plain_step(model, documents_of("varied"))
    for name, layout in layouts.items():
        patch = sequence.apply(model, layout)
        found = shared_step(model, layout, [documents_of("varied")], "packed")
        patch.undo()
        results[name] = errors_of(found, expected)
        results[f"{name}, undone"] = errors_of(plain_step(model, documents_of("varied")), expected)
    return results


def check_isolation(worker: Any, layouts: dict[str, Any]) -> dict[str, float]:
    """The largest difference in the logits of one document when only the tokens of the other change."""
    import torch

    first, second = (documents_of("three in a row")[n].input_ids for n in (0, 1))
    other = [(token + 7) % VOCAB_SIZE for token in first]
    positions = torch.cat([torch.arange(len(first)), torch.arange(len(second))])[None]
    marks = torch.tensor([[0] * len(first) + [1] * len(second)])
    results = {}
    for name in SHARED:
        layout = layouts[name]
        model = make_model().eval()
        sequence.apply(model, layout)
        mine = layout.shard({"input_ids": marks, "position_ids": positions})["input_ids"][0] == 1
        logits = []
        for tokens in (first, other):
            batch = {"input_ids": torch.tensor([tokens + second]), "position_ids": positions}
            with torch.no_grad():
                logits.append(model(**layout.shard(batch)).logits[0])
        same, changed = logits[0][mine] - logits[1][mine], logits[0][~mine] - logits[1][~mine]
        results[name] = (float(same.abs().sum()), float(changed.abs().sum()))
    return results


def check_refusals(worker: Any, layouts: dict[str, Any]) -> dict[Any, str]:
    """What ranks can only find together."""
    import torch

    from hfpar.errors import HfparError

    results: dict[Any, str] = {}
    for name in SHARED:
        for what in ("tokens", "labels", "positions"):
            batch = make_batch(documents_of("three in a row"), "packed")
            batch.pop("seq_idx")
            entry = {"tokens": "input_ids", "labels": "labels", "positions": "position_ids"}[what]
            if worker.rank == 3:
                batch[entry] = torch.cat([batch[entry][:, :1], batch[entry][:, 1:].flip(1)], dim=1)
            try:
                layouts[name].shard(batch, num_items_in_batch=1)
                results[name, what] = ""
            except HfparError as error:
                results[name, what] = str(error)
    return results


def check_bf16(worker: Any, layouts: dict[str, Any]) -> dict[str, Any]:
    """Against fp32 weights, beside what one process in bf16 differs from them."""
    import torch

    expected = plain_step(make_model(), documents_of("varied"))

    def error(step: tuple[float, dict[str, Any]]) -> dict[str, Any]:
        return errors_of((step[0], {name: value.float() for name, value in step[1].items()}), expected)

    results = {"plain": error(plain_step(make_model().to(torch.bfloat16), documents_of("varied")))}
    for name in SHARED:
        model = make_model().to(torch.bfloat16)
        sequence.apply(model, layouts[name])
        results[name] = error(shared_step(model, layouts[name], [documents_of("varied")], "packed"))
    return results


CHECKS: tuple[Check, ...] = (
    check_batches,
    check_windows,
    check_models,
    check_undo,
    check_isolation,
    check_refusals,
    check_bf16,
)


def run_checks(worker: Any) -> dict[str, Any]:
    from hfpar.parallel.layout import Layout

    layouts = {
        name: Layout(worker.rank, worker.world_size, cp_size=cp_size, sp_size=sp_size)
        for name, (cp_size, sp_size) in SIZES.items()
    }
    results = {}
    for check in CHECKS:
        worker.send(check.__name__)
        results[check.__name__] = check(worker, layouts)
    return results


# What it must be


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("sequence")
    return spawn(run_checks, 4, folder)


def assert_exact(result: dict[str, Any]) -> None:
    assert result["loss"] < 1e-5
    assert result["gradient"] < 1e-5, result["name"]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_batch_is_one_process(found: list[Any], documents: str, size: str) -> None:
    for rank in found:
        result = rank["check_batches"][size, documents, "packed"]
        if documents in ("no label", "one token"):
            assert result["value"] == 0.0 and result["gradient"] == 0.0
        else:
            assert_exact(result)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_batch(found: list[Any], form: str, size: str) -> None:
    assert_exact(found[0]["check_batches"][size, "varied", form])


@pytest.mark.parametrize("size", SIZES)
def test_accumulated_gradients(found: list[Any], size: str) -> None:
    assert_exact(found[0]["check_windows"][size])


def test_patched_models(found: list[Any]) -> None:
    results = found[0]["check_models"]
    assert len(results) == 14
    for case, result in results.items():
        print(case, result)
        assert_exact(result)


def test_one_model_under_every_layout_in_turn(found: list[Any]) -> None:
    results = found[0]["check_undo"]
    for size in SIZES:
        assert_exact(results[size])
        assert results[f"{size}, undone"]["gradient"] == results[f"{size}, undone"]["loss"] == 0.0


@pytest.mark.parametrize("size", SHARED)
def test_a_document_does_not_see_another(found: list[Any], size: str) -> None:
    same, changed = zip(*(rank["check_isolation"][size] for rank in found), strict=True)
    assert max(same) == 0.0
    assert max(changed) > 1.0


@pytest.mark.parametrize("size", SHARED)
@pytest.mark.parametrize("what", ["tokens", "labels", "positions"])
def test_ranks_that_share_a_stream_were_given_different_ones(found: list[Any], size: str, what: str) -> None:
    number = 4 if size in ("sp4", "cp4", "cp2sp2") else 2
    line = (
        f"batch: the {number} ranks that share a stream were given different batches; sample by layout.dp_rank of "
        "layout.dp_size, not by rank of all processes"
    )
    said = [rank["check_refusals"][size, what] for rank in found]
    assert said == [""] * (4 - number) + [line] * number


def test_bf16_is_off_by_its_rounding_alone(found: list[Any]) -> None:
    results = found[0]["check_bf16"]
    for size in SHARED:
        assert results[size]["loss"] < max(2 * results["plain"]["loss"], 5e-3)
        assert results[size]["gradient"] < 1.5 * results["plain"]["gradient"]
