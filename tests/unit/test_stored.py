"""Checkpoints that hold experts one by one: read by slices, or refused in one line."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hfpar.errors import ConfigError
from hfpar.models.load import skeleton
from hfpar.models.stored import SafetensorsSource, WeightPart

NAME = "model.layers.0.mlp.experts.gate_up_proj"
STORED = "model.layers.0.mlp.experts.{}.{}_proj.weight"


@pytest.fixture
def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=12,
        num_experts_per_tok=2,
        pad_token_id=None,
        bos_token_id=None,
    )


@pytest.fixture
def folder(tmp_path: Path, config: Qwen3MoeConfig) -> Path:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    return tmp_path


def read(folder: Path, config: Qwen3MoeConfig) -> torch.Tensor:
    model = skeleton(config)
    source = SafetensorsSource(folder, model, [name for name, _ in model.named_parameters()])
    return source.read(source.find([NAME]), WeightPart(model.get_parameter(NAME), None, 0))


def test_experts_are_stacked_in_the_order_of_their_numbers(folder: Path, config: Qwen3MoeConfig) -> None:
    stored = load_file(folder / "model.safetensors")
    assert STORED.format(11, "up") in stored
    expected = [
        torch.cat([stored[STORED.format(expert, side)] for side in ("gate", "up")]) for expert in range(12)
    ]
    assert torch.equal(read(folder, config), torch.stack(expected))


@pytest.mark.parametrize(
    ("expert", "replacement", "message"),
    [
        (3, None, "doesn't hold each expert's matrices"),
        (11, None, "doesn't hold each expert's matrices"),
        (3, 12, "doesn't hold each expert's matrices"),
        (3, 3, "holds matrices of different shapes"),
    ],
    ids=["missing", "the last missing", "another number", "another shape"],
)
def test_a_matrix_that_is_not_there_is_told(
    folder: Path, config: Qwen3MoeConfig, expert: int, replacement: int | None, message: str
) -> None:
    stored = load_file(folder / "model.safetensors")
    matrix = stored.pop(STORED.format(expert, "up"))
    if replacement is not None:
        stored[STORED.format(replacement, "up")] = matrix[:4] if replacement == expert else matrix
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=message):
        read(folder, config)


def test_experts_of_another_number_than_the_model_has(folder: Path, config: Qwen3MoeConfig) -> None:
    config.num_experts = 11
    with pytest.raises(ConfigError, match=r"is \(12, 16, 16\) in .*, but \(11, 16, 16\) in the model"):
        read(folder, config)
