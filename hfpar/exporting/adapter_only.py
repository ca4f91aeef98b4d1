"""The adapter of a run without anything else of the run's folder."""

from __future__ import annotations

import json
import shutil

from hfpar.errors import ConfigError
from hfpar.exporting.output import Output
from hfpar.exporting.run import ADAPTER_CONFIG, Run
from hfpar.train.files import files_in
from hfpar.train.progress import format_bytes, print_summary

_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


def export_adapter(run: Run, output: Output) -> None:
    """Write the folder that PEFT loads, and say where it is.

    Raises:
        ConfigError: it can't be written.
    """
    weights = [name for name in _WEIGHTS if (run.adapter / name).is_file()][:1]
    if not weights:
        raise ConfigError(f"{run.folder}: the adapter has no {_WEIGHTS[0]}")
    with output.written() as folder:
        settings = json.loads((run.adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        settings["base_model_name_or_path"] = run.base_name
        (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        shutil.copyfile(run.adapter / weights[0], folder / weights[0])
        run.tokenizer.save_pretrained(folder)
        size = sum(path.stat().st_size for _, path in files_in(folder))
    rows = [
        ("adapter", f"{run.folder}" + (f" ({run.note})" if run.note else "")),
        ("base", run.base_name),
        ("size", format_bytes(size)),
        ("adapter folder", str(output.folder)),
    ]
    print_summary(rows, "hfpar export")
