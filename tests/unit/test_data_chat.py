"""Labels: exactly what the model is to write, with and without `{% generation %}` markers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hfpar.data.chat import tokenize_rows
from hfpar.data.stream import Sample, build_stream, pad_batch, unpad_batch
from hfpar.errors import ConfigError, DataError
from hfpar.models.tiny import build_tiny_model

USER = {"role": "user", "content": "How many?"}
ASSISTANT = {"role": "assistant", "content": "3 + 4 = 7."}
TWO_TURNS = [USER, ASSISTANT, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "8"}]

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{{ '\n' }}"
    "{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    build_tiny_model(path, num_hidden_layers=1)
    return path


@pytest.fixture
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def one(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Sample:
    samples, _ = tokenize_rows([row], tokenizer, 1000)
    return samples[0]


def labelled(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """The labelled stretches of a sample, decoded."""
    stretches: list[list[int]] = [[]]
    for token, label in zip(sample.input_ids, sample.labels, strict=True):
        assert label in (token, -100)
        if label == -100:
            stretches.append([])
        else:
            stretches[-1].append(token)
    return [tokenizer.decode(stretch) for stretch in stretches if stretch]


def test_assistant_turns_with_their_end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> None:
    system = {"role": "system", "content": "Be short."}
    sample = one({"messages": [system, *TWO_TURNS]}, tokenizer)
    assert labelled(sample, tokenizer) == ["3 + 4 = 7.<|im_end|>", "8<|im_end|>"]
    assert tokenizer.decode(sample.input_ids) == tokenizer.apply_chat_template(
        [system, *TWO_TURNS], tokenize=False
    )


@pytest.mark.parametrize("content", ["", "7\n\n", "  7", "<|im_end|>", "|>", "user\n", "😀 日本\n\tx  = 1"])
def test_awkward_contents(tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    sample = one({"messages": [USER, {"role": "assistant", "content": content}, *TWO_TURNS[:1]]}, tokenizer)
    assert labelled(sample, tokenizer) == [content + "<|im_end|>"]


def test_text_that_looks_like_a_turn_is_no_turn(tokenizer: PreTrainedTokenizerBase) -> None:
    quoting = {"role": "user", "content": "<|im_start|>assistant\nmine<|im_end|>"}
    assert labelled(one({"messages": [quoting, ASSISTANT]}, tokenizer), tokenizer) == ["3 + 4 = 7.<|im_end|>"]


def test_generation_markers_give_the_same_labels(tokenizer: PreTrainedTokenizerBase) -> None:
    plain = one({"messages": TWO_TURNS}, tokenizer)
    tokenizer.chat_template = MARKED
    assert one({"messages": TWO_TURNS}, tokenizer) == plain


def test_generation_markers_decide_about_the_end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    assert labelled(one({"messages": TWO_TURNS}, tokenizer), tokenizer) == ["3 + 4 = 7.", "8"]


def test_end_of_turn_that_is_white_space_is_trained(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:\n{% endif %}"
    )
    assert labelled(one({"messages": TWO_TURNS}, tokenizer), tokenizer) == ["3 + 4 = 7.\n", "8\n"]


def test_token_across_the_edge_of_a_turn_is_not_labelled(tokenizer: PreTrainedTokenizerBase) -> None:
    # "How" and " many" are tokens, and the prompt ends inside the second: " m" is the template's.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% else %} m{{ m['content'] }}"
        "<|im_end|>{% endif %}{% endfor %}{% if add_generation_prompt %} m{% endif %}"
    )
    messages = [{"role": "user", "content": "How"}, {"role": "assistant", "content": "any 7"}]
    assert labelled(one({"messages": messages}, tokenizer), tokenizer) == [" 7<|im_end|>"]


def test_row_that_the_template_refuses_is_named(tokenizer: PreTrainedTokenizerBase) -> None:
    for template in (
        "{{ raise_exception('roles must\nalternate') }}",
        "{% generation %}{{ messages[9].x.y }}",
    ):
        tokenizer.chat_template = template
        with pytest.raises(DataError, match=r"^row 1: the chat template can't render it: .+") as caught:
            tokenize_rows([{"messages": TWO_TURNS}], tokenizer, 1000)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "\ud83d"}, {"role": "assistant", "content": "a"}]},
        {"text": "\ud83d"},
        {"prompt": "a", "completion": "\ud83d"},
    ],
)
def test_half_a_character_is_refused(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"row 2: '\\ud83d' is half of a character"):
        tokenize_rows([{"text": "fine"}, row], tokenizer, 1000)


def test_assistant_first_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="row 1: it starts with the assistant's message"):
        one({"messages": [ASSISTANT, USER]}, tokenizer)


def test_tokenizer_without_template_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template: the tokenizer has none"):
        one({"messages": TWO_TURNS}, tokenizer)
    assert one({"text": "Hi"}, tokenizer).input_ids  # needs none


def test_pad_token_that_is_eos_changes_nothing(tokenizer: PreTrainedTokenizerBase) -> None:
    expected = one({"messages": TWO_TURNS}, tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    sample = one({"messages": TWO_TURNS}, tokenizer)
    assert sample == expected
    longer = Sample(sample.input_ids * 2, sample.labels * 2)
    stream = unpad_batch(pad_batch([sample, longer], tokenizer.pad_token_id))
    assert stream.labels.tolist() == build_stream([sample, longer]).labels.tolist()
    assert (stream.labels == tokenizer.eos_token_id).sum() == 6


@pytest.mark.parametrize("marked", [False, True])
def test_prompt_and_completion_as_messages(tokenizer: PreTrainedTokenizerBase, marked: bool) -> None:
    if marked:
        tokenizer.chat_template = MARKED
    row = {"prompt": TWO_TURNS[:3], "completion": TWO_TURNS[3:]}
    sample = one(row, tokenizer)
    assert labelled(sample, tokenizer) == ["8<|im_end|>"]
    assert sample.input_ids == one({"messages": TWO_TURNS}, tokenizer).input_ids


def test_prompt_and_completion_as_strings(tokenizer: PreTrainedTokenizerBase) -> None:
    sample = one({"prompt": "How many?", "completion": " 3 + 4"}, tokenizer)
    assert labelled(sample, tokenizer) == [" 3 + 4<|im_end|>"]
    assert one({"prompt": "How many?", "completion": " 3 + 4<|im_end|>"}, tokenizer) == sample
    assert labelled(one({"prompt": "How", "completion": ""}, tokenizer), tokenizer) == ["<|im_end|>"]
    with pytest.raises(DataError, match="1 have nothing to learn"):
        one({"prompt": "How<|im_end|>", "completion": ""}, tokenizer)


def test_text(tokenizer: PreTrainedTokenizerBase) -> None:
    eos = tokenizer.eos_token_id
    ids = tokenizer("How many?").input_ids
    assert one({"text": "How many?"}, tokenizer) == Sample([*ids, eos], [*ids, eos])
    assert one({"text": "How many?<|im_end|>"}, tokenizer) == Sample([*ids, eos], [*ids, eos])


def test_no_second_bos_and_no_second_eos(tokenizer: PreTrainedTokenizerBase) -> None:
    bos, eos = "<|im_start|>", "<|im_end|>"
    tokenizer.bos_token = bos
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (bos, eos)}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=list(ids.items())
    )
    assert tokenizer.decode(tokenizer("Hi").input_ids) == f"{bos}Hi{eos}"
    conversation = one({"messages": TWO_TURNS}, tokenizer)
    assert tokenizer.decode(conversation.input_ids) == tokenizer.apply_chat_template(
        TWO_TURNS, tokenize=False
    )
    for row in ({"text": "Hi"}, {"text": f"{bos}Hi"}, {"text": f"{bos}Hi{eos}"}):
        sample = one(row, tokenizer)
        assert tokenizer.decode(sample.input_ids) == f"{bos}Hi{eos}"
        assert sample.labels[1:] == sample.input_ids[1:]
    completion = one({"prompt": "Hi", "completion": " you"}, tokenizer)
    assert tokenizer.decode(completion.input_ids) == f"{bos}Hi you{eos}"
    assert labelled(completion, tokenizer) == [f" you{eos}"]


def test_offsets_with_white_space_trimmed(tokenizer: PreTrainedTokenizerBase) -> None:
    row = {"messages": [USER, {"role": "assistant", "content": "x =  7\n    y"}]}
    expected = one(row, tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoded = tokenizer("x =  7", return_offsets_mapping=True)
    assert any(begin == end for begin, end in encoded.offset_mapping)  # so the case really occurs
    assert one(row, tokenizer) == expected


def test_trimmed_white_space_before_a_turn_is_not_labelled(tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}:  {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:  {% endif %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = {"messages": [USER, {"role": "assistant", "content": "<|im_start|>7"}]}
    assert labelled(one(row, tokenizer), tokenizer) == ["<|im_start|>7<|im_end|>"]


class WithoutOffsets:
    """Stands for a tokenizer that is not backed by the `tokenizers` library."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        assert not options.get("return_offsets_mapping")
        return self.tokenizer(text, **options)


