"""How far one set of tensors is from another, and against what that is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_SMALL = 0.01
"""A tensor of less than this share of the typical size is measured against that share. Some gradients are zero
in exact arithmetic (a key bias moves all scores of a row alike, and softmax doesn't see it); what is left of
them is rounding, which has no relative accuracy."""


def relative(value: float, reference: float) -> float:
    """|value - reference| / |reference|; infinite for NaN."""
    error = abs(value - reference) / max(abs(reference), 1e-12)
    return error if math.isfinite(error) else math.inf


def compare_gradients(
    gradients: Iterable[tuple[str, Tensor]], reference: Mapping[str, Tensor]
) -> dict[str, float]:
    """Each gradient's error: the norm of the difference over the norm of the reference's.

    A name on one side only has an infinite error.
    """
    return _compare(
        gradients, reference, {name: float(norm(gradient)) for name, gradient in reference.items()}
    )


def compare_parameters(
    parameters: Iterable[tuple[str, Tensor]], reference: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> dict[str, float]:
    """Each parameter's error after the step, over how far the reference has moved it since `before`.

    That is stricter than over the parameter itself, most of which the step has left alone. A parameter that
    moves by less than a twentieth of itself is measured against that twentieth: below, fp32 can't represent
    the difference well enough to be held to 1e-5.
    """
    scales = {
        name: max(float(norm(value - before[name])), 0.05 * float(norm(value)))
        for name, value in reference.items()
    }
    return _compare(parameters, reference, scales)


def norm(tensor: Tensor) -> Tensor:
    """The L2 norm, summed in fp64."""
    return torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _compare(
    tensors: Iterable[tuple[str, Tensor]], reference: Mapping[str, Tensor], scales: Mapping[str, float]
) -> dict[str, float]:
    typical = math.sqrt(sum(scale**2 for scale in scales.values()) / max(len(scales), 1))
    errors = dict.fromkeys(reference, math.inf)
    for name, tensor in tensors:
        expected = reference.get(name)
        if expected is None or tensor.shape != expected.shape:
            errors[name] = math.inf
            continue
        error = float(norm(tensor - expected)) / max(scales[name], _SMALL * typical, 1e-12)
        errors[name] = error if math.isfinite(error) else math.inf
    return errors


def worst_of(errors: Mapping[str, float]) -> tuple[str | None, float]:
    """The name with the largest error, and the error."""
    name = max(errors, key=lambda key: errors[key], default=None)
    return name, 0.0 if name is None else errors[name]
