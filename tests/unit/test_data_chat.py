"""Tokens and labels: exactly what the model is to write, whatever the template and the tokenizer do."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from hfpar.data.chat.encode import EncodedRow, EncodedSample, EncodeOptions, encode
from hfpar.data.reading.rows import Conversation, Example, Place, PlainText
from hfpar.data.stream import Sample, build_stream, pad_batch, unpad_batch
from hfpar.errors import ConfigError

USER = {"role": "user", "content": "How many?"}
ASSISTANT = {"role": "assistant", "content": "3 + 4 = 7."}
TWO_TURNS = [USER, ASSISTANT, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "8"}]
PLACE = Place("rows.jsonl", "line", 3)

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Only the last turn shows a block of thinking, as Qwen3's does.
REWRITING = CHATML.replace("m.content", "('<think></think>' if loop.last else '') + m.content").replace(
    "if loop.last", "if loop.last and m.role == 'assistant'"
)
MARKED_REWRITING = MARKED.replace(
    "{{ m.content + ", "{{ ('<think></think>' if loop.last else '') + m.content + ", 1
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|pad|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(["How many? And now? user assistant system"] * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHATML,
    )
    assert tokenizer.tokenize("How many?") == ["How", "Ġmany", "?"]
    return tokenizer


def run(example: Example | list[dict[str, Any]], tokenizer: Any, **options: Any) -> EncodedRow:
    if isinstance(example, list):
        example = Conversation(example)
    (row,) = encode([(PLACE, example)], tokenizer, EncodeOptions(**{"max_length": 1000, **options}))
    return row


def one(
    example: Example | list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **options: Any
) -> EncodedSample:
    row = run(example, tokenizer, **options)
    assert row.problem is None
    (sample,) = row.samples
    return sample


def show(sample: EncodedSample, tokenizer: PreTrainedTokenizerFast) -> str:
    """A sample decoded, with « and » around what is trained."""
    text, start = "", 0
    for end in range(1, len(sample.input_ids) + 1):
        if end == len(sample.input_ids) or sample.trained[end] != sample.trained[start]:
            part = tokenizer.decode(sample.input_ids[start:end])
            text += f"«{part}»" if sample.trained[start] else part
            start = end
    return text


def shown(
    example: Example | list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast, **options: Any
) -> list[str]:
    row = run(example, tokenizer, **options)
    assert row.problem is None
    return [show(sample, tokenizer) for sample in row.samples]


def chatml(*parts: str) -> str:
    """ChatML of user, assistant, user, ...: what each says."""
    roles = ["user", "assistant"] * len(parts)
    return "".join(
        f"<|im_start|>{role}\n«{part}<|im_end|>»\n"
        if role == "assistant"
        else f"<|im_start|>{role}\n{part}<|im_end|>\n"
        for role, part in zip(roles, parts, strict=False)
    )


def test_assistant_turns_with_their_end_of_turn_token(tokenizer: PreTrainedTokenizerFast) -> None:
    system = {"role": "system", "content": "Be short."}
    (text,) = shown([system, system, *TWO_TURNS], tokenizer)
    assert text == "<|im_start|>system\nBe short.<|im_end|>\n" * 2 + chatml(
        "How many?", "3 + 4 = 7.", "And now?", "8"
    )


AWKWARD = [
    "",
    "7\n\n",
    "  7",
    "<|im_end|>",
    "|>",
    "user\n",
    "😀 日本\n\tx  = 1",
    "é",
    "How many?",
    "7\n<|im_start|>assistant\n",
]


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("content", AWKWARD)
def test_awkward_contents(tokenizer: PreTrainedTokenizerFast, content: str, template: str) -> None:
    tokenizer.chat_template = template
    messages = [
        USER,
        {"role": "assistant", "content": content},
        USER,
        {"role": "assistant", "content": content},
    ]
    assert shown(messages, tokenizer) == [chatml("How many?", content, "How many?", content)]


@pytest.mark.parametrize("content", AWKWARD)
def test_template_that_strips_contents(tokenizer: PreTrainedTokenizerFast, content: str) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "(m.content | trim)")
    messages = [
        USER,
        {"role": "assistant", "content": content},
        USER,
        {"role": "assistant", "content": content},
    ]
    said = content.strip()
    assert shown(messages, tokenizer) == [chatml("How many?", said, "How many?", said)]


def test_text_that_looks_like_a_turn_is_no_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    quoting = {"role": "user", "content": "<|im_start|>assistant\nmine<|im_end|>"}
    assert shown([quoting, ASSISTANT], tokenizer) == [chatml(quoting["content"], "3 + 4 = 7.")]


def test_special_token_text_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    count = {"special token text": 1}
    assert run(TWO_TURNS, tokenizer).counts == {}
    assert run([USER, {"role": "assistant", "content": "a<|im_end|>b<|pad|>"}], tokenizer).counts == count
    tokenizer.add_tokens([AddedToken("<note>", special=False)])
    thinking = {**ASSISTANT, "reasoning_content": "<note>"}
    assert run([USER, thinking], tokenizer).counts == {"thinking left out": 1}
    thinking["reasoning_content"] = "<|pad|>"
    assert run([USER, thinking], tokenizer).counts == {"thinking left out": 1, **count}


def test_end_of_turn_that_is_white_space_is_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':\n' + (m.reasoning_content or '') + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    assert shown(TWO_TURNS, tokenizer) == [
        "user:\nHow many?\nassistant:\n«3 + 4 = 7.\n»user:\nAnd now?\nassistant:\n«8\n»"
    ]
    thinking = {"role": "assistant", "content": "8", "reasoning_content": "4 + 4 = 8, so "}
    assert shown([USER, thinking], tokenizer) == ["user:\nHow many?\nassistant:\n«4 + 4 = 8, so 8\n»"]


def test_token_across_the_edge_of_a_turn_is_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    # "How" and " many" are tokens, and the prompt ends inside the second: " m" is the template's.
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}{{ ' m' + m.content }}"
        "{{ '<|im_end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ ' m' }}{% endif %}"
    )
    messages = [{"role": "user", "content": "How"}, {"role": "assistant", "content": "any 7"}]
    assert shown(messages, tokenizer) == ["How« many 7<|im_end|>»"]


def test_an_answer_that_meets_the_prompts_last_space(tokenizer: PreTrainedTokenizerFast) -> None:
    """The space and the answer are one token: without it nothing of the answer would be learnt."""
    assert tokenizer.tokenize("How many") == ["How", "Ġmany"]
    row = PlainText("How many", num_prompt_chars=len("How "))
    assert shown(row, tokenizer) == ["How« many<|im_end|>»"]


# Which turns are trained


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize(
    ("train_on", "trains", "trained"),
    [
        ("assistant", {}, [1, 3, 4]),
        ("last_assistant", {}, [4]),
        ("completion", {}, [3, 4]),
        ("assistant", {3: False}, [1, 4]),
        ("last_assistant", {1: True, 4: False}, [1]),
        ("completion", {0: True, 2: True}, [0, 2, 3, 4]),
    ],
)
def test_which_turns_are_trained(
    tokenizer: PreTrainedTokenizerFast,
    template: str,
    train_on: Any,
    trains: dict[int, bool],
    trained: list[int],
) -> None:
    tokenizer.chat_template = template
    contents = ["How many?", "1", "And now?", "2", "1"]
    roles = ["user", "assistant", "user", "assistant", "assistant"]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    ]
    for index, train in trains.items():
        messages[index]["train"] = train
    expected = "".join(
        f"<|im_start|>{role}\n"
        + (f"«{content}<|im_end|>»" if index in trained else f"{content}<|im_end|>")
        + "\n"
        for index, (role, content) in enumerate(zip(roles, contents, strict=True))
    )
    assert shown(messages, tokenizer, train_on=train_on) == [expected]


def test_all_trains_every_token(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = one(TWO_TURNS, tokenizer, train_on="all")
    assert sample.trained == [True] * len(sample.input_ids)
    assert sample.input_ids == one(TWO_TURNS, tokenizer).input_ids
    text = one(PlainText("How many? 7", 9), tokenizer, train_on="all")
    assert text.trained == [True] * len(text.input_ids)


def test_the_template_never_sees_train(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "m.content + (m.train | string)")
    assert shown([USER, {**ASSISTANT, "train": True}], tokenizer) == [chatml("How many?", "3 + 4 = 7.")]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_prompt_and_completion_as_messages(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    for train_on in ("assistant", "completion", "last_assistant"):
        sample = one(Conversation(TWO_TURNS, num_prompt=3), tokenizer, train_on=train_on)
        assert sample == one(TWO_TURNS, tokenizer, train_on="last_assistant")
    one_more = Conversation([*TWO_TURNS, USER, ASSISTANT], num_prompt=3)
    assert shown(one_more, tokenizer, train_on="completion") == [
        chatml("How many?", "3 + 4 = 7.").replace("«", "").replace("»", "")
        + chatml("And now?", "8", "How many?", "3 + 4 = 7.")
    ]


# Generation markers


def test_generation_markers_give_the_same_labels(tokenizer: PreTrainedTokenizerFast) -> None:
    plain = one(TWO_TURNS, tokenizer)
    tokenizer.chat_template = MARKED
    assert one(TWO_TURNS, tokenizer) == plain


def test_generation_markers_may_leave_out_the_end_of_turn_token(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED.replace(
        "+ '<|im_end|>' }}{% endgeneration %}", "}}{% endgeneration %}{{ '<|im_end|>' }}", 1
    )
    assert shown(TWO_TURNS, tokenizer) == [chatml("How many?", "3 + 4 = 7.", "And now?", "8")]


def test_a_turn_that_nothing_closes_is_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    """A model that learns from it never learns to stop."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '' if loop.last else '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
    )
    row = run(TWO_TURNS[:2], tokenizer)
    assert [show(sample, tokenizer) for sample in row.samples] == [
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n«3 + 4 = 7.»"
    ]
    assert row.counts == {"turns without an end token": 1}
    tokenizer.chat_template = CHATML
    assert run(TWO_TURNS[:2], tokenizer).counts == {}


