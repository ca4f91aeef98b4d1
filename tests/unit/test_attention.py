"""Each kernel, on a packed stream, against written-out attention of one document at a time."""

import itertools
import math
import sys
import types

import pytest
import torch

from hfpar.attention import interface, varlen
from hfpar.attention.reference import causal_mask, reference_attention
from hfpar.attention.varlen import Documents, Scores
from hfpar.errors import ConfigError

LENGTHS = (5, 1, 12, 3)
TOTAL = sum(LENGTHS)


def _documents() -> Documents:
    return Documents(torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32), LENGTHS)


def _tensors(heads=4, kv_heads=2, head_dim=8, value_dim=8):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        torch.randn(1, h, TOTAL, d, generator=generator, dtype=torch.float64).requires_grad_()
        for h, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    )


def _by_hand(query, key, value, scores):
    """One query at a time, one head at a time, straight from the definition."""
    output = torch.zeros(1, TOTAL, query.shape[1], value.shape[3], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    start = 0
    for length in LENGTHS:
        for position, head in itertools.product(range(length), range(query.shape[1])):
            first = 0 if scores.sliding_window is None else max(0, position - scores.sliding_window + 1)
            seen = slice(start + first, start + position + 1)
            logits = key[0, head // group, seen] @ query[0, head, start + position] * scores.scaling
            if scores.softcap is not None:
                logits = scores.softcap * torch.tanh(logits / scores.softcap)
            weights = logits.exp()
            total = weights.sum() + (0 if scores.sinks is None else scores.sinks[head].exp())
            output[0, start + position, head] = (weights / total) @ value[0, head // group, seen]
        start += length
    return output


CASES = {
    "plain": Scores(0.3),
    "window": Scores(0.3, sliding_window=4),
    "window of one": Scores(0.3, sliding_window=1),
    "window longer than any document": Scores(0.3, sliding_window=50),
    "softcap": Scores(0.3, softcap=2.0),
    "softcap and window": Scores(0.3, sliding_window=3, softcap=2.0),
    "sinks": Scores(0.3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", [varlen.eager, varlen.sdpa])
def test_kernels_equal_the_definition_with_all_gradients(case, kernel):
    scores = CASES[case]
    query, key, value = _tensors()
    if kernel is varlen.sdpa and varlen.sdpa_refusal(query, value, scores):
        assert varlen.best_kernel(query, value, scores) is varlen.eager
        return
    cotangent = torch.randn(1, TOTAL, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output = kernel(query, key, value, _documents(), scores)
    gradients = torch.autograd.grad((output * cotangent).sum(), (query, key, value))
    others = _tensors()
    expected = _by_hand(*others, scores)
    expected_gradients = torch.autograd.grad((expected * cotangent).sum(), others)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)  # the reference's softmax is fp32
    for mine, other in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "value_dim"), [(4, 4, 8, 8), (6, 1, 8, 8), (9, 3, 4, 4), (2, 2, 12, 6)]
)
def test_head_shapes(heads, kv_heads, head_dim, value_dim):
    query, key, value = _tensors(heads, kv_heads, head_dim, value_dim)
    scores = Scores(head_dim**-0.5)
    expected = _by_hand(query, key, value, scores)
    for kernel in (varlen.eager, varlen.sdpa):
        torch.testing.assert_close(
            kernel(query, key, value, _documents(), scores), expected, rtol=1e-6, atol=1e-6
        )


def test_no_document_sees_another():
    query, key, value = _tensors()
    output = varlen.sdpa(query, key, value, _documents(), Scores(0.3))
    with torch.no_grad():
        key[:, :, :5] += 1.0
        value[:, :, :5] -= 1.0
    changed = varlen.sdpa(query, key, value, _documents(), Scores(0.3))
    assert not torch.equal(output[:, 1:5], changed[:, 1:5])
    assert torch.equal(output[:, 5:], changed[:, 5:])


def test_causal_mask_aligns_the_last_query_with_the_last_key():
    assert causal_mask(2, 4, None, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]
    assert causal_mask(1, 4, 2, torch.device("cpu")).tolist() == [[False, False, True, True]]


def test_a_row_that_sees_nothing_is_zero_not_nan():
    query = torch.randn(1, 1, 2, 4)
    mask = torch.tensor([[False, False], [True, True]])
    output = reference_attention(query, query, query, scaling=1.0, mask=mask)
    assert not output[0, 0, 0].any() and torch.isfinite(output).all()


def test_a_kernel_asked_for_by_name_refuses_what_it_cannot_do():
    query, key, value = (t.detach().float() for t in _tensors())
    arguments = {"document_lengths": LENGTHS, "cu_seq_lens_q": _documents().cu_seqlens}
    with pytest.raises(ConfigError, match="attn_implementation: sdpa can't compute logit soft-capping"):
        interface.attention_forward(
            torch.nn.Module(), query, key, value, None, softcap=3.0, attn_implementation="sdpa", **arguments
        )
    with pytest.raises(
        ConfigError, match="attn_implementation: flash_attention_2 can't compute a CPU tensor"
    ):
        interface.attention_forward(
            torch.nn.Module(), query, key, value, None, attn_implementation="flash_attention_2", **arguments
        )


def _on_gpu(head_dim=64, value_dim=64, dtype=torch.bfloat16):
    """Query and value as far as refusals look at them."""
    device = torch.device("cuda")
    query = types.SimpleNamespace(is_cuda=True, device=device, dtype=dtype, shape=(1, 4, 9, head_dim))
    return query, types.SimpleNamespace(shape=(1, 4, 9, value_dim))


def test_what_flash_attention_refuses_on_a_gpu(monkeypatch):
    capability = [8, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: tuple(capability))
    monkeypatch.setattr(varlen, "flash_attn_installed", lambda: True)
    monkeypatch.setattr(varlen, "torch_varlen_installed", lambda: True)
    plain = Scores(1.0)
    refusals = (varlen.flash_refusal, varlen.varlen_refusal)

    def reasons(*tensors):
        return {refusal(*tensors, plain) for refusal in refusals}

    for head_dim in (8, 64, 72, 256):
        assert reasons(*_on_gpu(head_dim, head_dim)) == {None}
    assert varlen.best_kernel(*_on_gpu(), plain) is varlen.flash_attention_2
    assert reasons(*_on_gpu(20, 20)) == {"head size 20, not a multiple of 8"}
    assert reasons(*_on_gpu(264, 264)) == {"head sizes 264 and 264"}
    assert reasons(*_on_gpu(192, 128)) == {"head sizes 192 and 128"}
    assert reasons(*_on_gpu(dtype=torch.float32)) == {"torch.float32 (fp16 or bf16 only)"}
    assert varlen.best_kernel(*_on_gpu(20, 20), plain) is varlen.sdpa
    capability[:] = 7, 5
    assert reasons(*_on_gpu()) == {"on a GPU of compute capability 7.5 (8.0 or newer only)"}
    assert varlen.best_kernel(*_on_gpu(), plain) is varlen.sdpa
    capability[:] = 10, 0
    assert reasons(*_on_gpu()) == {None}


def test_every_choice_of_the_config_has_a_kernel():
    from typing import get_args, get_type_hints

    from hfpar.config.schema import SFTConfig

    choices = get_args(get_type_hints(SFTConfig)["attn_implementation"])
    assert {interface.interface_name(choice) for choice in choices} == set(interface._NAMES.values())
    assert not any("flash" in interface.interface_name(choice) for choice in choices)


def test_scaling_defaults_to_the_head_size():
    query, key, value = (t.detach() for t in _tensors())
    arguments = {"document_lengths": LENGTHS, "cu_seq_lens_q": _documents().cu_seqlens}
    module = torch.nn.Module()
    default, _ = interface.attention_forward(module, query, key, value, None, **arguments)
    given, _ = interface.attention_forward(
        module, query, key, value, None, scaling=1 / math.sqrt(8), **arguments
    )
    torch.testing.assert_close(default, given)


def test_generation_with_padding_equals_transformers_own():
    from transformers import LlamaConfig, LlamaForCausalLM

    interface.register()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )
    input_ids = torch.randint(3, 50, (2, 7))
    mask = torch.ones_like(input_ids)
    mask[0, :3] = 0  # left padding
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    own = model.generate(input_ids, **options)
    model.set_attn_implementation(interface.interface_name("auto"))
    assert torch.equal(model.generate(input_ids, **options), own)


def test_a_flash_attn_built_for_another_torch_counts_as_not_installed(tmp_path, monkeypatch):
    (tmp_path / "flash_attn").mkdir()
    broken = "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c105ErrorC2E')\n"
    (tmp_path / "flash_attn" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    varlen.flash_attn_installed.cache_clear()
    try:
        assert varlen.flash_attn_installed() is False
        query, key, value = _tensors()
        assert varlen.best_kernel(query, value, Scores(0.3)) is varlen.sdpa
    finally:
        varlen.flash_attn_installed.cache_clear()
