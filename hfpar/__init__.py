"""Fine-tune Hugging Face causal language models in any parallel layout; no layout changes the numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfpar.loops import parallelize
    from hfpar.parallel.layout import Layout

__version__ = "0.1.0"

__all__ = ["Layout", "__version__", "parallelize"]


def __getattr__(name: str) -> Any:
    """Load torch and Transformers only for those who use them from here."""
    if name == "parallelize":
        from hfpar.loops import parallelize

        return parallelize
    if name == "Layout":
        from hfpar.parallel.layout import Layout

        return Layout
    raise AttributeError(f"module 'hfpar' has no attribute {name!r}")
