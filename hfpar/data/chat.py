"""Turn rows into tokens, with labels on what the model is to write and on nothing else.

A conversation is rendered once and tokenized once. Which characters are the assistant's comes from the
template's `{% generation %}` markers, or, where it has none, from rendering growing prefixes of the
conversation: what lies between the generation prompt and the end of the turn. Neither looks for marker
tokens in the text, and neither asks whether a token is the pad token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hfpar.data.stream import IGNORE_INDEX, Sample
from hfpar.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
Message = dict[str, Any]

_BATCH = 1000  # texts for one call of the tokenizer, which spreads them over the cores
_GENERATION = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True)
class TokenizeReport:
    """What became of the rows."""

    num_rows: int
    num_samples: int
    """Rows that are used."""
    num_too_long: int
    """Rows dropped because they have more than `max_length` tokens."""
    num_without_label: int
    """Rows dropped because no token of theirs is to be learnt."""
    num_tokens: int
    """Tokens of the samples."""
    num_label_tokens: int
    """Tokens of the samples that are targets."""


@dataclass(frozen=True)
class _Text:
    """A row as text: the character ranges that the model is to write, in order."""

    text: str
    spans: list[tuple[int, int]]
    add_special_tokens: bool = False
    append_eos: bool = False


def tokenize_rows(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> tuple[list[Sample], TokenizeReport]:
    """Tokenize rows and label what the model is to write.

    Args:
        rows: Each `{"messages": [...]}` (labels on the assistant's turns, their end-of-turn token included),
            `{"prompt": ..., "completion": ...}` (labels on the completion; both strings or both lists of
            messages), or `{"text": ...}` (labels everywhere). A row may carry `tools` for the template.
        tokenizer: Its chat template renders the conversations.
        max_length: Rows with more tokens are dropped and counted; nothing is ever cut.

    Returns:
        The samples in the order of their rows, and the counts.

    Raises:
        DataError: A row cannot be rendered or labelled (the message names it, counting from 1), or no row at
            all is left.
        ConfigError: There are conversations but the tokenizer has no chat template.
    """
    labelled: list[Sample] = []
    num_too_long = num_without_label = 0
    for start in range(0, len(rows), _BATCH):
        for sample in _tokenize_batch(rows[start : start + _BATCH], tokenizer, start + 1):
            if len(sample.input_ids) > max_length:
                num_too_long += 1
            elif _num_targets(sample) == 0:
                num_without_label += 1
            else:
                labelled.append(sample)
    if not labelled:
        raise DataError(
            f"none of the {len(rows)} rows can be trained on: {num_too_long} are longer than max_length "
            f"{max_length}, {num_without_label} have nothing to learn (no assistant's turn or completion)"
        )
    return labelled, TokenizeReport(
        num_rows=len(rows),
        num_samples=len(labelled),
        num_too_long=num_too_long,
        num_without_label=num_without_label,
        num_tokens=sum(len(sample.input_ids) for sample in labelled),
        num_label_tokens=sum(_num_targets(sample) for sample in labelled),
    )


def _num_targets(sample: Sample) -> int:
    # Nothing predicts the first token, so a label there teaches nothing.
    return sum(label != IGNORE_INDEX for label in sample.labels[1:])


def _tokenize_batch(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, first: int) -> list[Sample]:
    samples: list[Sample | None] = [None] * len(rows)
    texts: dict[int, _Text] = {}
    for index, row in enumerate(rows):
        if _is_conversation(row) and _has_generation_markers(tokenizer, row):
            samples[index] = _tokenize_marked(row, tokenizer, first + index)
        else:
            texts[index] = _as_text(row, tokenizer, first + index)
    for special in (False, True):
        chosen = {index: text for index, text in texts.items() if text.add_special_tokens is special}
        for index, sample in zip(chosen, _tokenize_texts(chosen, tokenizer, special, first), strict=True):
            samples[index] = sample
    return [sample for sample in samples if sample is not None]


def _as_text(row: Row, tokenizer: PreTrainedTokenizerBase, number: int) -> _Text:
    if _is_conversation(row):
        messages, num_prompt = _messages(row)
        return _render_growing(messages, num_prompt, row.get("tools"), tokenizer, number)
    text = row["text"] if "text" in row else row["prompt"] + row["completion"]
    _check_characters(text, number)
    begin = 0 if "text" in row else len(row["prompt"])
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    return _Text(
        text=text,
        spans=[(begin, len(text))],
        add_special_tokens=not (bos and text.startswith(bos)),
        append_eos=bool(eos) and not text.endswith(eos),
    )


def _is_conversation(row: Row) -> bool:
    return "messages" in row or not isinstance(row.get("prompt", ""), str)


def _messages(row: Row) -> tuple[list[Message], int]:
    """Return the whole conversation, and how many of its first messages are never labelled."""
    if "messages" in row:
        return list(row["messages"]), 0
    return [*row["prompt"], *row["completion"]], len(row["prompt"])


def _has_generation_markers(tokenizer: PreTrainedTokenizerBase, row: Row) -> bool:
    if not tokenizer.chat_template:
        raise ConfigError("chat_template: the tokenizer has none; name a Jinja file with chat_template")
    template = tokenizer.get_chat_template(tools=row.get("tools"))
    return bool(tokenizer.is_fast and _GENERATION.search(template))


def _render(
    messages: list[Message],
    tools: Any,
    tokenizer: PreTrainedTokenizerBase,
    number: int,
    add_generation_prompt: bool = False,
) -> str:
    from jinja2 import TemplateError

    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise DataError(f"row {number}: the chat template cannot render it: {_one_line(error)}") from error
    _check_characters(text, number)
    return text


def _check_characters(text: str, number: int) -> None:
    """JSON can name half of a surrogate pair, which is no character: no tokenizer takes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"row {number}: {text[error.start]!r} is half of a character") from error


