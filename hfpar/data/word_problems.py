"""The demo's data: templated arithmetic word problems as conversations.

Every problem is one of four kinds of story (join, take away, equal groups, share) with a name, a thing and
two small numbers. A hash of the problem's own text says whether it belongs to the train or to the held-out
part, so the two cannot share a problem whatever the seeds.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

from hfpar.whole_path import whole_path

Split = Literal["train", "eval"]
Conversation = dict[str, list[dict[str, str]]]

_EVAL_SHARE = 10  # one problem text in this many is held out

NAMES = (
    "Ada Ben Chloe David Emma Felix Grace Hugo Iris Jack Kira Leo Maya Noah Olga Paul Rosa Sam Tara Umar "
    "Vera Will Yara Zoe Anna Bruno Clara Dario Elsa Finn Gina Henry Ivan Julia Karl Lena Mila Nora Otto Lucy"
).split()

THINGS = (
    "apples pears plums lemons eggs cookies stamps coins cards books pens shells stones stickers marbles "
    "buttons balloons tickets flowers candles cups keys toys boxes seeds"
).split()

_JOIN = (
    "{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?",
    "{name} has {a} {things}. {other} gives {name} {b} more. How many {things} does {name} have?",
    "There are {a} {things} on the table. {name} puts {b} more there. How many {things} are on the table?",
    "{name} found {a} {things} in the morning and {b} in the evening. How many {things} did {name} find?",
    "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
    "In one bag there are {a} {things}, in another bag {b}. How many {things} are there in all?",
    "{name} needs {a} {things} today and {b} tomorrow. How many {things} does {name} need?",
    "{other} packed {a} {things}, then {name} packed {b}. How many {things} were packed?",
)
_TAKE_AWAY = (
    "{name} had {a} {things} and gave {b} of them to {other}. How many {things} does {name} have left?",
    "{name} had {a} {things} and lost {b}. How many {things} are left?",
    "There were {a} {things} in the shop. {name} bought {b} of them. How many {things} remain in the shop?",
    "{name} has {a} {things}, {other} has {b} fewer. How many {things} does {other} have?",
    "Out of {a} {things}, {b} are broken. How many {things} are not broken?",
    "{name} wants {a} {things} and already has {b}. How many more {things} does {name} need?",
    "A box held {a} {things}. {name} took out {b}. How many {things} are still in the box?",
    "{name} counted {a} {things}, but {b} belong to {other}. How many {things} belong to {name}?",
)
_GROUPS = (
    "{name} has {a} bags with {b} {things} in each. How many {things} does {name} have?",
    "There are {a} shelves with {b} {things} on each shelf. How many {things} are there?",
    "{name} buys {b} {things} every day for {a} days. How many {things} does {name} buy?",
    "{a} friends bring {b} {things} each. How many {things} do they bring?",
    "{name} fills {a} rows with {b} {things} per row. How many {things} are in the rows?",
    "Each of {a} children gets {b} {things} from {name}. How many {things} does {name} hand out?",
)
_SHARE = (
    "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend get?",
    "{name} packs {a} {things} into {b} equal bags. How many {things} are in each bag?",
    "{a} {things} are split evenly over {b} tables. How many {things} are on each table?",
    "{b} children divide {a} {things} equally. How many {things} does each child get?",
)


def generate_conversations(num: int, seed: int, split: Split) -> list[Conversation]:
    """Make distinct word problems with worked answers.

    Args:
        num: How many.
        seed: Equal seeds give equal problems.
        split: The part they belong to. No problem is in both parts, whatever the seeds.

    Returns:
        Rows `{"messages": [{"role": "user", ...}, {"role": "assistant", ...}]}`; each answer ends in
        `The answer is N.`

    Raises:
        ValueError: There are not that many distinct problems.
    """
    rng = random.Random(f"{split}:{seed}")
    answers: dict[str, str] = {}
    for _ in range(1000 + 50 * num):
        if len(answers) == num:
            break
        question, answer = _problem(rng)
        if _split_of(question) == split:
            answers[question] = answer
    if len(answers) < num:
        raise ValueError(f"only {len(answers)} of {num} distinct {split} problems found")
    return [
        {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
        for question, answer in answers.items()
    ]


def extract_answer(text: str) -> str | None:
    """Return the number that the last `The answer is N` in `text` names, or None if there is none."""
    found = re.findall(r"[Tt]he answer is\s+(-?\d+)", text)
    return str(int(found[-1])) if found else None


def write_demo_data(
    folder: str | Path, *, num_train: int = 12_000, num_eval: int = 200, seed: int = 0
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `eval.jsonl` into `folder`, which is made if need be.

    A file appears under its name only when it is whole, so several processes may write at once.

    Returns:
        The paths of the two files, train first.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    train, held_out = folder / "train.jsonl", folder / "eval.jsonl"
    write_jsonl(train, generate_conversations(num_train, seed, "train"))
    write_jsonl(held_out, generate_conversations(num_eval, seed, "eval"))
    return train, held_out


def write_jsonl(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Write rows as lines of JSON; the file appears whole."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_text(path: Path, text: str) -> None:
    """Write a file that appears whole."""
    with whole_path(path) as partial:
        partial.write_text(text, encoding="utf-8")


def _split_of(question: str) -> Split:
    digest = hashlib.sha256(question.encode()).digest()
    return "eval" if digest[0] % _EVAL_SHARE == 0 else "train"


def _problem(rng: random.Random) -> tuple[str, str]:
    story = rng.choice((_join, _take_away, _groups, _share))
    templates, a, b, sign, result = story(rng)
    name, other = rng.sample(NAMES, 2)
    question = rng.choice(templates).format(name=name, other=other, things=rng.choice(THINGS), a=a, b=b)
    return question, f"{a} {sign} {b} = {result}. The answer is {result}."


_Story = tuple[tuple[str, ...], int, int, str, int]


def _join(rng: random.Random) -> _Story:
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    return _JOIN, a, b, "+", a + b


def _take_away(rng: random.Random) -> _Story:
    b, result = rng.randint(2, 10), rng.randint(2, 10)
    return _TAKE_AWAY, b + result, b, "-", result


def _groups(rng: random.Random) -> _Story:
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return _GROUPS, a, b, "*", a * b


def _share(rng: random.Random) -> _Story:
    b, result = rng.randint(2, 9), rng.randint(2, 9)
    return _SHARE, b * result, b, "/", result
