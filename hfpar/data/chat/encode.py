"""Turn examples into tokens, and say which of them the model is to learn.

Each text is tokenized once, many in one call. A token is trained if it lies inside a range of characters that is
trained (`hfpar/data/chat/turns.py` finds those), whatever its id: whether it is the pad token is never asked.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from hfpar.config.schema import EarlierTurnsName, OverflowName, TrainOnName
from hfpar.data.chat.overflow import EncodedSample, fit_length
from hfpar.data.chat.rendering import Renderer, Span
from hfpar.data.chat.turns import LabelledText, label_conversation
from hfpar.data.reading.rows import Conversation, Example, Place, PlainText, Problem, RowError

if TYPE_CHECKING:
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class EncodeOptions:
    """The settings that decide about tokens and labels, by their names in `SFTConfig`."""

    max_length: int
    on_overflow: OverflowName = "drop"
    train_on: TrainOnName = "assistant"
    earlier_turns: EarlierTurnsName = "split"
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


class EncodedRow(NamedTuple):
    """What became of a row."""

    samples: list[EncodedSample]
    """None, one or several; each has at most `max_length` tokens and a trained one after its first."""
    counts: dict[str, int]
    """What is worth counting, such as `too long` or `turns split off`; nothing is 0."""
    problem: Problem | None
    """Why the row can't be used; then there are no samples and no counts."""


def encode(
    rows: Sequence[tuple[Place, Example]], tokenizer: PreTrainedTokenizerBase, options: EncodeOptions
) -> list[EncodedRow]:
    """Tokenize rows and label what the model is to write.

    Args:
        rows: examples and where they stand. About a thousand at a time are fast.
        tokenizer: its chat template renders the conversations.
        options: what is trained, and how long samples may be.

    Returns:
        One result for each row, in order. A row that can't be used has a problem.

    Raises:
        ConfigError: there are conversations but the tokenizer has no chat template.
    """
    renderer: Renderer | None = None
    labelled: list[tuple[list[LabelledText], Counter[str]] | RowError] = []
    for _, example in rows:
        try:
            if isinstance(example, Conversation):
                renderer = renderer or Renderer(tokenizer, options.chat_template_kwargs)
                row = label_conversation(example, renderer, options.train_on, options.earlier_turns)
            else:
                row = [_label_text(example, tokenizer, options.train_on)], Counter()
            _check_characters(row[0])
            labelled.append(row)
        except RowError as error:
            labelled.append(error)
    texts = [text for row in labelled if not isinstance(row, RowError) for text in row[0]]
    tokens = _tokenize(texts, tokenizer)
    return [
        _finish(place, row, tokens, tokenizer, options)
        for (place, _), row in zip(rows, labelled, strict=True)
    ]


def _label_text(
    example: PlainText, tokenizer: PreTrainedTokenizerBase, train_on: TrainOnName
) -> LabelledText:
    text = example.text
    begin = 0 if train_on == "all" else example.num_prompt_chars
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    if eos and text.endswith(eos) and begin <= len(text) - len(eos):
        text = text[: -len(eos)]  # the tokenizer may add one, too
    return LabelledText(
        text=text,
        spans=[(begin, len(text))],
        add_special_tokens=not (bos and text.startswith(bos)),
        append_eos=bool(eos) and not text.endswith(eos),
    )


def _check_characters(texts: list[LabelledText]) -> None:
    """JSON can name half of a surrogate pair, which is no character: no tokenizer takes it."""
    for labelled in texts:
        try:
            labelled.text.encode()
        except UnicodeEncodeError as error:
            half = labelled.text[error.start]
            raise RowError("lone surrogate", f"{half!r} is half of a character") from error


class _Tokens(NamedTuple):
    """A text's tokens."""

    input_ids: list[int]
    encoding: Encoding | None
    """Knows each token's range of characters; None if the tokenizer can't tell."""


