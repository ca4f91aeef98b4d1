"""What tensor parallelism cuts of each family, and what it refuses. Skeletons without weights; no processes."""

import re
from functools import cache
from typing import Any

import pytest
import torch
from peft import LoHaConfig, LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig

from hfpar.errors import ConfigError
from hfpar.models.load import skeleton
from hfpar.parallel import tensor
from hfpar.parallel.layout import Layout
from hfpar.parallel.plan import Heads, Plan, plan_model

BASE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 3,
    "moe_intermediate_size": 16,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
Shapes = dict[str, tuple[int, ...]]
ATTENTION: Shapes = {
    "self_attn.q_proj.weight": (16, 32),
    "self_attn.k_proj.weight": (8, 32),
    "self_attn.v_proj.weight": (8, 32),
    "self_attn.o_proj.weight": (32, 16),
}
ATTENTION_BIAS: Shapes = {
    "self_attn.q_proj.bias": (16,),
    "self_attn.k_proj.bias": (8,),
    "self_attn.v_proj.bias": (8,),
}
FEED_FORWARD: Shapes = {
    "mlp.gate_proj.weight": (24, 32),
    "mlp.up_proj.weight": (24, 32),
    "mlp.down_proj.weight": (32, 24),
}
FUSED_FEED_FORWARD: Shapes = {"mlp.gate_up_proj.weight": (48, 32), "mlp.down_proj.weight": (32, 24)}
EXPERTS: Shapes = {"mlp.experts.gate_up_proj": (3, 48, 32), "mlp.experts.down_proj": (3, 32, 24)}
DENSE = ("self_attn", "mlp")

FAMILIES: dict[str, tuple[str, dict[str, Any], Shapes, tuple[str, ...]]] = {
    # name: (model_type, changes, what tp 2 leaves of layer 1, its regions)
    "llama": ("llama", {}, ATTENTION | FEED_FORWARD, DENSE),
    "llama with biases": (
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        ATTENTION | ATTENTION_BIAS | FEED_FORWARD | {"mlp.gate_proj.bias": (24,), "mlp.up_proj.bias": (24,)},
        DENSE,
    ),
    "qwen3": ("qwen3", {"head_dim": 8}, ATTENTION | FEED_FORWARD, DENSE),
    "phi3": (
        "phi3",
        {},
        {"self_attn.qkv_proj.weight": (32, 32), "self_attn.o_proj.weight": (32, 16)} | FUSED_FEED_FORWARD,
        DENSE,
    ),
    "glm": ("glm", {"head_dim": 8}, ATTENTION | ATTENTION_BIAS | FUSED_FEED_FORWARD, DENSE),
    "olmo2": ("olmo2", {}, ATTENTION | FEED_FORWARD, DENSE),
    "cohere": (
        "cohere",
        {"use_qk_norm": True},
        ATTENTION | FEED_FORWARD | {"self_attn.q_norm.weight": (2, 8), "self_attn.k_norm.weight": (1, 8)},
        DENSE,
    ),
    "gpt_neox": (
        "gpt_neox",
        {"num_key_value_heads": 4},
        {
            "attention.query_key_value.weight": (48, 32),
            "attention.query_key_value.bias": (48,),
            "attention.dense.weight": (32, 16),
            "mlp.dense_h_to_4h.weight": (24, 32),
            "mlp.dense_h_to_4h.bias": (24,),
            "mlp.dense_4h_to_h.weight": (32, 24),
        },
        ("attention", "mlp"),
    ),
    "mixtral": ("mixtral", {"num_local_experts": 3}, ATTENTION | EXPERTS, ("self_attn", "mlp.experts")),
    "deepseek_v2": (
        "deepseek_v2",
        LATENT,
        {
            "self_attn.q_b_proj.weight": (20, 12),
            "self_attn.kv_b_proj.weight": (28, 8),
            "self_attn.o_proj.weight": (32, 16),
            "mlp.experts.gate_up_proj": (3, 16, 32),
            "mlp.experts.down_proj": (3, 32, 8),
            "mlp.shared_experts.gate_proj.weight": (16, 32),
            "mlp.shared_experts.up_proj.weight": (16, 32),
            "mlp.shared_experts.down_proj.weight": (32, 16),
        },
        ("self_attn", "mlp.experts", "mlp.shared_experts"),
    ),
    "gpt_oss": (
        "gpt_oss",
        {"num_local_experts": 3, "head_dim": 8},
        ATTENTION
        | ATTENTION_BIAS
        | {
            "self_attn.sinks": (2,),
            "mlp.experts.gate_up_proj": (3, 32, 48),
            "mlp.experts.gate_up_proj_bias": (3, 48),
            "mlp.experts.down_proj": (3, 24, 32),
        },
        ("self_attn", "mlp.experts"),
    ),
}
WITH_COPIES = [name for name in FAMILIES if name not in ("phi3", "gpt_neox", "deepseek_v2")]


