"""Attention in pieces against attention of the whole document."""

import itertools
import random

import pytest
import torch

from hfpar.attention.blocks import EAGER, SDPA, choose_block_kernel
from hfpar.attention.placement import Pair
from hfpar.attention.reference import causal_mask, reference_attention
from hfpar.attention.varlen import Scores
from hfpar.errors import ConfigError

TOLERANCE = 1e-5


def _tensors(num_tokens, heads=4, kv_heads=2, head_dim=8, value_dim=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(1, h, num_tokens, d, generator=generator).to(dtype) for h, d in shapes]


def _whole(query, key, value, grad_out, scores, sinks=None):
    """Output and gradients of plain attention of one document."""
    leaves = [states.float().detach().clone().requires_grad_() for states in (query, key, value)]
    sinks = None if sinks is None else sinks.clone().requires_grad_()
    mask = causal_mask(query.shape[2], key.shape[2], scores.sliding_window, query.device)
    out = reference_attention(*leaves, scaling=scores.scaling, mask=mask, softcap=scores.softcap, sinks=sinks)
    leaves = leaves if sinks is None else [*leaves, sinks]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad_out.float())]


def _cut(num_tokens, num_pieces, rng):
    """Random consecutive pieces, (start, stop)."""
    bounds = sorted(rng.sample(range(1, num_tokens), num_pieces - 1))
    return list(itertools.pairwise([0, *bounds, num_tokens]))


def _pairs(query_pieces, key_pieces, window):
    """Every query piece against every key piece, less what sees nothing or isn't seen.

    Both lie in their tensors in the given order; a piece is named by its place in the document.
    """
    pairs = []
    query_begin = 0
    for query_start, query_stop in query_pieces:
        key_begin = 0
        for key_start, key_stop in key_pieces:
            query = torch.arange(query_start, query_stop)[:, None]
            key = torch.arange(key_start, key_stop)[None]
            seen = (key <= query) & (key > query - (window or 10**9))
            rows, columns = seen.any(1).nonzero().flatten().tolist(), seen.any(0).nonzero().flatten().tolist()
            if rows:
                offset = query_start + rows[0] - key_start - columns[0]
                pairs.append(
                    Pair(
                        query_begin + rows[0],
                        query_begin + rows[-1] + 1,
                        key_begin + columns[0],
                        key_begin + columns[-1] + 1,
                        offset,
                    )
                )
            key_begin += key_stop - key_start
        query_begin += query_stop - query_start
    return pairs


def _index(pieces):
    return torch.cat([torch.arange(start, stop) for start, stop in pieces])


def _in_pieces(kernel, tensors, query_pieces, key_sets, scores, sinks=None):
    """Output, lse and gradients in the document's own order, computed one set of keys after another."""
    query, key, value, grad_out = tensors
    order = _index(query_pieces)
    local_query, local_grad = query[:, :, order], grad_out[:, :, order]
    out = torch.zeros(local_grad.shape)
    lse = torch.full(local_grad.shape[:3], float("-inf"))
    sets = [(_index(pieces), _pairs(query_pieces, pieces, scores.sliding_window)) for pieces in key_sets]
    for index, pairs in sets:
        kernel.forward(local_query, key[:, :, index], value[:, :, index], pairs, scores, out, lse)
    grad_sinks = None
    if sinks is not None:
        total = torch.logaddexp(lse, sinks.view(1, -1, 1))
        out *= (lse - total).exp().unsqueeze(-1)
        lse = total
        delta = (local_grad * out).sum(-1)
        grad_sinks = -((sinks.view(1, -1, 1) - lse).exp() * delta).sum((0, 2))
    grad_query = torch.zeros(local_query.shape)
    grad_key, grad_value = torch.zeros(key.shape), torch.zeros(value.shape)
    for index, pairs in sets:
        shares = kernel.backward(
            local_grad, local_query, key[:, :, index], value[:, :, index], out, lse, pairs, scores, grad_query
        )
        grad_key[:, :, index] += shares[0]
        grad_value[:, :, index] += shares[1]
    back = torch.argsort(order)
    gradients = [grad_query[:, :, back], grad_key, grad_value]
    return [out[:, :, back], *gradients, *([] if sinks is None else [grad_sinks])], lse[:, :, back]


def _assert_close(actual, expected, tolerance=TOLERANCE):
    for name, a, b in zip(("out", "query", "key", "value", "sinks"), actual, expected, strict=False):
        assert not a.isnan().any(), name
        assert (a - b).abs().max() <= tolerance * max(1.0, float(b.abs().max())), name
    assert len(actual) == len(expected)


CASES = {
    "plain": Scores(0.3),
    "window": Scores(0.3, sliding_window=9),
    "window of one": Scores(0.3, sliding_window=1),
    "window of two": Scores(0.3, sliding_window=2),
    "window longer than the document": Scores(0.3, sliding_window=500),
    "window of all but one": Scores(0.3, sliding_window=149),
    "softcap": Scores(0.3, softcap=1.5),
    "softcap and window": Scores(0.3, sliding_window=40, softcap=1.5),
}


def _kernels(scores):
    return [EAGER] if scores.softcap is not None else [EAGER, SDPA]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(6))
