"""One process, packed by hfpar, against plain separate documents: the loss and every gradient, family by family."""

from pathlib import Path

import pytest
import torch
import transformers

from hfpar.attention import interface
from hfpar.config.engine import DDPSettings
from hfpar.data.stream import Sample, build_stream
from hfpar.errors import ConfigError
from hfpar.models.load import load_model, load_model_config
from hfpar.models.shrink import SLIDING_WINDOW, VOCAB_SIZE, shrink_config
from hfpar.parallel.layout import Layout
from hfpar.parallel.sequence import shard_stream
from hfpar.train import loss
from hfpar.train.step import model_inputs
from hfpar.verify.compare import compare_gradients, relative, worst_of
from hfpar.verify.documents import count_labels, make_windows
from hfpar.verify.reference import accumulate_gradients, build_checkpoint, gradients_of, load_plain
from tests.families import EVERYDAY, FAMILIES  # noqa: TID251


@pytest.fixture(autouse=True)
def registered() -> None:
    interface.register()


@pytest.mark.parametrize("family", EVERYDAY)
def test_packed_equals_separate_documents(family: str, tmp_path: Path) -> None:
    build_checkpoint(FAMILIES[family].config(), tmp_path)
    config = load_model_config(tmp_path)
    documents = make_windows(config.vocab_size)[0]
    device = torch.device("cpu")

    plain = load_plain(tmp_path, adapter_state=None)
    plain_loss = accumulate_gradients(plain, documents, device)
    expected = gradients_of(plain)

    model = load_model(
        tmp_path, config, settings=DDPSettings(), dtype=torch.float32, attn_implementation="hfpar"
    )
    model.train()
    loss.install(model)
    stream = build_stream([Sample(document.tokens, document.labels) for document in documents])
    packed_loss = model(
        **model_inputs(shard_stream(stream, Layout(rank=0, world_size=1)), device)
    ) / count_labels(documents)
    packed_loss.backward()

    name, error = worst_of(compare_gradients(gradients_of(model).items(), expected))
    print(f"loss {relative(packed_loss.item(), plain_loss):.1e}, gradients {error:.1e} ({name})")
    assert relative(packed_loss.item(), plain_loss) < 1e-5
    assert error < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_shrunk_config_is_small(family: str) -> None:
    config = FAMILIES[family].config()
    before = config.to_dict()
    small = shrink_config(config)
    assert config.to_dict() == before
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(small)
    assert sum(parameter.numel() for parameter in model.parameters()) < (
        1_000_000 if family in EVERYDAY else 2_000_000
    )
    assert small.vocab_size <= VOCAB_SIZE
    assert 2 <= small.num_hidden_layers <= 6
    assert type(small) is type(config)


def shrunk(family: str) -> dict:
    return shrink_config(FAMILIES[family].config()).to_dict()


def test_the_ratio_of_query_to_key_value_heads_stays() -> None:
    for family, group in {"smollm2": 3, "qwen2": 7, "gemma2": 2, "mistral": 4, "gpt_oss": 8}.items():
        small = shrunk(family)
        assert small["num_attention_heads"] == group * small["num_key_value_heads"], family
    assert shrunk("smollm2")["num_key_value_heads"] == 3  # of 3: an odd number, as ranks deal them unevenly
    assert shrunk("phi3")["num_attention_heads"] == shrunk("phi3")["num_key_value_heads"]


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "gemma2", "mistral", "qwen3_moe"])
def test_a_head_size_of_its_own_stays_one(family: str) -> None:
    config, small = FAMILIES[family].config(), shrink_config(FAMILIES[family].config())
    own = config.head_dim * config.num_attention_heads != config.hidden_size
    assert (small.head_dim * small.num_attention_heads != small.hidden_size) == own


def test_each_kind_of_layer_stays_and_no_more() -> None:
    assert shrunk("gemma2")["layer_types"] == ["sliding_attention", "full_attention"]
    assert shrunk("gemma3")["layer_types"] == ["sliding_attention", "full_attention"]
    assert shrunk("qwen2_window")["layer_types"] == ["full_attention", "sliding_attention"]
    assert shrunk("smollm3")["no_rope_layers"] == [1, 0]
    assert shrunk("deepseek_v3")["first_k_dense_replace"] == 1
    assert shrunk("qwen3_moe_mixed")["mlp_only_layers"] == [1]
    assert shrunk("llama")["num_hidden_layers"] == 2
    gemma3n = shrunk("gemma3n")
    kinds = list(zip(gemma3n["layer_types"], gemma3n["activation_sparsity_pattern"], strict=True))
    assert len(kinds) == 6 and len(set(kinds[:4])) == 4
    assert gemma3n["num_kv_shared_layers"] == 2 and kinds[4:] == kinds[2:4]
    gemma4 = shrink_config(FAMILIES["gemma4"].config())
    assert gemma4.layer_types == ["sliding_attention", "full_attention"]
    assert [gemma4.per_layer_config[layer].head_dim for layer in (0, 1)] == [16, 32]
    assert shrunk("granite4_dense")["layer_types"] == ["full_attention"] * 2


