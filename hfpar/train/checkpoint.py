"""The run folder: who may write into it, whole checkpoints and resuming.

Everything that must be whole is written beside its final name and renamed when it is.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from hfpar.config.load import dump_config, plain_settings
from hfpar.config.schema import SFTConfig
from hfpar.config.yaml_io import read_mapping
from hfpar.engine.base import Engine
from hfpar.errors import ConfigError, HfparError
from hfpar.parallel.layout import Layout
from hfpar.train.files import explained_write_errors, files_in, make_fresh, remove_at_once, sync, write_whole

CONFIG_FILE = "run_config.yaml"
STATE_FILE = "trainer_state.json"
ANY_TO_ANY = frozenset(("ddp", "fsdp2"))
"""Engines that read each other's checkpoints, from any number of ranks onto any number."""

FREE_TO_CHANGE = frozenset(
    "output_dir overwrite resume logging_steps eval_steps save_steps save_total_limit report_to run_name "
    "num_train_epochs max_steps per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size "
    "eval_dataset dataset_num_proc token_cache sp_size cp_size tp_sequence".split()
)
"""Settings that a resumed run may change. The batch is compared as a whole (`TrainerState.global_batch`)."""

_PARTIAL = ".*.partial"
_ARTIFACTS = (
    "checkpoint-*",
    _PARTIAL,
    "metrics.jsonl",
    "loss.png",
    "*.safetensors",
    "*.safetensors.index.json",
    "adapter_config.json",
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template.jinja",
    "README.md",
    CONFIG_FILE,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """Where a run stands after an optimizer step."""

    step: int
    epoch: int
    step_in_epoch: int
    num_tokens: int
    num_label_tokens: int
    global_batch: int
    """Samples or packs an optimizer step takes."""
    engine: str
    world_size: int
    num_steps_without_labels: int = 0
    """Steps whose whole batch had no label: nothing to learn from."""
    data: str = ""
    """`StepLoader.fingerprint`: with other samples, `step_in_epoch` is another place."""


def on_main(layout: Layout, work: Callable[[], T], *, may_take_long: str = "") -> T:
    """Do `work` on rank 0; give every rank its result, or raise its error on every rank.

    Args:
        layout: the rank's place.
        work: what to do.
        may_take_long: a name, of its own for each call, for work that may take longer than a collective waits.
    """
    outcome: list[Any] = [None, None]
    if layout.rank == 0:
        try:
            outcome[0] = work()
        except HfparError as error:
            outcome[1] = error
        except OSError as error:
            outcome[1] = ConfigError(f"{error.filename or 'output_dir'}: {error.strerror or error}")
    if layout.world_size > 1:
        if may_take_long:
            _wait_for_main(layout, f"hfpar/done/{may_take_long}")
        dist.broadcast_object_list(outcome, src=0)
    if outcome[1] is not None:
        raise outcome[1]
    result: T = outcome[0]
    return result


def _wait_for_main(layout: Layout, key: str) -> None:
    """Without a time limit, and so that Ctrl-C gets through; a launcher ends those that wait for a dead rank."""
    store = dist.distributed_c10d._get_default_store()
    if layout.rank == 0:
        store.set(key, "1")
    while not store.check([key]):
        time.sleep(0.05)


# The run folder


class RunFolder:
    """The folder of one run, locked against a second one until `release`. All ranks make it together.

    Making it only checks; nothing in the folder changes before `claim`, so that a run that is refused later
    (a misspelt LoRA target, say) leaves at most an empty folder.
    """

    def __init__(self, config: SFTConfig, layout: Layout) -> None:
        """Check the folder against `config` and lock it.

        Raises:
            ConfigError: it can't be written, is in use, or holds a run and neither `resume` nor `overwrite` is set.
        """
        assert config.output_dir is not None
        self.config, self.layout = config, layout
        self.path = Path(config.output_dir)
        self._lock_file: Any = None
        on_main(layout, self._check)

    def _check(self) -> None:
        if self.path.resolve() == Path(str(self.config.model_name_or_path)).expanduser().resolve():
            raise ConfigError(
                f"output_dir: {self.path} is model_name_or_path, too; the model would be deleted or taken for the "
                "run's: use another --output_dir"
            )
        self._make()
        self._lock()
        try:
            self._check_content()
        except ConfigError:
            self.release()  # the error may outlive this moment, and with it the lock
            raise

    def _check_content(self) -> None:
        if all(child.name.startswith(".") for child in self.path.iterdir()):
            return  # nothing, or what a start that was killed has left
        if not (self.path / CONFIG_FILE).is_file():
            raise ConfigError(
                f"output_dir: {self.path} isn't empty and isn't a run of hfpar; use another --output_dir"
            )
        differing = difference(self.path / CONFIG_FILE, self.config)
        if self.config.resume:
            fixed = [line for line in differing if line.split(":")[0] not in FREE_TO_CHANGE]
            if fixed:
                raise ConfigError(
                    f"resume: {self.path} was started with {fixed[0]}; resume with the settings it has"
                )
        elif not self.config.overwrite:
            kind = f" with other settings ({differing[0]})" if differing else ""
            raise ConfigError(
                f"output_dir: {self.path} already holds a run{kind}; continue it with --resume, start again with "
                "--overwrite, or use another --output_dir"
            )

    def _make(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / f".write-test-{os.getpid()}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"output_dir: {self.path} can't be written ({error.strerror}); use another --output_dir"
            ) from error

    def _lock(self) -> None:
        self._lock_file = open(self.path / ".lock", "w")  # held until `release`
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"output_dir: another run is writing into {self.path}; use another --output_dir"
            ) from error

    def claim(self) -> None:
        """Remove what was never finished, and what `overwrite` gives up, and write the resolved config."""
        on_main(self.layout, self._claim)

    def _claim(self) -> None:
        for pattern in _ARTIFACTS if self.config.overwrite else (_PARTIAL,):
            for found in self.path.glob(pattern):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        write_whole(self.path / CONFIG_FILE, dump_config(replace(self.config, overwrite=False, resume=False)))

    def release(self) -> None:
        """Let others write into the folder."""
        if self._lock_file is not None:
            self._lock_file.close()


