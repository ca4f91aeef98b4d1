"""What a process makes of a launch: every setting of an Accelerate file is honoured or refused by name.

The environment isn't written by hand: Accelerate's own launcher code makes it from a file.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from hfpar.accelerate_file import check_launch, launcher_arguments, read_request
from hfpar.accelerator import Launch, clear_stale_locks, read_launch
from hfpar.config.accelerate_env import read_defaults, read_engine_settings
from hfpar.config.engine import DDPSettings, FSDP2Settings, LaunchDefaults, ZeROSettings
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.train.run import settle

launch_module = pytest.importorskip("accelerate.commands.launch")

BASE = {
    "compute_environment": "LOCAL_MACHINE",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 2,
}
DDP = {**BASE, "distributed_type": "MULTI_GPU"}
FSDP = {**BASE, "distributed_type": "FSDP"}
ZERO = {**BASE, "distributed_type": "DEEPSPEED"}
ReadLaunch = Callable[..., Launch]


def environment_of(arguments: list[str]) -> dict[str, str]:
    """What the workers of `accelerate launch ARGUMENTS` get, from Accelerate's own code."""
    from accelerate.utils import launch

    args, defaults, precision_from_file = launch_module._validate_launch_command(
        launch_module.launch_command_parser().parse_args(arguments)
    )
    if args.use_deepspeed and not args.cpu:
        fields = list(defaults.deepspeed_config) if defaults else []
        fields += ["mixed_precision"] if precision_from_file else []
        args.deepspeed_fields_from_accelerate_config = ",".join(fields)
        _, environ = launch.prepare_deepspeed_cmd_env(args)
    elif (args.use_fsdp or args.use_megatron_lm or args.multi_gpu) and not args.cpu:
        environ = launch.prepare_multi_gpu_env(args)
    else:
        _, environ = launch.prepare_simple_launcher_cmd_env(args)
        return dict(environ)
    return {**environ, "WORLD_SIZE": str(args.num_processes), "RANK": "0", "LOCAL_RANK": "0"}


