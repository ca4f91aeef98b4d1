"""What tensor parallelism cuts of a model, and where ranks exchange: read off the model's own `base_model_tp_plan`.

Pure: it looks at modules and shapes, which may be on the meta device, and needs no processes. `hfpar.parallel.tensor`
carries it out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hfpar.errors import ConfigError
from hfpar.models.cuts import Cut, cut_evenly, cut_heads, cut_vocabulary, join_cuts
from hfpar.models.quantized import quantized_weights, weight_names, weight_shape
from hfpar.models.stored import checkpoint_key

_COLUMN = frozenset(("colwise", "colwise_gather_output"))
_ROW = frozenset(("rowwise", "rowwise_split_input"))
_PACKED = frozenset(("packed_colwise", "packed_rowwise"))
_CUT = _COLUMN | _ROW | _PACKED
_NOT_CUT = frozenset(
    (
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "replicate",
        "moe_tp_experts",
        "local_params",
        "embedding_rowwise",
    )
)
"""What these ask for follows from the rule for regions, or (the embedding) is done for every model."""

_OWN_PLANS: dict[str, dict[str, str]] = {
    # Transformers plans whole experts on each rank here, which is another kind of parallelism.
    "gpt_oss": {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "rowwise",  # [E, H, 2I], a gate beside each up
        "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
        "layers.*.mlp.experts.down_proj": "colwise",
    }
}

_ATTENTION_INPUTS = frozenset(
    ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value", "q_b_proj", "kv_b_proj")
)
HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads")
KV_HEAD_COUNTS = ("num_key_value_heads", "num_kv_heads")
_EXPERT_BYTES = 16
"""Kernels for grouped matrices want rows of a multiple of these."""
_FUSED_QKV, _FUSED_GATE = "qkv_proj", "gate_up_proj"


@dataclass(frozen=True)
class Region:
    """What ranks compute a part of each, so that the sum of what leaves it is the whole."""

    name: str
    module: nn.Module
    leaves_from: nn.Module
    """Its output is summed over ranks."""
    is_experts: bool = False
    """Whether a router's choices enter it beside the hidden states."""


