"""Chat markers that a model was never taught are found and trained on every engine, and nothing else of the matrix."""

import json
from pathlib import Path
from typing import Any

import pytest

from hfpar.config.schema import SFTConfig
from tests.distributed.spawn import engine_settings, make_layout, make_trainer, spawn  # noqa: TID251

ENGINES = ("ddp", "fsdp2", "zero2", "zero3")
MARKERS = {"<|im_start|>": 1, "<|im_end|>": 2}
EMBEDDING = "base_model.model.model.embed_tokens.token_adapter.base_layer.weight"
TRAINED = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta.default"

pytestmark = pytest.mark.timeout(600)


def train(worker: Any, folder: Path) -> dict[str, Any]:
    from hfpar.data.stream import Sample
    from hfpar.models.adapter_init import save_adapter
    from hfpar.models.load import load_model_config, load_tokenizer
    from hfpar.train.model import ModelSource
    from hfpar.train.untrained_tokens import choose_rows

    layout = make_layout(worker)
    path = folder / "model"
    tokenizer = load_tokenizer(path)
    messages = [{"role": "user", "content": "2 and 3?"}, {"role": "assistant", "content": "2 and 3 are 5."}]
    tokens = tokenizer.apply_chat_template(messages, return_dict=False)
    samples = [Sample(tokens, [-100] * 8 + tokens[8:])] * 4
    config = SFTConfig(
        model_name_or_path=str(path),
        output_dir=str(folder / "run"),
        lora_r=2,
        max_steps=3,
        learning_rate=1e-2,
        per_device_train_batch_size=2,
    )
    found = {}
    rows = choose_rows(config, ModelSource(path, load_model_config(path), tokenizer), samples, layout)
    for engine in ENGINES:
        with make_trainer(config, engine_settings(engine), samples, layout, token_rows=rows) as trainer:
            trainer.train(None)
            rows_of_metrics = (folder / "run" / "metrics.jsonl").read_text().splitlines()
            weights = {name: value.clone() for name, value in trainer.engine.parameters()}
            if worker.rank == 0:
                trained = {
                    name: value for name, value in weights.items() if "lora" in name or "delta" in name
                }
                save_adapter(trainer.engine.module, trained, folder / engine)
        found[engine] = {"rows": rows, "embedding": weights[EMBEDDING], "trained": weights[TRAINED]}
        found[engine]["norms"] = [json.loads(line)["grad_norm"] for line in rows_of_metrics]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import load_file, save_file

    from hfpar.models.tiny import build_tiny_model

    folder = tmp_path_factory.mktemp("markers")
    build_tiny_model(folder / "model", hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    file = folder / "model" / "model.safetensors"
    weights = load_file(file)
    weights["model.embed_tokens.weight"][list(MARKERS.values())] = 0
    save_file(weights, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, Any]:
    return spawn(train, 2, folder, folder)[1]


@pytest.mark.parametrize("engine", ENGINES)
def test_exactly_the_markers_rows_change(engine: str, found: dict[str, Any], folder: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / "model" / "model.safetensors")["model.embed_tokens.weight"]
    mine = found[engine]
    assert mine["rows"].embedding == tuple(MARKERS.values()) and mine["rows"].head == ()
    assert (mine["embedding"] == stored).all()
    assert mine["trained"].shape == (2, 32)
    mean = stored[3:].mean(dim=0)
    assert ((mine["trained"] - mean).abs().amax(dim=1) > 1e-3).all()
    assert max(mine["norms"]) < 1e3


@pytest.mark.parametrize("engine", ENGINES[1:])
def test_rows_are_trained_alike(engine: str, found: dict[str, Any]) -> None:
    import torch

    torch.testing.assert_close(found[engine]["trained"], found["ddp"]["trained"], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("engine", ENGINES)
def test_plain_peft_and_a_merged_model_know_them(engine: str, found: dict[str, Any], folder: Path) -> None:
    """Of the head, too, which is tied."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(base, folder / engine).eval()
    tokens = torch.tensor([[1, 50, 2, 60]])
    with torch.no_grad():
        logits = model(tokens).logits
        merged = model.merge_and_unload()
        torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-4, atol=1e-5)
    for matrix in (merged.get_input_embeddings().weight, merged.get_output_embeddings().weight):
        torch.testing.assert_close(matrix[[1, 2]].detach(), found[engine]["trained"])
