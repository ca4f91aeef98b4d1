"""Files that are whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def whole_path(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes that name when all is well, and is removed otherwise.

    So nobody ever sees half of a file, and what was there before stays until then.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with suppress(OSError):  # the folder itself may be what can't be used
            partial.unlink(missing_ok=True)