@dataclass(frozen=True)
class Heads:
    """Of one attention module."""

    query: int
    kv: int

    def local(self, tp_size: int) -> Heads:
        """Of one rank."""
        return Heads(self.query // tp_size, max(self.kv // tp_size, 1))


@dataclass
class Plan:
    """Everything that is to be done to one model."""

    tp_size: int
    cuts: list[tuple[nn.Module, str, Cut]] = field(default_factory=list)
    """(owner, parameter, its cut)"""
    regions: list[Region] = field(default_factory=list)
    attentions: list[tuple[nn.Module, Heads]] = field(default_factory=list)
    """With the heads of all ranks together."""
    wide_norms: list[tuple[nn.Module, Cut]] = field(default_factory=list)
    """Norms over all heads of a token, of which each rank has some."""
    once: list[tuple[nn.Module, str]] = field(default_factory=list)
    """Biases that each rank would add to its part of a sum."""
    dropouts: list[tuple[nn.Module, Cut]] = field(default_factory=list)
    """Of adapters, on features of which each rank has some."""


def base_plan(config: Any) -> dict[str, str]:
    """The styles by the pattern of a name in the decoder, but for those that cut nothing.

    Raises:
        ConfigError: the model has none for its layers, or with a style that hfpar doesn't know.
    """
    config = config.get_text_config()
    plan = _OWN_PLANS.get(config.model_type) or getattr(config, "base_model_tp_plan", None) or {}
    for pattern, style in plan.items():
        if style not in _CUT | _NOT_CUT:
            raise ConfigError(
                f"tp_size: {config.model_type} plans {style} for {pattern}, which hfpar doesn't have; leave tp_size "
                "at 1"
            )
    cut = {pattern: style for pattern, style in plan.items() if style in _CUT}
    if not cut:
        raise ConfigError(
            f"tp_size: Transformers has no tensor-parallel plan for the layers of {config.model_type}; leave tp_size "
            "at 1"
        )
    return cut


def plan_model(causal_lm: Any, tp_size: int) -> Plan:
    """Plan a model that may have LoRA adapters already.

    Args:
        causal_lm: a Transformers model, out of its PEFT model.
        tp_size: ranks.

    Raises:
        ConfigError: a model, adapter or size that can't be cut.
    """
    return _Planner(causal_lm, tp_size).plan()


class SizeError(ConfigError):
    """A size that doesn't divide; `tensor.check_tensor` says which would."""


class _Planner:
    """Collects a `Plan`."""

    def __init__(self, causal_lm: Any, tp_size: int) -> None:
        self.causal_lm = causal_lm
        self.config = causal_lm.config.get_text_config()
        self.tp_size = tp_size
        self.result = Plan(tp_size)

    def plan(self) -> Plan:
        decoder = decoder_of(self.causal_lm)
        by_owner: dict[str, dict[str, str]] = {}
        for name, style in _matches(decoder, base_plan(self.config)):
            owner, _, leaf = name.rpartition(".")
            by_owner.setdefault(owner, {})[leaf] = style
        if not by_owner:
            raise self._refusal("has a plan that names none of its layers")
        for owner, styles in by_owner.items():
            module = decoder.get_submodule(owner)
            if any(_is_there(module, leaf) and style in _ROW | _PACKED for leaf, style in styles.items()):
                self._experts(owner, module, styles)
            else:
                self._linear_region(owner, module, styles)
        names = [region.name for region in self.result.regions]
        for name in names:
            outer = next((other for other in names if name.startswith(f"{other}.")), None)
            if outer is not None:
                raise self._refusal(f"plans {name} within {outer}")
        self._vocabulary()
        return self.result

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"tp_size: {self.config.model_type} {what}, which hfpar can't cut; leave tp_size at 1"
        )

    def _divide(self, size: int, what: str) -> None:
        if size % self.tp_size:
            raise SizeError(f"{what} of {size}")

    # Layers

    def _experts(self, name: str, module: nn.Module, styles: dict[str, str]) -> None:
        """Weights of all experts in one parameter each: [E, out, in], or [E, in, out]."""
        for leaf, style in styles.items():
            shape = weight_shape(module, leaf)
            dim = len(shape) - (1 if "rowwise" in style else 2)
            sections = 2 if style in _PACKED else 1
            size = shape[dim]
            is_gate = leaf.startswith("gate_up")
            width = size // 2 if is_gate else size
            what = f"expert size ({name}.{leaf})"
            self._divide(width, what)
            multiple = _EXPERT_BYTES // _element_size(module, leaf)
            if width % multiple == 0 and width // self.tp_size % multiple:
                raise SizeError(f"{what} of {width} into multiples of {multiple}")
            self.result.cuts.append((module, leaf, cut_evenly(dim, size, self.tp_size, sections)))
        for leaf in weight_names(module):
            if leaf not in styles and leaf.endswith("bias"):
                self.result.once.append((module, leaf))
        self.result.regions.append(Region(name, module, module, is_experts=True))

    def _linear_region(self, name: str, module: nn.Module, styles: dict[str, str]) -> None:
        """An attention or a feed-forward module: column-parallel layers, then a row-parallel one."""
        rows = [leaf for leaf, style in styles.items() if style in _ROW]
        if len(rows) != 1:
            raise self._refusal(f"plans {len(rows)} row-parallel layers in {name}")
        heads = self._heads(module, styles) if _ATTENTION_INPUTS & set(styles) else None
        for leaf, style in styles.items():
            if style in _ROW:
                continue
            if leaf in module._parameters:  # one value or row for each head
                size = _parameter(module, leaf).shape[0]
                self.result.cuts.append((module, leaf, self._column_cut(name, leaf, size, heads)))
                continue
            for layer in layers_at(module.get_submodule(leaf)):
                size = _weight_size(layer, 0)
                cut = self._column_cut(name, leaf, size, heads)
                self._cut_linear(layer, cut)
        (row,) = rows
        for layer in layers_at(module.get_submodule(row)):
            size = _weight_size(layer, 1)
            self._divide(size, f"input size ({name}.{row})")
            self._cut_linear(layer, cut_evenly(1, size, self.tp_size))
        if heads is not None:
            self.result.attentions.append((module, heads))
            self._norms_of_heads(name, module, heads)
        self.result.regions.append(Region(name, module, module.get_submodule(row)))

    def _heads(self, module: nn.Module, styles: dict[str, str]) -> Heads:
        """Query and key-value heads: the module's own numbers, or the config's."""
        query = _first_int(module, HEAD_COUNTS) or _config_int(self.config, "num_attention_heads")
        kv = _first_int(module, KV_HEAD_COUNTS) or _config_int(self.config, "num_key_value_heads") or query
        head_dim = getattr(module, "head_dim", None)
        if "k_proj" in styles and isinstance(head_dim, int):
            size = _weight_size(layers_at(module.get_submodule("k_proj"))[0], 0)
            kv = size // head_dim if size % head_dim == 0 else kv
        if not query or not kv:
            raise self._refusal("has another number of heads in each layer")
        if query % self.tp_size:
            raise SizeError(f"{query} attention heads")
        if kv % self.tp_size and self.tp_size % kv:
            raise SizeError(f"{kv} key-value heads")
        return Heads(query, kv)

    def _column_cut(self, region: str, leaf: str, size: int, heads: Heads | None) -> Cut:
        if heads is None:
            sections = 2 if leaf == _FUSED_GATE else 1
            self._divide(size // sections, f"intermediate size ({region}.{leaf})")
            return cut_evenly(0, size, self.tp_size, sections)
        if leaf == _FUSED_QKV and size % (heads.query + 2 * heads.kv) == 0:
            if heads.kv < self.tp_size:
                raise SizeError(f"{heads.kv} key-value heads in one matrix with the queries")
            width = size // (heads.query + 2 * heads.kv)
            parts = (heads.query, heads.kv, heads.kv)
            return join_cuts([cut_evenly(0, count * width, self.tp_size) for count in parts])
        count = heads.kv if leaf in ("k_proj", "v_proj") else heads.query
        if size % count:
            raise self._refusal(f"has {size} rows in {region}.{leaf} for {count} heads")
        return cut_heads(0, size, count, self.tp_size)

    def _norms_of_heads(self, name: str, module: nn.Module, heads: Heads) -> None:
        """Norms of q and k: over each head they are whole on all ranks, over all heads they are a case of their own."""
        sizes = {layer: cut for layer, parameter, cut in self.result.cuts if parameter == "weight"}
        for side, projection, count in (("q", "q_proj", heads.query), ("k", "k_proj", heads.kv)):
            norm = getattr(module, f"{side}_norm", None)
            weight = getattr(norm, "weight", None)
            if not isinstance(norm, nn.Module) or weight is None or projection not in module._modules:
                continue
            base, _ = base_and_adapters(layers_at(module.get_submodule(projection))[0])
            cut = sizes[base]
            if weight.dim() == 2 and weight.shape[0] == count:
                own = cut_heads(0, count, count, self.tp_size)
                for layer in layers_at(norm):
                    leaves = [leaf for leaf in layer._parameters if _is_there(layer, leaf)]
                    self.result.cuts += [(layer, leaf, own) for leaf in leaves]
            elif weight.shape == (cut.size,) and count > 1:
                self.result.wide_norms.append((norm, cut))

    def _cut_linear(self, layer: nn.Module, cut: Cut) -> None:
        """A linear layer and the half of each of its adapters that has the same rows or columns."""
        base, adapters = base_and_adapters(layer)
        self.result.cuts.append((base, "weight", cut))
        if cut.dim == 0 and _is_there(base, "bias"):
            self.result.cuts.append((base, "bias", cut))
        if cut.dim == 1 and _is_there(base, "bias"):
            self.result.once.append((base, "bias"))
        if cut.dim == 1 and adapters:
            dropouts: Any = layer.lora_dropout
            drawing = [dropout for dropout in dropouts.values() if isinstance(dropout, nn.Dropout)]
            self.result.dropouts += [(dropout, cut) for dropout in drawing]
        for lora_a, lora_b in adapters:
            self.result.cuts.append((lora_b if cut.dim == 0 else lora_a, "weight", cut))
            if _is_there(lora_b, "bias"):
                if cut.dim == 0:
                    self.result.cuts.append((lora_b, "bias", cut))
                else:
                    self.result.once.append((lora_b, "bias"))

    # The vocabulary

    def _vocabulary(self) -> None:
        embedding = self.causal_lm.get_input_embeddings()
        head = self.causal_lm.get_output_embeddings()
        for layer in layers_at(embedding):
            base, _ = base_and_adapters(layer)
            if not isinstance(base, nn.Embedding):
                raise self._refusal(f"has a {type(base).__name__} as its embedding")
            self.result.cuts.append(
                (layer, "weight", cut_vocabulary(0, _weight_size(layer, 0), self.tp_size))
            )
        if head is None:
            raise self._refusal("has no head")
        for layer in layers_at(head):
            base, _ = base_and_adapters(layer)
            if not isinstance(base, nn.Linear):
                raise self._refusal(f"has a {type(base).__name__} as its head")
            self._cut_linear(layer, cut_vocabulary(0, _weight_size(layer, 0), self.tp_size))


def decoder_of(causal_lm: Any) -> Any:
    """The model under the head."""
    decoder = getattr(causal_lm, getattr(causal_lm, "base_model_prefix", "") or "model", None)
    if decoder is None or decoder is causal_lm:
        raise ConfigError(
            f"tp_size: {type(causal_lm).__name__} has no decoder under its head; leave tp_size at 1"
        )
    return decoder


def _matches(decoder: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """(name, style) of every module and parameter that the plan names.

    Raises:
        ConfigError: an adapter's trained copy of more than a single layer, which hides planned layers.
    """
    patterns = [
        (re.compile(re.escape(pattern).replace(r"\*", r"\d+")), style) for pattern, style in plan.items()
    ]
    for prefix, module in decoder.named_modules():
        own = [f"{prefix}.{leaf}" for leaf in weight_names(module)]
        for name in (prefix, *own):
            is_copy = ".original_module." in name
            plain = checkpoint_key(name) if is_copy else name
            for pattern, style in patterns:
                if not pattern.fullmatch(plain):
                    continue
                if is_copy:
                    owner, _, leaf = plain.rpartition(".")
                    raise ConfigError(
                        f"modules_to_save: hfpar can't cut a copy of {owner}; name the layers in it, such as {leaf}, "
                        "or leave tp_size at 1"
                    )
                yield name, style


def layers_at(outer: nn.Module) -> list[nn.Module]:
    """What stands at a place: the module, or the copies that PEFT keeps of a module that is trained whole."""
    from peft.utils import ModulesToSaveWrapper

    if isinstance(outer, ModulesToSaveWrapper):
        return [outer.original_module, *outer.modules_to_save.values()]
    return [outer]


def base_and_adapters(layer: nn.Module) -> tuple[nn.Module, list[tuple[nn.Module, nn.Module]]]:
    """The plain layer inside a LoRA layer, and the (A, B) of each adapter; the layer itself otherwise.

    Raises:
        ConfigError: an adapter of another kind.
    """
    from peft.tuners.lora import Linear as LoraLinear
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(layer, BaseTunerLayer):
        return layer, []
    variants = getattr(layer, "lora_variant", None)
    if not isinstance(layer, LoraLinear) or variants or any(getattr(layer, "use_dora", {}).values()):
        kind = "DoRA" if any(getattr(layer, "use_dora", {}).values()) else type(layer).__name__
        raise ConfigError(f"tp_size: hfpar can't cut {kind} adapters; use plain LoRA, or leave tp_size at 1")
    pairs = [(layer.lora_A[name], layer.lora_B[name]) for name in layer.lora_A]
    return layer.get_base_layer(), pairs


def _parameter(module: nn.Module, leaf: str) -> nn.Parameter:
    parameter = module._parameters[leaf]
    assert parameter is not None
    return parameter


def _is_there(module: nn.Module, leaf: str) -> bool:
    return leaf in weight_names(module)


def _element_size(module: nn.Module, leaf: str) -> int:
    """Bytes of a number as layers compute with it."""
    held = quantized_weights(module).get(leaf)
    return held.compute_dtype.itemsize if held is not None else _parameter(module, leaf).element_size()


def _weight_size(layer: nn.Module, dim: int) -> int:
    base, _ = base_and_adapters(layer)
    return weight_shape(base, "weight")[dim]


def _first_int(module: nn.Module, names: tuple[str, ...]) -> int | None:
    values = (getattr(module, name, None) for name in names)
    return next((value for value in values if isinstance(value, int)), None)


def _config_int(config: Any, name: str) -> int | None:
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # Transformers': ask layer by layer
        return None
    return value if isinstance(value, int) else None
