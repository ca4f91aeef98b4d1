"""Patching a model for sequence parallelism, what is refused, and the slices of a stream, without processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hfpar
from hfpar.attention import interface
from hfpar.attention.placement import place
from hfpar.attention.sharded import StreamSharding
from hfpar.data.stream import IGNORE_INDEX, Sample, build_stream
from hfpar.errors import ConfigError, HfparError
from hfpar.parallel import sequence
from hfpar.parallel.layout import Layout

ALONE = Layout(rank=0, world_size=1)
SP2 = Layout(rank=0, world_size=2, sp_size=2)
CP2 = Layout(rank=0, world_size=2, cp_size=2)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}


def make_llama(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes)).eval()


def with_lora(model: Any) -> Any:
    import peft

    return peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))


# What is refused before anything loads


@pytest.mark.parametrize("layout", [SP2, CP2, Layout(rank=3, world_size=8, cp_size=2, sp_size=4)])
def test_models_of_attention_pass(layout: Layout) -> None:
    for config in (
        transformers.LlamaConfig(**SIZES),
        transformers.Gemma2Config(),
        transformers.Gemma3Config(),  # the text part counts
        transformers.GptOssConfig(),
        transformers.Cohere2Config(),
        transformers.SmolLM3Config(),
        transformers.DeepseekV3Config(),
    ):
        sequence.check_sequence(config, layout)


def test_more_ranks_than_heads() -> None:
    config = transformers.LlamaConfig(**SIZES)
    sequence.check_sequence(config, Layout(rank=0, world_size=4, sp_size=4))
    sequence.check_sequence(config, Layout(rank=0, world_size=8, cp_size=8))
    with pytest.raises(ConfigError) as caught:
        sequence.check_sequence(config, Layout(rank=0, world_size=5, sp_size=5))
    assert str(caught.value) == (
        "sp_size: 5 ranks share the model's 4 attention heads, so that some would have none; use sp_size 4 or less, "
        "and cp_size for more ranks"
    )


def test_the_layer_with_the_fewest_heads_decides() -> None:
    config = transformers.PretrainedConfig(num_attention_heads=[4, 2])
    sequence.check_sequence(config, SP2)
    with pytest.raises(ConfigError, match="share the model's 2 attention heads"):
        sequence.check_sequence(config, Layout(rank=0, world_size=3, sp_size=3))


class LayerByLayer(transformers.PretrainedConfig):
    """As Transformers' configs of layers that differ: they don't answer for all layers at once."""

    per_layer_config = {
        n: transformers.PretrainedConfig(num_attention_heads=heads) for n, heads in enumerate((4, 2))
    }

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("may vary across layers")


def test_heads_that_only_each_layer_knows() -> None:
    sequence.check_sequence(LayerByLayer(), SP2)
    with pytest.raises(ConfigError, match="share the model's 2 attention heads"):
        sequence.check_sequence(LayerByLayer(), Layout(rank=0, world_size=3, sp_size=3))


REFUSED = {
    "MambaConfig": "mamba has layers of type linear_attention",
    "RwkvConfig": "rwkv has no attention heads",
    "JambaConfig": "jamba has layers of type linear_attention",
    "BambaConfig": "bamba has layers of type linear_attention",
    "FalconH1Config": "falcon_h1 has layers of type hybrid",
    "Qwen3NextConfig": "qwen3_next has layers of type linear_attention",
    "MiniMaxConfig": "minimax has layers of type linear_attention",
    "RecurrentGemmaConfig": "recurrent_gemma has layers of type ",
    "Llama4TextConfig": "llama4_text has layers of type chunked_attention",
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_that_are_not_attention_of_a_known_kind(name: str) -> None:
    config = getattr(transformers, name)()
    sequence.check_sequence(config, ALONE)
    for layout, sizes in (
        (SP2, "sp_size"),
        (CP2, "cp_size"),
        (Layout(rank=0, world_size=4, cp_size=2, sp_size=2), "cp_size and sp_size"),
    ):
        with pytest.raises(ConfigError) as caught:
            sequence.check_sequence(config, layout)
        assert str(caught.value).startswith(f"{sizes}: {REFUSED[name]}")
        assert str(caught.value).endswith(f"so ranks can't share its streams; leave {sizes} at 1")


def test_attention_dropout_in_a_ring() -> None:
    for config in (
        transformers.LlamaConfig(**SIZES, attention_dropout=0.1),
        transformers.GPT2Config(attn_pdrop=0.1),
    ):
        sequence.check_sequence(config, SP2)
        with pytest.raises(
            ConfigError, match="^cp_size: 2 with the model's attention dropout of 0.1; .*, or use sp_"
        ):
            sequence.check_sequence(config, CP2)
    sequence.check_sequence(transformers.GPT2Config(attn_pdrop=0.0), CP2)


# The patch


def outputs_of(model: Any) -> dict[str, Any]:
    """What a model does for people who never heard of a stream."""
    ids = torch.arange(3, 23).view(2, 10) % 64
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    labels = ids.clone()
    labels[0, :5] = IGNORE_INDEX  # what padding predicts is anybody's guess
    with torch.no_grad():
        padded = model(input_ids=ids, attention_mask=mask, labels=labels)
        plain = model(input_ids=ids)
        tokens = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
    return {"loss": padded.loss, "logits": plain.logits, "padded": padded.logits[mask == 1], "tokens": tokens}


def assert_same(found: dict[str, Any], expected: dict[str, Any], *, exactly: bool) -> None:
    for name, value in expected.items():
        if exactly:
            assert torch.equal(found[name], value), name
        torch.testing.assert_close(found[name], value, msg=name)


@pytest.mark.parametrize("attn_implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("wrap", [lambda model: model, with_lora], ids=["full", "lora"])
@pytest.mark.parametrize("layout", [SP2, CP2], ids=["sp2", "cp2"])
def test_calls_without_a_slice_stay_what_they_were(
    layout: Layout, wrap: Any, attn_implementation: str
) -> None:
    """Also generation, also padded on the left; and undoing leaves nothing, so that it can be done again."""
    model = wrap(make_llama(attn_implementation=attn_implementation))
    hooks = lambda: (len(model._forward_hooks), len(model._forward_pre_hooks))  # noqa: E731
    before, hooks_before = outputs_of(model), hooks()
    attributes = set(vars(model.get_base_model() if wrap is with_lora else model))
    for _ in range(2):
        patch = sequence.apply(model, layout)
        size = "cp 1 x sp 2" if layout is SP2 else "cp 2 x sp 1"
        assert patch.changes == [
            f"LlamaForCausalLM: attention implementation {attn_implementation} -> hfpar",
            f"{type(model).__name__}: hooks that check that all 2 layers attend over {size} ranks",
        ]
        assert model.config._attn_implementation == "hfpar"
        assert hooks() == (hooks_before[0] + 1, hooks_before[1] + 1)
        assert_same(outputs_of(model), before, exactly=False)
        patch.undo()
        assert model.config._attn_implementation == attn_implementation
        assert hooks() == hooks_before and patch.changes == []
        assert set(vars(model.get_base_model() if wrap is with_lora else model)) == attributes
        assert_same(outputs_of(model), before, exactly=True)
        patch.undo()  # nothing more to undo


def test_an_attention_of_hfpar_stays() -> None:
    interface.register()
    model = make_llama(attn_implementation=interface.interface_name("sdpa"))
    patch = sequence.apply(model, SP2)
    (change,) = patch.changes
    assert change.startswith("LlamaForCausalLM: hooks")
    assert model.config._attn_implementation == interface.interface_name("sdpa")
    patch.undo()
    assert model.config._attn_implementation == interface.interface_name("sdpa")
    assert sequence.apply(model, ALONE).changes == []


@pytest.mark.parametrize("layout", [ALONE, SP2], ids=["alone", "sp2"])
def test_twice_is_an_error(layout: Layout) -> None:
    model = make_llama()
    patch = sequence.apply(model, layout)
    with pytest.raises(ConfigError, match="^LlamaForCausalLM is patched .* already; undo that first"):
        sequence.apply(model, layout)
    with pytest.raises(ConfigError, match="^LlamaForCausalLM is patched .* already; undo that first"):
        sequence.apply(with_lora(model), layout)
    patch.undo()
    sequence.apply(model, layout)


@pytest.mark.parametrize("layout", [ALONE, SP2], ids=["alone", "sp2"])
def test_a_model_that_hfpar_does_not_know(layout: Layout) -> None:
    with pytest.raises(ConfigError, match="^Linear isn't a Transformers model"):
        sequence.apply(torch.nn.Linear(2, 2), layout)
    config = transformers.BloomConfig(hidden_size=16, n_layer=1, n_head=2, vocab_size=32)
    with pytest.raises(
        ConfigError, match="^BloomForCausalLM's attention doesn't go through .*AttentionInterface"
    ):
        sequence.apply(transformers.BloomForCausalLM(config), layout)
    config = transformers.MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=32)
    with pytest.raises(ConfigError, match="(Mamba|mamba).* has layers of type linear"):
        sequence.apply(transformers.MambaForCausalLM(config), layout)


def test_alone_a_stream_of_documents_comes_out_right_too() -> None:
    """Transformers' own attention of GPT-OSS looks across the documents of a packed row."""
    config = transformers.GptOssConfig(
        **SIZES | {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 4}
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager").eval()
    documents = [torch.arange(3, 12)[None], torch.arange(20, 33)[None]]
    with torch.no_grad():
        expected = [model(input_ids=document).logits for document in documents]
        patch = sequence.apply(model, ALONE)
        assert patch.changes == ["GptOssForCausalLM: attention implementation eager -> hfpar"]
        position_ids = torch.cat([torch.arange(9), torch.arange(13)])[None]
        batch = {"input_ids": torch.cat(documents, dim=1), "position_ids": position_ids}
        logits = model(**ALONE.shard(batch)).logits
    torch.testing.assert_close(logits, torch.cat(expected, dim=1))


# What a call is checked for


def own_stream(*lengths: int) -> dict[str, Any]:
    """The arguments of a call whose rank has the whole stream, but as if it were one of several."""
    stream = build_stream([Sample([1] * length, [1] * length) for length in lengths])
    sharding = StreamSharding(place(lengths, 1, 1), 0, 1, None, None)
    arguments = interface.stream_arguments(stream.cu_seqlens, sharding)
    return {"input_ids": stream.input_ids, "position_ids": stream.position_ids, **arguments}


def test_a_layer_that_drops_the_arguments_is_noticed() -> None:
    model = make_llama()
    patch = sequence.apply(model, SP2)
    model(**own_stream(5, 3))
    layer = model.model.layers[1]
    forward = layer.forward
    dropped = ("stream_sharding", "cu_seq_lens_q", "document_lengths")
    layer.forward = lambda hidden, **kwargs: forward(
        hidden, **{name: value for name, value in kwargs.items() if name not in dropped}
    )
    with pytest.raises(HfparError, match="^LlamaForCausalLM: 1 of 2 layers attended over the whole stream; "):
        model(**own_stream(5, 3))
    patch.undo()
    model(**own_stream(5, 3))


def test_each_call_counts_anew() -> None:
    """One stream object may go through the model more than once, as gradient checkpointing and some loops do."""
    model = make_llama()
    sequence.apply(model, SP2)
    arguments = own_stream(5, 3)
    model(**arguments)
    assert arguments["stream_sharding"].attention_calls == 2
    model(**arguments)
    assert arguments["stream_sharding"].attention_calls == 2


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}


