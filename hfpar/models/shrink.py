"""A much smaller copy of a model's config that keeps every feature of it.

Sizes shrink; what a layer computes doesn't. So a test of the copy is a test of the user's own family: its ratio
of query to key-value heads, sliding windows, soft-capping, sinks, tied embeddings, latent attention, experts,
rotary scaling, and each kind of layer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PretrainedConfig

from hfpar.errors import ConfigError

VOCAB_SIZE = 384
"""Most words that the copy keeps."""

SLIDING_WINDOW = 8
"""A sliding window shrinks to this: documents of more tokens than this feel it."""

_LENGTHS = {
    "sliding_window": SLIDING_WINDOW,
    "attention_chunk_size": SLIDING_WINDOW,
    "floor_scale": SLIDING_WINDOW,
    "index_topk": SLIDING_WINDOW,
    "index_topk_blocks": 1,
    "index_block_size": 4,
}
"""Numbers of tokens or blocks from which on layers compute something else; a copy's documents must go beyond."""

_SOFTCAP = 2.0
"""A copy's scores and logits are small; a cap of 50 would hardly change them."""

_NUM_EXPERTS = 4
_MAX_QUERY_GROUP = 8
_EXPERT_MULTIPLE = 8
"""Of a rank's part of an expert, as kernels for grouped matrices want it."""
_LEARNED_POSITIONS = 256

# The names under which families keep the same size.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HIDDEN_SIZE = ("hidden_size", "n_embd", "d_model")
_QUERY_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_INTERMEDIATE_SIZE = (
    "intermediate_size",
    "n_inner",
    "dff",
    "ffn_dim",
    "ffn_hidden_size",
    "intermediate_size_mlp",
)
_EXPERT_SIZE = (
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "expert_ffn_hidden_size",
)
_SIDE_SIZES = ("hidden_size_per_layer_input", "laurel_rank")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k")
_SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "sep_token_id")


def shrink_config(
    config: PretrainedConfig, *, fewest_heads: int = 1, tp_sizes: Sequence[int] = (), block: int = 1
) -> PretrainedConfig:
    """Copy a causal language model's config with 2 layers or as few as show every kind, narrow, few words.

    The copy is for a deterministic fp32 comparison: dropout and quantisation are left out.

    Args:
        config: the user's; not changed.
        fewest_heads: query heads to keep at least, if the model has them.
        tp_sizes: numbers of ranks that are each to share the copy evenly, if they can share the model's own heads.
        block: a rank's part of a width is to be a multiple of this.

    Raises:
        ConfigError: a model of more than text.
    """
    values = copy.deepcopy(config.to_dict())
    if any(isinstance(values.get(f"{kind}_config"), dict) for kind in ("text", "vision", "audio")):
        raise ConfigError(
            f"model_name_or_path: {config.model_type} is more than a text model; give the folder of a text-only one"
        )
    head_dim = _shrink_heads(values, fewest_heads, tp_sizes, block)
    _shrink_latent_attention(values)
    _shrink_state_space(values)
    _shrink_rotary(values, head_dim)
    _shrink_layers(values)
    _shrink_experts(values)
    _shrink_vocabulary(values)
    for name in values:
        if name in _LENGTHS and values[name]:
            values[name] = min(values[name], _LENGTHS[name])
        if name.endswith(("dropout", "dropout_prob", "_pdrop", "_jitter_noise")):
            values[name] = 0.0
        if name.endswith(("softcapping", "soft_cap")) and values[name]:
            values[name] = min(values[name], _SOFTCAP)
    for name in ("quantization_config", "_name_or_path"):
        values.pop(name, None)
    values["dtype"] = "float32"
    return type(config).from_dict(values)


def _first(values: dict[str, Any], names: Iterable[str]) -> str | None:
    """The name of these that the family uses."""
    return next((name for name in names if values.get(name) is not None), None)


def _without(values: dict[str, Any], names: str) -> ConfigError:
    return ConfigError(
        f"model_name_or_path: the config of {values.get('model_type')} has no {names}, by which hfpar makes a tiny "
        "copy to check; hfpar only trains what it can check"
    )


