"""`hfpar data decontaminate`: training rows that hold items of benchmarks, told of and left out."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hfpar.config.schema import SFTConfig
from hfpar.data.benchmarks import Benchmark, BenchmarkItem
from hfpar.data.build import Recipe, map_chunks, useful_processes
from hfpar.data.overlap.index import MIN_WORDS, BenchmarkIndex
from hfpar.data.overlap.rows import find_templates
from hfpar.data.overlap.screen import benchmarks_of
from hfpar.data.reading.chunks import Chunk, split_lines
from hfpar.data.reading.sources import DataFile, data_sources, read_chunks
from hfpar.datatool.gather import find_files
from hfpar.datatool.overlaps import ChunkOverlaps, inspect_overlaps
from hfpar.datatool.whole_file import WholeFile, check_target
from hfpar.errors import ConfigError
from hfpar.train.progress import RowsBar

MOST_EXAMPLES = 2
"""Of a benchmark and a kind, so many are shown."""


@dataclass
class Decontamination:
    """What was found."""

    benchmarks: tuple[Benchmark, ...]
    num_rows: int = 0
    num_found: int = 0
    """Rows that hold an item."""
    problems: Counter[str] = field(default_factory=Counter)
    """Rows that can't be read, by kind."""
    first_problem: str | None = None
    rows: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By benchmark, field and kind: how many times an item is in a row."""
    items: dict[str, set[str]] = field(default_factory=dict)
    """By benchmark: the ids of the items that were found."""
    examples: dict[tuple[str, str], list[dict[str, Any]]] = field(default_factory=dict)
    """By benchmark and kind: the first."""
    hidden: list[tuple[str, BenchmarkItem]] = field(default_factory=list)
    """Items in a template of the rows."""
    num_template_runs: int = 0
    """Runs of words that stand in so many rows that they tell nothing."""

    def add(self, found: ChunkOverlaps) -> None:
        """Count a chunk."""
        self.num_rows += found.num_rows
        self.num_found += found.num_found
        self.problems.update(problem.kind for problem in found.problems)
        if found.problems and self.first_problem is None:
            self.first_problem = str(found.problems[0])
        for record in found.found:
            name, kind = record["benchmark"], record["kind"]
            self.rows[name, record["field"], kind] += 1
            self.items.setdefault(name, set()).add(record["item_id"])
            examples = self.examples.setdefault((name, kind), [])
            if len(examples) < MOST_EXAMPLES:
                examples.append(record)


def run_decontaminate(
    config: SFTConfig,
    *,
    output: str | None = None,
    list_file: str | None = None,
    min_words: int = MIN_WORDS,
    as_json: bool = False,
) -> int:
    """Look for benchmark items in the rows of `dataset`, print what there is, and write the files.

    Args:
        config: names the data, what its columns mean, and the benchmarks.
        output: gets the rows without an item, as they were if they are JSON lines.
        list_file: gets each item in each row, with both texts.
        min_words: words of the shortest common run that counts.
        as_json: print JSON in place of tables.

    Returns:
        0.

    Raises:
        ConfigError: a file that can't be read or written.
    """
    from hfpar.datatool.overlap_report import print_report, to_json

    sources = data_sources(config.dataset)
    files = find_files("dataset", sources)
    _targets(output, list_file, _paths(files, config))  # before benchmarks are fetched
    benchmarks = benchmarks_of(config)
    targets = _targets(output, list_file, _paths(files, config, benchmarks))
    result = Decontamination(benchmarks)
    index = BenchmarkIndex(benchmarks, min_words)
    with ExitStack() as stack:
        opened = {flag: stack.enter_context(WholeFile(flag, path)) for flag, path in targets.items()}
        num_bytes = sum(file.num_bytes for found in files for file in found)
        bar = stack.enter_context(RowsBar("Looking for benchmark items", num_bytes))
        for source, found in zip(sources, files, strict=True):
            recipe = Recipe.of(config, source)
            _look(result, config, found, recipe, index, opened, bar)
    if as_json:
        json.dump(to_json(result, output, list_file), sys.stdout, indent=2, ensure_ascii=False)
        sys.stdout.write("\n")
    else:
        print_report(result, output, list_file)
    return 0


def _paths(
    files: Sequence[Sequence[DataFile]], config: SFTConfig, benchmarks: Sequence[Benchmark] = ()
) -> list[str]:
    """What is read, and so not to be replaced; data of a benchmark's YAML may be named by a pattern."""
    own = [*(config.benchmark_files or {}).values(), *(benchmark.source for benchmark in benchmarks)]
    expanded = [os.path.expanduser(path) for path in own]
    matches = [match for path in expanded for match in glob.glob(path, recursive=True)]
    return [file.path for found in files for file in found] + expanded + matches


def _targets(output: str | None, list_file: str | None, inputs: Sequence[str]) -> dict[str, Path]:
    given = {"output": output, "list": list_file}
    targets = {flag: check_target(flag, path, inputs) for flag, path in given.items() if path is not None}
    if len(targets) == 2 and targets["output"].resolve() == targets["list"].resolve():
        raise ConfigError(f"--list: {list_file} is --output, too; name another file")
    return targets


def _look(
    result: Decontamination,
    config: SFTConfig,
    files: Sequence[DataFile],
    recipe: Recipe,
    index: BenchmarkIndex,
    opened: dict[str, WholeFile],
    bar: RowsBar,
) -> None:
    """Go through the rows of one entry of `dataset`."""
    templates = find_templates(index, files, recipe.format, recipe.columns, streaming=config.streaming)
    result.num_template_runs += int((templates.runs & index.runs.has_weight).sum())
    result.hidden += [item for item in index.hidden_by(templates) if item not in result.hidden]
    index = index.without(templates)
    num_proc = useful_processes(sum(file.num_bytes for file in files), config.dataset_num_proc)
    chunks = read_chunks(files, streaming=config.streaming)
    for chunk, found in map_chunks(inspect_overlaps, chunks, index, recipe, num_proc):  # type: ignore[arg-type]
        result.add(found)
        if "output" in opened:
            opened["output"].write(_kept(chunk, found))
        if "list" in opened and found.found:
            lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in found.found]
            opened["list"].write("".join(lines).encode("utf-8", "surrogatepass"))
        bar.add(chunk.path, chunk.num_bytes, found.num_rows)


def _kept(chunk: Chunk, found: ChunkOverlaps) -> bytes:
    """The rows without an item: JSON lines byte for byte as they are in the file."""
    if found.kept is not None:
        return found.kept
    lines: list[bytes] = split_lines(chunk.payload)
    if not found.dropped:
        return b"\n".join(lines) + b"\n"
    kept = [line for number, line in enumerate(lines, start=chunk.first) if number not in found.dropped]
    return b"".join(line + b"\n" for line in kept)
