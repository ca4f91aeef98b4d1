"""Samples that don't fit the model are refused by name, before anything loads."""

import numpy as np
import pytest
from transformers import Gemma3TextConfig, GPT2Config, LlamaConfig, Phi3Config

from hfpar.errors import ConfigError
from hfpar.models.rope import longest_before_change
from hfpar.train.data import check_fit

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 48,
    "long_factor": [2.0] * 48,
}


def check(key, config, *lengths, token=1, sequence_size=1):
    check_fit(key, np.array(lengths), token, config, sequence_size=sequence_size)


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


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


def test_ranks_that_share_a_long_document_cannot_choose_its_factors():
    """Each would choose by the positions of its own slice."""
    config = Phi3Config(
        rope_parameters=LONGROPE, max_position_embeddings=128, original_max_position_embeddings=32
    )
    check("dataset", config, 5, 32, sequence_size=4)
    with pytest.raises(
        ConfigError, match="a sample of 90 tokens, .* longrope .* above 32 .* 4 ranks .* to 32 or less"
    ):
        check("dataset", config, 33, 90, sequence_size=4)
    check("dataset", LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=64), 5, 64, sequence_size=4)
    check("dataset", LlamaConfig(max_position_embeddings=64), 5, 64, sequence_size=4)


def test_dynamic_factors_do_not_change_within_the_models_positions():
    config = LlamaConfig(rope_parameters=DYNAMIC, max_position_embeddings=64)
    assert longest_before_change(config) == ("dynamic", 64)
    assert longest_before_change(LlamaConfig()) is None


def test_the_kind_of_layer_whose_factors_change_first_decides():
    config = Gemma3TextConfig()
    config.rope_parameters = {
        "full_attention": {**LONGROPE, "original_max_position_embeddings": 64},
        "sliding_attention": {**LONGROPE, "original_max_position_embeddings": 16},
    }
    assert longest_before_change(config) == ("longrope", 16)
