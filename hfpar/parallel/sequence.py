"""Sequence parallelism: the ranks of a sequence group share one stream, each with a slice of its tokens.

`shard_stream` cuts a stream, `apply` lets a model's attention see the whole of it, `check_sequence` refuses what
can't come out right before weights load.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hfpar.attention import interface
from hfpar.attention.placement import place
from hfpar.attention.sharded import StreamSharding
from hfpar.data.stream import IGNORE_INDEX, TokenStream
from hfpar.errors import ConfigError, HfparError
from hfpar.models.rope import longest_before_change
from hfpar.parallel.layout import Layout

# The stream


@dataclass(frozen=True, eq=False)
class StreamShard:
    """One rank's part of a stream, t tokens of it; all of them where no other rank shares it."""

    input_ids: Tensor
    """(1, t) int64"""
    position_ids: Tensor
    """(1, t) int64, of each token in its whole document"""
    labels: Tensor
    """(1, t) int64, shifted before the stream was cut"""
    cu_seqlens: Tensor
    """(documents + 1,) int32, of the whole stream, padding included"""
    num_tokens: int
    """Real ones of these t."""
    num_label_tokens: int
    """Of these t."""
    sharding: StreamSharding | None
    """None: nobody shares it."""

    def arguments(self, device: torch.device) -> dict[str, Any]:
        """What a model call takes, but for labels."""
        documents = interface.stream_arguments(self.cu_seqlens, self.sharding)  # reads lengths on the host
        documents["cu_seq_lens_q"] = documents["cu_seq_lens_k"] = self.cu_seqlens.to(
            device, non_blocking=True
        )
        return {
            "input_ids": self.input_ids.to(device, non_blocking=True),
            "position_ids": self.position_ids.to(device, non_blocking=True),
            **documents,
        }


def shard_stream(stream: TokenStream, layout: Layout) -> StreamShard:
    """Cut this rank's slice out of a stream.

    The stream is padded to a multiple of the sequence group with documents of padding, without labels. Labels
    were shifted and positions counted in the whole stream, so that cutting changes neither.

    Args:
        stream: the same on every rank with the same `dp_rank`.
        layout: this rank's place.
    """
    if layout.sequence_size == 1:
        return StreamShard(
            stream.input_ids,
            stream.position_ids,
            stream.labels,
            stream.cu_seqlens,
            stream.num_tokens,
            stream.num_label_tokens,
            None,
        )
    lengths = stream.cu_seqlens.diff().tolist()
    placement = place(lengths, layout.cp_size, layout.sp_size)
    sharding = StreamSharding(
        placement=placement,
        cp_rank=layout.cp_rank,
        sp_size=layout.sp_size,
        cp_group=layout.cp_group if layout.cp_size > 1 else None,
        sp_group=layout.sp_group if layout.sp_size > 1 else None,
    )
    index = torch.cat([torch.arange(start, stop) for start, stop in placement.ranges(layout.cp_rank)])
    index = index.chunk(layout.sp_size)[layout.sp_rank]
    padding = torch.cat([torch.arange(length) for length in (0, *placement.lengths[len(lengths) :])])
    # Copies of a token that is there: the embedding of another may be all zeros, whose gradient can be NaN.
    copies, unlabelled = stream.input_ids[0, :1].expand_as(padding), torch.full_like(padding, IGNORE_INDEX)
    labels = _pick(stream.labels, unlabelled, index)
    return StreamShard(
        input_ids=_pick(stream.input_ids, copies, index),
        position_ids=_pick(stream.position_ids, padding, index),
        labels=labels,
        cu_seqlens=torch.tensor([0, *placement.lengths]).cumsum(0).int(),
        num_tokens=int((index < stream.num_tokens).sum()),
        num_label_tokens=int((labels != IGNORE_INDEX).sum()),
        sharding=sharding,
    )


def _pick(values: Tensor, padding: Tensor, index: Tensor) -> Tensor:
    """`index` of (1, T) values followed by padding."""
    return torch.cat([values[0], padding])[index][None]


