"""The folder of an audit: whose it is, and that nobody else is writing there."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from filelock import FileLock, Timeout

from hfpar.config.audit_schema import AuditConfig
from hfpar.config.load import plain_settings
from hfpar.errors import ConfigError
from hfpar.parallel.layout import Layout
from hfpar.train.checkpoint import on_main
from hfpar.train.files import write_whole

AUDIT_FILE = "audit.json"
_NOT_OF_ITEMS = (
    "model_name_or_path",
    "base",
    "output_dir",
    "overwrite",
    "fail_on",
    "plan",
    "compare",
    "alpha",
    "order_test",
    "order_permutations",
    "api_key_file",
    "request_timeout",
    "request_concurrency",
    "benchmark_files",
)
"""Settings that change nothing about an item: results made with other values can be used. Files are known by their
contents."""
_RULES = 2
"""Of what is probed and compared; lines made by others aren't mixed with these."""
_OWN_FILES = ("items.jsonl", "report.json", "report.md", "report.html", "forest.png", "ratios.png")


class AuditFolder:
    """The folder of one audit, locked against a second one until `release`. All ranks make it together."""

    def __init__(self, config: AuditConfig, hashes: Sequence[str], layout: Layout) -> None:
        """Claim the folder.

        Args:
            config: the audit's.
            hashes: of the model, the tokenizer and the data.
            layout: the rank's place.

        Raises:
            ConfigError: it can't be written, is in use, or holds another audit and `overwrite` isn't set.
        """
        self.path = folder_of(config)
        self._lock: FileLock | None = None
        try:
            on_main(layout, lambda: self._claim(config, hashes))
        except ConfigError:
            self.release()
            raise

    def _claim(self, config: AuditConfig, hashes: Sequence[str]) -> None:
        try:
            self._claim_or_fail(config, hashes)
        except OSError as error:
            raise ConfigError(
                f"output_dir: {self.path} can't be written ({error.strerror or error}); make room, or choose another "
                "folder"
            ) from error

    def _claim_or_fail(self, config: AuditConfig, hashes: Sequence[str]) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.path / ".lock")
        try:
            lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(
                f"output_dir: {self.path} is in use by another audit; wait for it, or choose another folder"
            ) from None
        self._lock = lock
        mine: dict[str, object] = {
            "rules": _RULES,
            "fingerprint": fingerprint(config, hashes),
            "settings": plain_settings(config),
        }
        path = self.path / AUDIT_FILE
        found = _read(path)
        if config.overwrite or found is None:
            # Hidden ones are what this command leaves when it's stopped while it begins.
            others = [path for path in self.path.glob("*.json*") if not path.name.startswith(".")]
            if found is None and not config.overwrite and others:
                raise ConfigError(
                    f"output_dir: {self.path} holds other files; choose another folder, or add --overwrite"
                )
            for name in _OWN_FILES:
                (self.path / name).unlink(missing_ok=True)
            for part in self.path.glob(".*.partial*"):
                part.unlink()
        elif found and found.get("rules") != _RULES:
            raise ConfigError(
                f"output_dir: {self.path} holds an audit of another version of hfpar, whose rules of what is "
                "probed and compared are others; choose another folder, or add --overwrite"
            )
        elif found.get("fingerprint") != mine["fingerprint"]:
            raise ConfigError(
                f"output_dir: {self.path} holds an audit of {_difference(found, mine)}; choose another folder, or "
                "add --overwrite"
            )
        for left in self.path.glob(".*.partial"):  # of writers that were killed
            left.unlink()
        write_whole(path, json.dumps(mine, indent=2) + "\n")

    def release(self) -> None:
        """Let others use it."""
        if self._lock is not None:
            self._lock.release()


def folder_of(config: AuditConfig) -> Path:
    """Where an audit goes."""
    if config.output_dir is not None:
        return Path(config.output_dir).expanduser()
    name = Path(str(config.model_name_or_path).rstrip("/")).name or "model"
    return Path("runs/audit") / name


def fingerprint(config: AuditConfig, hashes: Sequence[str]) -> str:
    """Of all that decides what is found about an item."""
    settings = {key: value for key, value in plain_settings(config).items() if key not in _NOT_OF_ITEMS}
    return hashlib.sha256(json.dumps([settings, list(hashes)], sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> dict[str, object] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _difference(found: dict[str, object], mine: dict[str, object]) -> str:
    """The first setting that differs, or that it is another model or other data."""
    theirs, ours = found.get("settings"), mine["settings"]
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key, value in ours.items():
            if key not in _NOT_OF_ITEMS and theirs.get(key) != value:
                return f"other settings ({key}: {theirs.get(key)}, and now {value})"
        if theirs.get("model_name_or_path") != ours.get("model_name_or_path"):
            return f"another model ({theirs.get('model_name_or_path')})"
    return "another model or other data"
