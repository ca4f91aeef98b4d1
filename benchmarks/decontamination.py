"""Recall and false alarms of `hfpar data decontaminate`, on benchmark items planted in other forms.

    python benchmarks/decontamination.py --math500 math500.jsonl --gsm8k gsm8k_test.jsonl --clean gsm8k_train.jsonl \
        --varied gsm_plus_mini.jsonl

Every item of both benchmarks is looked for in six forms; rows of `--clean` are looked at as they are, and each hit
among them is printed for people to judge; rows of `--varied` name the question that they vary (`seed_question`).
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from hfpar.data.benchmarks import BenchmarkItem, load_benchmarks
from hfpar.data.overlap.index import KINDS, BenchmarkIndex, Hit
from hfpar.data.overlap.rows import text_of_row

Row = dict[str, Any]


def reformatted(text: str, rng: random.Random) -> str:
    """Other white space, other LaTeX for the same, other case where nothing is LaTeX."""
    text = re.sub(r"\s+", lambda _: rng.choice([" ", "  ", "\n"]), text)
    text = text.replace(r"\frac", r"\dfrac").replace(r"\left", "").replace(r"\right", "")
    return text if "\\" in text else text.upper()


def renumbered(text: str, rng: random.Random) -> str:
    """Every number another one with as many digits."""
    return re.sub(
        r"\d+", lambda match: str(rng.randint(10 ** (len(match[0]) - 1), 10 ** len(match[0]) - 1)), text
    )


def first_half(text: str) -> str:
    """The first half of the words."""
    words = text.split(" ")
    return " ".join(words[: (len(words) + 1) // 2])


def as_chat(text: str) -> Row:
    """A row with a system prompt and an instruction around the question."""
    asked = f"{text}\n\nThink step by step, and put your final answer within \\boxed{{}}."
    messages = [("system", "You are a careful tutor."), ("user", asked), ("assistant", "Let us see.")]
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def forms(filler: Sequence[str]) -> dict[str, Callable[[str], Row]]:
    """By name: how a question is planted."""
    rng = random.Random(0)
    return {
        "verbatim": lambda text: {"text": text},
        "reformatted": lambda text: {"text": reformatted(text, rng)},
        "embedded": lambda text: {"text": f"{rng.choice(filler)} Another one. {text} {rng.choice(filler)}"},
        "chat": as_chat,
        "first half": lambda text: {"text": first_half(text)},
        "numbers changed": lambda text: {"text": renumbered(text, rng)},
    }


def look(index: BenchmarkIndex, rows: Sequence[Row]) -> list[list[Hit]]:
    """The hits of each row."""
    found: list[list[Hit]] = []
    for start in range(0, len(rows), 1000):
        found += index.find([text_of_row(row, "auto", None) for row in rows[start : start + 1000]])
    return found


def print_line(name: str, kinds: Sequence[str | None]) -> None:
    """How many of the rows were found, and by what."""
    counts = Counter(kinds)
    hit = len(kinds) - counts[None]
    shares = ", ".join(f"{kind} {counts[kind]}" for kind in KINDS)
    print(f"{name:<42} {hit:>5} of {len(kinds):>5}  {100 * hit / len(kinds):6.1f} %   {shares}")


def plant(index: BenchmarkIndex, items: Sequence[tuple[str, BenchmarkItem]], filler: Sequence[str]) -> None:
    """Look for each item in each form."""
    for form, change in forms(filler).items():
        found = look(index, [change(item.question) for _, item in items])
        kinds: dict[str, list[str | None]] = defaultdict(list)
        for (name, item), hits in zip(items, found, strict=True):
            kinds[name].append(next((hit.kind for hit in hits if hit.item is item), None))
        for name, of_name in kinds.items():
            print_line(f"{form}, {name}", of_name)


def vary(index: BenchmarkIndex, rows: Sequence[Row]) -> None:
    """Look for the questions that rows vary, by kind of variation."""
    kinds: dict[str, list[str | None]] = defaultdict(list)
    for row, hits in zip(rows, look(index, [{"text": row["question"]} for row in rows]), strict=True):
        seed = row["seed_question"].split()
        own = (hit.kind for hit in hits if hit.item.question.split() == seed)
        kinds[row.get("perturbation_type", "varied")].append(next(own, None))
    for name, of_name in kinds.items():
        print_line(name, of_name)


def main() -> None:
    """Read the files and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in ("math500", "gsm8k", "clean"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--varied")
    options = parser.parse_args()
    files = {"math500": options.math500, "gsm8k": options.gsm8k}
    index = BenchmarkIndex(load_benchmarks(list(files), files))
    with open(options.clean, encoding="utf-8") as file:
        clean = [json.loads(line) for line in file]
    plant(index, index.items, [row["answer"] for row in clean])
    if options.varied:
        with open(options.varied, encoding="utf-8") as file:
            vary(index, [json.loads(line) for line in file])
    before = time.process_time()
    found = look(index, clean)
    seconds = time.process_time() - before
    print_line("rows of --clean", [hits[0].kind if hits else None for hits in found])
    print(f"{len(clean) / seconds:,.0f} rows a second of one core, reading apart")
    for row, hits in zip(clean, found, strict=True):
        for hit in hits:
            text = hit.item.question if hit.field == "question" else hit.item.solution
            print(f"\n{hit.kind} {hit.score} ({hit.field}): {json.dumps(row)}\n  {json.dumps(text)}")


if __name__ == "__main__":
    main()