def test_sets_of_keys_add_up_to_the_whole_document(case, seed):
    rng = random.Random(seed)
    scores = CASES[case]
    tensors = _tensors(150)
    query_pieces = _cut(150, rng.randint(1, 7), rng)
    rng.shuffle(query_pieces)
    key_pieces = _cut(150, rng.randint(2, 9), rng)
    rng.shuffle(key_pieces)
    middle = rng.randint(1, len(key_pieces) - 1)
    expected = _whole(*tensors, scores)
    for kernel in _kernels(scores):
        key_sets = [key_pieces[:middle], key_pieces[middle:]]
        actual, lse = _in_pieces(kernel, tensors, query_pieces, key_sets, scores)
        _assert_close(actual, expected)
        other_way, other_lse = _in_pieces(kernel, tensors, query_pieces, key_sets[::-1], scores)
        _assert_close(other_way, expected)
        at_once, lse_at_once = _in_pieces(kernel, tensors, [(0, 150)], [[(0, 150)]], scores)
        _assert_close(at_once, expected)
        _assert_close([lse, other_lse], [lse_at_once, lse_at_once])


@pytest.mark.parametrize("kernel", [EAGER, SDPA])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1), (1, 1)])
def test_grouped_queries(kernel, heads, kv_heads):
    tensors = _tensors(60, heads, kv_heads)
    scores = Scores(0.3, sliding_window=25)
    actual, _ = _in_pieces(kernel, tensors, [(30, 60), (0, 30)], [[(40, 60), (0, 17)], [(17, 40)]], scores)
    _assert_close(actual, _whole(*tensors, scores))


def test_values_of_another_head_size():
    tensors = _tensors(60, value_dim=5)
    actual, _ = _in_pieces(EAGER, tensors, [(30, 60), (0, 30)], [[(0, 45)], [(45, 60)]], Scores(0.3))
    _assert_close(actual, _whole(*tensors, Scores(0.3)))


@pytest.mark.parametrize("kernel", [EAGER, SDPA])
@pytest.mark.parametrize("window", [None, 13])
def test_sinks_that_the_caller_merges(kernel, window):
    tensors = _tensors(60)
    scores = Scores(0.3, sliding_window=window)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    actual, _ = _in_pieces(kernel, tensors, [(30, 60), (0, 30)], [[(0, 45)], [(45, 60)]], scores, sinks)
    _assert_close(actual, _whole(*tensors, scores, sinks))


@pytest.mark.parametrize("kernel", [EAGER, SDPA])
def test_bfloat16_accumulates_in_float32(kernel):
    tensors = _tensors(150, dtype=torch.bfloat16)
    for scores in (Scores(0.3), Scores(0.3, sliding_window=40)):
        pieces = [(60, 110), (0, 60), (110, 150)]
        actual, lse = _in_pieces(kernel, tensors, pieces, [[(0, 30), (30, 60)], [(60, 150)]], scores)
        assert {result.dtype for result in [*actual, lse]} == {torch.float32}
        _assert_close(actual, _whole(*tensors, scores), tolerance=2e-2)


@pytest.mark.parametrize("kernel", [EAGER, SDPA])
def test_keys_and_values_may_share_a_buffer(kernel):
    query, key, value, grad_out = _tensors(60)
    both = torch.cat([key, value], dim=-1)
    strided = [query.transpose(1, 2).contiguous().transpose(1, 2), both[..., :8], both[..., 8:], grad_out]
    scores = Scores(0.3, sliding_window=20)
    actual, _ = _in_pieces(kernel, strided, [(0, 60)], [[(0, 60)]], scores)
    _assert_close(actual, _whole(query, key, value, grad_out, scores))


@pytest.mark.parametrize("kernel", [EAGER, SDPA])
def test_nothing_to_do(kernel):
    query, key, value, grad_out = _tensors(5)
    out, lse = torch.zeros(1, 4, 5, 8), torch.full((1, 4, 5), float("-inf"))
    grad_query = torch.zeros(1, 4, 5, 8)
    for keys in (5, 0):
        key, value = key[:, :, :keys], value[:, :, :keys]
        kernel.forward(query, key, value, (), Scores(1.0), out, lse)
        grads = kernel.backward(grad_out, query, key, value, out, lse, (), Scores(1.0), grad_query)
        assert [grad.shape[2] for grad in grads] == [keys, keys]
        assert not any(states.any() for states in (out, grad_query, *grads))
    assert lse.isneginf().all()


def test_choice():
    query, _, value, _ = _tensors(4)
    _, _, narrow, _ = _tensors(4, value_dim=5)
    sinks = torch.zeros(4)
    assert choose_block_kernel("auto", query, value, Scores(1.0, sinks=sinks)) is SDPA
    assert choose_block_kernel("sdpa", query, value, Scores(1.0, sinks=sinks)) is SDPA
    assert choose_block_kernel("eager", query, value, Scores(1.0)) is EAGER
    assert choose_block_kernel("auto", query, narrow, Scores(1.0)) is EAGER
    assert choose_block_kernel("auto", query, value, Scores(1.0, softcap=2.0)) is EAGER
    with pytest.raises(ConfigError, match="sdpa can't compute head sizes 8 and 5 in a ring; use auto"):
        choose_block_kernel("sdpa", query, narrow, Scores(1.0))
    with pytest.raises(ConfigError, match="soft-capping"):
        choose_block_kernel("sdpa", query, value, Scores(1.0, softcap=2.0))
