"""The `hfpar` command: finds the subcommand, and loads only then what it needs.

Each subcommand is a function `main(argv) -> exit code` in a module of its own, which is loaded by name: so
`hfpar --help` starts in a moment, and this module depends on none of them.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

from hfpar import __version__
from hfpar.config.validate import did_you_mean, show
from hfpar.errors import ConfigError, HfparError


class Command(NamedTuple):
    """A subcommand: the module whose `main` it runs, and its line in the help."""

    module: str
    help: str


COMMANDS = {
    "demo": Command("hfpar.demo", "train a tiny model on two processes, show what it learned, and audit it"),
    "verify": Command("hfpar.verify.run", "prove that no engine or layout changes one process's numbers"),
    "data": Command("hfpar.datatool.main", "check a data set, or show a row of it as it is trained on"),
    "tokens": Command(
        "hfpar.tokentool.main", "show which special tokens a model was never taught, alone or beside another"
    ),
    "export": Command(
        "hfpar.exporting.main", "merge a run's adapter into its base, or give the adapter alone"
    ),
    "launch": Command(
        "hfpar.launch", "accelerate launch, ending with the launched program's own message and exit code"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand.

    A user's mistake ends with one line on stderr and its exit code, Ctrl-C with 130; no traceback.

    Args:
        argv: The command line without the program's name; `sys.argv` if None.

    Returns:
        The exit code: 0 when all is well, 1 for a failure, 2 for a setting to mend.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except HfparError as error:
        print(f"hfpar: error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("hfpar: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help_text())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"hfpar {__version__}")
        return 0
    name, *rest = arguments
    command = COMMANDS.get(name)
    if command is None:
        near = did_you_mean(name, list(COMMANDS))
        raise ConfigError(f"{show(name)}: no such command; there are {', '.join(COMMANDS)}{near}")
    run = cast(Callable[[list[str]], int], importlib.import_module(command.module).main)
    return run(rest)


def _help_text() -> str:
    lines = [f"  {name:<8} {command.help}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hfpar COMMAND ...",
            "       hfpar [--help] [--version]",
            "",
            "Fine-tune Hugging Face causal language models in any parallel layout;",
            "no layout changes the numbers.",
            "",
            "Commands:",
            *lines,
            "",
            "`hfpar COMMAND --help` tells more. A run itself: accelerate launch sft/train.py --help",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
