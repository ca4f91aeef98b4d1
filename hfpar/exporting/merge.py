"""An adapter in its base's weights: read, changed and written one weight after another."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfpar.errors import ConfigError
from hfpar.exporting.adapter import Adapter, load_adapter
from hfpar.exporting.base import Base, StoredWeight, tied_names
from hfpar.exporting.generation import write_generation_config
from hfpar.exporting.held import HeldWeights, held_weights
from hfpar.exporting.output import Output
from hfpar.exporting.run import Run
from hfpar.exporting.shards import ShardWriter
from hfpar.models.load import DTYPES, load_model_config, skeleton
from hfpar.models.stored import SafetensorsSource
from hfpar.train.progress import format_bytes, format_duration, print_summary


@dataclass(frozen=True)
class MergeOptions:
    """What the user chose.

    Attributes:
        dtype: of what is written; auto: as the base is stored.
        into: `trained` or `original` weights of the base.
        max_shard_size: of a file, in bytes.
    """

    dtype: str
    into: str
    max_shard_size: int


def export_merged(run: Run, output: Output, options: MergeOptions) -> None:
    """Write the merged model and say what was done.

    Raises:
        ConfigError: something doesn't fit, or can't be written.
    """
    started = time.monotonic()
    make_skeleton = partial(skeleton, run.base_config, trust_remote_code=run.trust_remote_code)
    model = make_skeleton()
    base = Base(run.base, run.base_config, model)
    held = held_weights(run, base, make_skeleton, original=options.into == "original")
    kept_in_fp32 = _kept_in_fp32(model)
    adapter = load_adapter(model, run.adapter)
    merge = _Merge(base, adapter, held, options, kept_in_fp32)
    unties = bool(merge.untied)
    output.check_space(merge.estimated_size())
    with output.written() as folder:
        writer = ShardWriter(folder, options.max_shard_size)
        with _progress(len(base.weights)) as advance:
            for weight in base.weights:
                for name, values in merge.outputs(weight):
                    writer.add(name, values)
                advance()
        num_files = writer.finish()
        merge.check_all_used()
        dtype = DTYPES.get(options.dtype) or base.model_dtype or writer.main_dtype
        _write_config(run, folder, dtype, unties=unties)
        _check_complete(run, folder, merge)
        num_bytes = writer.num_bytes
    rows = [
        ("adapter", f"{run.folder}" + (f" ({run.note})" if run.note else "")),
        ("base", run.base_name),
        ("merged", _describe(adapter)),
        *([("head", "no longer tied to the embedding, which it differs from now")] if unties else []),
        ("into", held.description),
        (
            "dtype",
            str(dtype).removeprefix("torch.")
            + (", where the base has it" if options.dtype == "auto" else ""),
        ),
        ("size", f"{format_bytes(num_bytes)} in {num_files} file{'s' if num_files > 1 else ''}"),
        ("time", format_duration(time.monotonic() - started)),
        ("model", str(output.folder)),
    ]
    print_summary(rows, "hfpar export")


class _Merge:
    """What is written for each weight of the base."""

    def __init__(
        self,
        base: Base,
        adapter: Adapter,
        held: HeldWeights,
        options: MergeOptions,
        kept_in_fp32: Callable[[str], bool],
    ) -> None:
        self.base, self.adapter, self.held, self.options = base, adapter, held, options
        self._kept_in_fp32 = kept_in_fp32
        self._used: set[str] = set()
        self._stored = {weight.name: weight for weight in base.weights if weight.name is not None}
        self.untied: list[list[str]] = []
        """Groups of names whose weight was one, and that differ now."""
        self._also = self._names_to_add()
        """Of a stored weight: tied names that get a weight of their own now."""
        self._check_found()

    def _names_to_add(self) -> dict[str, list[str]]:
        also: dict[str, list[str]] = {}
        for group in self.base.tied:
            stored = [name for name in group if name in self._stored]
            if not stored or not any(name in self.adapter.changes for name in group):
                continue
            if self._all_change_alike(group, stored[0]):
                self._used.update(group)
                continue
            self.untied.append(group)
            also[stored[0]] = [name for name in group if name not in stored]
        return also

    def _all_change_alike(self, group: list[str], stored: str) -> bool:
        if not all(name in self.adapter.changes for name in group):
            return False
        values = self.base.read(self._stored[stored])
        first = self.adapter.merge(group[0], values)
        return all(torch.equal(first, self.adapter.merge(name, values)) for name in group[1:])

    @property
    def written(self) -> set[str]:
        """Weights of the model."""
        return {*self._stored, *(name for names in self._also.values() for name in names)}

    def _check_found(self) -> None:
        lost = sorted(set(self.adapter.changes) - self.written - self._used)
        if lost:
            raise ConfigError(
                f"base: {self.base.folder} doesn't store {lost[0]} in a form into which its adapter could be merged"
                + (f" ({len(lost) - 1} more like it)" if len(lost) > 1 else "")
            )

    def estimated_size(self) -> int:
        """Bytes, at least."""
        return self.base.num_bytes(DTYPES.get(self.options.dtype))

    def outputs(self, weight: StoredWeight) -> Iterator[tuple[str, Tensor]]:
        """Tensors by the names under which they are stored."""
        values = self.base.read(weight)
        if not values.is_floating_point():
            yield from self.base.split(weight, values)
            return
        stored_dtype = values.dtype
        if weight.name is None:
            yield weight.stored[0], self._cast(weight.stored[0], values, stored_dtype)
            return
        if not self._kept_in_fp32(weight.name):
            values = self.held.values(weight.name, values, self.adapter)
        merged = self._cast(weight.name, self._merge(weight.name, values), stored_dtype)
        yield from self.base.split(weight, merged)
        for name in self._also.get(weight.name, ()):
            yield name, self._cast(name, self._merge(name, values), stored_dtype)

    def _merge(self, name: str, values: Tensor) -> Tensor:
        if name not in self.adapter.changes:
            return values
        self._used.add(name)
        return self.adapter.merge(name, values)

    def _cast(self, name: str, values: Tensor, stored_dtype: torch.dtype) -> Tensor:
        dtype = DTYPES.get(self.options.dtype, stored_dtype)
        if self._kept_in_fp32(name):
            dtype = torch.promote_types(dtype, stored_dtype)
        result = values.to(dtype)
        if dtype == torch.float16 and not torch.isfinite(result).all():
            raise ConfigError(f"--dtype: float16 can't hold the values of {name}; use bfloat16 or float32")
        return result

    def check_all_used(self) -> None:
        """Nothing that was trained is left out."""
        unused = sorted(set(self.adapter.changes) - self._used)
        assert not unused, unused


def _kept_in_fp32(model: Any) -> Callable[[str], bool]:
    """Which weights Transformers itself never holds in less."""
    parts = {
        part
        for key in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
        for part in getattr(model, key, None) or ()
    }
    return lambda name: any(part in name for part in parts)


def _describe(adapter: Adapter) -> str:
    config = adapter.config
    parts = []
    if adapter.count("lora"):
        kind = "DoRA" if getattr(config, "use_dora", False) else "LoRA"
        scale = "rsLoRA, " if getattr(config, "use_rslora", False) else ""
        parts.append(
            f"{kind} of {adapter.count('lora')} weights ({scale}rank {config.r}, alpha {config.lora_alpha:g})"
        )
    if adapter.count("tokens"):
        parts.append(
            f"trained rows of {adapter.count('tokens')} embedding{'s' if adapter.count('tokens') > 1 else ''}"
        )
    if adapter.count("module"):
        parts.append(f"{adapter.count('module')} weights trained in full")
    return ", ".join(parts)


def _write_config(run: Run, folder: Path, dtype: torch.dtype, *, unties: bool) -> None:
    settings = json.loads((run.base / "config.json").read_text(encoding="utf-8"))
    settings.pop("quantization_config", None)
    name = str(dtype).removeprefix("torch.")
    for section in (settings, *(value for value in settings.values() if isinstance(value, dict))):
        for key in ("dtype", "torch_dtype"):
            if section.get(key):
                section[key] = name
        if unties and section.get("tie_word_embeddings"):
            section["tie_word_embeddings"] = False
    if "torch_dtype" not in settings:
        settings["dtype"] = name
    if unties:
        settings["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    write_generation_config(run, folder)
    for path in sorted(run.base.glob("*.py")):
        shutil.copyfile(path, folder / path.name)
    run.tokenizer.save_pretrained(folder)


def _check_complete(run: Run, folder: Path, merge: _Merge) -> None:
    """Transformers finds each weight in the export that it finds in the base."""
    config = load_model_config(folder, trust_remote_code=run.trust_remote_code)
    model = skeleton(config, trust_remote_code=run.trust_remote_code)
    still_tied = [name for group in tied_names(model) for name in group]
    for group in merge.untied:
        if any(name in still_tied for name in group):
            raise ConfigError(
                f"{run.folder}: {' and '.join(group)} differ now, but are always one in such a model"
            )
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)} & merge.written
    written = SafetensorsSource(folder, model, names)
    lost = sorted(name for name in names if written.find([name]) is None)
    if lost:
        raise ConfigError(f"base: {run.base}: {lost[0]} can't be stored under a name that Transformers reads")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("merging"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("merging", total=total)
        yield lambda: bar.advance(task)