@pytest.mark.parametrize(
    ("kind", "rope", "bound"),
    [("longrope", LONGROPE, 16), ("dynamic", DYNAMIC, 64)],
    ids=["longrope", "dynamic"],
)
def test_rotary_factors_that_a_slice_does_not_show(kind: str, rope: dict[str, Any], bound: int) -> None:
    model = make_llama(rope_parameters=rope)
    sequence.apply(model, SP2)
    model(**own_stream(bound, 5))
    with pytest.raises(ConfigError) as caught:
        model(**own_stream(5, bound + 1))
    assert str(caught.value) == (
        f"LlamaForCausalLM: a document of {bound + 1} tokens, but the model's {kind} computes those above {bound} in "
        "another way, which ranks that share one can't tell from their slices; leave out documents of more than "
        f"{bound} tokens, or sp_size and cp_size"
    )
    model(input_ids=torch.ones(1, bound + 1, dtype=torch.long))  # not a slice


def test_compiled() -> None:
    """As much of a model as torch compiles: attention stays outside."""
    model = make_llama(num_hidden_layers=1)
    sequence.apply(model, SP2)
    gradients = []
    for call in (model, torch.compile(model, backend="eager")):
        model.zero_grad()
        arguments = own_stream(5, 3)
        call(**arguments, labels=arguments["input_ids"]).loss.backward()
        assert arguments["stream_sharding"].attention_calls == 1
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0])


