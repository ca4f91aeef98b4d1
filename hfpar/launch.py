"""`hfpar launch`: `accelerate launch` that ends like the program it launched.

`accelerate launch` answers any failure of a worker with its own traceback, a table about the workers and exit
code 1, under which the one line that says what to mend gets lost. Here the launch is Accelerate's own, with
all of its arguments, but the exit code is the worker's, and only what the workers wrote is on the screen.
"""

import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml

from hfpar.errors import ConfigError

# What hfpar's own programs return after they have said in one line what was wrong, or that they were stopped.
_EXPLAINED_EXIT_CODES = (ConfigError.exit_code, 128 + signal.SIGINT)
_SECONDS_TO_STOP = 4.0


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that no worker outlives the launcher."""


def main(argv: Sequence[str]) -> int:
    """Launches a training script as `accelerate launch` does.

    Args:
        argv: The arguments of `accelerate launch`.

    Returns:
        The exit code of the worker that failed first, or 0. A worker or launcher that died of a signal counts
        as in a shell: 128 plus the signal's number, so 130 after Ctrl-C.

    Raises:
        ConfigError: If the config file or the script doesn't exist, or Accelerate refuses the arguments.
        SystemExit: From the argument parser, after `--help`.
    """
    from accelerate.commands.launch import launch_command_parser

    parser = launch_command_parser()
    parser.prog = "hfpar launch"
    parser.error = _refuse_arguments
    args = parser.parse_args(list(argv))
    if args.config_file is not None:
        _check_config_file(Path(args.config_file))
    if not args.module and not args.no_python and not Path(args.training_script).is_file():
        raise ConfigError(
            f"training_script={args.training_script}: no such file; give the path of the script to launch,"
            " after all arguments of the launcher"
        )
    with _no_worker_left(), _signals_as_exceptions(), _quiet_elastic_loggers():
        return _launch(args)


def _launch(args: Namespace) -> int:
    import torch.distributed as dist
    from accelerate.commands.launch import launch_command
    from accelerate.utils import patch_environment
    from torch import cuda
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError

    variables = {"HFPAR_LAUNCH": "1"}  # for the workers: see `hfpar.accelerator.launcher_reports_deaths`
    if "DS_ACCELERATOR" not in os.environ and not cuda.is_available():
        variables["DS_ACCELERATOR"] = (
            "cpu"  # Accelerate imports DeepSpeed for a DeepSpeed launch, and it would tell
        )
    try:
        with patch_environment(**variables):
            launch_command(args)
    except ChildFailedError as error:
        rank, failure = first_failure(error.failures)
        return _report(f"rank {rank}", failure.exitcode)
    except subprocess.CalledProcessError as error:
        return _report("the worker", error.returncode)
    except SignalException as error:
        return 128 + error.sigval
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except _Terminated:
        return 128 + signal.SIGTERM
    except (RendezvousError, dist.DistError) as error:
        raise ConfigError(
            f"main_process_ip={args.main_process_ip}, main_process_port={args.main_process_port}: the"
            f" machines of this launch did not find each other ({_one_line(error)}); start it on every"
            " machine, each with its own machine_rank, and let the port through"
        ) from error
    except (ValueError, ImportError, ConnectionError) as error:
        raise ConfigError(f"accelerate launch refuses these settings: {_one_line(error)}") from error
    return 0


def first_failure(failures: Mapping[int, Any]) -> tuple[int, Any]:
    """Returns the global rank and the `ProcessFailure` of the worker that failed on its own account.

    Args:
        failures: By global rank, in the order in which they were seen. Those that died of SIGTERM come last:
            that is how the launcher ends the others after a failure.
    """
    rank = min(
        failures,
        key=lambda rank: (failures[rank].exitcode == -signal.SIGTERM, failures[rank].timestamp),
    )
    return rank, failures[rank]


def _report(worker: str, exit_code: int) -> int:
    """Says how a worker ended, unless it has said so itself; returns the code to end with."""
    if exit_code < 0:
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        hint = " (often: the machine is out of memory)" if -exit_code == signal.SIGKILL else ""
        print(f"hfpar launch: {worker} was killed by {name}{hint}", file=sys.stderr)
        return 128 - exit_code
    if exit_code not in _EXPLAINED_EXIT_CODES:
        print(f"hfpar launch: {worker} failed with exit code {exit_code}", file=sys.stderr)
    return exit_code


def _refuse_arguments(message: str) -> NoReturn:
    raise ConfigError(f"launch: {message}; `hfpar launch --help` lists what it takes")


def _check_config_file(path: Path) -> None:
    if not path.is_file():
        raise ConfigError(f"config_file={path}: no such file; hfpar's own are in accelerate_configs/")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"config_file={path}: can't be read: {_one_line(error)}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"config_file={path}: not an Accelerate config; it needs keys such as `distributed_type`"
        )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextlib.contextmanager
def _quiet_elastic_loggers() -> Iterator[None]:
    """Keeps torch's own account of a failed worker out of the way; `_report` says what matters of it."""
    import torch.distributed.run  # noqa: F401  (its import sets a level on each of these loggers)

    prefix = "torch.distributed.elastic."
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(prefix)]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raises on SIGTERM, and takes back the handlers that torch leaves behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = [signal.getsignal(number) for number in numbers]
    signal.signal(signal.SIGTERM, _raise_terminated)
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers, strict=True):
            if handler is not None:  # None: not set from Python, so not to be set again from here
                signal.signal(number, handler)


def _raise_terminated(number: int, frame: FrameType | None) -> None:
    raise _Terminated


@contextlib.contextmanager
def _no_worker_left() -> Iterator[None]:
    """Ends the workers that are still there when the launch is over.

    torch's launcher ends its own; with one process Accelerate leaves the worker to itself when only the
    launcher gets the signal. A worker that got it too has some seconds to finish what it is writing.
    """
    import psutil

    launcher = psutil.Process(os.getpid())
    others = set(launcher.children())
    try:
        yield
    finally:
        workers = [child for child in launcher.children() if child not in others]
        for number in (None, signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                for worker in workers:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        worker.send_signal(number)
            _, workers = psutil.wait_procs(workers, timeout=_SECONDS_TO_STOP / 2 if workers else 0)
