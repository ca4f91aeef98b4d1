"""The chunked head and cross-entropy against the ordinary way: whole logits, torch's cross-entropy."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from hfpar.train import loss as loss_module
from hfpar.train.loss import LogitTransform, head_cross_entropy, install, module_cross_entropy

VOCAB, HIDDEN, TOKENS = 37, 16, 23


def _inputs(bias: bool, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype).requires_grad_()
    bias_tensor = torch.randn(VOCAB, generator=generator, dtype=dtype).requires_grad_() if bias else None
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return hidden, weight, bias_tensor, targets


def _plain(hidden, weight, bias, targets, transform):
    logits = nn.functional.linear(hidden, weight, bias) * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    return cross_entropy(logits, targets, reduction="sum")


@pytest.mark.parametrize(
    "transform", [LogitTransform(), LogitTransform(0.3), LogitTransform(1.0, 5.0), LogitTransform(2.0, 3.0)]
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 100])
def test_loss_and_gradients_equal_whole_logits(transform, bias, chunk_tokens):
    mine, plain = _inputs(bias, torch.float32), _inputs(bias, torch.float32)
    expected = _plain(*plain, transform)
    loss = head_cross_entropy(*mine, transform, chunk_elements=chunk_tokens * VOCAB)
    (loss * 0.25).backward()
    (expected * 0.25).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    for a, b in zip(mine[:3], plain[:3], strict=True):
        if a is not None:
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-6)


def test_frozen_weight_gets_no_gradient_and_hidden_the_same_one():
    hidden, weight, _, targets = _inputs(False)
    frozen = weight.detach()
    head_cross_entropy(hidden, frozen, None, targets).backward()
    other, weight, _, _ = _inputs(False)
    _plain(other, weight, None, targets, LogitTransform()).backward()
    assert frozen.grad is None
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-5, atol=1e-6)


def test_evaluation_makes_no_gradient(monkeypatch):
    monkeypatch.setattr(loss_module, "_add_product", None)  # would be called for the weight's
    hidden, weight, bias, targets = _inputs(True)
    with torch.no_grad():
        loss = head_cross_entropy(hidden, weight, bias, targets)
    torch.testing.assert_close(
        loss, _plain(hidden, weight, bias, targets, LogitTransform()).float(), rtol=1e-5, atol=1e-5
    )


def test_no_label_tokens_give_zero_and_zero_gradients():
    hidden, weight, bias, targets = _inputs(True)
    loss = head_cross_entropy(hidden[:0], weight, bias, targets[:0])
    loss.backward()
    assert loss.item() == 0.0
    assert weight.grad is not None and not weight.grad.any()
    assert bias.grad is not None and not bias.grad.any()


def test_extreme_logits_stay_finite():
    hidden = torch.full((2, 1), 1e4, requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0], [0.5]], requires_grad=True)
    loss = head_cross_entropy(hidden, weight, None, torch.tensor([0, 1]))
    loss.backward()
    assert loss.item() == pytest.approx(2e4)
    assert torch.isfinite(hidden.grad).all() and torch.isfinite(weight.grad).all()


def test_without_gradients_only_the_loss_is_computed():
    hidden, weight, bias, targets = _inputs(True)
    with torch.no_grad():
        loss = head_cross_entropy(hidden, weight, bias, targets)
    assert not loss.requires_grad
    torch.testing.assert_close(
        loss.double(), _plain(hidden, weight, bias, targets, LogitTransform()), rtol=1e-6, atol=1e-5
    )


def test_under_autocast_the_products_are_bfloat16_and_the_gradients_fp32():
    hidden, weight, _, targets = _inputs(False, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_cross_entropy(hidden, weight, None, targets)
    loss.backward()
    other, other_weight, _, _ = _inputs(False, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = cross_entropy((other @ other_weight.T).float(), targets, reduction="sum")
    expected.backward()
    assert loss.dtype == weight.grad.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-2)
    torch.testing.assert_close(weight.grad, other_weight.grad, rtol=3e-2, atol=3e-2)  # bf16 has 8 bits


def test_a_head_that_is_no_linear_layer_is_recomputed_in_chunks():
    hidden, weight, _, targets = _inputs(False, torch.float32)
    head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, VOCAB))
    transform = LogitTransform(0.5, 4.0)
    loss = module_cross_entropy(head, hidden, targets, transform, chunk_elements=5 * VOCAB)
    loss.backward()
    gradients = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    other, _, _, _ = _inputs(False, torch.float32)
    logits = torch.tanh(head(other) * 0.5 / 4.0) * 4.0
    cross_entropy(logits, targets, reduction="sum").backward()
    torch.testing.assert_close(hidden.grad, other.grad, rtol=1e-5, atol=1e-6)
    for mine, parameter in zip(gradients, head.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-5, atol=1e-6)


_SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        LlamaConfig(**_SMALL),
        GraniteConfig(**_SMALL, logits_scaling=4.0),
        CohereConfig(**_SMALL, logit_scale=0.25),
        Gemma2Config(**_SMALL, head_dim=8, final_logit_softcapping=2.0),
    ],
    ids=lambda config: config.model_type,
)
def test_an_installed_model_gives_the_loss_of_its_own_forward(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    input_ids = torch.randint(3, VOCAB, (1, 9))
    labels = input_ids.clone()
    labels[:, :3] = -100
    own = model(input_ids=input_ids, labels=labels).loss * 6  # its mean over 6 targets
    own.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    logits = model(input_ids=input_ids).logits

    changes = install(model)
    shifted = torch.cat([labels[:, 1:], torch.tensor([[-100]])], dim=1)
    loss = model(input_ids=input_ids, labels=shifted)
    loss.backward()
    assert len(changes) == 2
    torch.testing.assert_close(loss, own, rtol=1e-6, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-5, atol=1e-5, msg=name)
    assert torch.equal(model(input_ids=input_ids).logits, logits)  # without labels nothing changes
