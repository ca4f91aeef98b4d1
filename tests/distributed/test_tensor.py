"""Ranks that share each layer's weights: loss and gradients are those of one plain process.

Models are cut in memory, without an engine; `test_tensor_training.py` trains them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from hfpar.data.stream import Sample
from tests.distributed.spawn import VOCAB_SIZE, make_samples, spawn  # noqa: TID251

pytestmark = pytest.mark.timeout(900)  # one set of processes runs the cases of a whole module

TP_SIZES = (2, 4)
"""On 4 ranks: two sets of two, or one of four."""
LAYOUTS = ("tp2", "tp4", "tp2, tokens sharded", "tp4, tokens sharded")
TOLERANCE = 1e-5


def make_layouts(worker: Any) -> dict[str, Any]:
    """Each with its groups, which those that shard tokens share with those that don't."""
    from hfpar.parallel.layout import Layout

    layouts = {}
    for tp_size in TP_SIZES:
        plain = layouts[f"tp{tp_size}"] = Layout(worker.rank, worker.world_size, tp_size=tp_size)
        sharded = layouts[f"tp{tp_size}, tokens sharded"] = replace(plain, tp_sequence=True)
        for name in ("mesh", "tp_group", "_copies_groups"):
            sharded.__dict__[name] = getattr(plain, name)
    return layouts


# Models


def make_model(kind: str = "llama", **changes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "pad_token_id": 2,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **values | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "bias" in name or "norm" in name or "sinks" in name:  # zeros and ones would hide mistakes
            torch.nn.init.normal_(parameter, mean=float("norm" in name and "bias" not in name), std=0.2)
    return model.train()


def with_lora(model: Any, **options: Any) -> Any:
    import peft
    import torch

    torch.manual_seed(2)
    model = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "target_modules": "all-linear"} | options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, and with it the gradient of lora_A
            torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def checkpointed(model: Any, *, use_reentrant: bool = False) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()
    return model


