"""Experiment trackers, through Accelerate: one run in all, logged by rank 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError, MissingDependencyError, first_line

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "hfpar"


def names(config: SFTConfig) -> list[str]:
    """The trackers of `report_to`.

    Raises:
        MissingDependencyError: one that isn't installed.
    """
    wanted = [config.report_to] if isinstance(config.report_to, str) else list(config.report_to)
    if "none" in wanted:
        return []
    from accelerate.tracking import get_available_trackers

    installed = [str(getattr(tracker, "value", tracker)) for tracker in get_available_trackers()]
    if "all" in wanted:
        return installed
    for name in wanted:
        if name not in installed:
            raise MissingDependencyError(
                f"report_to: {name} isn't installed: pip install {name.replace('comet_ml', 'comet-ml')} "
                "(wandb, tensorboard and trackio come with 'hfpar[tracking]')"
            )
    return wanted


def start(accelerator: Accelerator, config: SFTConfig) -> Callable[[dict[str, float], int], None] | None:
    """Open the trackers; returns what takes a row of figures and its step, or None without trackers.

    Raises:
        ConfigError: a tracker that doesn't start.
    """
    if not accelerator.log_with:
        return None
    plain = {
        key: value if isinstance(value, int | float | str | bool) else str(value)
        for key, value in asdict(config).items()
    }
    options = {"wandb": {"name": config.run_name}} if config.run_name else {}
    try:
        accelerator.init_trackers(PROJECT, config=plain, init_kwargs=options)
    except Exception as error:  # each tracker raises its own kinds
        said = first_line(error)
        raise ConfigError(f"report_to: {config.report_to} didn't start: {said}") from error
    return lambda row, step: accelerator.log(row, step=step)
