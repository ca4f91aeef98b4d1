"""ZeRO-1, -2 and -3: DeepSpeed over the batch group, with the DeepSpeed settings of the Accelerate file."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hfpar.config.engine import ZeROSettings
from hfpar.engine.base import Engine, OptimizerFactory, trainable, weights
from hfpar.errors import ConfigError
from hfpar.models.cuts import cuts_of
from hfpar.parallel.layout import Layout


class BatchGroupMPU:
    """Tells DeepSpeed which ranks hold the same weights. The method names are DeepSpeed's."""

    def __init__(self, layout: Layout) -> None:
        """Keep the layout."""
        self.layout = layout

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        """The batch group."""
        return self.layout.batch_group

    def get_data_parallel_world_size(self) -> int:
        """Ranks in the batch group."""
        return self.layout.batch_size

    def get_data_parallel_rank(self) -> int:
        """This rank's place in the batch group."""
        return dist.get_rank(self.layout.batch_group)

    def get_model_parallel_group(self) -> dist.ProcessGroup | None:
        """Ranks that hold different weights of the same model copy; None: each holds all."""
        return self.layout.tp_group if self.layout.tp_size > 1 else None

    def get_model_parallel_world_size(self) -> int:
        """Size of the model-parallel group."""
        return self.layout.tp_size

    def get_model_parallel_rank(self) -> int:
        """Place in the model-parallel group."""
        return self.layout.tp_rank


class ZeROEngine(Engine):
    """DeepSpeed's engine, told exactly where an accumulation window ends."""

    settings: ZeROSettings

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: OptimizerFactory,
        settings: ZeROSettings,
        layout: Layout,
        device: torch.device,
        *,
        gradient_accumulation_steps: int,
        max_grad_norm: float | None,
    ) -> None:
        """Wrap the model. DeepSpeed clips inside its own step, so it is told the bound here."""
        import deepspeed

        super().__init__(layout, device)
        self.settings = settings
        self.name = settings.name
        self.max_grad_norm = max_grad_norm
        self.module = module
        config = complete_config(
            settings,
            hidden_size=_hidden_size(module),
            gradient_accumulation_steps=gradient_accumulation_steps,
            max_grad_norm=max_grad_norm,
        )
        check_zero_section(config)
        for parameter in module.parameters():
            _round_to_engine(parameter, settings)
        for owner in module.modules():  # DeepSpeed moves none once something has been cut while loading
            for name, buffer in owner._buffers.items():
                owner._buffers[name] = None if buffer is None else buffer.to(device)
        _mark_cut(module, layout)
        base_optimizer = make_optimizer(trainable(module))
        with contextlib.redirect_stdout(io.StringIO()):  # it prints a line about its op
            self.wrapped, _, _, _ = deepspeed.initialize(
                model=module,
                optimizer=base_optimizer,
                config=config,
                mpu=BatchGroupMPU(layout),
                dist_init_required=False,
            )
        # The schedule works on the optimizer whose parameter groups DeepSpeed shares.
        self.optimizer = base_optimizer

    def forward(self, **inputs: Any) -> Tensor:
        """See `Engine`."""
        result: Tensor = self.wrapped(**inputs)
        return result

    def backward(self, loss: Tensor, *, last_micro_batch: bool) -> None:
        """See `Engine`. The window's length is ours to know: the last one of an epoch can be shorter."""
        self.wrapped.set_gradient_accumulation_boundary(last_micro_batch)
        self.wrapped.backward(loss, scale_wrt_gas=False)
        if not last_micro_batch:
            self.wrapped.step()

    def step(self, max_grad_norm: float | None) -> float:
        """See `Engine`."""
        assert max_grad_norm == self.max_grad_norm, "DeepSpeed was told another bound"
        self.wrapped.step()
        norm = self.wrapped.get_global_grad_norm()
        return float("nan") if norm is None else float(norm)

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        from deepspeed.utils import safe_get_full_grad

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for name, parameter in trainable(self.module):
                gradient = safe_get_full_grad(parameter)
                assert gradient is not None, f"{name} has no gradient"
                yield name, gradient.detach().float().reshape(_full_shape(parameter))

        return self._whole(gathered())

    def parameters(self, *, trainable_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See `Engine`."""
        from deepspeed.runtime.zero import GatheredParameters

        def gathered() -> Iterator[tuple[str, Tensor]]:
            for weight in weights(self.module):
                if trainable_only and not weight.requires_grad:
                    continue
                with GatheredParameters(weight.parameters, enabled=self.settings.stage == 3):
                    whole = weight.assemble([p.detach() for p in weight.parameters]).cpu().clone()
                yield weight.name, whole

        return self._whole(gathered())

    @contextlib.contextmanager
    def inference(self) -> Iterator[None]:
        """See `Engine`. Stage 3 fetches ahead for a backward that doesn't come; what is under way must arrive."""
        with torch.no_grad():
            yield
        if self.settings.stage == 3:
            self.wrapped.empty_partition_cache()

    def save_state(self, folder: Path) -> None:
        """See `Engine`."""
        self.wrapped.save_checkpoint(str(folder), tag="zero", exclude_frozen_parameters=True)

    def load_state(self, folder: Path) -> None:
        """See `Engine`."""
        if not (folder / "zero").is_dir():
            raise ConfigError(
                f"resume: {folder} wasn't written by {self.name}; resume with the engine that wrote it"
            )
        path, _ = self.wrapped.load_checkpoint(str(folder), tag="zero", load_module_strict=False)
        if path is None:
            raise ConfigError(f"resume: DeepSpeed found no checkpoint in {folder}")

    def close(self) -> None:
        """Drop DeepSpeed's hooks, so that another engine can be made in the same process."""
        self.wrapped.destroy()


class Partitioner:
    """Cuts each module's weights among the batch group as soon as they are there (stage 3)."""

    def __init__(self, settings: ZeROSettings, layout: Layout) -> None:
        """Keep what DeepSpeed needs to cut weights; the engine is given the completed config later."""
        keys = ("stage", "offload_param")
        zero = settings.deepspeed_config["zero_optimization"]
        self.config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {key: zero[key] for key in keys if key in zero},
        }
        self.settings, self.layout = settings, layout

    def __call__(self, module: nn.Module) -> None:
        """Cut what hangs at the module itself."""
        from deepspeed.runtime.zero import Init

        for parameter in module.parameters(recurse=False):
            _round_to_engine(parameter, self.settings)
        leaf = nn.Module()
        leaf._parameters.update(
            {name: p for name, p in module._parameters.items() if p is not None and not hasattr(p, "ds_id")}
        )
        if leaf._parameters:
            Init(
                module=leaf,
                config_dict_or_path=self.config,
                data_parallel_group=self.layout.batch_group,
                mem_efficient_linear=False,
            )


