"""math-verify in its own process: what it decides, and what becomes of it."""

import os
import signal
import time

import pytest

from hfpar.audit.answers import answers_equal, is_right, symbolic, symbolic_backend_available
from hfpar.audit.answers.symbolic import SymbolicWorker, shared_worker

installed = pytest.mark.skipif(not symbolic_backend_available(), reason="math-verify isn't installed")


@pytest.fixture(scope="module")
def worker():
    worker = SymbolicWorker(timeout=30)
    yield worker
    worker.close()


@installed
@pytest.mark.parametrize(
    ("gold", "answer", "equal"),
    [
        (r"\cot x", r"\frac{\cos x}{\sin x}", True),
        (r"\sqrt{3+2\sqrt2}", r"1+\sqrt2", True),
        ("sqrt(3+2sqrt(2))", r"1+\sqrt2", True),
        (r"(\sqrt{3+2\sqrt2}, 2)", r"(1+\sqrt2, 2)", True),
        (r"\sin^2 x+\cos^2 x-1", "0", True),
        (r"\log_2 8", "3", True),
        (r"\frac{(n+1)!}{n!}", "n+1", True),
        (r"\sqrt{x^2}", "x", False),
        (r"\tan 75^\circ", r"2+\sqrt3", False),
        (r"\sin(1)/2^{2000}", r"\cos(1)/2^{1999}", False),
        (r"\sin(10^{400})", r"\cos(10^{400})", False),
    ],
)
def test_expressions(gold, answer, equal):
    assert answers_equal(gold, answer, "math") is equal
    assert answers_equal(answer, gold, "math") is equal


@installed
def test_what_math_verify_would_accept_is_decided_before_it(monkeypatch):
    asked = []
    monkeypatch.setattr(SymbolicWorker, "equal", lambda self, *pair: asked.append(pair) or True)
    assert not answers_equal("1/2^{99}", "1/2^{98}", "math")
    assert not answers_equal(r"2^{-99}\pi", r"2^{-98}\pi", "math")
    assert not answers_equal("e^{-99}", "e^{-98}", "math")
    assert not answers_equal("x^2+1", "x^2-1", "math")
    assert not answers_equal(r"\ln 8", r"3\ln 3", "math")
    assert not answers_equal(r"\oint x", r"\oint y", "math")
    assert not is_right("1,2", r"\boxed{1} and \boxed{2}", "math")
    assert asked == []
    assert answers_equal(r"\ln 8", r"3\ln 2", "math")
    assert asked == [(r"\ln 8", r"3\ln 2")]


@installed
def test_a_set_of_many_asks_only_a_few_times(monkeypatch):
    asked = []
    monkeypatch.setattr(SymbolicWorker, "equal", lambda self, *pair: asked.append(pair))
    left = ", ".join(r"\ln 8" for _ in range(20))
    assert not answers_equal(left, left.replace("8", "2^3").replace(r"\ln 2^3", r"3\ln 2"), "math")
    assert 0 < len(asked) <= 4


@installed
def test_one_process_serves_many_questions(worker):
    assert worker.equal("x+1", "1+x")
    process = worker._process
    assert not worker.equal("x+1", "x")
    assert not worker.equal(r"\frac{", "1")
    assert worker.equal("x+1", "1+x")
    assert worker._process is process and process.poll() is None


@installed
def test_a_question_that_takes_too_long_ends_the_process_and_the_next_starts_another(worker):
    assert worker.equal("1", "1")
    process, timed_out = worker._process, worker.num_timed_out
    worker.timeout = 0.5
    start = time.monotonic()
    assert not worker.equal("9^{9^{9^9}}", "1")
    assert time.monotonic() - start < 20
    assert process.poll() is not None and worker.num_timed_out == timed_out + 1
    worker.timeout = 30
    assert worker.equal("1", "1")


@installed
def test_a_process_that_died_is_replaced(worker):
    assert worker.equal("1", "1")
    os.kill(worker._process.pid, signal.SIGKILL)
    worker._process.wait()
    assert worker.equal("1", "1")


@installed
def test_ctrl_c_is_the_parents(worker):
    assert worker.equal("1", "1")
    process = worker._process
    os.kill(process.pid, signal.SIGINT)
    assert worker.equal("2", "2")
    assert worker._process is process


@installed
def test_it_ends_with_its_parent(worker):
    assert worker.equal("1", "1")
    process = worker._process
    process.stdin.close()  # as it is when the parent is gone
    assert process.wait(timeout=20) == 0


@installed
def test_one_worker_a_process():
    assert shared_worker() is shared_worker()


def test_without_math_verify_everything_else_works(monkeypatch):
    monkeypatch.setattr(symbolic.importlib.util, "find_spec", lambda name: None)
    assert not symbolic_backend_available()
    assert is_right("x^2+1", r"\boxed{1+x^2}", "math")
    assert not is_right(r"\ln 8", r"\boxed{3\ln 2}", "math")
    idle = SymbolicWorker()
    assert not idle.equal("1", "1")
    assert idle._process is None
