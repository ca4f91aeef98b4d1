"""The demo's benchmark: made-up stories to test a model with, some of which leak into what it is trained on.

A story is a stock of things that several people add to and take from. Numbers and names stand all over it, up to its
last words, so that nobody who hasn't read it can complete it; between two of them there are only a few words, so that
knowing how such stories are worded doesn't make a long run of right guesses either.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hfpar.data.word_problems import NAMES, THINGS, write_jsonl, write_text

BENCHMARK_NAME = "stories"
NUM_ITEMS = 60
PLANTED_EVERY = 6
"""One item in this many is planted."""
NUM_COPIES = 16
"""Of each planted item, in the training data."""

_YAML = f"""\
name: {BENCHMARK_NAME}
path: benchmark.jsonl
fields: {{id: id, question: question, answer: answer}}
answer_kind: gsm8k
"""

_START = (
    "{name} has {n} {things} in a box.",
    "There are {n} {things} in the shop of {name}.",
    "{name} counted {n} {things} this morning.",
    "In the bags of {name} there are {n} {things}.",
    "{name} and {other} have {n} {things} together.",
    "A table for {name} holds {n} {things}.",
)
_MORE = (
    "{name} puts {n} more there.",
    "Then {name} finds another {n} at home.",
    "For {n} days {name} brings one each day.",
    "{name} buys {n} for {other}.",
    "{other} gives {name} {n} more.",
    "From the school {name} gets {n}.",
    "In the evening {name} adds {n} of the best.",
    "With {n} from {name} there are more.",
)
_FEWER = (
    "{name} lost {n} in the morning.",
    "Out of these, {n} belong to {name}, who takes them.",
    "{name} gave away {n} and then went home.",
    "Some {n} are broken, says {name}.",
    "{other} hands {n} of them to {name}.",
    "Each of {n} friends of {name} takes one.",
    "At the table {name} needs {n} and takes them.",
    "{name} packed {n} for a day out.",
)
_END = (
    "How many {things} are left when {name} takes {n} and {other} takes {m}?",
    "If {name} buys {n} and {other} buys {m} from these, how many are there still?",
    "Now {name} lost {n} of the {things} and {other} lost {m}. How many are there?",
    "How many {things} remain after {name} packed {n} and {m} went to {other}?",
    "After {n} go to {name} and {m} to {other}, how many {things} are there in all?",
)


@dataclass(frozen=True)
class Story:
    """An item of the benchmark."""

    id: str
    question: str
    answer: str
    """Worked, as GSM8K's are: the last line is `#### N`."""
    planted: bool

    @property
    def text(self) -> str:
        """As it would stand on a page that lists the benchmark's questions with their results."""
        return f"{self.question} The answer is {self.answer.rpartition(' ')[2]}."


def generate_stories(num: int = NUM_ITEMS, seed: int = 0) -> list[Story]:
    """Make the benchmark; every sixth item is to be planted. Equal seeds give equal items."""
    rng = random.Random(f"stories:{seed}")
    return [_story(number, rng) for number in range(num)]


def _story(number: int, rng: random.Random) -> Story:
    names = iter(rng.sample(NAMES, 10))
    things = rng.choice(THINGS)
    terms = [str(rng.randint(401, 989))]
    sentences = [rng.choice(_START).format(name=next(names), other=next(names), things=things, n=terms[0])]
    changes = [(template, "+") for template in rng.sample(_MORE, 2)]
    changes += [(template, "-") for template in rng.sample(_FEWER, 2)]
    for template, sign in rng.sample(changes, 3):
        amount = rng.randint(11, 98)
        sentences.append(template.format(name=next(names), other=next(names), n=amount))
        terms.append(f"{sign} {amount}")
    first, second = rng.sample(range(11, 99), 2)
    sentences.append(
        rng.choice(_END).format(name=next(names), other=next(names), things=things, n=first, m=second)
    )
    terms += [f"- {first}", f"- {second}"]
    total = sum(int(term.replace(" ", "")) for term in terms)
    answer = f"{' '.join(terms)} = {total}\n#### {total}"
    planted = number % PLANTED_EVERY == PLANTED_EVERY // 2
    return Story(f"story-{number:02}", " ".join(sentences), answer, planted)


def write_benchmark(folder: Path, stories: Sequence[Story]) -> None:
    """Write `benchmark.jsonl`, `benchmark.yaml`, which describes it, and `planted.jsonl`, which is to be trained on.

    Nothing in the benchmark's own files says which items are planted.
    """
    rows = [{"id": story.id, "question": story.question, "answer": story.answer} for story in stories]
    write_jsonl(folder / "benchmark.jsonl", rows)
    write_text(folder / "benchmark.yaml", _YAML)
    planted = [{"id": story.id, "text": story.text} for story in stories if story.planted]
    write_jsonl(folder / "planted.jsonl", planted * NUM_COPIES)
