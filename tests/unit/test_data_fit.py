"""Samples that don't fit the model are refused by name, before anything loads."""

import pytest
from transformers import GPT2Config, LlamaConfig, Phi3Config

from hfpar.data.stream import Sample
from hfpar.errors import ConfigError
from hfpar.train.data import check_fit

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}


def samples(*lengths, token=1):
    return [Sample([token] * length, [token] * length) for length in lengths]


def test_samples_that_fit_pass():
    check_fit("dataset", samples(5, 64), LlamaConfig(max_position_embeddings=64))


@pytest.mark.parametrize("key", ["dataset", "eval_dataset"])
def test_more_tokens_than_positions(key):
    with pytest.raises(ConfigError, match=f"max_length: a sample of {key} has 65 .* 64 positions"):
        check_fit(key, samples(5, 65), GPT2Config(n_positions=64))


def test_a_tokenizer_with_more_tokens_than_the_model():
    check_fit("dataset", samples(5, token=31999), LlamaConfig(vocab_size=32000))
    with pytest.raises(ConfigError, match="model_name_or_path: .* token 32000 .* 32000 tokens"):
        check_fit("dataset", samples(5, token=32000), LlamaConfig(vocab_size=32000))


def test_lengths_on_both_sides_of_longropes_change():
    config = Phi3Config(
        rope_parameters=LONGROPE, max_position_embeddings=128, original_max_position_embeddings=32
    )
    check_fit("dataset", samples(5, 32), config)
    check_fit("dataset", samples(33, 90), config)
    with pytest.raises(ConfigError, match="samples of 5 and of 33 tokens, .* max_length to 32"):
        check_fit("dataset", samples(5, 33), config)
