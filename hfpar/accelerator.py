"""The launch: what `accelerate launch` handed over, checked against its file, and the only `Accelerator()`.

Everything that reads the environment is here. The reading itself is pure (it takes the environment as an
argument), so each refusal is tested without a launch.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfpar.config.engine import (
    DDPSettings,
    EngineSettings,
    FSDP2Settings,
    LaunchDefaults,
    MixedPrecision,
    ZeROSettings,
)
from hfpar.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


@dataclass(frozen=True)
class Launch:
    """One rank's view of how the run was started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    settings: EngineSettings
    defaults: LaunchDefaults

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and writes."""
        return self.rank == 0


def read_launch(environ: Mapping[str, str] | None = None, launcher: Sequence[str] | None = None) -> Launch:
    """Read how this process was started and check it against the Accelerate config file.

    Args:
        environ: the environment; the process's own by default.
        launcher: the command line of the `accelerate launch` above this process; looked up by default.

    Raises:
        ConfigError: a setting that hfpar doesn't honour, or a launch that isn't what its file says.
    """
    environ = os.environ if environ is None else environ
    launcher = _find_launcher() if launcher is None else launcher
    world_size = int(environ.get("WORLD_SIZE", "1"))
    settings = read_engine_settings(environ)
    if launcher:
        _check_against_file(launcher, settings, world_size)
    return Launch(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        settings=settings,
        defaults=_read_defaults(environ, settings),
    )


def current_rank() -> int:
    """This process's rank as the launcher gave it; 0 outside a launch. Works before anything is set up."""
    return int(os.environ.get("RANK", "0"))


# What the file asks for


def read_engine_settings(environ: Mapping[str, str]) -> EngineSettings:
    """The engine and its settings from the variables that `accelerate launch` sets.

    Raises:
        ConfigError: a setting that hfpar doesn't honour, by the name it has in the Accelerate file.
    """
    mixed_precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision: {mixed_precision} in the Accelerate file isn't supported; use no, bf16 or fp16"
        )
    precision = cast(MixedPrecision, mixed_precision)
    _refuse_what_is_not_honoured(environ)
    if _flag(environ, "ACCELERATE_USE_DEEPSPEED"):
        return _read_zero(environ, precision)
    if _flag(environ, "ACCELERATE_USE_FSDP"):
        return _read_fsdp2(environ, precision)
    return DDPSettings(mixed_precision=precision)