def _render_growing(
    messages: list[Message], num_prompt: int, tools: Any, tokenizer: PreTrainedTokenizerBase, number: int
) -> _Text:
    """Find each assistant turn between the renderings with and without it."""
    text = _render(messages, tools, tokenizer, number)
    spans = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant" or index < num_prompt:
            continue
        if index == 0:
            raise DataError(f"row {number}: it starts with the assistant's message, which answers nothing")
        prompt = _render(messages[:index], tools, tokenizer, number, add_generation_prompt=True)
        last = index + 1 == len(messages)
        until = text if last else _render(messages[: index + 1], tools, tokenizer, number)
        if not (until.startswith(prompt) and text.startswith(until)):
            raise DataError(
                f"row {number}: the chat template renders message {index + 1} differently once more messages "
                "follow, so its tokens cannot be told; use a chat_template with {% generation %} markers"
            )
        turn = until[len(prompt) :]
        spans.append((len(prompt), len(prompt) + _trained_length(turn, message)))
    return _Text(text=text, spans=spans)


def _trained_length(turn: str, message: Message) -> int:
    """Leave out white space that the template puts after the end-of-turn token.

    Where nothing but white space follows the message's own text, that white space is the end of the turn.
    """
    content = message.get("content")
    said = content.strip() if isinstance(content, str) else ""
    after = turn.partition(said)[2] if said and said in turn else turn
    return len(turn.rstrip()) if after.strip() else len(turn)


def _tokenize_marked(row: Row, tokenizer: PreTrainedTokenizerBase, number: int) -> Sample:
    """Label what the template's `{% generation %}` markers enclose, after the prompt if the row has one."""
    messages, num_prompt = _messages(row)
    tools = row.get("tools")
    _render(messages, tools, tokenizer, number)  # names the row if the template refuses it
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    begin = len(_render(messages[:num_prompt], tools, tokenizer, number, True)) if num_prompt else 0
    trained = [
        bool(mask) and offset[0] >= begin
        for mask, offset in zip(encoded["assistant_masks"], encoded["offset_mapping"], strict=True)
    ]
    return _sample(encoded["input_ids"], trained)


def _tokenize_texts(
    texts: dict[int, _Text], tokenizer: PreTrainedTokenizerBase, add_special_tokens: bool, first: int
) -> list[Sample]:
    """Tokenize each text once and label the tokens that lie inside its spans."""
    if not texts:
        return []
    encoded = tokenizer(
        [text.text for text in texts.values()],
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=tokenizer.is_fast,
        return_attention_mask=False,
        verbose=False,
    )
    samples = []
    for position, (index, text) in enumerate(texts.items()):
        input_ids: list[int] = list(encoded["input_ids"][position])
        if tokenizer.is_fast:
            trained = _inside(encoded["offset_mapping"][position], text.spans)
        else:
            trained = _inside_by_prefix(input_ids, text, tokenizer, first + index)
        if text.append_eos and (not input_ids or input_ids[-1] != tokenizer.eos_token_id):
            input_ids.append(int(tokenizer.eos_token_id))
            trained.append(True)
        elif text.append_eos:
            trained[-1] = True  # the tokenizer itself ends a text with eos
        samples.append(_sample(input_ids, trained))
    return samples


def _inside(offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Say for each token whether it lies inside a span.

    Some tokenizers trim white space from offsets, which leaves an empty range at the token's end: it counts
    as inside if that end is.
    """
    trained = []
    upcoming = iter([*spans, (2**63, 2**63)])
    begin, end = next(upcoming)
    for token_begin, token_end in offsets:
        while token_end > end:
            begin, end = next(upcoming)
        trained.append(token_begin >= begin and token_end > begin)
    return trained


def _inside_by_prefix(
    input_ids: list[int], text: _Text, tokenizer: PreTrainedTokenizerBase, number: int
) -> list[bool]:
    """The same for a tokenizer without offsets: count the tokens of the text before each edge of a span."""
    trained = [False] * len(input_ids)
    for span in text.spans:
        edges = []
        for edge in span:
            prefix = list(
                tokenizer(text.text[:edge], add_special_tokens=text.add_special_tokens)["input_ids"]
            )
            if input_ids[: len(prefix)] != prefix:
                raise DataError(
                    f"row {number}: character {edge} lies inside a token, and this tokenizer "
                    "gives no offsets: use a fast tokenizer"
                )
            edges.append(len(prefix))
        trained[edges[0] : edges[1]] = [True] * (edges[1] - edges[0])
    return trained


def _sample(input_ids: Sequence[int], trained: Sequence[bool]) -> Sample:
    ids = [int(token) for token in input_ids]
    return Sample(ids, [token if use else IGNORE_INDEX for token, use in zip(ids, trained, strict=True)])


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
