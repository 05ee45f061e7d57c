"""Scores of a row: the library's own, and how the variance tells unknown classes from known ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from salgp.metrics import evaluate, ood_auroc
from salgp.prediction import Prediction

__all__ = ["join_predictions", "score_prediction"]


def score_prediction(prediction: Prediction, labels: Tensor) -> dict[str, Any]:
    """All scores of a prediction as one flat mapping; None where a score does not exist.

    Besides those of `salgp.evaluate`: the number of clipped confidences, the mean variance on known and on
    unknown classes, and how well low confidence and high variance spot unknown classes (area under the ROC
    curve).

    Example:
        >>> from salgp.features import Features
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 0.5]]))
        >>> scores = score_prediction(Prediction.from_probs(f, f.probs), torch.tensor([0, -1]))
        >>> scores["accuracy"], scores["ood_auroc_confidence"]
        (0.5, 1.0)
    """
    unknown = labels < 0
    some = bool(unknown.any()) and not bool(unknown.all())
    variance = None if prediction.std is None else prediction.std.double() ** 2
    more = {
        "n_clipped": prediction.n_clipped,
        "variance_known": None
        if variance is None or bool(unknown.all())
        else float(variance[~unknown].mean()),
        "variance_unknown": None if variance is None or not some else float(variance[unknown].mean()),
        "ood_auroc_confidence": ood_auroc(-prediction.confidence, unknown) if some else None,
        "ood_auroc_variance": ood_auroc(variance, unknown) if some and variance is not None else None,
    }
    scores = {**evaluate(prediction, labels).as_dict(), **more}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in scores.items()}


def join_predictions(parts: Sequence[Prediction]) -> Prediction:
    """Predictions of several test sets as one; layer terms are left out."""

    def cat(values: list[Tensor | None]) -> Tensor | None:
        there = [v for v in values if v is not None]
        return torch.cat(there) if len(there) == len(parts) else None

    label, probs, confidence = (
        torch.cat([getattr(p, name) for p in parts]) for name in ("label", "probs", "confidence")
    )
    std, lower, upper, clipped = (
        cat([getattr(p, name) for p in parts]) for name in ("std", "lower", "upper", "clipped")
    )
    return Prediction(label, probs, confidence, std, lower, upper, clipped=clipped)
