"""The global gradient norm is exact, however large a tensor and however it is cut."""

import pytest
import torch

from hfpar.engine.clip import clip_gradients, global_grad_norm


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-7), (torch.bfloat16, 3e-6)])
def test_a_large_gradient_has_the_norm_of_float64_however_it_is_cut(dtype, tolerance):
    gradient = (torch.rand(3_000_001, generator=torch.Generator().manual_seed(0)) + 0.5).to(dtype)
    exact = gradient.double().norm().item()
    for pieces in (1, 2, 3, 7):
        norm = global_grad_norm(list(gradient.chunk(pieces)), group=None)
        assert norm.item() == pytest.approx(exact, rel=tolerance)


@pytest.mark.parametrize("shape", [(), (1,), (0, 4), (4096,), (4097, 3)])
def test_shapes(shape):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert global_grad_norm([gradient], group=None).item() == pytest.approx(
        gradient.double().norm().item(), rel=1e-6
    )


def test_nothing_to_train_has_norm_zero():
    assert global_grad_norm([], group=None).item() == 0.0


def test_clipping_is_torchs():
    mine = [torch.randn(5, 3), torch.randn(7)]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in mine]
    for parameter, gradient in zip(parameters, mine, strict=True):
        parameter.grad = gradient.clone()
    norm = global_grad_norm(mine, group=None)
    assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(parameters, 0.1).item(), rel=1e-6)
    clip_gradients(mine, norm, 0.1)
    for parameter, gradient in zip(parameters, mine, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    before = [gradient.clone() for gradient in mine]
    clip_gradients(mine, global_grad_norm(mine, group=None), 10.0)  # already below
    clip_gradients(mine, norm, None)
    assert all(torch.equal(a, b) for a, b in zip(mine, before, strict=True))


def test_an_overflow_is_seen():
    assert global_grad_norm([torch.tensor([1.0, float("inf")])], group=None).item() == float("inf")
    assert global_grad_norm([torch.tensor([float("nan")])], group=None).isnan()
