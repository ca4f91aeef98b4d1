"""What started processes have in common."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from hfpar.child_processes import interrupts_ignored

DEAF = "import time; print('started', flush=True); time.sleep(30)"


def test_a_started_process_is_deaf_to_ctrl_c_and_its_parent_hears_of_it_afterwards() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt):
        with interrupts_ignored():
            child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
            assert child.stdout is not None and child.stdout.readline() == b"started\n"
            os.kill(child.pid, signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            done.append("all of it")
        done.append("never")
    assert done == ["all of it"] and child.poll() is None
    child.kill()
    child.wait()
    child.stdout.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_ctrl_c_that_another_thread_takes_is_heard_too() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()  # it doesn't block the signal, and so is the one that gets it
    done = []
    try:
        with pytest.raises(KeyboardInterrupt):
            with interrupts_ignored():
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
                done.append("all of it")
    finally:
        stop.set()
        thread.join()
    assert done == ["all of it"]