@pytest.fixture(autouse=True)
def no_launch_around(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The tests' own environment isn't a launch's, and the user's default file isn't looked at."""
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    from accelerate.commands.config import config_args

    for module in (config_args, launch_module):
        monkeypatch.setattr(module, "default_config_file", str(tmp_path / "default_config.yaml"))
    monkeypatch.setattr("accelerate.utils.launch.is_port_in_use", lambda port: False)


@pytest.fixture
def read(tmp_path: Path) -> ReadLaunch:
    """Reads the launch of a file with this content and these flags."""

    def read(content: dict[str, Any], *flags: str) -> Launch:
        path = tmp_path / "accelerate.yaml"
        path.write_text(yaml.safe_dump(content))
        arguments = ["--config_file", str(path), *flags, "train.py"]
        return read_launch(environment_of(arguments), arguments)

    return read


def deepspeed_json(tmp_path: Path, content: Any, **fields: Any) -> dict[str, Any]:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    file = {**ZERO, "deepspeed_config": {"deepspeed_config_file": str(path), **fields}}
    del file["mixed_precision"]  # Accelerate takes one that is written as meant
    return file


def zero_stage(stage: Any, **fields: Any) -> dict[str, Any]:
    return {**ZERO, "deepspeed_config": {"zero_stage": stage, **fields}}


def fsdp2(**fields: Any) -> dict[str, Any]:
    return {**FSDP, "fsdp_config": {"fsdp_version": 2, **fields}}


# Honoured


def test_ddp(read: ReadLaunch) -> None:
    launch = read(DDP)
    assert launch.settings == DDPSettings()
    assert (launch.rank, launch.world_size, launch.use_cpu) == (0, 2, False)
    assert launch.defaults == LaunchDefaults()
    assert read({**DDP, "mixed_precision": "bf16"}).settings == DDPSettings(mixed_precision="bf16")
    assert read(DDP, "--mixed_precision", "fp16").settings == DDPSettings(mixed_precision="fp16")


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {}),
        ({"fsdp_reshard_after_forward": False}, {"reshard_after_forward": False}),
        ({"reshard_after_forward": False}, {"reshard_after_forward": False}),  # Accelerate adds the prefix
        ({"fsdp_offload_params": True}, {"offload_params": True}),
        ({"fsdp_activation_checkpointing": True}, {"activation_checkpointing": True}),
        ({"fsdp_state_dict_type": "FULL_STATE_DICT"}, {"state_dict_type": "FULL_STATE_DICT"}),
        ({"fsdp_auto_wrap_policy": "NO_WRAP"}, {"transformer_layer_cls_to_wrap": ()}),
        ({"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, {}),
        (
            {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer, Embedding"},
            {"transformer_layer_cls_to_wrap": ("LlamaDecoderLayer", "Embedding")},
        ),
        ({"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_use_orig_params": True}, {}),
        ({"fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True}, {}),
    ],
)
def test_fsdp2_settings_are_honoured(
    read: ReadLaunch, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read(fsdp2(**fields)).settings == FSDP2Settings(**expected)


def test_fsdp2_mixed_precision(read: ReadLaunch) -> None:
    settings = read({**fsdp2(), "mixed_precision": "bf16"}).settings
    assert settings == FSDP2Settings(mixed_precision="bf16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_stages(read: ReadLaunch, stage: int) -> None:
    settings = read(zero_stage(stage)).settings
    assert settings == ZeROSettings(
        deepspeed_config={"zero_optimization": {"stage": stage}}, zero3_init=settings.zero3_init
    )
    assert settings.name == f"zero{stage}"


def test_zero_fields(read: ReadLaunch) -> None:
    launch = read(
        {
            **zero_stage(
                3, offload_optimizer_device="cpu", offload_param_device="cpu", zero3_init_flag=False
            ),
            "mixed_precision": "bf16",
        },
        "--gradient_accumulation_steps=4",
        "--gradient_clipping=0.5",
    )
    assert launch.settings == ZeROSettings(
        mixed_precision="bf16",
        zero3_init=False,
        deepspeed_config={
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {"device": "cpu"},
                "offload_param": {"device": "cpu"},
            }
        },
    )
    assert launch.defaults == LaunchDefaults(gradient_accumulation_steps=4, max_grad_norm=0.5)
    none = zero_stage(2, offload_optimizer_device="none", offload_param_device="none", gradient_clipping=0.25)
    assert read(none).defaults == LaunchDefaults(max_grad_norm=0.25)
    assert read(none).settings == ZeROSettings(deepspeed_config={"zero_optimization": {"stage": 2}})


def test_a_deepspeed_json_is_passed_on_as_written(read: ReadLaunch, tmp_path: Path) -> None:
    written = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000, "overlap_comm": False},
        "bf16": {"enabled": True},
        "gradient_clipping": 0.5,
        "gradient_accumulation_steps": 3,
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "communication_data_type": "fp32",
        "aio": {"block_size": 1},
    }
    launch = read(deepspeed_json(tmp_path, written))
    assert isinstance(launch.settings, ZeROSettings)
    assert launch.settings.deepspeed_config == written
    assert launch.settings.mixed_precision == "bf16"
    assert launch.defaults == LaunchDefaults(gradient_accumulation_steps=3, max_grad_norm=0.5)


def test_the_accelerate_file_fills_what_a_deepspeed_json_leaves_open(
    read: ReadLaunch, tmp_path: Path
) -> None:
    written = {
        "zero_optimization": {
            "stage": "auto",
            "offload_optimizer": {"device": "auto", "pin_memory": True},
            "offload_param": {"device": "auto"},
        },
        "fp16": {"enabled": "auto", "initial_scale_power": 8},
        "gradient_accumulation_steps": "auto",
    }
    fields = {"zero_stage": 3, "offload_optimizer_device": "cpu", "gradient_clipping": 0.5}
    file = deepspeed_json(tmp_path, written, gradient_accumulation_steps=2, **fields)
    launch = read({**file, "mixed_precision": "fp16"})
    assert isinstance(launch.settings, ZeROSettings)
    assert launch.settings.deepspeed_config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
    }
    assert launch.settings.deepspeed_config["fp16"]["initial_scale_power"] == 8
    assert launch.settings.mixed_precision == "fp16"
    assert launch.defaults == LaunchDefaults(gradient_accumulation_steps=2, max_grad_norm=0.5)


def test_a_json_may_say_the_same_as_the_file(read: ReadLaunch, tmp_path: Path) -> None:
    written = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}},
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }
    file = deepspeed_json(tmp_path, written, zero_stage=3, offload_param_device="cpu", gradient_clipping=0.5)
    launch = read({**file, "mixed_precision": "bf16"})
    assert launch.settings.name == "zero3"
    assert launch.defaults.max_grad_norm == 0.5


def test_a_json_may_offload_to_nvme(read: ReadLaunch, tmp_path: Path) -> None:
    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    written = {"zero_optimization": {"stage": 3, "offload_optimizer": offload}}
    settings = read(deepspeed_json(tmp_path, written)).settings
    assert isinstance(settings, ZeROSettings)
    assert settings.deepspeed_config == written


