"""The head and the cross-entropy, in chunks of label tokens: the logits of a stream never exist at once.

`install(model)` makes the model's `forward(..., labels=...)` return the summed negative log-likelihood of the
label tokens. The head stays a module that is called once, because engines hang their gathering of sharded
weights on module calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfpar.errors import ConfigError
from hfpar.parallel.sequence import unwrap_peft
from hfpar.parallel.vocabulary import VocabularyShard, sharded_cross_entropy, softmax_parts, vocabulary_of

IGNORE_INDEX = -100

CHUNK_ELEMENTS = 1 << 24
"""Logits computed at once (tokens x vocabulary): 64 MiB in fp32, whatever the vocabulary."""


@dataclass(frozen=True)
class LogitTransform:
    """What some families do to the logits after the head."""

    scale: float = 1.0
    """Cohere's `logit_scale`, or 1 / Granite's `logits_scaling`."""
    softcap: float | None = None
    """Gemma's `final_logit_softcapping`."""

    @classmethod
    def of(cls, config: Any) -> LogitTransform:
        """Read from a model's (text) config."""
        scale = 1.0
        if getattr(config, "logits_scaling", None):
            scale = 1.0 / config.logits_scaling
        elif getattr(config, "logit_scale", None):
            scale = config.logit_scale
        return cls(scale, getattr(config, "final_logit_softcapping", None))


def install(model: nn.Module) -> list[str]:
    """Make `model(..., labels=...)` return the summed loss of its labels, which are already shifted.

    Args:
        model: a causal language model, or a PEFT model around one.

    Returns:
        What was changed, a line each.

    Raises:
        ConfigError: a model without a decoder and a head to put between them.
    """
    causal_lm = unwrap_peft(model)
    decoder, head = decoder_and_head(causal_lm)
    transform = LogitTransform.of(causal_lm.config.get_text_config())
    _patch_head(head, transform)
    _patch_forward(causal_lm, decoder, head)
    return [
        f"{type(causal_lm).__name__}.forward: with labels, returns the summed loss of the label tokens",
        f"{type(head).__name__} (head): with labels, computes logits and loss in chunks",
    ]


def decoder_and_head(causal_lm: Any) -> tuple[Any, Any]:
    """The two parts of a causal language model.

    Raises:
        ConfigError: a model that isn't made of these.
    """
    head = causal_lm.get_output_embeddings() if hasattr(causal_lm, "get_output_embeddings") else None
    named = getattr(causal_lm, getattr(causal_lm, "base_model_prefix", "") or "model", None)
    decoder = named if named is not None else getattr(causal_lm, "model", None)
    if head is None or decoder is None or decoder is causal_lm:
        raise ConfigError(f"model_name_or_path: {type(causal_lm).__name__} has no decoder with a head on top")
    return decoder, head


def _patch_forward(causal_lm: Any, decoder: nn.Module, head: nn.Module) -> None:
    original = causal_lm.forward

    def forward(self: Any, *args: Any, labels: Tensor | None = None, **kwargs: Any) -> Any:
        if labels is None:
            return original(*args, **kwargs)
        kwargs.setdefault("use_cache", False)
        kwargs.pop("return_dict", None)
        hidden = decoder(*args, **kwargs).last_hidden_state  # [B, T, H]
        return head(hidden, labels=labels)

    causal_lm.forward = MethodType(forward, causal_lm)


def _patch_head(head: nn.Module, transform: LogitTransform) -> None:
    original = head.forward
    plain = type(head) is nn.Linear
    shard = vocabulary_of(head)

    def forward(
        self: nn.Module, hidden: Tensor, *args: Any, labels: Tensor | None = None, **kwargs: Any
    ) -> Tensor:
        if labels is None:
            result: Tensor = original(hidden, *args, **kwargs)
            return result
        if shard is not None and shard.tokens_sharded:
            hidden = shard.enter(hidden)
        with_label = labels.reshape(-1) != IGNORE_INDEX
        hidden = hidden.reshape(-1, hidden.shape[-1])[with_label]  # [B, T, H] -> [N, H]
        if shard is not None and not shard.tokens_sharded:
            hidden = shard.enter(hidden)
        targets = labels.reshape(-1)[with_label]
        if plain:
            options: Any = (targets, transform, CHUNK_ELEMENTS, shard)
            return head_cross_entropy(hidden, self.weight, self.bias, *options)  # type: ignore[arg-type]
        return module_cross_entropy(original, hidden, targets, transform, CHUNK_ELEMENTS, shard)

    head.forward = MethodType(forward, head)  # type: ignore[method-assign]


