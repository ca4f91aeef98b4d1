"""The command line of `hfpar data`: paths and a few flags of its own, beside every setting of training."""

from __future__ import annotations

import re
import sys
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hfpar.config.load import parse_sft_config
from hfpar.config.schema import SFTConfig
from hfpar.config.validate import did_you_mean, show, validate
from hfpar.errors import ConfigError

_HELP = """\
usage: hfpar data COMMAND PATH... [--config FILE] [--SETTING VALUE] ...

Look at what training makes of a data set.

Commands:
  check   read everything: totals, lengths, problems, duplicates, batches and steps
  show    print one row as it is trained on, trained tokens marked
  decontaminate
          find rows that hold items of benchmarks, and write the others

`hfpar data COMMAND --help` tells more."""

_SETTINGS_HELP = """\
All settings of training hold, from --config and as flags, so that what you see is what is trained:
  --model_name_or_path NAME      whose tokenizer and chat template are used
  --dataset_columns instruction=question output=answer, --dataset_format, --chat_template, --train_on,
  --max_length, --on_overflow, --max_tokens_per_batch and so on; --help_settings lists them all"""

_CHECK_HELP = f"""\
usage: hfpar data check PATH... [--json] [--plot FILE.png] [--dp_size N] [--config FILE] [--SETTING VALUE] ...

Read all rows and report totals, lengths, problems by kind with their places, duplicates, what the chat template
does, and the batches and steps to expect. PATH... (files, patterns, folders or hub ids) take the place of the
config's dataset; eval_dataset is read, too. Without --model_name_or_path: whatever needs no tokenizer.

  --json           print the report as JSON, with every problem
  --plot FILE.png  draw the lengths of the samples
  --dp_size N      data-parallel ranks that the batches are for; default: 1

{_SETTINGS_HELP}

Exit code: 0 if all rows can be used, 1 if some can't, 2 if a setting must be mended."""

_SHOW_HELP = f"""\
usage: hfpar data show PATH... (--index N | --line N) [--ids] [--config FILE] [--SETTING VALUE] ...

Print the samples that a row becomes, as text. Trained tokens have a coloured background; without colours (NO_COLOR,
or output that is no terminal) they stand between \u27e6 and \u27e7.

  --index N   the row, counted from 0 over all files
  --line N    the line (or row) of the only file, counted from 1
  --ids       print a table of tokens, too: position, id, text, label

{_SETTINGS_HELP}

Exit code: 0 if the row can be used, 1 if it can't, 2 if a setting must be mended."""

_DECONTAMINATE_HELP = """\
usage: hfpar data decontaminate PATH... --against NAMES [--benchmark_files NAME=PATH ...] [--output FILE.jsonl]
                                [--list FILE.jsonl] [--min_words N] [--json] [--SETTING VALUE] ...

Find the rows of training data (files, patterns, folders or hub ids) that hold items of benchmarks: word for word, in
long runs of the same words, or in nearly the same words. Boilerplate that many items or most rows share is no match.

  --against NAMES              math500, gsm8k, gsm8k_train, or YAML files that describe others; several with commas
  --benchmark_files NAME=PATH  read a benchmark from a file instead of the hub; may name several
  --output FILE.jsonl          write the rows without a match; those of JSON lines stay byte for byte as they were
  --list FILE.jsonl            write each match with its score and both texts
  --min_words N                shortest run of common words that counts; default: 8
  --json                       print the counts as JSON

Settings of training say what columns mean: --dataset_format, --dataset_columns, --config FILE, --dataset_num_proc and
so on; --help_settings lists them all.

Exit code: 0, with or without matches; 2 if a setting or a file must be mended."""

_CHECK_FLAGS = {"json": False, "plot": True, "dp_size": True}
_SHOW_FLAGS = {"index": True, "line": True, "ids": False}
_DECONTAMINATE_FLAGS = {"against": True, "output": True, "list": True, "min_words": True, "json": False}
"""Flags by name: whether a value follows."""


@dataclass(frozen=True)
class Arguments:
    """A command line, taken apart."""

    paths: list[str] = field(default_factory=list)
    flags: dict[str, str] = field(default_factory=dict)
    """The command's own, each with its value or nothing."""
    settings: list[str] = field(default_factory=list)
    """What is left, for the config."""


def main(argv: Sequence[str]) -> int:
    """Run `check`, `show` or `decontaminate`.

    Args:
        argv: the command line after `hfpar data`.

    Returns:
        The exit code: 0 when all is well, 1 for rows that can't be used, 2 for a setting to mend.

    Raises:
        ConfigError: a setting, or a file, that can't be.
    """
    name, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if name in ("", "-h", "--help"):
        sys.stdout.write(_HELP + "\n")
        return 0 if name else 2
    texts = {"check": _CHECK_HELP, "show": _SHOW_HELP, "decontaminate": _DECONTAMINATE_HELP}
    if name not in texts:
        near = did_you_mean(name, list(texts))
        raise ConfigError(f"data: {show(name)}; there are {', '.join(texts)}{near}")
    if "-h" in rest or "--help" in rest:
        sys.stdout.write(texts[name] + "\n")
        return 0
    if "--help_settings" in rest:
        parse_sft_config(["--help"])
    return {"check": _check, "show": _show, "decontaminate": _decontaminate}[name](rest)


