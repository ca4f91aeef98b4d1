"""The launch: what `accelerate launch` handed over, checked against its file, and the only `Accelerator()`.

Everything that reads the environment is here, or is handed it from here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from hfpar.accelerate_file import check_launch, find_launcher, read_request
from hfpar.config.accelerate_env import flag, read_defaults, read_engine_settings
from hfpar.config.engine import EngineSettings, LaunchDefaults, ZeROSettings
from hfpar.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator


_USE_PARALLELISM_CONFIG = "ACCELERATE_USE_PARALLELISM_CONFIG"


@dataclass(frozen=True)
class Launch:
    """One rank's view of how the run was started."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    settings: EngineSettings
    defaults: LaunchDefaults
    use_cpu: bool = False
    """Leave this machine's GPUs alone (`use_cpu: true`, `--cpu`)."""

    @property
    def is_main(self) -> bool:
        """Whether this rank prints, logs and writes."""
        return self.rank == 0


def read_launch(environ: Mapping[str, str] | None = None, launcher: Sequence[str] | None = None) -> Launch:
    """Read how this process was started and check it against the Accelerate config file.

    Args:
        environ: the environment; the process's own by default.
        launcher: the command line of the `accelerate launch` above this process; looked up by default.

    Raises:
        ConfigError: a setting that hfpar doesn't honour, or a launch that isn't what its file says.
    """
    environ = os.environ if environ is None else environ
    launcher = find_launcher() if launcher is None else launcher
    world_size = int(environ.get("WORLD_SIZE", "1"))
    settings = read_engine_settings(environ)
    use_cpu = flag(environ, "ACCELERATE_USE_CPU")
    sizes_written: Collection[str] = ()
    if launcher:
        request = read_request(launcher)
        handed_over = flag(environ, _USE_PARALLELISM_CONFIG)
        check_launch(request, settings, world_size, parallelism=handed_over)
        sizes_written = request.parallelism if handed_over else ()
        use_cpu = use_cpu or request.use_cpu
    return Launch(
        rank=int(environ.get("RANK", "0")),
        local_rank=int(environ.get("LOCAL_RANK", "0")),
        world_size=world_size,
        local_world_size=int(environ.get("LOCAL_WORLD_SIZE", "1")),
        settings=settings,
        defaults=read_defaults(environ, settings, sizes_written),
        use_cpu=use_cpu,
    )


def current_rank() -> int:
    """This process's rank as the launcher gave it; 0 outside a launch. Works before anything is set up."""
    return int(os.environ.get("RANK", "0"))


def launcher_reports_deaths() -> bool:
    """Whether the launcher is `hfpar launch`, which says itself which rank died of what."""
    return os.environ.get("HFPAR_LAUNCH") == "1"


# The only Accelerator()


def start(launch: Launch, *, report_to: Sequence[str] = (), project_dir: str | None = None) -> Accelerator:
    """Set up the process group and make the run's one `Accelerator`.

    hfpar wraps models itself, so the `Accelerator` only says which device is this rank's and keeps the
    trackers. It isn't told of the file's `parallelism_config`, which it would refuse on a CPU and make meshes and
    rules for elsewhere. Where there is no GPU, ranks talk through gloo.

    Raises:
        ConfigError: more ranks than GPUs on this node, or a group that the ranks can't form.
    """
    import torch
    from accelerate import Accelerator

    if launch.use_cpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # read at the first use of CUDA, which is below
    on_gpu = torch.cuda.is_available()
    if on_gpu and launch.local_world_size > torch.cuda.device_count():
        raise ConfigError(
            f"num_processes: {launch.local_world_size} processes on this node, but it has "
            f"{torch.cuda.device_count()} GPUs; use --num_processes {torch.cuda.device_count()}"
        )
    start_process_group(launch, on_gpu=on_gpu)
    os.environ.pop(_USE_PARALLELISM_CONFIG, None)
    accelerator = Accelerator(cpu=not on_gpu, log_with=list(report_to) or None, project_dir=project_dir)
    if torch.distributed.get_world_size() != launch.world_size:
        raise ConfigError(
            f"num_processes: {launch.world_size} were launched, {torch.distributed.get_world_size()} joined"
        )
    return accelerator


