"""Which tokens count as never trained, and what is done about them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hfpar.config.schema import SFTConfig
from hfpar.data.stream import Sample
from hfpar.errors import ConfigError
from hfpar.models.adapters import LoraChoices, add_adapters
from hfpar.models.load import load_model_config, load_tokenizer, skeleton
from hfpar.models.stored import SafetensorsSource
from hfpar.models.tiny import build_tiny_model
from hfpar.models.token_matrices import Usual, tokens_in_use, why_untrained
from hfpar.parallel.layout import Layout
from hfpar.train import untrained_tokens
from hfpar.train.model import ModelSource, TokenRows
from hfpar.train.untrained_tokens import choose_rows

CONFIG = SFTConfig(lora_r=4)
ALONE = Layout(rank=0, world_size=1)
PAD, START, END = 0, 1, 2


# One row


def vocabulary(spread: float, size: int = 4000) -> torch.Tensor:
    """Norms around 3."""
    generator = torch.Generator().manual_seed(0)
    return 3 * (spread * torch.randn(size, generator=generator)).exp()


def row(norm: float, seed: int = 0) -> torch.Tensor:
    direction = torch.randn(64, generator=torch.Generator().manual_seed(seed))
    return norm * direction / direction.norm()


@pytest.mark.parametrize(
    ("norm", "spread", "reason"),
    [
        (0.0, 0.2, "rows of zeros"),
        (1e-9, 0.2, "rows of zeros"),  # Llama 3's reserved tokens are about so
        (0.6, 0.2, "norms far from the vocabulary's 3"),
        (30.0, 0.2, "norms far from the vocabulary's 3"),  # torch's own first values of an embedding
        (1.7, 0.2, None),
        (7.0, 0.2, None),
        (3.0, 0.2, None),
        (3.6, 0.001, None),  # all rows of one norm, as in models that normalize them
        (1.0, 0.001, "norms far from the vocabulary's 3"),
    ],
)
def test_a_row_is_judged_by_its_norm(norm, spread, reason):
    assert why_untrained(row(norm), Usual.of(vocabulary(spread)), torch.stack([row(3.0, 1)])) == reason


def test_a_copy_of_another_tokens_row_was_never_trained():
    nearly = row(3.0) + row(0.01, 1)
    assert (
        why_untrained(row(3.0), Usual.of(vocabulary(0.2)), torch.stack([row(3.0, 2), nearly]))
        == "copies of other tokens"
    )
    assert why_untrained(row(3.0), Usual.of(vocabulary(0.2)), torch.stack([row(3.0, 2), row(3.0, 3)])) is None
    assert why_untrained(row(3.0), Usual.of(vocabulary(0.2)), torch.empty(0, 0)) is None


def test_zeros_in_the_vocabulary_are_no_part_of_what_is_usual():
    """Padding of the vocabulary is often zero."""
    norms = torch.cat([vocabulary(0.2, 100), torch.zeros(300)])
    assert why_untrained(row(3.0), Usual.of(norms), torch.empty(0, 0)) is None
    assert why_untrained(row(0.0), Usual.of(torch.zeros(10)), torch.empty(0, 0)) == "rows of zeros"


# A model


@pytest.fixture(scope="module")
def healthy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "healthy"
    build_tiny_model(folder, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return folder


def spoil(healthy: Path, folder: Path, rows: list[int], *, untied: bool = False) -> Path:
    """A copy whose rows are zeros; with a head of its own, these are good in the embedding and zeros there."""
    folder.mkdir()
    for file in healthy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    if untied:
        weights["lm_head.weight"] = embedding.clone().flip(1)
        text = (folder / "config.json").read_text()
        assert '"tie_word_embeddings": true' in text
        (folder / "config.json").write_text(
            text.replace('"tie_word_embeddings": true', '"tie_word_embeddings": false')
        )
    weights["lm_head.weight" if untied else "model.embed_tokens.weight"][rows] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def spoilt(healthy, tmp_path_factory) -> Path:
    return spoil(healthy, tmp_path_factory.mktemp("spoilt") / "model", [PAD, START, END])


@pytest.fixture(scope="module")
def untied(healthy, tmp_path_factory) -> Path:
    return spoil(healthy, tmp_path_factory.mktemp("untied") / "model", [START], untied=True)


SAMPLES = [Sample([START, 77, 300, END, 10], [-100] * 5)] * 3


def source_of(folder: Path) -> ModelSource:
    return ModelSource(folder, load_model_config(folder), load_tokenizer(folder))


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    monkeypatch.setattr(untrained_tokens, "on_main", lambda layout, work: work())


def choose(folder: Path, samples: Any = SAMPLES, layout: Layout = ALONE, **values: Any) -> TokenRows:
    return choose_rows(replace(CONFIG, **values), source_of(folder), samples, layout)


def test_only_tokens_that_the_data_uses(spoilt, caplog):
    assert tokens_in_use(SAMPLES, load_tokenizer(spoilt)) == [START, END]
    assert choose(spoilt) == TokenRows((START, END))
    (record,) = caplog.records
    assert record.getMessage() == (
        "train_tokens: tokens of the data that this model was never taught: <|im_start|>, <|im_end|> (rows of "
        "zeros); their rows are trained beside the adapters, zeros from the vocabulary's mean on"
    )
    assert choose(spoilt, [Sample([END, 5], [5, 5])]) == TokenRows((END,))


def test_rows_of_zeros_begin_at_the_vocabularys_mean(spoilt, untied, healthy):
    embedding = load_file(spoilt / "model.safetensors")["model.embed_tokens.weight"]
    fresh = choose(spoilt).fresh_embedding
    assert fresh is not None and fresh.tokens == (START, END)
    torch.testing.assert_close(fresh.start, embedding[3:].mean(dim=0))
    assert choose(spoilt, train_tokens=["<|pad|>"]).fresh_embedding.tokens == (PAD,)
    assert choose(healthy, train_tokens=["<|im_end|>"]).fresh_embedding is None
    rows = choose(untied)
    assert rows.fresh_embedding is None and rows.fresh_head.tokens == (START,)
    model = skeleton(load_model_config(untied), dtype=torch.float32)
    choices = LoraChoices(
        r=2, alpha=2.0, embedding_rows=rows.embedding, head_rows=rows.head, fresh_head=rows.fresh_head
    )
    trained = dict(add_adapters(model, choices, seed=0, folder=untied).named_parameters())
    begun = {
        name.split(".token_adapter")[0]: value
        for name, value in trained.items()
        if "trainable_tokens" in name
    }
    weights = load_file(untied / "model.safetensors")
    assert torch.equal(begun["base_model.model.lm_head"], rows.fresh_head.start[None])
    assert torch.equal(
        begun["base_model.model.model.embed_tokens"], weights["model.embed_tokens.weight"][[START]]
    )


def test_every_part_of_long_data_is_looked_at(spoilt):
    samples = [Sample([END], [5]), *[Sample([5, 6], [5, 6])] * 9000, *[Sample([START], [5])] * 9]
    assert tokens_in_use(samples, load_tokenizer(spoilt)) == [START, END]


def test_a_healthy_model_has_none(healthy, caplog):
    assert choose(healthy) == TokenRows()
    assert not caplog.records


def test_none_says_so_and_trains_none(spoilt, caplog):
    assert choose(spoilt, train_tokens="none") == TokenRows()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().endswith("they stay as they are, by train_tokens: none")


def test_a_list_is_trained_as_it_is(healthy, caplog):
    assert choose(healthy, train_tokens=["<|im_end|>", "Ġthe"]).embedding[:1] == (END,)
    assert choose(healthy, train_tokens="<|im_start|>") == TokenRows((START,))
    assert not caplog.records
    assert choose(healthy, train_tokens="<|pad|>") == TokenRows((PAD,))  # torch makes that row of zeros
    assert (
        caplog.records[-1]
        .getMessage()
        .startswith("train_tokens: tokens that this model was never taught: <|pad|>")
    )
    with pytest.raises(
        ConfigError, match=r"^train_tokens: <\|im_ende\|> is no token of this model's tokenizer; name"
    ):
        choose(healthy, train_tokens=["<|im_end|>", "<|im_ende|>"])


def test_numbers_come_on_top(spoilt):
    assert choose(spoilt, trainable_token_indices=[7, END]) == TokenRows((START, END, 7))


def test_a_head_of_its_own_is_looked_at_and_trained_too(untied):
    assert choose(untied) == TokenRows((START,), (START,))
    assert choose(untied, trainable_token_indices=[7]) == TokenRows((START, 7), (START,))
    assert choose(untied, modules_to_save=["lm_head"]) == TokenRows((START,))
    assert choose(untied, lora_target_modules=["embed_tokens", "q_proj"]) == TokenRows((), (START,))


def test_what_is_trained_whole_needs_no_rows(spoilt, caplog):
    assert choose(spoilt, modules_to_save=["embed_tokens"]) == TokenRows()
    assert caplog.records[-1].getMessage().endswith("their rows are trained with the whole matrix")
    with pytest.raises(
        ConfigError, match="^train_tokens: modules_to_save or lora_target_modules trains the embedding"
    ):
        choose(spoilt, modules_to_save=["embed_tokens"], train_tokens=["<|pad|>"])


def test_full_fine_tuning_looks_at_nothing(spoilt, caplog):
    assert choose(spoilt, lora_r=0) == TokenRows()
    assert not caplog.records


def test_ranks_that_share_the_rows_are_refused_only_if_there_are_some(spoilt, healthy):
    shared = Layout(rank=0, world_size=2, tp_size=2)
    assert choose(healthy, layout=shared) == TokenRows()
    assert choose(spoilt, layout=shared, train_tokens="none") == TokenRows()
    with pytest.raises(ConfigError) as caught:
        choose(spoilt, layout=shared)
    assert str(caught.value) == (
        "train_tokens: the rows of <|im_start|>, <|im_end|> would be trained alone, which hfpar can't do with tp_size "
        "2; set train_tokens: none, or leave tp_size at 1"
    )


def test_a_matrix_that_cannot_be_read_by_rows_is_told(spoilt, caplog, monkeypatch):
    monkeypatch.setattr(SafetensorsSource, "find", lambda self, names: None)
    assert choose(spoilt) == TokenRows()
    assert "nobody has looked" in caplog.records[-1].getMessage()
