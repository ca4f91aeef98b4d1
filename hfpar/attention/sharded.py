"""Attention over a stream whose tokens are spread over ranks: Ulysses inside, the ring outside.

some tokens, all heads --(all-to-all)--> all tokens of a ring rank, some heads --(local kernel, or ring)-->
the same, attended --(all-to-all)--> some tokens, all heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.attention import ulysses
from hfpar.attention.blocks import choose_block_kernel
from hfpar.attention.placement import Placement, Step, ring_steps
from hfpar.attention.ring import Ring, repeat_kv_heads, ring_attention
from hfpar.attention.varlen import Documents, Kernel, Scores
from hfpar.errors import ConfigError, HfparError


@dataclass(eq=False)
class StreamSharding:
    """What attention must know of a stream that several ranks share. One object a stream and rank."""

    placement: Placement
    cp_rank: int
    sp_size: int
    cp_group: dist.ProcessGroup | None
    """None: no ring."""
    sp_group: dist.ProcessGroup | None
    """None: no exchange of heads."""
    attention_calls: int = 0
    """Layers that have computed their attention with it since it was last set to 0."""
    _steps: dict[int | None, tuple[Step, ...]] = field(default_factory=dict)

    def steps(self, sliding_window: int | None) -> tuple[Step, ...]:
        """What the ring does in a layer with this window."""
        if sliding_window not in self._steps:
            self._steps[sliding_window] = ring_steps(self.placement, self.cp_rank, sliding_window)
        return self._steps[sliding_window]

    @cached_property
    def ring(self) -> Ring:
        """This rank's place in the ring."""
        assert self.cp_group is not None
        return Ring(self.cp_group, self.cp_rank, self.placement.cp_size)


ChooseKernel = Callable[[Tensor, Tensor, Scores], Kernel]


@torch.compiler.disable
def sharded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharding: StreamSharding,
    cu_seqlens: Tensor,
    scores: Scores,
    attn_implementation: str,
    choose_local_kernel: ChooseKernel,
) -> Tensor:
    """Attention of this rank's tokens to all that they see in the whole stream.

    Args:
        query: [1, H, T/n, D], n = cp_size x sp_size.
        key: [1, Hkv, T/n, D].
        value: [1, Hkv, T/n, Dv].
        sharding: who has which tokens.
        cu_seqlens: (documents + 1,) of the whole padded stream, on the device.
        scores: with the sinks of all heads.
        attn_implementation: name of the kernel.
        choose_local_kernel: from local query, value and scores to a kernel for whole documents.

    Returns:
        [1, T/n, H, Dv].
    """
    sharding.attention_calls += 1
    expected = sharding.placement.tokens_per_rank // sharding.sp_size
    if not query.shape[2] == key.shape[2] == expected:
        raise HfparError(
            f"attention: {query.shape[2]} queries and {key.shape[2]} keys, but the slice of the stream has {expected} "
            "tokens; a call with one takes no cache and no virtual tokens"
        )
    if scores.dropout and sharding.cp_group is not None:
        raise ConfigError(
            f"cp_size: {sharding.placement.cp_size} with attention dropout of {scores.dropout}; ring attention has no "
            "dropout: set it to 0 in the model's config, or use sp_size"
        )
    dtype = query.dtype
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
    query, key, value = (states.to(dtype) for states in (query, key, value))
    if sharding.sp_group is None:
        return _attend(
            query, key, value, sharding, cu_seqlens, scores, attn_implementation, choose_local_kernel
        )

    heads = ulysses.split_heads(query.shape[1], key.shape[1], sharding.sp_size)
    sp_rank = dist.get_rank(sharding.sp_group)
    query, key, value = ulysses.gather_tokens(query, key, value, heads, sharding.sp_group)
    used = heads.kv_of_query(sp_rank)
    kv_of_query = None if used is None else torch.tensor(used, device=key.device)
    if scores.sinks is not None:
        scores = replace(scores, sinks=scores.sinks[slice(*heads.query[sp_rank])])
    output = _attend(
        query, key, value, sharding, cu_seqlens, scores, attn_implementation, choose_local_kernel, kv_of_query
    )
    return ulysses.scatter_tokens(output, heads, sharding.sp_group)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sharding: StreamSharding,
    cu_seqlens: Tensor,
    scores: Scores,
    attn_implementation: str,
    choose_local_kernel: ChooseKernel,
    kv_of_query: Tensor | None = None,
) -> Tensor:
    """[1, h, C, D] -> [1, C, h, Dv], for the C tokens of this ring rank."""
    if sharding.cp_group is not None:
        kernel = choose_block_kernel(attn_implementation, query, value, scores)
        steps = sharding.steps(scores.sliding_window)
        return ring_attention(query, key, value, steps, sharding.ring, scores, kernel, kv_of_query)
    key, value = repeat_kv_heads(key, kv_of_query), repeat_kv_heads(value, kv_of_query)
    documents = Documents(cu_seqlens, sharding.placement.lengths)
    return choose_local_kernel(query, value, scores)(query, key, value, documents, scores)
