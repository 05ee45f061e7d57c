"""All scores of a prediction in one value that prints, compares and travels as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from salgp.metrics.binned import debiased_ece, ece, mce
from salgp.metrics.interval import interval_coverage, interval_width
from salgp.metrics.proper import accuracy, brier, mean_variance, nll, nll_correct
from salgp.metrics.ranking import aurc, auroc
from salgp.metrics.smooth import smooth_ece
from salgp.metrics.statistic import ArrayLike, as_distribution

if TYPE_CHECKING:
    from salgp.prediction import Prediction

__all__ = ["Comparison", "Scores", "compare", "evaluate"]


@dataclass(frozen=True)
class Scores:
    """Scores of one prediction; None where a score does not exist (no variance, only correct samples, ...).

    Args:
        n: samples.
        n_unknown: samples of a class the network does not know (-1): wrong, and left out of ``nll`` and
            ``brier``.
        accuracy: share of correct labels.
        mean_confidence: mean calibrated confidence.
        ece: expected calibration error, equal-width bins.
        debiased_ece: the same less the part of label noise.
        mce: maximum calibration error.
        smooth_ece: calibration error without bins.
        nll: multi-class negative log-likelihood.
        nll_correct: negative log-likelihood of correctness.
        brier: multi-class Brier score.
        auroc: area under the ROC curve of spotting errors.
        aurc: area under the risk-coverage curve.
        mean_variance: mean predictive variance of the confidence.
        coverage: share of samples in bins whose mean interval holds the observed accuracy.
        width: mean width of the intervals.
    """

    n: int
    n_unknown: int
    accuracy: float
    mean_confidence: float
    ece: float
    debiased_ece: float
    mce: float
    smooth_ece: float
    nll: float | None
    nll_correct: float
    brier: float | None
    auroc: float | None
    aurc: float
    mean_variance: float | None
    coverage: float | None
    width: float | None

    def as_dict(self) -> dict[str, Any]:
        """Field names to values."""
        return asdict(self)

    def to_json(self) -> str:
        """One JSON object; absent scores are null."""
        return json.dumps(self.as_dict())

    def __str__(self) -> str:
        return _aligned([(name, [_text(value)]) for name, value in self.as_dict().items()])


@dataclass(frozen=True, eq=False)
class Comparison:
    """Scores of several methods on the same samples; prints as a table with one row per method.

    Args:
        rows: method name to scores, in the order given.
    """

    rows: Mapping[str, Scores]

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Method name to its scores."""
        return {name: scores.as_dict() for name, scores in self.rows.items()}

    def to_json(self) -> str:
        """One JSON object, keyed by method."""
        return json.dumps(self.as_dict())

    def best(self, score: str = "nll_correct") -> str:
        """The method with the smallest ``score`` (the largest, for accuracy, auroc and coverage)."""
        sign = -1 if score in ("accuracy", "auroc", "coverage") else 1
        known = {
            name: sign * value
            for name, scores in self.rows.items()
            if (value := getattr(scores, score)) is not None
        }
        if not known:
            raise ValueError(f"no method has the score {score!r}")
        return min(known, key=lambda name: known[name])

    def __str__(self) -> str:
        values = {name: list(scores.as_dict().values()) for name, scores in self.rows.items()}
        shown = [i for i in range(len(fields(Scores))) if any(row[i] is not None for row in values.values())]
        head = ("method", [fields(Scores)[i].name for i in shown])
        return _aligned([head, *((name, [_text(row[i]) for i in shown]) for name, row in values.items())])


def evaluate(prediction: Prediction, labels: ArrayLike, n_bins: int = 15) -> Scores:
    """Score a prediction against the true labels.

    Args:
        prediction: of any calibrator.
        labels: ``(n,)`` true classes; -1 for a class the network does not know.
        n_bins: bins of the binned errors.

    Returns:
        All scores.

    Example:
        >>> import torch
        >>> from salgp import Features, Prediction
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> scores = evaluate(Prediction.from_probs(f, f.probs), [0, 1, -1])
        >>> scores.n, scores.n_unknown, round(scores.accuracy, 3), round(scores.nll, 3)
        (3, 1, 0.667, 0.22)
    """
    probs, y = as_distribution(prediction.probs, labels)
    s, correct = prediction.confidence, prediction.label.cpu().numpy() == y
    some_known = bool((y >= 0).any())
    return Scores(
        n=len(y),
        n_unknown=int((y < 0).sum()),
        accuracy=accuracy(correct),
        mean_confidence=float(s.double().mean()),
        ece=ece(s, correct, n_bins),
        debiased_ece=debiased_ece(s, correct, n_bins),
        mce=mce(s, correct, n_bins),
        smooth_ece=smooth_ece(s, correct),
        nll=nll(probs, y) if some_known else None,
        nll_correct=nll_correct(s, correct),
        brier=brier(probs, y) if some_known else None,
        auroc=_finite(auroc(s, correct)),
        aurc=aurc(s, correct),
        mean_variance=None if prediction.std is None else mean_variance(prediction.std),
        **_interval_scores(prediction, correct, n_bins),
    )


def compare(predictions: Mapping[str, Prediction], labels: ArrayLike, n_bins: int = 15) -> Comparison:
    """Score several methods on the same samples.

    Args:
        predictions: method name to its prediction.
        labels: ``(n,)`` true classes.
        n_bins: bins of the binned errors.

    Returns:
        A table that prints, with the scores of each method.

    Example:
        >>> import torch
        >>> from salgp import Features, Prediction
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> raw = Prediction.from_probs(f, f.probs)
        >>> even = Prediction.from_confidence(f, torch.full((3,), 0.6))
        >>> compare({"raw": raw, "even": even}, [0, 1, 1]).best("ece")
        'even'
    """
    if not predictions:
        raise ValueError("nothing to compare: the mapping of predictions is empty")
    return Comparison(
        {name: evaluate(prediction, labels, n_bins) for name, prediction in predictions.items()}
    )


def _interval_scores(prediction: Prediction, correct: np.ndarray, n_bins: int) -> dict[str, float | None]:
    lower, upper = prediction.lower, prediction.upper
    if lower is None or upper is None:
        return {"coverage": None, "width": None}
    return {
        "coverage": interval_coverage(prediction.confidence, correct, lower, upper, n_bins),
        "width": interval_width(lower, upper),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _text(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int):
        return str(value)
    return f"{value:.2e}" if 0 < abs(value) < 1e-3 else f"{value:.4f}"


def _aligned(rows: list[tuple[str, list[str]]]) -> str:
    """Names flush left, values flush right, column by column."""
    first = max(len(name) for name, _ in rows)
    widths = [max(len(values[j]) for _, values in rows) for j in range(len(rows[0][1]))]
    return "\n".join(
        name.ljust(first) + "".join("  " + v.rjust(w) for v, w in zip(values, widths, strict=True))
        for name, values in rows
    )
