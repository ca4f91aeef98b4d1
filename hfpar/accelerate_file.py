"""The `accelerate launch` above a process: its command line and its file.

Accelerate drops settings without a word: a misspelt key in a section, a section or flag that belongs to another
engine, processes that it doesn't start. None of that shows in the environment of a process, so it is looked for
where it is written.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from hfpar.config.engine import EngineSettings
from hfpar.errors import ConfigError

_ENGINE_OF = {"FSDP": "fsdp", "DEEPSPEED": "zero", "MULTI_GPU": "ddp", "NO": "ddp", "MULTI_CPU": "ddp"}
# Accelerate's names for what only a DeepSpeed launch reads; those of FSDP all begin with fsdp_.
_DEEPSPEED_NAMES = frozenset(
    "deepspeed_config_file zero_stage offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
    "offload_param_nvme_path gradient_accumulation_steps gradient_clipping zero3_init_flag zero3_save_16bit_model "
    "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter deepspeed_multinode_launcher "
    "deepspeed_moe_layer_cls_names".split()
)
_PARALLELISM = "parallelism_config_"
_NEVER_READ = (
    "megatron_lm_config",
    "fp8_config",
    "mpirun_config",
    "tpu_name",
    "tpu_zone",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "tpu_vm",
    "tpu_env",
    "command_file",
    "commands",
    "downcast_bf16",
)


@dataclass(frozen=True)
class LaunchRequest:
    """What a launch was asked for."""

    num_processes: int | None
    """None: as many as Accelerate likes."""
    engine: str | None
    """`ddp`, `fsdp` or `zero`, as the file says; None where flags or no file decide."""
    distributed_type: str
    use_cpu: bool
    where: str
    """The file or the command line, for messages."""
    parallelism: Mapping[str, Any] = field(default_factory=dict)
    """What of `parallelism_config` the file and the launcher's flags name, without that prefix."""


def find_launcher() -> list[str]:
    """The arguments of the `accelerate launch` (or `hfpar launch`) above this process; [] outside one."""
    import psutil

    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return []
    for parent in parents:
        try:
            arguments = launcher_arguments(parent.cmdline())
        except psutil.Error:
            continue
        if arguments is not None:
            return arguments
    return []


def launcher_arguments(command: Sequence[str]) -> list[str] | None:
    """What follows `accelerate launch` in a command line, however it is spelt; None if it isn't one."""
    for index, word in enumerate(command):
        rest, name = list(command[index + 1 :]), Path(word).name
        if name == "accelerate-launch":
            return rest
        if name in ("accelerate", "hfpar") and rest[:1] == ["launch"]:
            return rest[1:]
        if word == "-m" and rest[:1] == ["accelerate.commands.launch"]:
            return rest[1:]
        if word == "-m" and rest[:2] in (
            ["accelerate.commands.accelerate_cli", "launch"],
            ["hfpar.cli", "launch"],
        ):
            return rest[2:]
    return None


def read_request(launcher: Sequence[str]) -> LaunchRequest:
    """Read the launcher's arguments and its file.

    Args:
        launcher: as `find_launcher` gives them. A relative path in them is relative to the current folder, which
            is the launcher's.

    Raises:
        ConfigError: something in them that neither Accelerate nor hfpar would honour.
    """
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    arguments = parser.parse_args(list(launcher))
    config_file = arguments.config_file
    if config_file is None and os.path.isfile(default_config_file) and not arguments.cpu:
        config_file = default_config_file
    if config_file is None:
        return _without_file(parser, arguments)
    file: Any = load_config_from_file(config_file)
    if _word(file.compute_environment) != "LOCAL_MACHINE":
        raise ConfigError(
            f"compute_environment: {_word(file.compute_environment)} isn't supported; use LOCAL_MACHINE"
        )
    where, distributed_type = f"the Accelerate file {config_file}", _word(file.distributed_type)
    if distributed_type not in _ENGINE_OF:
        raise ConfigError(
            f"distributed_type: {distributed_type} isn't supported; use MULTI_GPU, FSDP or DEEPSPEED"
        )
    by_flag = _engine_of_flags(arguments)
    engine = by_flag or _ENGINE_OF[distributed_type]
    _refuse_dead_settings(vars(file), set(vars(arguments)), engine, distributed_type)
    _refuse_dead_flags(parser, arguments, engine)
    parallelism = {
        **_parallelism_of(file.parallelism_config or {}),
        **_parallelism_of(_given(parser, arguments)),
    }
    _refuse_dead_parallelism(parallelism, parser)
    return LaunchRequest(
        num_processes=arguments.num_processes or file.num_processes,
        engine=None if by_flag else engine,
        distributed_type=distributed_type,
        use_cpu=bool(arguments.cpu or file.use_cpu),
        where=where,
        parallelism=parallelism,
    )