@pytest.mark.parametrize(
    "sections",
    [
        # as `accelerate config` writes them
        {
            "downcast_bf16": "no",
            "tpu_env": [],
            "tpu_use_cluster": False,
            "tpu_use_sudo": False,
            "debug": False,
        },
        {"deepspeed_config": {}, "fsdp_config": {}, "megatron_lm_config": {}, "dynamo_config": {}},
        {"main_training_function": "main", "rdzv_backend": "static", "same_network": True, "machine_rank": 0},
        {"gpu_ids": "all", "enable_cpu_affinity": True},
    ],
)
def test_empty_sections_are_no_settings(read: ReadLaunch, sections: dict[str, Any]) -> None:
    assert read({**DDP, **sections}).settings == DDPSettings()


def test_use_cpu_is_honoured(read: ReadLaunch) -> None:
    assert read({**DDP, "use_cpu": True}).use_cpu
    assert read({**fsdp2(), "use_cpu": True}).use_cpu
    one = {**BASE, "distributed_type": "NO", "num_processes": 1, "use_cpu": True}
    assert read(one).use_cpu
    assert read({**one, "use_cpu": False}, "--cpu").use_cpu


def sizes(**fields: Any) -> dict[str, Any]:
    """A section of the file."""
    return {"parallelism_config": {f"parallelism_config_{name}": value for name, value in fields.items()}}


@pytest.mark.parametrize("file", [DDP, fsdp2(), zero_stage(3)], ids=["ddp", "fsdp2", "zero3"])
def test_the_file_gives_the_sizes_of_the_sequence_group(read: ReadLaunch, file: dict[str, Any]) -> None:
    assert read({**file, **sizes(sp_size=2)}).defaults == LaunchDefaults(sp_size=2)
    both = read({**file, "num_processes": 8, **sizes(cp_size=2, sp_size=2)})
    assert both.defaults == LaunchDefaults(cp_size=2, sp_size=2)
    assert both.settings == read(file).settings


def test_only_a_size_of_1_that_is_written_is_meant(read: ReadLaunch) -> None:
    """The environment says 1 of all sizes as soon as the file has one of them."""
    assert read({**DDP, **sizes(cp_size=2)}).defaults.sp_size is None
    assert read({**DDP, **sizes(cp_size=2, sp_size=1)}).defaults.sp_size == 1
    assert read({**DDP, **sizes(sp_size=1)}, "--parallelism_config_sp_size", "2").defaults.sp_size == 2


@pytest.mark.parametrize(
    ("fields", "num_processes"),
    [
        ({"dp_shard_size": 2}, 2),
        ({"dp_shard_size": 4, "sp_size": 2}, 4),
        ({"dp_shard_size": 4, "cp_size": 2}, 8),  # as Accelerate counts: cp shards too
        ({"dp_shard_size": 2, "cp_size": 2, "sp_size": 2}, 8),
        ({"dp_shard_size": 1, "dp_replicate_size": 1, "tp_size": 1}, 2),
    ],
)
def test_dp_shard_size_may_say_what_happens_anyway(
    read: ReadLaunch, fields: dict[str, Any], num_processes: int
) -> None:
    file = {**fsdp2(), "num_processes": num_processes, **sizes(**fields)}
    assert read(file).settings == FSDP2Settings()


@pytest.mark.parametrize(
    "fields",
    [
        {"cp_size": 2, "cp_backend": "torch", "cp_comm_strategy": "allgather"},
        {"cp_size": 2, "cp_comm_strategy": "alltoall"},
        {"sp_size": 2, "sp_backend": "deepspeed", "sp_attn_implementation": "sdpa"},
        {"sp_size": 2, "sp_seq_length": None, "sp_seq_length_is_variable": True},
        {"sp_size": 1, "sp_attn_implementation": "sdpa", "cp_comm_strategy": "allgather"},
    ],
)
def test_what_describes_accelerates_own_way_passes(read: ReadLaunch, fields: dict[str, Any]) -> None:
    assert read({**DDP, **sizes(**fields)}).settings == DDPSettings()


CONFIGS = Path(__file__).parents[2] / "accelerate_configs"
CPU = {"device": "cpu"}
OFFLOADED = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
SHIPPED = {
    "ddp": DDPSettings(),
    "fsdp2": FSDP2Settings(),
    "fsdp2_offload": FSDP2Settings(offload_params=True),
    "fsdp2_two_nodes": FSDP2Settings(),
    "zero1": ZeROSettings.for_stage(1),
    "zero2": ZeROSettings.for_stage(2),
    "zero3": ZeROSettings.for_stage(3),
    "zero3_offload": ZeROSettings(deepspeed_config={"zero_optimization": OFFLOADED}),
}