def _shrink_heads(values: dict[str, Any], fewest_heads: int, tp_sizes: Sequence[int], block: int) -> int:
    """Heads, width and feed-forward; returns the head dimension."""
    hidden_name, heads_name = _first(values, _HIDDEN_SIZE), _first(values, _QUERY_HEADS)
    if hidden_name is None or heads_name is None:
        raise _without(values, f"{_HIDDEN_SIZE[0]} and {_QUERY_HEADS[0]}")
    hidden, heads = values[hidden_name], values[heads_name]
    kv_name = _first(values, _KV_HEADS)
    kv_heads = values[kv_name] if kv_name else heads
    group = min(max(heads // kv_heads, 1), _MAX_QUERY_GROUP)
    few = 3 if kv_heads % 2 else 2  # an odd number stays one: ranks then share them unevenly
    new_kv_heads = max(4 if group == 1 else min(kv_heads, few), min(-(-fewest_heads // group), kv_heads))
    tp_sizes = [size for size in tp_sizes if _can_share(heads, kv_heads, size)]
    if any(group * kv_heads % size for size in tp_sizes):
        group = heads // kv_heads
    fits = (
        count
        for count in range(new_kv_heads, kv_heads + 1)
        if all(_can_share(count * group, count, size) for size in tp_sizes)
    )
    new_kv_heads = next(fits, new_kv_heads)
    new_heads = new_kv_heads * group

    explicit = values.get("head_dim") is not None
    head_dim = values["head_dim"] if explicit else hidden // heads
    ranks = math.lcm(*tp_sizes)
    new_head_dim = 16 if new_heads <= 8 else 8
    while new_heads * new_head_dim % (block * ranks) and block > 1:
        new_head_dim += 8
    new_hidden = new_heads * new_head_dim
    latent = values.get("kv_lora_rank") is not None
    if explicit and head_dim * heads != hidden and not latent:
        new_hidden = _multiple(64 if new_hidden != 64 else 96, block)

    values[hidden_name], values[heads_name] = new_hidden, new_heads
    if kv_name:
        values[kv_name] = new_kv_heads
    if explicit:
        values["head_dim"] = new_head_dim
    if values.get("query_pre_attn_scalar") is not None:
        values["query_pre_attn_scalar"] = max(values["query_pre_attn_scalar"] * new_head_dim // head_dim, 1)
    if values.get("rotary_dim"):
        values["rotary_dim"] = max(values["rotary_dim"] * new_head_dim // head_dim, 2)
    for layer in (values.get("per_layer_config") or {}).values():
        if "head_dim" in layer:
            layer["head_dim"] = layer["head_dim"] * new_head_dim // head_dim
    for name in _INTERMEDIATE_SIZE:
        if values.get(name) is not None:
            values[name] = _multiple(2 * new_hidden, ranks * block)
    for name in (*_EXPERT_SIZE, *_SIDE_SIZES):
        if values.get(name):
            values[name] = _multiple(
                new_hidden // 2, ranks * max(_EXPERT_MULTIPLE, block) if ranks > 1 else block
            )
    return new_head_dim


def _can_share(heads: int, kv_heads: int, tp_size: int) -> bool:
    """Whether tensor parallelism can deal out whole heads."""
    return heads % tp_size == 0 and (kv_heads % tp_size == 0 or tp_size % kv_heads == 0)


def _multiple(size: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is no smaller."""
    return -(-size // divisor) * divisor


def _shrink_latent_attention(values: dict[str, Any]) -> None:
    """DeepSeek's: keys and values through a narrow latent, the rotary part beside it."""
    if values.get("kv_lora_rank") is None:
        return
    same = values.get("v_head_dim") == values.get("qk_nope_head_dim")
    values["kv_lora_rank"] = 16
    if values.get("q_lora_rank") is not None:
        values["q_lora_rank"] = 24
    values["qk_nope_head_dim"], values["qk_rope_head_dim"] = 16, 8
    values["v_head_dim"] = 16 if same else 12
    if "qk_head_dim" in values:
        values["qk_head_dim"] = 24
    if values.get("head_dim") is not None:
        values["head_dim"] = values["qk_rope_head_dim"]


def _shrink_state_space(values: dict[str, Any]) -> None:
    """Mamba's, which a family may have sizes for without having such layers."""
    if not values.get("mamba_n_heads") or not values.get("mamba_expand"):
        return
    values["mamba_n_heads"], values["mamba_n_groups"], values["mamba_d_state"] = 4, 1, 16
    size = values["mamba_expand"] * values["hidden_size"]
    values["mamba_d_head"] = size // 4
    if "mamba_d_ssm" in values:
        values["mamba_d_ssm"] = size


def _shrink_rotary(values: dict[str, Any], head_dim: int) -> None:
    """Lists of a factor for each rotary frequency get as many entries as are left; without rotary, fewer positions."""
    rope = values.get("rope_parameters") or values.get("rope_scaling")
    if not isinstance(rope, dict):
        if "rope_theta" not in values:
            for name in ("max_position_embeddings", "n_positions"):
                if values.get(name):
                    values[name] = min(values[name], _LEARNED_POSITIONS)
        return
    rotary_dim = values.get("qk_rope_head_dim") or head_dim
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        factor = parameters.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0
        num_frequencies = int(rotary_dim * factor) // 2
        for name in ("short_factor", "long_factor"):
            if isinstance(parameters.get(name), list):
                parameters[name] = parameters[name][:num_frequencies]


def _shrink_layers(values: dict[str, Any]) -> None:
    """Keep the first layer of each kind, and two layers at least, in their order."""
    name = _first(values, _NUM_LAYERS)
    if name is None:
        raise _without(values, _NUM_LAYERS[0])
    count = values[name]
    per_layer = [
        key for key, value in values.items() if isinstance(value, list) and len(value) == count and count > 1
    ]
    first_shared = count - (values.get("num_kv_shared_layers") or 0)
    dense_first = values.get("first_k_dense_replace")
    dense_layers = values.get("mlp_only_layers")
    sparse_step = values.get("decoder_sparse_step") or 1

    def kind(layer: int) -> tuple[str, ...]:
        listed = [str(values[key][layer]) for key in per_layer]
        dense = [str(dense_first is not None and layer < dense_first), str(layer in (dense_layers or ()))]
        return (*listed, *dense, str(layer >= first_shared))

    first_of_kind: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        first_of_kind.setdefault(kind(layer), layer)
    kept = set(first_of_kind.values())
    fewest = min(count, max(2, sparse_step))
    kept |= set([layer for layer in range(count) if layer not in kept][: max(fewest - len(kept), 0)])
    layers = sorted(kept)

    values[name] = len(layers)
    for key in per_layer:
        values[key] = [values[key][layer] for layer in layers]
    if values.get("num_kv_shared_layers"):
        values["num_kv_shared_layers"] = sum(layer >= first_shared for layer in layers)
    if values.get("per_layer_config"):
        own = {int(layer): settings for layer, settings in values["per_layer_config"].items()}
        values["per_layer_config"] = {str(new): own[old] for new, old in enumerate(layers) if old in own}
    if dense_first is not None:
        values["first_k_dense_replace"] = sum(layer < dense_first for layer in layers)
    if dense_layers:
        values["mlp_only_layers"] = [new for new, layer in enumerate(layers) if layer in dense_layers]
    if values.get("num_nextn_predict_layers"):
        values["num_nextn_predict_layers"] = 0  # weights that Transformers doesn't load either


def _shrink_experts(values: dict[str, Any]) -> None:
    name = _first(values, _EXPERTS)
    if name is None or not values[name]:
        return
    values[name] = min(values[name], _NUM_EXPERTS)
    if values.get("zero_expert_num"):
        values["zero_expert_num"] = min(values["zero_expert_num"], _NUM_EXPERTS)
    for per_token in _EXPERTS_PER_TOKEN:
        if values.get(per_token):
            values[per_token] = min(values[per_token], _NUM_EXPERTS // 2)
    if values.get("n_group"):
        values["n_group"] = min(values["n_group"], 2)
        values["topk_group"] = 1
    if values.get("n_shared_experts"):
        values["n_shared_experts"] = min(values["n_shared_experts"], 2)


def _shrink_vocabulary(values: dict[str, Any]) -> None:
    """Fewer words; special tokens that were the same stay the same."""
    for name in ("vocab_size", "vocab_size_per_layer_input"):
        if values.get(name):
            values[name] = min(values[name], VOCAB_SIZE)
    renumbered: dict[int, int] = {}

    def renumber(token: int) -> int:
        return renumbered.setdefault(token, len(renumbered))

    for name in _SPECIAL_TOKENS:
        token = values.get(name)
        if isinstance(token, int):
            values[name] = renumber(token)
        elif isinstance(token, list):
            values[name] = [renumber(one) for one in token]
