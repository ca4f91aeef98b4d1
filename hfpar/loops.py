"""For training loops of one's own: `hfpar.parallelize(model, layout)`, then `model(**layout.shard(batch))`."""

from __future__ import annotations

from torch import nn

from hfpar.errors import ConfigError
from hfpar.parallel import sequence
from hfpar.parallel.layout import Layout
from hfpar.train.probe import check_family


def parallelize(model: nn.Module, layout: Layout, *, check: bool = True) -> sequence.Patch:
    """Let a Transformers or PEFT model run in a layout, in any training loop. All ranks together.

    Args:
        model: before an engine (DDP, FSDP2, DeepSpeed) wraps it.
        layout: the ranks.
        check: train a tiny copy for one step, on these ranks and alone, and compare: a family that comes out wrong
            is refused. False only for a model whose class isn't that of its config.

    Returns:
        What was changed, and how to undo it.

    Raises:
        ConfigError: a model that can't be computed right in this layout, or that has been patched already.
    """
    if layout.tp_size > 1:
        raise ConfigError(
            f"tp_size: {layout.tp_size} in a loop of one's own isn't supported yet; use sft/train.py, or sp_size and "
            "cp_size"
        )
    patch = sequence.apply(model, layout)
    if check:
        causal_lm = sequence.unwrap_peft(model)
        remote = type(causal_lm).__module__.startswith("transformers_modules")
        try:
            check_family(causal_lm.config, layout=layout, trust_remote_code=remote)
        except BaseException:
            patch.undo()
            raise
    return patch
