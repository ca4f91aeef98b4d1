"""Attention in pieces against attention of the whole document."""

import itertools
import random
import sys
import types

import pytest
import torch

from hfpar.attention import blocks, segments, tiles, varlen
from hfpar.attention.blocks import EAGER, FLASH_ATTENTION_2, SDPA, VARLEN, choose_block_kernel
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


def _segments_of(query, key, value, plan):
    """Rows of queries and keys of each segment, and what is hidden in it, as flash-attn documents it."""
    left, right = plan.window
    starts_q, starts_k = plan.cu_seqlens_q.tolist(), plan.cu_seqlens_k.tolist()
    assert (starts_q[-1], starts_k[-1]) == (query.shape[0], key.shape[0])
    for (q0, q1), (k0, k1) in zip(itertools.pairwise(starts_q), itertools.pairwise(starts_k), strict=True):
        assert 0 < q1 - q0 <= plan.max_q and 0 < k1 - k0 <= plan.max_k
        place = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        column = torch.arange(k1 - k0)[None]
        seen = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool)
        if left >= 0:
            seen &= column >= place - left
        if right >= 0:
            seen &= column <= place + right
        assert seen.any(1).all()
        yield slice(q0, q1), slice(k0, k1), ~seen


def _capped(query, key, hidden, scores):
    """Scores [H, n, m] of [n, H, D] and [m, Hkv, D]."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    logits = torch.einsum("nhd,mhd->hnm", query.float(), key.float()) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    return logits.masked_fill(hidden, float("-inf"))


def _fake_forward(query, key, value, plan, scores):
    """A varlen function in flash-attn's terms."""
    assert query.dtype == key.dtype == value.dtype
    out, lse = torch.empty_like(query), torch.empty(query.shape[1], query.shape[0])
    for rows, keys, hidden in _segments_of(query, key, value, plan):
        logits = _capped(query[rows], key[keys], hidden, scores)
        lse[:, rows] = logits.logsumexp(-1)
        values = value[keys].repeat_interleave(query.shape[1] // key.shape[1], 1).float()
        out[rows] = torch.einsum("hnm,mhd->nhd", logits.softmax(-1), values).to(out.dtype)
    return out, lse


def _fake_backward(grad_out, query, key, value, out, lse, plan, scores):
    """Its backward, by autograd of the weights exp(score - lse) that it is given the lse of."""
    assert {states.dtype for states in (grad_out, key, value, out)} == {query.dtype}
    assert all(states.is_contiguous() for states in (grad_out, query, key, value, out, lse))
    gradients = [torch.zeros_like(states) for states in (query, key, value)]
    for rows, keys, hidden in _segments_of(query, key, value, plan):
        leaves = [query[rows].float(), key[keys].float(), value[keys].float()]
        for leaf in leaves:
            leaf.requires_grad_()
        weights = (_capped(leaves[0], leaves[1], hidden, scores) - lse[:, rows, None]).exp()
        values = leaves[2].repeat_interleave(query.shape[1] // key.shape[1], 1)
        grad_o = grad_out[rows].float()
        share = torch.einsum("hnm,mhd->nhd", weights, values)
        # What the softmax's denominator adds: every weight falls as any score rises.
        delta = (grad_o * out[rows].float()).sum(-1)
        total = (share * grad_o).sum() - torch.einsum("hnm,nh->", weights, delta)
        grads = torch.autograd.grad(total, leaves)
        gradients[0][rows] += grads[0].to(query.dtype)
        gradients[1][keys] += grads[1].to(key.dtype)
        gradients[2][keys] += grads[2].to(value.dtype)
    return gradients


FAKE = blocks.varlen_kernel("fake", lambda query, value, scores: None, _fake_forward, _fake_backward)

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
    return [EAGER, FAKE] if scores.softcap is not None else [EAGER, SDPA, FAKE]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(4))
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


@pytest.mark.parametrize("kernel", [EAGER, SDPA, FAKE], ids=lambda kernel: kernel.name)
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


@pytest.mark.parametrize("kernel", [EAGER, SDPA, FAKE], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("window", [None, 13])
def test_sinks_that_the_caller_merges(kernel, window):
    tensors = _tensors(60)
    scores = Scores(0.3, sliding_window=window)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    actual, _ = _in_pieces(kernel, tensors, [(30, 60), (0, 30)], [[(0, 45)], [(45, 60)]], scores, sinks)
    _assert_close(actual, _whole(*tensors, scores, sinks))


@pytest.mark.parametrize("kernel", [EAGER, SDPA, FAKE], ids=lambda kernel: kernel.name)
def test_bfloat16_accumulates_in_float32(kernel):
    tensors = _tensors(150, dtype=torch.bfloat16)
    for scores in (Scores(0.3), Scores(0.3, sliding_window=40)):
        pieces = [(60, 110), (0, 60), (110, 150)]
        actual, lse = _in_pieces(kernel, tensors, pieces, [[(0, 30), (30, 60)], [(60, 150)]], scores)
        assert {result.dtype for result in [*actual, lse]} == {torch.float32}
        _assert_close(actual, _whole(*tensors, scores), tolerance=2e-2)


@pytest.mark.parametrize("kernel", [EAGER, SDPA, FAKE], ids=lambda kernel: kernel.name)
def test_keys_and_values_may_share_a_buffer(kernel):
    query, key, value, grad_out = _tensors(60)
    both = torch.cat([key, value], dim=-1)
    strided = [query.transpose(1, 2).contiguous().transpose(1, 2), both[..., :8], both[..., 8:], grad_out]
    scores = Scores(0.3, sliding_window=20)
    actual, _ = _in_pieces(kernel, strided, [(0, 60)], [[(0, 60)]], scores)
    _assert_close(actual, _whole(query, key, value, grad_out, scores))


@pytest.mark.parametrize("kernel", [EAGER, SDPA, FAKE], ids=lambda kernel: kernel.name)
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


def _all_pairs(max_size):
    """Every small pair that keeps the promise that each query sees a key and each key is seen, with its window."""
    sizes = range(1, max_size + 1)
    for n, m, offset, window in itertools.product(sizes, sizes, range(2 * max_size), [None, *sizes]):
        seen = _seen(Pair(0, n, 0, m, offset), window)
        if seen.any(0).all() and seen.any(1).all():
            yield Pair(3, 3 + n, 5, 5 + m, offset), window


def _seen(pair, window):
    place = torch.arange(pair.query_stop - pair.query_start)[:, None] + pair.offset
    column = torch.arange(pair.key_stop - pair.key_start)[None]
    return (column <= place) & (column > place - (window or 10**9))


def _covered(pair, window, parts):
    """How many of the parts, each with what it hides, compute each score; and the scores that should be."""
    count = torch.zeros(pair.query_stop, pair.key_stop, dtype=torch.int64)
    for tile, seen in parts:
        assert pair.query_start <= tile.query_start < tile.query_stop <= pair.query_stop
        assert pair.key_start <= tile.key_start < tile.key_stop <= pair.key_stop
        count[tile.query_start : tile.query_stop, tile.key_start : tile.key_stop] += seen
    expected = torch.zeros_like(count)
    expected[pair.query_start :, pair.key_start :] = _seen(pair, window)
    return count, expected


def test_tiles_compute_every_score_once(monkeypatch):
    monkeypatch.setattr(tiles, "WINDOW_ROWS", (2, 3))
    monkeypatch.setattr(tiles, "MAX_SCORES", 6)
    for pair, window in _all_pairs(5):
        for cut in (tiles.sdpa_tiles(pair, window), tiles.eager_tiles(pair, window, 1)):
            parts = []
            for tile in cut:
                hidden = blocks.hidden(tile, window, torch.device("cpu"))
                parts.append((tile, 1 if hidden is None else (~hidden).long()))
            count, expected = _covered(pair, window, parts)
            assert count.equal(expected), (pair, window, cut)


def test_varlen_tiles_compute_every_score_once_in_three_calls():
    sorts = {}
    for pair, window in _all_pairs(6):
        parts = []
        for (left, right), tile in tiles.varlen_tiles(pair, window):
            n, m = tile.query_stop - tile.query_start, tile.key_stop - tile.key_start
            place, column = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
            seen = torch.ones(n, m, dtype=torch.bool)
            seen &= (column >= place - left) | (left < 0)
            seen &= (column <= place + right) | (right < 0)
            parts.append((tile, seen.long()))
            sorts.setdefault(window, set()).add((left, right))
        count, expected = _covered(pair, window, parts)
        assert count.equal(expected), (pair, window, parts)
    assert sorts.pop(None) == {(-1, -1), (-1, 0)}
    for window, found in sorts.items():
        assert found <= {(-1, -1), (window - 1, 0), (0, -1)}
    assert (0, -1) in sorts[3]


def test_the_last_key_next_to_the_first_query_needs_no_mask():
    assert tiles.sees_everything(Pair(0, 3, 0, 4, 3), None)
    assert not tiles.sees_everything(Pair(0, 3, 0, 4, 2), None)
    assert tiles.sees_everything(Pair(0, 3, 0, 4, 3), 6)
    assert not tiles.sees_everything(Pair(0, 3, 0, 4, 3), 5)


def test_masks_stay_small(monkeypatch):
    made = []

    def record(tile, window, device, hidden=blocks.hidden):
        mask = hidden(tile, window, device)
        made.append(0 if mask is None else mask.numel())
        return mask

    monkeypatch.setattr(blocks, "hidden", record)
    tensors = _tensors(2000, heads=1, kv_heads=1)
    pieces = [[(0, 2000)]]
    _in_pieces(SDPA, tensors, [(0, 700), (700, 2000)], pieces, Scores(0.3))
    assert max(made) == 0
    for window in (1, 100, 600):
        made.clear()
        _in_pieces(SDPA, tensors, [(0, 700), (700, 2000)], pieces, Scores(0.3, sliding_window=window))
        rows = min(max(window, 64), 256)
        assert 0 < max(made) <= rows * (rows + window - 1)
        # Forward and backward: the work grows with tokens x window.
        assert sum(made) <= 2 * 2000 * (rows + window - 1)


def test_eager_holds_few_scores(monkeypatch):
    made = []

    def record(query, key, tile, scores, logits=blocks._logits):
        result = logits(query, key, tile, scores)
        made.append(result.numel())
        return result

    monkeypatch.setattr(blocks, "_logits", record)
    monkeypatch.setattr(tiles, "MAX_SCORES", 4000)
    for scores in (Scores(0.3), Scores(0.3, sliding_window=20)):
        made.clear()
        tensors = _tensors(300)
        actual, _ = _in_pieces(EAGER, tensors, [(0, 300)], [[(0, 300)]], scores)
        _assert_close(actual, _whole(*tensors, scores))
        assert 2000 < max(made) <= 4000
        if scores.sliding_window:
            assert len(made) < 40  # not as many tiles as if every query saw all


def test_queries_and_keys_in_several_segments():
    """The later half sees both pieces of the keys, and these have a gap between them."""
    pairs = (Pair(0, 4, 2, 6, 0), Pair(4, 8, 8, 10, 9), Pair(4, 8, 2, 6, 12))
    (causal, everything) = segments.plan_segments(pairs, None, torch.device("cpu"))
    assert (causal.window, causal.query_index, causal.key_index) == ((-1, 0), slice(0, 4), slice(2, 6))
    assert everything.query_index.tolist() == [4, 5, 6, 7, 4, 5, 6, 7]
    assert everything.key_index.tolist() == [2, 3, 4, 5, 8, 9]
    assert everything.cu_seqlens_q.tolist() == [0, 4, 8]
    assert everything.cu_seqlens_k.tolist() == [0, 4, 6]
    assert everything.cu_seqlens_q.dtype == everything.cu_seqlens_k.dtype == torch.int32
    assert (everything.max_q, everything.max_k) == (4, 4)
    assert everything.rounds == ((slice(0, 4), slice(4, 8)), (slice(4, 8), slice(4, 8)))


def test_documents_one_after_another_are_not_gathered():
    pairs = tuple(Pair(start, start + 5, start, start + 5, 0) for start in range(0, 50, 5))
    (plan,) = segments.plan_segments(pairs, None, torch.device("cpu"))
    assert (plan.query_index, plan.key_index) == (slice(0, 50), slice(0, 50))
    assert plan.rounds == ((slice(0, 50), slice(0, 50)),)


def test_single_queries_do_not_count_as_generation():
    (plan,) = segments.plan_segments((Pair(0, 1, 0, 5, 7), Pair(1, 2, 5, 6, 3)), None, torch.device("cpu"))
    assert (plan.cu_seqlens_q.tolist(), plan.max_q, plan.max_k) == ([0, 1, 2], 2, 5)


@pytest.mark.parametrize("window", [None, 9])
def test_torch_takes_the_calls(window):
    """Shapes and arguments alone: the kernel itself is CUDA's."""
    pairs = tuple(_pairs([(0, 10), (30, 40)], [(0, 10), (20, 40)], window))
    scores = Scores(0.3, sliding_window=window)
    for plan in segments.plan_segments(pairs, window, torch.device("meta")):
        num_queries = plan.rounds[-1][0].stop
        num_keys = 30 if isinstance(plan.key_index, slice) else plan.key_index.numel()
        query = torch.empty(num_queries, 4, 8, dtype=torch.bfloat16, device="meta")
        key = torch.empty(num_keys, 2, 8, dtype=torch.bfloat16, device="meta")
        out, lse = segments.torch_forward(query, key, key, plan, scores)
        assert (out.shape, lse.shape, lse.dtype) == (query.shape, (4, num_queries), torch.float32)
        gradients = segments.torch_backward(out, query, key, key, out, lse, plan, scores)
        assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, key.shape]


def test_flash_attn_gets_what_it_needs(monkeypatch):
    """In place of the package, functions with its parameters, written out."""

    def plan_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, left, right):
        assert causal == ((left, right) == (-1, 0))
        return types.SimpleNamespace(
            window=(left, right),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            max_q=max_seqlen_q,
            max_k=max_seqlen_k,
        )

    def forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left=-1,
        window_size_right=-1,
        softcap=0.0,
        alibi_slopes=None,
    ):
        plan = plan_of(
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal,
            window_size_left,
            window_size_right,
        )
        assert (dropout_p, alibi_slopes) == (0.0, None)
        out, lse = _fake_forward(q, k, v, plan, Scores(softmax_scale, softcap=softcap or None))
        return out, lse, torch.empty(0), torch.empty(2)

    def backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        dq,
        dk,
        dv,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dropout_p,
        softmax_scale,
        causal,
        window_size_left,
        window_size_right,
        softcap,
        alibi_slopes,
        deterministic,
        rng_state=None,
    ):
        plan = plan_of(
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            causal,
            window_size_left,
            window_size_right,
        )
        assert (dropout_p, alibi_slopes, deterministic) == (0.0, None, False)
        scores = Scores(softmax_scale, softcap=softcap or None)
        gradients = _fake_backward(dout, q, k, v, out, softmax_lse, plan, scores)
        for destination, gradient in zip((dq, dk, dv), gradients, strict=True):
            destination.copy_(gradient)
        return torch.empty(0)

    module = types.ModuleType("flash_attn.flash_attn_interface")
    module._flash_attn_varlen_forward, module._flash_attn_varlen_backward = forward, backward
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", module)
    tensors = _tensors(60)
    for scores in (Scores(0.3), Scores(0.3, sliding_window=20), Scores(0.3, softcap=1.5)):
        key_sets = [[(40, 60), (0, 17)], [(17, 40)]]
        actual, _ = _in_pieces(FLASH_ATTENTION_2, tensors, [(30, 60), (0, 30)], key_sets, scores)
        _assert_close(actual, _whole(*tensors, scores))


