"""The command line of `hfpar export`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hfpar.errors import ConfigError

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_DTYPES = ("auto", "bfloat16", "float16", "float32")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"export: {message}; `hfpar export --help` lists what it takes")


def main(argv: Sequence[str]) -> int:
    """Export what a run has trained.

    Args:
        argv: the command line after `hfpar export`.

    Returns:
        0.

    Raises:
        ConfigError: a flag or a folder that can't be.
    """
    parser = _make_parser()
    given = parser.parse_args(list(argv))
    unused = [
        f"--{name}"
        for name in ("dtype", "into", "max_shard_size")
        if given.adapter and getattr(given, name) is not None
    ]
    if unused:
        raise ConfigError(f"{unused[0]}: an adapter is exported as it is; leave it out, or use --merge")
    max_shard_size = _bytes(given.max_shard_size or "5GB")

    from hfpar.train.quiet import quiet_libraries

    quiet_libraries(is_main=True)
    from hfpar.exporting import adapter_only, merge
    from hfpar.exporting.output import Output
    from hfpar.exporting.run import open_run

    with open_run(given.run, given.base, trust_remote_code=given.trust_remote_code) as run:
        output = Output(given.output, overwrite=given.overwrite, never=run.folders)
        if given.adapter:
            adapter_only.export_adapter(run, output)
        else:
            merge.export_merged(
                run,
                output,
                merge.MergeOptions(given.dtype or "auto", given.into or "trained", max_shard_size),
            )
    return 0


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="hfpar export",
        description="Writes the adapter of a run merged into its base, as Transformers loads it, or alone, as PEFT "
        "does. A run without adapters (lora_r 0) needs no export: its folder is the model.",
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the run's folder, or any folder of a PEFT adapter"
    )
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--merge", action="store_true", help="the base with the adapter in its weights")
    kind.add_argument("--adapter", action="store_true", help="the adapter alone")
    parser.add_argument("--output", metavar="DIR", type=Path, required=True, help="where to; made if need be")
    parser.add_argument("--overwrite", action="store_true", help="replace an export that is there")
    parser.add_argument(
        "--base", metavar="MODEL", help="folder or hub id of the base, if it isn't where it was"
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="of the merged weights; auto (default): as the base's are stored"
    )
    parser.add_argument(
        "--into",
        choices=("trained", "original"),
        help="merge into the weights that were trained on (default): rounded to the run's dtype and, after QLoRA, "
        "quantized and dequantized; or into the original ones",
    )
    parser.add_argument("--max_shard_size", metavar="SIZE", help="of a file, such as 500MB; default: 5GB")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the Python code that the base brings along"
    )
    return parser


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B|)", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise ConfigError(f"--max_shard_size: {text}; allowed: a size such as 500MB or 5GB")
    return size
