"""Ranks that share layers, on a GPU: loss and every gradient against one process on the same GPU.

NCCL refuses several ranks on one device, so they meet over gloo, which takes a GPU's tensors in some collectives alone:
what layers exchange is staged through the CPU here, and the rest is as in training. Where there are as many GPUs as
ranks, the same goes over NCCL, without staging. What needs a GPU takes the device's type, so that the same functions
run on a CPU.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfpar.attention import interface
from hfpar.config.engine import DDPSettings
from hfpar.data.stream import Sample, build_stream
from hfpar.models.adapters import add_lora
from hfpar.models.cuts import cuts_of
from hfpar.models.load import load_model, load_model_config
from hfpar.models.slices import Filling, fill_from_checkpoint
from hfpar.parallel import sequence, tensor
from hfpar.parallel.collectives import gather_whole
from hfpar.parallel.layout import Layout
from hfpar.train import loss
from hfpar.train.step import model_inputs
from hfpar.verify import reference
from hfpar.verify.compare import compare_gradients, relative, worst_of
from hfpar.verify.documents import count_labels
from hfpar.verify.processes import Worker, WorkerError, run_processes
from tests.gpu.test_sequence import (  # noqa: TID251
    exact_products,
    make_documents,
    one_loop_of_experts,
)

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]

SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "tp2 tp_sequence": {"tp_size": 2, "tp_sequence": True},
    "tp4": {"tp_size": 4},
    "tp4 tp_sequence": {"tp_size": 4, "tp_sequence": True},
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    # Two key-value heads, which four ranks keep twice; norms of each head; a vocabulary that doesn't divide.
    "qwen3": ("Qwen3Config", {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 383}),
    "olmo2": ("Olmo2Config", {}),  # norms over all heads
    "phi3": ("Phi3Config", {"pad_token_id": None}),  # q, k and v in one matrix, gate and up in one
    # Sinks; experts with biases. All are used: a choice among them would jump with rounding.
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 2, "num_experts_per_tok": 2}),
}
ADAPTERS = ("full", "lora")
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor")
TOLERANCE = 1e-5

Key = tuple[str, str, str]
"""(family, layout, adapter)"""


@contextmanager
def staged_through_cpu() -> Iterator[Counter[str]]:
    """Give each collective that shared layers use copies on the CPU; yields how often that was done.

    On a CPU as well, where it wouldn't be needed.
    """
    counts: Counter[str] = Counter()

    def copied(value: Any) -> Any:
        if isinstance(value, list):
            return [copied(each) for each in value]
        return value.detach().to("cpu", copy=True).contiguous() if isinstance(value, Tensor) else value

    def staged(name: str, original: Any) -> Any:
        def collective(output: Any, *args: Any, **kwargs: Any) -> None:
            counts[name] += 1
            buffer = copied(output)
            original(buffer, *copied(list(args)), **kwargs)
            for target, source in zip(output, buffer, strict=True) if isinstance(output, list) else ():
                target.copy_(source)
            if isinstance(output, Tensor):
                output.copy_(buffer)

        return collective

    replacements = {name: staged(name, getattr(dist, name)) for name in COLLECTIVES}
    with mock.patch.multiple(dist, **replacements):
        yield counts


def prepare(folder: Path, device_type: str, families: Sequence[str] = tuple(FAMILIES)) -> None:
    """A checkpoint of each family, its adapters, and loss and gradients of one plain process."""
    import transformers

    exact_products()
    device = torch.device(device_type)
    for family in families:
        config_class, options = FAMILIES[family]
        target, config = folder / family, getattr(transformers, config_class)(**options)
        reference.build_checkpoint(config, target, fewest_heads=4, tp_size=4)
        documents = make_documents(load_model_config(target).vocab_size)
        torch.save(reference.draw_adapter_state(target), target / "adapters.pt")
        for adapter in ADAPTERS:
            state = torch.load(target / "adapters.pt") if adapter == "lora" else None
            model = reference.load_plain(target, state).to(device)
            one_loop_of_experts(sequence.unwrap_peft(model))
            with sdpa_kernel(SDPBackend.MATH):
                total = reference.accumulate_gradients(model, documents, device)
            torch.save((total, reference.gradients_of(model)), target / f"{adapter}.pt")


def shared_gradients(
    folder: Path, layout: Layout, adapter: str, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of this rank, those of cut weights put together."""
    config: Any = load_model_config(folder)
    model = load_model(
        folder,
        config,
        settings=DDPSettings(),
        dtype=torch.float32,
        attn_implementation=interface.interface_name("eager"),
        tp_size=layout.tp_size,
    )
    one_loop_of_experts(model)
    if adapter == "lora":
        values = reference.LORA
        model = add_lora(
            model,
            r=values["r"],
            alpha=values["lora_alpha"],
            dropout=values["lora_dropout"],
            target_modules=values["target_modules"],
            modules_to_save=None,
            seed=0,
        )
        reference.set_parameters(model, torch.load(folder / "adapters.pt"))
    sequence.apply(model, layout)
    tensor.apply(model, layout)
    loss.install(model)
    fill_from_checkpoint(model, folder, Filling(torch.device("cpu"), torch.device("cpu"), layout.tp_rank))
    model = model.to(device).train()
    documents = make_documents(config.vocab_size)
    stream = build_stream([Sample(document.tokens, document.labels) for document in documents])
    shard = sequence.shard_stream(stream, layout)
    mean = model(**model_inputs(shard, device)) / count_labels(documents)
    mean.backward()
    gradients, cuts = {}, cuts_of(model)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        if name in cuts:
            gradient = gather_whole(gradient, cuts[name], layout.tp_group, device)
        gradients[name] = gradient.cpu()
    return float(mean.detach()), gradients


