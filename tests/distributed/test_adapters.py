"""PEFT's choices on every engine against one plain process with PEFT alone, and what they leave behind."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    VOCAB_SIZE,
    build_llama,
    engine_settings,
    make_samples,
    make_trainer,
    spawn,
)

pytestmark = pytest.mark.timeout(900)

LORA: dict[str, Any] = {"lora_r": 4, "lora_alpha": 6.0}
ROWS = [93, 5, 70]
MANY_ROWS = list(range(20, 45))
"""More than what ZeRO-3 keeps whole on every rank."""
CHOICES: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora gaussian": {"use_rslora": True, "init_lora_weights": "gaussian"},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora rslora": {"init_lora_weights": "olora", "use_rslora": True},
    "pissa dora": {"init_lora_weights": "pissa", "use_dora": True},
    "modules to save": {"modules_to_save": ["norm", "o_proj"], "lora_target_modules": ["q_proj", "up_proj"]},
    "rows": {"trainable_token_indices": ROWS},
    "many rows, dora": {"trainable_token_indices": MANY_ROWS, "use_dora": True},
}
UNTIED: dict[str, dict[str, Any]] = {
    "rows of both": {"head_rows": ROWS, "trainable_token_indices": ROWS},
    "rows of the head": {"head_rows": MANY_ROWS, "init_lora_weights": "pissa"},
    "head alone": {"lora_target_modules": ["lm_head", "v_proj"], "use_dora": True},
}
NF4: dict[str, dict[str, Any]] = {
    "nf4": {"quantization": "nf4"},
    "nf4 dora, rows": {"quantization": "nf4", "use_dora": True, "trainable_token_indices": ROWS},
    "nf4 pissa": {"quantization": "nf4", "init_lora_weights": "pissa"},
    "nf4 olora": {"quantization": "nf4", "init_lora_weights": "olora"},
    "nf4 loftq": {"quantization": "nf4", "init_lora_weights": "loftq"},
}
DROPOUT: dict[str, dict[str, Any]] = {
    "dora, dropout": {"use_dora": True, "lora_dropout": 0.3, "gradient_checkpointing": True},
}
"""What is drawn differs from a plain process, but not from engine to engine."""

Cell = tuple[str, str, str]
"""Engine, model, choice."""

CELLS: list[Cell] = [(engine, "tied", name) for name in CHOICES | NF4 for engine in ENGINES] + [
    (engine, "untied", name) for name in UNTIED for engine in ENGINES
]
ALSO_ZERO1 = ("lora", "pissa dora", "many rows, dora", "nf4 dora, rows", "nf4 pissa", "rows of both")
CELLS = [cell for cell in CELLS if cell[0] != "zero1" or cell[2] in ALSO_ZERO1]
"""ZeRO-1 differs from ZeRO-2 in the moment at which gradients are cut, which adapters have no part in."""

CELLS += [
    ("ddp tp2", "tied", "pissa"),
    ("zero3 tp2", "tied", "olora rslora"),
    ("fsdp2 tp2", "wide", "nf4 pissa"),
    ("zero2 tp2", "wide", "nf4 loftq"),
    ("fsdp2 sp2", "tied", "dora"),
    ("zero2 cp2", "tied", "nf4 pissa"),
    ("zero3 cp2", "untied", "rows of both"),
]
"""Ranks that share layers or streams; the wide model's layers divide into whole blocks of 4 bits."""

DROPOUT_CELLS: list[Cell] = [(engine, "tied", name) for name in DROPOUT for engine in ENGINES]
ALL = CHOICES | UNTIED | NF4 | DROPOUT
SAMPLES, STEPS = 6, 3
RATE, EPSILON, BOUND = 0.02, 1e-2, 0.5
"""Of the optimizer, and of the gradient norm; the epsilon makes updates smooth in gradients that are all but zero."""


def config_of(folder: Path, model: str, name: str) -> SFTConfig:
    values = {key: value for key, value in ALL[name].items() if key != "head_rows"}
    return SFTConfig(
        model_name_or_path=str(folder / model),
        output_dir=str(folder / "run"),
        max_steps=STEPS,
        learning_rate=RATE,
        adam_epsilon=EPSILON,
        lr_scheduler_type="constant",
        max_grad_norm=BOUND,
        **LORA | values,
    )


# What the processes do


