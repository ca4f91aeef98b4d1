"""DeepSpeed's shared-memory op, built where no earlier build can be in the way.

On a CPU DeepSpeed compiles it at its first start and keeps it in torch's cache. A start that was killed while
compiling leaves a lock there, and the next one waits for it for ever. So a run of `hfpar verify` has a cache of
its own: a copy of what torch's holds if that is whole, else built once, by one process, with a time limit.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from hfpar.verify.processes import Worker, WorkerError, run_processes

SECONDS_TO_BUILD = 600.0
_OP = "deepspeed_shm_comm"


def prepare_extensions(folder: Path) -> tuple[dict[str, str], str | None]:
    """Make DeepSpeed's op ready to load.

    Args:
        folder: of the run; the cache is made in it.

    Returns:
        The variables that make torch use this cache, and why the op couldn't be built, or None.
    """
    cache = folder / "torch_extensions"
    cache.mkdir(exist_ok=True)
    environment = {"TORCH_EXTENSIONS_DIR": str(cache)}
    built = _find_built()
    if built is not None:
        shutil.copytree(built, cache / _OP, dirs_exist_ok=True)
        return environment, None
    try:
        run_processes(build_op, 1, folder=folder, environment=environment, timeout=SECONDS_TO_BUILD)
    except WorkerError as error:
        return environment, f"DeepSpeed can't build its CPU op (a C++ compiler and ninja?): {error}"
    return environment, None


def build_op(worker: Worker) -> None:
    """Compile and load the op, in a process of its own."""
    from hfpar.accelerator import prepare_deepspeed

    prepare_deepspeed(on_gpu=False)
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load()


def _find_built() -> Path | None:
    """A whole build in torch's own cache that nothing is being done to; None if there isn't one."""
    built = _torch_cache() / _OP
    whole = (built / f"{_OP}.so").is_file() and not (built / "lock").exists()
    return built if whole else None


def _torch_cache() -> Path:
    """Where torch keeps what it builds: a folder for each Python and each CUDA version."""
    import torch
    from torch.utils.cpp_extension import get_default_build_root

    root = os.environ.get("TORCH_EXTENSIONS_DIR")
    if root:
        return Path(root)
    cuda = torch.version.cuda
    flags = getattr(sys, "abiflags", "")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{flags}"
    return (
        Path(get_default_build_root()) / f"{python}_{'cpu' if cuda is None else 'cu' + cuda.replace('.', '')}"
    )
