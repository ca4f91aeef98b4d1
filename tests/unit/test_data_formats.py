"""Rows of every format, as hfpar's own examples, and what is refused, by kind and reason."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from hfpar.data.reading.formats import to_example
from hfpar.data.reading.rows import Conversation, Example, PlainText, RowError

USER = {"role": "user", "content": "Hi"}
BOT = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be kind"}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": 1, "y": None}}}
SCHEMA = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
TOOLS = [{"type": "function", "function": SCHEMA}]


def example(row: dict[str, Any], format: Any = "auto", columns: Any = None) -> Example:  # noqa: A002
    before = copy.deepcopy(row)
    try:
        return to_example(row, format, columns)
    finally:
        assert row == before


def problem(row: dict[str, Any], format: Any = "auto", columns: Any = None) -> tuple[str, str]:  # noqa: A002
    with pytest.raises(RowError) as caught:
        example(row, format, columns)
    assert "\n" not in caught.value.reason
    return caught.value.kind, caught.value.reason


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


# Formats


@pytest.mark.parametrize(
    ("format_name", "row", "expected"),
    [
        ("messages", said(SYSTEM, USER, BOT), Conversation([SYSTEM, USER, BOT])),
        ("messages", {"messages": json.dumps([USER, BOT])}, Conversation([USER, BOT])),
        (
            "sharegpt",
            {
                "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}],
                "system": "Be kind",
            },
            Conversation([SYSTEM, USER, BOT]),
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "Be kind"},
                    USER,
                    {"from": "gpt", "value": "Hello"},
                ]
            },
            Conversation([SYSTEM, USER, BOT]),
        ),
        (
            "sharegpt",
            {"conversations": [USER, BOT], "tools": json.dumps([SCHEMA])},
            Conversation([USER, BOT], tools=TOOLS),
        ),
        ("prompt_completion", {"prompt": "é ", "completion": "b"}, PlainText("é b", 2)),
        (
            "prompt_completion",
            {"prompt": [SYSTEM, USER], "completion": [BOT]},
            Conversation([SYSTEM, USER, BOT], num_prompt=2),
        ),
        (
            "prompt_completion",
            {"prompt": [USER, BOT, USER], "completion": [BOT, USER, BOT], "tools": [SCHEMA]},
            Conversation([USER, BOT, USER, BOT, USER, BOT], 3, TOOLS),
        ),
        ("alpaca", {"instruction": "Hi", "output": "Hello"}, Conversation([USER, BOT])),
        (
            "alpaca",
            {"instruction": "Hi", "input": "", "output": "Hello", "system": ""},
            Conversation([USER, BOT]),
        ),
        ("alpaca", {"instruction": "", "input": "Hi", "output": "Hello"}, Conversation([USER, BOT])),
        (
            "alpaca",
            {"instruction": "Hi", "output": "Hello", "history": [["Hi", "Hello"], ["Hi", "Hello"]]},
            Conversation([USER, BOT] * 3),
        ),
        (
            "alpaca",
            {"instruction": "Hi", "output": "Hello", "history": '[["Hi", "Hello"]]'},
            Conversation([USER, BOT] * 2),
        ),
        ("alpaca", {"instruction": "Hi", "output": "Hello", "history": []}, Conversation([USER, BOT])),
        (
            "alpaca",
            {"instruction": "Add", "input": "1 2", "output": "3", "system": "Be kind"},
            Conversation(
                [SYSTEM, {"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}]
            ),
        ),
        ("text", {"text": " é\n"}, PlainText(" é\n")),
    ],
)
def test_formats_by_their_columns_and_by_name(
    format_name: str, row: dict[str, Any], expected: Example
) -> None:
    assert example(row) == example(row, format_name) == expected
    # Nulls of other formats' columns, and columns of no format, change nothing.
    nulls = {
        "messages": None,
        "conversations": None,
        "prompt": None,
        "instruction": None,
        "text": None,
        "system": None,
    }
    assert example({**nulls, **row, "id": 3, "source": "x"}) == expected


def test_a_conversation_wins_over_its_own_text_and_a_full_format_over_a_half_one() -> None:
    assert example({**said(USER, BOT), "text": "x", "prompt": "Hi"}) == Conversation([USER, BOT])
    assert example({"instruction": "Hi", "output": "Hello", "text": "x"}) == Conversation([USER, BOT])
    assert example({**said(USER, BOT), "text": "x"}, "text") == PlainText("x")


def test_columns_that_fit_two_formats_or_none() -> None:
    row = {**said(USER, BOT), "prompt": "a", "completion": "b"}
    assert problem(row) == (
        "unrecognised columns",
        "the row could be messages or prompt_completion; say which with dataset_format; "
        "its keys are: completion, messages, prompt",
    )
    assert example(row, "prompt_completion") == PlainText("ab", 1)
    none = (
        "no format has these columns; set dataset_format, or name them with dataset_columns, such as "
        "instruction=question and output=answer; its keys are: "
    )
    assert problem({"question": "a", "answer": "b"}) == ("unrecognised columns", none + "answer, question")
    assert problem({"messages": None, "prompt": "x"}) == ("unrecognised columns", none + "messages, prompt")
    assert problem({}) == ("unrecognised columns", none + "none")


@pytest.mark.parametrize(
    ("format_name", "row", "missing"),
    [
        ("messages", {"text": "a"}, "messages"),
        ("sharegpt", {"text": "a"}, "conversations"),
        ("alpaca", {"instruction": "a", "text": "a"}, "output"),
        ("prompt_completion", {"prompt": "a", "text": "a"}, "completion"),
        ("text", {"prompt": "a"}, "text"),
    ],
)
def test_a_missing_field_of_a_named_format(format_name: str, row: dict[str, Any], missing: str) -> None:
    keys = ", ".join(sorted(row))
    needs = f"which dataset_format {format_name} needs; its keys are: "
    assert problem(row, format_name) == ("missing field", f'the row has no "{missing}", {needs}{keys}')
    keys = ", ".join(sorted([*row, missing]))
    assert problem({**row, missing: None}, format_name) == (
        "null content",
        f'the row has no value in "{missing}", {needs}{keys}',
    )


# Column names


def test_columns_by_other_names() -> None:
    row = {"question": "Hi", "answer": "Hello"}
    qa = {"instruction": "question", "output": "answer"}
    assert example(row, "alpaca", qa) == example(row, "auto", qa) == Conversation([USER, BOT])
    plain = {"prompt": "question", "completion": "answer"}
    assert example(row, "auto", plain) == example(row, "prompt_completion", plain) == PlainText("HiHello", 2)
    assert example(
        {"dialog": [USER, BOT], "fns": [SCHEMA]}, "auto", {"messages": "dialog", "tools": "fns"}
    ) == (Conversation([USER, BOT], tools=TOOLS))
    # A mapped name is the mapped column, whatever else has that name.
    assert example({"text": "a", "body": "b"}, "auto", {"text": "body"}) == PlainText("b")
    assert example({"input": "a", "output": "Hello"}, "auto", {"instruction": "input", "input": "none"}) == (
        Conversation([{"role": "user", "content": "a"}, BOT])
    )


def test_mapped_columns_say_which_of_two_formats_is_meant() -> None:
    row = {**said(USER, BOT), "question": "a", "answer": "b"}
    assert example(row, "auto", {"prompt": "question", "completion": "answer"}) == PlainText("ab", 1)


def test_a_mapped_column_that_is_not_there() -> None:
    row = {"question": "Hi", "answer": "Hello", "context": "c"}
    assert problem(row, "alpaca", {"instruction": "problem", "output": "answer"}) == (
        "missing field",
        'dataset_columns says instruction=problem, but the row has no "problem"; '
        "its keys are: answer, context, question",
    )
    assert problem(row, "alpaca", {"instruction": "questoin", "output": "answer"}) == (
        "missing field",
        'dataset_columns says instruction=questoin, but the row has no "questoin"; did you mean question?',
    )
    qa = {"instruction": "question", "output": "answer"}
    assert problem(row, "alpaca", {**qa, "input": "contxt"}) == (
        "missing field",
        'dataset_columns says input=contxt, but the row has no "contxt"; did you mean context?',
    )
    # Not every row has an optional column.
    assert example(row, "alpaca", {**qa, "system": "persona"}) == Conversation([USER, BOT])
    assert problem({**row, "question": None}, "alpaca", qa) == (
        "null content",
        'the row has no value in "question", which dataset_format alpaca needs; '
        "its keys are: answer, context, question",
    )


def test_a_name_that_no_format_has() -> None:
    assert problem({"question": "a"}, "auto", {"question": "instruction"}) == (
        "unknown setting",
        "dataset_columns: no format has a column question; allowed are messages, conversations, prompt, completion, "
        "instruction, output, text, input, system, history, tools, chat_template_kwargs",
    )
    assert problem({"a": "b"}, "auto", {"instructions": "a"}) == (
        "unknown setting",
        "dataset_columns: no format has a column instructions; did you mean instruction?",
    )


# Messages


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("model", "assistant"),
        ("bot", "assistant"),
        ("ASSISTANT", "assistant"),
        ("function", "tool"),
        ("function_response", "tool"),
        ("observation", "tool"),
        ("tool", "tool"),
        ("developer", "developer"),
    ],
)
def test_roles_of_other_dialects(name: str, role: str) -> None:
    for message in ({"role": name, "content": "x"}, {"from": name, "value": "x"}):
        row = said(USER, BOT, message, {**BOT, "train": True})
        assert example(row).messages[2] == {"role": role, "content": "x"}


def test_all_keys_of_a_message() -> None:
    row = said(
        USER,
        {"role": "assistant", "tool_calls": [{**CALL, "id": "1"}], "reasoning_content": "hm", "junk": 1},
        {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
        {"role": "assistant", "content": "Hello", "name": None, "tool_calls": None, "weight": None},
    )
    assert example(row) == Conversation(
        [
            USER,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**CALL, "id": "1"}],
                "reasoning_content": "hm",
            },
            {"role": "tool", "content": "", "tool_call_id": "1", "name": "f"},
            BOT,
        ]
    )


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_names_of_thinking(key: str) -> None:
    expected = {**BOT, "reasoning_content": "hm"}
    assert example(said(USER, {**BOT, key: "hm"})) == Conversation([USER, expected])
    for nothing in (None, ""):
        assert example(said(USER, {**BOT, key: nothing})) == Conversation([USER, BOT])
    assert problem(said(USER, {**BOT, key: 3})) == (
        "wrong type",
        f'"{key}" of message 2 (assistant) is a number where a string is needed',
    )


def test_content_as_parts() -> None:
    parts = [{"type": "text", "text": "He"}, "l", {"text": "lo"}, {"type": "output_text", "text": ""}]
    assert example(said(USER, {"role": "assistant", "content": parts})) == Conversation([USER, BOT])
    thought = [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Hello"}]
    assert example(said(USER, {"role": "assistant", "content": thought})) == Conversation(
        [USER, {**BOT, "reasoning_content": "hm"}]
    )


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video"])
def test_parts_that_are_not_text(kind: str) -> None:
    parts = [{"type": "text", "text": "What is this?"}, {"type": kind, kind: {"url": "x"}}]
    assert problem(said({"role": "user", "content": parts}, BOT)) == (
        "image part",
        f"message 1 (user) has a part of type {kind}; only text can be trained on",
    )


def test_columns_of_images() -> None:
    row = said(USER, BOT)
    for value in (["a.png"], "a.png"):
        refused = ("image part", 'the row has "images"; only text can be trained on')
        assert problem({**row, "images": value}) == refused
    assert example({**row, "images": []}) == example({**row, "images": None}) == Conversation([USER, BOT])


@pytest.mark.parametrize(
    ("message", "kind", "reason"),
    [
        (5, "wrong type", "message 2 is a number where an object is needed"),
        (None, "wrong type", "message 2 is null where an object is needed"),
        ({"content": "a"}, "missing field", 'message 2 has no "role"'),
        ({"role": None, "content": "a"}, "missing field", 'message 2 has no "role"'),
        (
            {"role": 1, "content": "a"},
            "wrong type",
            '"role" of message 2 is a number where a string is needed',
        ),
        (
            {"role": "asistant", "content": "a"},
            "unknown role",
            'message 2 has the unknown role "asistant"; did you mean assistant?',
        ),
        (
            {"from": "narrator", "value": "a"},
            "unknown role",
            'message 2 has the unknown role "narrator"; allowed are system, developer, user, assistant, tool',
        ),
        ({"role": "assistant"}, "missing field", 'message 2 (assistant) has no "content"'),
        (
            {"role": "assistant", "content": None},
            "null content",
            '"content" of message 2 (assistant) is null',
        ),
        ({"from": "gpt", "value": None}, "null content", '"value" of message 2 (gpt) is null'),
        (
            {"role": "assistant", "content": ""},
            "empty content",
            '"content" of message 2 (assistant) is empty',
        ),
        (
            {"role": "assistant", "content": " \n\t"},
            "empty content",
            '"content" of message 2 (assistant) is empty',
        ),
        (
            {"role": "assistant", "content": []},
            "empty content",
            '"content" of message 2 (assistant) is empty',
        ),
        (
            {"role": "assistant", "content": "", "reasoning": "hm"},
            "empty content",
            '"content" of message 2 (assistant) is empty',
        ),
        (
            {"role": "assistant", "content": 5},
            "wrong type",
            '"content" of message 2 (assistant) is a number where a string or a list of parts is needed',
        ),
        (
            {"role": "assistant", "content": [3]},
            "wrong type",
            "a part of message 2 (assistant) is a number where an object is needed",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal", "text": "a"}]},
            "wrong type",
            'message 2 (assistant) has a part of unknown type "refusal"',
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": None}]},
            "null content",
            'a part of message 2 (assistant) has no "text"',
        ),
        (
            {"role": "assistant", "content": [{"type": "text", "text": 5}]},
            "wrong type",
            '"text" of message 2 (assistant) is a number where a string is needed',
        ),
        (
            {**BOT, "name": 5},
            "wrong type",
            '"name" of message 2 (assistant) is a number where a string is needed',
        ),
    ],
)
def test_a_bad_message_is_named_by_number_and_role(message: Any, kind: str, reason: str) -> None:
    assert problem(said(USER, message)) == (kind, reason)
    assert problem({"conversations": [USER, message]}) == (kind, reason)
    in_prompt = reason.replace("message 2", "prompt message 2")
    assert problem({"prompt": [USER, message], "completion": [BOT]}) == (kind, in_prompt)


def test_lists_of_messages_that_are_none() -> None:
    assert problem({"messages": "hi"}) == ("wrong type", '"messages" is a string where a list is needed')
    assert problem({"messages": {"role": "user"}}) == (
        "wrong type",
        '"messages" is an object where a list is needed',
    )
    assert problem({"messages": []}) == ("empty conversation", '"messages" has no message')
    assert problem({"prompt": [], "completion": [BOT]}) == ("empty conversation", '"prompt" has no message')
    assert problem({"prompt": "a", "completion": [BOT]}) == (
        "wrong type",
        '"prompt" is a string and "completion" is a list; both must be strings, or both lists of messages',
    )


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "a", "completion": " "}, '"completion" is empty'),
        ({"prompt": "", "completion": "a"}, '"prompt" is empty'),
        ({"instruction": "a", "output": "\n"}, '"output" is empty'),
        ({"instruction": "", "input": " ", "output": "a"}, '"instruction" is empty'),
        ({"text": ""}, '"text" is empty'),
    ],
)
def test_empty_text(row: dict[str, Any], reason: str) -> None:
    assert problem(row) == ("empty content", reason)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"text": 5}, '"text" is a number where a string is needed'),
        ({"instruction": ["a"], "output": "a"}, '"instruction" is a list where a string is needed'),
        ({"instruction": "a", "output": 5}, '"output" is a number where a string is needed'),
        ({"instruction": "a", "output": "b", "system": 5}, '"system" is a number where a string is needed'),
        ({**said(USER, BOT), "tools": 5}, '"tools" is a number where a list is needed'),
        ({**said(USER, BOT), "tools": "{"}, '"tools" is a string where a list is needed'),
        ({**said(USER, BOT), "tools": [5]}, '"tools 1" is a number where an object is needed'),
        (
            {**said(USER, BOT), "chat_template_kwargs": [1]},
            '"chat_template_kwargs" is a list where an object is needed',
        ),
    ],
)
def test_columns_of_the_wrong_type(row: dict[str, Any], reason: str) -> None:
    assert problem(row) == ("wrong type", reason)


# The order of messages


@pytest.mark.parametrize(
    ("messages", "kind", "reason"),
    [
        ([USER], "no assistant message", "no message is the assistant's, so that nothing can be learnt"),
        ([SYSTEM], "no assistant message", "no message is the assistant's, so that nothing can be learnt"),
        (
            [USER, BOT, USER],
            "ends with the user",
            "the conversation ends with the user, which nobody answers",
        ),
        (
            [USER, BOT, SYSTEM],
            "ends with a system message",
            "the conversation ends with a system message, which nobody answers",
        ),
        (
            [USER, BOT, {"role": "tool", "content": "3"}],
            "ends with a tool's result",
            "the conversation ends with a tool's result, which nobody answers",
        ),
        ([USER, USER, BOT], "two users in a row", "messages 1 and 2 are both the user's"),
        ([SYSTEM, USER, BOT, USER, USER, BOT], "two users in a row", "messages 4 and 5 are both the user's"),
        (
            [SYSTEM, BOT, USER, BOT],
            "starts with the assistant",
            "the conversation starts with the assistant, who answers nothing "
            "(train on that message says that this is meant)",
        ),
        (
            [{"role": "tool", "content": "3"}, BOT],
            "starts with a tool's result",
            "the conversation starts with a tool's result, which nobody asked for",
        ),
    ],
)
def test_conversations_that_cannot_be_learnt_as_they_stand(
    messages: list[Any], kind: str, reason: str
) -> None:
    assert problem(said(*messages)) == (kind, reason)
    assert problem({"conversations": messages}) == (kind, reason)


def test_an_explicit_train_says_that_an_unusual_order_is_meant() -> None:
    greeting, asked = {**BOT, "train": False}, {**USER, "train": True}
    for messages in ([greeting, USER, BOT], [USER, BOT, asked], [SYSTEM, asked]):
        assert example(said(*messages)) == Conversation(messages)


def test_a_completion_needs_an_assistant() -> None:
    assert problem({"prompt": [USER, BOT], "completion": [USER]}) == (
        "no assistant message",
        'no message of "completion" is the assistant\'s',
    )
    assert problem({"prompt": [USER], "completion": [USER, BOT]})[0] == "two users in a row"


def test_system_columns_and_system_messages() -> None:
    assert example({**said(USER, BOT), "system": "Be kind"}) == Conversation([SYSTEM, USER, BOT])
    assert example({**said(SYSTEM, USER, BOT), "system": "Be kind "}) == Conversation([SYSTEM, USER, BOT])
    assert problem({**said(SYSTEM, USER, BOT), "system": "Be rude"}) == (
        "two system messages",
        'the row has a "system" text and another system message',
    )


# What is learnt


@pytest.mark.parametrize(
    ("keys", "train"),
    [
        ({"train": True}, True),
        ({"train": False}, False),
        ({"weight": 0}, False),
        ({"weight": 1.0}, True),
        ({"weight": 1, "train": True}, True),
    ],
)
def test_train_and_weight(keys: dict[str, Any], train: bool) -> None:
    assert example(said(USER, {**BOT, **keys})) == Conversation([USER, {**BOT, "train": train}])
    assert example(said({**USER, **keys}, BOT)) == Conversation([{**USER, "train": train}, BOT])


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"weight": 0.5}, '"weight" of message 2 (assistant) is 0.5; allowed are 0 and 1'),
        ({"weight": "1"}, '"weight" of message 2 (assistant) is "1"; allowed are 0 and 1'),
        ({"train": "no"}, '"train" of message 2 (assistant) is "no"; allowed are true and false'),
        ({"train": 2}, '"train" of message 2 (assistant) is 2; allowed are true and false'),
        (
            {"train": True, "weight": 0},
            '"train" and "weight" of message 2 (assistant) contradict each other',
        ),
    ],
)
def test_bad_weights(keys: dict[str, Any], reason: str) -> None:
    assert problem(said(USER, {**BOT, **keys})) == ("bad weight", reason)


# Tools


@pytest.mark.parametrize(
    "calls",
    [
        [CALL],
        [{"function": CALL["function"]}],
        [CALL["function"]],
        [{"type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": null}'}}],
        json.dumps([CALL]),
        [json.dumps(CALL)],
    ],
)
def test_tool_calls_however_they_are_written(calls: Any) -> None:
    expected = Conversation([USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}])
    assert example(said(USER, {"role": "assistant", "content": None, "tool_calls": calls})) == expected
    assert example(said(USER, {"role": "assistant", "tool_calls": calls})) == expected


def test_calls_of_older_and_other_dialects() -> None:
    expected = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    old = {
        "role": "assistant",
        "content": None,
        "function_call": {"name": "f", "arguments": '{"x": 1, "y": null}'},
    }
    assert example(said(USER, old)) == Conversation([USER, expected])
    call = CALL["function"]
    for content in (call, json.dumps(call), [call], json.dumps([call])):
        turn = {"from": "function_call", "value": content}
        observed = {"from": "observation", "value": "3"}
        assert example({"conversations": [USER, turn, observed, BOT], "tools": [SCHEMA]}) == Conversation(
            [USER, expected, {"role": "tool", "content": "3"}, BOT], tools=TOOLS
        )


@pytest.mark.parametrize("arguments", [None, "", "{}", {}])
def test_calls_without_arguments(arguments: Any) -> None:
    call = {"name": "f", "arguments": arguments}
    expected = {"type": "function", "function": {"name": "f", "arguments": {}}}
    assert example(said(USER, {**BOT, "tool_calls": [call]})) == Conversation(
        [USER, {**BOT, "tool_calls": [expected]}]
    )


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("[", '"tool_calls" of message 2 (assistant) is not valid JSON'),
        ({"name": "f"}, '"tool_calls" of message 2 (assistant) is an object where a list is needed'),
        ([5], "tool call 1 of message 2 (assistant) is a number where an object is needed"),
        ([CALL, {"name": ""}], "tool call 2 of message 2 (assistant) has no function name"),
        ([{"function": "f"}], "tool call 1 of message 2 (assistant) has no function name"),
        (
            [{"type": "code", "name": "f"}],
            'tool call 1 of message 2 (assistant) is of type "code"; allowed is function',
        ),
        (
            [{"name": "f", "arguments": "{x}"}],
            "the text of the arguments of tool call 1 of message 2 (assistant) is not valid JSON",
        ),
        (
            [{"name": "f", "arguments": "[1]"}],
            "the arguments of tool call 1 of message 2 (assistant) are a list where an object is needed",
        ),
    ],
)
def test_bad_tool_calls(calls: Any, reason: str) -> None:
    assert problem(said(USER, {**BOT, "tool_calls": calls})) == ("bad tool call", reason)


def test_calls_by_others_and_calls_that_are_none() -> None:
    assert problem(said({**USER, "tool_calls": [CALL]}, BOT)) == (
        "bad tool call",
        "message 1 (user) has tool calls, which only the assistant can make",
    )
    assert problem(said(USER, {"from": "function_call", "value": "f(x)"})) == (
        "bad tool call",
        "message 2 (function_call) is not valid JSON",
    )
    assert example(said({**USER, "tool_calls": []}, BOT)) == Conversation([USER, BOT])


@pytest.mark.parametrize(
    "tools", [TOOLS, [SCHEMA], json.dumps(TOOLS), json.dumps([SCHEMA]), [json.dumps(SCHEMA)]]
)
def test_tools_however_they_are_written(tools: Any) -> None:
    assert example({**said(USER, BOT), "tools": tools}) == Conversation([USER, BOT], tools=TOOLS)


@pytest.mark.parametrize("tools", [None, [], "", "[]"])
def test_no_tools(tools: Any) -> None:
    assert example({**said(USER, BOT), "tools": tools}) == Conversation([USER, BOT])


def test_a_tool_without_a_name() -> None:
    assert problem({**said(USER, BOT), "tools": [SCHEMA, {"type": "function", "function": {}}]}) == (
        "bad tool",
        "tool 2 has no function name",
    )


@pytest.mark.parametrize("kwargs", [{"enable_thinking": False}, '{"enable_thinking": false}'])
def test_template_arguments_of_a_row(kwargs: Any) -> None:
    expected = Conversation([USER, BOT], chat_template_kwargs={"enable_thinking": False})
    assert example({**said(USER, BOT), "chat_template_kwargs": kwargs}) == expected


# Text that no tokenizer takes


LONE = "ab\ud83dc"


@pytest.mark.parametrize(
    ("row", "where"),
    [
        (said(USER, {**BOT, "content": LONE}), "message 2 (assistant)"),
        (said(USER, {**BOT, "reasoning_content": LONE}), "message 2 (assistant)"),
        (
            said(USER, {**BOT, "tool_calls": [{"name": "f", "arguments": {"x": [LONE]}}]}),
            "message 2 (assistant)",
        ),
        (said(USER, {**BOT, "tool_calls": [{"name": "f", "arguments": {LONE: 1}}]}), "message 2 (assistant)"),
        ({"conversations": [{"from": "human", "value": LONE}, BOT]}, "message 1 (user)"),
        ({**said(USER, BOT), "system": LONE}, "message 1 (system)"),
        ({**said(USER, BOT), "tools": [{**SCHEMA, "description": LONE}]}, '"tools"'),
        ({**said(USER, BOT), "chat_template_kwargs": {"x": LONE}}, '"chat_template_kwargs"'),
        ({"instruction": "a", "output": LONE}, "message 2 (assistant)"),
        ({"prompt": LONE, "completion": "a"}, "the text"),
        ({"text": LONE}, "the text"),
    ],
)
def test_a_lone_surrogate(row: dict[str, Any], where: str) -> None:
    assert problem(row) == ("lone surrogate", f"{where} holds a lone surrogate (character 3)")
    whole = json.loads(json.dumps(row).replace("\\ud83d", "\\ud83d\\ude00"))
    example(whole)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_an_empty_system_message_stays(role: str) -> None:
    """Templates put in a system message of their own where there is none."""
    empty = {"role": role, "content": ""}
    assert example({"messages": [empty, USER, BOT]}, "messages") == Conversation([empty, USER, BOT])


def test_thinking_under_the_second_name() -> None:
    row = said(USER, {**BOT, "reasoning_content": "", "reasoning": "long thought"})
    assert example(row) == Conversation([USER, {**BOT, "reasoning_content": "long thought"}])
