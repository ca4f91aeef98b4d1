"""Third-party chatter, kept out of a run's output."""

from __future__ import annotations

import logging
import warnings


def quiet_libraries(is_main: bool) -> None:
    """Leave warnings of the libraries to rank 0 and their progress bars and notes to nobody."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    for name in ("DeepSpeed", "deepspeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*barrier.*device.*")
    warnings.filterwarnings("ignore", message=".*broadcast_buffers.*")  # its successor isn't in torch 2.9 yet
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch|deepspeed|transformers|peft")
    if not is_main:
        warnings.filterwarnings("ignore")
