"""The tiny model: a real checkpoint, equal bytes for equal arguments, and it learns."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hfpar.data.build import Recipe, encode_rows
from hfpar.data.chat.encode import EncodeOptions
from hfpar.data.stream import pad_batch, shift_labels
from hfpar.data.word_problems import generate_conversations
from hfpar.models.tiny import build_tiny_model


@pytest.fixture
def one_thread() -> Iterator[None]:
    """So small a model only gets slower with more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path)
    return path


def digests(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(path.iterdir())}


def test_loads_in_another_process_with_equal_bytes(folder: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    program = (
        "import sys; from hfpar.models.tiny import build_tiny_model; build_tiny_model(sys.argv[1]);"
        "from transformers import AutoModelForCausalLM, AutoTokenizer;"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[2]);"
        "tokenizer = AutoTokenizer.from_pretrained(sys.argv[2]);"
        "ids = tokenizer('3 + 4', return_tensors='pt').input_ids;"
        "print(model(input_ids=ids).logits.double().sum().item())"
    )
    root = Path(__file__).parents[2]
    output = subprocess.run(
        [sys.executable, "-c", program, str(again), str(folder)],
        capture_output=True,
        text=True,
        check=True,
        cwd=root,
        timeout=200,
    ).stdout
    assert digests(again) == digests(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = AutoTokenizer.from_pretrained(folder)("3 + 4", return_tensors="pt").input_ids
    assert float(output.split()[-1]) == pytest.approx(
        model(input_ids=ids).logits.double().sum().item(), rel=1e-6
    )


def test_seed_decides_the_weights_and_leaves_torchs_alone(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    build_tiny_model(tmp_path, seed=1)
    assert torch.equal(torch.rand(1), expected)
    changed = {name for name, digest in digests(tmp_path).items() if digests(folder)[name] != digest}
    assert changed == {"model.safetensors"}


def test_shape_of_the_model(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = model.config
    assert 1_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 5_000_000
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.dtype == torch.float32


def test_tokenizer(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = AutoModelForCausalLM.from_pretrained(folder).config
    generation = GenerationConfig.from_pretrained(folder)
    assert len(tokenizer) == config.vocab_size
    assert (tokenizer.eos_token, tokenizer.bos_token) == ("<|im_end|>", None)
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert generation.eos_token_id == config.eos_token_id == tokenizer.eos_token_id
    assert generation.pad_token_id == config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.tokenize("20 + 12 = 32") == ["20", "Ġ+", "Ġ12", "Ġ=", "Ġ32"]
    assert "".join(tokenizer.tokenize("123456789")) == "123456789"
    assert max(len(token) for token in tokenizer.tokenize("123456789")) == 2
    text = "Zoë's 12 apples:\n\t→ 日本 <b> 😀  end "
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    assert rendered == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYo<|im_end|>\n"
    prompt = tokenizer.apply_chat_template(messages[:1], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.usefixtures("one_thread")
def test_a_few_steps_lower_the_held_out_loss(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    recipe = Recipe("messages", None, EncodeOptions(max_length=256))
    train = encode_rows(generate_conversations(8 * 30, 0, "train"), tokenizer, recipe)
    held_out = list(encode_rows(generate_conversations(32, 0, "eval"), tokenizer, recipe))

    def loss_of(samples: list) -> torch.Tensor:
        batch = pad_batch(samples, tokenizer.pad_token_id)
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), shift_labels(batch.labels).flatten())

    with torch.no_grad():
        before = loss_of(held_out).item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for start in range(0, len(train), 8):
        loss_of(train[start : start + 8]).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        after = loss_of(held_out).item()
    assert before > 5.0
    assert after < 1.5
