"""Samples that don't fit the model are refused by name, before anything loads."""

import numpy as np
import pytest
from transformers import GPT2Config, LlamaConfig, Phi3Config

from hfpar.errors import ConfigError
from hfpar.train.data import check_fit

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}


def check(key, config, *lengths, token=1):
    check_fit(key, np.array(lengths), token, config)


def test_samples_that_fit_pass():
    check("dataset", LlamaConfig(max_position_embeddings=64), 5, 64)


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_more_tokens_than_positions(key):
    with pytest.raises(ConfigError, match=f"max_length: a sample of {key} has 65 .* 64 positions"):
        check(key, GPT2Config(n_positions=64), 5, 65)


def test_a_tokenizer_with_more_tokens_than_the_model():
    check("dataset", LlamaConfig(vocab_size=32000), 5, token=31999)
    with pytest.raises(ConfigError, match="model_name_or_path: .* token 32000 .* 32000 tokens"):
        check("dataset", LlamaConfig(vocab_size=32000), 5, token=32000)


def test_lengths_on_both_sides_of_longropes_change():
    config = Phi3Config(
        rope_parameters=LONGROPE, max_position_embeddings=128, original_max_position_embeddings=32
    )
    check("dataset", config, 5, 32)
    check("dataset", config, 33, 90)
    with pytest.raises(ConfigError, match="samples of 5 and of 33 tokens, .* max_length to 32"):
        check("dataset", config, 5, 33)
