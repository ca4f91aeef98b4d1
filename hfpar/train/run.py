"""Fine-tuning from end to end. Read `run_sft` first: it builds everything, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hfpar.accelerator import Launch, current_rank, read_launch
from hfpar.config.engine import LaunchDefaults
from hfpar.config.load import parse_sft_config
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.train.endings import run_to_exit_code


def main(argv: Sequence[str], demo_config: Path) -> int:
    """Run fine-tuning and turn every ending into an exit code: 0, 2 for what the user can mend, 130 for Ctrl-C.

    Args:
        argv: flags, as of `sft/train.py`.
        demo_config: the config that holds where neither a model nor data is named.
    """
    return run_to_exit_code(
        lambda: run_sft(parse_config(list(argv), demo_config), read_launch()), current_rank()
    )


# The config


def parse_config(argv: list[str], demo_config: Path) -> SFTConfig:
    """The config of the flags; the demo's, under the flags, where neither a model nor data is named.

    Raises:
        ConfigError: see `hfpar.config.load`; or data without a model.
    """
    config = parse_sft_config(argv)
    if config.model_name_or_path is None and config.dataset is None:
        return parse_sft_config(["--config", str(demo_config), *argv])
    if config.model_name_or_path is None:
        raise ConfigError(
            "model_name_or_path: missing; name the folder or hub id of the model to train on your data"
        )
    if config.dataset is None:
        raise ConfigError("dataset: missing; name the file or hub id to train on")
    return config


def settle(config: SFTConfig, defaults: LaunchDefaults) -> SFTConfig:
    """Fill what the Accelerate file may give, and what depends on other settings.

    Raises:
        ConfigError: a flag and the file contradict each other.
    """
    chosen: dict[str, int | float | str | None] = {}
    fallbacks = {
        "gradient_accumulation_steps": 1,
        "max_grad_norm": 1.0,
        "cp_size": 1,
        "sp_size": 1,
        "tp_size": 1,
    }
    for name, fallback in fallbacks.items():
        flag, file = getattr(config, name), getattr(defaults, name)
        if flag is not None and file is not None and flag != file:
            raise ConfigError(
                f"{name}: {flag} contradicts {file} in the Accelerate or DeepSpeed file; keep one"
            )
        chosen[name] = flag if flag is not None else file if file is not None else fallback
    if config.max_tokens_per_batch is None and config.per_device_train_batch_size is None:
        chosen["per_device_train_batch_size"] = 8
    chosen["output_dir"] = str(Path(config.output_dir or "runs/sft").expanduser())
    return replace(config, **chosen)  # type: ignore[arg-type]


# The run


def run_sft(config: SFTConfig, launch: Launch) -> None:
    """Train as `config` says, on the engine and ranks of `launch`.

    Raises:
        HfparError: anything that the user can mend, before weights load wherever it can be known by then.
    """
    config = settle(config, launch.defaults)

    from hfpar import accelerator as accelerate_launch
    from hfpar.train import (
        checkpoint,
        data,
        engines,
        export,
        inputs,
        loop,
        model,
        optim,
        summary,
        trackers,
        untrained_tokens,
    )
    from hfpar.train.quiet import quiet_libraries

    quiet_libraries(launch.is_main)
    accelerator = accelerate_launch.start(
        launch, report_to=trackers.names(config), project_dir=config.output_dir
    )
    device = accelerate_launch.device_of(accelerator)
    layout = inputs.make_layout(config, launch.rank, launch.world_size)
    config = inputs.with_demo_assets(config, layout)
    optim.check_optimizer(config, launch.settings, device)
    source = inputs.find_checked_model(config, layout)
    quantization = model.choose_quantization(config, source, launch.settings, device)
    run_data = data.read_data(config, source, layout)
    loader = data.make_loader(config, run_data, layout, pad_token_id=source.pad_token_id)
    schedule = loop.Schedule.of(config, loader, layout)
    stop_token = data.stop_token(loader.samples, source.tokenizer)
    data.warn_of_overlaps(config, run_data, layout)
    token_rows = untrained_tokens.choose_rows(config, source, loader.samples, layout)
    folder = checkpoint.RunFolder(config, layout)

    module = model.build_model(config, source, launch.settings, layout, quantization, token_rows)
    engine = engines.wrap(config, launch.settings, module, source.folder, layout, device)
    trainer = loop.Trainer(
        config=config,
        layout=layout,
        engine=engine,
        loader=loader,
        lr_schedule=optim.make_schedule(engine.optimizer, config, schedule.total_steps),
        schedule=schedule,
        eval_batches=data.eval_batches(run_data.eval_samples, config, layout),
        output_dir=folder.path,
    )
    trainer.resume()
    folder.claim()
    summary.show(config, launch, layout, engine, loader, schedule, run_data, trainer.position)
    trainer.train(trackers.start(accelerator, config))
    export.export_model(engine, source.tokenizer, folder.path, layout, stop_token=stop_token)
    summary.finish(folder.path, run_data, layout)
    folder.release()
    engine.close()
    accelerate_launch.finish(accelerator)