def run_rank(
    worker: Worker, device_type: str, folder: Path, layouts: Sequence[str], families: Sequence[str]
) -> None:
    """One rank: every family and adapter under every layout; tells (family, layout, adapter) and its errors."""
    exact_products()
    worker.join_group()
    interface.register()
    own = worker.device_type == "cuda"  # a GPU for each rank
    device = torch.device(f"cuda:{worker.rank}" if own else device_type)
    with nullcontext(Counter[str]()) if own else staged_through_cpu() as counts:
        for name in layouts:
            layout = Layout(worker.rank, worker.world_size, **SIZES[name])
            for family, adapter in ((family, adapter) for family in families for adapter in ADAPTERS):
                total, gradients = shared_gradients(folder / family, layout, adapter, device)
                exact_total, exact = torch.load(folder / family / f"{adapter}.pt")
                worst, error = worst_of(compare_gradients(gradients.items(), exact))
                worker.send(
                    (
                        (family, name, adapter),
                        {"loss": relative(total, exact_total), "worst": error, "name": worst},
                    )
                )
    worker.send(("staged", dict(counts)))


def run_layouts(
    device_type: str,
    folder: Path,
    tp_size: int,
    *,
    nccl: bool = False,
    families: Sequence[str] = tuple(FAMILIES),
) -> tuple[dict[Key, list[dict[str, Any]]], list[dict[str, int]]]:
    """What each of `tp_size` ranks found under each layout of so many, and its counts of collectives."""
    errors: dict[Key, list[dict[str, Any]]] = {}
    staged: list[dict[str, int]] = []

    def listen(rank: int, message: tuple[Any, Any]) -> None:
        if message[0] == "staged":
            staged.append(message[1])
        else:
            errors.setdefault(message[0], []).append(message[1])

    layouts = [name for name, sizes in SIZES.items() if sizes["tp_size"] == tp_size]
    try:
        run_processes(
            run_rank,
            tp_size,
            (device_type, folder, layouts, families),
            folder=folder,
            device_type="cuda" if nccl else "cpu",
            timeout=240,
            on_message=listen,
        )
    except WorkerError as error:
        pytest.fail(f"{error}\n{error.details}", pytrace=False)
    return errors, staged


def check(
    errors: dict[Key, list[dict[str, Any]]], tp_size: int, families: Sequence[str] = tuple(FAMILIES)
) -> None:
    """Every rank has found what one process found, in every case."""
    layouts = [name for name, sizes in SIZES.items() if sizes["tp_size"] == tp_size]
    assert len(errors) == len(families) * len(layouts) * len(ADAPTERS)
    for key, found in errors.items():
        print(*key, found)
        assert len(found) == tp_size
        for rank_errors in found:
            assert rank_errors["loss"] < TOLERANCE, key
            assert rank_errors["worst"] < TOLERANCE, (key, rank_errors["name"])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    prepare(folder, "cuda")
    return folder


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_on_one_gpu_equal_one_process(checkpoints: Path, tp_size: int) -> None:
    errors, staged = run_layouts("cuda", checkpoints, tp_size)
    check(errors, tp_size)
    assert len(staged) == tp_size
    for counts in staged:
        assert set(counts) == set(COLLECTIVES)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_ranks_over_nccl_equal_one_process(checkpoints: Path, tp_size: int) -> None:
    if torch.cuda.device_count() < tp_size:
        pytest.skip(f"needs {tp_size} GPUs")
    errors, _ = run_layouts("cuda", checkpoints, tp_size, nccl=True)
    check(errors, tp_size)