def test_choice_on_the_cpu():
    query, _, value, _ = _tensors(4)
    _, _, narrow, _ = _tensors(4, value_dim=5)
    sinks = torch.zeros(4)
    assert choose_block_kernel("auto", query, value, Scores(1.0, sinks=sinks)) is SDPA
    assert choose_block_kernel("sdpa", query, value, Scores(1.0, sinks=sinks)) is SDPA
    assert choose_block_kernel("eager", query, value, Scores(1.0)) is EAGER
    assert choose_block_kernel("auto", query, narrow, Scores(1.0)) is EAGER
    assert choose_block_kernel("auto", query, value, Scores(1.0, softcap=2.0)) is EAGER
    with pytest.raises(
        ConfigError, match="sdpa can't compute head sizes 8 and 5 under cp_size > 1; use auto"
    ):
        choose_block_kernel("sdpa", query, narrow, Scores(1.0))
    with pytest.raises(ConfigError, match="soft-capping"):
        choose_block_kernel("sdpa", query, value, Scores(1.0, softcap=2.0))
    for name in ("varlen", "flash_attention_2"):
        with pytest.raises(ConfigError, match=f"attn_implementation: {name} can't compute a CPU tensor"):
            choose_block_kernel(name, query, value, Scores(1.0))
    with pytest.raises(ConfigError, match="isn't one of auto, flash_attention_2, varlen, sdpa, eager"):
        choose_block_kernel("falsh", query, value, Scores(1.0))


