"""Chat templates by name or file, and what hfpar's own one renders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hfpar.data.chat.encode import EncodeOptions, encode
from hfpar.data.chat.templates import resolve_chat_template
from hfpar.data.reading.rows import Conversation, Place
from hfpar.errors import ConfigError
from hfpar.models.load import load_tokenizer

USER = {"role": "user", "content": "How many?"}
ASSISTANT = {"role": "assistant", "content": "7"}
TOOL = {"type": "function", "function": {"name": "count", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "count", "arguments": {"what": "é"}}}
TOOLS = (
    'Tools that you can call, as JSON:\n{"type": "function", "function": {"name": "count", "parameters": '
    '{"type": "object"}}}\nTo call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>'
)
ONCE = '<tool_call>{"name": "count", "arguments": {"what": "é"}}</tool_call>'


def build(*special_tokens: str, eos_token: str | None) -> PreTrainedTokenizerFast:
    """A token a byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={byte: index for index, byte in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(list(special_tokens))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=eos_token)


def show(messages: list[dict[str, Any]], tokenizer: Any, **more: Any) -> str:
    """The one sample that hfpar's own template makes, with « and » around what is trained."""
    (row,) = encode([(Place("a", "line", 1), Conversation(messages, **more))], tokenizer, EncodeOptions(5000))
    assert row.problem is None
    (sample,) = row.samples
    text, before = "", False
    ids: list[int] = []
    for token, trained in [*zip(*sample, strict=True), (None, False)]:
        if trained != before or token is None:
            text += tokenizer.decode(ids) + ("«" if trained else "»" if before else "")
            ids, before = [], trained
        ids.append(token)
    return text


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = build("<|im_start|>", "<|im_end|>", eos_token="<|im_end|>")
    tokenizer.chat_template = resolve_chat_template("chatml")
    return tokenizer


def test_chatml(tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "Be short."}
    thinking = {**ASSISTANT, "reasoning_content": "Count."}
    assert show([system, USER, thinking, USER, {"role": "assistant", "content": " 8\n"}], tokenizer) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
        "«<think>\nCount.\n</think>\n\n7<|im_end|>»\n<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"
        "« 8\n<|im_end|>»\n"
    )
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n"


def test_chatml_with_tools(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "tool_calls": [CALL]},
    ]
    rest = (
        f"<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n«Wait.\n{ONCE}\n{ONCE}<|im_end|>»\n"
        f"<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n«{ONCE}<|im_end|>»\n"
    )
    assert show(messages, tokenizer, tools=[TOOL]) == f"<|im_start|>system\n{TOOLS}<|im_end|>\n{rest}"
    system = {"role": "system", "content": "Be short."}
    assert show([system, *messages], tokenizer, tools=[TOOL]) == (
        f"<|im_start|>system\nBe short.\n\n{TOOLS}<|im_end|>\n{rest}"
    )
    as_text = {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "count", "arguments": '{"what": "é"}'}}],
    }
    assert tokenizer.apply_chat_template([as_text], tokenize=False) == (
        f"<|im_start|>assistant\n{ONCE}<|im_end|>\n"
    )


def test_template_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}é{% endfor %}", encoding="utf-8")
    assert resolve_chat_template(str(file)) == "{% for m in messages %}{{ m.content }}é{% endfor %}"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_chat_template("~/t.jinja") == resolve_chat_template(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is neither chatml nor a Jinja file that can be read: .*No such file"),
        (b"\xff", "is neither chatml nor a Jinja file that can be read: .*utf-8"),
        (b" \n", "is empty$"),
        (b"a\n{% for m in messages %}", "is no chat template: line 2: Unexpected end of template"),
        (b"{{ m | nothing }}", "is no chat template: line 1: No filter named 'nothing'"),
    ],
)
def test_no_template(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "t.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^chat_template: {file} {message}") as caught:
        resolve_chat_template(str(file))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("special_tokens", "eos_token", "end"),
    [
        (["<|im_start|>", "<|im_end|>", "<eos>"], "<eos>", "<|im_end|>"),
        (["<eos>"], "<eos>", "<|im_end|><eos>"),  # else generation would have nothing to stop at
        ([], None, "<|im_end|>"),
    ],
)
def test_chatml_for_a_base_model(
    tmp_path: Path, special_tokens: list[str], eos_token: str | None, end: str
) -> None:
    build(*special_tokens, eos_token=eos_token).save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path, chat_template="chatml")
    expected = f"<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n«7{end}»\n"
    assert show([USER, ASSISTANT], tokenizer) == expected
    tokenizer.save_pretrained(tmp_path / "export")
    assert show([USER, ASSISTANT], AutoTokenizer.from_pretrained(tmp_path / "export")) == expected


def test_a_template_file_replaces_the_tokenizers_own(tmp_path: Path) -> None:
    tokenizer = build(eos_token=None)
    tokenizer.chat_template = "own"
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).chat_template == "own"
    (tmp_path / "t.jinja").write_text("other")
    assert load_tokenizer(tmp_path, chat_template=str(tmp_path / "t.jinja")).chat_template == "other"
