"""Adapters begin the same whatever the base looks like, as PEFT begins them, or are refused in one line."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from hfpar.errors import ConfigError
from hfpar.models.adapter_init import Taken, as_plain_lora, taken_from
from hfpar.models.adapters import LoraChoices, add_adapters, add_lora, check_adapters
from hfpar.models.cuts import cut_evenly
from hfpar.models.load import skeleton
from hfpar.models.quantization import Quantization, quantize_skeleton
from hfpar.models.quantized import quantized_weights
from hfpar.models.stored import WeightPart

CONFIG = LlamaConfig(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    tie_word_embeddings=False,
    initializer_range=0.1,
)
TIED = LlamaConfig.from_dict(CONFIG.to_dict() | {"tie_word_embeddings": True})


@pytest.mark.parametrize("targets", ["all-linear", ["embed_tokens", "lm_head", "q_proj"]])
def test_first_values_are_the_same_on_a_whole_and_on_a_meta_base(targets):
    whole, meta = (first_values(targets, on_meta) for on_meta in (False, True))
    assert list(whole) == list(meta)
    for name, value in whole.items():
        assert torch.equal(value, meta[name]), name


def first_values(targets, on_meta):
    torch.manual_seed(int(on_meta))  # what the generator has been used for before must not matter
    if on_meta:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(CONFIG)
    else:
        model = AutoModelForCausalLM.from_config(CONFIG)
    model = add_lora(model, r=2, alpha=4, dropout=0.0, target_modules=targets, modules_to_save=None, seed=7)
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("use_rslora", [False, True])
def test_values_taken_from_weights_are_peft_s(folder, kind, use_dora, use_rslora):
    choices = LoraChoices(
        r=3,
        alpha=5.0,
        init_lora_weights=kind,
        use_dora=use_dora,
        use_rslora=use_rslora,
        embedding_rows=(4, 2),
    )
    mine = add_adapters(load(folder), choices, seed=0, folder=folder)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=3,
        lora_alpha=5,
        target_modules="all-linear",
        init_lora_weights=kind,
        use_dora=use_dora,
        use_rslora=use_rslora,
        trainable_token_indices=[2, 4],
    )
    expected = get_peft_model(load(folder), config)
    for (name, value), (other, theirs) in zip(
        mine.named_parameters(), expected.named_parameters(), strict=True
    ):
        assert name == other
        torch.testing.assert_close(value, theirs, rtol=1e-5, atol=1e-6)
    tokens = torch.arange(50)[None]
    torch.testing.assert_close(mine(tokens).logits, expected(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_base_and_what_was_taken_from_it_are_the_original(folder, dtype):
    """Also where the adapters are rounded: what is subtracted are the rounded ones."""
    choices = LoraChoices(r=4, alpha=4.0, init_lora_weights="pissa", dtype=dtype)
    model = add_adapters(load(folder), choices, seed=0, folder=folder)
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert layer.lora_A["default"].weight.dtype == dtype
    original = load(folder).model.layers[0].mlp.up_proj.weight
    whole = layer.base_layer.weight + layer.get_delta_weight("default").float()
    torch.testing.assert_close(whole, original, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 3e-3)
    exact = layer.lora_B["default"].weight.double() @ layer.lora_A["default"].weight.double()
    torch.testing.assert_close(
        (layer.base_layer.weight.double() + exact).float(), original, rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize("cut", [None, cut_evenly(0, 24, 2), cut_evenly(1, 16, 2)])
def test_what_was_taken_is_read_by_slices_as_a_weight_is(cut):
    generator = torch.Generator().manual_seed(0)
    taken = Taken(torch.randn(3, 16, generator=generator), torch.randn(24, 3, generator=generator), 0.7)
    whole = taken[:]
    torch.testing.assert_close(whole.float(), 0.7 * taken.b @ taken.a)
    shape = (24, 16) if cut is None else cut.local_shape((24, 16))
    part = WeightPart(torch.empty(shape, device="meta"), cut, 1, slice(2, 7))
    assert torch.equal(part.of(taken).float(), part.of(whole).float())


def test_an_adapter_that_took_something_is_exported_with_twice_the_rank(folder):
    for use_rslora, factor in ((False, 2.0), (True, math.sqrt(2))):
        choices = LoraChoices(r=3, alpha=5.0, init_lora_weights="pissa", use_rslora=use_rslora)
        model = add_adapters(load(folder), choices, seed=0, folder=folder)
        weights = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
        converted, config = as_plain_lora(model, weights)
        assert (config.r, config.lora_alpha) == (6, pytest.approx(5.0 * factor))
        assert model.peft_config["default"].r == 3
        a = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        b = a.replace("lora_A", "lora_B")
        assert (converted[b] @ converted[a]).abs().max() < 1e-6  # nothing has been trained yet
    plain = add_adapters(load(folder), LoraChoices(r=3, alpha=5.0), seed=0, folder=folder)
    weights = {name: p.detach() for name, p in plain.named_parameters() if p.requires_grad}
    converted, config = as_plain_lora(plain, weights)
    assert converted is weights and config is plain.peft_config["default"]


def held(folder: Path, choices: LoraChoices, skip: tuple[str, ...] = ()) -> Any:
    from hfpar.models.load import load_model_config

    model = skeleton(load_model_config(folder), dtype=torch.float32)
    quantize_skeleton(model, Quantization("nf4", skip_modules=skip))
    return add_adapters(model, choices, seed=0, folder=folder)


def test_loftq_makes_up_for_what_quantizing_loses(folder):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    choices = LoraChoices(r=4, alpha=9.0, init_lora_weights="loftq")
    model = held(folder, choices, skip=("up_proj",))
    layers = model.base_model.model.model.layers[0].mlp
    layer, original = layers.gate_proj, load(folder).model.layers[0].mlp.gate_proj.weight.data
    assert "weight" in quantized_weights(layer.base_layer)
    lost = original - dequantize_4bit(*quantize_4bit(original, compress_statistics=True, quant_type="nf4"))
    values = torch.linalg.svdvals(lost)
    left = lost - layer.get_delta_weight("default")
    torch.testing.assert_close(left.norm(), values[4:].norm())  # the best that rank 4 can do
    assert (layers.up_proj.lora_B["default"].weight == 0).all(), "nothing was lost here"
    assert taken_from(layer.base_layer) is None


REFUSED: dict[str, tuple[dict[str, Any], LlamaConfig, str]] = {
    "no such module": (
        {"target_modules": ["q_prj"]},
        CONFIG,
        "lora_target_modules: q_prj matches no module; linear layers here: down_proj, gate_proj, k_proj, lm_head, "
        "o_proj, q_proj, up_proj, v_proj",
    ),
    "no such module to save": (
        {"modules_to_save": ["haed"]},
        CONFIG,
        "modules_to_save: haed matches no module",
    ),
    "tied head": (
        {"target_modules": ["q_proj", "lm_head"]},
        TIED,
        "lora_target_modules: lm_head, but the model's head is tied to its embedding",
    ),
    "row that isn't there": (
        {"embedding_rows": (3, 50)},
        CONFIG,
        "trainable_token_indices: 50, but the model's tokens are 0 to 49",
    ),
    "rows of what is trained whole": (
        {"embedding_rows": (3,), "modules_to_save": ["embed_tokens"]},
        CONFIG,
        "trainable_token_indices: rows of model.embed_tokens, which modules_to_save: embed_tokens trains whole; keep",
    ),
    "rows under an adapter": (
        {"head_rows": (3,), "target_modules": ["lm_head"]},
        CONFIG,
        "trainable_token_indices: rows of lm_head, on which lora_target_modules: lm_head puts an adapter; keep one",
    ),
    "rank above the weight's": (
        {"r": 17, "init_lora_weights": "pissa"},
        CONFIG,
        "lora_r: 17 with init_lora_weights: pissa, but model.layers.0.self_attn.q_proj has only 16 rows or columns",
    ),
    "pissa of an embedding": (
        {"target_modules": ["embed_tokens"], "init_lora_weights": "pissa"},
        CONFIG,
        "init_lora_weights: pissa takes linear layers, and model.embed_tokens is of type Embedding; leave it out",
    ),
    "dora of an embedding": (
        {"target_modules": ["embed_tokens"], "use_dora": True},
        CONFIG,
        "use_dora: true takes linear layers, and model.embed_tokens is of type Embedding; leave it out",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_weights_load(name):
    values, config, message = REFUSED[name]
    choices = LoraChoices(**{"r": 4, "alpha": 4.0} | values)
    with pytest.raises(ConfigError) as caught:
        check_adapters(skeleton(config), choices)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_quantized_layer_is_not_trained_whole(folder):
    pytest.importorskip("bitsandbytes")
    choices = LoraChoices(r=4, alpha=4.0, target_modules=["q_proj"], modules_to_save=["mlp"])
    message = "modules_to_save: mlp, but model.layers.0.mlp.gate_proj is quantized, so that it can't be trained whole"
    with pytest.raises(ConfigError, match=message):
        held(folder, choices)
