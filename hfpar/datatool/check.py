"""`hfpar data check`: read everything, count, and say what training would do with it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hfpar.config.engine import LaunchDefaults
from hfpar.config.schema import SFTConfig
from hfpar.data.reading.sources import data_sources
from hfpar.datatool.batches import Batches, plan_batches
from hfpar.datatool.duplicates import Repeats
from hfpar.datatool.gather import DataFacts, find_files, gather
from hfpar.errors import ConfigError, HfparError
from hfpar.train.data import check_fit, explain
from hfpar.train.model import ModelSource, find_model
from hfpar.train.progress import RowsBar
from hfpar.train.quiet import quiet_libraries
from hfpar.train.run import settle


@dataclass
class CheckResult:
    """What was found, and what training would say to it."""

    config: SFTConfig
    dataset: DataFacts
    eval_dataset: DataFacts | None
    batches: Batches | None = None
    """None without a tokenizer, without a sample, or where data is streamed."""
    shared: Repeats = field(default_factory=Repeats)
    """Rows of `eval_dataset` that `dataset` has, too."""
    refusals: list[str] = field(default_factory=list)
    """Why training would stop before its first step, bad rows apart."""

    @property
    def data_sets(self) -> list[DataFacts]:
        """Those that were read."""
        return [facts for facts in (self.dataset, self.eval_dataset) if facts is not None]

    @property
    def exit_code(self) -> int:
        """1 if there are bad rows, 2 if a setting must be mended, else 0."""
        if any(facts.report.num_bad_rows for facts in self.data_sets):
            return HfparError.exit_code
        return ConfigError.exit_code if self.refusals else 0


def run_check(config: SFTConfig, *, dp_size: int, as_json: bool, plot: Path | None) -> int:
    """Read everything and print the report.

    Args:
        config: names the data, and says what becomes of it.
        dp_size: data-parallel ranks that the batches are for.
        as_json: print JSON in place of tables.
        plot: the picture to write, if any.

    Returns:
        The exit code; see `CheckResult.exit_code`.

    Raises:
        ConfigError: a model or a file that can't be read, or a picture that can't be written.
    """
    from hfpar.datatool.report import print_report, to_json

    quiet_libraries(True)
    result = check(settle(config, LaunchDefaults()), dp_size, keep_all_problems=as_json)
    if plot is not None:
        from hfpar.datatool.plot import plot_lengths

        plot_lengths(result.dataset, config.max_length, plot)
    if as_json:
        json.dump(to_json(result), sys.stdout, indent=2)
        sys.stdout.write("\n")
    else:
        print_report(result)
    return result.exit_code


def check(config: SFTConfig, dp_size: int, *, keep_all_problems: bool = False) -> CheckResult:
    """Read everything.

    Args:
        config: settled.
        dp_size: data-parallel ranks that the batches are for.
        keep_all_problems: else the first few of a kind are kept, and all counted.

    Raises:
        ConfigError: a model or a file that can't be read.
    """
    keys = ["dataset"] + ["eval_dataset"] * (config.eval_dataset is not None)
    sources = {key: data_sources(getattr(config, key)) for key in keys}
    files = {key: find_files(key, sources[key]) for key in keys}
    model = find_model(config) if config.model_name_or_path is not None else None
    facts = {
        key: DataFacts(key, has_tokens=model is not None, keep_all_problems=keep_all_problems) for key in keys
    }
    for key in keys:
        num_bytes = sum(file.num_bytes for found in files[key] for file in found)
        with RowsBar(f"Reading {key}", num_bytes) as bar:
            tokenizer = None if model is None else model.tokenizer
            gather(facts[key], config, sources[key], files[key], tokenizer, bar.add)
    result = CheckResult(config, facts["dataset"], facts.get("eval_dataset"))
    if result.eval_dataset is not None:
        result.shared = result.eval_dataset.digests.rows_shared_with(result.dataset.digests)
    if model is not None:
        _plan(result, model, dp_size)
    return result


def _plan(result: CheckResult, model: ModelSource, dp_size: int) -> None:
    """Do what training does between the tokens and the first step, and keep its refusals."""
    config = result.config
    for facts in result.data_sets:
        lengths = facts.lengths
        if not len(lengths):
            reasons = explain(facts.report, config.max_length)
            result.refusals.append(
                f"{facts.key}: none of the {facts.report.num_rows} rows can be trained on; {reasons}"
            )
            continue
        try:
            sequence_size = (config.cp_size or 1) * (config.sp_size or 1)
            largest_token = facts.report.max_token_id
            check_fit(facts.key, lengths, largest_token, model.config, sequence_size=sequence_size)
        except ConfigError as error:
            result.refusals.append(str(error))
    if config.streaming or not len(result.dataset.lengths):
        return
    try:
        result.batches = plan_batches(config, result.dataset.sources, dp_size)
    except ConfigError as error:
        result.refusals.append(str(error))
        return
    if result.batches.num_samples < dp_size:
        result.refusals.append(
            f"dataset: {result.batches.num_samples} usable samples for {dp_size} data-parallel ranks; "
            f"use --dp_size {result.batches.num_samples} or fewer"
        )
