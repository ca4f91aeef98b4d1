"""What the Accelerate file may set is in effect, and changes the numbers only where it is meant to."""

import json
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from tests.distributed.spawn import (  # noqa: TID251
    ENGINES,
    build_llama,
    engine_settings,
    make_layout,
    make_samples,
    make_trainer,
    spawn,
)

CHECKPOINTED = {"gradient_checkpointing": True}
EXACT = {
    # name: (engine, its settings, settings of the run)
    **{f"{engine}": (engine, {}, {}) for engine in ENGINES},
    **{f"{engine} gradient_checkpointing": (engine, {}, CHECKPOINTED) for engine in ENGINES},
    "fsdp2 activation_checkpointing": ("fsdp2", {"activation_checkpointing": True}, {}),
    "fsdp2 without resharding": ("fsdp2", {"reshard_after_forward": False}, {}),
    "fsdp2 root only": ("fsdp2", {"transformer_layer_cls_to_wrap": ()}, {}),
    "fsdp2 named layers": ("fsdp2", {"transformer_layer_cls_to_wrap": ("LlamaDecoderLayer",)}, {}),
    "fsdp2 offload": ("fsdp2", {"offload_params": True}, {}),
    "zero3 without cutting while loading": ("zero3", {"zero3_init": False}, {}),
    "ddp eager": ("ddp", {}, {"attn_implementation": "eager"}),
    "ddp sdpa": ("ddp", {}, {"attn_implementation": "sdpa"}),
    "ddp fused": ("ddp", {}, {"optim": "adamw_torch_fused"}),
}
ROUNDED = {
    **{f"{engine} bf16": (engine, {"mixed_precision": "bf16"}, {}) for engine in ENGINES},
    "ddp fp16": ("ddp", {"mixed_precision": "fp16"}, {}),
    "fsdp2 fp16": ("fsdp2", {"mixed_precision": "fp16"}, {}),
    "ddp bf16 lora": ("ddp", {"mixed_precision": "bf16"}, {"lora_r": 4}),
    "fsdp2 bf16 base lora": ("fsdp2", {"mixed_precision": "bf16"}, {"lora_r": 4, "dtype": "bfloat16"}),
    "zero3 bf16 lora": ("zero3", {"mixed_precision": "bf16"}, {"lora_r": 4}),
    "ddp bf16 weights": ("ddp", {}, {"dtype": "bfloat16"}),
    "fsdp2 bf16 weights": ("fsdp2", {}, {"dtype": "bfloat16"}),
}


def train_cells(worker: Any, folder: Path) -> dict[str, Any]:
    layout = make_layout(worker)
    samples = make_samples(12, longest=30)
    found = {}
    for number, (name, (engine, options, values)) in enumerate((EXACT | ROUNDED).items()):
        worker.send(name)
        config = SFTConfig(
            model_name_or_path=str(folder / "model"),
            output_dir=str(folder / f"run{number}"),
            max_steps=3,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            max_grad_norm=0.5,
            **values,
        )
        with make_trainer(config, engine_settings(engine, **options), samples, layout) as trainer:
            module = trainer.engine.module
            trainer.train(None)
            found[name] = {
                "checkpointing": any(getattr(m, "gradient_checkpointing", False) for m in module.modules()),
                "weight_dtypes": {str(p.dtype) for p in module.parameters() if not p.requires_grad}
                or {str(p.dtype) for p in module.parameters()},
            }
        if worker.rank == 0:
            rows = (folder / f"run{number}" / "metrics.jsonl").read_text().splitlines()
            found[name]["rows"] = [json.loads(row) for row in rows]
    return found


def train_with_unused_parameter(worker: Any, folder: Path) -> str:
    """What DDP is refused with: it would leave gradients that share a bucket with the unused one as they are."""
    import torch

    config = SFTConfig(
        model_name_or_path=str(folder / "model"), output_dir=str(folder / "unused"), max_steps=1
    )
    with make_trainer(config, engine_settings("ddp"), make_samples(12), make_layout(worker)) as trainer:
        trainer.engine.module.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
        with pytest.raises(ConfigError) as caught:
            trainer.train(None)
    return str(caught.value)


def train_all(worker: Any, folder: Path) -> tuple[dict[str, Any], str]:
    return train_cells(worker, folder), train_with_unused_parameter(worker, folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    folder = tmp_path_factory.mktemp("settings")
    build_llama(folder / "model")
    return spawn(train_all, 2, folder, folder)[0]


@pytest.fixture(scope="module")
def found(results: tuple[dict[str, Any], str]) -> dict[str, Any]:
    return results[0]


def test_a_parameter_that_ddp_would_leave_unaveraged_is_refused(results: tuple[dict[str, Any], str]) -> None:
    assert "can't train unused, which the model doesn't use" in results[1]


def figures(cell: dict[str, Any]) -> list[float]:
    return [row[key] for row in cell["rows"] for key in ("loss", "grad_norm")]


@pytest.mark.parametrize("name", EXACT)
def test_numbers_stay(found, name):
    assert len(figures(found["ddp"])) == 6
    assert figures(found[name]) == pytest.approx(figures(found["ddp"]), rel=1e-5)


@pytest.mark.parametrize("name", ROUNDED)
def test_lower_precision_rounds_and_no_more(found, name):
    baseline, mine = figures(found["ddp"]), figures(found[name])
    assert mine[0] == pytest.approx(
        baseline[0], rel=1e-2
    )  # the first loss, before any update; bf16 has 8 bits
    if "lora" not in name:
        assert mine[:2] == pytest.approx(baseline[:2], rel=3e-2)
    assert mine != baseline, "nothing was rounded: the setting had no effect"
    assert all(value == value and value > 0 for value in mine)


def test_checkpointing_is_on_where_it_is_asked_for(found):
    on = {name for name, cell in found.items() if cell["checkpointing"]}
    assert on == {name for name in found if "checkpointing" in name}


def test_a_frozen_base_keeps_its_dtype(found):
    assert found["fsdp2 bf16 base lora"]["weight_dtypes"] == {"torch.bfloat16"}
    assert found["ddp bf16 lora"]["weight_dtypes"] == {"torch.float32"}


def diverge(worker: Any, folder: Path) -> str:
    """A learning rate that blows the weights up must end the run, not be saved."""
    from hfpar.errors import HfparError

    config = SFTConfig(
        model_name_or_path=str(folder / "model"),
        output_dir=str(folder / "diverged"),
        max_steps=50,
        save_steps=1,
        learning_rate=1e30,
        optim="sgd",
        max_grad_norm=0,
        per_device_train_batch_size=2,
    )
    samples = make_samples(12, longest=30)
    with make_trainer(config, engine_settings("ddp"), samples, make_layout(worker)) as trainer:
        try:
            trainer.train(None)
        except HfparError as error:
            return str(error)
    return "trained to the end"


def test_a_diverged_run_stops_on_every_rank_before_it_saves(tmp_path: Path):
    build_llama(tmp_path / "model")
    said = spawn(diverge, 2, tmp_path, tmp_path)
    assert said[0] == said[1] and "training diverged" in said[0], said
    stopped_at = int(said[0].split(":")[0].split()[1])
    saved = {int(path.name.split("-")[1]) for path in (tmp_path / "diverged").glob("checkpoint-*")}
    assert saved == set(range(1, stopped_at))