def test_choice_on_cuda(monkeypatch):
    installed = {"flash": True, "torch": True}
    monkeypatch.setattr(varlen, "flash_attn_installed", lambda: installed["flash"])
    monkeypatch.setattr(varlen, "torch_varlen_installed", lambda: installed["torch"])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))

    def choose(name, dtype=torch.bfloat16, head_dim=64, value_dim=64, **scores):
        query = types.SimpleNamespace(
            is_cuda=True, device=torch.device("cuda"), dtype=dtype, shape=(1, 4, 9, head_dim)
        )
        value = types.SimpleNamespace(shape=(1, 4, 9, value_dim))
        return choose_block_kernel(name, query, value, Scores(1.0, **scores))

    assert choose("auto", sinks=torch.zeros(4)) is FLASH_ATTENTION_2
    assert choose("varlen", sinks=torch.zeros(4)) is VARLEN
    assert choose("auto", torch.float32) is EAGER
    assert choose("auto", head_dim=192, value_dim=128) is EAGER
    assert choose("auto", head_dim=20, value_dim=20) is EAGER
    assert choose("auto", softcap=2.0) is FLASH_ATTENTION_2
    with pytest.raises(ConfigError, match="sdpa can't compute a cuda tensor"):
        choose("sdpa")
    with pytest.raises(ConfigError, match="varlen can't compute head size 20, not a multiple of 8"):
        choose("varlen", head_dim=20, value_dim=20)
    installed["flash"] = False
    assert choose("auto") is VARLEN
    assert choose("auto", softcap=2.0) is EAGER
    with pytest.raises(ConfigError, match="flash_attention_2 can't compute attention without flash-attn"):
        choose("flash_attention_2")
    installed["torch"] = False
    assert choose("auto") is EAGER
    with pytest.raises(ConfigError, match="varlen can't compute attention with torch"):
        choose("varlen")
