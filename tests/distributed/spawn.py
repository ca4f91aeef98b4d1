"""What the tests of training with several processes share: starting them, small models, runs as training makes them."""

import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.engine import DDPSettings, EngineSettings, FSDP2Settings, LaunchDefaults, ZeROSettings
from hfpar.config.schema import SFTConfig
from hfpar.verify.processes import Worker, WorkerError, run_processes

ENGINES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
VOCAB_SIZE = 97
"""No multiple of 2 or 4: the last rank's rows are fewer."""


def spawn(function: Callable[..., Any], world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """Run `function(worker, *arguments)` in processes that share a group; returns each rank's result."""
    results: dict[int, Any] = {}
    try:
        run_processes(
            _work,
            world_size,
            (function, arguments),
            folder=folder,
            timeout=400,
            on_message=results.__setitem__,
            preload="tests.distributed.preload",
        )
    except WorkerError as error:
        pytest.fail(f"{error}\n{error.details}", pytrace=False)
    return [pickle.loads(results[rank]) for rank in range(world_size)]


def _work(worker: Worker, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    from hfpar.accelerator import prepare_deepspeed
    from hfpar.train.quiet import quiet_libraries

    warnings.simplefilter("ignore")
    prepare_deepspeed(on_gpu=False)
    gc.freeze()  # DeepSpeed collects garbage often; what is loaded stays
    worker.join_group()
    quiet_libraries(is_main=worker.rank == 0)
    # As bytes: tensors would otherwise go through shared memory, which ends with this process.
    worker.send(pickle.dumps(function(worker, *arguments)))


def engine_settings(name: str, **options: Any) -> EngineSettings:
    """Of an engine; `options` are fields of its settings."""
    if name == "ddp":
        return DDPSettings(**options)
    if name == "fsdp2":
        return FSDP2Settings(**options)
    zero: dict[str, Any] = {"stage": int(name.removeprefix("zero"))}
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    zero |= dict.fromkeys(sizes, "auto")
    return ZeROSettings(deepspeed_config={"zero_optimization": zero}, **options)


def build_llama(folder: Path, *, seed: int = 0, **changes: Any) -> Path:
    """Write a two-layer Llama, with a bias in attention and tied embeddings unless `changes` say otherwise."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    values: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 60,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "initializer_range": 0.1,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": 2,
    }
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**values | changes)).save_pretrained(folder)
    return folder


def make_samples(count: int, seed: int = 0, longest: int = 24) -> list[Any]:
    """Random documents of varied lengths, the first part of each without labels."""
    import random

    from hfpar.data.stream import Sample

    rng = random.Random(seed)
    samples = []
    for _ in range(count):
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, longest))]
        prompt = rng.randrange(len(tokens))
        samples.append(Sample(tokens, [-100] * prompt + tokens[prompt:]))
    return samples


def make_layout(worker: Worker) -> Any:
    """All processes are data-parallel ranks."""
    from hfpar.parallel.layout import Layout

    return Layout(rank=worker.rank, world_size=worker.world_size)


@contextmanager
def make_trainer(
    config: SFTConfig, settings: EngineSettings, samples: list[Any], layout: Any, token_rows: Any = None
) -> Iterator[Any]:
    """A trainer with everything fresh, put together as `hfpar.train.run.run_sft` does."""
    import torch

    from hfpar.data.loader import StepLoader
    from hfpar.engine.build import build_engine
    from hfpar.models.load import load_model_config
    from hfpar.train import data, loop, model, optim
    from hfpar.train.run import settle

    config = settle(config, LaunchDefaults())
    device = torch.device("cpu")
    torch.manual_seed(config.seed)
    folder = Path(str(config.model_name_or_path))
    source = model.ModelSource(folder, load_model_config(folder), tokenizer=None)
    loader = StepLoader(samples, **data.batch_options(config, layout, pad_token_id=0))
    schedule = loop.Schedule.of(config, loader, layout)
    quantization = model.choose_quantization(config, source, settings, device)
    engine = build_engine(
        settings,
        model.build_model(config, source, settings, layout, quantization, token_rows),
        lambda parameters: optim.make_optimizer(parameters, config),
        layout,
        device,
        checkpoint_folder=folder,
        gradient_accumulation_steps=config.gradient_accumulation_steps or 1,
        max_grad_norm=config.max_grad_norm or None,
    )
    try:
        output_dir = Path(str(config.output_dir))
        output_dir.mkdir(parents=True, exist_ok=True)
        yield loop.Trainer(
            config=config,
            layout=layout,
            engine=engine,
            loader=loader,
            lr_schedule=optim.make_schedule(engine.optimizer, config, schedule.total_steps),
            schedule=schedule,
            eval_batches=[],
            output_dir=output_dir,
        )
    finally:
        engine.close()


def train(config: SFTConfig, settings: EngineSettings, samples: list[Any], layout: Any) -> dict[str, Any]:
    """Train from the start or the last checkpoint; returns the last weights and where the run stands."""
    with make_trainer(config, settings, samples, layout) as trainer:
        trainer.resume()
        trainer.train(None)
        return {
            "weights": {name: value.clone() for name, value in trainer.engine.parameters()},
            "position": trainer.position,
            "next": (trainer.loader.epoch, trainer.loader.step),
            "scale": trainer.engine.scaler.get_scale() if hasattr(trainer.engine, "scaler") else None,
        }


def changed(config: SFTConfig, **values: Any) -> SFTConfig:
    """A config with other values."""
    return replace(config, **values)
