"""Tensor parallelism: ranks of a tp group hold a part of each layer and compute it together.

`apply` turns a whole model, real or on the meta device, into this rank's part of it: weights become plain smaller
parameters, so that every engine and LoRA can wrap them, and hooks stand where ranks exchange. `check_tensor` refuses
what can't come out right before weights load.

One rule makes gradients right whatever a layer does inside (see `hfpar.parallel.collectives`): what enters a region
sums its gradients over ranks, what leaves it is summed, and a weight that several ranks hold whole within a region
has its gradient summed over them. Weights outside are the same everywhere and so are their gradients, unless tokens
are sharded there (`tp_sequence`): then they are summed as well.

A decoder layer of T tokens and width H sends two all-reduces of [T, H] forward, and two backward; with `tp_sequence`,
each is an all-gather and a reduce-scatter of [T, H], which move as many bytes. Backward come the gradients of weights
that ranks hold whole, once each: copies of key-value heads, halves of adapters, and with `tp_sequence` norms.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from hfpar.errors import ConfigError, first_line
from hfpar.models.cuts import Cut, cut_of, note_cut
from hfpar.models.quantized import cut_quantized, quantized_weights, weight_names
from hfpar.parallel import plan as planning
from hfpar.parallel.collectives import (
    along_last,
    enter,
    gather_features,
    gather_tokens,
    leave,
    scatter_tokens,
)
from hfpar.parallel.layout import Layout
from hfpar.parallel.plan import Heads, Plan, Region, SizeError, layers_at, plan_model
from hfpar.parallel.sequence import attention_dropout, unwrap_peft
from hfpar.parallel.vocabulary import shard_embedding, shard_head

_DROPOUT_ENDINGS = ("dropout", "dropout_prob", "_pdrop", "_jitter_noise")
_LARGEST = 64
"""Sizes up to this one are tried when saying what would work."""


def check_tensor(config: Any, layout: Layout, *, trust_remote_code: bool = False) -> None:
    """Refuse what tensor parallelism can't cut.

    Args:
        config: the model's.
        layout: the sizes.
        trust_remote_code: whether the model's own code may run.

    Raises:
        ConfigError: names the size or the model, and what works.
    """
    if layout.tp_size == 1:
        return
    planning.base_plan(config)
    dropout = attention_dropout(config.get_text_config())
    if dropout:
        raise ConfigError(
            f"tp_size: {layout.tp_size} with the model's attention dropout of {dropout}, whose draws would be the same "
            "for heads of different ranks; set it to 0 in the model's config.json, or use sp_size"
        )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # a family's own code, which may ask for numbers that aren't there
        reason = first_line(error)
        raise ConfigError(
            f"tp_size: {config.model_type} can't be laid out without its weights ({reason}); leave tp_size at 1"
        ) from error
    check_sizes(model, layout)


def check_sizes(causal_lm: Any, layout: Layout) -> Plan:
    """Plan a model, and refuse sizes that don't divide, with those that do.

    Args:
        causal_lm: a Transformers model, with its adapters if it has some; may be on the meta device.
        layout: the sizes.

    Raises:
        ConfigError: names the size, and those that work.
    """
    try:
        plan = plan_model(causal_lm, layout.tp_size)
    except SizeError as error:
        working = [str(size) for size in range(1, _LARGEST + 1) if _can_cut(causal_lm, size)]
        raise ConfigError(
            f"tp_size: {layout.tp_size} doesn't divide the model's {error}; it can be {' or '.join(working)}"
        ) from error
    fewest = min((heads.local(layout.tp_size).query for _, heads in plan.attentions), default=None)
    if fewest is not None and layout.sp_size > fewest:
        raise ConfigError(
            f"sp_size: {layout.sp_size} ranks share the {fewest} attention heads that tp_size {layout.tp_size} leaves "
            f"each of them, so that some would have none; use sp_size {fewest} or less, and cp_size for more ranks"
        )
    if layout.tp_sequence:
        _check_tokens_can_be_shared(causal_lm, plan)
    return plan


def _check_tokens_can_be_shared(causal_lm: Any, plan: Plan) -> None:
    config = causal_lm.config.get_text_config()
    for name, value in config.to_dict().items():
        if name.endswith(_DROPOUT_ENDINGS) and not name.startswith("classifier") and value:
            raise ConfigError(
                f"tp_sequence: true with the model's {name} of {value}, whose draws would be the same for tokens of "
                "different ranks; set it to 0 in the model's config.json, or leave tp_sequence out"
            )
    roots = [*(region.module for region in plan.regions), causal_lm.get_output_embeddings()]
    inside = {id(module) for root in roots for module in root.modules()}
    for name, module in causal_lm.named_modules():
        if isinstance(module, nn.Dropout) and module.p and id(module) not in inside:
            raise ConfigError(
                f"tp_sequence: true with dropout of {module.p} in {name}, whose draws would be the same for tokens of "
                "different ranks; set lora_dropout to 0, or leave tp_sequence out"
            )
    if not plan.attentions:
        raise ConfigError(
            f"tp_sequence: true, but {config.model_type} has no plan for its attention, which would see a rank's "
            "tokens alone; leave tp_sequence out"
        )


def _can_cut(causal_lm: Any, tp_size: int) -> bool:
    try:
        plan_model(causal_lm, tp_size)
    except SizeError:
        return False
    return True


def apply(model: nn.Module, layout: Layout) -> list[str]:
    """Cut a model and let tp ranks exchange. After adapters, before an engine wraps it; all ranks together.

    Args:
        model: a causal language model of Transformers, or a PEFT model around one; whole, maybe on the meta device.
        layout: the sizes.

    Returns:
        What was changed, a line each; nothing where `tp_size` is 1.

    Raises:
        ConfigError: a model, adapter or size that can't be cut, or a model that has been cut already.
    """
    if layout.tp_size == 1:
        return []
    causal_lm = unwrap_peft(model)
    name = type(causal_lm).__name__
    if getattr(causal_lm, "_hfpar_tensor", False):
        raise ConfigError(f"{name} is cut for tensor parallelism already")
    _check_adapters(model)
    plan = check_sizes(causal_lm, layout)
    causal_lm._hfpar_tensor = True
    _cut_weights(model, plan, layout.tp_rank)
    exchange = _Exchange(layout)
    for attention, heads in plan.attentions:
        _tell_heads(attention, heads, layout.tp_size)
    for norm, cut in plan.wide_norms:
        exchange.gather_around(norm, cut)
    for dropout, cut in plan.dropouts:
        _draw_whole(dropout, cut, layout.tp_rank)
    exchange.sum_gradients(causal_lm, plan)
    for region in plan.regions:
        exchange.connect(region)
    exchange.connect_vocabulary(causal_lm)
    number = f"tp {layout.tp_size}"
    how = "tokens gathered and scattered" if layout.tp_sequence else "gradients and outputs summed"
    return [
        f"{name}: {len(plan.cuts)} parameters cut for {number}",
        f"{name}: {how} around {len(plan.regions)} modules",
        f"{name}: embedding and head cut by vocabulary",
    ]


def _check_adapters(model: nn.Module) -> None:
    for adapter in getattr(model, "peft_config", {}).values():
        kind = "DoRA" if getattr(adapter, "use_dora", False) else str(adapter.peft_type.value)
        extras = [
            name for name in ("trainable_token_indices", "target_parameters") if getattr(adapter, name, None)
        ]
        if kind != "LORA" or extras:
            raise ConfigError(
                f"tp_size: hfpar can't cut {' with '.join([kind, *extras])} adapters; use plain LoRA, or leave "
                "tp_size at 1"
            )


# Weights


def _cut_weights(model: nn.Module, plan: Plan, tp_rank: int) -> None:
    """Replace each planned parameter by this rank's part; those that modules share stay shared."""
    replaced: dict[int, nn.Parameter] = {}
    kept_alive = []
    for owner, name, cut in plan.cuts:
        if cut_of(owner, name) is not None:
            continue  # of a module that hangs in two places
        if name in quantized_weights(owner):
            cut_quantized(owner, name, cut, tp_rank)
            note_cut(owner, name, cut)
            _tell_features(owner, cut)
            continue
        whole = owner._parameters[name]
        assert whole is not None
        if id(whole) not in replaced:
            kept_alive.append(whole)
            if whole.is_meta:
                part = torch.empty(cut.local_shape(whole.shape), dtype=whole.dtype, device="meta")
            else:
                part = cut.take(whole.detach(), tp_rank)
            replaced[id(whole)] = nn.Parameter(part, requires_grad=whole.requires_grad)
        owner._parameters[name] = replaced[id(whole)]
        note_cut(owner, name, cut)
        if name == "weight":
            _tell_features(owner, cut)


