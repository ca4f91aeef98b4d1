"""One message, in whichever dialect, becomes hfpar's own form, or a reason why it can't."""

from __future__ import annotations

import difflib
import json
from typing import Any

from hfpar.data.reading.chunks import type_name
from hfpar.data.reading.rows import Message, RowError

ROLES = ("system", "developer", "user", "assistant", "tool")
_ROLE_ALIASES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "ai": "assistant",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "observation": "tool",
}
_CALL_ROLES = ("function_call", "tool_call")
_THINKING_KEYS = ("reasoning_content", "reasoning", "thinking")
_MEDIA = ("image", "audio", "video")


def parse_messages(name: str, value: Any) -> list[Message]:
    """Bring a list of messages into hfpar's form.

    Args:
        name: of the column, for errors.
        value: the list, or its JSON text.

    Returns:
        Messages as `Conversation` describes them.

    Raises:
        RowError: the value isn't such a list, or a message can't be used.
    """
    value = parse_json(name, value, list)
    if not value:
        raise RowError("empty conversation", f'"{name}" has no message')
    label = f"{name} message" if name in ("prompt", "completion") else "message"
    return [_parse_message(f"{label} {number}", item) for number, item in enumerate(value, start=1)]


def parse_json(name: str, value: Any, kind: type) -> Any:
    """Return a list or an object that may be given as JSON text.

    Raises:
        RowError: it is something else.
    """
    found = value
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = found
    if not isinstance(value, kind):
        needed = "a list" if kind is list else "an object"
        raise RowError("wrong type", f'"{name}" is {type_name(found)} where {needed} is needed')
    return value


def _parse_message(where: str, raw: Any) -> Message:
    if not isinstance(raw, dict):
        raise RowError("wrong type", f"{where} is {type_name(raw)} where an object is needed")
    raw_role = raw.get("role", raw.get("from"))
    role = parse_role(where, raw_role)
    where = f"{where} ({raw_role})"
    content_key = "value" if "content" not in raw and "value" in raw else "content"
    message: Message = {"role": role, "content": ""}
    if _is_call_role(raw_role):
        message["tool_calls"] = _parse_call_content(where, raw.get(content_key))
    else:
        calls = _parse_calls(where, raw, role)
        if calls:
            message["tool_calls"] = calls
        thinking: list[str] = []
        message["content"] = _parse_content(
            where, raw, content_key, thinking, is_optional=bool(calls), role=role
        )
        thought = _parse_thinking(where, raw) or "".join(thinking)
        if thought:
            message["reasoning_content"] = thought
    for key in ("tool_call_id", "name"):
        if raw.get(key) is not None:
            message[key] = _string(where, key, raw[key])
    train = _parse_train(where, raw)
    if train is not None:
        message["train"] = train
    return message


def _is_call_role(role: Any) -> bool:
    return str(role).strip().lower() in _CALL_ROLES


def parse_role(where: str, role: Any) -> str:
    """Return a role by its name in `ROLES`.

    Raises:
        RowError: it is missing or unknown.
    """
    if role is None:
        raise RowError("missing field", f'{where} has no "role"')
    if not isinstance(role, str):
        raise RowError("wrong type", f'"role" of {where} is {type_name(role)} where a string is needed')
    name = role.strip().lower()
    if name in ROLES:
        return name
    if name in _CALL_ROLES:
        return "assistant"
    if name in _ROLE_ALIASES:
        return _ROLE_ALIASES[name]
    near = difflib.get_close_matches(name, [*ROLES, *_ROLE_ALIASES, *_CALL_ROLES], n=1)
    hint = f"; did you mean {near[0]}?" if near else f"; allowed are {', '.join(ROLES)}"
    raise RowError("unknown role", f'{where} has the unknown role "{role[:60]}"{hint}')


