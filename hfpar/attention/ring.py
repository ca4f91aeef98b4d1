"""Ring attention: keys and values visit the queries of other ranks, and partial results merge by log-sum-exp.

Source: Liu et al., Ring Attention, arXiv:2310.01889; zigzag halves as in Brandon et al., Striped Attention,
arXiv:2311.09431, and its successors. At distance d, each rank has the keys of the rank d places before it in the
ring. Two things differ from passing whole blocks from neighbour to neighbour:

- A rank gets just the keys that its queries see (`placement.ring_steps`), from their owner. Documents that lie on
  one rank don't travel; neither do keys behind a sliding window.
- A share of a key's gradient goes straight back to the key's owner, who adds the shares up in fp32.

Bytes that a rank sends in a layer, with n the tokens that others need of it (`placement.ring_tokens`; for one
document of T tokens three quarters of (cp - 1) * T/cp on average), of `e` bytes an element:

    forward    e * n * Hkv * (D + Dv)
    backward   e * (n + m) * Hkv * (D + Dv)     the same keys again, and gradients of the m tokens it had of others
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hfpar.attention.blocks import BlockKernel
from hfpar.attention.placement import Step
from hfpar.attention.varlen import Scores

_KEYS_TAG, _GRADIENTS_TAG = 0, 1


@dataclass(frozen=True)
class Ring:
    """A rank's place in the ring."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def after(self, distance: int) -> int:
        """The rank that many places further, or before for a negative distance."""
        return (self.rank + distance) % self.size


def ring_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    steps: Sequence[Step],
    ring: Ring,
    scores: Scores,
    kernel: BlockKernel,
    kv_of_query: Tensor | None = None,
) -> Tensor:
    """Attention of this rank's queries to all keys of their documents, wherever these are.

    Args:
        query: [1, H, C, D], the C tokens of this rank.
        key: [1, Hkv, C, D].
        value: [1, Hkv, C, Dv].
        steps: what is exchanged and computed at each distance.
        ring: this rank's place.
        scores: sinks included.
        kernel: computes one step.
        kv_of_query: [H], the key-value head of each query head; None: each has equally many, in order. Heads
            travel once, however many queries use them.

    Returns:
        [1, C, H, Dv].
    """
    arguments = (query, key, value, scores.sinks, steps, ring, scores, kernel, kv_of_query)
    output: Tensor = _RingAttention.apply(*arguments)
    return output


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        steps: Sequence[Step],
        ring: Ring,
        scores: Scores,
        kernel: BlockKernel,
        kv_of_query: Tensor | None,
    ) -> Tensor:
        _, num_heads, num_tokens, _ = query.shape
        out = query.new_zeros(1, num_heads, num_tokens, value.shape[-1], dtype=torch.float32)
        lse = query.new_full((1, num_heads, num_tokens), float("-inf"), dtype=torch.float32)
        for step, (keys, values) in zip(steps, _visits(key, value, steps, ring), strict=True):
            keys, values = repeat_kv_heads(keys, kv_of_query), repeat_kv_heads(values, kv_of_query)
            kernel.forward(query, keys, values, step.pairs, scores, out, lse)
        if sinks is not None:
            # One more key without a value: it takes its share of every row's weights.
            with_sink = torch.logaddexp(lse, sinks.float().view(1, -1, 1))
            out *= (lse - with_sink).exp().unsqueeze(-1)
            lse = with_sink
        output = query.new_empty(1, num_tokens, num_heads, value.shape[-1])
        output.copy_(out.transpose(1, 2))  # [1, H, C, Dv] -> [1, C, H, Dv]
        ctx.save_for_backward(query, key, value, sinks, output, lse)
        ctx.steps, ctx.ring, ctx.scores, ctx.kernel = steps, ring, scores, kernel
        ctx.kv_of_query = kv_of_query
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, output, lse = ctx.saved_tensors
        steps, ring = ctx.steps, ctx.ring
        output, grad_output = output.transpose(1, 2), grad_output.transpose(1, 2)  # -> [1, H, C, Dv]
        grad_query = torch.zeros_like(query, dtype=torch.float32)
        grad_key = torch.zeros_like(key, dtype=torch.float32)
        grad_value = torch.zeros_like(value, dtype=torch.float32)
        returning: _Return | None = None
        for step, (keys, values) in zip(steps, _visits(key, value, steps, ring), strict=True):
            keys, values = repeat_kv_heads(keys, ctx.kv_of_query), repeat_kv_heads(values, ctx.kv_of_query)
            shares = ctx.kernel.backward(
                grad_output, query, keys, values, output, lse, step.pairs, ctx.scores, grad_query
            )
            of_key, of_value = (_sum_repeated(share, ctx.kv_of_query, key.shape[1]) for share in shares)
            if not step.distance:
                grad_key += of_key
                grad_value += of_value
                continue
            if returning is not None:  # one at a time: all together would be as large as the whole stream
                returning.add_to(grad_key, grad_value)
            returning = _Return.start(step, of_key.to(key.dtype), of_value.to(key.dtype), ring)
        if returning is not None:
            returning.add_to(grad_key, grad_value)
        grad_sinks = None
        if sinks is not None:
            delta = (grad_output.float() * output.float()).sum(-1)  # [1, H, C]
            weight = (sinks.float().view(1, -1, 1) - lse).exp()
            grad_sinks = -(weight * delta).sum((0, 2)).to(sinks.dtype)
        gradients = (grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype))
        return *gradients, grad_sinks, None, None, None, None, None