def _tell_features(owner: nn.Module, cut: Cut) -> None:
    if isinstance(owner, nn.Linear) and cut.dim == 0:
        owner.out_features = cut.local_size
    elif isinstance(owner, nn.Linear):
        owner.in_features = cut.local_size


def _tell_heads(attention: nn.Module, heads: Heads, tp_size: int) -> None:
    """An attention module that reads numbers of heads, its own or its config's, is told the local ones."""
    local: Any = heads.local(tp_size)
    module: Any = attention
    for names, whole, part in (
        (planning.HEAD_COUNTS, heads.query, local.query),
        (planning.KV_HEAD_COUNTS, heads.kv, local.kv),
    ):
        for name in names:
            if getattr(module, name, None) == whole:
                setattr(module, name, part)
    if isinstance(getattr(module, "num_key_value_groups", None), int):
        module.num_key_value_groups = local.query // local.kv
    if hasattr(module, "config"):
        module.config = copy.copy(module.config)
        module.config.num_attention_heads = local.query
        if getattr(module.config, "num_key_value_heads", None) is not None:
            module.config.num_key_value_heads = local.kv


def _draw_whole(dropout: nn.Module, cut: Cut, tp_rank: int) -> None:
    """Draw for the features of all ranks and take one's own: what one process draws, and not the same for each part."""

    def forward(self: nn.Dropout, states: Tensor) -> Tensor:
        if not self.training or not self.p:
            return states
        whole = nn.functional.dropout(states.new_ones(*states.shape[:-1], cut.size), self.p)
        return states * along_last(cut, states).take(whole, tp_rank)

    dropout.forward = MethodType(forward, dropout)  # type: ignore[method-assign]


