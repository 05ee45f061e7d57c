"""The numbers behind the report: all computed by `salgp.metrics`, chosen for a reader who never heard of
calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salgp import metrics
from salgp.features import Features
from salgp.metrics import RiskCoverage
from salgp.prediction import Prediction

__all__ = [
    "Change",
    "Corrected",
    "LayerShare",
    "Side",
    "layer_shares",
    "metric_changes",
    "most_corrected",
    "side",
]

FloatArray: TypeAlias = NDArray[np.float64]

LEVEL = 0.9
"""Probability mass of the bootstrap spread."""


@dataclass(frozen=True, eq=False)
class Side:
    """One of the two sides of the comparison: the network's own confidence, or the calibrated one.

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
        name: for the reader.
        meaning: one sentence.
        before: value, lower, upper.
        after: value, lower, upper.
        verdict: ``better``, ``worse``, ``no clear change`` or ``unchanged``.
    """

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
        true: class, -1 if unknown to the network.
        before: network confidence.
        after: calibrated confidence.
        std: its standard deviation or None.
        lower: end of the interval or None.
        upper: end of the interval or None.
        layers: name and correction, those that caused the change first.
    """

    row: int
    predicted: int
    true: int
    before: float
    after: float
    std: float | None
    lower: float | None
    upper: float | None
    layers: tuple[tuple[str, float], ...]


def side(prediction: Prediction, labels: Tensor) -> Side:
    """Confidence, correctness and curves of one prediction."""
    confidence = prediction.confidence.double().cpu().numpy()
    correct = (prediction.label.cpu() == labels.cpu()).numpy()
    return Side(
        prediction,
        confidence,
        correct,
        metrics.ece(confidence, correct),
        metrics.risk_coverage(confidence, correct),
    )


def metric_changes(before: Side, after: Side, labels: Tensor, n_resamples: int | None = None) -> list[Change]:
    """Every metric with its bootstrap spread on both sides; the same resamples serve both, so that the change
    is paired.
    """
    n = len(after.correct)
    draws = n_resamples or int(np.clip(4_000_000 // n, 50, 400))
    y = labels.cpu()
    found = []
    for name, meaning, metric, inputs, larger_is_better in _METRICS:
        if inputs == "probs" and not bool((y >= 0).any()):
            continue
        one, two = (_resampled(metric, s, inputs, y, draws) for s in (before, after))
        found.append(Change(name, meaning, _spread(one), _spread(two), _judge(one, two, larger_is_better)))
    return found


def layer_shares(prediction: Prediction, layers: Sequence[str] = ()) -> list[LayerShare]:
    """Mean size of each layer's corrections, in the order of the network; empty where the method has no
    layers.

    Args:
        prediction: with or without layer terms.
        layers: names of the network's layers; a term that is none of them is said to stand alone.
    """
    terms = prediction.layers
    if terms is None:
        return []
    mean = terms.mean.double().cpu().numpy()
    low, high = np.maximum(-mean, 0).mean(axis=0), np.maximum(mean, 0).mean(axis=0)
    names = [str(name) if name in layers or not layers else f"{name} alone" for name in terms.names]
    return [LayerShare(name, float(a), float(b)) for name, a, b in zip(names, low, high, strict=True)]


def most_corrected(
    features: Features, labels: Tensor, prediction: Prediction, n_shown: int
) -> list[Corrected]:
    """The samples whose confidence changed most, largest change first."""
    before = features.confidence.double().cpu()
    change = (prediction.confidence.double().cpu() - before).abs()
    rows = change.argsort(descending=True, stable=True)[:n_shown].tolist()
    return [
        _corrected(row, float(before[row]), int(labels[row]), prediction, features.layer_names)
        for row in rows
    ]


_METRICS: tuple[tuple[str, str, Callable[..., float], str, bool], ...] = (
    (
        "Right answers (accuracy)",
        "How often the predicted class is the true one. Calibration never changes the answer.",
        metrics.accuracy,
        "",
        True,
    ),
    (
        "Confidence error (ECE)",
        "Mean gap between the stated confidence and how often it is right.",
        metrics.ece,
        "confidence",
        False,
    ),
    (
        "Surprise (NLL)",
        "Punishes being sure and wrong. Counts whether the answer was right.",
        metrics.nll_correct,
        "confidence",
        False,
    ),
    (
        "Surprise over all classes (NLL)",
        "The same for the whole list of class probabilities.",
        metrics.nll,
        "probs",
        False,
    ),
    (
        "Squared error (Brier)",
        "Mean squared distance between probabilities and truth.",
        metrics.brier,
        "probs",
        False,
    ),
    (
        "Spotting errors (AUROC)",
        "Chance that a right answer is surer than a wrong one; 0.5 is a coin toss.",
        metrics.auroc,
        "confidence",
        True,
    ),
    (
        "Error left when picking the surest (AURC)",
        "Mean error rate over all shares that could be kept.",
        metrics.aurc,
        "confidence",
        False,
    ),
)


def _resampled(
    metric: Callable[..., float], one: Side, inputs: str, labels: Tensor, draws: int
) -> metrics.Interval:
    arrays: Sequence[Any] = (one.correct,)
    if inputs == "confidence":
        arrays = (one.confidence, one.correct)
    elif inputs == "probs":
        arrays = (one.prediction.probs.cpu(), labels)
    return metrics.bootstrap(metric, *arrays, n_resamples=draws, level=LEVEL)


def _spread(found: metrics.Interval) -> tuple[float, float, float]:
    """Value and bootstrap spread around it; the resamples' own upward bias is taken out by centring them."""
    valid = found.replicates[np.isfinite(found.replicates)]
    if not len(valid) or not math.isfinite(found.value):
        return (found.value, math.nan, math.nan)
    low, middle, high = np.quantile(valid, [(1 - LEVEL) / 2, 0.5, (1 + LEVEL) / 2])
    return found.value, max(found.value + float(low - middle), 0.0), found.value + float(high - middle)


def _judge(before: metrics.Interval, after: metrics.Interval, larger_is_better: bool) -> str:
    change = after.replicates - before.replicates
    change = change[np.isfinite(change)]
    if not len(change) or not np.any(change):
        return "unchanged"
    low, high = np.quantile(change, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    if low <= 0 <= high:
        return "no clear change"
    return "better" if (low > 0) == larger_is_better else "worse"


def _corrected(row: int, before: float, true: int, prediction: Prediction, names: Sequence[str]) -> Corrected:
    def number(x: Tensor | None) -> float | None:
        return None if x is None else float(x[row])

    terms = prediction.layers
    after = float(prediction.confidence[row])
    pairs = (
        []
        if terms is None
        else [(str(name), float(value)) for name, value in zip(terms.names, terms.mean[row], strict=True)]
    )
    values = [
        (name, value) for name, value in pairs if name in names
    ] or pairs  # a term that is no layer explains nothing here
    towards = -1.0 if after < before else 1.0
    return Corrected(
        row,
        int(prediction.label[row]),
        true,
        before,
        after,
        number(prediction.std),
        number(prediction.lower),
        number(prediction.upper),
        tuple(sorted(values, key=lambda item: -towards * item[1])),
    )
