"""Safetensors files of limited size, written one after another."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

_INDEX_FILE = "model.safetensors.index.json"


class ShardWriter:
    """Keeps weights until a file is full.

    Attributes:
        num_bytes: written or kept so far.
    """

    def __init__(self, folder: Path, max_shard_size: int) -> None:
        """Write into `folder`, files of up to `max_shard_size` bytes (more where a single weight is larger)."""
        self.folder, self.max_shard_size = folder, max_shard_size
        self.num_bytes = 0
        self._kept: dict[str, Tensor] = {}
        self._kept_bytes = 0
        self._files: list[list[str]] = []
        """The names in each."""
        self._bytes_of: Counter[torch.dtype] = Counter()

    def add(self, name: str, weight: Tensor) -> None:
        """Take a weight."""
        if self._kept and self._kept_bytes + weight.nbytes > self.max_shard_size:
            self._flush()
        self._kept[name] = weight.contiguous()
        self._kept_bytes += weight.nbytes
        self.num_bytes += weight.nbytes
        self._bytes_of[weight.dtype] += weight.nbytes

    @property
    def main_dtype(self) -> torch.dtype:
        """Of most bytes."""
        floats = Counter({dtype: size for dtype, size in self._bytes_of.items() if dtype.is_floating_point})
        return floats.most_common(1)[0][0]

    def finish(self) -> int:
        """Write what is left and give the files their names.

        Returns:
            How many there are.
        """
        if self._kept:
            self._flush()
        count = len(self._files)
        final = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        )
        for number, name in enumerate(final):
            os.replace(self.folder / _temporary(number), self.folder / name)
        if count > 1:
            where = {name: file for names, file in zip(self._files, final, strict=True) for name in names}
            index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(where.items()))}
            (self.folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        return count

    def _flush(self) -> None:
        save_file(self._kept, self.folder / _temporary(len(self._files)), metadata={"format": "pt"})
        self._files.append(list(self._kept))
        self._kept, self._kept_bytes = {}, 0


def _temporary(number: int) -> str:
    return f"part-{number}.safetensors"