def train_cells(worker: Any, folder: Path, cells: list[Cell]) -> dict[Cell, Any]:
    """Train each cell; rank 0 also writes its adapter."""
    from hfpar.models.adapter_init import save_adapter
    from hfpar.train import model as models

    layouts = {axes: layout_of(worker, axes) for axes in ("", "tp2", "sp2", "cp2")}
    found = {}
    for cell in cells:
        engine_name, _, axes = cell[0].partition(" ")
        model, name, layout = cell[1], cell[2], layouts[axes]
        worker.send(str(cell))
        config = config_of(folder, model, name)
        rows = models.TokenRows(
            tuple(config.trainable_token_indices or ()), tuple(ALL[name].get("head_rows", ()))
        )
        settings = engine_settings(engine_name)
        with make_trainer(config, settings, make_samples(SAMPLES), layout, token_rows=rows) as trainer:
            found[cell] = train_and_record(trainer.engine, layout)
            trained = dict(trainer.engine.parameters(trainable_only=True))
            if worker.rank == 0:
                save_adapter(trainer.engine.module, trained, folder / adapter_folder(cell))
    return found


def layout_of(worker: Any, axes: str) -> Any:
    from hfpar.parallel.layout import Layout

    sizes: dict[str, Any] = {f"{axes[:2]}_size": 2} if axes else {}
    return Layout(rank=worker.rank, world_size=worker.world_size, **sizes)


def train_and_record(engine: Any, layout: Any) -> dict[str, Any]:
    """A few steps over all samples, a share of them on each rank."""
    import torch

    from hfpar.data.stream import build_stream
    from hfpar.train.step import train_step

    torch.manual_seed(layout.rank)
    stream = build_stream(make_samples(SAMPLES)[layout.dp_rank :: layout.dp_size])
    gradients: list[dict[str, Any]] = []
    step = engine.step

    def recorded(max_grad_norm: float | None) -> float:
        gradients.append({name: value.clone() for name, value in engine.gradients()})
        norm: float = step(max_grad_norm)
        return norm

    engine.step = recorded
    first = {name: value.clone() for name, value in engine.parameters()}
    results = [train_step(engine, [stream], layout, BOUND) for _ in range(STEPS)]
    return {
        "first": first,
        "gradients": gradients,
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "last": {name: value.clone() for name, value in engine.parameters()},
    }


def adapter_folder(cell: Cell) -> str:
    return "-".join(cell).replace(" ", "_").replace(",", "")


# One plain process


def plain_run(folder: Path, model: str, name: str, first: dict[str, Any]) -> dict[str, Any]:
    """The same steps with Transformers and PEFT alone; what is drawn at random is taken from `first`."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hfpar.verify.documents import Document
    from hfpar.verify.reference import accumulate_gradients, gradients_of, parameters_of, set_parameters

    config = config_of(folder, model, name)
    init = config.init_lora_weights
    is_drawn = init in ("default", "gaussian", "loftq")
    rows: Any = config.trainable_token_indices
    if model == "untied":
        rows = {"embed_tokens": rows, "lm_head": ALL[name].get("head_rows")}
        rows = {place: sorted(chosen) for place, chosen in rows.items() if chosen} or None
    peft_config = LoraConfig(
        task_type="CAUSAL_LM",
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]
        target_modules=config.lora_target_modules,
        modules_to_save=config.modules_to_save,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
        init_lora_weights=True if is_drawn else init,  # type: ignore[arg-type]
        trainable_token_indices=sorted(rows) if isinstance(rows, list) else rows,
    )
    plain = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32)
    if config.quantization and is_drawn:
        quantize_plain(plain)
    plain = get_peft_model(plain, peft_config).train()
    if config.quantization and not is_drawn:
        quantize_plain(plain)
    if is_drawn:
        drawn = {key: value for key, value in first.items() if ".lora_A." in key or ".lora_B." in key}
        set_parameters(plain, drawn)
    result: dict[str, Any] = {"first": parameters_of(plain), "gradients": [], "losses": [], "norms": []}
    trained = [parameter for parameter in plain.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPSILON, weight_decay=0.0)
    documents = [Document(sample.input_ids, sample.labels) for sample in make_samples(SAMPLES)]
    for _ in range(STEPS):
        result["losses"].append(accumulate_gradients(plain, documents, torch.device("cpu")))
        result["gradients"].append(gradients_of(plain))
        result["norms"].append(float(torch.nn.utils.clip_grad_norm_(trained, BOUND)))
        optimizer.step()
        optimizer.zero_grad()
    result["last"] = parameters_of(plain)
    with torch.no_grad():
        result["logits"] = plain.eval()(torch.arange(VOCAB_SIZE)[None]).logits
    return result


def quantize_plain(model: Any) -> None:
    """Give layers the values that bitsandbytes makes of them, but for adapters and the head."""
    import bitsandbytes.functional as bnb
    import torch

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "lora_" not in name and not name.endswith("lm_head"):
            packed, state = bnb.quantize_4bit(
                module.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4"
            )
            module.weight.data = bnb.dequantize_4bit(packed, state)


def logits_of(folder: Path, model: str, adapter: Path, prepare: Callable[[Any], None] | None = None) -> Any:
    """Of an adapter as PEFT loads it, on the original base or what `prepare` makes of it."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / model, dtype=torch.float32)
    if prepare is not None:
        prepare(base)
    with torch.no_grad():
        return PeftModel.from_pretrained(base, adapter).eval()(torch.arange(VOCAB_SIZE)[None]).logits


