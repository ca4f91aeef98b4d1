"""Find what the model is to write in a conversation: texts, and the ranges in them that are trained.

Which characters are a turn comes from the template's `{% generation %}` markers, or, where it has none, from
rendering growing prefixes of the conversation: what lies between the generation prompt and the end of the turn.
Neither looks for marker tokens in the text.

A template may render a turn otherwise once others follow: it leaves out earlier thinking, say. Then the whole
conversation doesn't show such a turn as the model writes it, and `earlier_turns` says what becomes of it.
"""

from __future__ import annotations

import os.path
from collections import Counter
from dataclasses import dataclass, field

from hfpar.config.schema import EarlierTurnsName, TrainOnName
from hfpar.data.chat.rendering import Rendered, RenderedConversation, Renderer, Span
from hfpar.data.reading.rows import Conversation, Message, RowError


@dataclass
class LabelledText:
    """Text of one sample."""

    text: str
    spans: list[Span] = field(default_factory=list)
    """What is trained."""
    add_special_tokens: bool = False
    append_eos: bool = False


@dataclass(frozen=True)
class _Turn:
    """A message in the rendering that ends with it."""

    until: str
    begin: int
    spans: list[Span]


def label_conversation(
    conversation: Conversation, renderer: Renderer, train_on: TrainOnName, earlier_turns: EarlierTurnsName
) -> tuple[list[LabelledText], Counter[str]]:
    """Render a conversation and find what is trained in it.

    Args:
        conversation: a row.
        renderer: with the chat template.
        train_on: which messages are trained, where they don't say so themselves.
        earlier_turns: what becomes of a turn that the whole conversation shows otherwise.

    Returns:
        The texts, each of which becomes a sample, the whole conversation last; and what is to be counted.

    Raises:
        RowError: the template refuses the row, or a turn can't be told.
    """
    chat = RenderedConversation(conversation, renderer)
    counts: Counter[str] = Counter()
    if train_on == "all":
        texts = [_all_but_untrained(chat, counts)]
    else:
        texts = _place_turns(chat, _wanted(conversation, train_on), earlier_turns, counts)
    _count_thinking(chat, texts, counts)
    search = renderer.special_token_pattern.search
    if any(search(text) for message in chat.messages for text in _own_texts(message)):
        counts["special token text"] += 1
    return texts, counts


def _wanted(conversation: Conversation, train_on: TrainOnName) -> list[int]:
    """The messages that are trained, in order."""
    messages = conversation.messages
    chosen = [
        index
        for index, message in enumerate(messages)
        if message["role"] == "assistant" and index >= conversation.num_prompt
    ]
    if train_on == "last_assistant":
        chosen = chosen[-1:]
    elif train_on == "completion" and not conversation.num_prompt:
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        chosen = [index for index in chosen if index > max(users, default=-1)]
    return [index for index, message in enumerate(messages) if message.get("train", index in chosen)]


def _all_but_untrained(chat: RenderedConversation, counts: Counter[str]) -> LabelledText:
    """Every character, but for messages that say that they aren't trained."""
    text = chat.whole.text
    edges = [0]
    for index, message in enumerate(chat.conversation.messages):
        if message.get("train", True):
            continue
        turn = _find_turn(chat, index, counts)
        spans = _spans_in(chat, turn, text)
        if spans is None:
            raise RowError("turn not found", f"{_name(chat, index)} can't be told from those that follow")
        edges += [edge for span in spans for edge in span]
    edges.append(len(text))
    return LabelledText(text, [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b])


def _place_turns(
    chat: RenderedConversation, wanted: list[int], earlier_turns: EarlierTurnsName, counts: Counter[str]
) -> list[LabelledText]:
    """Put each turn into a rendering that shows it as the model writes it: the whole one where it does."""
    texts = [LabelledText(chat.whole.text)]
    for index in reversed(wanted):
        turn = _find_turn(chat, index, counts)
        if chat.messages[index]["role"] == "assistant" and not _is_closed(chat, turn):
            counts["turns without an end token"] += 1
        for text in texts:
            spans = _spans_in(chat, turn, text.text)
            if spans is not None:
                text.spans += spans
                break
        else:
            if earlier_turns == "error":
                raise RowError(
                    "earlier turn rewritten",
                    f"the chat template renders {_name(chat, index)} otherwise once more messages follow; "
                    "set earlier_turns to split or mask",
                )
            counts["turns split off" if earlier_turns == "split" else "turns masked"] += 1
            if earlier_turns == "split":
                texts.append(LabelledText(turn.until, turn.spans))
    return [text for text in reversed(texts) if text.spans] or texts[:1]


def _is_closed(chat: RenderedConversation, turn: _Turn) -> bool:
    """Whether the last that is trained of a turn is a special token, at which a generation can stop."""
    trained = "".join(turn.until[begin:end] for begin, end in turn.spans[-1:]).rstrip()
    return not turn.spans or trained.endswith(chat.renderer.special_tokens or ("\0",))


def _spans_in(chat: RenderedConversation, turn: _Turn, text: str) -> list[Span] | None:
    """Where a turn is in another rendering; None if that shows it, or what is before it, otherwise.

    A template may close the conversation with an eos token after the last turn's own end: that isn't missed.
    """
    if text.startswith(turn.until):
        return turn.spans
    shorter = chat.without_final_eos(turn.until)
    if shorter is None or len(shorter) <= turn.begin or not text.startswith(shorter):
        return None
    length = len(shorter.rstrip())
    return [(begin, min(end, length)) for begin, end in turn.spans if begin < length]


