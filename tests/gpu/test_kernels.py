"""The GPU kernels against written-out attention, forward and backward; skipped where there is no GPU."""

import itertools

import pytest
import torch

from hfpar.attention import varlen
from hfpar.attention.varlen import Documents, Scores

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LENGTHS = (130, 1, 257, 64)
KERNELS = {
    "flash_attention_2": (varlen.flash_attention_2, varlen.flash_refusal, varlen.flash_attn_installed),
    "varlen": (varlen.torch_varlen, varlen.varlen_refusal, varlen.torch_varlen_installed),
    "sdpa": (varlen.sdpa, varlen.sdpa_refusal, lambda: True),
}
CASES = {
    "plain": Scores(0.125),
    "window": Scores(0.125, sliding_window=33),
    "softcap": Scores(0.125, softcap=20.0),
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_eager_in_bf16(name, case, kv_heads):
    kernel, refusal, installed = KERNELS[name]
    if not installed():
        pytest.skip(f"{name} isn't installed")
    scores, total = CASES[case], sum(LENGTHS)
    generator = torch.Generator().manual_seed(0)
    exact = [
        torch.randn(1, heads, total, 64, generator=generator).cuda().requires_grad_()
        for heads in (4, kv_heads, kv_heads)
    ]
    rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in exact]
    if refusal(rounded[0], rounded[2], scores):
        pytest.skip(f"{name} can't do {case}")
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32, device="cuda")
    documents = Documents(cu_seqlens, LENGTHS)
    cotangent = torch.randn(1, total, 4, 64, generator=generator).cuda()
    expected = varlen.eager(*exact, documents, scores)
    expected_gradients = torch.autograd.grad((expected * cotangent).sum(), exact)
    output = kernel(*rounded, documents, scores)
    gradients = torch.autograd.grad((output.float() * cotangent).sum(), rounded)
    # bf16 inputs differ from the exact ones by 2^-9 relative; sums over a few hundred keys by a few times that.
    for mine, other in zip((output, *gradients), (expected, *expected_gradients), strict=True):
        assert float((mine.float() - other).norm() / other.norm()) < 2e-2


def test_verify_passes_on_this_gpu(tmp_path):
    from hfpar.verify.run import main

    report = tmp_path / "report.json"
    engines = "ddp,fsdp2"
    layout = f"dp{torch.cuda.device_count()}"
    assert main(["--engines", engines, "--layouts", layout, "--device", "cuda", "--json", str(report)]) == 0
