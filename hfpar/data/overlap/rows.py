"""What rows of training data say, and what so many of them say that it tells nothing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hfpar.config.schema import FormatName
from hfpar.data.overlap.index import BenchmarkIndex, RowText, Templates
from hfpar.data.reading.formats import to_example
from hfpar.data.reading.rows import Conversation, Example, Message, Problem, RowError
from hfpar.data.reading.sources import DataFile, read_chunks

TEMPLATE_ROWS = 10_000
"""So many rows of a data set, its first, tell what is a template."""
TEMPLATE_SHARE = 0.2
TEMPLATE_PROMPTS = 20
"""A template stands in so large a share of the different prompts, and in so many."""


def text_of_row(row: dict[str, Any], format: FormatName, columns: Mapping[str, str] | None) -> RowText:  # noqa: A002
    """All that a row says: its turns as they'd be trained on or, of rows in no known form, every text in it."""
    try:
        return text_of_example(to_example(row, format, columns))
    except RowError:
        texts = tuple(_texts(row))
        return RowText(texts, texts[0] if texts else "")


def text_of_example(example: Example) -> RowText:
    """All that an example says, turn by turn."""
    if not isinstance(example, Conversation):
        prompt = example.text[: example.num_prompt_chars] or example.text
        return RowText((example.text,), prompt)
    texts = tuple(_text_of_message(message) for message in example.messages)
    asked = [
        text
        for text, message in zip(texts, example.messages, strict=True)
        if message["role"] not in ("assistant", "system", "developer")
    ]
    return RowText(texts, "\n".join(asked) or texts[0])


def _text_of_message(message: Message) -> str:
    parts = [message.get("reasoning_content"), message["content"]]
    parts += [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(part for part in parts if part)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def find_templates(
    index: BenchmarkIndex,
    files: Sequence[DataFile],
    format: FormatName,  # noqa: A002
    columns: Mapping[str, str] | None,
    *,
    streaming: bool = False,
) -> Templates:
    """What is a template in these files, by their first rows.

    Raises:
        DataError: a file can't be read.
    """
    counter, left = TemplateCounter(index), TEMPLATE_ROWS
    for chunk in read_chunks(files, streaming=streaming):
        rows = [row for _, row in chunk.rows() if not isinstance(row, Problem)][:left]
        counter.add([text_of_row(row, format, columns) for row in rows])
        left -= len(rows)
        if left <= 0:
            break
    return counter.templates()


class TemplateCounter:
    """Counts in how many different prompts' rows each of a benchmark's runs of words stands."""

    def __init__(self, index: BenchmarkIndex) -> None:
        """Start without a row."""
        self._index = index
        self._seen: set[bytes] = set()
        self._runs = np.zeros(len(index.runs.hashes), dtype=np.int64)
        self._near_runs = np.zeros(len(index.near_runs.hashes), dtype=np.int64)

    def add(self, rows: Sequence[RowText]) -> None:
        """Count rows; those that ask what another one asked count once."""
        new = []
        for row in rows:
            digest = hashlib.blake2b(row.prompt.encode("utf-8", "surrogatepass"), digest_size=8).digest()
            if digest not in self._seen:
                self._seen.add(digest)
                new.append(row)
        words = self._index.encode(new)
        near = self._index.near_runs.find(self._index.open_numbers(words.ids))
        for found, counts in ((self._index.runs.find(words.ids), self._runs), (near, self._near_runs)):
            if len(found.grams):
                keys = np.unique(words.row_of_word[found.positions] * len(counts) + found.grams)
                counts += np.bincount(keys % len(counts), minlength=len(counts))

    def templates(self) -> Templates:
        """What is a template by the rows so far."""
        needed = max(TEMPLATE_PROMPTS, TEMPLATE_SHARE * len(self._seen))
        return Templates(self._runs >= needed, self._near_runs >= needed, len(self._seen))
