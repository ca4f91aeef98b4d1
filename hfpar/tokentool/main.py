"""The command line of `hfpar tokens`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from hfpar.errors import ConfigError

_MOST_NEIGHBORS = 100


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"tokens: {message}; `hfpar tokens --help` lists what it takes")


def main(argv: Sequence[str]) -> int:
    """Show the rows of a model's special and added tokens, maybe beside another model's.

    Args:
        argv: the command line after `hfpar tokens`.

    Returns:
        0.

    Raises:
        ConfigError: a flag, a model or a file that can't be.
    """
    given = _make_parser().parse_args(list(argv))
    if not 0 <= given.neighbors <= _MOST_NEIGHBORS:
        raise ConfigError(f"--neighbors: {given.neighbors}; allowed: 0 to {_MOST_NEIGHBORS}")
    _check_plot(given.plot)

    from hfpar.train.quiet import quiet_libraries

    quiet_libraries(is_main=True)
    from hfpar.tokentool.run import Request, run_tokens

    return run_tokens(
        Request(
            model=given.model,
            other=given.compare,
            base=given.base,
            chat_template=given.chat_template,
            trust_remote_code=given.trust_remote_code,
            num_neighbors=given.neighbors,
            all_tokens=given.all,
        ),
        as_json=given.json,
        plot=given.plot,
    )


def _check_plot(path: Path | None) -> None:
    if path is None:
        return
    if path.is_dir():
        raise ConfigError(f"--plot: {path} is a folder; name a file such as {path / 'tokens.png'}")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot: {path}; must end with .png")
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot: {path.parent} is no folder")


def _make_parser() -> _Parser:
    parser = _Parser(
        prog="hfpar tokens",
        description="Measures the rows that a model's embedding (and its head, if it has one of its own) holds for "
        "special and added tokens against those of the vocabulary: which were never trained, which the chat template "
        "uses, which tokens lie nearest. Reads these matrices alone, a part at a time.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or hub id of a model, or an adapter's folder")
    parser.add_argument(
        "--compare", metavar="OTHER", help="another model, such as the instruct model beside its base"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--plot", metavar="FILE.png", type=Path, help="draw the norms of the vocabulary and of those tokens"
    )
    parser.add_argument(
        "--neighbors", metavar="N", type=int, default=3, help="nearest tokens to show for each; default: 3"
    )
    parser.add_argument(
        "--all", action="store_true", help="show all such tokens; by default the 40 that matter most"
    )
    parser.add_argument(
        "--chat_template",
        metavar="FILE",
        help="chatml, or a Jinja file, in place of the models' own templates",
    )
    parser.add_argument("--base", metavar="MODEL", help="base of an adapter, if it isn't where it was")
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="run the Python code that a model brings along"
    )
    return parser