def _tokenize(texts: list[LabelledText], tokenizer: PreTrainedTokenizerBase) -> Iterator[_Tokens]:
    """Tokenize all texts in one call, or two if only some get special tokens; results in the texts' order."""
    tokens: list[_Tokens | None] = [None] * len(texts)
    for special in (False, True):
        chosen = [index for index, text in enumerate(texts) if text.add_special_tokens is special]
        if not chosen:
            continue
        encoded = tokenizer(
            [texts[index].text for index in chosen],
            add_special_tokens=special,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        encodings = encoded.encodings if tokenizer.is_fast else [None] * len(chosen)
        for index, input_ids, encoding in zip(chosen, encoded["input_ids"], encodings, strict=True):
            tokens[index] = _Tokens(input_ids, encoding)
    return iter([found for found in tokens if found is not None])


def _finish(
    place: Place,
    row: tuple[list[LabelledText], Counter[str]] | RowError,
    tokens: Iterator[_Tokens],
    tokenizer: PreTrainedTokenizerBase,
    options: EncodeOptions,
) -> EncodedRow:
    """Label a row's tokens, whose texts are the next of `tokens`, and fit them into `max_length`."""
    if isinstance(row, RowError):
        return EncodedRow([], {}, row.at(place))
    texts, counts = row
    own = [next(tokens) for _ in texts]  # also of a row that fails halfway
    samples: list[EncodedSample] = []
    try:
        for text, found in zip(texts, own, strict=True):
            sample = _label_tokens(text, found, tokenizer)
            samples += fit_length(sample, options.max_length, options.on_overflow, counts)
    except RowError as error:
        return EncodedRow([], {}, error.at(place))
    return EncodedRow(samples, dict(counts), None)


def _label_tokens(text: LabelledText, tokens: _Tokens, tokenizer: PreTrainedTokenizerBase) -> EncodedSample:
    input_ids, trained = tokens.input_ids, [False] * len(tokens.input_ids)
    offsets = None if tokens.encoding is None else tokens.encoding.offsets
    for span in text.spans:
        if offsets is not None:
            begin, end = _inside(offsets, span)
        else:
            begin, end = (_count_tokens(input_ids, text, edge, tokenizer) for edge in span)
        trained[begin:end] = [True] * (end - begin)
    if text.append_eos and (not input_ids or input_ids[-1] != tokenizer.eos_token_id):
        input_ids.append(int(tokenizer.eos_token_id))
        trained.append(True)
    elif text.append_eos:
        trained[-1] = True  # the tokenizer itself ends a text with eos
    return EncodedSample(input_ids, trained)


def _inside(offsets: list[Span], span: Span) -> Span:
    """Which tokens have a character in a range: from the first to before the last.

    A token may hold the end of the prompt and the beginning of an answer (" yes" where the prompt ends with a
    space): it is trained, for nothing else would teach that beginning.

    Some tokenizers trim white space from offsets, which leaves an empty range at the token's end: it counts
    as inside if that end is. Tokens that stand for no character, added at the end, have the range (0, 0).
    """
    num_tokens = len(offsets)
    while num_tokens and offsets[num_tokens - 1] == (0, 0):
        num_tokens -= 1
    begin = bisect_right(offsets, span[0], hi=num_tokens, key=itemgetter(1))
    end = bisect_left(offsets, span[1], lo=begin, hi=num_tokens, key=itemgetter(0))
    while end < num_tokens and offsets[end] == (span[1], span[1]):
        end += 1
    return begin, end


def _count_tokens(
    input_ids: list[int], text: LabelledText, edge: int, tokenizer: PreTrainedTokenizerBase
) -> int:
    """How many tokens lie before a character, for a tokenizer without offsets."""
    prefix = list(tokenizer(text.text[:edge], add_special_tokens=text.add_special_tokens)["input_ids"])
    if input_ids[: len(prefix)] != prefix:
        raise RowError(
            "no offsets",
            f"character {edge} lies inside a token, and this tokenizer gives no offsets: use a fast tokenizer",
        )
    return len(prefix)