# The slices


@pytest.fixture
def without_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("cp_group", "sp_group"):
        monkeypatch.setattr(Layout, name, None)
    yield


def all_layouts() -> list[tuple[int, int]]:
    return [(1, 2), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]


@pytest.mark.parametrize("sizes", all_layouts(), ids=lambda sizes: f"cp{sizes[0]}sp{sizes[1]}")
@pytest.mark.parametrize("lengths", [(1,), (7,), (17,), (3, 17, 1, 8), (1, 1), (5, 40, 2, 2, 2, 9)])
def test_the_slices_are_the_stream(
    without_groups: None, sizes: tuple[int, int], lengths: tuple[int, ...]
) -> None:
    """Each token on one rank, with its own position and the target it has in the whole document."""
    cp_size, sp_size = sizes
    first, samples = 100, []
    for length in lengths:
        tokens = list(range(first, first + length))
        samples.append(Sample(tokens, [IGNORE_INDEX if token % 3 == 0 else token for token in tokens]))
        first += length
    stream = build_stream(samples)
    world = cp_size * sp_size
    shards = [
        sequence.shard_stream(stream, Layout(rank, world, cp_size=cp_size, sp_size=sp_size))
        for rank in range(world)
    ]
    expected = {
        token: (position, label)
        for token, position, label in zip(
            stream.input_ids[0].tolist(),
            stream.position_ids[0].tolist(),
            stream.labels[0].tolist(),
            strict=True,
        )
    }
    found, padding = {}, 0
    for rank, shard in enumerate(shards):
        assert shard.input_ids.shape == shard.position_ids.shape == shard.labels.shape
        assert shard.input_ids.shape == shards[0].input_ids.shape
        assert shard.sharding is not None
        ranges = shard.sharding.placement.ranges(rank // sp_size)
        index = [token for start, stop in ranges for token in range(start, stop)]
        index = index[rank % sp_size * len(index) // sp_size :][: len(index) // sp_size]
        rows = (
            index,
            *(values[0].tolist() for values in (shard.input_ids, shard.position_ids, shard.labels)),
        )
        real = 0
        for place_in_stream, token, position, label in zip(*rows, strict=True):
            if place_in_stream < stream.num_tokens:
                found[token] = (position, label)
                real += 1
            else:
                padding += 1
                assert label == IGNORE_INDEX and token in expected  # one that has an embedding
        assert shard.num_tokens == real
        assert shard.num_label_tokens == int((shard.labels != IGNORE_INDEX).sum())
    assert found == expected
    assert sum(shard.num_tokens for shard in shards) == stream.num_tokens
    assert sum(shard.num_label_tokens for shard in shards) == stream.num_label_tokens
    assert padding == -len(expected) % world


def test_a_rank_without_samples_counts_none(without_groups: None) -> None:
    stream = build_stream([])
    for rank in range(4):
        shard = sequence.shard_stream(stream, Layout(rank, 4, cp_size=2, sp_size=2))
        assert (shard.num_tokens, shard.num_label_tokens, shard.input_ids.tolist()) == (0, 0, [[0]])


def test_the_arguments_are_those_of_the_whole_stream(without_groups: None) -> None:
    stream = build_stream([Sample([1] * 7, [1] * 7), Sample([2] * 4, [2] * 4)])
    shard = sequence.shard_stream(stream, Layout(1, 4, sp_size=4))
    arguments = shard.arguments(torch.device("cpu"))
    assert arguments["cu_seq_lens_q"].tolist() == [0, 7, 11, 12]
    assert arguments["document_lengths"] == (7, 4, 1)
    assert arguments["max_length_q"] == 7
    assert arguments["position_ids"].tolist() == [[3, 4, 5]]


def test_what_the_package_offers() -> None:
    assert hfpar.Layout is Layout
    assert set(hfpar.__all__) == {"Layout", "__version__", "parallelize"}
    with pytest.raises(AttributeError, match="no attribute 'shard'"):
        _ = hfpar.shard
    assert Path(hfpar.__file__).name == "__init__.py"


def test_layers_that_ranks_share_are_refused_in_loops_of_ones_own() -> None:
    with pytest.raises(
        ConfigError, match="tp_size: 2 in a loop of one's own isn't supported yet; use sft/train.py"
    ):
        hfpar.parallelize(torch.nn.Linear(2, 2), Layout(rank=0, world_size=2, tp_size=2))


def test_an_adapters_copy_of_an_attention_layer_is_patched_too() -> None:
    from peft import LoraConfig, get_peft_model

    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model = get_peft_model(model, LoraConfig(target_modules=["up_proj"], modules_to_save=["self_attn"]))

    def implementations() -> set[str]:
        return {module.config._attn_implementation for module in model.modules() if hasattr(module, "config")}

    assert implementations() == {"sdpa"}
    patch = sequence.apply(model, ALONE)
    assert implementations() == {"hfpar"}
    patch.undo()
    assert implementations() == {"sdpa"}


def test_a_router_loss_is_refused_by_name() -> None:
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_experts=2, moe_intermediate_size=8, output_router_logits=True
    )
    with pytest.raises(ConfigError, match="output_router_logits: true"):
        sequence.apply(transformers.Qwen3MoeForCausalLM(config), ALONE)


def test_tokens_that_an_adapter_adds_are_refused_by_name() -> None:
    from peft import PrefixTuningConfig, TaskType, get_peft_model

    model = get_peft_model(
        make_llama(), PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=4)
    )
    with pytest.raises(ConfigError, match="^PREFIX_TUNING adds tokens"):
        sequence.apply(model, ALONE)