# The model

_ATTENTION_TYPES = frozenset(("full_attention", "sliding_attention"))
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


def attention_dropout(config: Any) -> float:
    """The rate that a text model's config has, under whichever name."""
    return next((rate for rate in (getattr(config, name, 0) for name in _DROPOUTS) if rate), 0.0)


def check_sequence(config: Any, layout: Layout) -> None:
    """Refuse what sequence parallelism can't compute right.

    Args:
        config: the model's.
        layout: the sizes.

    Raises:
        ConfigError: names the size or the model, and what works.
    """
    if layout.sequence_size == 1:
        return
    config = config.get_text_config()
    sizes = " and ".join(f"{axis}_size" for axis in ("cp", "sp") if getattr(layout, f"{axis}_size") > 1)
    reason = _unknown_layers(config)
    if reason is not None:
        raise ConfigError(
            f"{sizes}: {config.model_type} {reason}, so ranks can't share its streams; leave {sizes} at 1"
        )
    num_heads = _fewest_heads(config)
    if layout.sp_size > num_heads:
        raise ConfigError(
            f"sp_size: {layout.sp_size} ranks share the model's {num_heads} attention heads, so that some would have "
            f"none; use sp_size {num_heads} or less, and cp_size for more ranks"
        )
    dropout = attention_dropout(config)
    if layout.cp_size > 1 and dropout:
        raise ConfigError(
            f"cp_size: {layout.cp_size} with the model's attention dropout of {dropout}; ring attention has no "
            "dropout: set it to 0 in the model's config.json, or use sp_size"
        )


