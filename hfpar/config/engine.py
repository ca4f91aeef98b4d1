"""What the Accelerate config file says about the engine, as plain data.

One dataclass an engine. They are made from the launch environment by `hfpar.accelerator`, or directly by
`hfpar verify` and the tests; nothing else in hfpar asks which file a run was started with.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

MixedPrecision = Literal["no", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True)
class DDPSettings:
    """`distributed_type: MULTI_GPU` (also a single process): whole weights on every rank."""

    mixed_precision: MixedPrecision = "no"

    @property
    def name(self) -> str:
        """The engine's name in tables and messages."""
        return "ddp"


@dataclass(frozen=True, kw_only=True)
class FSDP2Settings:
    """`distributed_type: FSDP` with `fsdp_version: 2`: every weight sharded over the batch group."""

    mixed_precision: MixedPrecision = "no"
    reshard_after_forward: bool = True
    offload_params: bool = False
    activation_checkpointing: bool = False
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"] = "SHARDED_STATE_DICT"
    transformer_layer_cls_to_wrap: tuple[str, ...] | None = None
    """Class names wrapped one by one; None: the model's own `_no_split_modules`; empty: only the root."""

    @property
    def name(self) -> str:
        """The engine's name in tables and messages."""
        return "fsdp2"


@dataclass(frozen=True, kw_only=True)
class ZeROSettings:
    """`distributed_type: DEEPSPEED`: ZeRO stage 1, 2 or 3, with the DeepSpeed JSON as the user wrote it."""

    mixed_precision: MixedPrecision = "no"
    deepspeed_config: dict[str, Any] = field(default_factory=dict)
    zero3_init: bool = True
    """Whether a stage-3 model is cut while it loads (`zero3_init_flag`)."""

    @property
    def stage(self) -> int:
        """The ZeRO stage."""
        return int(self.deepspeed_config["zero_optimization"]["stage"])

    @property
    def name(self) -> str:
        """The engine's name in tables and messages."""
        return f"zero{self.stage}"

    @classmethod
    def for_stage(cls, stage: int) -> ZeROSettings:
        """The settings of a bare Accelerate file that only names the stage."""
        return cls(deepspeed_config={"zero_optimization": {"stage": stage}})


EngineSettings = DDPSettings | FSDP2Settings | ZeROSettings


@dataclass(frozen=True, kw_only=True)
class LaunchDefaults:
    """What an Accelerate or DeepSpeed file may say of training. A flag that contradicts one is an error."""

    gradient_accumulation_steps: int | None = None
    max_grad_norm: float | None = None
    cp_size: int | None = None
    sp_size: int | None = None
    tp_size: int | None = None