def _find_turn(chat: RenderedConversation, index: int, counts: Counter[str]) -> _Turn:
    """Find what a message adds to the rendering of those before it."""
    until = chat.up_to(index + 1)
    message = chat.messages[index]
    if message["role"] != "assistant":
        found = chat.find_content(index)
        if found is None:
            raise RowError(
                "turn not found", f"the chat template doesn't show the text of {_name(chat, index)}"
            )
        begin = found
    elif index == 0:
        raise RowError(
            "starts with the assistant", "it starts with the assistant's message, which answers nothing"
        )
    elif chat.has_markers:
        return _find_marked(chat, index, until, counts)
    else:
        own = _find_begin(chat, index, until.text, counts)
        if own is None:
            return _find_behind_its_prompt(chat, index, until.text)
        begin = own
    end = begin + _trained_length(until.text[begin:], message)
    return _Turn(until.text, begin, [(begin, end)])


def _find_marked(chat: RenderedConversation, index: int, until: Rendered, counts: Counter[str]) -> _Turn:
    """A turn's own marked ranges: those beyond the ones that earlier turns have."""
    has_earlier = any(message["role"] == "assistant" for message in chat.messages[:index])
    spans = until.marked[len(chat.up_to(index).marked) if has_earlier else 0 :]
    if not spans:
        counts["turns without markers"] += 1
        return _Turn(until.text, len(until.text), [])
    *others, (begin, end) = spans
    # Many templates close a turn behind the marked range.
    if not until.text[begin:end].rstrip().endswith(chat.renderer.special_tokens or ("\0",)):
        closing = chat.renderer.special_token_pattern.match(until.text, end)
        end = closing.end() if closing else end
    return _Turn(until.text, spans[0][0], [*others, (begin, end)])


def _find_begin(chat: RenderedConversation, index: int, until: str, counts: Counter[str]) -> int | None:
    """Where an assistant's turn begins: after the generation prompt. None if what is before it differs from it.

    A generation prompt may open what the finished turn doesn't show (`<think>`): then the turn begins with what
    it says itself, if all before that is in the prompt.
    """
    prompt = chat.up_to(index, add_generation_prompt=True).text
    if until.startswith(prompt):
        return len(prompt)
    content = chat.find_content(index)
    if content is None or _num_common(prompt, until) < content:
        return None
    counts["generation prompt not in the rendering"] += 1
    return content


def _find_behind_its_prompt(chat: RenderedConversation, index: int, until: str) -> _Turn:
    """Put a turn behind the prompt that asks for it, where the finished turn changes what is before it.

    GPT-OSS's template leaves out the thinking in front of a tool call as soon as the final answer is there, but
    the model that writes this answer has that thinking before it.
    """
    prompt = chat.up_to(index, add_generation_prompt=True).text
    opening = prompt[_num_common(prompt, chat.up_to(index).text) :]
    content = chat.find_content(index)
    begin = until.rfind(opening, 0, content) if opening.strip() and content is not None else -1
    if begin < 0:
        raise RowError(
            "generation prompt differs",
            f"the chat template renders {_name(chat, index)} otherwise than its generation prompt begins, so "
            "its tokens can't be told; use a chat_template with {% generation %} markers",
        )
    turn = until[begin + len(opening) :]
    length = _trained_length(turn, chat.messages[index])
    return _Turn(prompt + turn, len(prompt), [(len(prompt), len(prompt) + length)])


def _num_common(first: str, second: str) -> int:
    return len(os.path.commonprefix([first, second]))


def _trained_length(turn: str, message: Message) -> int:
    """Leave out white space that the template puts after the end-of-turn token.

    Where nothing but white space follows the message's own text, that white space is the end of the turn.
    """
    reasoning, said = _split_thinking(message)
    rest = turn.partition(reasoning)[2] if reasoning and reasoning in turn else turn
    after = rest.partition(said)[2] if said and said in rest else rest
    return len(turn.rstrip()) if after.strip() else len(turn)


def _split_thinking(message: Message) -> tuple[str, str]:
    """A message's thinking and what it says, without white space around them."""
    content = message.get("content")
    said = content if isinstance(content, str) else ""
    reasoning = message.get("reasoning_content") or ""
    if not reasoning and "</think>" in said:
        reasoning, _, said = said.partition("</think>")
        reasoning = reasoning.partition("<think>")[2] or reasoning
    return reasoning.strip(), said.strip()


def _count_thinking(chat: RenderedConversation, texts: list[LabelledText], counts: Counter[str]) -> None:
    """Tell by looking whether each message's thinking is shown in a text."""
    for message in chat.messages:
        if message["role"] != "assistant":
            continue
        reasoning, _ = _split_thinking(message)
        if reasoning:
            # Another message may say the same words.
            elsewhere = sum(_split_thinking(other)[1].count(reasoning) for other in chat.messages)
            kept = any(text.text.count(reasoning) > elsewhere for text in texts)
            counts["thinking kept" if kept else "thinking left out"] += 1


def _own_texts(message: Message) -> list[str]:
    return [text for key in ("content", "reasoning_content") if isinstance(text := message.get(key), str)]


def _name(chat: RenderedConversation, index: int) -> str:
    return f"message {index + 1} ({chat.messages[index]['role']})"
