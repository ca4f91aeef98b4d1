"""Families that hfpar computes wrongly are refused, and by name."""

import pytest
import transformers
from transformers import LlamaConfig

from hfpar.errors import ConfigError
from hfpar.models.load import load_model_config
from hfpar.train import loss
from hfpar.train.probe import check_family


@pytest.mark.parametrize(
    "name", ["LlamaConfig", "Gemma2Config", "GptOssConfig", "Qwen3MoeConfig", "GraniteConfig"]
)
def test_known_families_pass(name):
    check_family(getattr(transformers, name)())  # raises nothing


def test_a_scale_that_hfpar_does_not_know_is_noticed(monkeypatch):
    monkeypatch.setattr(loss.LogitTransform, "of", classmethod(lambda cls, config: cls()))
    with pytest.raises(ConfigError, match="granite comes out wrong when documents are packed"):
        check_family(transformers.GraniteConfig(logits_scaling=8.0))


def test_documents_that_leak_are_noticed(monkeypatch):
    from hfpar.attention import varlen
    from hfpar.attention.varlen import Documents

    original = varlen.sdpa

    def leaky(query, key, value, documents, scores):
        whole = Documents(documents.cu_seqlens[[0, -1]], (sum(documents.lengths),))
        return original(query, key, value, whole, scores)

    monkeypatch.setattr(varlen, "sdpa", leaky)
    with pytest.raises(ConfigError, match="llama comes out wrong"):
        check_family(LlamaConfig())


@pytest.mark.parametrize(
    "name", ["MambaConfig", "Mamba2Config", "JambaConfig", "BambaConfig", "Qwen3NextConfig"]
)
def test_states_that_run_on_between_documents_are_refused(name):
    with pytest.raises(ConfigError, match="model_name_or_path: "):
        check_family(getattr(transformers, name)())


@pytest.mark.parametrize("name", ["JambaConfig", "BambaConfig", "FalconH1Config", "Mamba2Config"])
def test_a_state_is_named_as_the_reason(name):
    with pytest.raises(ConfigError, match="carries a state from token to token"):
        check_family(getattr(transformers, name)())


def test_attention_without_the_state_layers_of_its_family_passes():
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "mamba_n_heads": 64}
    check_family(transformers.GraniteMoeHybridConfig(num_local_experts=0, num_experts_per_tok=0, **layers))


SPARSE = {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]}


@pytest.mark.parametrize(
    "config",
    [
        transformers.Llama4TextConfig(num_hidden_layers=4),
        transformers.Llama4TextConfig(num_hidden_layers=4, attention_chunk_size=None),  # scales by position
        transformers.MiniMaxM3VLTextConfig(mlp_layer_types=["dense", "sparse"], **SPARSE),
    ],
    ids=["chunks", "scale", "blocks"],
)
def test_layers_that_differ_only_in_long_documents_are_noticed(config):
    """Llama 4 from 8,192 tokens on, MiniMax-M3 from 2,048 on; the copies from a few on."""
    with pytest.raises(ConfigError, match="comes out wrong when documents are packed"):
        check_family(config)


@pytest.mark.parametrize("name", ["BloomConfig", "MptConfig", "StableLmConfig"])
def test_attention_that_does_not_hear_of_documents_is_refused(name):
    with pytest.raises(ConfigError, match="comes out wrong when|doesn't take packed documents"):
        check_family(getattr(transformers, name)())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("FalconConfig", "doesn't take packed documents: its attention"),
        ("GPTNeoConfig", "doesn't take packed documents: its attention"),
        ("GPTNeoXJapaneseConfig", "comes out wrong when documents are packed"),
    ],
)
def test_attention_that_keeps_what_it_was_built_with_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        check_family(getattr(transformers, name)())


def test_encoder_decoders_are_refused(tmp_path):
    transformers.BartConfig().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bart is an encoder-decoder"):
        load_model_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Gemma3Config", "model_name_or_path: gemma3 is more than a text model"),
        ("Phi4MultimodalConfig", "model_name_or_path: phi4_multimodal is more than a text model"),
        ("XLMConfig", "model_name_or_path: the config of xlm has no hidden_size and num_attention_heads"),
        ("DbrxConfig", r"model_name_or_path: dbrx couldn't be checked on a tiny copy \("),
    ],
)
def test_a_family_that_cannot_be_checked_is_refused(name, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_family(getattr(transformers, name)())


def test_the_generator_is_left_as_it_was():
    import torch

    before = torch.random.get_rng_state()
    check_family(LlamaConfig())
    assert torch.equal(before, torch.random.get_rng_state())