# The tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    build_llama(folder / "tied")
    build_llama(folder / "wide", hidden_size=128, intermediate_size=128)
    build_llama(folder / "untied", tie_word_embeddings=False)
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[Cell, Any]]:
    cells = CELLS + DROPOUT_CELLS
    parts = [cells[: len(cells) // 2], cells[len(cells) // 2 :]]  # each within the time that processes have
    first, second = (spawn(train_cells, 2, folder, folder, part) for part in parts)
    return [mine | more for mine, more in zip(first, second, strict=True)]


@pytest.fixture(scope="module")
def plain(folder: Path, found: list[dict[Cell, Any]]) -> dict[tuple[str, str], Any]:
    cells = {cell[1:]: cell for cell in CELLS}
    return {place: plain_run(folder, *place, found[0][cell]["first"]) for place, cell in cells.items()}


def difference(mine: Any, expected: Any) -> float:
    """Relative; of what is zero, absolute."""
    assert mine.shape == expected.shape
    return float((mine - expected).norm() / (expected.norm() or 1.0))


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_as_one_plain_process_with_peft(cell: Cell, found: Any, plain: Any) -> None:
    expected = plain[cell[1:]]
    for mine in (ranks[cell] for ranks in found):
        assert mine["losses"] == pytest.approx(expected["losses"], rel=1e-5)
        assert mine["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert mine["losses"][-1] < mine["losses"][0]
        for key in ("first", "last"):
            assert set(mine[key]) == set(expected[key])
            for name, value in expected[key].items():
                assert difference(mine[key][name], value) < 1e-5, (key, name)
        for step, gradients in enumerate(expected["gradients"]):
            assert set(mine["gradients"][step]) == set(gradients)
            for name, gradient in gradients.items():
                assert difference(mine["gradients"][step][name], gradient) < 1e-5, (step, name)


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_only_what_is_chosen_changes(cell: Cell, found: Any) -> None:
    mine = found[0][cell]
    trained = set(mine["gradients"][0])
    for name, value in mine["first"].items():
        assert (value != mine["last"][name]).any() == (name in trained), name


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell[1] != "wide"], ids=" ".join)
def test_first_values_are_the_same_on_every_engine(cell: Cell, found: Any) -> None:
    """To the bit, whatever an engine has of the base when adapters are put on it."""
    mine, other = found[1][cell], found[0][("ddp", cell[1], cell[2])]
    for name in mine["gradients"][0]:
        assert (mine["first"][name] == other["first"][name]).all(), name


@pytest.mark.parametrize("cell", CELLS, ids=" ".join)
def test_the_adapter_fits_the_original_base(cell: Cell, folder: Path, plain: Any, found: Any) -> None:
    adapter = folder / adapter_folder(cell)
    prepare = None
    if cell[2] in ("nf4 pissa", "nf4 olora"):
        prepare = partial(quantize_the_rest, adapter=adapter)
    elif cell[2] in NF4:
        prepare = quantize_plain
    mine = logits_of(folder, cell[1], adapter, prepare)
    assert difference(mine, plain[cell[1:]]["logits"]) < 1e-5


def quantize_the_rest(base: Any, adapter: Path) -> None:
    """The second half of an adapter says what was taken from the base before it was quantized."""
    from safetensors.torch import load_file

    values, scaling, rank = load_file(adapter / "adapter_model.safetensors"), LORA["lora_alpha"] / 4, 4
    taken = {}
    for name, a in values.items():
        if name.endswith("lora_A.weight"):
            b = values[name.replace("lora_A", "lora_B")]
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            taken[layer] = -scaling * b[:, rank:] @ a[rank:]
    for layer, part in taken.items():
        base.get_submodule(layer).weight.data -= part
    quantize_plain(base)
    for layer, part in taken.items():
        base.get_submodule(layer).weight.data += part


@pytest.mark.parametrize("cell", DROPOUT_CELLS, ids=" ".join)
def test_dropout_is_the_same_on_every_engine(cell: Cell, found: Any) -> None:
    for ranks in found:
        mine, other = ranks[cell], ranks[("ddp", cell[1], cell[2])]
        assert mine["losses"] == pytest.approx(other["losses"], rel=1e-5)
        for step, gradients in enumerate(other["gradients"]):
            for name, gradient in gradients.items():
                assert difference(mine["gradients"][step][name], gradient) < 1e-5, (step, name)