def difference(config_file: Path, config: SFTConfig) -> list[str]:
    """The settings in which a saved config differs, as `name: there, here` lines."""
    saved = {key: entry.value for key, entry in read_mapping(str(config_file)).items()}
    present, defaults = plain_settings(config), plain_settings(SFTConfig(tp_size=1))
    lines = []
    for field in fields(SFTConfig):
        there = saved.get(field.name, defaults[field.name])  # an older hfpar may not have had the setting
        here = present[field.name]
        if field.name not in ("overwrite", "resume", "output_dir") and there != here:
            lines.append(f"{field.name}: {there} there, {here} here")
    return lines


# Checkpoints


def save_checkpoint(
    engine: Engine, state: TrainerState, output_dir: Path, layout: Layout, *, save_total_limit: int | None
) -> Path:
    """Write `checkpoint-<step>`, whole or not at all, and drop the oldest beyond the limit. All ranks together.

    Raises:
        ConfigError: it can't be written. Earlier checkpoints are as they were.
    """
    final = output_dir / f"checkpoint-{state.step}"
    partial = _partial(final)
    on_main(layout, lambda: make_fresh(partial))
    with explained_write_errors(final):
        engine.save_state(partial)
    dist.barrier()

    def finish() -> None:
        with explained_write_errors(final):
            files = {name: path.stat().st_size for name, path in files_in(partial)}
            write_whole(partial / STATE_FILE, json.dumps({**asdict(state), "files": files}, indent=2) + "\n")
            for _, path in files_in(partial):
                sync(path)
            remove_at_once(final)
            os.replace(partial, final)
            sync(output_dir)
        whole = whole_checkpoints(output_dir)
        for old in whole[:-save_total_limit] if save_total_limit else []:
            remove_at_once(old)

    on_main(layout, finish)
    return final


def _partial(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def whole_checkpoints(output_dir: Path) -> list[Path]:
    """The checkpoints of a run that were written to the end, oldest first."""
    return [path for path in _checkpoint_folders(output_dir) if why_not_whole(path) is None]


def _checkpoint_folders(output_dir: Path) -> list[Path]:
    found = [path for path in output_dir.glob("checkpoint-*") if path.name.rpartition("-")[2].isdecimal()]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def why_not_whole(folder: Path) -> str | None:
    """What is missing or cut short in a checkpoint; None if nothing is."""
    try:
        files = json.loads((folder / STATE_FILE).read_text())["files"]
    except FileNotFoundError:
        return f"has no {STATE_FILE}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"has an unreadable {STATE_FILE}"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"has no {name}"
        if path.stat().st_size != size:
            return f"has {path.stat().st_size} of the {size} bytes of {name}"
    return None


def last_checkpoint(output_dir: Path, layout: Layout) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and a line about each newer one that isn't whole. All ranks together."""

    def find() -> tuple[Path | None, list[str]]:
        skipped = [
            f"{path}: it was never finished" for path in sorted(output_dir.glob(".checkpoint-*[0-9].partial"))
        ]
        for path in reversed(_checkpoint_folders(output_dir)):
            reason = why_not_whole(path)
            if reason is None:
                return path, skipped
            skipped.append(f"{path}: it {reason}")
        return None, skipped

    return on_main(layout, find)


def load_checkpoint(engine: Engine, folder: Path, layout: Layout, *, global_batch: int) -> TrainerState:
    """Continue from `folder`. All ranks together.

    Raises:
        ConfigError: written by another engine, with another global batch, or for ZeRO by another number of ranks.
    """
    saved = json.loads((folder / STATE_FILE).read_text())
    saved.pop("files")
    try:
        state = TrainerState(**saved)
    except TypeError as error:
        raise ConfigError(f"resume: {folder} was written by another version of hfpar: {error}") from error
    if state.engine != engine.name and not {state.engine, engine.name} <= ANY_TO_ANY:
        also = " or ".join(sorted(ANY_TO_ANY)) if state.engine in ANY_TO_ANY else state.engine
        raise ConfigError(
            f"resume: {folder} was written by {state.engine}, which {engine.name} can't read; resume with the "
            f"Accelerate config file of {also}"
        )
    if engine.name.startswith("zero") and state.world_size != layout.world_size:
        raise ConfigError(
            f"resume: {folder} was written by {state.world_size} processes; ZeRO resumes with as many, not "
            f"{layout.world_size}: use --num_processes {state.world_size}"
        )
    if state.global_batch != global_batch:
        raise ConfigError(
            f"resume: {folder} took {state.global_batch} samples or packs a step, this run {global_batch}; "
            "set gradient_accumulation_steps so that they are equal"
        )
    engine.load_state(folder)
    return replace(state, engine=engine.name, world_size=layout.world_size)
