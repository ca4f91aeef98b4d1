"""What `accelerate launch` hands to a process in environment variables, read as hfpar's settings.

Pure: the environment is an argument. Every variable that stands for a setting of the Accelerate file is either
honoured or refused here under the name that it has in the file; `hfpar.accelerate_file` looks at what the
launcher doesn't hand over.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

from hfpar.config.engine import (
    DDPSettings,
    EngineSettings,
    FSDP2Settings,
    LaunchDefaults,
    MixedPrecision,
    ZeROSettings,
)
from hfpar.config.parallelism_env import check_parallelism, read_size
from hfpar.errors import ConfigError

_IN_FILE = "in the Accelerate file"


def read_engine_settings(environ: Mapping[str, str]) -> EngineSettings:
    """The engine and its settings from the variables that `accelerate launch` sets.

    Raises:
        ConfigError: a setting that hfpar doesn't honour, by the name it has in the Accelerate file.
    """
    mixed_precision = environ.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if mixed_precision not in ("no", "bf16", "fp16"):
        raise ConfigError(
            f"mixed_precision: {mixed_precision} {_IN_FILE} isn't supported; use no, bf16 or fp16"
        )
    precision = cast(MixedPrecision, mixed_precision)
    _refuse_for_every_engine(environ)
    zero, fsdp = flag(environ, "ACCELERATE_USE_DEEPSPEED"), flag(environ, "ACCELERATE_USE_FSDP")
    check_parallelism(environ, sharded=zero or fsdp)
    if zero:
        return _read_zero(environ, precision)
    if fsdp:
        return _read_fsdp2(environ, precision)
    return DDPSettings(mixed_precision=precision)


def read_defaults(
    environ: Mapping[str, str], settings: EngineSettings, sizes_written: Collection[str] = ()
) -> LaunchDefaults:
    """What the file says of training itself: accumulation, clipping, and who shares a sequence.

    Where a DeepSpeed JSON is silent or says `auto`, the Accelerate file's own field counts.

    Args:
        environ: the environment of the process.
        settings: the engine's.
        sizes_written: what of `parallelism_config` the file or the launcher's flags really name.

    Raises:
        ConfigError: no number, or two that contradict each other.
    """
    config = settings.deepspeed_config if isinstance(settings, ZeROSettings) else {}
    accumulation = _agreed(
        "gradient_accumulation_steps", environ.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS"), config
    )
    clipping = _agreed("gradient_clipping", environ.get("ACCELERATE_GRADIENT_CLIPPING"), config)
    if accumulation is not None and (accumulation < 1 or accumulation != int(accumulation)):
        raise ConfigError(f"gradient_accumulation_steps: {accumulation:g} {_IN_FILE}; must be at least 1")
    if clipping is not None and clipping < 0:
        raise ConfigError(f"gradient_clipping: {clipping:g} {_IN_FILE}; must be 0 (no clipping) or more")
    return LaunchDefaults(
        gradient_accumulation_steps=None if accumulation is None else int(accumulation),
        max_grad_norm=clipping,
        cp_size=read_size(environ, "cp_size", sizes_written),
        sp_size=read_size(environ, "sp_size", sizes_written),
        tp_size=read_size(environ, "tp_size", sizes_written),
    )


def flag(environ: Mapping[str, str], name: str) -> bool:
    """Whether a variable is set to one of the words for yes that Accelerate knows."""
    return environ.get(name, "false").strip().lower() in ("1", "true", "yes", "y", "on", "t")


def _agreed(name: str, field: str | None, config: Mapping[str, Any]) -> float | None:
    values = []
    for value in (field, config.get(name)):
        if value is None or str(value).lower() in ("auto", "", "none"):
            continue
        try:
            values.append(float(value))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{name}: {value} {_IN_FILE} or DeepSpeed config isn't a number") from error
    if len(values) == 2 and values[0] != values[1]:
        raise ConfigError(
            f"{name}: {values[0]:g} {_IN_FILE} contradicts {values[1]:g} in the DeepSpeed config; keep one"
        )
    return values[0] if values else None


# For every engine


def _refuse_for_every_engine(environ: Mapping[str, str]) -> None:
    if flag(environ, "ACCELERATE_USE_MEGATRON_LM"):
        raise ConfigError("distributed_type: MEGATRON_LM isn't supported; use MULTI_GPU, FSDP or DEEPSPEED")
    if flag(environ, "ACCELERATE_DEBUG_MODE"):
        raise ConfigError(
            f"debug: true {_IN_FILE} checks only Accelerate's own collectives, which hfpar doesn't use; remove it "
            "(TORCH_DISTRIBUTED_DEBUG=DETAIL checks torch's)"
        )
    unsupported = {
        "ACCELERATE_DYNAMO_BACKEND": ("dynamo_backend", "no"),
        "ACCELERATE_DYNAMO_MODE": ("dynamo_mode", "default"),
        "ACCELERATE_DYNAMO_USE_FULLGRAPH": ("dynamo_use_fullgraph", "false"),
        "ACCELERATE_DYNAMO_USE_DYNAMIC": ("dynamo_use_dynamic", "false"),
        "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": ("dynamo_use_regional_compilation", "false"),
    }
    for variable, (name, neutral) in unsupported.items():
        value = environ.get(variable, neutral)
        if value.lower() != neutral:
            raise ConfigError(f"{name}: {value} {_IN_FILE} isn't supported; remove dynamo_config")


# FSDP2


# Variable, name in the file, the values under which hfpar does what the file says (the first: Accelerate's
# default), and what to do about another.
_FSDP_VALUES = (
    ("FSDP_IGNORED_MODULES", "fsdp_ignored_modules", ("none", ""), "remove it"),
    ("FSDP_FORWARD_PREFETCH", "fsdp_forward_prefetch", ("false",), "remove it"),
    (
        "FSDP_BACKWARD_PREFETCH",
        "fsdp_backward_prefetch",
        ("backward_pre", "", "none"),
        "remove it (FSDP2 always prefetches the way of BACKWARD_PRE)",
    ),
    (
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD",
        "fsdp_activation_checkpointing_offload",
        ("false",),
        "remove it",
    ),
    (
        "FSDP_SHARDING_STRATEGY",
        "fsdp_sharding_strategy",
        ("full_shard", "1"),
        "remove it and set fsdp_reshard_after_forward: true (FULL_SHARD) or false (SHARD_GRAD_OP)",
    ),
    (
        "FSDP_MIN_NUM_PARAMS",
        "fsdp_min_num_params",
        ("100000000", "100000000.0", "0"),
        "remove it (layers are wrapped by class)",
    ),
    (
        "FSDP_USE_ORIG_PARAMS",
        "fsdp_use_orig_params",
        ("true",),
        "remove it (FSDP2 always keeps the original parameters)",
    ),
    (
        "FSDP_CPU_RAM_EFFICIENT_LOADING",
        "fsdp_cpu_ram_efficient_loading",
        ("true",),
        "remove it (each process only ever loads its own shards)",
    ),
    (
        "FSDP_SYNC_MODULE_STATES",
        "fsdp_sync_module_states",
        ("true",),
        "remove it (all processes read the same weights)",
    ),
)


def _read_fsdp2(environ: Mapping[str, str], precision: MixedPrecision) -> FSDP2Settings:
    if environ.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(f"fsdp_version: 1 {_IN_FILE} isn't supported; set fsdp_version: 2")
    for variable, name, honoured, fix in _FSDP_VALUES:
        value = environ.get(variable, honoured[0])
        if value.lower() not in honoured:
            raise ConfigError(f"{name}: {value} {_IN_FILE} isn't supported under FSDP2; {fix}")
    state_dict_type = environ.get("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT").upper()
    if state_dict_type not in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        raise ConfigError(
            f"fsdp_state_dict_type: {state_dict_type} {_IN_FILE}; use SHARDED_STATE_DICT or FULL_STATE_DICT"
        )
    return FSDP2Settings(
        mixed_precision=precision,
        reshard_after_forward=_true_or_false(environ, "fsdp_reshard_after_forward", default="true"),
        offload_params=_true_or_false(environ, "fsdp_offload_params"),
        activation_checkpointing=_true_or_false(environ, "fsdp_activation_checkpointing"),
        state_dict_type=cast(Any, state_dict_type),
        transformer_layer_cls_to_wrap=_read_wrap_policy(environ),
    )


def _true_or_false(environ: Mapping[str, str], name: str, *, default: str = "false") -> bool:
    value = environ.get(name.upper(), default).lower()
    if value not in ("true", "false"):
        raise ConfigError(f"{name}: {value} {_IN_FILE} isn't an FSDP2 value; use true or false")
    return value == "true"


def _read_wrap_policy(environ: Mapping[str, str]) -> tuple[str, ...] | None:
    policy = environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP").upper()
    names = environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "")
    classes = tuple(name.strip() for name in names.split(",") if name.strip()) or None
    if policy not in ("NO_WRAP", "TRANSFORMER_BASED_WRAP"):
        raise ConfigError(
            f"fsdp_auto_wrap_policy: {policy} {_IN_FILE}; use TRANSFORMER_BASED_WRAP or NO_WRAP"
        )
    if policy == "TRANSFORMER_BASED_WRAP":
        return classes
    if classes is not None:
        raise ConfigError(
            f"fsdp_transformer_layer_cls_to_wrap: {names} {_IN_FILE} contradicts fsdp_auto_wrap_policy: NO_WRAP; "
            "keep one"
        )
    return ()


# ZeRO


# DeepSpeed keys that reach DeepSpeed as written. What is left out is either hfpar's own to set (batch size,
# clipping), or would change the training without hfpar knowing.
_DEEPSPEED_KEYS = frozenset(
    "zero_optimization bf16 fp16 communication_data_type prescale_gradients gradient_predivide_factor "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer wall_clock_breakdown memory_breakdown "
    "steps_per_print dump_state comms_logger flops_profiler aio gradient_clipping "
    "gradient_accumulation_steps train_micro_batch_size_per_gpu train_batch_size".split()
)
_INSTEAD = {
    "optimizer": "set `optim` and `learning_rate` instead",
    "scheduler": "set `lr_scheduler_type` instead",
    "activation_checkpointing": "set `gradient_checkpointing: true` instead",
    "torch_autocast": "set bf16 or mixed_precision: bf16 instead",
}


def _read_zero(environ: Mapping[str, str], precision: MixedPrecision) -> ZeROSettings:
    moe_layers = environ.get("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    if moe_layers:
        raise ConfigError(
            f"deepspeed_moe_layer_cls_names: {moe_layers} {_IN_FILE} isn't supported; remove it"
        )
    path = environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    config = _read_deepspeed_json(Path(path)) if path and path.lower() != "none" else {}
    unknown = sorted(set(config) - _DEEPSPEED_KEYS)
    if unknown:
        fix = _INSTEAD.get(unknown[0], "remove it")
        raise ConfigError(f"{unknown[0]}: in the DeepSpeed config isn't supported; {fix}")
    for key in ("train_micro_batch_size_per_gpu", "train_batch_size"):
        if config.get(key, "auto") != "auto":
            raise ConfigError(
                f"{key}: {config[key]} in the DeepSpeed config; write auto: the batch comes from "
                "per_device_train_batch_size or max_tokens_per_batch"
            )
    config["zero_optimization"] = _zero_section(config, environ)
    return ZeROSettings(
        mixed_precision=_deepspeed_precision(config, environ, precision),
        deepspeed_config=config,
        zero3_init=environ.get("ACCELERATE_DEEPSPEED_ZERO3_INIT", "true").lower() == "true",
    )


def _read_deepspeed_json(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"deepspeed_config_file: {path} can't be read ({error.strerror})") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"deepspeed_config_file: {path} line {error.lineno}: {error.msg}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"deepspeed_config_file: {path} isn't UTF-8 text (byte {error.start})") from error
    if not isinstance(config, dict):
        raise ConfigError(f"deepspeed_config_file: {path} holds no JSON object")
    return config


def _zero_section(config: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, Any]:
    """`zero_optimization`, with the Accelerate file's stage and offload where a DeepSpeed JSON leaves them open."""
    written = config.get("zero_optimization", {})
    if not isinstance(written, dict):
        raise ConfigError(f"zero_optimization: {written} in the DeepSpeed config; must be an object")
    section = dict(written)
    has_json = bool(config)
    stage = environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if str(section.get("stage", "auto")) != "auto":
        if stage is not None and stage != str(section["stage"]):
            raise _contradiction("zero_stage", stage, f"zero_optimization.stage: {section['stage']}")
    elif stage is not None or not has_json:
        section["stage"] = int(stage or 2)  # 2: Accelerate's default
    if section.get("stage") not in (1, 2, 3) or isinstance(section.get("stage"), bool):
        where = "zero_optimization.stage" if has_json else "zero_stage"
        raise ConfigError(
            f"{where}: {section.get('stage')}; use 1, 2 or 3 (for no ZeRO: accelerate_configs/ddp.yaml)"
        )
    for kind in ("optimizer", "param"):
        _fill_offload(section, kind, environ, has_json=has_json)
    return section


