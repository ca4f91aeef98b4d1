"""The shipped Accelerate files as they are launched, and launches that aren't what their file says."""

import os
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEPS = 2


def training(inputs: Any, output_dir: str) -> list[str]:
    flags = [*inputs.flags, "--output_dir", output_dir, "--max_steps", str(STEPS)]
    return [*flags, "--per_device_train_batch_size", "2", "--learning_rate", "0.01"]


def numbers(rows: list[dict[str, Any]]) -> list[float]:
    return [row[name] for row in rows for name in ("loss", "grad_norm")]


@pytest.fixture(scope="session")
def cache() -> dict[str, list[float]]:
    """The losses and norms of DDP, once there are any."""
    return {}


@pytest.fixture
def expected(
    start_training: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], Any],
    cache: dict[str, list[float]],
) -> list[float]:
    if "ddp" not in cache:
        program = start_training("ddp", *training(inputs, "ddp"))
        assert program.wait() == 0, program.output
        assert_quiet(program.output)
        cache["ddp"] = numbers(metrics(tmp_path / "ddp"))
        assert len(cache["ddp"]) == 2 * STEPS
    return cache["ddp"]


def assert_quiet(output: str) -> None:
    """Nothing on the screen but what hfpar itself shows."""
    own = ("  ", "hfpar fine-tuning", "step ", "Finished: ", "hfpar: removed ")
    strange = [line for line in output.splitlines() if not line.startswith(own)]
    assert not strange, output


@pytest.mark.parametrize("config", ["zero3_offload", "fsdp2_offload"])
def test_offload_runs_on_the_cpu_with_the_same_numbers(
    start_training: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], Any],
    expected: list[float],
    config: str,
) -> None:
    variables = {}
    if config.startswith("zero"):
        pytest.importorskip("deepspeed")
        cache = copy_of_extensions(tmp_path)
        lock = cache / "deepspeed_shm_comm" / "lock"
        lock.touch()
        long_ago = time.time() - 3600
        os.utime(lock, (long_ago, long_ago))
        variables["TORCH_EXTENSIONS_DIR"] = str(cache)
    program = start_training(config, *training(inputs, config), **variables)
    assert program.wait() == 0, program.output
    assert numbers(metrics(tmp_path / config)) == pytest.approx(expected, rel=1e-4)
    assert_quiet(program.output)
    if config.startswith("zero"):
        assert len(program.lines("hfpar")) == 1 and "left over from a build" in program.output


def copy_of_extensions(tmp_path: Path) -> Path:
    """What torch has built already, where a test may spoil it."""
    from torch.utils.cpp_extension import _get_build_directory

    cache = tmp_path / "torch_extensions"
    built = Path(_get_build_directory("deepspeed_shm_comm", verbose=False))
    shutil.copytree(built, cache / "deepspeed_shm_comm", ignore=shutil.ignore_patterns("lock"))
    return cache


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def test_two_nodes(
    start_training: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], Any],
    expected: list[float],
) -> None:
    """Two launchers of one process each meet as two nodes would."""
    address = (
        "--num_processes",
        "2",
        "--main_process_ip",
        "127.0.0.1",
        "--main_process_port",
        str(free_port()),
    )
    nodes = [
        start_training(
            "fsdp2_two_nodes",
            *training(inputs, "run"),
            launcher_flags=(*address, "--machine_rank", str(rank)),
        )
        for rank in (0, 1)
    ]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    assert numbers(metrics(tmp_path / "run")) == pytest.approx(expected, rel=1e-4)
    assert "fsdp2 on 2 x cpu" in nodes[0].output
    assert nodes[1].output == ""


@pytest.mark.parametrize(("engine", "size"), [("zero3", "sp_size"), ("fsdp2", "cp_size")])
def test_the_file_lets_ranks_share_a_sequence(
    start_training: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], Any],
    expected: list[float],
    engine: str,
    size: str,
) -> None:
    """As Accelerate writes it for its own implementations, which would refuse to run on a CPU."""
    if engine.startswith("zero"):
        pytest.importorskip("deepspeed")
    config = tmp_path / "accelerate.yaml"
    shutil.copy(Path(__file__).parents[2] / "accelerate_configs" / f"{engine}.yaml", config)
    with config.open("a") as file:
        file.write(f"parallelism_config:\n  parallelism_config_{size}: 2\n")
    same_batch = ("--per_device_train_batch_size", "4")  # of one data-parallel rank
    program = start_training(config, *training(inputs, "run"), *same_batch)
    assert program.wait() == 0, program.output
    assert numbers(metrics(tmp_path / "run")) == pytest.approx(expected, rel=1e-4)
    axis = size.removesuffix("_size")
    assert f"{engine} on 2 x cpu, layout {axis}2" in program.output
    assert f"2 ranks share a stream: {axis} 2\n" in program.output
    assert_quiet(program.output)


# Launches that aren't what their file says; those of every kind are in tests/unit/test_accelerator.py


@pytest.mark.parametrize("flags", [(), ("--cpu",)], ids=["use_cpu", "--cpu"])
def test_one_process_instead_of_two(
    start_training: Callable[..., Any], inputs: Any, tmp_path: Path, launchers: Any, flags: tuple[str, ...]
) -> None:
    config = tmp_path / "accelerate.yaml"
    if flags:
        config = Path("accelerate.yaml")  # found by the workers as by the launcher
        shutil.copy(Path(__file__).parents[2] / "accelerate_configs" / "fsdp2.yaml", tmp_path / config)
    else:
        config.write_text("distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 2\n")
    program = start_training(
        config, *training(inputs, "run"), launcher=launchers["accelerate"], launcher_flags=flags
    )
    assert program.wait() == 1
    (line,) = program.lines("hfpar")
    assert line.startswith("hfpar: error: num_processes: ")
    assert (
        " asks for 2 processes, but this launch runs 1: `use_cpu: true` and `--cpu` start one process" in line
    )
    assert not (tmp_path / "run").exists()


def test_without_accelerate_launch(
    start: Callable[..., Any],
    inputs: Any,
    tmp_path: Path,
    metrics: Callable[[Path], Any],
    expected: list[float],
) -> None:
    """`torchrun` gives DDP."""
    script = str(Path(__file__).parents[2] / "sft" / "train.py")
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    program = start(*torchrun, script, *training(inputs, "run"))
    assert program.wait() == 0, program.output
    assert numbers(metrics(tmp_path / "run")) == pytest.approx(expected, rel=1e-6)
