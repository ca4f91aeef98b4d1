"""What is exported: a run of hfpar or another adapter's folder, and the base that it belongs to."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from hfpar.config.load import parse_sft_config
from hfpar.config.schema import SFTConfig
from hfpar.errors import ConfigError
from hfpar.models import load
from hfpar.train.checkpoint import CONFIG_FILE, whole_checkpoints

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True)
class Run:
    """An adapter and its base.

    Attributes:
        folder: as the user gave it.
        adapter: the folder of the PEFT adapter: the same, or one that was made from a checkpoint.
        config: the run's settings; None for an adapter of others.
        base_name: folder or hub id of the base.
        base: its folder.
        trust_remote_code: whether its code may run.
        note: where the adapter is from, if not from the run's end.
    """

    folder: Path
    adapter: Path
    config: SFTConfig | None
    base_name: str
    base: Path
    trust_remote_code: bool
    note: str = ""

    @property
    def folders(self) -> list[Path]:
        """What is read."""
        return [self.folder, self.adapter, self.base]

    @cached_property
    def base_config(self) -> PretrainedConfig:
        """The base's config.

        Raises:
            ConfigError: it isn't a causal language model's.
        """
        with _about_the_base():
            return load.load_model_config(self.base, trust_remote_code=self.trust_remote_code)

    @property
    def tokenizer_folder(self) -> Path:
        """The adapter's, where a tokenizer was saved with it, else the base's."""
        return self.adapter if (self.adapter / "tokenizer_config.json").is_file() else self.base

    @cached_property
    def tokenizer(self) -> Any:
        """The one saved with the adapter, else the base's.

        Raises:
            ConfigError: there is none.
        """
        with _about_the_base():
            return load.load_tokenizer(self.tokenizer_folder, trust_remote_code=self.trust_remote_code)


@contextmanager
def open_run(folder: Path, base: str | None, *, trust_remote_code: bool) -> Iterator[Run]:
    """Find the adapter; one that a killed run left in its last checkpoint is there until the end of the context.

    Args:
        folder: of a run, or of a PEFT adapter.
        base: where the base is, if not where the adapter says.
        trust_remote_code: whether the base's code may run; a run says it itself.

    Raises:
        ConfigError: no adapter, or no base.
    """
    folder = folder.expanduser()
    config = _read_config(folder)
    if config is not None and not config.lora_r:
        raise ConfigError(f"{folder}: {_about_full_run(folder)}")
    trust = trust_remote_code or (config is not None and config.trust_remote_code)
    if (folder / ADAPTER_CONFIG).is_file():
        name = base or _base_in_adapter(folder) or (config.model_name_or_path if config else None)
        yield Run(folder, folder, config, *_find_base(folder, name), trust)
        return
    if config is None:
        raise ConfigError(f"{folder}: {_why_no_adapter(folder)}")
    checkpoints = whole_checkpoints(folder)
    if not checkpoints:
        raise ConfigError(
            f"{folder}: a run without an export or a whole checkpoint; start it again with --overwrite"
        )
    from hfpar.exporting.recover import write_adapter

    with tempfile.TemporaryDirectory(prefix="hfpar_export_") as temporary:
        note = f"{checkpoints[-1].name}, since the run didn't get to its end"
        name, path = _find_base(folder, base or config.model_name_or_path)
        run = Run(folder, Path(temporary), config, name, path, trust, note)
        write_adapter(run, checkpoints[-1], Path(temporary))
        yield run


def _read_config(folder: Path) -> SFTConfig | None:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the folder of a run, or of a PEFT adapter")
    if not (folder / CONFIG_FILE).is_file():
        return None
    return parse_sft_config(["--config", str(folder / CONFIG_FILE)])


def _about_full_run(folder: Path) -> str:
    if (folder / "config.json").is_file():
        return (
            "a run of full fine-tuning (lora_r 0), whose folder is the whole model already; load it as it is"
        )
    return "a run of full fine-tuning (lora_r 0) that didn't get to its end; continue it with --resume"


def _why_no_adapter(folder: Path) -> str:
    if (folder.parent / CONFIG_FILE).is_file() and folder.name.startswith("checkpoint-"):
        return f"a checkpoint; name its run, {folder.parent}"
    if (folder / "config.json").is_file():
        return "holds a whole model and no adapter, so that there is nothing to merge"
    return f"holds no adapter ({ADAPTER_CONFIG})"


def _base_in_adapter(folder: Path) -> str | None:
    try:
        saved = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder / ADAPTER_CONFIG}: can't be read: {error}") from error
    name = saved.get("base_model_name_or_path")
    if saved.get("revision") and name and not Path(name).is_dir():
        raise ConfigError(
            f"{folder}: its base is revision {saved['revision']} of {name}; download that, and name its folder with "
            "--base"
        )
    return str(name) if name else None


def _find_base(folder: Path, name: str | None) -> tuple[str, Path]:
    if not name:
        raise ConfigError(f"{folder}: its {ADAPTER_CONFIG} names no base; name it with --base")
    with _about_the_base():
        path = load.resolve_folder(name)
    # A relative path would only be right in this working folder.
    return (str(path.resolve()) if path == Path(name).expanduser() else name), path


@contextmanager
def _about_the_base() -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        reason = str(error).removeprefix("model_name_or_path: ")
        raise ConfigError(f"base: {reason}; if the base is elsewhere, name its folder with --base") from error
