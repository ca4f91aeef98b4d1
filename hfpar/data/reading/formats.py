"""From a row of a data set, in any of the formats, to what is trained on."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from hfpar.config.schema import FormatName
from hfpar.data.reading.chunks import type_name
from hfpar.data.reading.messages import check_order, parse_json, parse_messages
from hfpar.data.reading.rows import Conversation, Example, Message, PlainText, RowError

Row = dict[str, Any]

_REQUIRED: dict[FormatName, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "text": ("text",),
}
"""Columns by which a format is known, in the order in which they are tried."""
_OPTIONAL = ("input", "system", "history", "tools", "chat_template_kwargs")
_NAMES = tuple(name for names in _REQUIRED.values() for name in names) + _OPTIONAL
_MEDIA_COLUMNS = ("images", "videos", "audios")


def to_example(row: Row, format: FormatName, columns: Mapping[str, str] | None = None) -> Example:  # noqa: A002
    """Bring a row into hfpar's form.

    Args:
        row: as it was read. A key of its own that is null counts as absent.
        format: of the row; auto tells by its keys.
        columns: the row's names of the columns, by the names that formats have for them.

    Returns:
        A conversation with canonical messages, or text.

    Raises:
        RowError: the row can't be used; with its kind and the reason.
    """
    view = _canonical(row, columns or {})
    if format == "auto":
        format = _recognise(view, row, columns or {})  # noqa: A001
    for name in _REQUIRED[format]:
        if view.get(name) is None:
            theirs = (columns or {}).get(name, name)
            kind = "missing field" if theirs not in row else "null content"
            what = f'has no "{theirs}"' if theirs not in row else f'has no value in "{theirs}"'
            raise RowError(kind, f"the row {what}, which dataset_format {format} needs{_found(row)}")
    for name in _MEDIA_COLUMNS:
        if row.get(name):
            raise RowError("image part", f'the row has "{name}"; only text can be trained on')
    example = _BUILDERS[format](view)
    _check_text(example)
    return example


def recognise(row: Row, columns: Mapping[str, str] | None = None) -> FormatName:
    """Tell a row's format by its keys, as `auto` does.

    Raises:
        RowError: no format has them, or several have.
    """
    return _recognise(_canonical(row, columns or {}), row, columns or {})


def _canonical(row: Row, columns: Mapping[str, str]) -> Row:
    """The row's values by the names that formats have, nulls left out."""
    view = {name: row[name] for name in _NAMES if row.get(name) is not None and name not in columns}
    for name, theirs in columns.items():
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed are {', '.join(_NAMES)}"
            raise RowError("unknown setting", f"dataset_columns: no format has a column {name}; {hint}")
        if theirs not in row:
            # An optional column may be absent from some rows, but not because it is misspelt.
            near = difflib.get_close_matches(theirs, row, n=1, cutoff=0.75)
            if name in _OPTIONAL and not near:
                continue
            hint = f"; did you mean {near[0]}?" if near else ""
            raise RowError(
                "missing field",
                f'dataset_columns says {name}={theirs}, but the row has no "{theirs}"{hint or _found(row)}',
            )
        if row[theirs] is not None:
            view[name] = row[theirs]
    return view


def _found(row: Row) -> str:
    return f"; its keys are: {', '.join(sorted(map(str, row)))[:300] or 'none'}"


def _recognise(view: Row, row: Row, columns: Mapping[str, str]) -> FormatName:
    known = [kind for kind, names in _REQUIRED.items() if all(name in view for name in names)]
    # Whoever maps a format's columns has chosen it.
    known = [kind for kind in known if any(name in columns for name in _REQUIRED[kind])] or known
    conversations = [kind for kind in known if kind != "text"]
    if len(conversations) > 1:
        raise RowError(
            "unrecognised columns",
            f"the row could be {' or '.join(conversations)}; say which with dataset_format{_found(row)}",
        )
    if not known:
        raise RowError(
            "unrecognised columns",
            "no format has these columns; set dataset_format, or name them with dataset_columns, such as "
            f"instruction=question and output=answer{_found(row)}",
        )
    return known[0]


def _conversation(view: Row, messages: list[Message], num_prompt: int = 0) -> Conversation:
    check_order(messages)
    return Conversation(
        messages,
        num_prompt,
        _parse_tools(view.get("tools")),
        dict(parse_json("chat_template_kwargs", view.get("chat_template_kwargs") or {}, dict)),
    )


