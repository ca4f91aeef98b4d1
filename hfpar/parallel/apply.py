"""Every patch of a layout on a model, in the order in which they are made."""

from __future__ import annotations

from torch import nn

from hfpar.parallel import sequence
from hfpar.parallel.layout import Layout


def parallelize(model: nn.Module, layout: Layout) -> sequence.Patch:
    """Let a Transformers or PEFT model run in a layout, in any training loop; give it `layout.shard(batch)`.

    Args:
        model: before an engine (DDP, FSDP2, DeepSpeed) wraps it.
        layout: the ranks.

    Returns:
        What was changed, and how to undo it.

    Raises:
        ConfigError: a model that can't be computed right in this layout, or that has been patched already.
    """
    return sequence.apply(model, layout)
