"""The `hfpar` command: quick to start, and one line for a user's mistake."""

import importlib.util
import subprocess
import sys
import time
import types

import pytest

from hfpar import __version__, cli
from hfpar.errors import ConfigError, HfparError

HEAVY = {"torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "matplotlib", "jsonargparse"}


def hfpar(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command in a fresh interpreter, which ends with code 99 if it loaded something heavy."""
    code = (
        "import sys\n"
        "from hfpar.cli import main\n"
        "code = main()\n"
        f"sys.exit(99 if {HEAVY!r} & set(sys.modules) else code)\n"
    )
    return subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, timeout=60)


@pytest.fixture
def command(monkeypatch):
    """Puts a function in the place of `hfpar demo`."""

    def install(run):
        module = types.ModuleType("stand_in_command")
        module.main = run
        monkeypatch.setitem(sys.modules, "stand_in_command", module)
        monkeypatch.setitem(cli.COMMANDS, "demo", cli.Command("stand_in_command", ""))

    return install


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_the_commands_and_loads_nothing_heavy(flag):
    done = hfpar(flag)
    assert done.returncode == 0, done.stderr
    for name, entry in cli.COMMANDS.items():
        assert f"\n  {name} " in done.stdout
        assert entry.help in done.stdout


def test_version():
    done = hfpar("--version")
    assert (done.returncode, done.stdout) == (0, f"hfpar {__version__}\n")


def test_help_takes_under_half_a_second():
    def seconds() -> float:
        start = time.perf_counter()
        assert hfpar("--help").returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_without_a_command_it_prints_the_help_and_fails():
    done = hfpar()
    assert done.returncode == 2
    assert done.stdout.startswith("usage: hfpar COMMAND")


def test_unknown_command_names_the_nearest():
    done = hfpar("verfy")
    assert done.returncode == 2
    assert done.stdout == ""
    names = ", ".join(cli.COMMANDS)
    assert done.stderr == (f"hfpar: error: verfy: no such command; there are {names}; did you mean verify?\n")


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_exists(name):
    assert importlib.util.find_spec(cli.COMMANDS[name].module) is not None


def test_command_gets_its_arguments_and_gives_the_exit_code(command):
    seen = []
    command(lambda argv: seen.append(argv) or 7)
    assert cli.main(["demo", "--a", "b"]) == 7
    assert seen == [["--a", "b"]]


@pytest.mark.parametrize(
    ("error", "code", "stderr"),
    [
        (
            ConfigError("seed: x; must be a whole number"),
            2,
            "hfpar: error: seed: x; must be a whole number\n",
        ),
        (HfparError("a cell failed"), 1, "hfpar: error: a cell failed\n"),
        (KeyboardInterrupt(), 130, "hfpar: stopped\n"),
    ],
)
def test_errors_end_with_one_line_and_their_code(command, capsys, error, code, stderr):
    def fail(argv):
        raise error

    command(fail)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr() == ("", stderr)


def test_a_bug_keeps_its_traceback(command):
    def fail(argv):
        raise ZeroDivisionError

    command(fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])
