"""Render conversations with a tokenizer's chat template, whole or up to some message."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from hfpar.data.reading.rows import Conversation, Message, RowError
from hfpar.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]
"""Where something begins in a text, and where it ends, in characters."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Content that begins with thinking: what is around it, and then what is said.
_THINKING = re.compile(r"(\s*(?:<think>)?\s*).*?(\s*</think>\s*).*", re.DOTALL)
_PLACEHOLDER = "hfpar-placeholder"
# What Python code in a template can raise, besides Jinja's own TemplateError.
_TEMPLATE_ERRORS = (
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Rendered(NamedTuple):
    """A conversation as text."""

    text: str
    marked: list[Span]
    """What the template's `{% generation %}` markers enclose, in order."""


class Renderer:
    """A tokenizer's chat template, or several by name.

    Args:
        tokenizer: has the template.
        chat_template_kwargs: what the template is given beside the messages; a row's own win.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template_kwargs: dict[str, Any]) -> None:
        if not tokenizer.chat_template:
            raise ConfigError(
                "chat_template: the tokenizer has none; set it to chatml or to the path of a Jinja file"
            )
        self.tokenizer = tokenizer
        self.eos_token: str = tokenizer.eos_token or ""
        self.special_tokens = special_tokens(tokenizer)
        self.special_token_pattern = re.compile("|".join(map(re.escape, self.special_tokens)) or "(?!)")
        self._kwargs = chat_template_kwargs
        self._special_map = dict(tokenizer.special_tokens_map)
        self._has_markers: dict[str, bool] = {}
        self._wants_parts: dict[str, bool] = {}

    def has_markers(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template that is used with such tools has `{% generation %}` markers."""
        template = self._template(tools)
        if template not in self._has_markers:
            self._has_markers[template] = bool(_GENERATION.search(template))
        return self._has_markers[template]

    def render(
        self, messages: list[Message], conversation: Conversation, add_generation_prompt: bool = False
    ) -> Rendered:
        """Render some messages with a conversation's tools and arguments.

        Raises:
            RowError: the template refuses them.
        """
        if self._takes_parts_only(conversation.tools):
            messages = [_in_parts(message) for message in messages]
        kwargs = {**self._kwargs, **conversation.chat_template_kwargs}
        return self._render(messages, conversation.tools, kwargs, add_generation_prompt)

    def _template(self, tools: list[dict[str, Any]] | None) -> str:
        return str(self.tokenizer.get_chat_template(tools=tools))

    def _takes_parts_only(self, tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template shows a list of text parts, and not a string."""
        template = self._template(tools)
        if template not in self._wants_parts:
            probe = {"role": "user", "content": _PLACEHOLDER}
            self._wants_parts[template] = not self._shows(probe, tools) and self._shows(
                _in_parts(probe), tools
            )
        return self._wants_parts[template]

    def _shows(self, message: Message, tools: list[dict[str, Any]] | None) -> bool:
        try:
            return _PLACEHOLDER in self._render([message], tools, self._kwargs, False).text
        except RowError:
            return False

    def _render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
        add_generation_prompt: bool,
    ) -> Rendered:
        from jinja2 import TemplateError

        try:
            if self.has_markers(tools):
                return self._render_marked(messages, tools, kwargs, add_generation_prompt)
            text = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **kwargs
            )
            return Rendered(str(text), [])
        except (TemplateError, *_TEMPLATE_ERRORS) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RowError("chat template refuses", f"the chat template can't render it: {reason}") from error

    def _render_marked(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
        add_generation_prompt: bool,
    ) -> Rendered:
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marked = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=self._template(tools),
            return_assistant_tokens_mask=True,
            add_generation_prompt=add_generation_prompt,
            **{**self._special_map, **kwargs},
        )
        return Rendered(texts[0], [(begin, end) for begin, end in marked[0] if end > begin])


class RenderedConversation:
    """One conversation's renderings, each made once.

    Arguments of tool calls are given as objects; as JSON strings to a template that doesn't take objects.

    Raises:
        RowError: the template refuses the whole conversation.
    """

    def __init__(self, conversation: Conversation, renderer: Renderer) -> None:
        self.conversation = conversation
        self.renderer = renderer
        self.has_markers = renderer.has_markers(conversation.tools)
        self.messages = [_without_train(message) for message in conversation.messages]
        self._made: dict[tuple[int, bool], Rendered] = {}
        self._choose_arguments()

    @property
    def whole(self) -> Rendered:
        """All messages."""
        return self.up_to(len(self.messages))

    def up_to(self, num_messages: int, add_generation_prompt: bool = False) -> Rendered:
        """The first messages, and what asks the model for the next one."""
        key = (num_messages, add_generation_prompt)
        if key not in self._made:
            messages = self.messages[:num_messages]
            self._made[key] = self.renderer.render(messages, self.conversation, add_generation_prompt)
        return self._made[key]

    def find_content(self, index: int) -> int | None:
        """Where what message `index` itself says begins in `up_to(index + 1)`; None if that doesn't show it."""
        message = dict(self.messages[index])
        content = message.get("content")
        thinking = _THINKING.match(content) if isinstance(content, str) else None
        message["content"] = (
            thinking.expand(rf"\1{_PLACEHOLDER}\2{_PLACEHOLDER}") if thinking else _PLACEHOLDER
        )
        if message.get("reasoning_content"):
            message["reasoning_content"] = _PLACEHOLDER
        found = self._find_placeholder(index, message)
        if found is None and message.get("tool_calls"):  # it may show a call in place of content
            return self._find_placeholder(index, {"role": message["role"], "content": _PLACEHOLDER})
        return found

    def without_final_eos(self, text: str) -> str | None:
        """Leave out an eos token at the end if the special token before it already closes the turn."""
        eos, text = self.renderer.eos_token, text.rstrip()
        if not eos or not text.endswith(eos):
            return None
        text = text[: -len(eos)]
        return text if text.rstrip().endswith(self.renderer.special_tokens) else None

    def _find_placeholder(self, index: int, message: Message) -> int | None:
        shown = self.renderer.render([*self.messages[:index], message], self.conversation).text
        found = shown.find(_PLACEHOLDER)
        return found if found >= 0 and self.up_to(index + 1).text.startswith(shown[:found]) else None

    def _choose_arguments(self) -> None:
        arguments = [
            call["function"]["arguments"]
            for message in self.messages
            for call in message.get("tool_calls") or ()
            if isinstance(call["function"].get("arguments"), dict) and call["function"]["arguments"]
        ]
        if not arguments:
            return
        objects = self.messages
        try:
            text: str | None = self.whole.text
        except RowError:
            text = None
        printed = [str(value) for value in arguments]
        if text is not None and not any(value in text for value in printed):
            return
        self.messages, made, self._made = (
            [_with_json_arguments(message) for message in objects],
            self._made,
            {},
        )
        try:
            other = self.whole.text
        except RowError:
            self.messages, self._made = objects, made
        else:
            if text is not None and _num_found(printed, other) >= _num_found(printed, text):
                self.messages, self._made = objects, made  # it is what a message says


def special_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[str, ...]:
    """The texts that a tokenizer turns into special tokens."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return tuple(sorted(added.union(tokenizer.all_special_tokens)))


def _num_found(parts: list[str], text: str) -> int:
    return sum(text.count(part) for part in parts)


def _without_train(message: Message) -> Message:
    if "train" not in message:
        return message
    return {key: value for key, value in message.items() if key != "train"}


def _with_json_arguments(message: Message) -> Message:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _in_parts(message: Message) -> Message:
    if not isinstance(message.get("content"), str):
        return message
    return {**message, "content": [{"type": "text", "text": message["content"]}]}
