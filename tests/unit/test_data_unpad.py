"""`unpad_input` and `pad_input`: exact values, round trips, gradients, and flash-attn's equal results."""

from __future__ import annotations

import pytest
import torch

from hfpar.data import unpad
from hfpar.data.unpad import pad_input, unpad_input


def test_exact_values() -> None:
    hidden = torch.arange(12.0).view(3, 4)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])
    tokens, indices, cu_seqlens, max_seqlen = unpad_input(hidden, mask)
    assert tokens.tolist() == [0.0, 1.0, 9.0, 10.0, 11.0]
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert cu_seqlens.tolist() == [0, 2, 2, 5]
    assert cu_seqlens.dtype == torch.int32
    assert max_seqlen == 3
    padded = pad_input(tokens, indices, batch=3, seqlen=4)
    assert padded.tolist() == [[0, 1, 0, 0], [0, 0, 0, 0], [0, 9, 10, 11]]


@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_round_trip_and_gradient(mask_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, 2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]).to(mask_dtype)
    tokens, indices, _, _ = unpad_input(hidden, mask)
    padded = pad_input(tokens, indices, 3, 5)
    keep = mask.bool()[..., None, None]
    assert tokens.shape == (8, 2, 4)
    assert torch.equal(padded, torch.where(keep, hidden, 0.0))
    padded.square().sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.where(keep, 2 * hidden.detach(), 0.0))


def test_nothing_left() -> None:
    tokens, indices, cu_seqlens, max_seqlen = unpad_input(torch.ones(2, 3, 4), torch.zeros(2, 3))
    assert tokens.shape == (0, 4)
    assert cu_seqlens.tolist() == [0, 0, 0]
    assert max_seqlen == 0
    assert pad_input(tokens, indices, 2, 3).tolist() == torch.zeros(2, 3, 4).tolist()


def test_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(2, 4\) does not fit \(2, 3, 4\)"):
        unpad_input(torch.ones(2, 3, 4), torch.ones(2, 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flash-attn's functions are used on CUDA only")
@pytest.mark.parametrize("trailing", [(), (3,), (2, 3)])
def test_equal_to_flash_attn_on_cuda(trailing: tuple[int, ...]) -> None:
    pytest.importorskip("flash_attn")
    torch.manual_seed(0)
    hidden = torch.randn(3, 5, *trailing, device="cuda")
    mask = torch.tensor([[1, 1, 1, 0, 0], [0] * 5, [1] * 5], device="cuda")
    for actual, expected in zip(unpad_input(hidden, mask), unpad._unpad_input(hidden, mask), strict=True):
        assert torch.equal(torch.as_tensor(actual), torch.as_tensor(expected))
    tokens, indices, _, _ = unpad_input(hidden, mask)
    assert torch.equal(pad_input(tokens, indices, 3, 5), unpad._pad_input(tokens, indices, 3, 5))