@cache
def config_of(model_type: str, **changes: Any) -> Any:
    return AutoConfig.for_model(model_type, **BASE | changes)


@cache
def model_of(family: str) -> Any:
    model_type, changes, _, _ = FAMILIES[family]
    return skeleton(config_of(model_type, **changes))


def name_of(model: nn.Module, module: nn.Module, leaf: str = "") -> str:
    (name,) = (name for name, other in model.named_modules() if other is module)
    return f"{name}.{leaf}" if leaf else name


def local_shapes(model: nn.Module, plan: Plan) -> dict[str, tuple[int, ...]]:
    shapes = {}
    for owner, leaf, cut in plan.cuts:
        weight: Any = getattr(owner, leaf)
        shapes[name_of(model, owner, leaf)] = cut.local_shape(weight.shape)
    assert len(shapes) == len(plan.cuts)
    return shapes


# What is cut


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_cut_of_each_family(family: str) -> None:
    _, _, expected, regions = FAMILIES[family]
    model = model_of(family)
    plan = plan_model(model, 2)
    prefix = f"{model.base_model_prefix}.layers.1."
    shapes = local_shapes(model, plan)
    assert {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)} == expected
    outside = {name: shape for name, shape in shapes.items() if ".layers." not in name}
    embedding = name_of(model, model.get_input_embeddings(), "weight")
    assert outside == {embedding: (49, 32), "lm_head.weight": (49, 32)}
    found = [region for region in plan.regions if region.name.startswith("layers.1.")]
    assert tuple(region.name.removeprefix("layers.1.") for region in found) == regions
    for region in found:
        assert region.is_experts is region.name.endswith(".experts")
        assert region.leaves_from in region.module.modules()
        # Its sum leaves from what is cut along its input, experts as a whole.
        last = region.module if region.is_experts else region.leaves_from
        dims = [cut.dim for owner, _, cut in plan.cuts if owner is last]
        assert dims[-1] >= 1
    kv_heads = model.config.num_key_value_heads
    assert [heads for _, heads in plan.attentions] == [Heads(4, kv_heads)] * 2
    assert plan.attentions[0][1].local(2) == Heads(2, kv_heads // 2)
    assert plan.dropouts == []


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_large_stays_whole_but_what_is_meant_to(family: str) -> None:
    model = model_of(family)
    cut = local_shapes(model, plan_model(model, 2))
    whole = {name for name, p in model.named_parameters() if name not in cut and p.dim() > 1}
    kinds = {re.sub(r"^.*layers\.\d\.", "", name) for name in whole}
    assert kinds == {
        "mixtral": {"mlp.gate.weight"},
        "gpt_oss": {"mlp.router.weight", "mlp.experts.down_proj_bias"},
        "deepseek_v2": {
            "mlp.gate.weight",
            "self_attn.q_a_proj.weight",
            "self_attn.kv_a_proj_with_mqa.weight",
        },
    }.get(family, set())


@pytest.mark.parametrize("family", WITH_COPIES)
def test_neighbours_keep_copies_of_kv_heads_that_are_too_few(family: str) -> None:
    model = model_of(family)
    plan = plan_model(model, 4)
    copies = {name_of(model, owner, leaf): cut.copies for owner, leaf, cut in plan.cuts}
    for name, number in copies.items():
        is_kv = ".k_proj." in name or ".v_proj." in name or ".k_norm." in name
        assert number == (2 if is_kv else 1), name
    assert plan.attentions[0][1].local(4) == Heads(1, 1)
    shapes = local_shapes(model, plan)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (8, 32)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (8, 32)


def test_fused_matrices_are_cut_section_by_section() -> None:
    model = model_of("phi3")
    cuts = {name_of(model, owner, leaf): cut for owner, leaf, cut in plan_model(model, 2).cuts}
    qkv = cuts["model.layers.0.self_attn.qkv_proj.weight"]  # 32 rows of q, 16 of k, 16 of v
    assert qkv.ranges == (((0, 16), (32, 40), (48, 56)), ((16, 32), (40, 48), (56, 64)))
    gate_up = cuts["model.layers.0.mlp.gate_up_proj.weight"]
    assert gate_up.ranges == (((0, 24), (48, 72)), ((24, 48), (72, 96)))
    model = model_of("gpt_neox")  # q, k and v of a head stand together
    cuts = {name_of(model, owner, leaf): cut for owner, leaf, cut in plan_model(model, 2).cuts}
    assert cuts["gpt_neox.layers.0.attention.query_key_value.bias"].ranges == (((0, 48),), ((48, 96),))
    model = model_of("gpt_oss")  # a gate stands beside each up
    cuts = {name_of(model, owner, leaf): cut for owner, leaf, cut in plan_model(model, 4).cuts}
    assert cuts["model.layers.0.mlp.experts.gate_up_proj"].ranges[1] == ((24, 48),)


def test_norms_over_all_heads() -> None:
    model = model_of("olmo2")
    plan = plan_model(model, 4)
    norms = {name_of(model, norm): cut for norm, cut in plan.wide_norms}
    assert {name.removeprefix("model.layers.") for name in norms} == {
        f"{layer}.self_attn.{side}_norm" for layer in (0, 1) for side in "qk"
    }
    assert norms["model.layers.0.self_attn.q_norm"].copies == 1
    assert norms["model.layers.0.self_attn.k_norm"].copies == 2
    for family in ("qwen3", "cohere"):  # over each head
        assert plan_model(model_of(family), 4).wide_norms == []


@pytest.mark.parametrize(
    ("family", "once"),
    [
        ("llama", set()),
        ("llama with biases", {"self_attn.o_proj.bias", "mlp.down_proj.bias"}),
        ("gpt_neox", {"attention.dense.bias", "mlp.dense_4h_to_h.bias"}),
        ("gpt_oss", {"self_attn.o_proj.bias", "mlp.experts.down_proj_bias"}),
    ],
)
def test_biases_of_a_sum_are_added_once(family: str, once: set[str]) -> None:
    model = model_of(family)
    names = {name_of(model, owner, leaf) for owner, leaf in plan_model(model, 2).once}
    assert names == {f"{model.base_model_prefix}.layers.{n}.{leaf}" for n in (0, 1) for leaf in once}


def lora(model: Any, **options: Any) -> Any:
    return get_peft_model(model, LoraConfig(**{"r": 4, "target_modules": "all-linear"} | options))


def make_model(model_type: str = "llama", **changes: Any) -> Any:
    return skeleton(config_of(model_type, **changes))


def test_half_of_each_adapter_is_cut() -> None:
    model = lora(make_model(attention_bias=True), lora_dropout=0.1, lora_bias=True)
    plan = plan_model(model.get_base_model(), 2)
    shapes = {
        name.removeprefix("base_model.model.model.layers.0."): shape
        for name, shape in local_shapes(model, plan).items()
    }
    adapters = {
        name: shape for name, shape in shapes.items() if "lora_" in name and not name.startswith("base")
    }
    columns = {"self_attn.q_proj": 16, "self_attn.k_proj": 8, "self_attn.v_proj": 8}
    columns |= {"mlp.gate_proj": 24, "mlp.up_proj": 24}
    rows = {"self_attn.o_proj": 16, "mlp.down_proj": 24}
    assert adapters == (
        {f"{name}.lora_B.default.weight": (size, 4) for name, size in columns.items()}
        | {f"{name}.lora_B.default.bias": (size,) for name, size in columns.items()}
        | {f"{name}.lora_A.default.weight": (4, size) for name, size in rows.items()}
    )
    assert shapes["self_attn.q_proj.base_layer.weight"] == (16, 32)
    once = {name_of(model, owner, leaf) for owner, leaf in plan.once}
    start = "base_model.model.model.layers.0."
    assert {name.removeprefix(start) for name in once if name.startswith(start)} == {
        "self_attn.o_proj.base_layer.bias",
        "self_attn.o_proj.lora_B.default.bias",
        "mlp.down_proj.lora_B.default.bias",
    }
    dropouts = {name_of(model, dropout): cut.size for dropout, cut in plan.dropouts}
    assert {name.removeprefix(start): size for name, size in dropouts.items() if name.startswith(start)} == {
        "self_attn.o_proj.lora_dropout.default": 32,
        "mlp.down_proj.lora_dropout.default": 48,
    }


def test_both_copies_of_a_module_that_is_trained_whole_are_cut() -> None:
    model = lora(make_model(), modules_to_save=["lm_head", "embed_tokens"])
    shapes = local_shapes(model, plan_model(model.get_base_model(), 4))
    for name in ("model.embed_tokens", "lm_head"):
        for copy in ("original_module", "modules_to_save.default"):
            assert shapes[f"base_model.model.{name}.{copy}.weight"] == (25, 32)


def test_an_adapter_on_the_head_is_cut_by_words() -> None:
    model = lora(make_model(), target_modules=["lm_head"])
    shapes = local_shapes(model, plan_model(model.get_base_model(), 2))
    assert {name: shape for name, shape in shapes.items() if "lm_head" in name} == {
        "base_model.model.lm_head.base_layer.weight": (49, 32),
        "base_model.model.lm_head.lora_B.default.weight": (49, 4),
    }


# What is refused, before weights load


def layout_of(tp_size: int, sp_size: int = 1, **options: Any) -> Layout:
    return Layout(0, tp_size * sp_size, tp_size=tp_size, sp_size=sp_size, **options)


def refusal_of(config: Any, layout: Layout) -> str:
    with pytest.raises(ConfigError) as caught:
        tensor.check_tensor(config, layout)
    line = str(caught.value)
    assert "\n" not in line
    return line


SIZE_CASES: dict[str, tuple[str, dict[str, Any], int, str, str]] = {
    # name: (model_type, changes, tp_size, what doesn't divide, what works)
    "heads": ("llama", {}, 3, "4 attention heads", "1 or 2 or 4"),
    "more ranks than heads": ("llama", {}, 8, "4 attention heads", "1 or 2 or 4"),
    "heads of 9": (
        "llama",
        {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 36},
        2,
        "9 attention heads",
        "1 or 3 or 9",
    ),
    "kv heads": (
        "llama",
        {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 3},
        4,
        "3 key-value heads",
        "1 or 3 or 6 or 12",
    ),
    "kv heads in one matrix": ("phi3", {}, 4, "2 key-value heads in one matrix with the queries", "1 or 2"),
    "intermediate size": (
        "llama",
        {"intermediate_size": 30},
        4,
        "intermediate size (layers.0.mlp.gate_proj) of 30",
        "1 or 2",
    ),
    "intermediate size in one matrix": (
        "glm",
        {"head_dim": 8, "intermediate_size": 30},
        4,
        "intermediate size (layers.0.mlp.gate_up_proj) of 30",
        "1 or 2",
    ),
    "intermediate size without a gate": (
        "gpt_neox",
        {"num_key_value_heads": 4, "intermediate_size": 31},
        2,
        "intermediate size (layers.0.mlp.dense_h_to_4h) of 31",
        "1",
    ),
    "expert size": (
        "mixtral",
        {"num_local_experts": 3, "intermediate_size": 30},
        4,
        "expert size (layers.0.mlp.experts.gate_up_proj) of 30",
        "1 or 2",
    ),
    "expert size, gates beside ups": (
        "gpt_oss",
        {"num_local_experts": 3, "head_dim": 8, "intermediate_size": 30},
        4,
        "expert size (layers.0.mlp.experts.gate_up_proj) of 30",
        "1 or 2",
    ),
}


@pytest.mark.parametrize("name", SIZE_CASES)
def test_sizes_that_do_not_divide_are_refused_with_those_that_do(name: str) -> None:
    model_type, changes, tp_size, what, working = SIZE_CASES[name]
    config = config_of(model_type, **changes)
    line = refusal_of(config, layout_of(tp_size))
    assert line == f"tp_size: {tp_size} doesn't divide the model's {what}; it can be {working}"
    offered = {int(size) for size in working.split(" or ")}
    model = skeleton(config)
    for size in range(2, 25):
        if size in offered:
            tensor.check_sizes(model, layout_of(size))
            for owner, leaf, cut in plan_model(model, size).cuts:
                weight: Any = getattr(owner, leaf)
                assert cut.size == weight.shape[cut.dim]
                kept = [sum(last - first for first, last in ranges) for ranges in cut.ranges]
                assert len(kept) == size and sum(kept) == cut.size * cut.copies
        else:
            with pytest.raises(ConfigError, match=f"^tp_size: {size} doesn't divide"):
                tensor.check_sizes(model, layout_of(size))


def test_a_model_without_a_plan() -> None:
    line = "tp_size: Transformers has no tensor-parallel plan for the layers of gpt2; leave tp_size at 1"
    assert refusal_of(AutoConfig.for_model("gpt2"), layout_of(2)) == line


def with_plan(plan: dict[str, str], **changes: Any) -> Any:
    config = AutoConfig.for_model("llama", **BASE | changes)
    config.base_model_tp_plan = plan
    return config


ROWS_AND_COLUMNS = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise"}


def test_a_style_that_is_not_known() -> None:
    config = with_plan({"layers.*.mlp.up_proj": "sequence_parallel"})
    assert refusal_of(config, layout_of(2)) == (
        "tp_size: llama plans sequence_parallel for layers.*.mlp.up_proj, which hfpar doesn't have; leave tp_size at 1"
    )


def test_plans_that_are_not_regions() -> None:
    line = "tp_size: llama plans 0 row-parallel layers in layers.0.mlp, which hfpar can't cut; leave tp_size at 1"
    assert refusal_of(with_plan(ROWS_AND_COLUMNS), layout_of(2)) == line
    nested = {"layers.*.mlp.down_proj": "rowwise", "layers.*.mlp.act_fn.up": "rowwise"}
    model = skeleton(with_plan(nested))
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.ModuleDict({"up": nn.Linear(48, 48, device="meta")})
    with pytest.raises(ConfigError, match=r"plans layers\.0\.mlp\.act_fn within layers\.0\.mlp, which"):
        plan_model(model, 2)


@pytest.mark.parametrize("tp_size", [2, 4])
def test_attention_dropout(tp_size: int) -> None:
    config = config_of("llama", attention_dropout=0.1)
    assert refusal_of(config, layout_of(tp_size)) == (
        f"tp_size: {tp_size} with the model's attention dropout of 0.1, whose draws would be the same for heads of "
        "different ranks; set it to 0 in the model's config.json, or use sp_size"
    )
    tensor.check_tensor(config, layout_of(1))


def test_dropout_where_tokens_are_sharded() -> None:
    config = config_of("gpt_neox", num_key_value_heads=4, hidden_dropout=0.2)
    assert refusal_of(config, layout_of(2, tp_sequence=True)) == (
        "tp_sequence: true with the model's hidden_dropout of 0.2, whose draws would be the same for tokens of "
        "different ranks; set it to 0 in the model's config.json, or leave tp_sequence out"
    )
    tensor.check_tensor(config, layout_of(2))
    config = config_of("mixtral", num_local_experts=3, router_jitter_noise=0.1)
    assert "the model's router_jitter_noise of 0.1" in refusal_of(config, layout_of(2, tp_sequence=True))


def test_an_adapters_dropout_where_tokens_are_sharded() -> None:
    model = lora(make_model("qwen2_moe", num_experts=3, moe_intermediate_size=8), lora_dropout=0.3)
    line = r"dropout of 0.3 in model.layers.\d.mlp.shared_expert\S*, .* set lora_dropout to 0, or leave tp_sequence out"
    with pytest.raises(ConfigError, match=line):
        tensor.check_sizes(model.get_base_model(), layout_of(2, tp_sequence=True))
    tensor.check_sizes(model.get_base_model(), layout_of(2))


@pytest.mark.parametrize("copied", ["self_attn", "mlp"])
def test_copies_that_hide_what_is_planned(copied: str) -> None:
    model = lora(make_model(), target_modules=["lm_head"], modules_to_save=[copied])
    with pytest.raises(
        ConfigError, match=rf"^modules_to_save: hfpar can't cut a copy of layers.0.{copied}; name"
    ):
        plan_model(model.get_base_model(), 2)
    plan_model(lora(make_model(), modules_to_save=["q_proj", "down_proj", "norm"]).get_base_model(), 2)


def test_copies_of_norms_of_heads_are_cut() -> None:
    model = lora(make_model("cohere", use_qk_norm=True), modules_to_save=["q_norm"])
    plan = plan_model(model.get_base_model(), 2)
    cut = [name_of(model, owner, leaf) for owner, leaf, _ in plan.cuts]
    kept = [name for name in cut if "layers.0.self_attn.q_norm" in name]
    assert [name.partition("q_norm.")[2] for name in kept] == [
        "original_module.weight",
        "modules_to_save.default.weight",
    ]


def test_a_plan_of_other_layers() -> None:
    config = with_plan({"blocks.*.attn.q_proj": "colwise"})
    line = (
        "tp_size: llama has a plan that names none of its layers, which hfpar can't cut; leave tp_size at 1"
    )
    assert refusal_of(config, layout_of(2)) == line


def test_tokens_can_not_be_sharded_around_attention_that_is_not_planned() -> None:
    config = with_plan(ROWS_AND_COLUMNS | {"layers.*.mlp.down_proj": "rowwise"})
    assert refusal_of(config, layout_of(2, tp_sequence=True)) == (
        "tp_sequence: true, but llama has no plan for its attention, which would see a rank's tokens alone; leave "
        "tp_sequence out"
    )
    tensor.check_tensor(config, layout_of(2))


@pytest.mark.parametrize(("tp_size", "sp_size", "left"), [(2, 3, 2), (2, 4, 2), (4, 2, 1)])
def test_ranks_that_share_a_stream_have_a_head_each(tp_size: int, sp_size: int, left: int) -> None:
    config = config_of("llama")
    assert refusal_of(config, layout_of(tp_size, sp_size)) == (
        f"sp_size: {sp_size} ranks share the {left} attention heads that tp_size {tp_size} leaves each of them, so "
        f"that some would have none; use sp_size {left} or less, and cp_size for more ranks"
    )
    tensor.check_tensor(config, layout_of(tp_size, left))


def test_families_that_can_be_cut_are_let_through() -> None:
    for family, (model_type, changes, _, _) in FAMILIES.items():
        config = config_of(model_type, **changes)
        tensor.check_tensor(config, layout_of(2))
        tensor.check_tensor(config, layout_of(2, tp_sequence=True))
        assert not [p for p in model_of(family).parameters() if not p.is_meta]


# Adapters, and models that are cut already


def test_adapters_that_can_not_be_cut() -> None:
    models = {
        "DoRA": lora(make_model(), use_dora=True, init_lora_weights=False),
        "LORA with trainable_token_indices": lora(make_model(), trainable_token_indices=[1, 2]),
        "LORA with target_parameters": lora(
            make_model("mixtral", num_local_experts=3),
            target_modules=["q_proj"],
            target_parameters=["mlp.experts.gate_up_proj"],
        ),
        "LOHA": get_peft_model(make_model(), LoHaConfig(r=2, target_modules=["q_proj"])),
    }
    for kind, model in models.items():
        with pytest.raises(ConfigError) as caught:
            tensor.apply(model, layout_of(2))
        assert str(caught.value) == (
            f"tp_size: hfpar can't cut {kind} adapters; use plain LoRA, or leave tp_size at 1"
        )


@pytest.mark.parametrize("name", ["embed_tokens", "q_proj"])
def test_adapters_of_other_layers_than_linear_ones(name: str) -> None:
    options = {} if name == "embed_tokens" else {"use_dora": True, "init_lora_weights": False}
    model = lora(make_model(), target_modules=[name], **options)
    kind = "Embedding" if name == "embed_tokens" else "DoRA"
    with pytest.raises(ConfigError, match=f"^tp_size: hfpar can't cut {kind} adapters; use plain LoRA"):
        plan_model(model.get_base_model(), 2)


def test_one_rank_changes_nothing() -> None:
    model = make_model()
    before = {name: p.shape for name, p in model.named_parameters()}
    assert tensor.apply(model, layout_of(1)) == []
    assert {name: p.shape for name, p in model.named_parameters()} == before
    tensor.check_tensor(AutoConfig.for_model("gpt2"), layout_of(1))


def test_planning_needs_no_weights_and_changes_none() -> None:
    model = make_model()
    before = dict(model.named_parameters())
    plan_model(model, 4)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert torch.empty(0, device="meta").is_meta and all(p.is_meta for p in model.parameters())