def test_every_shipped_file_is_known_here() -> None:
    assert {path.stem for path in CONFIGS.iterdir()} == set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file(read: ReadLaunch, name: str) -> None:
    launch = read(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))
    assert launch.settings == SHIPPED[name]
    assert launch.world_size == (16 if name == "fsdp2_two_nodes" else 2)
    assert launch.defaults == LaunchDefaults()
    bf16 = read(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()), "--mixed_precision", "bf16")
    assert bf16.settings == replace(SHIPPED[name], mixed_precision="bf16")


# Refused

FSDP_REFUSALS = [
    ({"fsdp_version": 1}, "fsdp_version: 1 "),
    ({"fsdp_reshard_after_forward": "FULL_SHARD"}, "fsdp_reshard_after_forward: full_shard "),
    ({"fsdp_sharding_strategy": "SHARD_GRAD_OP"}, "fsdp_sharding_strategy: SHARD_GRAD_OP "),
    ({"fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}, "fsdp_auto_wrap_policy: SIZE_BASED_WRAP "),
    ({"fsdp_min_num_params": 2000}, "fsdp_min_num_params: 2000 "),
    ({"fsdp_state_dict_type": "LOCAL_STATE_DICT"}, "fsdp_state_dict_type: LOCAL_STATE_DICT "),
    ({"fsdp_backward_prefetch": "BACKWARD_POST"}, "fsdp_backward_prefetch: BACKWARD_POST "),
    ({"fsdp_backward_prefetch": "NO_PREFETCH"}, "fsdp_backward_prefetch: NO_PREFETCH "),
    ({"fsdp_forward_prefetch": True}, "fsdp_forward_prefetch: true "),
    ({"fsdp_use_orig_params": False}, "fsdp_use_orig_params: false "),
    ({"fsdp_cpu_ram_efficient_loading": False}, "fsdp_cpu_ram_efficient_loading: false "),
    (
        {"fsdp_cpu_ram_efficient_loading": False, "fsdp_sync_module_states": False},
        "fsdp_cpu_ram_efficient_loading: false ",
    ),
    ({"fsdp_activation_checkpointing_offload": True}, "fsdp_activation_checkpointing_offload: true "),
    ({"fsdp_ignored_modules": ".*lm_head"}, "fsdp_ignored_modules: .*lm_head "),
    (
        {"fsdp_auto_wrap_policy": "NO_WRAP", "fsdp_transformer_layer_cls_to_wrap": "X"},
        "fsdp_transformer_layer_cls_to_wrap: X ",
    ),
    (
        {"fsdp_reshard_after_foward": False},
        "fsdp_reshard_after_foward: .*did you mean fsdp_reshard_after_forward",
    ),
]


@pytest.mark.parametrize(("fields", "message"), FSDP_REFUSALS, ids=[m for _, m in FSDP_REFUSALS])
def test_fsdp_refusals(read: ReadLaunch, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(fsdp2(**fields))


ZERO_REFUSALS = [
    (zero_stage(0), "zero_stage: 0;"),
    (zero_stage(2, offload_param_device="cpu"), "offload_param_device: cpu needs zero_stage 3"),
    (zero_stage(3, offload_param_device="nvme", offload_param_nvme_path="/x"), "offload_param_device: nvme "),
    (zero_stage(3, offload_optimizer_device="disk"), "offload_optimizer_device: disk "),
    (zero_stage(3, deepspeed_moe_layer_cls_names="Moe"), "deepspeed_moe_layer_cls_names: Moe "),
    (zero_stage(2, gradient_clipping="much"), "gradient_clipping: much "),
    (zero_stage(2, gradient_clipping=-1), "gradient_clipping: -1 "),
    (zero_stage(2, gradient_accumulation_steps=0), "gradient_accumulation_steps: 0 "),
    (zero_stage(2, gradient_cliping=1.0), "gradient_cliping: .*did you mean gradient_clipping"),
    (zero_stage(2, nonsense=1), "nonsense: no setting of deepspeed_config .*it may hold .*zero_stage"),
]


@pytest.mark.parametrize(("file", "message"), ZERO_REFUSALS, ids=[m for _, m in ZERO_REFUSALS])
def test_zero_refusals(read: ReadLaunch, file: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(file)


STAGE_2 = {"zero_optimization": {"stage": 2}}
JSON_REFUSALS: list[tuple[Any, dict[str, Any], str]] = [
    ("{\n  broken", {}, "deepspeed_config_file: .*ds.json line 2: "),
    ("[1]", {}, "deepspeed_config_file: .*ds.json holds no JSON object"),
    ({"bf16": {"enabled": True}}, {}, "zero_optimization.stage: None;"),
    ({"zero_optimization": {"stage": 0}}, {}, "zero_optimization.stage: 0;"),
    ({"zero_optimization": {"stage": True}}, {}, "zero_optimization.stage: True;"),
    ({"zero_optimization": 2}, {}, "zero_optimization: 2 "),
    ({**STAGE_2, "bf16": True}, {}, "bf16: True "),
    (
        {**STAGE_2, "bf16": {"enabled": True}, "fp16": {"enabled": True}},
        {},
        "bf16.enabled and fp16.enabled: ",
    ),
    ({**STAGE_2, "optimizer": {"type": "Adam"}}, {}, "optimizer: .*`optim`"),
    ({**STAGE_2, "scheduler": {}}, {}, "scheduler: .*`lr_scheduler_type`"),
    (
        {**STAGE_2, "activation_checkpointing": {}},
        {},
        "activation_checkpointing: .*gradient_checkpointing: true",
    ),
    ({**STAGE_2, "torch_autocast": {"enabled": True}}, {}, "torch_autocast: "),
    ({**STAGE_2, "zero_optimisation": {}}, {}, "zero_optimisation: "),
    ({**STAGE_2, "train_micro_batch_size_per_gpu": 4}, {}, "train_micro_batch_size_per_gpu: 4 "),
    ({**STAGE_2, "train_batch_size": 4}, {}, "train_batch_size: 4 "),
    (STAGE_2, {"zero_stage": 3}, "zero_stage: 3 .*contradicts zero_optimization.stage: 2"),
    (STAGE_2, {"offload_optimizer_device": "cpu"}, "offload_optimizer_device: cpu .*contradicts"),
    (
        {**STAGE_2, "gradient_clipping": 1.0},
        {"gradient_clipping": 0.5},
        "gradient_clipping: 0.5 .*contradicts 1 ",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        {},
        "offload_param_device: nvme needs a path",
    ),
]


@pytest.mark.parametrize(("content", "fields", "message"), JSON_REFUSALS, ids=[m for *_, m in JSON_REFUSALS])
def test_deepspeed_json_refusals(
    read: ReadLaunch, tmp_path: Path, content: Any, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(deepspeed_json(tmp_path, content, **fields))


def test_a_missing_deepspeed_json(read: ReadLaunch, tmp_path: Path) -> None:
    file = deepspeed_json(tmp_path, STAGE_2)
    (tmp_path / "ds.json").unlink()
    with pytest.raises(ConfigError, match=r"deepspeed_config_file: .*ds.json can't be read \(No such file"):
        read(file)


@pytest.mark.parametrize(
    ("section", "precision", "message"),
    [
        ({"bf16": {"enabled": True}}, "fp16", "bf16.enabled: true"),
        ({"fp16": {"enabled": True}}, "bf16", "fp16.enabled: true"),
        ({"bf16": {"enabled": True}}, "no", "bf16.enabled: true"),  # written in the file, so meant
        ({"bf16": {"enabled": False}}, "bf16", "bf16.enabled: false"),
    ],
)
def test_two_precisions(
    read: ReadLaunch, tmp_path: Path, section: dict[str, Any], precision: str, message: str
) -> None:
    file = {**deepspeed_json(tmp_path, {**STAGE_2, **section}), "mixed_precision": precision}
    with pytest.raises(ConfigError, match=f"^{message} .*contradicts mixed_precision: {precision} "):
        read(file)


FILE_REFUSALS = [
    ({**DDP, "dynamo_config": {"dynamo_backend": "INDUCTOR"}}, "dynamo_backend: INDUCTOR "),
    ({**DDP, "dynamo_config": {"dynamo_mode": "max-autotune"}}, "dynamo_mode: max-autotune "),
    ({**DDP, "dynamo_config": {"dynamo_use_dynamic": True}}, "dynamo_use_dynamic: True "),
    ({**DDP, "dynamo_config": {"dynamo_backnd": "NO"}}, "dynamo_backnd: .*did you mean dynamo_backend"),
    ({**DDP, "debug": True}, "debug: true "),
    ({**DDP, "downcast_bf16": True}, "downcast_bf16: "),
    ({**DDP, "tpu_use_cluster": True}, "tpu_use_cluster: "),
    ({**DDP, "mpirun_config": {"mpirun_ccl": "1"}}, "mpirun_config: "),
    ({**DDP, "fp8_config": {"backend": "TE"}}, "fp8_config: "),
    ({**DDP, "main_training_function": "train"}, "main_training_function: "),
    (
        {**DDP, "fsdp_config": {"fsdp_version": 2}},
        "fsdp_config: does nothing with distributed_type: MULTI_GPU",
    ),
    ({**fsdp2(), "deepspeed_config": {"zero_stage": 2}}, "deepspeed_config: does nothing "),
    ({**BASE, "distributed_type": "MEGATRON_LM", "megatron_lm_config": {}}, "distributed_type: MEGATRON_LM "),
    ({**BASE, "distributed_type": "MULTI_NPU"}, "distributed_type: MULTI_NPU "),
    ({**BASE, "distributed_type": "XLA"}, "distributed_type: XLA "),
    (
        {**fsdp2(), "parallelism_config": {"tp_size": 2}},
        "tp_size: no setting of parallelism_config .*did you mean parallelism_config_tp_size",
    ),
    (
        {**fsdp2(), "parallelism_config": {"parallelism_config_dp_shard_size": 4}},
        "parallelism_config: dp_shard_size 4",
    ),
    *(
        (
            {**fsdp2(), "parallelism_config": {f"parallelism_config_{name}": 2}},
            f"parallelism_config: {name} 2 ",
        )
        for name in ("dp_replicate_size",)
    ),
]


@pytest.mark.parametrize(("file", "message"), FILE_REFUSALS, ids=[m for _, m in FILE_REFUSALS])
def test_settings_for_any_engine_that_are_refused(
    read: ReadLaunch, file: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(file)


PARALLELISM_REFUSALS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (fsdp2(), {"sp_size": 0}, "parallelism_config: sp_size 0 .*whole number of at least 1"),
    (fsdp2(), {"dp_shard_size": -1}, "parallelism_config: dp_shard_size -1 .*whole number of at least 1"),
    (zero_stage(2), {"dp_shard_size": "all"}, "parallelism_config: dp_shard_size all .*whole number"),
    (DDP, {"dp_shard_size": 2}, "parallelism_config: dp_shard_size 2 .*DDP shards nothing"),
    (fsdp2(), {"dp_shard_size": 3, "sp_size": 2}, "parallelism_config: dp_shard_size 3 .*set it to 1 or"),
    (fsdp2(), {"dp_shard_size": 3}, "parallelism_config: dp_shard_size 3 .*set it to 2 or"),
    (DDP, {"cp_size": 2, "cp_backend": "deepspeed"}, "parallelism_config: cp_backend deepspeed "),
    (DDP, {"cp_size": 2, "cp_comm_strategy": "ring"}, "parallelism_config: cp_comm_strategy ring "),
    (DDP, {"sp_backend": "torch"}, "parallelism_config: sp_backend torch "),
    (DDP, {"sp_size": 2, "sp_seq_length": 64}, "parallelism_config: sp_seq_length 64 .*set max_length"),
    (
        DDP,
        {"sp_size": 2, "sp_seq_length_is_variable": False},
        "parallelism_config: sp_seq_length_is_variable False ",
    ),
    (
        DDP,
        {"sp_size": 2, "sp_attn_implementation": "flash_attention_2"},
        "parallelism_config: sp_attn_implementation flash_attention_2 .*set attn_implementation",
    ),
    (
        DDP,
        {"sp_seq_length": 64},
        "parallelism_config_sp_seq_length: does nothing without parallelism_config_sp_size above 1",
    ),
    (
        DDP,
        {"sp_size": 2, "cp_comm_strategy": "alltoall"},
        "parallelism_config_cp_comm_strategy: does nothing without parallelism_config_cp_size above 1",
    ),
]


@pytest.mark.parametrize(
    ("file", "fields", "message"), PARALLELISM_REFUSALS, ids=[m for *_, m in PARALLELISM_REFUSALS]
)
def test_settings_of_parallelism_that_are_refused(
    read: ReadLaunch, file: dict[str, Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read({**file, **sizes(**fields)})


@pytest.mark.parametrize(
    ("file", "flags", "fix"),
    [
        (DDP, ["--parallelism_config_sp_size=2"], "give the script --sp_size 2 instead"),
        ({**DDP, **sizes(sp_size=2)}, ["--multi_gpu"], "give the script --sp_size 2 instead"),
        ({**DDP, **sizes(cp_size=4)}, ["--use_deepspeed", "--zero_stage=2"], "give the script --cp_size 4 "),
        ({**DDP, **sizes(tp_size=2)}, ["--multi_gpu"], "give the script --tp_size 2 instead"),
        ({**DDP, **sizes(dp_replicate_size=2)}, ["--multi_gpu"], "remove it"),
        (
            {**BASE, "distributed_type": "NO", "num_processes": 1, **sizes(sp_size=2)},
            [],
            "give the script --sp_size 2 instead",
        ),
    ],
)
def test_sizes_that_accelerate_drops(
    read: ReadLaunch, file: dict[str, Any], flags: list[str], fix: str
) -> None:
    with pytest.raises(ConfigError, match=f"^parallelism_config: .*, which Accelerate drops in .*{fix}"):
        read(file, *flags)


def test_sizes_of_1_may_be_dropped(read: ReadLaunch) -> None:
    assert read({**DDP, **sizes(sp_size=1)}, "--multi_gpu").defaults == LaunchDefaults()


def test_sizes_as_flags_without_a_file() -> None:
    arguments = ["--multi_gpu", "--num_processes", "2", "--parallelism_config_cp_size", "2", "train.py"]
    with pytest.raises(ConfigError, match="^parallelism_config: the launch command asks for cp_size 2, "):
        read_launch(environment_of(arguments), arguments)


def test_fp8_is_refused() -> None:
    with pytest.raises(ConfigError, match="^mixed_precision: fp8 "):
        read_engine_settings({"ACCELERATE_MIXED_PRECISION": "fp8"})


def test_sagemaker_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\nmixed_precision: 'no'\n"
        "ec2_instance_type: x\niam_role_name: y\n"
    )
    with pytest.raises(ConfigError, match="^compute_environment: AMAZON_SAGEMAKER "):
        read_request(["--config_file", str(path), "train.py"])


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        (DDP, ["--gradient_clipping=0.5"], "--gradient_clipping: does nothing .*--use_deepspeed"),
        (DDP, ["--fsdp_offload_params=true"], "--fsdp_offload_params: does nothing .*--use_fsdp"),
        (fsdp2(), ["--zero_stage=3"], "--zero_stage: does nothing "),
    ],
)
def test_flags_of_another_engine(
    read: ReadLaunch, file: dict[str, Any], flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        read(file, *flags)


# A launch that isn't what its file says


@pytest.mark.parametrize(
    ("file", "flags", "message"),
    [
        ({**BASE, "distributed_type": "NO"}, [], "asks for 2 processes, but this launch runs 1: set"),
        (
            {**BASE, "distributed_type": "NO", "use_cpu": True},
            [],
            "runs 1: `use_cpu: true` and `--cpu` start one",
        ),
        ({**BASE, "distributed_type": "MULTI_CPU", "use_cpu": True}, [], "runs 1: `use_cpu: true`"),
        (fsdp2(), ["--cpu"], "runs 1: `use_cpu: true`"),
        ({**DDP}, ["--cpu", "--num_processes=3"], "asks for 3 processes, but this launch runs 1"),
    ],
)
def test_fewer_processes_than_asked_for(
    read: ReadLaunch, file: dict[str, Any], flags: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^num_processes: .*{message}"):
        read(file, *flags)


def test_another_engine_than_asked_for(read: ReadLaunch) -> None:
    with pytest.raises(ConfigError, match="^distributed_type: .* asks for FSDP, but this launch runs ddp; "):
        read({**fsdp2(), "num_processes": 1}, "--cpu")
    with pytest.raises(
        ConfigError, match="^distributed_type: .* asks for DEEPSPEED, but this launch runs ddp; "
    ):
        read({**zero_stage(2), "num_processes": 1}, "--cpu")


def test_flags_go_before_the_file(read: ReadLaunch) -> None:
    assert read(DDP, "--num_processes", "3").world_size == 3
    assert read({**BASE, "distributed_type": "NO", "num_processes": 1}).world_size == 1
    launch = read(DDP, "--use_fsdp", "--fsdp_version", "2", "--fsdp_offload_params", "true")
    assert launch.settings == FSDP2Settings(offload_params=True)
    assert read(DDP, "--use_deepspeed", "--zero_stage", "1").settings.name == "zero1"


def test_without_a_file() -> None:
    arguments = ["--num_processes", "2", "train.py"]
    with pytest.raises(
        ConfigError, match="^num_processes: the launch command asks for 2 processes, .* runs 1"
    ):
        read_launch(environment_of(arguments), arguments)
    arguments = ["--multi_gpu", "--num_processes", "2", "train.py"]
    assert read_launch(environment_of(arguments), arguments).settings == DDPSettings()


def test_the_default_file_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from accelerate.commands.config import config_args

    default = config_args.default_config_file
    assert Path(default).parent == tmp_path
    Path(default).write_text(yaml.safe_dump({**BASE, "distributed_type": "NO"}))
    with pytest.raises(ConfigError, match="asks for 2 processes, but this launch runs 1"):
        read_launch(environment_of(["train.py"]), ["train.py"])
    Path(default).write_text(yaml.safe_dump(fsdp2()))
    assert read_launch(environment_of(["train.py"]), ["train.py"]).settings == FSDP2Settings()
    # Accelerate leaves it alone under --cpu.
    assert read_request(["--cpu", "train.py"]).engine is None


def test_outside_a_launch_the_environment_is_all() -> None:
    assert read_launch({}, []) == Launch(
        rank=0,
        local_rank=0,
        world_size=1,
        local_world_size=1,
        settings=DDPSettings(),
        defaults=LaunchDefaults(),
    )
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    launch = read_launch(torchrun, [])
    assert (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size) == (3, 1, 4, 2)
    assert not launch.is_main


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("accelerate launch --config_file x.yaml train.py", "--config_file x.yaml train.py"),
        ("/env/bin/python /env/bin/accelerate launch train.py", "train.py"),
        ("/env/bin/accelerate-launch --cpu train.py --seed 1", "--cpu train.py --seed 1"),
        ("python -m accelerate.commands.launch -m package.train", "-m package.train"),
        ("python -m accelerate.commands.accelerate_cli launch train.py", "train.py"),
        ("/env/bin/python /env/bin/hfpar launch train.py", "train.py"),
        ("timeout 60 accelerate launch train.py", "train.py"),
        ("torchrun --nproc_per_node 2 sft/train.py", None),
        ("accelerate config", None),
        ("accelerate", None),
        ("python -m torch.distributed.run sft/train.py", None),
    ],
)
def test_how_a_launcher_is_recognised(command: str, arguments: str | None) -> None:
    assert launcher_arguments(command.split()) == (None if arguments is None else arguments.split())


def test_a_module_is_launched_as_well_as_a_script(tmp_path: Path) -> None:
    path = tmp_path / "accelerate.yaml"
    path.write_text(yaml.safe_dump(DDP))
    request = read_request(["--config_file", str(path), "-m", "package.train", "--num_processes", "7"])
    assert request.num_processes == 2  # what follows the script is the script's
    check_launch(request, DDPSettings(), 2)


# The file and the flags of the training


def test_a_flag_fills_or_repeats_but_never_contradicts_the_file() -> None:
    file = LaunchDefaults(gradient_accumulation_steps=4, max_grad_norm=0.5)
    settled = settle(SFTConfig(gradient_accumulation_steps=4), file)
    assert (settled.gradient_accumulation_steps, settled.max_grad_norm) == (4, 0.5)
    settled = settle(SFTConfig(), LaunchDefaults())
    assert (settled.gradient_accumulation_steps, settled.max_grad_norm) == (1, 1.0)
    assert settle(SFTConfig(max_grad_norm=0.0), LaunchDefaults()).max_grad_norm == 0.0
    with pytest.raises(ConfigError, match="^gradient_accumulation_steps: 2 contradicts 4 "):
        settle(SFTConfig(gradient_accumulation_steps=2), file)
    with pytest.raises(ConfigError, match="^max_grad_norm: 0.0 contradicts 0.5 "):
        settle(SFTConfig(max_grad_norm=0.0), file)


def test_sizes_of_the_sequence_group_are_settled_alike() -> None:
    settled = settle(SFTConfig(cp_size=2), LaunchDefaults(sp_size=4))
    assert (settled.cp_size, settled.sp_size) == (2, 4)
    settled = settle(SFTConfig(), LaunchDefaults())
    assert (settled.cp_size, settled.sp_size) == (1, 1)
    with pytest.raises(ConfigError, match="^sp_size: 2 contradicts 1 in the Accelerate "):
        settle(SFTConfig(sp_size=2), LaunchDefaults(sp_size=1))


def test_auto_is_no_value() -> None:
    settings = ZeROSettings(deepspeed_config={**STAGE_2, "gradient_clipping": "auto"})
    assert read_defaults({"ACCELERATE_GRADIENT_CLIPPING": "none"}, settings) == LaunchDefaults()


# Locks of torch's extension builds


def held(path: Path) -> "subprocess.Popen[str]":
    """Another process with the file open, as a build has its lock."""
    program = f"import sys; file = open({str(path)!r}, 'w'); print('open', flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def test_a_lock_left_by_a_killed_build_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lock = tmp_path / "deepspeed_shm_comm" / "lock"
    lock.parent.mkdir()
    builder = held(lock)
    long_ago = time.time() - 3600
    os.utime(lock, (long_ago, long_ago))
    try:
        clear_stale_locks(tmp_path)
        assert lock.exists(), "a build is going on"
        assert not caplog.messages
    finally:
        builder.kill()
        builder.wait()
    clear_stale_locks(tmp_path)
    assert not lock.exists()
    assert [message for message in caplog.messages if "left over from a build that was killed" in message]


def test_a_young_lock_may_be_another_machines(tmp_path: Path) -> None:
    lock = tmp_path / "op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    begin = time.monotonic()
    clear_stale_locks(tmp_path, patience=1.0)
    assert time.monotonic() - begin > 0.7
    assert not lock.exists()
    clear_stale_locks(tmp_path / "nothing built yet")