def test_a_family_that_comes_out_wrong_is_refused_in_loops_of_ones_own() -> None:
    """Its positions start elsewhere; nothing is left of the patch."""
    config = transformers.RobertaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=32, is_decoder=True
    )
    model = transformers.RobertaForCausalLM(config)
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="roberta comes out wrong"):
        hfpar.parallelize(model, ALONE)
    assert model.config._attn_implementation == before
    assert hfpar.parallelize(make_llama(), ALONE).changes != []


@pytest.mark.parametrize(
    "sizes", [{"sp_size": 0}, {"sp_size": -1}, {"cp_size": 2.0}, {"cp_size": -1, "sp_size": -1}]
)
def test_sizes_that_cannot_be(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be a whole number of at least 1"):
        Layout(rank=0, world_size=4, **sizes)


def test_sizes_before_there_is_a_process_group() -> None:
    with pytest.raises(ConfigError, match="make it first"):
        Layout.of_world(sp_size=2)


def attend_within_a_ring(num_keys: int, dropout: float) -> None:
    sharding = StreamSharding(place([8], 2, 1), 0, 1, cp_group=object(), sp_group=None)  # type: ignore[arg-type]
    states = torch.zeros(1, 1, num_keys, 8)
    interface.attention_forward(
        torch.nn.Module(),
        states[:, :, :4],
        states,
        states,
        None,
        dropout=dropout,
        cu_seq_lens_q=torch.tensor([0, 8]),
        stream_sharding=sharding,
    )


def test_dropout_by_any_name_is_refused_within_a_ring() -> None:
    with pytest.raises(ConfigError, match="^cp_size: 2 with attention dropout of 0.1"):
        attend_within_a_ring(4, 0.1)


def test_keys_that_are_not_of_the_slice_are_refused() -> None:
    with pytest.raises(HfparError, match="4 queries and 6 keys, but the slice of the stream has 4 tokens"):
        attend_within_a_ring(6, 0.0)
