"""What a row is on its way from a file to tokens: where it stands, what is wrong with it, what it says."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

Message = dict[str, Any]


class Place(NamedTuple):
    """Where a row stands, for people: `train.jsonl, line 3`."""

    path: str
    unit: str
    """`line` or `row`."""
    number: int
    """Counts from 1."""

    def __str__(self) -> str:
        """As errors name it."""
        return f"{self.path}, {self.unit} {self.number}"


class Problem(NamedTuple):
    """A row that can't be used."""

    kind: str
    """A short fixed phrase, by which problems are counted, such as `broken JSON`."""
    place: Place
    reason: str
    """What is wrong with this row, on one line."""

    def __str__(self) -> str:
        """As errors name it."""
        return f"{self.place}: {self.reason}"


class RowError(Exception):
    """A row that can't be used, found where its place isn't known.

    Args:
        kind: as `Problem.kind`.
        reason: as `Problem.reason`.
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason

    def at(self, place: Place) -> Problem:
        """The problem, with its place."""
        return Problem(self.kind, place, self.reason)


@dataclass(frozen=True)
class Conversation:
    """Messages for the chat template.

    A message has `role` (system, developer, user, assistant or tool) and, as it applies, `content` (text),
    `reasoning_content`, `tool_calls` (their arguments as objects), `tool_call_id`, `name`, and `train`, which
    says whether the model is to learn it, whatever `train_on` says.
    """

    messages: list[Message]
    num_prompt: int = 0
    """How many of the first messages are a prompt, apart from the completion."""
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PlainText:
    """Text that no template touches."""

    text: str
    num_prompt_chars: int = 0
    """How many of the first characters are a prompt, apart from the completion."""


Example = Conversation | PlainText
