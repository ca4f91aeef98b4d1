"""What was found, for programs."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from hfpar import __version__
from hfpar.tokentool.compare import Comparison
from hfpar.tokentool.measure import Measured, Model, Token

if TYPE_CHECKING:
    from hfpar.tokentool.run import Findings, Request

SCHEMA_VERSION = 1
_QUANTILES = (0, 1, 5, 25, 50, 75, 95, 99, 100)
_DIGITS = 6


def to_json(findings: Findings, request: Request) -> str:
    """The report; docs/tokens.md says what each key is."""
    report = {
        "schema_version": SCHEMA_VERSION,
        "hfpar_version": __version__,
        "num_neighbors": request.num_neighbors,
        "models": [_model(model) for model in findings.models],
        "comparison": None if findings.comparison is None else _comparison(findings.comparison),
    }
    return json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False)


def _model(model: Model) -> dict[str, Any]:
    return {
        "name": model.source.name,
        "description": model.source.description,
        "vocabulary_size": len(model.vocabulary),
        "has_chat_template": bool(model.source.tokenizer.chat_template),
        "head_is_tied": len(model.measured) == 1 and not model.source.notes,
        "notes": model.source.notes,
        "matrices": {measured.matrix.name: _matrix(measured, model) for measured in model.measured},
        "tokens": [_token(token, model) for token in model.tokens.values()],
    }


def _matrix(measured: Measured, model: Model) -> dict[str, Any]:
    norms = measured.ordinary_norms
    padding = np.flatnonzero(measured.padding)
    odd = measured.odd_ordinary()
    return {
        "rows": measured.matrix.num_rows,
        "width": measured.matrix.width,
        "dtype": measured.dtype,
        "ordinary": {
            "rows": int(measured.ordinary.sum()),
            "mean_norm": _round(measured.mean),
            "norm_deviation": _round(measured.deviation),
            "norm_quantiles": quantiles(norms),
            "untrained": [
                {
                    "id": token,
                    "text": model.texts.get(token),
                    "norm": _norm(measured, token),
                    "reason": reason,
                }
                for token, reason in odd.items()
            ],
        },
        "robust_center_norm": None if measured.usual is None else _round(math.exp(measured.usual.median)),
        "robust_log_deviation": None if measured.usual is None else _round(measured.usual.deviation),
        "padding": {
            "rows": len(padding),
            "ranges": [list(pair) for pair in ranges(padding)],
            "zeros": int((measured.norms[padding] == 0).sum()),
            "norm_quantiles": quantiles(measured.norms[padding]),
        },
    }


def _token(token: Token, model: Model) -> dict[str, Any]:
    neighbors = model.neighbors.get(token.id)
    return {
        "id": token.id,
        "text": token.text,
        "special": token.is_special,
        "added": token.is_added,
        "roles": list(token.roles),
        "template": token.template,
        "matrices": {
            measured.matrix.name: _row(token.id, measured) if token.id < measured.matrix.num_rows else None
            for measured in model.measured
        },
        "neighbors": None
        if neighbors is None
        else [{"id": near.id, "text": near.text, "cosine": _round(near.cosine)} for near in neighbors],
    }


def _row(token: int, measured: Measured) -> dict[str, Any]:
    return {
        "norm": _norm(measured, token),
        "z": _round(measured.z(token)),
        "robust_z": _round(measured.robust_z(token)),
        "untrained": measured.reasons.get(token),
    }


def _comparison(comparison: Comparison) -> dict[str, Any]:
    return {
        "tokens_in_both": comparison.num_matching,
        "tokens_in_both_with_same_id": comparison.num_same_id,
        "tokens": [comparison.num_first, comparison.num_second],
        "matrices": {
            matrix.name: {
                "sampled": matrix.num_sampled,
                "median_distance": _round(matrix.median_distance),
                "far_distance": _round(matrix.far_distance),
                "share_changed": _round(matrix.share_changed),
                "tokens": [
                    {
                        "text": pair.text,
                        "ids": [pair.first, pair.second],
                        "cosine": _round(pair.cosine),
                        "distance": _round(pair.distance),
                        "change": pair.change,
                    }
                    for pair in matrix.pairs
                ],
            }
            for matrix in comparison.matrices
        },
    }


def quantiles(norms: np.ndarray) -> dict[str, float | None] | None:
    """Of those that are finite; None of nothing."""
    norms = norms[np.isfinite(norms)]
    if not len(norms):
        return None
    found = np.quantile(norms.astype(np.float64), np.array(_QUANTILES) / 100)
    return {str(share): _round(float(value)) for share, value in zip(_QUANTILES, found, strict=True)}


def ranges(numbers: np.ndarray) -> list[tuple[int, int]]:
    """First and last of each run of rising numbers."""
    if not len(numbers):
        return []
    cuts = np.flatnonzero(np.diff(numbers) != 1)
    firsts, lasts = numbers[np.r_[0, cuts + 1]], numbers[np.r_[cuts, len(numbers) - 1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def _norm(measured: Measured, token: int) -> float | None:
    return _round(float(measured.norms[token]))


def _round(value: float | None) -> float | None:
    """To significant digits; None for what JSON can't say."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{_DIGITS}g}")
