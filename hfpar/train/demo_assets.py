"""The model and the data of a run that names neither: built on the spot, once."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DemoAssets:
    """A folder with a tiny model, word problems, and a benchmark of which a part has leaked."""

    folder: Path

    @classmethod
    def beside(cls, output_dir: Path) -> DemoAssets:
        """The assets that belong to a run folder: next to it, so that runs share them."""
        return cls(output_dir.parent / "demo-assets")

    @property
    def model(self) -> Path:
        """A Transformers checkpoint."""
        return self.folder / "model"

    @property
    def train_data(self) -> Path:
        """Conversations to train on."""
        return self.folder / "train.jsonl"

    @property
    def eval_data(self) -> Path:
        """Conversations that are held out."""
        return self.folder / "eval.jsonl"

    @property
    def planted_data(self) -> Path:
        """Copies of some of the benchmark's items, questions with answers, to train on."""
        return self.folder / "planted.jsonl"

    @property
    def benchmark(self) -> Path:
        """The description of a benchmark."""
        return self.folder / "benchmark.yaml"

    def build(self) -> None:
        """Make the folder, whole or not at all; nothing if it is there."""
        from hfpar.data.demo_benchmark import generate_stories, write_benchmark
        from hfpar.data.word_problems import write_demo_data
        from hfpar.models.tiny import build_tiny_model

        if self._is_whole():
            return
        partial = self.folder.with_name(f".{self.folder.name}.{os.getpid()}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        build_tiny_model(partial / "model")
        write_demo_data(partial)
        write_benchmark(partial, generate_stories())
        try:
            os.replace(partial, self.folder)
        except OSError:
            if not self.eval_data.is_file():
                raise
            shutil.rmtree(partial)  # another run was faster, or it was made before there was a benchmark
            write_benchmark(self.folder, generate_stories())

    def _is_whole(self) -> bool:
        return all(path.is_file() for path in (self.eval_data, self.benchmark, self.planted_data))