# Exchanges


class _Exchange:
    """Hooks and forwards that call the collectives of one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.group = layout.tp_group
        self.num_tokens = 0
        """Of the call under way, where tokens are sharded."""

    def connect(self, region: Region) -> None:
        """A region's inputs enter it and its output leaves it."""
        enter_all = partial(self._enter_all, is_experts=region.is_experts)
        region.module.register_forward_pre_hook(enter_all, with_kwargs=True)
        region.leaves_from.register_forward_hook(self._leave)

    def connect_vocabulary(self, causal_lm: Any) -> None:
        """The embedding's rows and the head's, the loss over them included."""
        embedding = causal_lm.get_input_embeddings()
        (cut,) = {cut_of(layer, "weight") for layer in layers_at(embedding)}
        assert cut is not None
        if self.layout.tp_sequence:
            planning.decoder_of(causal_lm).register_forward_pre_hook(_needs_positions, with_kwargs=True)
            embedding.register_forward_pre_hook(self._count_tokens)
        shard_embedding(embedding, layers_at(embedding), cut, self.layout, leave=self._leave_tensor)
        head = causal_lm.get_output_embeddings()
        shard_head(head, cut, self.layout, enter=self.enter_hidden)

    def enter_hidden(self, hidden: Tensor) -> Tensor:
        """Hidden states [B, T or its share, H] into a region."""
        if not self.layout.tp_sequence:
            return enter(hidden, self.group) if hidden.requires_grad else hidden
        return gather_tokens(hidden, hidden.dim() - 2, self.num_tokens, self.group)

    def _count_tokens(self, module: nn.Module, args: Any) -> None:
        if args[0].shape[0] != 1:
            raise ConfigError(f"tp_sequence: true takes one stream a call, not {args[0].shape[0]} rows")
        self.num_tokens = args[0].shape[1]

    def _enter_all(self, module: nn.Module, args: Any, kwargs: dict[str, Any], *, is_experts: bool) -> Any:
        def enter_one(value: Any) -> Any:
            if self.layout.tp_sequence:
                return self._gather_one(value, is_experts)
            carries_gradient = isinstance(value, Tensor) and value.requires_grad
            return enter(value, self.group) if carries_gradient else value

        return tuple(map(enter_one, args)), {name: enter_one(value) for name, value in kwargs.items()}

    def _gather_one(self, value: Any, is_experts: bool) -> Any:
        """Hidden states [1, T/tp, H]; for experts also the router's choices and weights, [T/tp, k]."""
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        dim, share = value.dim() - 2, -(-self.num_tokens // self.layout.tp_size)
        is_hidden = value.dim() == 3 and value.is_floating_point()
        if not (is_hidden or is_experts) or value.shape[dim] != share:
            return value
        return gather_tokens(value, dim, self.num_tokens, self.group)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._leave_tensor(output[0]), *output[1:])
        return self._leave_tensor(output)

    def _leave_tensor(self, output: Tensor) -> Tensor:
        if not self.layout.tp_sequence:
            return leave(output, self.group)
        return scatter_tokens(output, output.dim() - 2, self.group)

    def gather_around(self, norm: nn.Module, cut: Cut) -> None:
        """A norm over all heads sees all of them, and this rank goes on with its own."""
        original, rank, group = norm.forward, self.layout.tp_rank, self.group

        def forward(self: nn.Module, states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            whole: Tensor = original(gather_features(states, cut, group), *args, **kwargs)
            return along_last(cut, whole).take(whole, rank)

        norm.forward = MethodType(forward, norm)  # type: ignore[method-assign]

    def sum_gradients(self, causal_lm: Any, plan: Plan) -> None:
        """Let each weight that several ranks hold whole have the sum of their gradients."""
        once = {(id(module), name) for module, name in plan.once}
        roots = [causal_lm] if self.layout.tp_sequence else [region.module for region in plan.regions]
        roots += [causal_lm.get_output_embeddings()]
        seen: set[int] = set()
        for module in (module for root in roots for module in root.modules()):
            if id(module) in seen:
                continue
            seen.add(id(module))
            changes: dict[str, Callable[[Tensor], Tensor]] = {}
            held = quantized_weights(module)
            for name in (name for name in weight_names(module) if name not in held):  # bytes have no gradient
                cut = cut_of(module, name)
                if (id(module), name) in once:
                    changes[name] = partial(_added_once, rank=self.layout.tp_rank, group=self.group)
                elif cut is None:
                    changes[name] = partial(enter, group=self.group)
                elif cut.copies > 1:
                    changes[name] = partial(enter, group=self.layout.copies_group(cut.copies))
            if changes:
                _change_weights(module, changes)


def _needs_positions(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """A model that counts positions itself would count a rank's share of the tokens."""
    if kwargs.get("position_ids") is None:
        raise ConfigError("tp_sequence: true takes position_ids with each call")


def _added_once(bias: Tensor, rank: int, group: dist.ProcessGroup) -> Tensor:
    """The bias on the first rank, zeros on the others."""
    return enter(bias, group) * float(rank == 0)


def _change_weights(module: nn.Module, changes: dict[str, Callable[[Tensor], Tensor]]) -> None:
    """Compute a module's forward with other values for some of its parameters, as engines have them by then."""
    original = module.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        before = {name: self._parameters[name] for name in changes if self._parameters[name] is not None}
        own: dict[str, Any] = self._parameters
        try:
            for name, parameter in before.items():
                own[name] = changes[name](parameter)  # type: ignore[arg-type]
            return original(*args, **kwargs)
        finally:
            own.update(before)

    module.forward = MethodType(forward, module)  # type: ignore[method-assign]
