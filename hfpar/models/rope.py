"""Rotary embeddings that depend on the longest position of a call."""

from __future__ import annotations

from typing import Any


def longest_before_change(text_config: Any) -> tuple[str, int] | None:
    """The longest call that some rotary embeddings compute as all shorter ones.

    Transformers chooses the factors of such an embedding by the largest position of a whole call.

    Args:
        text_config: of a model.

    Returns:
        The kind of embedding (`longrope`, `dynamic`) and a number of tokens; None where length changes nothing.
    """
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = [rope, *(value for value in rope.values() if isinstance(value, dict))]  # one, or one a layer type
    bounds = []
    for kind in kinds:
        name = str(kind.get("rope_type"))
        if name == "longrope":
            bounds.append((kind["original_max_position_embeddings"], name))
        elif "dynamic" in name:
            bounds.append((text_config.max_position_embeddings, name))
    if not bounds:
        return None
    tokens, name = min(bounds)
    return name, tokens