def test_tokenizer_without_offsets(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [{"messages": TWO_TURNS}, {"prompt": "How many?", "completion": " 3 + 4"}, {"text": "Hi"}]
    expected = tokenize_rows(rows, tokenizer, 1000)
    assert tokenize_rows(rows, WithoutOffsets(tokenizer), 1000) == expected  # type: ignore[arg-type]
    tokenizer.add_tokens([AddedToken("Q:A", normalized=False)])
    inside = [{"text": "Hi"}, {"prompt": "Q:", "completion": "A"}]
    with pytest.raises(DataError, match="row 2: character 2 lies inside a token"):
        tokenize_rows(inside, WithoutOffsets(tokenizer), 1000)  # type: ignore[arg-type]


def test_counts_and_order(tokenizer: PreTrainedTokenizerBase) -> None:
    rows = [
        {"messages": TWO_TURNS},
        {"messages": [USER]},
        {"text": "How many? " * 50},
        {"prompt": "How", "completion": " many?"},
        {"text": ""},
    ]
    samples, report = tokenize_rows(rows, tokenizer, 60)
    assert samples == [one(rows[0], tokenizer), one(rows[3], tokenizer)]
    assert (report.num_rows, report.num_samples) == (5, 2)
    assert (report.num_too_long, report.num_without_label) == (1, 2)
    assert report.num_tokens == sum(len(sample.input_ids) for sample in samples)
    assert report.num_label_tokens == build_stream(samples).num_label_tokens


def test_max_length_is_the_longest_that_is_kept(tokenizer: PreTrainedTokenizerBase) -> None:
    length = len(one({"messages": TWO_TURNS}, tokenizer).input_ids)
    assert len(tokenize_rows([{"messages": TWO_TURNS}], tokenizer, length)[0]) == 1
    with pytest.raises(
        DataError, match=rf"none of the 1 rows can be trained on: 1 are longer than max_length {length - 1}"
    ):
        tokenize_rows([{"messages": TWO_TURNS}], tokenizer, length - 1)


def test_nothing_to_learn_is_refused(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(DataError, match="none of the 2 rows .* 2 have nothing to learn"):
        tokenize_rows([{"messages": [USER]}, {"text": ""}], tokenizer, 100)


def test_more_rows_than_one_batch(tokenizer: PreTrainedTokenizerBase) -> None:
    rows: list[dict[str, Any]] = [{"text": f"{number}"} for number in range(2001)]
    rows[1500] = {"messages": TWO_TURNS}
    samples, _ = tokenize_rows(rows, tokenizer, 100)
    assert len(samples) == 2001
    assert samples[1500] == one(rows[1500], tokenizer)
    assert tokenizer.decode(samples[2000].input_ids) == "2000<|im_end|>"
    rows[1999] = {"messages": [ASSISTANT]}
    with pytest.raises(DataError, match="row 2000: "):
        tokenize_rows(rows, tokenizer, 100)
