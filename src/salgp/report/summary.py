"""The numbers behind the report: all computed by `salgp.metrics`, chosen for a reader new to
calibration.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salgp import metrics
from salgp.explanation import Explanation, explain_sample, shown_term, term_points
from salgp.features import Features
from salgp.metrics import METRICS, Metric, RiskCoverage, arrays_of
from salgp.metrics.metric import FloatArray, to_double
from salgp.metrics.scores import read_by
from salgp.prediction import Prediction

__all__ = []

LEVEL = 0.9
"""Probability mass of the bootstrap spread."""
TAIL = (1 - LEVEL) / 2


@dataclass(frozen=True, eq=False)
class Scored:
    """Confidences with the truth beside them: the model's own, or calibrated ones.

    Args:
        prediction: its prediction.
        confidence: ``(n,)`` as NumPy.
        correct: ``(n,)`` boolean.
        ece: mean gap between confidence and accuracy.
        curve: error rate by share of predictions kept.
    """

    prediction: Prediction
    confidence: FloatArray
    correct: NDArray[np.bool_]
    ece: float
    curve: RiskCoverage

    @property
    def stated(self) -> float:
        """Mean confidence."""
        return float(self.confidence.mean())

    @property
    def accuracy(self) -> float:
        """Share of correct predictions."""
        return float(self.correct.mean())

    @property
    def excess(self) -> float:
        """Mean confidence less accuracy: positive where overconfident."""
        return self.stated - self.accuracy


@dataclass(frozen=True)
class Change:
    """A metric before and after, with its bootstrap spread, and whether the change is more than chance.

    Args:
        metric: which one.
        before: value, lower, upper.
        after: value, lower, upper.
        verdict: ``better``, ``worse``, ``higher``, ``lower``, ``no clear change`` or ``unchanged``.
    """

    metric: Metric[...]
    before: tuple[float, float, float]
    after: tuple[float, float, float]
    verdict: str


@dataclass(frozen=True)
class LayerShare:
    """Mean size of a layer's corrections, split into those that lower and those that raise the confidence."""

    name: str
    lowers: float
    raises: float

    @property
    def size(self) -> float:
        """Mean absolute correction."""
        return self.lowers + self.raises


def scored(prediction: Prediction, labels: Tensor) -> Scored:
    """Confidence, correctness and curves of one prediction."""
    confidence = to_double(prediction.confidence)
    correct = (prediction.label.cpu() == labels).numpy()
    error = metrics.ece(confidence, correct)
    curve = metrics.risk_coverage(confidence, correct)
    return Scored(prediction, confidence, correct, error, curve)


def metric_changes(before: Scored, after: Scored, labels: Tensor) -> list[Change]:
    """Every metric with its bootstrap spread on both sides; the same resamples serve both, so that the change
    is paired.
    """
    arrays = [arrays_of(s.prediction, labels) for s in (before, after)]
    found = []
    for metric in METRICS.values():
        old, new = (read_by(metric, each) for each in arrays)
        if metric.heading and old and new:
            found.append(_change(metric, old, new))
    return found


def _change(metric: Metric[...], old: list[Any], new: list[Any]) -> Change:
    before, after = _resampled(metric, old), _resampled(metric, new)
    verdict = _verdict(before, after, metric.larger_is_better)
    return Change(metric, _spread(before), _spread(after), verdict)


def term_shares(features: Features, prediction: Prediction) -> list[LayerShare]:
    """Mean size of each term's corrections in confidence points; empty where the method has no terms."""
    if prediction.layers is None:
        return []
    names, points = term_points(features, prediction)
    x = to_double(points)
    lowers, raises = np.maximum([-x, x], 0).mean(axis=1).tolist()
    return list(map(LayerShare, map(shown_term, names), lowers, raises))


def most_corrected(
    features: Features, labels: Tensor, prediction: Prediction, most: int = 12
) -> list[tuple[int, int, Explanation]]:
    """Row, true class and explanation of the samples whose confidence changed most, largest change first."""
    change = to_double(prediction.confidence) - to_double(features.confidence)
    rows = np.argsort(-np.abs(change), kind="stable")[:most].tolist()
    own = Features(features.logits)
    return [(i, int(labels[i]), explain_sample(own[[i]], prediction[i : i + 1])) for i in rows]


def _resampled(metric: Metric[...], read: list[Any]) -> metrics.Interval:
    draws = int(np.clip(4_000_000 // len(read[0]), 50, 400))
    return metrics.bootstrap(metric, *read, n_resamples=draws, level=LEVEL)


def _spread(found: metrics.Interval) -> tuple[float, float, float]:
    """Value and bootstrap spread around it; the resamples' own upward bias is taken out by centring them."""
    value, replicates = found.value, found.replicates
    valid = replicates[np.isfinite(replicates)]
    if not len(valid) or not math.isfinite(value):
        return value, math.nan, math.nan
    low, middle, high = np.quantile(valid, [TAIL, 0.5, 1 - TAIL]).tolist()
    lower, upper = value + (low - middle), value + (high - middle)
    return value, max(lower, 0.0), upper


def _verdict(before: metrics.Interval, after: metrics.Interval, larger_is_better: bool | None) -> str:
    change = after.replicates - before.replicates
    change = change[np.isfinite(change)]
    if not np.any(change):
        return "unchanged"
    low, high = np.quantile(change, [TAIL, 1 - TAIL])
    if low <= 0 <= high:
        return "no clear change"
    if larger_is_better is None:
        return "higher" if low > 0 else "lower"
    return "better" if (low > 0) == larger_is_better else "worse"