def test_windows_bite_and_are_not_invented() -> None:
    assert shrunk("mistral")["sliding_window"] == SLIDING_WINDOW
    assert max(len(document.tokens) for document in make_windows(64)[0]) > 2 * SLIDING_WINDOW
    assert shrunk("qwen2")["sliding_window"] is None


def test_other_lengths_from_which_layers_differ_bite_too() -> None:
    """Or a copy's documents would not reach them, and a wrong computation would not be seen."""
    llama4 = shrink_config(transformers.Llama4TextConfig())
    assert (llama4.attention_chunk_size, llama4.floor_scale) == (SLIDING_WINDOW, SLIDING_WINDOW)
    minimax = shrink_config(transformers.MiniMaxM3VLTextConfig())
    assert minimax.index_topk_blocks * minimax.index_block_size < 2 * SLIDING_WINDOW


def test_what_a_layer_computes_stays() -> None:
    gemma = shrunk("gemma2")
    assert (
        gemma["attn_logit_softcapping"] == gemma["final_logit_softcapping"] == 2.0
    )  # smaller, so as to bite
    assert gemma["query_pre_attn_scalar"] == gemma["head_dim"]
    assert gemma["tie_word_embeddings"] is True
    assert shrunk("granite")["logits_scaling"] == 8.0
    assert shrunk("llama")["rope_parameters"]["rope_type"] == "llama3"
    assert shrunk("gptj")["rotary_dim"] * 4 == shrunk("gptj")["n_embd"] // shrunk("gptj")["n_head"]
    assert shrunk("gpt_neox")["rope_parameters"]["partial_rotary_factor"] == 0.25
    longrope = shrunk("phi3_longrope")
    head_dim = longrope["hidden_size"] // longrope["num_attention_heads"]
    assert len(longrope["rope_parameters"]["short_factor"]) == head_dim // 2
    deepseek = shrunk("deepseek_v3")
    assert deepseek["qk_head_dim"] == deepseek["qk_nope_head_dim"] + deepseek["qk_rope_head_dim"]
    assert shrunk("deepseek_v2_lite")["q_lora_rank"] is None


def test_randomness_and_quantisation_are_left_out() -> None:
    config = transformers.LlamaConfig(attention_dropout=0.1)
    config.quantization_config = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    small = shrink_config(config)
    assert small.attention_dropout == 0.0
    assert getattr(small, "quantization_config", None) is None


def test_special_tokens_that_were_one_stay_one() -> None:
    config = transformers.Phi3Config(pad_token_id=32000, eos_token_id=[32000, 32007], bos_token_id=1)
    small = shrink_config(config)
    assert small.eos_token_id[0] == small.pad_token_id != small.bos_token_id
    assert max(*small.eos_token_id, small.bos_token_id) < small.vocab_size


def test_more_than_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="^model_name_or_path: gemma3 is more than a text model"):
        shrink_config(transformers.Gemma3Config())


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp_sizes"),
    [
        (32, 8, [3, 4]),
        (32, 8, [2, 8]),
        (24, 2, [6]),
        (24, 2, [2, 12]),
        (12, 12, [3, 6]),
        (9, 3, [3, 2]),
        (64, 8, [16]),
    ],
)
def test_a_copy_can_be_shared_by_as_many_ranks_as_the_model(
    heads: int, kv_heads: int, tp_sizes: list[int]
) -> None:
    sizes = {"hidden_size": 16 * heads, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = transformers.LlamaConfig(**sizes)
    small = shrink_config(config, tp_sizes=tp_sizes)
    few, few_kv = small.num_attention_heads, small.num_key_value_heads
    for size in tp_sizes:
        can_be = heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
        if can_be:
            assert few % size == 0 and (few_kv % size == 0 or size % few_kv == 0)
            assert small.intermediate_size % size == 0