def _from_messages(view: Row) -> Example:
    return _conversation(view, _with_system(view, parse_messages("messages", view["messages"])))


def _from_sharegpt(view: Row) -> Example:
    return _conversation(view, _with_system(view, parse_messages("conversations", view["conversations"])))


def _with_system(view: Row, messages: list[Message]) -> list[Message]:
    """Put the system column's text first."""
    system = view.get("system")
    if system is None:
        return messages
    if not isinstance(system, str):
        raise RowError("wrong type", f'"system" is {type_name(system)} where a string is needed')
    if not system.strip():
        return messages
    if messages[0]["role"] == "system":
        if messages[0]["content"].strip() == system.strip():
            return messages
        raise RowError("two system messages", 'the row has a "system" text and another system message')
    return [{"role": "system", "content": system}, *messages]


def _from_prompt_completion(view: Row) -> Example:
    prompt, completion = view["prompt"], view["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return PlainText(_text("prompt", prompt) + _text("completion", completion), len(prompt))
    if not isinstance(prompt, list) or not isinstance(completion, list):
        raise RowError(
            "wrong type",
            f'"prompt" is {type_name(prompt)} and "completion" is {type_name(completion)}; '
            "both must be strings, or both lists of messages",
        )
    prompts, completions = parse_messages("prompt", prompt), parse_messages("completion", completion)
    if not any(message["role"] == "assistant" or message.get("train") for message in completions):
        raise RowError("no assistant message", 'no message of "completion" is the assistant\'s')
    return _conversation(view, prompts + completions, len(prompts))


def _from_alpaca(view: Row) -> Example:
    parts = [_text(name, view[name], may_be_empty=True) for name in ("instruction", "input") if name in view]
    question = "\n\n".join(part for part in parts if part.strip())
    _text("instruction", question)
    messages = _history(view.get("history"))
    messages += [
        {"role": "user", "content": question},
        {"role": "assistant", "content": _text("output", view["output"])},
    ]
    return _conversation(view, _with_system(view, messages))


def _history(value: Any) -> list[Message]:
    """Earlier turns: a list of [what the user said, what the assistant answered]."""
    messages: list[Message] = []
    for pair in parse_json("history", value or [], list):
        if not isinstance(pair, list) or len(pair) != 2:
            raise RowError("wrong type", '"history" must be a list of pairs: a question and its answer')
        messages += [
            {"role": role, "content": _text("history", text)}
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]
    return messages


def _from_text(view: Row) -> Example:
    return PlainText(_text("text", view["text"]))


_BUILDERS = {
    "messages": _from_messages,
    "sharegpt": _from_sharegpt,
    "prompt_completion": _from_prompt_completion,
    "alpaca": _from_alpaca,
    "text": _from_text,
}


def _text(name: str, value: Any, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise RowError("wrong type", f'"{name}" is {type_name(value)} where a string is needed')
    if not may_be_empty and not value.strip():
        raise RowError("empty content", f'"{name}" is empty')
    return value


def _parse_tools(value: Any) -> list[dict[str, Any]] | None:
    """Bring tool definitions into the form of a list of `{"type": "function", "function": {...}}`."""
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    tools = []
    for number, tool in enumerate(parse_json("tools", value, list), start=1):
        tool = parse_json(f"tools {number}", tool, dict)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowError("bad tool", f"tool {number} has no function name")
        tools.append(tool if "function" in tool else {"type": "function", "function": tool})
    return tools or None


def _check_text(example: Example) -> None:
    if isinstance(example, PlainText):
        _refuse_surrogates("the text", example.text)
        return
    for number, message in enumerate(example.messages, start=1):
        _refuse_surrogates(f"message {number} ({message['role']})", message)
    _refuse_surrogates('"tools"', example.tools)
    _refuse_surrogates('"chat_template_kwargs"', example.chat_template_kwargs)


def _refuse_surrogates(where: str, value: Any) -> None:
    """No tokenizer takes half of a UTF-16 pair, which JSON's escapes can write."""
    if isinstance(value, str):
        if not value.isascii():
            try:
                value.encode("utf-8")
            except UnicodeEncodeError as error:
                raise RowError(
                    "lone surrogate", f"{where} holds a lone surrogate (character {error.start + 1})"
                ) from error
    elif isinstance(value, dict):
        for key, item in value.items():
            _refuse_surrogates(where, key)
            _refuse_surrogates(where, item)
    elif isinstance(value, list):
        for item in value:
            _refuse_surrogates(where, item)