def _unknown_layers(config: Any) -> str | None:
    """Why the layers of a model aren't attention that hfpar computes; None: they are."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = ", ".join(sorted({str(kind) for kind in kinds} - _ATTENTION_TYPES))
    if others:
        return f"has layers of type {others}, and hfpar knows {' and '.join(sorted(_ATTENTION_TYPES))}"
    return None if _fewest_heads(config) else "has no attention heads"


def _fewest_heads(config: Any) -> int:
    """Query heads of a layer, of the one with the fewest where they differ."""
    try:
        heads = getattr(config, "num_attention_heads", 0)
    except RuntimeError:  # Transformers': ask layer by layer
        heads = [layer.num_attention_heads for layer in config.per_layer_config.values()]
    return min(heads, default=0) if isinstance(heads, (list, tuple)) else heads


@dataclass
class Patch:
    """What `apply` has changed."""

    changes: list[str]
    """A line each; none where no rank shares a stream and the attention was hfpar's before."""
    _handles: list[RemovableHandle] = field(default_factory=list, repr=False)
    _restore: list[tuple[Any, str]] = field(default_factory=list, repr=False)
    _copied_configs: list[tuple[Any, str]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put everything back."""
        for handle in self._handles:
            handle.remove()
        for model, attn_implementation in self._restore:
            model.set_attn_implementation(attn_implementation)
            del model._hfpar_sequence
        for config, attn_implementation in self._copied_configs:
            config._attn_implementation = attn_implementation
        self._handles.clear()
        self._restore.clear()
        self._copied_configs.clear()
        self.changes.clear()


def apply(model: nn.Module, layout: Layout) -> Patch:
    """Let every attention layer of a model see the whole stream of which a call has a slice.

    Calls without a slice, as generation makes them, stay what they were.

    Args:
        model: a causal language model of Transformers, or a PEFT model around one, before an engine wraps it.
        layout: the sizes.

    Returns:
        What was changed, and how to undo it.

    Raises:
        ConfigError: a model that sequence parallelism can't compute right, or that has been patched already.
    """
    causal_lm = unwrap_peft(model)
    name = type(causal_lm).__name__
    if not hasattr(causal_lm, "set_attn_implementation"):
        raise ConfigError(
            f"{name} isn't a Transformers model that takes another attention; hfpar can't patch it"
        )
    if getattr(causal_lm, "_hfpar_sequence", False):
        raise ConfigError(f"{name} is patched for sequence parallelism already; undo that first")
    if getattr(causal_lm.config, "output_router_logits", False):
        raise ConfigError(
            "output_router_logits: true adds a router loss that isn't supported; set it to false"
        )
    for adapter in getattr(model, "peft_config", {}).values():
        if adapter.is_prompt_learning:
            raise ConfigError(
                f"{adapter.peft_type.value} adds tokens that belong to no document; hfpar can't train it: use LoRA"
            )
    check_sequence(causal_lm.config, layout)
    changes, handles, copied = [], [], []
    before = causal_lm.config._attn_implementation
    if not interface.is_own(before):
        # Also for a rank that shares with nobody: it is given packed documents, too.
        reason = _unknown_layers(causal_lm.config.get_text_config())
        if reason is not None:
            raise ConfigError(f"{name} {reason}; hfpar can't patch it")
        interface.register()
        causal_lm.set_attn_implementation(interface.interface_name("auto"))
        if not interface.is_own(causal_lm.config._attn_implementation):
            raise ConfigError(
                f"{name}'s attention doesn't go through Transformers' AttentionInterface; hfpar can't patch it"
            )
        changes.append(
            f"{name}: attention implementation {before} -> {causal_lm.config._attn_implementation}"
        )
        copied = _copied_configs(causal_lm, before)
        for config in copied:
            config._attn_implementation = causal_lm.config._attn_implementation
    causal_lm._hfpar_sequence = True
    if layout.sequence_size > 1:
        text_config = causal_lm.config.get_text_config()
        watch = _Watch(name, text_config.num_hidden_layers, longest_before_change(text_config))
        handles = [
            model.register_forward_pre_hook(watch.before, with_kwargs=True),
            model.register_forward_hook(watch.after, with_kwargs=True),
        ]
        changes.append(
            f"{type(model).__name__}: hooks that check that all {watch.num_layers} layers attend over "
            f"cp {layout.cp_size} x sp {layout.sp_size} ranks"
        )
    return Patch(changes, handles, [(causal_lm, before)], [(config, before) for config in copied])


def _copied_configs(causal_lm: nn.Module, attn_implementation: str) -> list[Any]:
    """Configs of modules of which an adapter keeps a trained copy: these don't hear of a change."""
    configs: list[Any] = [getattr(module, "config", None) for module in causal_lm.modules()]
    distinct = {id(config): config for config in configs if hasattr(config, "_attn_implementation")}
    return [config for config in distinct.values() if config._attn_implementation == attn_implementation]


def unwrap_peft(model: nn.Module) -> Any:
    """The Transformers model inside a PEFT model; the model itself otherwise."""
    get_base_model = getattr(model, "get_base_model", None)
    return get_base_model() if callable(get_base_model) else model


@dataclass
class _Watch:
    """What can go wrong in a call without anybody noticing."""

    name: str
    num_layers: int
    rope: tuple[str, int] | None
    """See `longest_before_change`."""

    def before(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """A rank would choose the rotary factors by the positions of its slice."""
        sharding = kwargs.get("stream_sharding")
        if sharding is None:
            return
        sharding.attention_calls = 0
        kind, bound = self.rope or ("", kwargs["max_length_q"])
        if kwargs["max_length_q"] > bound:
            raise ConfigError(
                f"{self.name}: a document of {kwargs['max_length_q']} tokens, but the model's {kind} computes those "
                f"above {bound} in another way, which ranks that share one can't tell from their slices; leave out "
                f"documents of more than {bound} tokens, or sp_size and cp_size"
            )

    def after(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """A layer that doesn't hand its arguments on would attend within the slice."""
        sharding = kwargs.get("stream_sharding")
        if sharding is not None and sharding.attention_calls < self.num_layers:
            raise HfparError(
                f"{self.name}: {sharding.attention_calls} of {self.num_layers} layers attended over the whole "
                "stream; the others don't use Transformers' attention interface, so that sp_size and cp_size can't "
                "be used with this model"
            )