def _flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "false").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _refuse_what_is_not_honoured(environ: Mapping[str, str]) -> None:
    dynamo = environ.get("ACCELERATE_DYNAMO_BACKEND", "NO")
    if dynamo.upper() != "NO":
        raise ConfigError(
            f"dynamo_backend: {dynamo} in the Accelerate file isn't supported; remove dynamo_config"
        )
    if _flag(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("distributed_type: MEGATRON_LM isn't supported; use MULTI_GPU, FSDP or DEEPSPEED")
    for name in ("dp_replicate_size", "tp_size", "cp_size", "sp_size"):
        value = int(environ.get(f"PARALLELISM_CONFIG_{name.upper()}", "1"))
        if value > 1:
            raise ConfigError(
                f"parallelism_config: {name} {value} in the Accelerate file isn't supported yet; set it to 1 "
                "(all processes are then data-parallel ranks)"
            )
    moe_layers = environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    if moe_layers:
        raise ConfigError(
            f"deepspeed_moe_layer_cls_names: {moe_layers} in the Accelerate file isn't supported; remove it"
        )


def _read_fsdp2(environ: Mapping[str, str], precision: MixedPrecision) -> FSDP2Settings:
    if environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError("fsdp_version: 1 in the Accelerate file isn't supported; set fsdp_version: 2")
    reshard = environ.get("FSDP_RESHARD_AFTER_FORWARD", "true").lower()
    if reshard not in ("true", "false"):
        raise ConfigError(f"fsdp_reshard_after_forward: {reshard} isn't an FSDP2 value; use true or false")
    refused = {
        "FSDP_IGNORED_MODULES": ("fsdp_ignored_modules", ("", "None")),
        "FSDP_FORWARD_PREFETCH": ("fsdp_forward_prefetch", ("false",)),
        "FSDP_BACKWARD_PREFETCH": ("fsdp_backward_prefetch", ("", "NO_PREFETCH", "BACKWARD_PRE")),
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": ("fsdp_activation_checkpointing_offload", ("false",)),
    }
    for variable, (name, allowed) in refused.items():
        value = environ.get(variable, allowed[0])
        if value not in allowed:
            raise ConfigError(
                f"{name}: {value} in the Accelerate file isn't supported under FSDP2; remove it"
            )
    state_dict_type = environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT").upper()
    if state_dict_type not in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        raise ConfigError(
            f"fsdp_state_dict_type: {state_dict_type}; use SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    return FSDP2Settings(
        mixed_precision=precision,
        reshard_after_forward=reshard == "true",
        offload_params=_flag(environ, "FSDP_OFFLOAD_PARAMS"),
        activation_checkpointing=_flag(environ, "FSDP_ACTIVATION_CHECKPOINTING"),
        state_dict_type=cast(Any, state_dict_type),
        transformer_layer_cls_to_wrap=_read_wrap_policy(environ),
    )


def _read_wrap_policy(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    policy = environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP").upper()
    if policy == "NO_WRAP":
        return ()
    if policy != "TRANSFORMER_BASED_WRAP":
        raise ConfigError(f"fsdp_auto_wrap_policy: {policy}; use TRANSFORMER_BASED_WRAP or NO_WRAP")
    names = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    return tuple(name.strip() for name in names.split(",") if name.strip()) or None


# DeepSpeed keys that reach DeepSpeed as written. What is left out is either hfpar's own to set (batch size,
# clipping), or would change the training without hfpar knowing.
_DEEPSPEED_KEYS = frozenset(
    "zero_optimization bf16 fp16 communication_data_type prescale_gradients gradient_predivide_factor "
    "sparse_gradients zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown "
    "memory_breakdown steps_per_print dump_state comms_logger flops_profiler aio gradient_clipping "
    "gradient_accumulation_steps train_micro_batch_size_per_gpu train_batch_size "
    "graph_harvesting disable_allgather torch_autocast".split()
)


def _read_zero(environ: Mapping[str, str], precision: MixedPrecision) -> ZeROSettings:
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    config = _read_deepspeed_json(Path(path)) if path else _deepspeed_config_from_fields(environ)
    unknown = sorted(set(config) - _DEEPSPEED_KEYS)
    if unknown:
        hint = {
            "optimizer": "set `optim` and `learning_rate` instead",
            "scheduler": "set `lr_scheduler_type` instead",
            "activation_checkpointing": "set `gradient_checkpointing: true` instead",
        }.get(unknown[0], "remove it")
        raise ConfigError(f"{unknown[0]} in the DeepSpeed config isn't supported; {hint}")
    zero = config.get("zero_optimization")
    stage = zero.get("stage") if isinstance(zero, dict) else None
    if stage not in (1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: {stage} in the DeepSpeed config; use 1, 2 or 3")
    for key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
        if config.get(key, "auto") != "auto":
            raise ConfigError(
                f"{key}: {config[key]} in the DeepSpeed config; write auto: the batch comes from "
                "per_device_train_batch_size or max_tokens_per_batch"
            )
    _check_deepspeed_precision(config, precision)
    return ZeROSettings(
        mixed_precision=_deepspeed_precision(config, precision),
        deepspeed_config=config,
        zero3_init=_flag({"v": environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true")}, "v"),
    )


def _read_deepspeed_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"deepspeed_config_file: {path} can't be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"deepspeed_config_file: {path} line {error.lineno}: {error.msg}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"deepspeed_config_file: {path} holds no JSON object")
    return config


def _deepspeed_config_from_fields(environ: Mapping[str, str]) -> dict[str, Any]:
    """The same DeepSpeed config that Accelerate makes of the file's own fields."""
    zero: dict[str, Any] = {"stage": int(environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for field in ("optimizer", "param"):
        device = environ.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{field.upper()}_DEVICE", "none")
        if device == "nvme":
            raise ConfigError(
                f"offload_{field}_device: nvme needs a path; write it in a deepspeed_config_file instead"
            )
        if device != "none":
            zero[f"offload_{field}"] = {"device": device}
    return {"zero_optimization": zero}


def _enabled(config: Mapping[str, Any], section: str) -> bool | str:
    return config.get(section, {}).get("enabled", "auto") if section in config else "auto"


def _check_deepspeed_precision(config: Mapping[str, Any], precision: MixedPrecision) -> None:
    for section, other in (("bf16", "fp16"), ("fp16", "bf16")):
        if _enabled(config, section) is True and precision == other:
            raise ConfigError(
                f"{section}.enabled: true in the DeepSpeed config contradicts mixed_precision: {precision} "
                "in the Accelerate file; write auto in the DeepSpeed config"
            )
        if _enabled(config, section) is False and precision == section:
            raise ConfigError(
                f"{section}.enabled: false in the DeepSpeed config contradicts mixed_precision: {precision} "
                "in the Accelerate file; write auto in the DeepSpeed config"
            )


def _deepspeed_precision(config: Mapping[str, Any], precision: MixedPrecision) -> MixedPrecision:
    if _enabled(config, "bf16") is True:
        return "bf16"
    return "fp16" if _enabled(config, "fp16") is True else precision


def _read_defaults(environ: Mapping[str, str], settings: EngineSettings) -> LaunchDefaults:
    accumulation: Any = environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    clipping: Any = environ.get("ACCELERATE_GRADIENT_CLIPPING", "auto")
    if isinstance(settings, ZeROSettings):
        accumulation = settings.deepspeed_config.get("gradient_accumulation_steps", accumulation)
        clipping = settings.deepspeed_config.get("gradient_clipping", clipping)
    return LaunchDefaults(
        gradient_accumulation_steps=None if accumulation in ("auto", "") else int(accumulation),
        max_grad_norm=None if clipping in ("auto", "", "none") else float(clipping),
    )


# Is the launch what the file says?


def _find_launcher() -> list[str]:
    """The command line of the `accelerate launch` (or `hfpar launch`) above this process; [] outside one."""
    import psutil

    try:
        parents = psutil.Process().parents()
    except psutil.Error:
        return []
    for parent in parents:
        try:
            command = parent.cmdline()
        except psutil.Error:
            continue
        for index, word in enumerate(command[:-1]):
            if Path(word).name in ("accelerate", "hfpar") and command[index + 1] == "launch":
                return command[index + 2 :]
            if word == "-m" and command[index + 1] == "accelerate.commands.launch":
                return command[index + 2 :]
    return []


def _check_against_file(launcher: Sequence[str], settings: EngineSettings, world_size: int) -> None:
    """Raise if the world or the engine isn't the one that the launch asked for."""
    from accelerate.commands.config.config_args import default_config_file, load_config_from_file
    from accelerate.commands.launch import launch_command_parser

    arguments = launch_command_parser().parse_args(list(launcher))
    config_file = arguments.config_file
    if config_file is None and os.path.isfile(default_config_file) and not arguments.cpu:
        config_file = default_config_file
    defaults = load_config_from_file(config_file) if config_file is not None else None
    where = f"the Accelerate file {config_file}" if config_file else "the launch command"

    expected = arguments.num_processes or (defaults.num_processes if defaults else None)
    if expected is not None and expected > 0 and expected != world_size:
        use_cpu = arguments.cpu or bool(defaults and defaults.use_cpu)
        reason = "`use_cpu: true` starts one process; " if use_cpu else ""
        raise ConfigError(
            f"num_processes: {where} asks for {expected} processes, but this launch runs {world_size}: {reason}"
            "set `distributed_type: MULTI_GPU` and `use_cpu: false` (hfpar uses gloo and the CPU where there is "
            "no GPU), as in accelerate_configs/ddp.yaml"
        )
    if defaults is None:
        return
    distributed_type = str(getattr(defaults.distributed_type, "value", defaults.distributed_type))
    asked = {"FSDP": "fsdp", "DEEPSPEED": "zero", "MULTI_GPU": "ddp", "NO": "ddp", "MULTI_CPU": "ddp"}.get(
        distributed_type
    )
    if asked is None:
        raise ConfigError(
            f"distributed_type: {distributed_type} isn't supported; use MULTI_GPU, FSDP or DEEPSPEED"
        )
    overridden = arguments.use_fsdp or arguments.use_deepspeed or arguments.multi_gpu
    if not overridden and not settings.name.startswith(asked):
        raise ConfigError(
            f"distributed_type: {where} asks for {distributed_type}, but this launch runs {settings.name}; "
            "set `use_cpu: false` and drop `--cpu`"
        )


# The only Accelerator()


def start(launch: Launch, *, report_to: Sequence[str] = (), project_dir: str | None = None) -> Accelerator:
    """Set up the process group and make the run's one `Accelerator`.

    hfpar wraps models itself, so the `Accelerator` only says which device is this rank's and keeps the
    trackers. Where there is no GPU, ranks talk through gloo.

    Raises:
        ConfigError: more ranks than GPUs on this node, or a group that the ranks can't form.
    """
    import torch
    from accelerate import Accelerator

    on_gpu = torch.cuda.is_available()
    if on_gpu and launch.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"num_processes: {launch.local_world_size} processes on this node, but it has "
            f"{torch.cuda.device_count()} GPUs; use --num_processes {torch.cuda.device_count()}"
        )
    start_process_group(launch, on_gpu=on_gpu)
    accelerator = Accelerator(cpu=not on_gpu, log_with=list(report_to) or None, project_dir=project_dir)
    if torch.distributed.get_world_size() != launch.world_size:
        raise ConfigError(
            f"num_processes: {launch.world_size} were launched, {torch.distributed.get_world_size()} joined"
        )
    return accelerator


def start_process_group(launch: Launch, *, on_gpu: bool) -> None:
    """Form the world group: NCCL (with gloo for CPU tensors) on GPUs, gloo otherwise; one rank needs no port."""
    import torch
    import torch.distributed as dist

    if isinstance(launch.settings, ZeROSettings):
        prepare_deepspeed(on_gpu=on_gpu)
    if dist.is_initialized():
        return
    options: dict[str, Any] = {
        "backend": "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        "timeout": timedelta(minutes=30),
    }
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    if launch.world_size == 1:
        dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **options)
    else:
        dist.init_process_group(**options)


def prepare_deepspeed(*, on_gpu: bool) -> None:
    """Make DeepSpeed importable on this device, before its first import.

    Raises:
        MissingDependencyError: DeepSpeed isn't installed.
    """
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise MissingDependencyError(
            "distributed_type: DEEPSPEED needs DeepSpeed: pip install 'hfpar[deepspeed]'"
        )
    if not on_gpu and "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it


def device_of(accelerator: Accelerator) -> torch.device:
    """This rank's device."""
    return cast("torch.device", accelerator.device)
