"""The model of a run, found and checked before its weights load."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hfpar.config.schema import SFTConfig
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.demo_assets import DemoAssets
from hfpar.train.model import ModelSource, download, find_model
from hfpar.train.probe import check_family


def with_demo_assets(config: SFTConfig, layout: Layout) -> SFTConfig:
    """The config with the demo's model and data, built on rank 0, where it names none."""
    if config.model_name_or_path is not None:
        return config
    assets = DemoAssets.beside(Path(str(config.output_dir)))
    on_main(layout, assets.build)
    return replace(
        config,
        model_name_or_path=str(assets.model),
        dataset=[str(assets.train_data), str(assets.planted_data)],
        eval_dataset=str(assets.eval_data),
    )


def make_layout(config: SFTConfig, rank: int, world_size: int) -> Layout:
    """A rank's place, with the sizes of the config."""
    return Layout(
        rank,
        world_size,
        cp_size=config.cp_size or 1,
        sp_size=config.sp_size or 1,
        tp_size=config.tp_size or 1,
        tp_sequence=config.tp_sequence,
    )


def find_checked_model(config: SFTConfig, layout: Layout) -> ModelSource:
    """Everything about the model but its weights, of a family that hfpar is known to compute right.

    Raises:
        ConfigError: no such model, no tokenizer, or a family that comes out wrong or can't be checked.
    """
    on_main(layout, lambda: download(config))
    source = find_model(config)
    check_family(source.config, layout=layout, trust_remote_code=config.trust_remote_code)
    return source