def repeat_kv_heads(states: Tensor, kv_of_query: Tensor | None) -> Tensor:
    """[1, Hkv, C, D] -> [1, H, C, D]: each query's own copy; nothing to do where these heads group evenly."""
    return states if kv_of_query is None else states.index_select(1, kv_of_query)


def _sum_repeated(gradient: Tensor, kv_of_query: Tensor | None, num_kv_heads: int) -> Tensor:
    """The gradient of `repeat_kv_heads`: [1, H, C, D] -> [1, Hkv, C, D]."""
    if kv_of_query is None:
        return gradient
    shape = (1, num_kv_heads, *gradient.shape[2:])
    return gradient.new_zeros(shape).index_add_(1, kv_of_query, gradient)


def _visits(key: Tensor, value: Tensor, steps: Sequence[Step], ring: Ring) -> Any:
    """The keys and values of each step; those of the next are on their way while this one is computed."""
    pending = None
    for index, step in enumerate(steps):
        current = pending.wait() if pending is not None else (key, value)
        assert (step.distance == 0) == (pending is None)
        pending = _Visit.start(steps[index + 1], key, value, ring) if index + 1 < len(steps) else None
        yield current


@dataclass
class _Visit:
    """Keys and values under way to this rank."""

    received: Tensor
    key_dim: int
    works: list[dist.Work]
    sent: Tensor
    """Kept until it has been sent."""

    @classmethod
    def start(cls, step: Step, key: Tensor, value: Tensor, ring: Ring) -> _Visit:
        """Send what the rank `distance` places further needs; receive from the one as far before."""
        sent = torch.cat([_take(key, step.send), _take(value, step.send)], dim=-1)  # [1, Hkv, n, D + Dv]
        received = sent.new_empty(1, sent.shape[1], step.receive, sent.shape[3])
        works = _exchange(
            sent, ring.after(step.distance), received, ring.after(-step.distance), ring, _KEYS_TAG
        )
        return cls(received, key.shape[-1], works, sent)

    def wait(self) -> tuple[Tensor, Tensor]:
        """Key and value, [1, Hkv, m, D] and [1, Hkv, m, Dv]."""
        for work in self.works:
            work.wait()
        return self.received[..., : self.key_dim], self.received[..., self.key_dim :]


@dataclass
class _Return:
    """Shares of the gradients of this rank's own keys, under way from a rank that they visited."""

    received: Tensor
    ranges: Sequence[tuple[int, int]]
    key_dim: int
    works: list[dist.Work]
    sent: Tensor

    @classmethod
    def start(cls, step: Step, grad_key: Tensor, grad_value: Tensor, ring: Ring) -> _Return:
        """Send back what came from `distance` places before."""
        sent = torch.cat([grad_key, grad_value], dim=-1)
        num_tokens = sum(stop - start for start, stop in step.send)
        received = sent.new_empty(1, sent.shape[1], num_tokens, sent.shape[3])
        works = _exchange(
            sent, ring.after(-step.distance), received, ring.after(step.distance), ring, _GRADIENTS_TAG
        )
        return cls(received, step.send, grad_key.shape[-1], works, sent)

    def add_to(self, grad_key: Tensor, grad_value: Tensor) -> None:
        """Add the shares to the whole gradients."""
        for work in self.works:
            work.wait()
        begin = 0
        for start, stop in self.ranges:
            share = self.received[:, :, begin : begin + stop - start]
            grad_key[:, :, start:stop] += share[..., : self.key_dim]
            grad_value[:, :, start:stop] += share[..., self.key_dim :]
            begin += stop - start


def _take(states: Tensor, ranges: Sequence[tuple[int, int]]) -> Tensor:
    """The tokens of these ranges: [1, Hkv, C, D] -> [1, Hkv, n, D]."""
    if not ranges:
        return states[:, :, :0]
    return torch.cat([states[:, :, start:stop] for start, stop in ranges], dim=2)


def _exchange(
    sent: Tensor, receiver: int, received: Tensor, sender: int, ring: Ring, tag: int
) -> list[dist.Work]:
    operations = []
    if sent.numel():
        operations.append(dist.P2POp(dist.isend, sent, group=ring.group, group_peer=receiver, tag=tag))
    if received.numel():
        operations.append(dist.P2POp(dist.irecv, received, group=ring.group, group_peer=sender, tag=tag))
    return dist.batch_isend_irecv(operations) if operations else []