def check_launch(
    request: LaunchRequest, settings: EngineSettings, world_size: int, *, parallelism: bool = False
) -> None:
    """Compare what was asked for with what runs.

    Args:
        request: what was asked for.
        settings: the engine that runs.
        world_size: the processes that run.
        parallelism: whether `parallelism_config` has been handed over.

    Raises:
        ConfigError: another number of processes, another engine, or sizes that got lost.
    """
    expected = request.num_processes
    if expected is not None and expected > 0 and expected != world_size:
        reason = "`use_cpu: true` and `--cpu` start one process; " if request.use_cpu else ""
        raise ConfigError(
            f"num_processes: {request.where} asks for {expected} processes, but this launch runs {world_size}: "
            f"{reason}set `distributed_type: MULTI_GPU` and `use_cpu: false` (hfpar uses gloo and the CPU where "
            "there is no GPU), as in accelerate_configs/ddp.yaml"
        )
    if request.engine is not None and not settings.name.startswith(request.engine):
        raise ConfigError(
            f"distributed_type: {request.where} asks for {request.distributed_type}, but this launch runs "
            f"{settings.name}; set `use_cpu: false` and drop `--cpu`"
        )

    for name, size in request.parallelism.items():
        if name.endswith("_size") and size != 1 and not parallelism:
            fix = (
                f"give the script --{name} {size} instead"
                if name in ("cp_size", "sp_size", "tp_size")
                else "remove it"
            )
            raise ConfigError(
                f"parallelism_config: {request.where} asks for {name} {size}, which Accelerate drops in this launch; "
                f"{fix}"
            )


def _without_file(parser: ArgumentParser, arguments: Namespace) -> LaunchRequest:
    engine = _engine_of_flags(arguments)
    _refuse_dead_flags(parser, arguments, engine or "ddp")
    parallelism = _parallelism_of(_given(parser, arguments))
    _refuse_dead_parallelism(parallelism, parser)
    where = "the launch command"
    return LaunchRequest(
        arguments.num_processes, None, "NO", bool(arguments.cpu), where, parallelism=parallelism
    )


def _given(parser: ArgumentParser, arguments: Namespace) -> dict[str, Any]:
    """The launcher's flags that say something else than their default."""
    return {name: value for name, value in vars(arguments).items() if value != parser.get_default(name)}


def _parallelism_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name.removeprefix(_PARALLELISM): value
        for name, value in values.items()
        if name.startswith(_PARALLELISM)
    }


def _engine_of_flags(arguments: Namespace) -> str | None:
    if arguments.use_deepspeed:
        return "zero"
    if arguments.use_fsdp:
        return "fsdp"
    return "ddp" if arguments.multi_gpu else None


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))


# What Accelerate would drop


def _refuse_dead_settings(
    file: Mapping[str, Any], known: set[str], engine: str, distributed_type: str
) -> None:
    for name in _NEVER_READ:
        value = file.get(name)
        if value and str(value).lower() not in ("no", "false"):
            raise ConfigError(f"{name}: in the Accelerate file isn't supported; remove it")
    if file.get("main_training_function") not in (None, "main"):
        raise ConfigError("main_training_function: only a TPU launch reads it; remove it")
    _check_keys("parallelism_config", file, {name for name in known if name.startswith(_PARALLELISM)})
    dynamo = {name for name in known if name.startswith("dynamo_")}
    _check_keys("dynamo_config", file, dynamo | {name.removeprefix("dynamo_") for name in dynamo})
    fsdp = {name for name in known if name.startswith("fsdp_")} | {"fsdp_ignored_modules"}
    _check_keys("fsdp_config", file, fsdp | {name.removeprefix("fsdp_") for name in fsdp})
    _check_keys("deepspeed_config", file, set(_DEEPSPEED_NAMES))
    for section, owner, asked in (
        ("fsdp_config", "fsdp", "FSDP"),
        ("deepspeed_config", "zero", "DEEPSPEED"),
    ):
        if file.get(section) and engine != owner:
            raise ConfigError(
                f"{section}: does nothing with distributed_type: {distributed_type}; set "
                f"`distributed_type: {asked}` or remove it"
            )


def _refuse_dead_parallelism(parallelism: Mapping[str, Any], parser: ArgumentParser) -> None:
    for name, value in parallelism.items():
        axis = name.partition("_")[0]
        handed_over = name.endswith(("_size", "_backend")) or parallelism.get(f"{axis}_size", 1) != 1
        if not handed_over and value != parser.get_default(_PARALLELISM + name):
            raise ConfigError(
                f"{_PARALLELISM}{name}: does nothing without {_PARALLELISM}{axis}_size above 1; remove it"
            )


def _check_keys(section: str, file: Mapping[str, Any], known: set[str]) -> None:
    for key in file.get(section) or {}:
        if key not in known:
            near = [name for name in known if name.endswith(f"_{key}")] or get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it may hold {', '.join(sorted(known))}"
            raise ConfigError(f"{key}: no setting of {section} in the Accelerate file; {hint}")


def _refuse_dead_flags(parser: ArgumentParser, arguments: Namespace, engine: str) -> None:
    given = _given(parser, arguments)
    _refuse_flags("zero", engine, (name for name in given if name in _DEEPSPEED_NAMES), "--use_deepspeed")
    _refuse_flags("fsdp", engine, (name for name in given if name.startswith("fsdp_")), "--use_fsdp")


def _refuse_flags(owner: str, engine: str, given: Iterable[str], switch: str) -> None:
    for name in given:
        if engine != owner:
            raise ConfigError(
                f"--{name}: does nothing in this launch; use {switch} or a --config_file of that engine"
            )