BIASES: dict[str, Any] = {"attention_bias": True, "mlp_bias": True}
EXPERTS: dict[str, Any] = {"num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 48}
"""torch's product of groups takes rows of a multiple of 16 bytes, a rank's as well: 12 numbers here."""
EVERY_LINEAR = [f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")]
DROPOUT: dict[str, Any] = {"lora_dropout": 0.5}
MODELS: dict[str, Callable[[], Any]] = {
    "biases, tied": lambda: make_model(**BIASES),
    "untied, one key-value head": lambda: make_model(num_key_value_heads=1, tie_word_embeddings=False),
    "as many key-value heads": lambda: make_model(num_key_value_heads=4),
    "qwen2, untied": lambda: make_model("qwen2", tie_word_embeddings=False),
    "qwen3": lambda: make_model("qwen3"),
    "olmo2": lambda: make_model("olmo2"),
    "cohere": lambda: make_model("cohere", use_qk_norm=True, logit_scale=0.3),
    "phi3": lambda: make_model("phi3", num_key_value_heads=4),
    "mixtral": lambda: make_model("mixtral", **EXPERTS),
    "gpt_oss": lambda: make_model("gpt_oss", **EXPERTS),
    "checkpointing": lambda: checkpointed(make_model("qwen3", attention_bias=True)),
    "reentrant checkpointing": lambda: checkpointed(make_model(), use_reentrant=True),
    "LoRA": lambda: with_lora(make_model(**BIASES), lora_bias=True),
    "LoRA, checkpointing": lambda: checkpointed(with_lora(make_model("qwen3"))),
    "LoRA on mixtral": lambda: with_lora(make_model("mixtral", **EXPERTS), target_modules=EVERY_LINEAR[:4]),
    "LoRA, head too": lambda: with_lora(
        make_model(tie_word_embeddings=False), target_modules=[*EVERY_LINEAR, "lm_head"]
    ),
    "LoRA, trained head and embedding": lambda: with_lora(
        make_model(), modules_to_save=["lm_head", "embed_tokens"]
    ),
    "LoRA, trained norm": lambda: with_lora(make_model(), modules_to_save=["norm"]),
}
DRAWING: dict[str, Callable[[], Any]] = {
    "LoRA with dropout": lambda: with_lora(make_model(), **DROPOUT),
    "LoRA with dropout, checkpointing": lambda: checkpointed(with_lora(make_model(), **DROPOUT)),
    "LoRA with dropout, head too": lambda: with_lora(
        make_model(tie_word_embeddings=False), target_modules=[*EVERY_LINEAR, "lm_head"], **DROPOUT
    ),
    "residual dropout": lambda: make_model("gpt_neox", num_key_value_heads=4, hidden_dropout=0.5),
}
"""They draw random numbers; one process with the same seed draws the same."""
DRAWING_CELLS = [
    (kind, layout)
    for kind in DRAWING
    for layout in LAYOUTS
    if not (kind == "residual dropout" and "sharded" in layout)  # refused: tests/unit/test_plan.py
]


@cache
def documents_of(name: str) -> list[Sample]:
    varied = make_samples(5, seed=5, longest=14)
    return {
        "varied": [*varied, Sample([5, 6, 7], [5, 6, 7])],
        "one token more": [*varied, Sample([5, 6, 7, 8], [5, 6, 7, 8])],
        "two more": [*varied, Sample([5, 6, 7, 8, 9], [5, 6, 7, 8, 9])],
        "three more": [*varied, Sample([5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10])],
        "two tokens": [Sample([3, 96], [3, 96])],
        "no label": [Sample([3, 1, 4, 1, 5], [-100] * 5)],
        "one token, no label": [Sample([3], [3])],
    }[name]


def prepare(model: Any, layout: Any) -> Any:
    """As `hfpar.train.model.build_model` does."""
    from hfpar.attention import interface
    from hfpar.parallel import sequence, tensor
    from hfpar.train import loss

    interface.register()
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)
    return model


def inputs_of(documents: list[Sample], layout: Any) -> dict[str, Any]:
    import torch

    from hfpar.data.stream import build_stream
    from hfpar.parallel.sequence import shard_stream
    from hfpar.train.step import model_inputs

    return model_inputs(shard_stream(build_stream(documents), layout), torch.device("cpu"))


def whole_gradients(model: Any, layout: Any) -> dict[str, Any]:
    import torch

    from hfpar.models.cuts import cuts_of
    from hfpar.parallel.collectives import gather_whole

    gradients, cuts = {}, cuts_of(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name in cuts:
            gradient = gather_whole(gradient, cuts[name], layout.tp_group, torch.device("cpu"))
        gradients[name] = gradient.detach().clone()
    return gradients


def shared_step(model: Any, layout: Any, documents: list[Sample]) -> tuple[float, dict[str, Any]]:
    """The summed loss and its gradients, whole."""
    import torch

    torch.manual_seed(7)
    model.zero_grad()
    loss = model(**inputs_of(documents, layout))
    loss.backward()
    return float(loss.detach()), whole_gradients(model, layout)


def plain_step(model: Any, documents: list[Sample]) -> tuple[float, dict[str, Any]]:
    """Document after document, whole logits, summed."""
    import torch

    model.zero_grad()
    total = 0.0
    for document in documents:
        logits = model(input_ids=torch.tensor([document.input_ids])).logits[0, :-1].float()
        targets = torch.tensor(document.labels[1:], dtype=torch.long)
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        loss.backward()
        total += float(loss.detach())
    return total, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def one_process() -> Any:
    from hfpar.parallel.layout import Layout

    return Layout(0, 1)


def errors_of(found: tuple[float, dict[str, Any]], expected: tuple[float, dict[str, Any]]) -> dict[str, Any]:
    from hfpar.verify.compare import compare_gradients, relative, worst_of

    name, error = worst_of(compare_gradients(found[1].items(), expected[1]))
    return {"loss": relative(found[0], expected[0]), "gradient": error, "name": name, "value": found[0]}


# What runs in the processes


def check_collectives(worker: Any, layouts: dict[str, Any]) -> dict[Any, float]:
    """Forward and backward of each; all ranks know what the others put in."""
    return {
        (tp_size, *case): error
        for tp_size in TP_SIZES
        for check in (collective_sums, collective_tokens, collective_features)
        for case, error in check(layouts[f"tp{tp_size}"])
    }


def random(seed: int, *shape: int) -> Any:
    """Laid out the other way round, as slices of other tensors are."""
    import torch

    values = torch.randn(*shape[::-1], generator=torch.Generator().manual_seed(seed))
    return values.permute(*range(len(shape) - 1, -1, -1))


def collective_error(
    layout: Any, operate: Any, inputs: list[Any], outputs: list[Any], backward: Callable[[list[Any]], Any]
) -> float:
    """`backward`: every rank's gradient, of the weights by which every rank's output is multiplied."""
    rank = layout.tp_rank
    mine = inputs[rank].detach().requires_grad_()
    result = operate(mine)
    assert result.shape == outputs[rank].shape
    weights = [random(100 + r, *output.shape) for r, output in enumerate(outputs)]
    (result * weights[rank]).sum().backward()
    wrong = [result.detach() - outputs[rank], mine.grad - backward(weights)[rank]]
    return max(float(difference.abs().max()) for difference in wrong)


def collective_sums(layout: Any) -> Iterator[tuple[Any, float]]:
    from hfpar.parallel.collectives import enter, leave

    size, group = layout.tp_size, layout.tp_group
    same, own = [random(0, 2, 5, 3)] * size, [random(r, 2, 5, 3) for r in range(size)]
    yield (
        ("enter",),
        collective_error(layout, lambda x: enter(x, group), same, same, lambda w: [sum(w)] * size),
    )
    yield (
        ("leave",),
        collective_error(layout, lambda x: leave(x, group), own, [sum(own)] * size, lambda w: w),
    )


def collective_tokens(layout: Any) -> Iterator[tuple[Any, float]]:
    """Along each dimension; numbers that don't divide, and one token."""
    for num_tokens in (1, 2, 5, 8, 11):
        for dim in range(3):
            yield ("gather_tokens", num_tokens, dim), gathered_tokens_error(layout, num_tokens, dim)
            yield ("scatter_tokens", num_tokens, dim), scattered_tokens_error(layout, num_tokens, dim)


def shares_of(tokens: Any, dim: int, size: int) -> list[Any]:
    """Each rank's, zeros after the last token."""
    import torch

    share, missing = -(-tokens.shape[dim] // size), list(tokens.shape)
    missing[dim] = share * size - tokens.shape[dim]
    return list(torch.cat([tokens, tokens.new_zeros(missing)], dim).split(share, dim))


def gathered_tokens_error(layout: Any, num_tokens: int, dim: int) -> float:
    import torch

    from hfpar.parallel.collectives import gather_tokens

    size, shape = layout.tp_size, [2, 2, 3]
    shape[dim] = -(-num_tokens // size) * size
    padded = random(3, *shape)  # what a rank has beyond the last token isn't zero
    return collective_error(
        layout,
        lambda x: gather_tokens(x, dim, num_tokens, layout.tp_group),
        list(padded.chunk(size, dim)),
        [padded.narrow(dim, 0, num_tokens)] * size,
        lambda w: shares_of(torch.stack(w).sum(0), dim, size),
    )


def scattered_tokens_error(layout: Any, num_tokens: int, dim: int) -> float:
    import torch

    from hfpar.parallel.collectives import scatter_tokens

    size, shape = layout.tp_size, [2, 2, 3]
    shape[dim] = num_tokens
    own = [random(r, *shape) for r in range(size)]
    return collective_error(
        layout,
        lambda x: scatter_tokens(x, dim, layout.tp_group),
        own,
        shares_of(torch.stack(own).sum(0), dim, size),
        lambda w: [torch.cat(w, dim).narrow(dim, 0, num_tokens)] * size,
    )


def collective_features(layout: Any) -> Iterator[tuple[Any, float]]:
    import torch

    from hfpar.models.cuts import cut_evenly, cut_heads, cut_vocabulary
    from hfpar.parallel.collectives import gather_whole

    size = layout.tp_size
    cuts = {
        "evenly": cut_evenly(0, 8, size),
        "sections": cut_evenly(0, 16, size, 2),
        "copies": cut_heads(0, 4, size // 2, size),
        "words": cut_vocabulary(0, 7, size),
    }
    for name, cut in cuts.items():
        yield ("gather_features", name), gathered_features_error(layout, cut)
        weight = random(5, cut.size, 3)
        part = cut.take(weight, layout.tp_rank)
        found = gather_whole(part, cut, layout.tp_group, torch.device("cpu"))
        yield ("gather_whole", name), float((found - weight).abs().max())


def gathered_features_error(layout: Any, cut: Any) -> float:
    import torch

    from hfpar.parallel.collectives import along_last, gather_features

    whole, ranks = random(4, 2, 5, cut.size), range(layout.tp_size)
    along = along_last(cut, whole)

    def parts_of_sum(weights: list[Any]) -> list[Any]:
        parts = [along.take(torch.stack(weights).sum(0), rank) for rank in ranks]
        # Copies share one gradient, which is summed over them later.
        return [part if r % cut.copies == 0 else torch.zeros_like(part) for r, part in enumerate(parts)]

    return collective_error(
        layout,
        lambda x: gather_features(x, cut, layout.tp_group),
        [along.take(whole, rank) for rank in ranks],
        [whole] * layout.tp_size,
        parts_of_sum,
    )


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap and scale": {"scale": 0.7, "softcap": 3.0},
    "bias": {"bias": True},
    "bias, softcap, few rows a chunk": {"bias": True, "softcap": 3.0, "scale": 0.5, "rows": 3},
    "a row a chunk": {"rows": 1},
    "no labels": {"tokens": 0},
    "frozen": {"frozen": True, "bias": True},
    "divides": {"vocabulary": 96},
    "a rank without words": {"vocabulary": 9, "rows": 5},
    "targets of one rank": {"highest": 3},
    "large logits": {"size": 300.0},
}


def check_losses(worker: Any, layouts: dict[str, Any]) -> dict[Any, float]:
    """Both ways of computing it, against torch's cross-entropy on whole logits."""
    import torch

    from hfpar.models.cuts import cut_vocabulary
    from hfpar.parallel.collectives import enter
    from hfpar.parallel.vocabulary import VocabularyShard
    from hfpar.train.loss import LogitTransform, head_cross_entropy, module_cross_entropy

    def step(compute: Any, *leaves: Any, frozen: bool) -> list[Any]:
        copies = [leaf.clone().requires_grad_(not frozen or n == 0) for n, leaf in enumerate(leaves)]
        loss = compute(*copies)
        (loss * 0.25).backward()
        return [loss.detach(), *(copy.grad for copy in copies if copy.grad is not None)]

    def compare(case: dict[str, Any], layout: Any) -> Iterator[tuple[str, float]]:
        vocabulary, tokens, frozen = case.get("vocabulary", 97), case.get("tokens", 17), "frozen" in case
        cut = cut_vocabulary(0, vocabulary, layout.tp_size)
        ((first, last),) = cut.ranges[layout.tp_rank]
        group = layout.tp_group
        shard = VocabularyShard(first, last - first, group, lambda hidden: enter(hidden, group), False)
        transform = LogitTransform(case.get("scale", 1.0), case.get("softcap"))
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(tokens, 8, generator=generator)
        weight = torch.randn(vocabulary, 8, generator=generator) * case.get("size", 1.0)
        bias = [torch.randn(vocabulary, generator=generator)] if "bias" in case else []
        targets = torch.randint(0, case.get("highest", vocabulary), (tokens,), generator=generator)
        rows = case.get("rows", 100) * cut.local_size

        def plain(hidden: Any, weight: Any, bias: Any = None) -> Any:
            logits = torch.nn.functional.linear(hidden, weight, bias) * transform.scale
            if transform.softcap is not None:
                logits = torch.tanh(logits / transform.softcap) * transform.softcap
            return torch.nn.functional.cross_entropy(logits, targets, reduction="sum")

        def fused(hidden: Any, weight: Any, bias: Any = None) -> Any:
            return head_cross_entropy(shard.enter(hidden), weight, bias, targets, transform, rows, shard)

        def by_module(hidden: Any, weight: Any, bias: Any = None) -> Any:
            def head(hidden: Any, *, sharded: bool) -> Any:
                assert sharded
                return torch.nn.functional.linear(hidden, weight, bias)

            return module_cross_entropy(head, shard.enter(hidden), targets, transform, rows, shard)

        expected = step(plain, hidden, weight, *bias, frozen=frozen)
        expected = [*expected[:2], *(cut.take(gradient, layout.tp_rank) for gradient in expected[2:])]
        parts = [cut.take(weight, layout.tp_rank), *(cut.take(b, layout.tp_rank) for b in bias)]
        for way, compute in (("fused", fused), ("by module", by_module)):
            found = step(compute, hidden, *parts, frozen=frozen)
            assert len(found) == len(expected) == (2 if frozen else 3 + len(bias))
            worst = 0.0
            for value, other in zip(found, expected, strict=True):
                assert value.shape == other.shape and value.isfinite().all()
                scale = max(float(other.abs().max()), 1e-3) if other.numel() else 1.0
                worst = max(worst, float((value - other).abs().max()) / scale if other.numel() else 0.0)
            yield way, worst

    return {
        (tp_size, name, way): error
        for tp_size in TP_SIZES
        for name, case in LOSSES.items()
        for way, error in compare(case, layouts[f"tp{tp_size}"])
    }


def check_models(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """Every kind of model under every layout."""
    results: dict[Any, Any] = {}
    for kind, make in MODELS.items():
        worker.send(kind)
        expected = plain_step(make(), documents_of("varied"))
        for name, layout in layouts.items():
            model = prepare(make(), layout)
            results[kind, name] = errors_of(shared_step(model, layout, documents_of("varied")), expected)
    return results


def check_draws(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """Models that draw random numbers, against one process with the same seed."""
    results: dict[Any, Any] = {}
    for kind, make in DRAWING.items():
        worker.send(kind)
        alone = prepare(make(), one_process())
        expected = shared_step(alone, one_process(), documents_of("varied"))
        alone.eval()
        without = shared_step(alone, one_process(), documents_of("varied"))
        for name, layout in layouts.items():
            if (kind, name) not in DRAWING_CELLS:
                continue
            model = prepare(make(), layout)
            errors = errors_of(shared_step(model, layout, documents_of("varied")), expected)
            errors["drawn"] = abs(without[0] - expected[0])
            results[kind, name] = errors
    return results


DOCUMENTS = ("varied", "one token more", "two more", "three more", "two tokens", "no label")


def check_streams(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """Numbers of tokens that don't divide, fewer than ranks, none with a label; one after another in one model."""
    results: dict[Any, Any] = {}
    plain = make_model("qwen3", num_hidden_layers=1)
    expected = {name: plain_step(plain, documents_of(name)) for name in DOCUMENTS}
    for name, layout in layouts.items():
        model = prepare(make_model("qwen3", num_hidden_layers=1), layout)
        for documents in (*DOCUMENTS, "one token, no label"):
            found = shared_step(model, layout, documents_of(documents))
            if documents in expected:
                results[name, documents] = errors_of(found, expected[documents])
            largest = max(float(gradient.abs().max()) for gradient in found[1].values())
            results[name, documents, "gradients"] = (found[0], largest)
    return results


def check_logits(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """Calls without labels, as evaluation and generation make them."""
    import torch

    kinds: dict[str, Callable[[], Any]] = {
        "tied": lambda: make_model("qwen3"),
        "LoRA, head too": MODELS["LoRA, head too"],
        "trained head": MODELS["LoRA, trained head and embedding"],
    }
    tokens = torch.randint(0, VOCAB_SIZE, (2, 9), generator=torch.Generator().manual_seed(3))
    results: dict[Any, Any] = {}
    for kind, make in kinds.items():
        plain = make().eval()
        with torch.no_grad():
            logits = plain(input_ids=tokens).logits
            written = plain.generate(input_ids=tokens[:1], max_new_tokens=5, do_sample=False)
        for name, layout in layouts.items():
            model = prepare(make().eval(), layout)
            batches = [(tokens, logits)]
            if layout.tp_sequence:
                batches = [(row[None], own[None]) for row, own in zip(tokens, logits, strict=True)]
            worst = 0.0
            for row, expected in batches:
                positions = torch.arange(row.shape[1])[None]
                with torch.no_grad():
                    found = model(input_ids=row, position_ids=positions).logits
                assert found.shape == expected.shape
                worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
            results[kind, name] = worst
            if not layout.tp_sequence:
                with torch.no_grad():
                    found = model.generate(input_ids=tokens[:1], max_new_tokens=5, do_sample=False)
                results[kind, name, "written"] = found.tolist() == written.tolist()
    return results


def check_sizes_of_tensors(worker: Any, layouts: dict[str, Any]) -> dict[Any, tuple[int, int]]:
    """(the largest tensor that any operation makes in a step, tokens x a rank's words)."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in tree_leaves(result):
                if isinstance(value, torch.Tensor):
                    self.numel = max(self.numel, value.numel())
            return result

    words: dict[str, Any] = {"vocab_size": 4001, "num_hidden_layers": 1, "tie_word_embeddings": False}
    kinds: dict[str, Callable[[], Any]] = {
        "full": lambda: make_model(**words),
        "LoRA, head too": lambda: with_lora(make_model(**words), target_modules=["q_proj", "lm_head"]),
    }
    documents = [Sample(list(range(60)), list(range(60)))]  # more tokens than the hidden size: 32
    results: dict[Any, tuple[int, int]] = {}
    for kind, make in kinds.items():
        for name, layout in {"one process": one_process(), **layouts}.items():
            model = prepare(make(), layout)
            inputs = inputs_of(documents, layout)
            with Largest() as largest:
                model(**inputs).backward()
            # The last token predicts nothing.
            results[kind, name] = (largest.numel, 59 * -(-4001 // layout.tp_size))
    return results


@contextmanager
def counted_traffic() -> Iterator[dict[str, int]]:
    """Elements by the name of the collective; of the whole tensor where ranks have shares."""
    import torch.distributed as dist

    counts: dict[str, int] = {}
    originals: dict[str, Any] = {}

    def counting(name: str, whole_at: int) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            value = args[whole_at]
            counts[name] = counts.get(name, 0) + (
                sum(piece.numel() for piece in value) if isinstance(value, list) else value.numel()
            )
            return originals[name](*args, **kwargs)

        return call

    places = {"all_reduce": 0, "all_gather": 0, "all_gather_into_tensor": 0, "reduce_scatter_tensor": 1}
    for name, place in places.items():
        originals[name] = getattr(dist, name)
        setattr(dist, name, counting(name, place))
    try:
        yield counts
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


TRAFFIC: dict[str, Callable[[int], Any]] = {
    "full": lambda n: make_model(num_key_value_heads=4, num_hidden_layers=n),
    "biases and copies": lambda n: make_model("qwen2", num_hidden_layers=n),
    "LoRA": lambda n: with_lora(make_model(num_key_value_heads=4, num_hidden_layers=n)),
    "checkpointing": lambda n: checkpointed(make_model(num_key_value_heads=4, num_hidden_layers=n)),
}
TOKENS = 24


def check_traffic(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """What one decoder layer adds, forward and backward: three layers against one."""
    documents = [Sample(list(range(TOKENS)), list(range(TOKENS)))]
    results: dict[Any, Any] = {}
    for kind, make in TRAFFIC.items():
        for name, layout in layouts.items():
            passes = []
            for num_layers in (1, 3):
                model = prepare(make(num_layers), layout)
                with counted_traffic() as forward:
                    loss = model(**inputs_of(documents, layout))
                with counted_traffic() as backward:
                    loss.backward()
                passes.append((forward, backward))
            (forward, backward), (forward_3, backward_3) = passes
            results[kind, name] = tuple(
                {op: (more[op] - less.get(op, 0)) / 2 for op in more if more[op] != less.get(op, 0)}
                for less, more in ((forward, forward_3), (backward, backward_3))
            )
    return results


def check_memory(worker: Any, layouts: dict[str, Any]) -> dict[Any, float]:
    """A rank's share of what is cut, and how much isn't, at sizes like a real model's."""
    from transformers import AutoConfig

    from hfpar.models.cuts import cuts_of
    from hfpar.models.load import skeleton
    from hfpar.parallel import tensor

    results: dict[Any, float] = {}
    sizes: dict[str, Any] = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32003}
    sizes |= {"num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", tie_word_embeddings=False, **sizes)
    for adapters in ("full", "LoRA"):
        for name, layout in layouts.items():
            model = skeleton(config)
            if adapters == "LoRA":
                model = with_lora(model, r=8)
            before = {key: p.numel() for key, p in model.named_parameters()}
            tensor.apply(model, layout)
            cut = cuts_of(model)
            after = {key: p.numel() for key, p in model.named_parameters()}
            own, whole = sum(after[key] for key in cut), sum(before[key] for key in cut)
            results[adapters, name] = own / whole
            kept = sum(number for key, number in after.items() if key not in cut)
            results[adapters, name, "whole"] = kept / sum(before.values())
    return results


LOADED: dict[str, Callable[[], Any]] = {
    "llama": lambda: make_model(**BIASES),
    "untied, a rank without words": lambda: make_model(tie_word_embeddings=False, vocab_size=5),
    "phi3": lambda: make_model("phi3", num_key_value_heads=4),
    "mixtral": lambda: make_model("mixtral", **EXPERTS),  # a matrix for each expert in its file
}


@contextmanager
def recorded_reads() -> Iterator[dict[str, int]]:
    """Elements that are read of each stored weight."""
    from hfpar.models import stored as module

    stored: Any = module
    reads: dict[str, int] = {}

    class Slice:
        def __init__(self, name: str, content: Any) -> None:
            self.name, self.content = name, content

        def get_shape(self) -> Any:
            return self.content.get_shape()

        def __getitem__(self, index: Any) -> Any:
            value = self.content[index]
            reads[self.name] = reads.get(self.name, 0) + value.numel()
            return value

    class File:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: Any) -> None:
            return None

        def keys(self) -> Any:
            return self.file.keys()

        def get_slice(self, name: str) -> Any:
            return Slice(name, self.file.get_slice(name))

    original = stored.safe_open
    stored.safe_open = lambda *args, **kwargs: File(original(*args, **kwargs))
    try:
        yield reads
    finally:
        stored.safe_open = original


def check_loading(worker: Any, layouts: dict[str, Any]) -> dict[Any, Any]:
    """What each rank reads of a checkpoint, what it keeps, and whether the parts are the whole."""
    import torch
    from transformers import AutoModelForCausalLM

    from hfpar.config.engine import DDPSettings
    from hfpar.models.cuts import cuts_of
    from hfpar.models.load import load_model, load_model_config
    from hfpar.models.slices import Filling, fill_from_checkpoint
    from hfpar.parallel import tensor
    from hfpar.parallel.collectives import gather_whole

    results: dict[Any, Any] = {}
    cpu = torch.device("cpu")
    for kind in LOADED:
        folder = worker.folder.parent / kind
        plain = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
        for name in ("tp2", "tp4"):
            layout = layouts[name]
            model = load_model(
                folder,
                load_model_config(folder),
                settings=DDPSettings(),
                dtype=torch.float32,
                attn_implementation="sdpa",
                tp_size=layout.tp_size,
            )
            tensor.apply(model, layout)
            assert all(parameter.is_meta for parameter in model.parameters())
            with recorded_reads() as reads:
                fill_from_checkpoint(model, folder, Filling(cpu, cpu, layout.tp_rank))
            cuts, found = cuts_of(model), dict(model.named_parameters())
            wrong, kept = [], 0
            for key, parameter in found.items():
                cut, whole = cuts.get(key), plain[key].detach()
                value = parameter if cut is None else gather_whole(parameter, cut, layout.tp_group, cpu)
                if not value.equal(whole):
                    wrong.append(key)
                own = 1.0
                if cut is not None:
                    own = sum(last - first for first, last in cut.ranges[layout.tp_rank]) / cut.size
                kept += round(whole.numel() * own)
            head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
            results[kind, name] = {
                "wrong": wrong,
                "missing": sorted(found.keys() ^ plain.keys()),
                "kept": kept,
                "read": sum(reads.values()),
                "tied": head.weight is embedding.weight,
            }
    return results


def check_refusals(worker: Any, layouts: dict[str, Any]) -> dict[str, str]:
    """What can only be found once there are ranks."""
    import torch

    from hfpar.errors import ConfigError
    from hfpar.parallel import tensor

    def refusal(action: Callable[[], Any]) -> str:
        try:
            action()
        except ConfigError as error:
            return str(error)
        return ""

    model = make_model()
    lines = tensor.apply(model, layouts["tp2"])
    results = {"done": "\n".join(lines)}
    results["twice"] = refusal(lambda: tensor.apply(model, layouts["tp2"]))
    results["twice, in LoRA"] = refusal(lambda: tensor.apply(with_lora(model), layouts["tp4"]))
    model = make_model()
    results["done, tokens sharded"] = "\n".join(tensor.apply(model, layouts["tp4, tokens sharded"]))
    tokens, positions = torch.ones(2, 3, dtype=torch.long), torch.arange(3)[None]
    results["rows"] = refusal(lambda: model(input_ids=tokens, position_ids=positions))
    # Fewer tokens than ranks: one position would be broadcast over all of them.
    results["positions"] = refusal(lambda: model(input_ids=tokens[:1]))
    return results


CHECKS: tuple[Callable[..., Any], ...] = (
    check_collectives,
    check_losses,
    check_models,
    check_draws,
    check_streams,
    check_logits,
    check_sizes_of_tensors,
    check_traffic,
    check_memory,
    check_loading,
    check_refusals,
)


def run_checks(worker: Any) -> dict[str, Any]:
    import time

    layouts = make_layouts(worker)
    results = {}
    for check in CHECKS:
        worker.send(check.__name__)
        start = time.perf_counter()
        results[check.__name__] = check(worker, layouts)
        print(f"{check.__name__}: {time.perf_counter() - start:.1f} s", flush=True)
    return results


# What it must be


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("tensor")
    for name, make in LOADED.items():
        make().save_pretrained(folder / name)
    return spawn(run_checks, 4, folder)


def assert_exact(result: dict[str, Any]) -> None:
    assert result["loss"] < TOLERANCE
    assert result["gradient"] < TOLERANCE, result["name"]


COLLECTIVES = ("enter", "leave", "gather_tokens", "scatter_tokens", "gather_features", "gather_whole")


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_and_their_gradients(found: list[Any], name: str) -> None:
    for rank in found:
        errors = {case: error for case, error in rank["check_collectives"].items() if case[1] == name}
        assert len(errors) >= 2 and max(errors.values()) < 1e-5, max(errors, key=lambda case: errors[case])


@pytest.mark.parametrize("way", ["fused", "by module"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_loss_over_parts_of_the_vocabulary(found: list[Any], tp_size: int, name: str, way: str) -> None:
    for rank in found:
        assert rank["check_losses"][tp_size, name, way] < TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MODELS)
def test_every_model_is_one_process(found: list[Any], kind: str, layout: str) -> None:
    for rank in found:
        assert_exact(rank["check_models"][kind, layout])


@pytest.mark.parametrize(("kind", "layout"), DRAWING_CELLS)
def test_dropout_draws_what_one_process_draws(found: list[Any], kind: str, layout: str) -> None:
    for rank in found:
        result = rank["check_draws"][kind, layout]
        assert_exact(result)
        assert result["drawn"] > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_every_number_of_tokens(found: list[Any], documents: str, layout: str) -> None:
    for rank in found:
        results = rank["check_streams"]
        if documents == "no label":
            for name in ("no label", "one token, no label"):
                assert results[layout, name, "gradients"] == (0.0, 0.0)
        else:
            assert_exact(results[layout, documents])
            assert results[layout, documents, "gradients"][1] > 0.1


def test_logits_without_labels_are_whole(found: list[Any]) -> None:
    for rank in found:
        results = dict(rank["check_logits"])
        written = {case: results.pop(case) for case in list(results) if case[-1] == "written"}
        assert len(results) == 12 and max(results.values()) < TOLERANCE
        assert list(written.values()) == [True] * 6


@pytest.mark.parametrize("kind", ["full", "LoRA, head too"])
def test_the_logits_of_all_words_are_never_made(found: list[Any], kind: str) -> None:
    for rank in found:
        results = rank["check_sizes_of_tensors"]
        largest, whole = results[kind, "one process"]
        assert largest >= whole  # what is looked at is there
        for layout in LAYOUTS:
            largest, own = results[kind, layout]
            assert largest <= own, layout


def expected_traffic(kind: str, tp_size: int, tokens_sharded: bool) -> tuple[dict[str, int], dict[str, int]]:
    """Elements that a layer of T tokens and width H hands to collectives: forward, backward."""
    hidden, rank, states = 32, 4, TOKENS * 32
    forward, backward = {"all_reduce": 2 * states}, {"all_reduce": 2 * states}
    if tokens_sharded:
        pairs = {"all_gather_into_tensor": 2 * states, "reduce_scatter_tensor": 2 * states}
        # Backward a gather is a scatter; and the two norms see a share of the tokens.
        forward, backward = dict(pairs), pairs | {"all_reduce": 2 * hidden}
    if kind == "biases and copies" and tp_size == 4:  # of k and v, weight and bias of one head
        backward["all_reduce"] = backward.get("all_reduce", 0) + 2 * (8 * hidden + 8)
    if kind == "LoRA":  # whole: A of five column-parallel layers, B of two row-parallel ones
        weights = 5 * rank * hidden + 2 * hidden * rank
        backward["all_reduce"] = backward.get("all_reduce", 0) + weights
        if tokens_sharded:
            backward["all_reduce"] -= 2 * hidden  # the norms are frozen
    if kind == "checkpointing":  # all but the last sum of a layer, which nobody waits for, is computed again
        for name, number in forward.items():
            is_sum = name != "all_gather_into_tensor"
            backward[name] = backward.get(name, 0) + number - (states if is_sum else 0)
    return forward, backward


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TRAFFIC)
def test_what_a_layer_sends(found: list[Any], kind: str, layout: str) -> None:
    """The formula of `hfpar/parallel/tensor.py`."""
    expected = expected_traffic(kind, int(layout[2]), "sharded" in layout)
    for rank in found:
        assert rank["check_traffic"][kind, layout] == expected


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("adapters", ["full", "LoRA"])
def test_a_rank_keeps_its_share_of_what_is_cut(found: list[Any], adapters: str, layout: str) -> None:
    tp_size = int(layout[2])
    for rank in found:
        results = rank["check_memory"]
        assert results[adapters, layout] * tp_size == pytest.approx(1, rel=0.05)
        assert results[adapters, layout, "whole"] < 0.01


@pytest.mark.parametrize("layout", ["tp2", "tp4"])
@pytest.mark.parametrize("kind", LOADED)
def test_each_rank_reads_its_own_part_alone(found: list[Any], kind: str, layout: str) -> None:
    for rank in found:
        result = rank["check_loading"][kind, layout]
        assert result["wrong"] == result["missing"] == []
        assert result["read"] == result["kept"]
        assert result["tied"] is (not kind.startswith("untied"))


def test_what_is_refused_and_said(found: list[Any]) -> None:
    for rank in found:
        results = rank["check_refusals"]
        assert results["twice"] == "LlamaForCausalLM is cut for tensor parallelism already"
        assert results["twice, in LoRA"] == results["twice"]
        assert results["rows"] == "tp_sequence: true takes one stream a call, not 2 rows"
        assert results["positions"] == "tp_sequence: true takes position_ids with each call"
        # 7 matrices in each of two layers, the embedding and the head
        assert results["done"].splitlines() == [
            "LlamaForCausalLM: 16 parameters cut for tp 2",
            "LlamaForCausalLM: gradients and outputs summed around 4 modules",
            "LlamaForCausalLM: embedding and head cut by vocabulary",
        ]
        assert "tokens gathered and scattered around 4 modules" in results["done, tokens sharded"]