def head_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    transform: LogitTransform = LogitTransform(),
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Summed cross-entropy of `hidden @ weight.T + bias`, with gradients computed chunk by chunk in the forward.

    Three products of size tokens x vocabulary x hidden in all, as many as an ordinary head and its backward,
    and one chunk of logits alive at a time.

    Args:
        hidden: [N, H].
        weight: [V, H].
        bias: [V] or None.
        targets: [N], in [0, V).
        transform: what the family does to the logits.
        chunk_elements: logits computed at once.
        shard: the words whose rows of the head this rank has; None: all.

    Returns:
        The sum over N, fp32, a scalar. With N = 0 it is zero with zero gradients.
    """
    dtype = hidden.dtype
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
    loss: Tensor = _HeadCrossEntropy.apply(
        hidden, weight, bias, targets, transform, chunk_elements, shard, dtype, torch.is_grad_enabled()
    )
    return loss


class _HeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        transform: LogitTransform,
        chunk_elements: int,
        shard: VocabularyShard | None,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        # In here gradients are off anyway, and under no_grad a weight still says that it needs one.
        need_hidden, need_weight, need_bias = (grad_enabled and need for need in ctx.needs_input_grad[:3])
        needs_gradient = need_hidden or need_weight or need_bias
        chunk = max(1, chunk_elements // weight.shape[0])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight: Tensor | None = None  # made by the first chunk: zeros to add to are a pass over [V, H]
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias and bias is not None else None
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            head_weight = weight.to(dtype)
            for start in range(0, hidden.shape[0], chunk):
                rows = slice(start, start + chunk)
                chunk_hidden = hidden[rows].to(dtype)
                logits = (chunk_hidden @ head_weight.T).float()
                if bias is not None:
                    logits += bias.float()
                chunk_loss, grad_logits = _cross_entropy_in_place(
                    logits, targets[rows], transform, needs_gradient, shard
                )
                loss += chunk_loss
                if grad_logits is None:
                    continue
                if grad_bias is not None:
                    grad_bias += grad_logits.sum(0)
                grad_logits = grad_logits.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[rows] = grad_logits @ head_weight
                if need_weight:
                    grad_weight = _add_product(grad_weight, grad_logits, chunk_hidden)
            if need_weight and grad_weight is None:
                grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradients = [
            None if gradient is None else gradient.mul_(grad_output).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*gradients, None, None, None, None, None, None)


def _add_product(total: Tensor | None, grad_logits: Tensor, hidden: Tensor) -> Tensor:
    """total[V, H] (None: zero) + grad_logits[n, V].T @ hidden[n, H], in fp32 and in place where it can be."""
    if total is None:
        return (grad_logits.T @ hidden).float()
    if hidden.dtype == total.dtype:
        return total.addmm_(grad_logits.T, hidden)
    return total.add_(grad_logits.T @ hidden)


def _cross_entropy_in_place(
    logits: Tensor,
    targets: Tensor,
    transform: LogitTransform,
    needs_gradient: bool,
    shard: VocabularyShard | None,
) -> tuple[Tensor, Tensor | None]:
    """The summed loss of one chunk [n, V], and its gradient with respect to the raw logits, reusing their memory."""
    slope = None
    if transform.scale != 1.0:
        logits *= transform.scale
    if transform.softcap is not None:
        tanh = torch.tanh(logits / transform.softcap)
        slope = 1 - tanh * tanh if needs_gradient else None
        logits = tanh * transform.softcap
    if shard is None:
        target_logits = logits.gather(1, targets[:, None])[:, 0]
        maximum = logits.amax(dim=1, keepdim=True)
        logits.sub_(maximum).exp_()
        total = logits.sum(dim=1, keepdim=True)
        loss = ((total.log() + maximum)[:, 0] - target_logits).sum()
        targets_here = torch.arange(len(targets), device=targets.device), targets
    else:
        logits[:, shard.size :] = -torch.inf
        loss, logits, total, targets_here = softmax_parts(logits, targets, shard)
    if not needs_gradient:
        return loss, None
    logits.div_(total)
    logits[targets_here] -= 1.0
    if slope is not None:
        logits *= slope
    if transform.scale != 1.0:
        logits *= transform.scale
    return loss, logits


def module_cross_entropy(
    head: Callable[..., Tensor],
    hidden: Tensor,
    targets: Tensor,
    transform: LogitTransform = LogitTransform(),
    chunk_elements: int = CHUNK_ELEMENTS,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """The same sum for a head that isn't a plain linear layer (LoRA on it, quantised): chunks are recomputed.

    Args:
        head: [n, H] -> [n, V].
        hidden: [N, H].
        targets: [N].
        transform: what the family does to the logits.
        chunk_elements: logits computed at once.
        shard: the words whose rows of the head this rank has; None: all.
    """
    if shard is not None:
        head = partial(head, sharded=True)

    def chunk_loss(chunk_hidden: Tensor, chunk_targets: Tensor) -> Tensor:
        logits = head(chunk_hidden).float() * transform.scale
        if transform.softcap is not None:
            logits = torch.tanh(logits / transform.softcap) * transform.softcap
        if shard is not None:
            is_padding = torch.arange(logits.shape[1], device=logits.device) >= shard.size
            return sharded_cross_entropy(logits.masked_fill(is_padding, -torch.inf), chunk_targets, shard)
        return nn.functional.cross_entropy(logits, chunk_targets, reduction="sum")

    probe = head(hidden[:1])
    loss = probe.float().sum() * 0.0  # a stream without labels still reaches every weight of the head
    chunk = max(1, chunk_elements // probe.shape[-1])
    for start in range(0, hidden.shape[0], chunk):
        rows = slice(start, start + chunk)
        loss = loss + checkpoint(chunk_loss, hidden[rows], targets[rows], use_reentrant=False)
    return loss