def _string(where: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise RowError("wrong type", f'"{key}" of {where} is {type_name(value)} where a string is needed')
    return value


def _parse_content(
    where: str, raw: Message, key: str, thinking: list[str], *, is_optional: bool, role: str
) -> str:
    value = raw.get(key)
    if value is None and is_optional:
        return ""
    if key not in raw:
        raise RowError("missing field", f'{where} has no "content"')
    if value is None:
        raise RowError("null content", f'"{key}" of {where} is null')
    if isinstance(value, list):
        value = "".join(_parse_part(where, part, thinking) for part in value)
    if not isinstance(value, str):
        raise RowError(
            "wrong type",
            f'"{key}" of {where} is {type_name(value)} where a string or a list of parts is needed',
        )
    # A tool may well print nothing; an empty system message keeps a template from putting in its own.
    if not value.strip() and not is_optional and role not in ("tool", "system", "developer"):
        raise RowError("empty content", f'"{key}" of {where} is empty')
    return value


def _parse_part(where: str, part: Any, thinking: list[str]) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RowError("wrong type", f"a part of {where} is {type_name(part)} where an object is needed")
    kind = part.get("type", "text")
    if isinstance(kind, str) and any(word in kind for word in _MEDIA):
        raise RowError("image part", f"{where} has a part of type {kind}; only text can be trained on")
    key = "thinking" if kind == "thinking" else "text"
    if kind not in ("text", "input_text", "output_text", "thinking"):
        raise RowError("wrong type", f'{where} has a part of unknown type "{str(kind)[:60]}"')
    if part.get(key) is None:
        raise RowError("null content", f'a part of {where} has no "{key}"')
    text = _string(where, key, part[key])
    if kind == "thinking":
        thinking.append(text)
        return ""
    return text


def _parse_thinking(where: str, raw: Message) -> str:
    for key in _THINKING_KEYS:
        if raw.get(key) is not None and (text := _string(where, key, raw[key])):
            return text
    return ""


def _parse_train(where: str, raw: Message) -> bool | None:
    train, weight = raw.get("train"), raw.get("weight")
    if weight is not None and (not isinstance(weight, (bool, int, float)) or weight not in (0, 1)):
        raise RowError("bad weight", f'"weight" of {where} is {json.dumps(weight)[:60]}; allowed are 0 and 1')
    if train is not None and (not isinstance(train, (bool, int)) or train not in (0, 1)):
        raise RowError(
            "bad weight", f'"train" of {where} is {json.dumps(train)[:60]}; allowed are true and false'
        )
    if train is not None and weight is not None and bool(train) != bool(weight):
        raise RowError("bad weight", f'"train" and "weight" of {where} contradict each other')
    value = weight if train is None else train
    return None if value is None else bool(value)


def _parse_calls(where: str, raw: Message, role: str) -> list[dict[str, Any]]:
    value = raw.get("tool_calls")
    if value is None and raw.get("function_call") is not None:
        value = [raw["function_call"]]
    if not value:
        return []
    if role != "assistant":
        raise RowError("bad tool call", f"{where} has tool calls, which only the assistant can make")
    if isinstance(value, str):
        value = _json_call(f'"tool_calls" of {where}', value)
    if not isinstance(value, list):
        raise RowError(
            "bad tool call", f'"tool_calls" of {where} is {type_name(value)} where a list is needed'
        )
    return [_parse_call(f"tool call {number} of {where}", call) for number, call in enumerate(value, start=1)]


def _parse_call_content(where: str, value: Any) -> list[dict[str, Any]]:
    """The calls of a message that is nothing but calls, in the manner of ShareGPT."""
    if isinstance(value, str):
        value = _json_call(where, value)
    calls = value if isinstance(value, list) else [value]
    if not calls:
        raise RowError("bad tool call", f"{where} has no call")
    return [_parse_call(f"tool call {number} of {where}", call) for number, call in enumerate(calls, start=1)]


def _json_call(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowError("bad tool call", f"{where} is not valid JSON") from error


def _parse_call(where: str, call: Any) -> dict[str, Any]:
    if isinstance(call, str):
        call = _json_call(where, call)
    if not isinstance(call, dict):
        raise RowError("bad tool call", f"{where} is {type_name(call)} where an object is needed")
    if call.get("type", "function") != "function":
        raise RowError("bad tool call", f'{where} is of type "{str(call["type"])[:60]}"; allowed is function')
    function = call.get("function", call)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RowError("bad tool call", f"{where} has no function name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        arguments = (
            _json_call(f"the text of the arguments of {where}", arguments) if arguments.strip() else {}
        )
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise RowError(
            "bad tool call", f"the arguments of {where} are {type_name(arguments)} where an object is needed"
        )
    result: dict[str, Any] = {
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }
    if call.get("id") is not None:
        result["id"] = _string(where, "id", call["id"])
    return result


def check_order(messages: list[Message]) -> None:
    """Refuse a conversation in which something can't be learnt as it stands.

    Whoever says `train` for a message means it: then a conversation may also begin with the assistant, or end
    with the user.

    Raises:
        RowError: it has no assistant's message, begins with it, ends with another's, or has two of the user in a row.
    """
    if not any(message["role"] == "assistant" or message.get("train") for message in messages):
        raise RowError("no assistant message", "no message is the assistant's, so that nothing can be learnt")
    first = next(
        (message for message in messages if message["role"] not in ("system", "developer")), messages[0]
    )
    if first["role"] == "assistant" and "train" not in first:
        raise RowError(
            "starts with the assistant",
            "the conversation starts with the assistant, who answers nothing "
            "(train on that message says that this is meant)",
        )
    if first["role"] == "tool":
        raise RowError(
            "starts with a tool's result",
            "the conversation starts with a tool's result, which nobody asked for",
        )
    for number, (before, after) in enumerate(zip(messages, messages[1:], strict=False), start=1):
        if before["role"] == after["role"] == "user":
            raise RowError("two users in a row", f"messages {number} and {number + 1} are both the user's")
    last = messages[-1]
    if last["role"] != "assistant" and not last.get("train"):
        what = {"user": "the user", "tool": "a tool's result"}.get(last["role"], f"a {last['role']} message")
        raise RowError(f"ends with {what}", f"the conversation ends with {what}, which nobody answers")
