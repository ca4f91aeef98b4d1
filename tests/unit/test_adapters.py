"""Adapters start from the seed alone, wherever the base is."""

import pytest
import torch
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, LlamaConfig

from hfpar.models.adapters import add_lora


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "lm_head", "q_proj"]])
def test_first_values_are_the_same_on_a_whole_and_on_a_meta_base(targets):
    whole, meta = (first_values(targets, on_meta) for on_meta in (False, True))
    assert list(whole) == list(meta)
    for name, value in whole.items():
        assert torch.equal(value, meta[name]), name


def first_values(targets, on_meta):
    config = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2
    )
    torch.manual_seed(int(on_meta))  # what the generator has been used for before must not matter
    if on_meta:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config)
    model = add_lora(model, r=2, alpha=4, dropout=0.0, target_modules=targets, modules_to_save=None, seed=7)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
