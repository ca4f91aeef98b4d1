"""Lines of results in a run folder, kept as soon as they are made, by any number of ranks; a killed run goes on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hfpar.errors import ConfigError
from hfpar.whole_path import whole_path

Key = tuple[str, str]
"""Set and item."""
Line = Mapping[str, Any]


@dataclass(frozen=True)
class LineStore:
    """`NAME.jsonl` of a folder, and the parts of it that ranks are writing."""

    folder: Path
    name: str

    @property
    def path(self) -> Path:
        """Where all lines are, once they are there."""
        return self.folder / f"{self.name}.jsonl"

    def part(self, rank: int) -> Path:
        """Where a rank writes."""
        return self.folder / f".{self.name}-{rank}.partial.jsonl"

    def read(self) -> dict[Key, Line]:
        """All lines that are whole, by their keys; a line that a killed run has left half is left out."""
        found: dict[Key, Line] = {}
        for path in [self.path, *sorted(self.folder.glob(f".{self.name}-*.partial.jsonl"))]:
            if path.is_file():
                for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
                    line = _parse(text)
                    if line is not None:
                        found.setdefault(key_of(line), line)
        return found

    def collect(self) -> dict[Key, Line]:
        """Bring what ranks of a stopped run have left into the one file. For one rank, before the others write."""
        found = self.read()
        parts = list(self.folder.glob(f".{self.name}-*.partial.jsonl"))
        if parts:
            self.write(found.values())
        for part in parts:
            part.unlink()
        return found

    def write(self, lines: Iterable[Line]) -> None:
        """Replace the one file, whole or not at all."""
        with self._explained(), whole_path(self.path) as partial, partial.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(_text(line))

    def append(self, lines: Iterable[Line], rank: int) -> None:
        """Keep lines of a rank."""
        text = "".join(map(_text, lines))
        with self._explained(), self.part(rank).open("a", encoding="utf-8") as file:
            file.write(text)

    def drop_part(self, rank: int) -> None:
        """Remove what a rank has written, once it is in the one file."""
        self.part(rank).unlink(missing_ok=True)

    def _explained(self) -> _Explained:
        return _Explained(self.folder)


class _Explained:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, OSError):
            raise ConfigError(
                f"output_dir: {self.folder} can't be written ({error.strerror or error}); what was finished is kept: "
                "make room, and give the same command again"
            ) from error


def key_of(line: Line) -> Key:
    """What a line is about."""
    return str(line["set"]), str(line["item_id"])


def _text(line: Line) -> str:
    return json.dumps(line, ensure_ascii=True, allow_nan=False) + "\n"


def _parse(text: str) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "set" in line and "item_id" in line else None
