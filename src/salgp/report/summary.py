"""The numbers behind the report: all computed by `salgp.metrics`, chosen for a reader new to
calibration.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salgp import metrics
from salgp.explanation import shown_term, term_points
from salgp.features import Features
from salgp.metrics import METRICS, Metric, RiskCoverage, arrays_of
from salgp.prediction import Prediction

__all__ = ["Change", "Corrected", "Scored", "layer_corrections", "scored"]

FloatArray: TypeAlias = NDArray[np.float64]

LEVEL = 0.9
"""Probability mass of the bootstrap spread."""


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


@dataclass(frozen=True)
class Change:
    """A metric before and after, with its bootstrap spread, and whether the change is more than chance.

    Args:
        key: name of the metric.
        name: for the reader.
        meaning: one sentence.
        before: value, lower, upper.
        after: value, lower, upper.
        verdict: ``better``, ``worse``, ``higher``, ``lower``, ``no clear change`` or ``unchanged``.
    """

    key: str
    name: str
    meaning: str
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


@dataclass(frozen=True)
class Corrected:
    """A sample whose confidence changed much.

    Args:
        row: its position in the data.
        predicted: class.
        true: class, -1 if unknown to the model.
        before: the model's confidence.
        after: calibrated confidence.
        std: its standard deviation or None.
        lower: end of the interval or None.
        upper: end of the interval or None.
        points: every term and its confidence points, which add up to the change; largest first.
    """

    row: int
    predicted: int
    true: int
    before: float
    after: float
    std: float | None
    lower: float | None
    upper: float | None
    points: tuple[tuple[str, float], ...]


def scored(prediction: Prediction, labels: Tensor) -> Scored:
    """Confidence, correctness and curves of one prediction."""
    confidence = prediction.confidence.double().cpu().numpy()
    correct = (prediction.label.cpu() == labels.cpu()).numpy()
    return Scored(
        prediction,
        confidence,
        correct,
        metrics.ece(confidence, correct),
        metrics.risk_coverage(confidence, correct),
    )


def metric_changes(
    before: Scored, after: Scored, labels: Tensor, n_resamples: int | None = None
) -> list[Change]:
    """Every metric with its bootstrap spread on both sides; the same resamples serve both, so that the change
    is paired.
    """
    n = len(after.correct)
    draws = n_resamples or int(np.clip(4_000_000 // n, 50, 400))
    arrays = [arrays_of(s.prediction, labels.cpu()) for s in (before, after)]
    known = bool((labels >= 0).any())
    found = []
    for key, metric in METRICS.items():
        missing = any(each[name] is None for each in arrays for name in metric.reads)
        if not metric.heading or missing or ("labels" in metric.reads and not known):
            continue
        one, two = (_resampled(metric, each, draws) for each in arrays)
        verdict = _judge(one, two, metric.larger_is_better)
        found.append(Change(key, metric.title, metric.sentence, _spread(one), _spread(two), verdict))
    return found


def term_shares(features: Features, prediction: Prediction) -> list[LayerShare]:
    """Mean size of each term's corrections in confidence points; empty where the method has no terms."""
    if prediction.layers is None:
        return []
    names, points = term_points(features, prediction)
    return _shares([shown_term(name) for name in names], points)


def layer_corrections(prediction: Prediction) -> list[LayerShare]:
    """Mean size of each layer's corrections, in the order of the network; empty where the method has no
    layers.
    """
    terms = prediction.layers
    return [] if terms is None else _shares(terms.names, terms.mean)


def most_corrected(
    features: Features, labels: Tensor, prediction: Prediction, n_shown: int
) -> list[Corrected]:
    """The samples whose confidence changed most, largest change first."""
    before = features.confidence.double().cpu()
    change = (prediction.confidence.double().cpu() - before).abs()
    rows = change.argsort(descending=True, stable=True)[:n_shown].tolist()
    logits = Features(features.logits)
    return [_corrected(row, logits[[row]], int(labels[row]), prediction[row : row + 1]) for row in rows]


def _shares(names: Sequence[str], mean: Tensor) -> list[LayerShare]:
    x = mean.double().cpu().numpy()
    low, high = np.maximum(-x, 0).mean(axis=0), np.maximum(x, 0).mean(axis=0)
    return [LayerShare(name, float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)]


def _resampled(metric: Metric[...], arrays: Mapping[str, Any], draws: int) -> metrics.Interval:
    read = [arrays[name] for name in metric.reads]
    return metrics.bootstrap(metric, *read, n_resamples=draws, level=LEVEL)


def _spread(found: metrics.Interval) -> tuple[float, float, float]:
    """Value and bootstrap spread around it; the resamples' own upward bias is taken out by centring them."""
    valid = found.replicates[np.isfinite(found.replicates)]
    if not len(valid) or not math.isfinite(found.value):
        return (found.value, math.nan, math.nan)
    low, middle, high = np.quantile(valid, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return found.value, max(found.value + float(low - middle), 0.0), found.value + float(high - middle)


def _judge(before: metrics.Interval, after: metrics.Interval, larger_is_better: bool | None) -> str:
    change = after.replicates - before.replicates
    change = change[np.isfinite(change)]
    if not len(change) or not np.any(change):
        return "unchanged"
    low, high = np.quantile(change, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if low <= 0 <= high:
        return "no clear change"
    if larger_is_better is None:
        return "higher" if low > 0 else "lower"
    return "better" if (low > 0) == larger_is_better else "worse"


def _corrected(row: int, one: Features, true: int, prediction: Prediction) -> Corrected:
    """Of a single sample, given as features and prediction of one row."""

    def number(x: Tensor | None) -> float | None:
        return None if x is None else float(x[0])

    points: list[tuple[str, float]] = []
    if prediction.layers is not None:
        names, values = term_points(one, prediction)
        points = sorted(
            zip(map(shown_term, names), values[0].tolist(), strict=True), key=lambda item: -abs(item[1])
        )
    return Corrected(
        row,
        int(prediction.label[0]),
        true,
        float(one.confidence[0]),
        float(prediction.confidence[0]),
        number(prediction.std),
        number(prediction.lower),
        number(prediction.upper),
        tuple(points),
    )
