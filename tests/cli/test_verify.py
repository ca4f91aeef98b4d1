"""`hfpar verify` as a person types it: what is on the screen, the JSON, the exit code."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from hfpar import cli
from hfpar.verify import run
from hfpar.verify.cells import Errors, Result

ROOT = Path(__file__).resolve().parents[2]


def hfpar(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hfpar.cli", "verify", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.timeout(900)
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_a_table_and_nothing_else(tmp_path):
    options = (
        "--engines",
        "ddp,zero2",
        "--layouts",
        "dp2,tp2,pp2",
        "--adapters",
        "lora",
        "--batching",
        "packed",
    )
    done = hfpar(*options, "--device", "cpu", "--json", "out.json", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].strip() == "relative errors against one process: the built-in tiny model"
    assert lines[-1].startswith("4 of 6 equal one process within 1e-05, 2 refused (")
    assert len([line for line in lines if "zero2" in line or "ddp" in line]) == 6
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [row["status"] for row in rows] == ["pass"] * 4 + ["refused"] * 2
    for row in rows[:4]:
        assert 0 < row["max_rel_grad_error"] < 1e-5
        assert 0 < row["max_rel_param_error"] < 1e-5
        assert row["worst"].startswith("base_model.model.model.layers.")
        assert row["reason"] is None
    assert rows[4]["reason"].startswith("pp_size 2: pipeline parallelism isn't supported yet")
    assert os.listdir(tmp_path) == ["out.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--engines", "fsdp"], "--engines: fsdp; allowed: ddp, zero1, zero2, zero3, fsdp2"),
        (["--layouts", "two"], "--layouts: two is no layout; allowed: dp, cp, sp and tp"),
        (["--tolerance", "-1"], "--tolerance: -1; allowed: a number between 0 and 1"),
        (["--device", "tpu"], "verify: argument --device: invalid choice: 'tpu'"),
        (["--engine_names", "ddp"], "verify: unrecognized arguments: --engine_names ddp"),
        (["--json", "nowhere/out.json"], "--json: nowhere is no folder"),
    ],
)
def test_a_bad_option_is_one_line(options, message, capsys):
    assert cli.main(["verify", *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"hfpar: error: {message}")
    assert captured.err.count("\n") == 1


def test_a_missing_model_is_one_line(tmp_path):
    done = hfpar("--model_name_or_path", str(tmp_path / "nothing"), "--engines", "ddp", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hfpar: error: model_name_or_path: ")


def test_ctrl_c_stops_all_processes_and_leaves_no_files(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "hfpar.cli", "verify", "--engines", "ddp", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a process group of its own, as a terminal would make it
    )
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("hfpar_verify_*/ranks_*/rank0.log")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    stopped_at = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    output, errors = process.communicate(timeout=60)  # ends when the last process has let go of the pipes
    assert time.monotonic() - stopped_at < 30
    assert (output, errors, process.returncode) == ("", "hfpar: stopped\n", 130)
    assert not list(tmp_path.iterdir())


def test_only_refused_layouts_need_no_process_and_prove_nothing(capsys):
    assert cli.main(["verify", "--layouts", "pp2,dp2pp2", "--engines", "ddp,zero3"]) == 2
    captured = capsys.readouterr()
    assert "nothing was compared" in captured.out
    assert "16 refused" in captured.out
    assert "pp_size 2: pipeline parallelism" in captured.out


def test_zero_without_deepspeed_is_refused_with_the_command(capsys, monkeypatch):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["verify", "--engines", "zero1", "--adapters", "full"]) == 2
    assert "pip install 'hfpar[deepspeed]'" in capsys.readouterr().out


def test_too_many_processes_are_refused(capsys):
    assert cli.main(["verify", "--engines", "ddp", "--layouts", "sp9cp1111", "--device", "cpu"]) == 2
    assert "sp9cp1111 needs about 7999 GiB for 9999 processes" in capsys.readouterr().out


def test_a_failure_is_told_in_full_and_ends_with_1(capsys, monkeypatch, tmp_path):
    def verify(cells, folder, **options):
        wrong = Errors(loss=1e-7, gradient=2e-3, worst="layers.0.weight")
        return [
            Result(cells[0], "fail", wrong, reason="a gradient is off by 2.0e-03"),
            *(
                Result(cell, "fail", reason="rank 1: ValueError: x", details="Traceback [y]")
                for cell in cells[1:]
            ),
        ]

    monkeypatch.setattr(run, "verify", verify)
    path = tmp_path / "out.json"
    options = ["--engines", "ddp", "--adapters", "full", "--json", str(path)]
    assert cli.main(["verify", *options]) == 1
    out = capsys.readouterr().out
    assert "fail ddp dp2 full padded: a gradient is off by 2.0e-03" in out
    assert "rank 1: ValueError: x\nTraceback [y]" in out
    assert "0 of 2 equal one process within 1e-05, 2 fail" in out
    assert [row["worst"] for row in json.loads(path.read_text())] == ["layers.0.weight", None]
