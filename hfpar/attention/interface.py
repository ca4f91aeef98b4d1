"""hfpar's attention in Transformers' `AttentionInterface`, so that every model using the interface has it.

The documents of a stream reach each layer as the keyword arguments that Transformers itself uses for packed
rows (`cu_seq_lens_q`), together with their lengths as plain integers. Without them, as in generation, a call
is ordinary causal attention with Transformers' own mask.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from hfpar.attention import varlen
from hfpar.attention.reference import causal_mask, reference_attention
from hfpar.attention.sharded import StreamSharding, sharded_attention
from hfpar.attention.varlen import Documents, Kernel, Scores
from hfpar.errors import ConfigError

# None of these names may hold "flash": Transformers then takes its own flash-attention paths.
_NAMES = {
    "auto": "hfpar",
    "eager": "hfpar_eager",
    "sdpa": "hfpar_sdpa",
    "flash_attention_2": "hfpar_fa2",
    "varlen": "hfpar_varlen",
}
_KERNELS = {
    "eager": (varlen.eager, None),
    "sdpa": (varlen.sdpa, varlen.sdpa_refusal),
    "flash_attention_2": (varlen.flash_attention_2, varlen.flash_refusal),
    "varlen": (varlen.torch_varlen, varlen.varlen_refusal),
}


def register() -> None:
    """Offer hfpar's attention to Transformers; calling it again changes nothing."""
    for attn_implementation, name in _NAMES.items():
        AttentionInterface.register(name, partial(attention_forward, attn_implementation=attn_implementation))
        AttentionMaskInterface.register(name, attention_mask)


def interface_name(attn_implementation: str) -> str:
    """The name under which Transformers finds `attn_implementation` (`auto`, `sdpa`, ...) of hfpar."""
    return _NAMES[attn_implementation]


def is_own(attn_implementation: str | None) -> bool:
    """Whether a name is one of hfpar's."""
    return attn_implementation in _NAMES.values()


def stream_arguments(cu_seqlens: Tensor, sharding: StreamSharding | None = None) -> dict[str, Any]:
    """The keyword arguments of a model call that tell each attention layer the documents of the stream.

    Args:
        cu_seqlens: (documents + 1,), of the whole stream.
        sharding: which of its tokens the call has, where ranks share the stream.
    """
    lengths = tuple((cu_seqlens[1:] - cu_seqlens[:-1]).tolist())
    longest = max(lengths)
    return {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": longest,
        "max_length_k": longest,
        "document_lengths": lengths,
        "stream_sharding": sharding,
    }


def attention_mask(*args: Any, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """The mask of a padded call (Transformers' own, 4-D boolean); none at all for a stream."""
    if attention_mask is None:
        return None
    return sdpa_mask(*args, attention_mask=attention_mask, **kwargs)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    document_lengths: tuple[int, ...] | None = None,
    cu_seq_lens_q: Tensor | None = None,
    stream_sharding: StreamSharding | None = None,
    *,
    attn_implementation: str = "auto",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that a Transformers attention layer calls.

    Args:
        module: the attention layer.
        query: [B, H, S, D], after the rotary embedding.
        key: [B, Hkv, S, D].
        value: [B, Hkv, S, Dv].
        attention_mask: None for a stream.
        scaling: factor on the scores; None: 1 / sqrt(D).
        dropout: probability, 0 in evaluation.
        sliding_window: number of tokens a query sees, itself included.
        softcap: score cap, Gemma 2's.
        s_aux: [H], attention sinks, GPT-OSS's.
        document_lengths: of a stream, whose batch size is 1.
        cu_seq_lens_q: the same on the device.
        stream_sharding: where ranks share the stream: S are this rank's tokens of it.
        attn_implementation: the kernel's name; `auto` takes the fastest that can.
        **kwargs: what other kernels read.

    Returns:
        The output, [B, S, H, Dv], and no attention weights.
    """
    if kwargs.get("position_bias") is not None:
        raise ConfigError(
            f"{type(module).__name__} uses a position bias, which hfpar's attention doesn't have"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = Scores(scaling, sliding_window, softcap, s_aux, dropout)
    if stream_sharding is not None and cu_seq_lens_q is not None:
        choose = partial(_choose_kernel, attn_implementation)
        options = (stream_sharding, cu_seq_lens_q, scores, attn_implementation, choose)
        return sharded_attention(query, key, value, *options), None
    if document_lengths is not None and cu_seq_lens_q is not None:
        kernel = _choose_kernel(attn_implementation, query, value, scores)
        return kernel(query, key, value, Documents(cu_seq_lens_q, document_lengths), scores), None

    if attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True):
        attention_mask = causal_mask(query.shape[2], key.shape[2], sliding_window, query.device)
    output = reference_attention(
        query, key, value, scaling=scaling, mask=attention_mask, softcap=softcap, sinks=s_aux, dropout=dropout
    )
    return output.transpose(1, 2).contiguous(), None  # [B, H, S, D] -> [B, S, H, D]


def _choose_kernel(attn_implementation: str, query: Tensor, value: Tensor, scores: Scores) -> Kernel:
    if attn_implementation == "auto":
        return varlen.best_kernel(query, value, scores)
    kernel, refusal = _KERNELS[attn_implementation]
    reason = refusal(query, value, scores) if refusal else None
    if reason:
        raise ConfigError(f"attn_implementation: {attn_implementation} can't compute {reason}; use auto")
    return kernel