def _fill_offload(section: dict[str, Any], kind: str, environ: Mapping[str, str], *, has_json: bool) -> None:
    name, key = f"offload_{kind}_device", f"offload_{kind}"
    device = environ.get(f"ACCELERATE_DEEPSPEED_{name.upper()}")
    written = section.get(key) or {}
    there = written.get("device", "none") if isinstance(written, dict) else written
    if there == "auto":
        there = device or "none"
        section[key] = {**written, "device": there}
    elif has_json:
        if device is not None and device != there:
            raise _contradiction(name, device, f"zero_optimization.{key}.device: {there}")
    elif device not in (None, "none"):
        there = device
        section[key] = {"device": device}
    if there == "nvme" and not (isinstance(written, dict) and written.get("nvme_path", "auto") != "auto"):
        raise ConfigError(f"{name}: nvme needs a path; write it as nvme_path in a deepspeed_config_file")
    if there not in ("none", "cpu", "nvme"):
        raise ConfigError(f"{name}: {there} {_IN_FILE}; use none or cpu")
    if there != "none" and kind == "param" and section["stage"] != 3:
        raise ConfigError(f"{name}: {there} needs zero_stage 3, not {section['stage']}; set it to none")


def _contradiction(name: str, value: str, other: str) -> ConfigError:
    return ConfigError(
        f"{name}: {value} {_IN_FILE} contradicts {other} in the DeepSpeed config; keep one of the two"
    )


