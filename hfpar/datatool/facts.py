"""What is found in the rows of one chunk, small enough to come back from another process."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from hfpar.data.build import Recipe, count_overlaps, make_block, read_examples, sift
from hfpar.data.chat.encode import EncodedRow, encode
from hfpar.data.reading.formats import recognise
from hfpar.data.reading.rows import Conversation, Example, Place, Problem, RowError
from hfpar.data.reading.sources import Chunk
from hfpar.data.store import DataReport, content_hashes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIGEST_BYTES = 16
NO_PROMPT = bytes(DIGEST_BYTES)
"""In place of a prompt's digest, where a row has no prompt."""
NO_LIMIT = sys.maxsize
_OVERFLOWS = {"too long", "truncated", "split"}


def _none() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


@dataclass
class ChunkFacts:
    """Everything that the report needs of a chunk's rows."""

    num_rows: int
    problems: list[Problem]
    """In the rows' order."""
    formats: Counter[str]
    roles: Counter[str]
    turns: np.ndarray
    """`(conversations,)` the assistant's messages in each."""
    row_numbers: np.ndarray
    """`(well-formed rows,)` line or row number of each."""
    digests: bytes
    """`DIGEST_BYTES` for each well-formed row: of all that it says."""
    prompt_digests: bytes
    """The same of what comes before the first answer."""
    report: DataReport | None = None
    """What training counts; None without a tokenizer."""
    lengths: np.ndarray = field(default_factory=_none)
    """`(samples,)` tokens in each."""
    sample_rows: np.ndarray = field(default_factory=_none)
    """`(samples,)` line or row number that each comes from."""
    sample_contents: np.ndarray = field(default_factory=_none)
    """`(samples,)`: see `content_hashes`."""
    whole_lengths: np.ndarray = field(default_factory=_none)
    """`(samples without a limit,)` tokens in each, if max_length were no matter."""
    whole_label_lengths: np.ndarray = field(default_factory=_none)
    """`(samples without a limit,)` label tokens in each."""
    noted_places: list[tuple[str, Place]] = field(default_factory=list)
    """For each thing that is counted in a row: what, and where."""


def inspect_chunk(chunk: Chunk, tokenizer: PreTrainedTokenizerBase | None, recipe: Recipe) -> ChunkFacts:
    """Do with a chunk what training does, and take notes.

    Args:
        chunk: rows.
        tokenizer: with its chat template; without one, rows are only read and checked.
        recipe: what is done to the rows.
    """
    watched = _WatchedChunk(chunk, recipe)
    examples, problems = read_examples(watched, recipe)  # type: ignore[arg-type]
    conversations = [example for _, example in examples if isinstance(example, Conversation)]
    digests = [_digests(example) for _, example in examples]
    facts = ChunkFacts(
        num_rows=len(examples) + len(problems),
        problems=problems,
        formats=watched.formats,
        roles=Counter(message["role"] for example in conversations for message in example.messages),
        turns=_numbers(_num_turns(example) for example in conversations),
        row_numbers=_numbers(place.number for place, _ in examples),
        digests=b"".join(whole for whole, _ in digests),
        prompt_digests=b"".join(prompt for _, prompt in digests),
    )
    sifted = sift(examples, recipe)
    if tokenizer is not None:
        _add_tokens(facts, sifted.kept, tokenizer, recipe)
    if recipe.screen is not None and facts.report is not None:
        count_overlaps(facts.report, sifted, recipe)
        facts.noted_places += [(recipe.screen.counted_as, place) for place, _ in sifted.found]
    return facts


class _WatchedChunk:
    """A chunk that remembers what formats its rows are of."""

    def __init__(self, chunk: Chunk, recipe: Recipe) -> None:
        self._chunk, self._recipe = chunk, recipe
        self.formats: Counter[str] = Counter()

    def rows(self) -> Iterator[tuple[Place, Any]]:
        for place, value in self._chunk.rows():
            if not isinstance(value, Problem):
                self.formats[self._format(value)] += 1
            yield place, value

    def _format(self, row: dict[str, Any]) -> str:
        if self._recipe.format != "auto":
            return self._recipe.format
        try:
            return recognise(row, self._recipe.columns)
        except RowError:
            return "unrecognised"


def _add_tokens(
    facts: ChunkFacts,
    examples: Sequence[tuple[Place, Example]],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
) -> None:
    encoded = encode(examples, tokenizer, recipe.options)
    places = [place for place, _ in examples]
    block = make_block(places, encoded, facts.problems)
    facts.report, facts.lengths, facts.sample_rows = block.report, block.lengths, block.rows
    facts.sample_contents = content_hashes(block.input_ids, block.trained, block.lengths)
    found = facts.problems + [row.problem for row in encoded if row.problem is not None]
    facts.problems = sorted(found, key=lambda problem: problem.place.number)
    facts.noted_places = [
        (kind, place) for place, row in zip(places, encoded, strict=True) for kind in row.counts
    ]
    whole = _without_limit(examples, encoded, tokenizer, recipe)
    samples = [sample for row in whole for sample in row.samples]
    facts.whole_lengths = _numbers(len(sample.input_ids) for sample in samples)
    facts.whole_label_lengths = _numbers(sum(sample.trained[1:]) for sample in samples)


def _without_limit(
    examples: Sequence[tuple[Place, Example]],
    encoded: Sequence[EncodedRow],
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
) -> list[EncodedRow]:
    """The rows as they were if `max_length` were no matter; only those that are too long are encoded anew."""
    rows = list(encoded)
    cut = [index for index, row in enumerate(rows) if is_too_long(row)]
    options = replace(recipe.options, max_length=NO_LIMIT)
    for index, row in zip(cut, encode([examples[index] for index in cut], tokenizer, options), strict=True):
        rows[index] = row
    return rows


def is_too_long(row: EncodedRow) -> bool:
    """Whether `max_length` made a difference to a row."""
    if row.problem is not None:
        return row.problem.kind == "too long"
    return bool(_OVERFLOWS & set(row.counts))


def _num_turns(conversation: Conversation) -> int:
    return sum(message["role"] == "assistant" for message in conversation.messages)


def _numbers(values: Iterator[int] | Any) -> np.ndarray:
    return np.array(list(values), dtype=np.int64)


def _digests(example: Example) -> tuple[bytes, bytes]:
    """Of all that an example says, and of its prompt; the latter of nothing but zeros where there is none."""
    if not isinstance(example, Conversation):
        prompt = example.text[: example.num_prompt_chars]
        return _digest(example.text), _digest(prompt) if prompt else NO_PROMPT
    messages = [
        {key: value for key, value in message.items() if key != "train"} for message in example.messages
    ]
    beside = [example.tools, example.chat_template_kwargs]
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    num_prompt = example.num_prompt or min(answers, default=0)
    prompts = messages[:num_prompt]
    return _digest([messages, beside]), _digest([prompts, beside]) if prompts else NO_PROMPT


def _digest(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()
