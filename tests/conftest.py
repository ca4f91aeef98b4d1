"""For all tests: Ctrl-C works in the programs they start, and no process group lasts beyond its module."""

import signal
import sys
from collections.abc import Iterator

import pytest

# A shell starts background jobs with SIGINT ignored; children inherit that, and could then not be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def ctrl_c_works_afterwards() -> Iterator[None]:
    """A program that ends with an error ignores Ctrl-C from then on; what later tests start would inherit that."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(autouse=True, scope="module")
def no_group_left_behind() -> Iterator[None]:
    """A program called within the tests' own process leaves its group to the process's end, as hfpar's do."""
    yield
    if "accelerate" in sys.modules:
        from accelerate.state import AcceleratorState, GradientState

        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
    if "torch" in sys.modules:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
