"""The base's weights as a run held them while it trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.exporting.adapter import Adapter
from hfpar.exporting.base import Base
from hfpar.exporting.run import Run
from hfpar.models.adapter_init import TAKEN_FROM_BASE
from hfpar.models.cuts import Cut
from hfpar.models.load import DTYPES, weights_dtype
from hfpar.models.quantization import Quantization, check_bitsandbytes, quantize_skeleton
from hfpar.models.quantized import QuantizedWeight, quantized_weights
from hfpar.models.quantized_fill import Sharers, quantize_rows
from hfpar.parallel.plan import plan_model


@dataclass(frozen=True)
class HeldWeights:
    """How an adapter finds the base.

    Attributes:
        description: for people.
        dtype: to which weights were rounded; None: as they are stored.
        quantized: by name, those that were held in few bits.
        cuts: of those, if tensor parallelism quantized each part by itself.
        rank: of an adapter that began with a part of the base, and was trained on the rest of it; None: it didn't.
    """

    description: str
    dtype: torch.dtype | None = None
    quantized: dict[str, QuantizedWeight] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    rank: int | None = None

    def values(self, name: str, stored: Tensor, adapter: Adapter) -> Tensor:
        """A weight as it was held, dequantized; with what the adapter began with, which it takes out itself."""
        if self.dtype is None:
            return stored
        taken = None if self.rank is None else adapter.began_with(name, self.rank)
        if taken is None:
            return self._held(name, stored)
        beginning = taken[:]
        return self._held(name, taken.leave(stored.to(self.dtype), beginning)).float() + beginning.float()

    def _held(self, name: str, values: Tensor) -> Tensor:
        weight = self.quantized.get(name)
        if weight is None:
            assert self.dtype is not None
            return values.to(self.dtype)
        cut = self.cuts.get(name)
        if cut is None:
            return _quantize_and_back(weight, values)
        ranks = range(len(cut.ranges))
        return cut.assemble(
            [_quantize_and_back(weight.part(cut, rank), cut.take(values, rank)) for rank in ranks]
        )


def _quantize_and_back(weight: QuantizedWeight, values: Tensor) -> Tensor:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows = slice(0, weight.format.num_rows(weight.shape))
    held = quantize_rows(weight, rows, lambda part: values[part], Sharers(), device)
    return weight.dequantize(held.packed, held.scales, held.nested, weight.compute_dtype).cpu()


def held_weights(run: Run, base: Base, make_skeleton: Callable[..., Any], *, original: bool) -> HeldWeights:
    """Find out how a run held its base.

    Args:
        run: the run.
        base: its base.
        make_skeleton: makes the base's model on the meta device.
        original: whether the adapter is to be merged into the stored weights all the same.

    Raises:
        ConfigError: the original weights aren't there, or bitsandbytes isn't.
    """
    if base.quantization is not None:
        if original:
            raise ConfigError(
                f"--into: original, but {base.folder} holds quantized weights only; leave it out, or name the "
                "unquantized model with --base"
            )
        return HeldWeights(f"the base's stored weights, dequantized from {base.quantization}")
    if run.config is None:
        return HeldWeights("the base as it is stored")
    method = run.config.quantization
    if not original:
        _check_was_plain(run)
    if original:
        return HeldWeights(_about_original(method))
    dtype = weights_dtype(run.config.dtype, run.base_config)
    rank = run.config.lora_r if run.config.init_lora_weights in TAKEN_FROM_BASE else None
    if method in (None, "none"):
        return HeldWeights(
            f"the base in {str(dtype).removeprefix('torch.')}, as it was trained on", dtype, rank=rank
        )
    assert method is not None
    check_bitsandbytes(method)
    model = make_skeleton(dtype=dtype)
    quantize_skeleton(model, _quantization(run.config, method))
    quantized = {
        f"{name}.{parameter}": weight
        for name, module in model.named_modules()
        for parameter, weight in quantized_weights(module).items()
    }
    return HeldWeights(
        f"the {method} weights that were trained on, dequantized: the function that was trained, apart from the base "
        "by the quantization error (--into original adds the adapter to the original weights instead)",
        dtype,
        quantized,
        _cuts_through_blocks(model, run.config.tp_size or 1),
        rank,
    )


def _check_was_plain(run: Run) -> None:
    """Refuse to make of plain weights what a checkpoint held in few bits.

    Raises:
        ConfigError: the run's own base was stored quantized.
    """
    assert run.config is not None
    own = Path(str(run.config.model_name_or_path)).expanduser() / "config.json"
    is_stored = own.is_file() and "quantization_config" in json.loads(own.read_text())
    if is_stored or run.config.quantization == "mxfp4":
        raise ConfigError(
            f"--base: {run.base} holds plain weights, but the run was trained on {own.parent}, which is stored "
            "quantized; use that base, or --into original"
        )


def _about_original(method: str | None) -> str:
    if method in (None, "none"):
        return "the original weights"
    return (
        f"the original weights: nearer to the base, but the adapter was trained on their {method} values, so that this "
        "isn't quite the function that was trained (--into trained is)"
    )


def _quantization(config: SFTConfig, method: str) -> Quantization:
    return Quantization(
        method,
        double_quant=config.bnb_4bit_use_double_quant is not False,
        compute_dtype=DTYPES.get(config.bnb_4bit_compute_dtype),
        skip_modules=tuple(config.llm_int8_skip_modules or ()),
    )


def _cuts_through_blocks(model: Any, tp_size: int) -> dict[str, Cut]:
    """Cuts of weights whose parts were quantized by themselves."""
    if tp_size == 1:
        return {}
    names = {id(module): name for name, module in model.named_modules()}
    return {
        f"{names[id(owner)]}.{parameter}": cut
        for owner, parameter, cut in plan_model(model, tp_size).cuts
        if parameter in quantized_weights(owner)
        and quantized_weights(owner)[parameter].part(cut, 0).cuts_through_blocks
    }