def _check(argv: list[str]) -> int:
    arguments = split_arguments(argv, _CHECK_FLAGS)
    config = read_config(arguments)
    dp_size = _whole_number(arguments.flags, "dp_size", least=1)
    plot = Path(arguments.flags["plot"]) if "plot" in arguments.flags else None
    if plot is not None and not plot.resolve().parent.is_dir():
        raise ConfigError(f"--plot: {plot.parent} is no folder")
    if plot is not None and config.model_name_or_path is None:
        raise ConfigError("--plot: draws lengths in tokens; name a tokenizer with --model_name_or_path")

    from hfpar.datatool.check import run_check

    return run_check(config, dp_size=dp_size or 1, as_json="json" in arguments.flags, plot=plot)


def _show(argv: list[str]) -> int:
    arguments = split_arguments(argv, _SHOW_FLAGS)
    config = read_config(arguments)
    index = _whole_number(arguments.flags, "index", least=0)
    line = _whole_number(arguments.flags, "line", least=1)
    if (index is None) == (line is None):
        raise ConfigError("--index: say which row is shown, with either --index N or --line N")
    if config.model_name_or_path is None:
        raise ConfigError("model_name_or_path: missing; name the model whose tokenizer and template are used")

    from hfpar.datatool.show import run_show

    return run_show(config, index=index, line=line, ids="ids" in arguments.flags)


def _decontaminate(argv: list[str]) -> int:
    arguments = split_arguments(argv, _DECONTAMINATE_FLAGS)
    against = arguments.flags.get("against")
    if against is not None:
        arguments.settings.append(f"--decontaminate_against={against}")
    min_words = _whole_number(arguments.flags, "min_words", least=3)
    given = any(
        word.partition("=")[0] in ("--decontaminate_against", "--config") for word in arguments.settings
    )
    if not given:
        raise ConfigError("--against: missing; name the benchmarks, such as --against math500,gsm8k")
    config = read_config(arguments)
    if config.decontaminate_against is None:
        raise ConfigError("--against: missing; name the benchmarks, such as --against math500,gsm8k")

    from hfpar.datatool.decontaminate import run_decontaminate

    return run_decontaminate(
        config,
        output=arguments.flags.get("output"),
        list_file=arguments.flags.get("list"),
        min_words=min_words or 8,
        as_json="json" in arguments.flags,
    )


def split_arguments(argv: Sequence[str], own_flags: Mapping[str, bool]) -> Arguments:
    """Tell paths, the command's own flags and settings apart.

    A setting takes the word after it, or all words up to the next flag if it may have several values.

    Args:
        argv: the command line.
        own_flags: whether each takes a value.

    Raises:
        ConfigError: a flag of the command without its value, or with one that it doesn't take.
    """
    arguments = Arguments()
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--"):
            arguments.paths.append(word)
        elif name in own_flags:
            if not own_flags[name] and equals:
                raise ConfigError(f"--{name}: takes no value, not {show(value)}")
            if own_flags[name] and not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"--{name}: needs a value")
                value = words.pop(0)
            arguments.flags[name] = value
        else:
            arguments.settings.append(word)
            most = 0 if equals else len(words) if _takes_several(name) else 1
            while words and most and not words[0].startswith("--"):
                arguments.settings.append(words.pop(0))
                most -= 1
    return arguments


def _takes_several(name: str) -> bool:
    hint = str(typing.get_type_hints(SFTConfig).get(name, ""))
    return re.search(r"\b(list|dict)\[", hint) is not None


def read_config(arguments: Arguments) -> SFTConfig:
    """The settings, with the paths as `dataset`.

    Raises:
        ConfigError: an impossible setting, or no data.
    """
    config = parse_sft_config(arguments.settings)
    if not arguments.paths:
        if config.dataset is None:
            raise ConfigError("dataset: missing; name the files to look at")
        return config
    if any(word.partition("=")[0] == "--dataset" for word in arguments.settings):
        raise ConfigError(f"dataset: given twice, as --dataset and as {show(arguments.paths)}; keep one")
    config = replace(config, dataset=list(arguments.paths))
    validate(config)
    return config


def _whole_number(flags: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = flags.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"\d{1,18}", text) or int(text) < least:
        raise ConfigError(f"--{name}: {show(text)}; must be a whole number of at least {least}")
    return int(text)
