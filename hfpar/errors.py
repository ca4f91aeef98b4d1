"""The errors that hfpar raises on purpose.

Everything that a user can cause, and mend, is a `ConfigError`: its text is one line that names the setting,
the value found, what is allowed and, where there is one, the fix. Programs print that line and exit with
`exit_code`; a traceback is left for hfpar's own bugs.
"""

from collections.abc import Sequence


class HfparError(Exception):
    """Base of all errors that hfpar raises on purpose.

    Attributes:
        exit_code: What a program that ends with this error returns to the shell.
    """

    exit_code: int = 1


class ConfigError(HfparError):
    """A setting, or the machine as the user set it up, that cannot work; `str(error)` is one line."""

    exit_code = 2


class DataError(ConfigError):
    """Data that cannot be used; the line names the file, and the line or row in it."""


class MissingDependencyError(ConfigError):
    """A package that a setting needs is not installed; the line names the pip command that installs it."""


class BadRowsError(HfparError):
    """Rows that can't be used, each with its file, line and reason.

    Attributes:
        MOST: So many are listed.
    """

    MOST = 20

    def __init__(self, problems: Sequence[str]) -> None:
        """Of the problems found so far."""
        listed = "\n  ".join(problems[: self.MOST])
        more = "; there may be more, `hfpar data check` finds all" if len(problems) >= self.MOST else ""
        count = f"{min(len(problems), self.MOST)} bad row{'s' if len(problems) > 1 else ''}"
        super().__init__(
            f"{count}{more}; mend them, or leave such rows out with --bad_rows skip:\n  {listed}"
        )


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line: its first, or its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
