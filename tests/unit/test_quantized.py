"""Weights in few bits: the numbers of bitsandbytes, by parts too; layers that hold them; what is asked for."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3MoeConfig

from hfpar.config.engine import DDPSettings, FSDP2Settings, ZeROSettings
from hfpar.errors import ConfigError, MissingDependencyError
from hfpar.models import quantization as choosing
from hfpar.models.cuts import Cut, cut_evenly, cut_heads
from hfpar.models.formats import MXFP4, EightBit, FourBit
from hfpar.models.load import skeleton
from hfpar.models.quantization import (
    Quantization,
    QuantizationChoice,
    experts_to_quantize,
    find_quantization,
    layers_to_quantize,
    quantize_skeleton,
)
from hfpar.models.quantized import (
    QuantizedLinear,
    QuantizedWeight,
    cut_quantized,
    hold_quantized,
    quantized_weights,
    weight_names,
    weight_shape,
)
from hfpar.models.quantized_fill import Bytes, Sharers, quantize_rows, stored_rows

CPU = torch.device("cpu")
SHAPES = [(128, 192), (96, 576), (64, 100), (3, 50), (1, 64), (2, 1), (4, 32, 96)]
FORMATS = [FourBit("nf4", True), FourBit("nf4", False), FourBit("fp4", True), FourBit("fp4", False)]


def whole_bytes(weight: QuantizedWeight, values: torch.Tensor) -> Bytes:
    rows = slice(0, weight.format.num_rows(weight.shape))
    return quantize_rows(weight, rows, lambda wanted: values[wanted], Sharers(), CPU)


def numbers(weight: QuantizedWeight, stored: Bytes, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return weight.dequantize(stored.packed, stored.scales, stored.nested, dtype)


def bitsandbytes_numbers(values: torch.Tensor, form: FourBit) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    options = {"blocksize": 64, "quant_type": form.quant_type, "compress_statistics": form.double_quant}
    return dequantize_4bit(*quantize_4bit(values, **options)).view(
        values.shape
    )  # a column comes back as a row


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMATS)
def test_four_bits_are_those_of_bitsandbytes(
    form: FourBit, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = torch.randn(shape).to(dtype)
    weight = QuantizedWeight(form, shape, dtype, dtype)
    stored = whole_bytes(weight, values)
    assert stored.packed.dtype == stored.scales.dtype == torch.uint8
    assert numbers(weight, stored, dtype).equal(bitsandbytes_numbers(values, form))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bits_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    import bitsandbytes as bnb

    values = torch.randn(40, 56).to(dtype)
    values[3] = 0
    layer = bnb.nn.Linear8bitLt(56, 40, bias=False, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(values, requires_grad=False, has_fp16_weights=False)
    layer.to("cpu").train()
    weight = QuantizedWeight(EightBit(), (40, 56), dtype, dtype)
    stored = whole_bytes(weight, values)
    assert stored.packed.view(torch.int8).equal(layer.weight.CB)
    states = torch.randn(5, 56).to(dtype)
    assert layer(states).equal(states @ numbers(weight, stored, dtype).T)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("form", [FourBit("nf4", False), FourBit("fp4", False), EightBit()])
def test_rows_that_an_engine_deals_out_are_those_of_the_whole(form: Any, ranks: int) -> None:
    values = torch.randn(48, 72)
    weight = QuantizedWeight(form, (48, 72), torch.float32, torch.float32)
    whole, num_rows = whole_bytes(weight, values), form.num_rows((48, 72))
    step = -(-num_rows // ranks)
    read: list[slice] = []

    def reader(rows: slice) -> torch.Tensor:
        read.append(rows)
        return values[rows]

    parts = [
        quantize_rows(
            weight, slice(min(r * step, num_rows), min((r + 1) * step, num_rows)), reader, Sharers(), CPU
        )
        for r in range(ranks)
    ]
    assert torch.cat([part.packed for part in parts]).equal(whole.packed)
    assert torch.cat([part.scales for part in parts]).equal(whole.scales)
    assert sum(rows.stop - rows.start for rows in read) <= 48 + 4 * ranks  # a row more where ranks meet


@pytest.mark.parametrize(
    ("shape", "cut", "through"),
    [
        ((128, 96), cut_evenly(0, 128, 2), False),
        ((6, 96), cut_evenly(0, 6, 3), False),  # 192 numbers a part
        ((6, 32), cut_evenly(0, 6, 2), True),  # 96 numbers
        ((8, 256), cut_evenly(1, 256, 4), False),
        ((8, 192), cut_evenly(1, 192, 2), True),
        ((8, 192), cut_heads(0, 8, 2, 4), False),
        ((2, 128, 64), cut_evenly(1, 128, 2, sections=2), False),
        ((2, 64, 192), cut_evenly(2, 192, 2), True),
        ((2, 64, 128), cut_evenly(2, 128, 2), False),
    ],
)
def test_parts_know_whether_they_cut_through_blocks(shape: tuple[int, ...], cut: Cut, through: bool) -> None:
    values = torch.randn(shape)
    form = FourBit("nf4", False)
    whole = QuantizedWeight(form, shape, torch.float32, torch.float32)
    dequantized = numbers(whole, whole_bytes(whole, values))
    differ = False
    for rank in range(len(cut.ranges)):
        part = whole.part(cut, rank)
        assert part.cuts_through_blocks is through
        assert part.whole_shape == shape
        mine = numbers(part, whole_bytes(part, cut.take(values, rank)))
        differ |= not mine.equal(cut.take(dequantized, rank))
    assert differ is through


def test_bytes_have_no_copy_of_the_weight_and_engines_can_see_them_as_they_like() -> None:
    for storage in (torch.uint8, torch.bfloat16, torch.float32):
        weight = QuantizedWeight(FourBit("nf4", True), (64, 256), torch.float32, torch.float32, storage)
        packed, scales = weight.empty_bytes("meta")
        assert packed.dtype == scales.dtype == storage
        assert packed.nbytes + scales.nbytes == 64 * 256 // 2 + 64 * 256 // 64
        stored = whole_bytes(weight, values := torch.randn(64, 256))
        back = weight.dequantize(
            weight.as_stored(stored.packed), weight.as_stored(stored.scales), stored.nested, torch.float32
        )
        assert back.equal(bitsandbytes_numbers(values, FourBit("nf4", True)))


def test_mxfp4_is_read_as_transformers_reads_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.randint(0, 256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(120, 130, (2, 6, 3), dtype=torch.uint8)
    weight = QuantizedWeight(MXFP4(), (2, 96, 6), torch.float32, torch.float32, is_stored=True)
    assert tuple(t.shape for t in weight.empty_bytes("meta")) == ((12, 48), (12, 3))
    back = weight.dequantize(blocks.view(12, 48), scales.view(12, 3), None, torch.float32)
    assert back.shape == (2, 96, 6)
    assert back.equal(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))


# Layers


def held_linear(
    form: Any = None, bias: bool = True, dtype: torch.dtype = torch.float32
) -> tuple[Any, nn.Linear]:
    """A layer that holds its weight in few bits, and a plain one with the same numbers."""
    plain = nn.Linear(96, 40, bias=bias).to(dtype)
    layer = copy.deepcopy(plain)
    weight = QuantizedWeight(form or FourBit("nf4", True), (40, 96), dtype, dtype)
    hold_quantized(layer, "weight", weight)
    stored = whole_bytes(weight, plain.weight.detach())
    layer.weight_packed = nn.Parameter(stored.packed, requires_grad=False)
    layer.weight_scales = nn.Parameter(stored.scales, requires_grad=False)
    if stored.nested is not None:
        layer.weight_nested = stored.nested
    plain.weight.data = numbers(weight, stored, dtype)
    return layer, plain


@pytest.mark.parametrize("form", [FourBit("nf4", True), FourBit("fp4", False), EightBit()])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_computes_with_the_numbers_and_gives_its_input_and_bias_their_gradients(
    form: Any, bias: bool
) -> None:
    layer, plain = held_linear(form, bias)
    assert isinstance(layer, QuantizedLinear) and isinstance(layer, nn.Linear)
    assert not isinstance(layer.weight, nn.Parameter) and not layer.weight.requires_grad
    assert layer.weight.equal(plain.weight)
    mine, theirs = (torch.arange(2 * 3 * 96.0).view(2, 3, 96).sin().requires_grad_() for _ in range(2))
    out, expected = layer(mine), plain(theirs)
    assert out.equal(expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-6, atol=1e-6)
    if bias:
        torch.testing.assert_close(layer.bias.grad, plain.bias.grad, rtol=1e-6, atol=1e-6)


def test_a_layer_keeps_no_whole_weight_for_the_backward() -> None:
    layer, _ = held_linear()
    saved: list[torch.Size] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(5, 96, requires_grad=True))
    assert saved and torch.Size([40, 96]) not in saved and torch.Size([96, 40]) not in saved


def test_autocast_doesnt_reach_into_a_layer() -> None:
    layer, plain = held_linear()
    states = torch.randn(5, 96)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(states)
    assert out.dtype == torch.float32 and out.equal(plain(states))


def test_casting_a_model_leaves_its_bytes_alone() -> None:
    layer, plain = held_linear()
    expected = layer.weight
    nn.Sequential(layer).bfloat16()
    assert layer.weight_packed.dtype == layer.weight_nested.dtype == torch.uint8
    assert layer.weight.equal(expected)


def test_bytes_are_not_weights_of_their_own() -> None:
    layer, _ = held_linear()
    assert weight_names(layer) == ["weight", "bias"]
    assert weight_shape(layer, "weight") == (40, 96)
    assert "weight_nested" not in layer.state_dict()


def test_peft_puts_plain_lora_on_a_layer() -> None:
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora import Linear

    layer, plain = held_linear()
    models = []
    for inner in (layer, plain):
        torch.manual_seed(0)
        model = get_peft_model(
            nn.ModuleDict({"inner": inner}), LoraConfig(r=2, target_modules=["inner"], use_dora=True)
        )
        lora = model.base_model.model["inner"]
        assert type(lora) is Linear
        nn.init.normal_(lora.lora_B["default"].weight)
        models.append(lora)
    states = torch.randn(3, 96)
    assert models[0](states).equal(models[1](states))


# Models


def moe() -> Any:
    config = Qwen3MoeConfig(
        vocab_size=32, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, num_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    return skeleton(config, dtype=torch.float32)


def test_linear_layers_and_experts_are_held_but_no_head_router_or_norm() -> None:
    model = moe()
    quantize_skeleton(model, Quantization("nf4"))
    held = {
        f"{prefix}.{name}" for prefix, module in model.named_modules() for name in quantized_weights(module)
    }
    attention = {f"model.layers.0.self_attn.{side}_proj.weight" for side in "qkvo"}
    assert held == attention | {
        f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_is_skipped_stays_as_it_is() -> None:
    model = moe()
    assert layers_to_quantize(model, ["q_proj", "lm_head"]) == [
        f"model.layers.0.self_attn.{side}_proj" for side in "kvo"
    ]
    assert experts_to_quantize(model, ["experts"]) == []
    with pytest.raises(ConfigError, match="llm_int8_skip_modules: layers.0.self_attn names no layer"):
        quantize_skeleton(model, Quantization("nf4", skip_modules=("layers.0.self_attn",)))
    quantize_skeleton(
        moe(), Quantization("nf4", skip_modules=("merger",), is_stored=True)
    )  # a checkpoint's own list


def test_a_weight_that_two_layers_share_is_refused() -> None:
    model = moe()
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight = attention.v_proj.weight
    with pytest.raises(ConfigError, match=r"one weight for .*k_proj and .*v_proj"):
        quantize_skeleton(model, Quantization("nf4"))


@pytest.mark.parametrize(
    ("dtype", "compute"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)]
)
def test_experts_compute_in_the_type_of_what_they_are_given(dtype: torch.dtype, compute: torch.dtype) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Parameter(torch.randn(2, 64, 32))

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states @ self.up[1]

    experts = Experts().to(dtype)
    values = experts.up.detach()
    weight = QuantizedWeight(FourBit("nf4", False), (2, 64, 32), dtype, compute)
    hold_quantized(experts, "up", weight)
    stored = whole_bytes(weight, values)
    experts.up_packed = nn.Parameter(stored.packed, requires_grad=False)
    experts.up_scales = nn.Parameter(stored.scales, requires_grad=False)
    states = torch.randn(5, 64).to(dtype)
    expected = states @ numbers(weight, stored, compute)[1].to(dtype)
    assert experts(states).equal(expected)
    assert "_up_in_forward" not in experts.__dict__


def test_bytes_are_never_read_as_numbers(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from hfpar.models.stored import SafetensorsSource, WeightPart

    model = skeleton(LLAMA, dtype=torch.float32)
    save_file({"lm_head.weight": torch.ones(32, 64, dtype=torch.int8)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path, model, ["lm_head.weight"])
    with pytest.raises(ConfigError, match=r"lm_head.weight is stored quantized \(int8\)"):
        source.read("lm_head.weight", WeightPart(model.lm_head.weight, None, 0))


@pytest.mark.parametrize(("blocksize", "double_quant"), [(128, True), (64, False)])
def test_other_blocks_than_the_configs_are_refused(blocksize: int, double_quant: bool) -> None:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        torch.randn(8, 256), blocksize=blocksize, quant_type="nf4", compress_statistics=double_quant
    )
    tensors = {f".{name}" if name else "": tensor for name, tensor in state.as_dict(packed=True).items()}
    weight = QuantizedWeight(FourBit("nf4", True), (8, 256), torch.float32, torch.float32, is_stored=True)
    with pytest.raises(ConfigError, match=f"quantized in blocks of {blocksize} with"):
        stored_rows(weight, slice(0, 8), lambda ending, index: {"": packed, **tensors}[ending])


def test_a_model_without_linear_layers_is_refused() -> None:
    config = __import__("transformers").GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=32)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers to quantize"):
        layers_to_quantize(skeleton(config))


def test_stored_bytes_are_not_cut_through() -> None:
    layer = nn.Linear(96, 40, device="meta")
    stored = QuantizedWeight(FourBit("nf4", True), (40, 96), torch.float32, torch.float32, is_stored=True)
    hold_quantized(layer, "weight", stored)
    with pytest.raises(ConfigError, match="tp_size: 2 ranks would cut through the blocks"):
        cut_quantized(layer, "weight", cut_evenly(1, 96, 2), 0)


# What is asked for


LLAMA = LlamaConfig(
    vocab_size=32, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
)


def with_stored(**values: Any) -> Any:
    config = copy.deepcopy(LLAMA)
    config.quantization_config = values
    return config


BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


@pytest.mark.parametrize(
    ("choice", "config", "message"),
    [
        ({"compute_dtype": "bfloat16"}, LLAMA, "bnb_4bit_compute_dtype: bfloat16, but nothing is quantized"),
        ({"double_quant": False}, LLAMA, "bnb_4bit_use_double_quant: false, but nothing is quantized"),
        (
            {"method": "none", "skip_modules": ["a"]},
            LLAMA,
            "llm_int8_skip_modules: a, but nothing is quantized",
        ),
        ({"method": "mxfp4"}, LLAMA, "quantization: mxfp4 is for checkpoints that hold it"),
        ({}, with_stored(quant_method="gptq"), "quantized by gptq, on which hfpar can't train"),
        ({"method": "fp4"}, with_stored(**BNB4), "quantization: fp4, but the checkpoint holds nf4"),
        ({"method": "none"}, with_stored(**BNB4), "quantization: none, but the checkpoint holds nf4"),
        ({"double_quant": True}, with_stored(**BNB4), "bnb_4bit_use_double_quant: true, but the checkpoint"),
        (
            {"skip_modules": ["q_proj"]},
            with_stored(**BNB4),
            "llm_int8_skip_modules: q_proj, but the checkpoint",
        ),
        (
            {"method": "nf4"},
            with_stored(quant_method="mxfp4"),
            "quantization: nf4, but the checkpoint holds mxfp4",
        ),
    ],
)
def test_combinations_that_cant_be_are_refused(choice: dict[str, Any], config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find_quantization(QuantizationChoice(**choice), config, DDPSettings(), torch.float32)


@pytest.mark.parametrize(
    "settings",
    [
        FSDP2Settings(mixed_precision="bf16"),
        ZeROSettings(mixed_precision="bf16", deepspeed_config={"zero_optimization": {"stage": 3}}),
    ],
)
def test_bytes_arent_stored_as_what_an_engine_would_convert(settings: Any) -> None:
    with pytest.raises(ConfigError, match="bnb_4bit_quant_storage: float32 with mixed precision bf16"):
        find_quantization(QuantizationChoice("nf4", storage="float32"), LLAMA, settings, torch.float32)
    found = find_quantization(QuantizationChoice("nf4", storage="bfloat16"), LLAMA, settings, torch.float32)
    assert found is not None and found.storage_dtype == found.compute_dtype == torch.bfloat16


def test_defaults_follow_the_engine_and_the_checkpoint() -> None:
    assert find_quantization(QuantizationChoice(), LLAMA, DDPSettings(), torch.float32) is None
    found = find_quantization(QuantizationChoice("nf4"), LLAMA, DDPSettings(), torch.bfloat16)
    assert found == Quantization("nf4", True, torch.bfloat16, torch.uint8)
    stored = with_stored(**BNB4, bnb_4bit_use_double_quant=True, llm_int8_skip_modules=["k_proj"])
    found = find_quantization(QuantizationChoice(), stored, DDPSettings(), torch.float32)
    assert found == Quantization("nf4", True, torch.float32, torch.uint8, ("k_proj",), is_stored=True)


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'hfpar\[quantization\]'"):
        find_quantization(QuantizationChoice("nf4"), LLAMA, DDPSettings(), torch.float32)


def test_a_device_without_a_backend_is_named() -> None:
    with pytest.raises(ConfigError, match="bitsandbytes has no working backend for meta"):
        choosing.check_device("nf4", torch.device("meta"))
    choosing.check_device("nf4", CPU)


def test_the_skeleton_of_a_quantized_model_is_a_transformers_model() -> None:
    model = skeleton(LLAMA, dtype=torch.float32)
    quantize_skeleton(model, Quantization("nf4"))
    assert type(model) is AutoModelForCausalLM._model_mapping[LlamaConfig]
