"""`hfpar tokens`: what it finds in models whose rows were altered by hand."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AddedToken, AutoModelForCausalLM, AutoTokenizer

from hfpar import cli
from hfpar.errors import ConfigError
from hfpar.models.load import load_tokenizer
from hfpar.models.tiny import build_tiny_model
from hfpar.tokentool import plot
from hfpar.tokentool.choose import MOST_LISTED
from hfpar.tokentool.main import main
from hfpar.tokentool.plot import spread
from hfpar.tokentool.run import Request, find
from hfpar.tokentool.template import tokens_of_template

PAD, START, END = 0, 1, 2
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied; torch leaves the row of the pad token zero."""
    folder = tmp_path_factory.mktemp("model") / "healthy"
    build_tiny_model(folder, hidden_size=32, intermediate_size=32, num_hidden_layers=1)
    return folder


def alter(
    healthy: Path,
    folder: Path,
    change: Callable[[Weights], Any],
    *,
    untied: bool = False,
    added: tuple[str, ...] = (),
    num_padding: int = 0,
) -> Path:
    """A copy with other weights, and maybe a head of its own, added tokens, and rows of no token."""
    folder.mkdir()
    for file in healthy.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    if added:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.add_tokens([AddedToken(text, special=text.startswith("<")) for text in added])
        tokenizer.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    num_new = len(added) + num_padding
    torch.manual_seed(1)
    new = 0.06 * torch.randn(num_new, 32)
    weights[EMBEDDING] = torch.cat([weights[EMBEDDING], new])
    if untied:
        weights[HEAD] = 0.5 * weights[EMBEDDING].flip(1)
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"tie_word_embeddings": not untied, "vocab_size": len(weights[EMBEDDING])}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def look(*arguments: Any, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON report, and nothing else on stdout."""
    assert main([*map(str, arguments), "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def by_text(report: dict[str, Any], model: int = 0) -> dict[str, Any]:
    return {token["text"]: token for token in report["models"][model]["tokens"]}


# One model


def test_figures_of_rows(healthy, tmp_path, capsys):
    def change(weights: Weights) -> None:
        weights[EMBEDDING][START] = 0
        weights[EMBEDDING][END] *= 40 / weights[EMBEDDING][END].norm()

    folder = alter(healthy, tmp_path / "model", change, num_padding=5)
    report = look(folder, capsys=capsys)
    tokens = by_text(report)
    rows = load_file(folder / "model.safetensors")[EMBEDDING]
    norms = rows.double().norm(dim=1).numpy()
    ordinary = norms[3:-5]
    matrix = report["models"][0]["matrices"]["embedding"]
    assert list(report["models"][0]["matrices"]) == ["embedding"]
    assert report["schema_version"] == 1 and report["models"][0]["head_is_tied"]
    assert (matrix["rows"], matrix["width"], matrix["dtype"]) == (len(rows), 32, "float32")
    assert matrix["ordinary"]["rows"] == len(ordinary)
    assert matrix["ordinary"]["mean_norm"] == pytest.approx(ordinary.mean(), rel=1e-5)
    assert matrix["ordinary"]["norm_quantiles"]["50"] == pytest.approx(np.median(ordinary), rel=1e-5)
    start, end = tokens["<|im_start|>"], tokens["<|im_end|>"]
    z = -ordinary.mean() / ordinary.std()
    assert start["matrices"]["embedding"] == {
        "norm": 0.0,
        "z": pytest.approx(z, rel=1e-4),
        "robust_z": None,  # minus infinity
        "untrained": "rows of zeros",
    }
    assert end["matrices"]["embedding"]["norm"] == pytest.approx(40, rel=1e-5)
    assert end["matrices"]["embedding"]["untrained"].startswith("norms far from the vocabulary's 0.3")
    usual = np.log(norms[norms > 0][1:])  # without END, and padding as training takes it
    deviation = max(0.1, 1.4826 * np.median(np.abs(usual - np.median(usual))))
    robust = (math.log(40) - np.median(usual)) / deviation
    assert end["matrices"]["embedding"]["robust_z"] == pytest.approx(robust, rel=1e-2)
    assert end["roles"] == ["eos"] and tokens["<|pad|>"]["roles"] == ["pad"]
    padding = matrix["padding"]
    assert padding["rows"] == 5 and padding["ranges"] == [[len(rows) - 5, len(rows) - 1]]
    assert padding["norm_quantiles"]["100"] == pytest.approx(norms[-5:].max(), rel=1e-5)


def test_rows_are_read_in_parts(healthy, monkeypatch, capsys):
    whole = look(healthy, capsys=capsys)
    from hfpar.models import token_matrices

    chunks = token_matrices.TokenMatrix.chunks
    seen = []

    def small(self, most_numbers=None):
        for start, rows in chunks(self, 7 * self.width):
            seen.append(len(rows))
            yield start, rows

    monkeypatch.setattr(token_matrices.TokenMatrix, "chunks", small)
    assert look(healthy, capsys=capsys) == whole
    assert max(seen) == 7


def test_a_head_of_its_own_has_its_own_figures(healthy, tmp_path, capsys):
    def change(weights: Weights) -> None:
        weights[HEAD][[START, END]] = 0

    folder = alter(healthy, tmp_path / "model", change, untied=True)
    report = look(folder, capsys=capsys)
    matrices = by_text(report)["<|im_end|>"]["matrices"]
    assert matrices["embedding"]["untrained"] is None
    assert matrices["head"]["untrained"] == "rows of zeros"
    assert not report["models"][0]["head_is_tied"]
    assert main([str(folder)]) == 0
    assert "never taught: <|im_start|>, <|im_end|>" in capsys.readouterr().out


def test_ordinary_tokens_that_were_never_trained(healthy, tmp_path, capsys):
    def change(weights: Weights) -> None:
        weights[EMBEDDING][300] = 0
        weights[EMBEDDING][301] *= 1000
        weights[EMBEDDING][302] = torch.nan
        weights[EMBEDDING][START] = torch.inf

    report = look(alter(healthy, tmp_path / "model", change), capsys=capsys)
    odd = report["models"][0]["matrices"]["embedding"]["ordinary"]["untrained"]
    assert [entry["id"] for entry in odd] == [300, 301, 302]
    assert odd[0]["reason"] == "rows of zeros"
    assert odd[2] == {**odd[2], "norm": None, "reason": "rows that aren't finite"}
    start = by_text(report)["<|im_start|>"]
    assert start["matrices"]["embedding"]["untrained"] == "rows that aren't finite"
    assert start["neighbors"] is None
    assert len(by_text(report)["<|im_end|>"]["neighbors"]) == 3
    assert report["models"][0]["matrices"]["embedding"]["ordinary"]["mean_norm"] < 10


def test_added_tokens_and_copies(healthy, tmp_path, capsys):
    texts = ("<call>", "<answer>", "word")

    def change(weights: Weights) -> None:
        first = len(weights[EMBEDDING]) - 3
        weights[EMBEDDING][first + 1] = weights[EMBEDDING][first] + 1e-5

    report = look(alter(healthy, tmp_path / "model", change, added=texts), capsys=capsys)
    tokens = by_text(report)
    for text in texts[:2]:
        assert tokens[text]["matrices"]["embedding"]["untrained"] == "copies of other tokens"
    assert (tokens["<call>"]["special"], tokens["word"]["special"]) == (True, False)
    near = tokens["<call>"]["neighbors"][0]
    assert (near["text"], near["id"]) == ("<answer>", tokens["<answer>"]["id"])
    assert near["cosine"] == pytest.approx(1, abs=1e-3)


def test_the_verdict_is_that_of_training(healthy, tmp_path):
    """Each of many far-off, zero and copied rows."""
    from hfpar.models.load import load_model_config, skeleton
    from hfpar.models.token_matrices import find_matrices, judge

    texts = tuple(f"<{number}>" for number in range(12))

    def change(weights: Weights) -> None:
        rows = weights[EMBEDDING]
        for number in range(12):
            rows[-12 + number] *= 10.0 ** (number / 3 - 3)

    folder = alter(healthy, tmp_path / "model", change, added=texts)
    (matrix,) = find_matrices(skeleton(load_model_config(folder)), folder)
    tokenizer = load_tokenizer(folder)
    training = judge(matrix, sorted(tokenizer.added_tokens_decoder), tokenizer).reasons
    (model,) = find(Request(str(folder))).models
    assert model.untrained == training
    assert 2 < len(training) < 14


# Neighbours


def exact_neighbors(rows: torch.Tensor, token: int, center: torch.Tensor, usable: list[int]) -> list[int]:
    centered = torch.nn.functional.normalize(rows.double() - center)
    cosines = centered @ centered[token]
    return sorted((other for other in usable if other != token), key=lambda other: -float(cosines[other]))


def test_neighbors_are_the_nearest_of_all(healthy, tmp_path, monkeypatch, capsys):
    from hfpar.tokentool import measure

    def change(weights: Weights) -> None:
        weights[EMBEDDING][PAD] = 0
        weights[EMBEDDING][-2:] = weights[EMBEDDING][[START, END]]

    folder = alter(healthy, tmp_path / "model", change, num_padding=40)
    rows = load_file(folder / "model.safetensors")[EMBEDDING]
    rows_of_padding = range(len(rows) - 40, len(rows))
    usable = [row for row in range(1, len(rows)) if row not in rows_of_padding]
    center = rows[3:-40].double().mean(dim=0)
    for most in (2**24, 64):  # at once, and in parts
        monkeypatch.setattr(measure, "_MOST_PRODUCTS", most)
        tokens = by_text(look(folder, "--neighbors", 5, capsys=capsys))
        for text, token in (("<|im_start|>", START), ("<|im_end|>", END)):
            found = [near["id"] for near in tokens[text]["neighbors"]]
            assert found == exact_neighbors(rows, token, center, usable)[:5]
        assert tokens["<|pad|>"]["neighbors"] is None  # a row of zeros has no direction
    assert by_text(look(folder, "--neighbors", 0, capsys=capsys))["<|im_end|>"]["neighbors"] is None


# Templates


def test_what_the_template_writes_and_names(healthy, tmp_path):
    tokenizer = load_tokenizer(
        alter(healthy, tmp_path / "model", lambda weights: None, added=("<call>", "<x>"))
    )
    call = tokenizer.convert_tokens_to_ids("<call>")
    assert tokens_of_template(tokenizer) == {START: "written", END: "written"}
    tokenizer.chat_template += "{% if tools %}<call>{% endif %}"
    assert tokens_of_template(tokenizer) == {START: "written", END: "written", call: "named"}
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m.content + eos_token }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    assert tokens_of_template(tokenizer) == {START: "written", END: "written"}
    tokenizer.chat_template = None
    assert tokens_of_template(tokenizer) == {}
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(ConfigError, match="^chat_template: can't be rendered: .*never"):
        tokens_of_template(tokenizer)


def test_a_template_beside_a_model_that_has_none(healthy, tmp_path, capsys):
    folder = alter(healthy, tmp_path / "model", lambda weights: None)
    (folder / "chat_template.jinja").unlink()
    report = look(folder, capsys=capsys)
    assert not report["models"][0]["has_chat_template"]
    assert by_text(report)["<|im_end|>"]["template"] is None
    assert (
        by_text(look(folder, "--chat_template", "chatml", capsys=capsys))["<|im_end|>"]["template"]
        == "written"
    )
    main([str(folder)])
    assert "none; --chat_template chatml" in capsys.readouterr().out


# Many tokens


def test_of_many_tokens_those_that_matter_are_shown(healthy, tmp_path, capsys):
    texts = tuple(f"<extra_{number}>" for number in range(60))

    def change(weights: Weights) -> None:
        weights[EMBEDDING][-1] = 0

    folder = alter(healthy, tmp_path / "model", change, added=texts)
    with (folder / "chat_template.jinja").open("a") as template:
        template.write("<extra_57>{% if tools %}<extra_58>{% endif %}")
    findings = find(Request(str(folder)))
    assert len(findings.listed) == MOST_LISTED and findings.num_left_out == 63 - MOST_LISTED
    assert {"<|im_start|>", "<|im_end|>", "<|pad|>", "<extra_57>", "<extra_58>", "<extra_59>"} <= set(
        findings.listed
    )
    assert main([str(folder)]) == 0
    assert "23 more special and added tokens; --all shows them." in capsys.readouterr().out
    tokens = by_text(look(folder, capsys=capsys))
    assert len(tokens) == 63 and tokens["<extra_50>"]["neighbors"] is None
    tokens = by_text(look(folder, "--all", capsys=capsys))
    assert len(tokens["<extra_50>"]["neighbors"]) == 3


def test_a_terminal_obeys_no_token(healthy, tmp_path, capsys):
    added = ("<\x1b[31m>", "<two\nlines>")
    folder = alter(healthy, tmp_path / "model", lambda weights: weights[EMBEDDING][-2:].zero_(), added=added)
    assert main([str(folder)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.count(r"'<two\nlines>'") == 2


@pytest.mark.parametrize(
    ("value", "reason", "shown"),
    [
        (0.0, "rows of zeros", "norms 0 to 0"),
        (math.nan, "rows that aren't finite", "whose rows aren't finite"),
    ],
)
def test_where_no_row_is_usable_none_is_trained(healthy, tmp_path, value, reason, shown, capsys):
    folder = alter(healthy, tmp_path / "model", lambda weights: weights[EMBEDDING].fill_(value))
    matrix = look(folder, capsys=capsys)["models"][0]["matrices"]["embedding"]
    assert {odd["reason"] for odd in matrix["ordinary"]["untrained"]} == {reason}
    assert len(matrix["ordinary"]["untrained"]) == matrix["ordinary"]["rows"] == matrix["rows"] - 3
    assert main([str(folder)]) == 0
    assert shown in capsys.readouterr().out


# Two models


@pytest.fixture(scope="module")
def pair(healthy, tmp_path_factory) -> tuple[Path, Path]:
    """A base with zeros for its markers, and the same after training."""
    folder = tmp_path_factory.mktemp("pair")

    def spoil(weights: Weights) -> None:
        weights[EMBEDDING][[START, END]] = 0

    def train(weights: Weights) -> None:
        rows = weights[EMBEDDING]
        torch.manual_seed(5)
        rows[3:] += 1e-3 * torch.randn_like(rows[3:])
        rows[-1] = -rows[-1]

    base = alter(healthy, folder / "base", spoil, added=("<call>", "<b>"))
    instruct = alter(healthy, folder / "instruct", train, added=("<b>", "<x>", "<call>"), num_padding=3)
    return base, instruct


def test_what_was_trained_in_between(pair, capsys):
    report = look(pair[0], "--compare", pair[1], capsys=capsys)
    comparison = report["comparison"]
    first, second = (load_file(folder / "model.safetensors")[EMBEDDING] for folder in pair)
    sizes = comparison["tokens"]
    assert sizes[1] == sizes[0] + 1 and comparison["tokens_in_both"] == sizes[0]
    assert comparison["tokens_in_both_with_same_id"] == sizes[0] - 2  # two have moved
    matrix = comparison["matrices"]["embedding"]
    pairs = {pair["text"]: pair for pair in matrix["tokens"]}
    assert {text: pair["change"] for text, pair in pairs.items()} == {
        "<|pad|>": "same",
        "<|im_start|>": "taught",
        "<|im_end|>": "taught",
        "<call>": "moved",
        "<b>": "moved",
        "<x>": None,
    }
    assert pairs["<|im_end|>"]["cosine"] is None and pairs["<|im_end|>"]["distance"] == 1
    for text in ("<call>", "<b>"):
        rows = first[pairs[text]["ids"][0]], second[pairs[text]["ids"][1]]
        assert pairs[text]["cosine"] == pytest.approx(float(torch.cosine_similarity(*rows, dim=0)), rel=1e-4)
    assert pairs["<x>"]["ids"] == [None, sizes[1] - 2]
    ordinary = slice(3, sizes[0] - 2)
    distances = (first - second[: len(first)]).norm(dim=1)[ordinary] / torch.maximum(
        first.norm(dim=1), second[: len(first)].norm(dim=1)
    )[ordinary]
    assert matrix["sampled"] == len(distances) and matrix["share_changed"] == 1
    assert matrix["median_distance"] == pytest.approx(float(np.median(distances)), rel=1e-4)
    back = look(pair[1], "--compare", pair[0], capsys=capsys)["comparison"]["matrices"]["embedding"]["tokens"]
    assert {p["text"]: p["change"] for p in back}["<|im_end|>"] == "untaught"


def test_copies_that_only_noise_told_apart_were_not_taught(healthy, tmp_path, capsys):
    def base(weights: Weights) -> None:
        weights[EMBEDDING][-3:-1] = weights[EMBEDDING][-1]

    def trained(weights: Weights) -> None:
        base(weights)
        torch.manual_seed(5)
        weights[EMBEDDING] += 2e-3 * torch.randn_like(weights[EMBEDDING])
        weights[EMBEDDING][-1] = weights[EMBEDDING][-1].flip(0)

    texts = ("<a>", "<b>", "<c>")
    folders = [
        alter(healthy, tmp_path / name, change, added=texts)
        for name, change in (("base", base), ("trained", trained))
    ]
    report = look(folders[0], "--compare", folders[1], capsys=capsys)
    assert by_text(report)["<a>"]["matrices"]["embedding"]["untrained"] == "copies of other tokens"
    assert by_text(report, 1)["<a>"]["matrices"]["embedding"]["untrained"] is None
    changes = {
        token["text"]: token["change"] for token in report["comparison"]["matrices"]["embedding"]["tokens"]
    }
    assert [changes[text] for text in texts] == ["as others", "as others", "taught"]


def test_a_table_of_two_models(pair, capsys):
    assert main([str(pair[0]), "--compare", str(pair[1])]) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith(" <|im_end|>"))
    assert re.search(r"\u25cf +eos +0 +-\d\.\d\d +zeros +0\.\d+ .* trained .* taught", row)
    assert re.search(r"vocabularies +\d+ tokens by text, of \d+ and \d+", out)


def test_models_of_other_widths_and_other_vocabularies(healthy, pair, tmp_path, capsys):
    wide = tmp_path / "wide"
    build_tiny_model(wide, hidden_size=64, intermediate_size=32, num_hidden_layers=1, vocab_size=500)
    report = look(pair[0], "--compare", wide, capsys=capsys)["comparison"]
    assert report["tokens_in_both"] < min(report["tokens"]) + 1
    matrix = report["matrices"]["embedding"]
    assert matrix["sampled"] == 0 and matrix["median_distance"] is None
    pairs = {pair["text"]: pair for pair in matrix["tokens"]}
    assert pairs["<|im_end|>"]["change"] == "taught" and pairs["<|im_end|>"]["cosine"] is None
    assert main([str(pair[0]), "--compare", str(wide)]) == 0
    assert "rows of other widths" in capsys.readouterr().out


def test_an_untied_head_beside_a_tied_one(healthy, pair, tmp_path, capsys):
    untied = alter(healthy, tmp_path / "untied", lambda weights: None, untied=True)
    matrices = look(pair[0], "--compare", untied, capsys=capsys)["comparison"]["matrices"]
    assert list(matrices) == ["embedding", "head"]
    heads = {token["text"]: token["change"] for token in matrices["head"]["tokens"]}
    assert heads["<|im_end|>"] == "taught"


# Adapters


def make_adapter(base: Path, folder: Path, **choices: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    torch.manual_seed(3)
    peft_model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **choices))
    with torch.no_grad():
        for parameter in peft_model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    peft_model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("untied", [False, True], ids=["tied", "untied"])
@pytest.mark.parametrize(
    "choices",
    [
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [START, END, 300]}},
        {"target_modules": ["embed_tokens", "q_proj"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
        {"target_modules": ["q_proj"]},
    ],
    ids=["rows", "lora", "whole", "none"],
)
def test_adapters_rows_are_those_of_the_merged_model(choices, untied, healthy, tmp_path):
    base = alter(healthy, tmp_path / "base", lambda weights: None, untied=untied)
    adapter = make_adapter(base, tmp_path / "adapter", **choices)
    (model,) = find(Request(str(adapter), num_neighbors=0)).models
    peft_model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter
    )
    merged = peft_model.merge_and_unload()
    weights = [merged.get_input_embeddings().weight, merged.get_output_embeddings().weight]
    if "embed_tokens" in choices["target_modules"] and not untied:
        # Merged, they stay one matrix; but the adapter has changed only the embedding.
        weights[1] = load_file(base / "model.safetensors")[EMBEDDING]
    found = [measured.matrix for measured in model.measured]
    assert len(found) == (1 if torch.equal(*weights) else 2)
    for matrix, weight in zip(found, weights, strict=False):
        torch.testing.assert_close(matrix.read(range(matrix.num_rows)), weight.detach(), rtol=1e-5, atol=1e-6)
    assert str(adapter) in model.source.description and str(base) in model.source.description


# Other files


def test_hub_models_are_fetched_without_their_other_weights(pair, monkeypatch, capsys):
    import huggingface_hub

    asked: list[Any] = []

    def snapshot_download(name: str, allow_patterns: Any, **options: Any) -> str:
        asked.append(allow_patterns)
        return str(pair[0])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    index = pair[0] / "model.safetensors.index.json"
    weights = load_file(pair[0] / "model.safetensors")
    files = dict.fromkeys(weights, "model-2-of-2.safetensors") | {EMBEDDING: "model.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": files}))
    try:
        look("someone/model", capsys=capsys)
    finally:
        index.unlink()
    assert "*.safetensors" not in asked[0] and "*.json" in asked[0]
    assert asked[1:] == [["model.safetensors"]]
    look("someone/model", capsys=capsys)
    assert asked[3] == ["*.safetensors"]


def break_folder(folder: Path, how: str) -> None:
    weights = folder / "model.safetensors"
    if how == "no tokenizer":
        for file in folder.glob("*token*"):
            file.unlink()
    elif how == "pickled":
        weights.rename(folder / "pytorch_model.bin")
    elif how == "no weights":
        weights.unlink()
    elif how == "half a file":
        weights.write_bytes(weights.read_bytes()[:5000])
    else:
        tensors = load_file(weights)
        embedding = tensors.pop(EMBEDDING)
        if how == "int8":
            tensors[EMBEDDING] = embedding.to(torch.int8)
        if how == "fp8":
            tensors[EMBEDDING] = embedding.to(torch.float8_e4m3fn)
        if how == "other shape":
            tensors[EMBEDDING] = embedding[:-3].clone()
        save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tokenizer", "has no usable tokenizer"),
        ("pickled", "has no safetensors files, only pickled ones (.bin); save it once with"),
        ("no weights", "has no safetensors files; save it once with"),
        ("half a file", "model.safetensors: "),
        ("no embedding", "holds no model.embed_tokens.weight as plain numbers; if it is quantized, name the"),
        ("int8", "model.embed_tokens.weight is stored quantized (int8)"),
        ("fp8", "holds model.embed_tokens.weight in few bits (float8_e4m3fn); name the unquantized model"),
        ("other shape", "model.embed_tokens.weight is (893, 32) in"),
    ],
)
def test_models_that_cannot_be_looked_at(how, message, healthy, tmp_path):
    folder = alter(healthy, tmp_path / "model", lambda weights: None)
    break_folder(folder, how)
    for arguments, key in (([folder], "MODEL: "), ([healthy, "--compare", folder], "--compare: ")):
        with pytest.raises(ConfigError) as caught:
            main([str(argument) for argument in arguments])
        assert str(caught.value).startswith(key) and message in str(caught.value)
        assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_quantized_model_whose_embedding_is_plain(healthy, tmp_path, capsys):
    folder = alter(healthy, tmp_path / "model", lambda weights: None)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    packed = {name: value.to(torch.int8) if "proj" in name else value for name, value in weights.items()}
    save_file(packed, folder / "model.safetensors", metadata={"format": "pt"})
    assert by_text(look(folder, capsys=capsys)).keys() == by_text(look(healthy, capsys=capsys)).keys()


def test_a_head_that_cannot_be_read_is_said(healthy, tmp_path, capsys):
    folder = alter(healthy, tmp_path / "model", lambda weights: weights.pop(HEAD), untied=True)
    report = look(folder, capsys=capsys)["models"][0]
    assert list(report["matrices"]) == ["embedding"] and not report["head_is_tied"]
    assert report["notes"] == [f"the head isn't looked at: {folder} holds no lm_head.weight as plain numbers"]


def test_tokens_beyond_the_models_rows(healthy, tmp_path, capsys):
    folder = alter(healthy, tmp_path / "model", lambda weights: None)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<late>"], special_tokens=True)
    tokenizer.save_pretrained(folder)
    assert by_text(look(folder, capsys=capsys))["<late>"]["matrices"] == {"embedding": None}
    assert main([str(folder)]) == 0
    assert re.search(r"without a row +<late>: the model knows no such numbers", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--neighbors", "101"], "--neighbors: 101; allowed: 0 to 100"),
        (["--neighbors", "few"], "tokens: argument --neighbors: invalid int value: 'few'"),
        (["--plot", "tokens.jpg"], "--plot: tokens.jpg; must end with .png"),
        (["--plot", "nowhere/tokens.png"], "--plot: nowhere is no folder"),
        (
            ["--chat_template", "nothing.jinja"],
            "chat_template: nothing.jinja is neither chatml nor a Jinja file",
        ),
        (["--compare", "./nothing"], "--compare: ./nothing is neither a folder nor a hub id"),
        (["more"], "tokens: unrecognized arguments: more"),
    ],
)
def test_flags(flags, message, healthy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        main([str(healthy), *flags])
    assert str(caught.value).startswith(message) and caught.value.exit_code == 2


def test_vocabularies_without_a_common_token(healthy, tmp_path):
    """A tokenizer of whole words, none of which is in the other."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    other = alter(healthy, tmp_path / "other", lambda weights: None)
    for file in other.glob("*token*"):
        file.unlink()
    (other / "chat_template.jinja").unlink()
    words = {f"word number {number}": number for number in range(20)}
    core = Tokenizer(models.WordLevel(words, unk_token="word number 0"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(other)
    with pytest.raises(ConfigError, match="have no token in common, by their texts$"):
        find(Request(str(healthy), str(other)))


# The picture


def has_color(png: Path, rgb: tuple[int, int, int]) -> bool:
    from matplotlib.image import imread

    pixels = imread(png)[..., :3]
    return bool((np.abs(pixels - np.array(rgb) / 255).max(axis=-1) < 0.01).any())


def test_plots(healthy, pair, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "_DPI", 50)
    untied = alter(healthy, tmp_path / "untied", lambda weights: weights[HEAD][END].mul_(1000), untied=True)
    for number, arguments in enumerate([[untied], [pair[0], "--compare", pair[1]]]):
        path = tmp_path / f"{number}.png"
        assert main([*map(str, arguments), "--plot", str(path)]) == 0
        assert has_color(path, (0xD1, 0x49, 0x5B)), "marks of tokens that were never trained"
        assert not list(tmp_path.glob(".*.tmp"))
    capsys.readouterr()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_plot_that_cannot_be_written(healthy, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    with pytest.raises(ConfigError, match="^--plot: .*locked/a.png can't be written"):
        main([str(healthy), "--plot", str(tmp_path / "locked" / "a.png")])


def test_a_plot_in_the_way_of_a_folder(healthy, tmp_path):
    with pytest.raises(ConfigError, match="is a folder; name a file such as"):
        main([str(healthy), "--plot", str(tmp_path)])


def test_labels_keep_apart_and_near_their_marks():
    assert spread([1.0, 5.0, 9.0], 1, 0, 10) == [1, 5, 9]
    assert spread([5.0, 5.0, 5.0], 1, 0, 10) == [4, 5, 6]
    assert spread([0.0, 0.1], 1, 0, 10) == [0, 1]
    assert spread([9.9, 10.0], 1, 0, 10) == [9, 10]
    places = spread([0.0, 0.0, 1.5, 1.6, 1.7, 8.0], 1, 0, 10)
    assert all(b - a >= 1 - 1e-9 for a, b in zip(places, places[1:], strict=False))
    assert spread([], 1, 0, 10) == []


# The command


def test_the_command(healthy, capfd):
    assert cli.main(["tokens", str(healthy), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["models"][0]["name"] == str(healthy)