def finish(accelerator: Accelerator) -> None:
    """Close the trackers and wait for the other ranks.

    The process group stays, and `run_to_exit_code` ends the process with it: the destructor of a gloo group
    waits, with Python's lock in hand, for threads that may be waiting for this lock (pytorch#56297).
    """
    for tracker in accelerator.trackers:
        tracker.finish()
    accelerator.wait_for_everyone()


def start_process_group(launch: Launch, *, on_gpu: bool) -> None:
    """Form the world group: NCCL (with gloo for CPU tensors) on GPUs, gloo otherwise; one rank needs no port."""
    import torch
    import torch.distributed as dist

    if not on_gpu and "deepspeed" not in sys.modules:
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # other libraries import DeepSpeed too, where it is installed
    if isinstance(launch.settings, ZeROSettings):
        prepare_deepspeed(on_gpu=on_gpu)
    if dist.is_initialized():
        return
    options: dict[str, Any] = {
        "backend": "cuda:nccl,cpu:gloo" if on_gpu else "gloo",
        "timeout": timedelta(minutes=30),
    }
    if on_gpu:
        torch.cuda.set_device(launch.local_rank)
    if launch.world_size == 1:
        dist.init_process_group(rank=0, world_size=1, store=dist.HashStore(), **options)
    else:
        dist.init_process_group(**options)
    if isinstance(launch.settings, ZeROSettings):
        _start_deepspeed_comm()


def _start_deepspeed_comm() -> None:
    """Make DeepSpeed's own view of the group now: it prints a line about its op, wherever it first comes to it."""
    with contextlib.redirect_stdout(io.StringIO()):
        import deepspeed

        deepspeed.init_distributed(dist_init_required=False)


def prepare_deepspeed(*, on_gpu: bool) -> None:
    """Make DeepSpeed importable on this device, before its first import.

    Raises:
        MissingDependencyError: DeepSpeed isn't installed.
    """
    import importlib.util

    if importlib.util.find_spec("deepspeed") is None:
        raise MissingDependencyError(
            "distributed_type: DEEPSPEED needs DeepSpeed: pip install 'hfpar[deepspeed]'"
        )
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it
    if not on_gpu:
        _tell_deepspeed_cpu()
    if os.environ["LOCAL_RANK"] == "0":
        clear_stale_locks(_extensions_root())


def _tell_deepspeed_cpu() -> None:
    if "deepspeed" not in sys.modules:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def clear_stale_locks(root: Path, *, patience: float = 60.0) -> None:
    """Remove the locks of builds that were killed; torch would wait for each for ever.

    torch marks a build of an extension by a file `lock`, which the building process holds open. One that no
    process has open is left over, unless it belongs to another machine with the same home folder: such a build
    gets some time.

    Args:
        root: of torch's cache of extensions, in which each has its own folder.
        patience: seconds that a lock must be old.
    """
    log = logging.getLogger(__name__)
    for lock in root.glob("*/lock"):
        waiting = False
        while _is_unheld(lock):
            remaining = patience - (time.time() - _changed_at(lock))
            if remaining <= 0:
                lock.unlink(missing_ok=True)
                log.warning("hfpar: removed %s, left over from a build that was killed", lock)
                break
            if not waiting:
                log.warning(
                    "hfpar: %s is left over from a killed build, or another machine's; %.0f s",
                    lock,
                    remaining,
                )
            waiting = True
            time.sleep(min(remaining, 0.5))


def _changed_at(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:  # another rank was faster
        return time.time()


def _is_unheld(lock: Path) -> bool:
    if os.path.realpath(lock) in _open_files():
        return False
    time.sleep(0.1)  # a build that has just ended closes its lock, then removes it
    return lock.exists()


def _open_files() -> set[str]:
    """Paths of the files that any process of this machine has open, as far as this user may see."""
    found = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue  # closed meanwhile, or another user's
    return found


def _extensions_root() -> Path:
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory("deepspeed_shm_comm", verbose=False)).parent


def device_of(accelerator: Accelerator) -> torch.device:
    """This rank's device."""
    return cast("torch.device", accelerator.device)