def test_markers_in_a_template_that_rewrites_history(tokenizer: PreTrainedTokenizerFast) -> None:
    """An earlier turn that isn't to be trained isn't, though its marked range changes once another follows."""
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ (m.reasoning_content if m.reasoning_content and loop.last else '') + m.content + '<|im_end|>' }}"
        "{% endgeneration %}{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    first, second = {**ASSISTANT, "reasoning_content": "one "}, {**TWO_TURNS[3], "reasoning_content": "two "}
    history = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n3 + 4 = 7.<|im_end|>\n"
    whole = f"{history}<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n«two 8<|im_end|>»\n"
    own = "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n«one 3 + 4 = 7.<|im_end|>»\n"
    messages = [USER, first, TWO_TURNS[2], second]
    assert shown(messages, tokenizer, train_on="last_assistant") == [whole]
    assert shown([USER, {**first, "train": False}, TWO_TURNS[2], second], tokenizer) == [whole]
    assert shown(messages, tokenizer, earlier_turns="mask") == [whole]
    assert shown(messages, tokenizer) == [own, whole]


def test_generation_markers_around_parts_of_a_turn(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED.replace(
        "{{ m.content + '<|im_end|>' }}",
        "{{ m.content }}{% endgeneration %}{{ ' (' }}{% generation %}{{ m.mood }}{% endgeneration %}"
        "{{ ')' }}{% generation %}{{ '<|im_end|>' }}",
        1,
    )
    moods = [{**message, "mood": "glad"} for message in TWO_TURNS]
    assert shown(moods, tokenizer, train_on="last_assistant") == [
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n3 + 4 = 7. (glad)<|im_end|>\n"
        "<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n«8» («glad»)«<|im_end|>»\n"
    ]


def test_turns_without_markers_are_counted(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = MARKED.replace(
        "m.role == 'assistant'", "m.role == 'assistant' and m.content != '8'"
    )
    row = run(TWO_TURNS, tokenizer)
    assert [show(sample, tokenizer) for sample in row.samples] == [
        chatml("How many?", "3 + 4 = 7.") + chatml("And now?", "8").replace("«", "").replace("»", "")
    ]
    assert row.counts == {"turns without markers": 1}
    assert run(TWO_TURNS[2:], tokenizer) == ([], {"turns without markers": 1, "without label": 1}, None)


# Templates that render a turn otherwise once others follow


@pytest.mark.parametrize("template", [REWRITING, MARKED_REWRITING])
def test_a_rewritten_turn_becomes_a_sample_of_its_own(
    tokenizer: PreTrainedTokenizerFast, template: str
) -> None:
    tokenizer.chat_template = template
    messages = [*TWO_TURNS, USER, ASSISTANT]
    first = chatml("How many?", "3 + 4 = 7.").replace("«", "").replace("»", "")
    second = chatml("And now?", "8").replace("«", "").replace("»", "")
    row = run(messages, tokenizer)
    assert [show(sample, tokenizer) for sample in row.samples] == [
        chatml("How many?", "<think></think>3 + 4 = 7."),
        first + chatml("And now?", "<think></think>8"),
        first + second + chatml("How many?", "<think></think>3 + 4 = 7."),
    ]
    assert row.counts == {"turns split off": 2}
    row = run(messages, tokenizer, earlier_turns="mask")
    assert [show(sample, tokenizer) for sample in row.samples] == [
        first + second + chatml("How many?", "<think></think>3 + 4 = 7.")
    ]
    assert row.counts == {"turns masked": 2}
    assert run(messages, tokenizer, train_on="last_assistant").counts == {}
    row = run(messages, tokenizer, earlier_turns="error")
    assert row.problem is not None and (row.samples, row.counts) == ([], {})
    assert (row.problem.kind, row.problem.place) == ("earlier turn rewritten", PLACE)
    assert row.problem.reason.startswith(
        "the chat template renders message 4 (assistant) otherwise once more"
    )


def test_only_the_turns_that_are_rewritten_are_split_off(tokenizer: PreTrainedTokenizerFast) -> None:
    # Another end of turn after "8", but only while nothing follows.
    tokenizer.chat_template = CHATML.replace(
        "m.content", "m.content + ('!' if loop.last and m.content == '8' else '')"
    )
    messages = [*TWO_TURNS, USER, {"role": "assistant", "content": "9"}]
    row = run(messages, tokenizer)
    assert [show(sample, tokenizer) for sample in row.samples] == [
        chatml("How many?", "3 + 4 = 7.").replace("«", "").replace("»", "") + chatml("And now?", "8!"),
        chatml("How many?", "3 + 4 = 7.")
        + chatml("And now?", "8").replace("«", "").replace("»", "")
        + chatml("How many?", "9"),
    ]
    assert row.counts == {"turns split off": 1}


def test_eos_that_is_a_turns_only_end_is_missed_in_earlier_ones(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
    )
    assert shown(TWO_TURNS, tokenizer) == [
        "<|im_start|>user\nHow many?<|im_start|>assistant\n«3 + 4 = 7.<|im_end|>»",
        "<|im_start|>user\nHow many?<|im_start|>assistant\n3 + 4 = 7.<|im_start|>user\nAnd now?"
        "<|im_start|>assistant\n«8<|im_end|>»",
    ]
    # Without a word of its own, such a turn is its end alone.
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + '<|im_start|>' + m.content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant<|im_start|>' }}{% else %}{{ eos_token }}{% endif %}"
    )
    assert shown([USER, {"role": "assistant", "content": ""}, USER, ASSISTANT], tokenizer) == [
        "user<|im_start|>How many?assistant<|im_start|>«<|im_end|>»",
        "user<|im_start|>How many?assistant<|im_start|>user<|im_start|>How many?assistant<|im_start|>"
        "«3 + 4 = 7.<|im_end|>»",
    ]


def test_a_rewritten_turn_alone_leaves_no_sample_of_the_rest(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = REWRITING
    messages = [*TWO_TURNS[:3], {**TWO_TURNS[3], "train": False}]
    row = run(messages, tokenizer)
    assert [show(sample, tokenizer) for sample in row.samples] == [
        chatml("How many?", "<think></think>3 + 4 = 7.")
    ]
    assert row.counts == {"turns split off": 1}


def test_all_but_a_turn_that_is_rewritten_is_a_problem(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = REWRITING
    messages = [USER, {**ASSISTANT, "train": False}, *TWO_TURNS[2:]]
    assert run(messages, tokenizer, train_on="all").problem == (
        "turn not found",
        PLACE,
        "message 2 (assistant) can't be told from those that follow",
    )


def test_generation_prompt_that_a_turn_does_not_begin_with_is_a_problem(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    reason = (
        "the chat template renders message 2 (assistant) otherwise than its generation prompt begins, so its "
        "tokens can't be told; use a chat_template with {% generation %} markers"
    )
    problem = ("generation prompt differs", PLACE, reason)
    # Another header; the same without any content.
    tokenizer.chat_template = CHATML.replace("assistant\n", "bot\n")
    assert run(TWO_TURNS[:2], tokenizer).problem == problem
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + (m.content if m.role == 'user' else '<|im_end|>') }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    assert run(TWO_TURNS[:2], tokenizer).problem == problem


def test_a_turn_stands_behind_the_prompt_that_asks_for_it(tokenizer: PreTrainedTokenizerFast) -> None:
    """What is before it changes once it is there: the model that writes it still has the other before it."""
    tokenizer.chat_template = CHATML.replace(
        "m.content", "('Now: ' if loop.last and m.role == 'user' else '') + m.content"
    )
    expected = "<|im_start|>user\nNow: How many?<|im_end|>\n<|im_start|>assistant\n«3 + 4 = 7.<|im_end|>»\n"
    assert shown(TWO_TURNS[:2], tokenizer) == [expected]
    assert run(TWO_TURNS[:2], tokenizer).counts == {"turns split off": 1}
    refused = run(TWO_TURNS[:2], tokenizer, earlier_turns="error").problem
    assert refused is not None and refused.kind == "earlier turn rewritten"


def test_generation_prompt_with_an_empty_block_where_the_turn_shows_thinking(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = CHATML.replace(
        "m.content",
        "('<think>\n' + m.reasoning_content + '\n</think>' if m.reasoning_content else '') + m.content",
    ).replace("assistant\n", "assistant\n<think>\n\n</think>")
    expected = (
        "<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "«Count.\n</think>3 + 4 = 7.<|im_end|>»\n"
    )
    counts = {"generation prompt not in the rendering": 1, "thinking kept": 1}
    row = run([USER, {**ASSISTANT, "reasoning_content": "Count."}], tokenizer)
    assert ([show(sample, tokenizer) for sample in row.samples], row.counts) == ([expected], counts)
    # The same from a template that finds the thinking in the content, and shows an empty block without any.
    tokenizer.chat_template = CHATML.replace(
        "m.content",
        "('<think>\n' + (m.content.split('</think>')[0].split('<think>')[-1] | trim if '</think>' in m.content else '')"
        " + '\n</think>' if m.role == 'assistant' else '') + m.content.split('</think>')[-1]",
    ).replace("assistant\n", "assistant\n<think>\n\n</think>")
    row = run([USER, {"role": "assistant", "content": "<think> Count. </think>3 + 4 = 7."}], tokenizer)
    assert ([show(sample, tokenizer) for sample in row.samples], row.counts) == ([expected], counts)


# Templates and what they are given


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "roles must alternate"),
        ("{% generation %}{{ messages[9].x.y }}{% endgeneration %}", "list object has no element 9"),
        ("{{ messages[0].content + 1 }}", 'can only concatenate str (not "int") to str'),
        ("{{ messages.x() }}", "'list object' has no attribute 'x'"),
        ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    ],
)
def test_row_that_the_template_refuses(
    tokenizer: PreTrainedTokenizerFast, template: str, reason: str
) -> None:
    tokenizer.chat_template = template
    assert run(TWO_TURNS, tokenizer) == (
        [],
        {},
        ("chat template refuses", PLACE, f"the chat template can't render it: {reason}"),
    )


def test_template_arguments_and_those_of_the_row(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "m.content + mood + place")
    options = {"chat_template_kwargs": {"mood": " glad", "place": " here"}}
    expected = chatml("How many? glad here", "3 + 4 = 7. glad here")
    assert shown([USER, ASSISTANT], tokenizer, **options) == [expected]
    own = Conversation([USER, ASSISTANT], chat_template_kwargs={"mood": " sad"})
    assert shown(own, tokenizer, **options) == [expected.replace("glad", "sad")]
    wrong = Conversation([USER, ASSISTANT], chat_template_kwargs={"tokenize": True})
    problem = run(wrong, tokenizer, **options).problem
    assert problem is not None and problem.kind == "chat template refuses"


def test_named_templates(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = {
        "default": CHATML,
        "tool_use": MARKED.replace("m.content", "(tools | length | string)"),
    }
    tools = [{"type": "function", "function": {"name": "count"}}]
    assert shown(Conversation([USER, ASSISTANT], tools=tools), tokenizer) == [chatml("1", "1")]
    assert shown([USER, ASSISTANT], tokenizer) == [chatml("How many?", "3 + 4 = 7.")]


def test_template_that_takes_parts_only(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace(
        "m.content", "(m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join)"
    )
    assert shown(TWO_TURNS, tokenizer) == [chatml("How many?", "3 + 4 = 7.", "And now?", "8")]


CALL = {
    "type": "function",
    "function": {"name": "count", "arguments": {"what": "é's", "deep": {"n": [1, True]}}},
}
JSON = '{"what": "é\'s", "deep": {"n": [1, true]}}'


@pytest.mark.parametrize(
    "arguments",
    [
        "(call.function.arguments | tojson)",  # takes objects
        "call.function.arguments",  # takes strings: fails with an object
        "('' ~ call.function.arguments)",  # takes strings: prints an object as Python does
        "call.function.arguments.strip()",
        "(call.function.arguments if call.function.arguments is string else call.function.arguments | tojson)",
    ],
)
def test_arguments_of_tool_calls_are_encoded_once(tokenizer: PreTrainedTokenizerFast, arguments: str) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% for call in m.tool_calls %}{{ '!' + ARGUMENTS }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ).replace("ARGUMENTS", arguments)
    quoting = {"role": "user", "content": str(CALL["function"]["arguments"])}  # type: ignore[index]
    for user in (USER, quoting):
        messages = [
            user,
            {"role": "assistant", "content": "Wait.", "tool_calls": [CALL, CALL]},
            *TWO_TURNS[2:],
        ]
        assert shown(messages, tokenizer) == [
            chatml(user["content"], f"Wait.!{JSON}!{JSON}", "And now?", "8")
        ]
    assert CALL["function"]["arguments"] == {"what": "é's", "deep": {"n": [1, True]}}  # type: ignore[index]


def test_template_that_refuses_any_arguments(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace(
        "m.content", "m.content + m.tool_calls[0].function.arguments.none"
    )
    problem = run([{"role": "user", "content": "", "tool_calls": [CALL]}, ASSISTANT], tokenizer).problem
    assert problem is not None and problem.reason.endswith("'dict object' has no attribute 'none'")


def test_thinking_is_counted_by_looking(tokenizer: PreTrainedTokenizerFast) -> None:
    def turn(reasoning: str, content: str) -> list[dict[str, Any]]:
        return [USER, {"role": "assistant", "content": content, "reasoning_content": reasoning}]

    kept, left_out = {"thinking kept": 1}, {"thinking left out": 1}
    assert run(turn("Four and three.", "7"), tokenizer).counts == left_out
    assert run(turn("7", "It is 7"), tokenizer).counts == left_out  # its words are there, but not as thinking
    in_content = [USER, {"role": "assistant", "content": "<think>\nFour.\n</think>\n\n7"}]
    assert run(in_content, tokenizer).counts == kept
    tokenizer.chat_template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    assert run(in_content, tokenizer).counts == left_out
    tokenizer.chat_template = CHATML.replace("m.content", "(m.reasoning_content or '') + m.content")
    assert run(turn("7", "It is 7"), tokenizer).counts == kept


# Rows that can't be used


@pytest.mark.parametrize(
    "example",
    [
        Conversation([{"role": "user", "content": "\ud83d"}, ASSISTANT]),
        PlainText("\ud83d"),
        PlainText("a\ud83d", 1),
    ],
)
def test_half_a_character_is_a_problem(tokenizer: PreTrainedTokenizerFast, example: Example) -> None:
    problem = ("lone surrogate", PLACE, "'\\ud83d' is half of a character")
    rows = [(Place("a", "line", 1), PlainText("fine")), (PLACE, example), (PLACE, PlainText("fine"))]
    before, row, after = encode(rows, tokenizer, EncodeOptions(1000))
    assert row == ([], {}, problem)
    assert before == after == run(PlainText("fine"), tokenizer)
    assert len(before.samples) == 1


def test_assistant_first_is_a_problem_if_it_is_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    reason = "it starts with the assistant's message, which answers nothing"
    messages = [ASSISTANT, *TWO_TURNS]
    assert run(messages, tokenizer).problem == ("starts with the assistant", PLACE, reason)
    assert len(one(messages, tokenizer, train_on="last_assistant").input_ids) > 0


def test_text_that_the_template_does_not_show_cannot_be_trained(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "(m.content if m.role == 'assistant' else '')")
    problem = run([{**USER, "train": True}, ASSISTANT], tokenizer).problem
    expected = ("turn not found", PLACE, "the chat template doesn't show the text of message 1 (user)")
    assert problem == expected
    # Nor can it be told where the text begins, if what is before depends on it.
    tokenizer.chat_template = CHATML.replace("m.content", "(m.content | length | string) + m.content")
    assert run([{**USER, "train": True}, ASSISTANT], tokenizer).problem == expected


def test_tokenizer_without_template_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat_template: the tokenizer has none; set it to chatml or"):
        run(TWO_TURNS, tokenizer)
    assert one(PlainText("Hi"), tokenizer).input_ids  # needs none


# Text, prompt and completion


def test_prompt_and_completion_as_strings(tokenizer: PreTrainedTokenizerFast) -> None:
    assert shown(PlainText("How many? 3 + 4", 9), tokenizer) == ["How many?« 3 + 4<|im_end|>»"]
    assert shown(PlainText("How many? 3 + 4<|im_end|>", 9), tokenizer) == ["How many?« 3 + 4<|im_end|>»"]
    assert shown(PlainText("How", 3), tokenizer) == ["How«<|im_end|>»"]
    assert run(PlainText("How<|im_end|>", 13), tokenizer) == ([], {"without label": 1}, None)


def test_text(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = EncodedSample([*tokenizer("How many?").input_ids, tokenizer.eos_token_id], [True] * 4)
    assert one(PlainText("How many?"), tokenizer) == expected
    assert one(PlainText("How many?<|im_end|>"), tokenizer) == expected
    assert run(PlainText(""), tokenizer) == ([], {"without label": 1}, None)


def test_no_second_bos_and_no_second_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    bos, eos = "<|im_start|>", "<|im_end|>"
    tokenizer.bos_token = bos
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in (bos, eos)}
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=list(ids.items())
    )
    assert tokenizer.decode(tokenizer("Hi").input_ids) == f"{bos}Hi{eos}"
    assert shown(TWO_TURNS, tokenizer) == [chatml("How many?", "3 + 4 = 7.", "And now?", "8")]
    for text in ("Hi", f"Hi{eos}", f"{bos}Hi", f"{bos}Hi{eos}"):
        sample = one(PlainText(text), tokenizer)
        assert tokenizer.decode(sample.input_ids) == f"{bos}Hi{eos}"
        assert sample.trained[1:] == [True] * 3
    assert shown(PlainText("Hi you", 2), tokenizer) == [f"{bos}Hi« you{eos}»"]

    # Tokens that stand for no character are found among those that do.
    ids["<|pad|>"] = 0
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A <|pad|> <|pad|> {eos}", special_tokens=list(ids.items())
    )
    assert shown(PlainText("Hi", 1), tokenizer) == [f"{bos}H«i»<|pad|><|pad|>«{eos}»"]


def test_pad_token_that_is_eos_changes_nothing(tokenizer: PreTrainedTokenizerFast) -> None:
    expected = one(TWO_TURNS, tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    assert one(TWO_TURNS, tokenizer) == expected
    ids, labels = expected.input_ids, [t if use else -100 for t, use in zip(*expected, strict=True)]
    samples = [Sample(ids, labels), Sample(ids * 2, labels * 2)]
    stream = unpad_batch(pad_batch(samples, tokenizer.pad_token_id))
    assert stream.labels.tolist() == build_stream(samples).labels.tolist()
    assert (stream.labels == tokenizer.eos_token_id).sum() == 6


# Tokenizers


def test_offsets_with_white_space_trimmed(tokenizer: PreTrainedTokenizerFast) -> None:
    messages = [USER, {"role": "assistant", "content": "x =  7\n    y"}]
    expected = one(messages, tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoded = tokenizer("x =  7", return_offsets_mapping=True)
    assert any(begin == end for begin, end in encoded.offset_mapping)  # so the case really occurs
    assert one(messages, tokenizer) == expected


def test_trimmed_white_space_before_a_turn_is_not_labelled(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role + ':  ' + m.content + '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:  ' }}{% endif %}"
    )
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    messages = [USER, {"role": "assistant", "content": "<|im_start|>7"}]
    assert shown(messages, tokenizer) == ["user:  How many?<|im_end|>assistant:  «<|im_start|>7<|im_end|>»"]


class WithoutOffsets:
    """Stands for a tokenizer that is not backed by the `tokenizers` library."""

    is_fast = False

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        encoded = self.tokenizer(text, **options)
        return {"input_ids": encoded["input_ids"]}


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_tokenizer_without_offsets(tokenizer: PreTrainedTokenizerFast, template: str) -> None:
    tokenizer.chat_template = template
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    examples = [Conversation(TWO_TURNS), PlainText("How many? 3 + 4", 9), PlainText("Hi")]
    rows: list[tuple[Place, Example]] = [(PLACE, example) for example in examples]
    expected = encode(rows, tokenizer, EncodeOptions(1000))
    assert encode(rows, WithoutOffsets(tokenizer), EncodeOptions(1000)) == expected  # type: ignore[arg-type]
    tokenizer.add_tokens([AddedToken("Q:A", normalized=False)])
    rows.insert(1, (PLACE, PlainText("Q:A", 2)))
    found = encode(rows, WithoutOffsets(tokenizer), EncodeOptions(1000))  # type: ignore[arg-type]
    problem = found.pop(1).problem
    reason = "character 2 lies inside a token, and this tokenizer gives no offsets: use a fast tokenizer"
    assert problem == ("no offsets", PLACE, reason)
    assert found == expected


def test_results_come_in_the_order_of_the_rows(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.bos_token = "<|im_start|>"
    examples = [
        PlainText("How many?"),
        Conversation(TWO_TURNS),
        PlainText("<|im_start|>Hi"),
        Conversation([ASSISTANT]),
        PlainText(""),
        Conversation([USER, ASSISTANT]),
    ]
    rows: list[tuple[Place, Example]] = [
        (Place("a", "row", n), example) for n, example in enumerate(examples)
    ]
    found = encode(rows, tokenizer, EncodeOptions(1000))
    assert [len(row.samples) for row in found] == [1, 1, 1, 0, 0, 1]
    assert [row.samples for row in found] == [run(example, tokenizer).samples for example in examples]
    assert found[3].problem is not None and found[3].problem.place.number == 3
    assert encode([], tokenizer, EncodeOptions(1000)) == []


# Lengths


def test_max_length_is_the_longest_that_is_kept(tokenizer: PreTrainedTokenizerFast) -> None:
    sample = one(TWO_TURNS, tokenizer)
    length = len(sample.input_ids)
    for policy in ("drop", "truncate", "split", "error"):
        assert run(TWO_TURNS, tokenizer, max_length=length, on_overflow=policy) == ([sample], {}, None)
    assert run(TWO_TURNS, tokenizer, max_length=length - 1) == ([], {"too long": 1}, None)
    assert run(TWO_TURNS, tokenizer, max_length=length - 1, on_overflow="error") == (
        [],
        {},
        ("too long", PLACE, f"it has {length} tokens, more than max_length {length - 1}"),
    )


def cut(sample: EncodedSample, begin: int, end: int) -> EncodedSample:
    return EncodedSample(sample.input_ids[begin:end], sample.trained[begin:end])


def test_truncate_keeps_the_first_tokens(tokenizer: PreTrainedTokenizerFast) -> None:
    text = PlainText("How many? And now? How many?", 18)
    whole = one(text, tokenizer)
    assert whole.trained == [False] * 6 + [True] * 5
    found = run(text, tokenizer, max_length=8, on_overflow="truncate")
    assert found == ([cut(whole, 0, 8)], {"truncated": 1}, None)
    found = run(text, tokenizer, max_length=6, on_overflow="truncate")
    assert found == ([], {"truncated": 1, "without label": 1}, None)


def test_split_cuts_into_pieces_that_each_have_something_to_learn(tokenizer: PreTrainedTokenizerFast) -> None:
    text = PlainText("How many? And now? How many?", 18)
    whole = one(text, tokenizer)
    assert run(text, tokenizer, max_length=4, on_overflow="split") == (
        [cut(whole, 4, 8), cut(whole, 8, 11)],
        {"split": 1, "pieces": 2, "pieces without label": 1},
        None,
    )
    # The last piece is one trained token, which nothing in the piece predicts.
    assert run(text, tokenizer, max_length=10, on_overflow="split") == (
        [cut(whole, 0, 10)],
        {"split": 1, "pieces": 1, "pieces without label": 1},
        None,
    )


def test_a_turn_that_was_split_off_is_measured_by_itself(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = REWRITING
    short, long = run(TWO_TURNS, tokenizer).samples
    row = run(TWO_TURNS, tokenizer, max_length=len(long.input_ids) - 1)
    assert row == ([short], {"turns split off": 1, "too long": 1}, None)