def _round_to_engine(parameter: nn.Parameter, settings: ZeROSettings) -> None:
    """To the type in which DeepSpeed keeps weights; it does so itself only for a model none of which is cut yet."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(settings.mixed_precision)
    if dtype is not None and parameter.is_floating_point() and not hasattr(parameter, "ds_id"):
        parameter.data = parameter.data.to(dtype)


def _mark_cut(module: nn.Module, layout: Layout) -> None:
    """Tell DeepSpeed which parameters each tp rank counts in the norm; the others only the first rank does."""
    cuts = cuts_of(module)
    for name, parameter in module.named_parameters():
        cut = cuts.get(name)
        if cut is not None and layout.tp_rank % cut.copies == 0:
            parameter.tensor_model_parallel = True  # type: ignore[attr-defined]


def _full_shape(parameter: nn.Parameter) -> torch.Size:
    return getattr(parameter, "ds_shape", parameter.shape)


def _hidden_size(module: nn.Module) -> int:
    config: Any = module.config
    return int(config.get_text_config().hidden_size)


def complete_config(
    settings: ZeROSettings, *, hidden_size: int, gradient_accumulation_steps: int, max_grad_norm: float | None
) -> dict[str, Any]:
    """The DeepSpeed config with every `auto` filled, by the rules that Transformers and Accelerate use.

    Raises:
        ConfigError: an `auto` that stands where nothing can be filled in.
    """
    config = copy.deepcopy(settings.deepspeed_config)
    config.pop("train_batch_size", None)
    config["train_micro_batch_size_per_gpu"] = 1  # only DeepSpeed's own throughput log reads it
    config["gradient_accumulation_steps"] = gradient_accumulation_steps
    config["gradient_clipping"] = max_grad_norm or 0.0
    config.setdefault("steps_per_print", 10**9)
    config.setdefault("zero_allow_untested_optimizer", True)
    config.setdefault("zero_force_ds_cpu_optimizer", False)
    for section in ("bf16", "fp16"):
        config.setdefault(section, {})["enabled"] = settings.mixed_precision == section
    zero = config["zero_optimization"]
    sizes = {
        "reduce_bucket_size": hidden_size * hidden_size,
        "stage3_prefetch_bucket_size": int(0.9 * hidden_size * hidden_size),
        "stage3_param_persistence_threshold": 10 * hidden_size,
    }
    for key, value in sizes.items():
        if zero.get(key) == "auto":
            zero[key] = value
    leftover = _find_auto(config)
    if leftover:
        raise ConfigError(f"{leftover}: auto in the DeepSpeed config can't be filled in; write its value")
    return config


def check_zero_section(config: dict[str, Any]) -> None:
    """Let DeepSpeed itself judge the keys and values of `zero_optimization`.

    Raises:
        ConfigError: names the first that it refuses.
    """
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    try:
        DeepSpeedZeroConfig(**config["zero_optimization"])
    except ValueError as error:  # pydantic's, with one entry for each mistake
        first = error.errors()[0]  # type: ignore[attr-defined]
        key = ".".join(str(part) for part in ("zero_optimization", *first["loc"]))
        raise ConfigError(f"{key}: {first['input']} in the DeepSpeed config: {first['msg']}") from error


def _find_auto(config: dict[str, Any], prefix: str = "") -> str | None:
    for key, value in config.items():
        if value == "auto":
            return prefix + key
        if isinstance(value, dict):
            found = _find_auto(value, f"{prefix}{key}.")
            if found:
                return found
    return None