def _deepspeed_precision(
    config: Mapping[str, Any], environ: Mapping[str, str], precision: MixedPrecision
) -> MixedPrecision:
    """The precision on which the Accelerate file and a DeepSpeed JSON agree."""
    enabled = {}
    for section in ("bf16", "fp16"):
        content = config.get(section, {})
        if not isinstance(content, dict):
            raise ConfigError(f"{section}: {content} in the DeepSpeed config; must be an object")
        enabled[section] = content.get("enabled", "auto")
    if enabled["bf16"] is True and enabled["fp16"] is True:
        raise ConfigError("bf16.enabled and fp16.enabled: both true in the DeepSpeed config; keep one")
    in_json: MixedPrecision | None = (
        "bf16" if enabled["bf16"] is True else "fp16" if enabled["fp16"] is True else None
    )
    fields = environ.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")
    asked = precision != "no" or "mixed_precision" in fields
    if in_json is not None and asked and in_json != precision:
        raise _precision_conflict(f"{in_json}.enabled: true", precision)
    if in_json is None and precision != "no" and enabled[precision] is False:
        raise _precision_conflict(f"{precision}.enabled: false", precision)
    return in_json or precision


def _precision_conflict(written: str, precision: str) -> ConfigError:
    return ConfigError(
        f"{written} in the DeepSpeed config contradicts mixed_precision: {precision} {_IN_FILE}; "
        "write auto in the DeepSpeed config"
    )
