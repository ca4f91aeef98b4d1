"""The head's memory, by the benchmark's own measuring, at a size that takes seconds."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "head_memory.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("head_memory", BENCHMARK)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")
def test_the_head_takes_a_quarter_of_the_memory_of_full_logits_at_most(benchmark: ModuleType) -> None:
    result = benchmark.compare((2048, 64, 50_000), threads=1)
    full, chunked = result["full"], result["chunked"]
    assert chunked["loss"] == pytest.approx(full["loss"], rel=1e-5)
    assert chunked["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-5)
    assert full["peak_bytes"] > 2 * 2048 * 50_000 * 4  # logits and their gradient: the measuring works
    assert result["memory_ratio"] <= 0.25
