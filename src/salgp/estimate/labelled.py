"""Confidences corrected by a few labels from where the network is used now.

Unlabelled samples show how far data have shifted, not how well the network does there. A few labels do. Every
confidence moves on one line in its log-odds ``f``,

    f' = (1 + a) f + b,     a ~ N(0, 0.1),     b ~ N(0, 0.5),

at the largest posterior of ``a`` and ``b``. One label moves a confidence by some points, most where it
contradicts a high one; a hundred have their way. The order of the confidences stays as it is. Which samples
are labelled may depend on what is known of them, as in `suggest`, but not on whether an answer looks wrong.

The posterior also tells what the labels leave open: of the line at ``f`` the variance ``s``, where it was
``s0`` before. An error bar has the variance ``v``, on the line ``u = (1 + a)^2 v``. A fifth of it is taken to
be the sample's own, which no label of others tells about. To the rest the labels add what they know:

    v' = u / 5 + (4 / 5) / (1 / u + 1 / s - 1 / s0).
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from salgp.gp.optimise import logistic, logistic_covariance
from salgp.labels import as_labels
from salgp.logits import log_odds
from salgp.prediction import INTERVAL_SD, LayerTerms, Prediction, checked, confidence_of, spread_confidence

__all__ = ["Correction", "learn_correction"]

PRIOR = (0.1, 0.5)
"""Variances of slope and offset, chosen on the development sets of the shift suite."""
_PRECISION = 1 / torch.tensor(PRIOR, dtype=torch.float64)
LARGEST = 5.0
"""Log-odds beyond this count as this (a confidence of .9933) when a line is learned, so that one wrong label
beside a confidence of nearly 1 does not have its way.
"""
OWN = 0.2
"""Share of an error bar's variance that labels of other samples tell nothing about, chosen there too: without
it the intervals get too narrow.
"""
TERM = "field labels"
"""Name of what a correction adds, among the terms of a prediction."""


@dataclass(frozen=True)
class Correction:
    """A line from log-odds to log-odds, learned from labels; call it on predictions of the same kind of data.

    Args:
        slope: ``1 + a``, not negative.
        offset: ``b``.
        covariance: of both.
        n: labels it rests on.
        right: answers among them that were right.
        expected: how many should have been, by their confidences.

    Example:
        >>> p = Prediction(torch.zeros(40).long(), torch.full((40, 2), 0.5), torch.full((40,), 0.9))
        >>> correction = learn_correction(p, [0] * 24 + [1] * 16)
        >>> print(correction)
        40 labels: 24 right, 36.0 expected. A confidence of 0.90 becomes 0.64.
        >>> correction(p).confidence[:1]
        tensor([0.6411])
    """

    slope: float
    offset: float
    covariance: tuple[tuple[float, float], tuple[float, float]]
    n: int
    right: int
    expected: float

    def __call__(self, prediction: Prediction) -> Prediction:
        """The prediction corrected; the label stays the network's own."""
        kind = checked(prediction).confidence
        before = log_odds(kind.double())
        after = self._moved(before)
        variance = torch.zeros_like(after)
        if prediction.std is not None:
            variance = self._left(before, _variance(prediction, prediction.std))
        found = confidence_of(after, variance)
        confidence, std, lower, upper = (x.to(kind) for x in found)
        probs = spread_confidence(prediction.probs, prediction.label, confidence.to(prediction.probs))
        layers = _with_term(prediction.layers, after - before)
        corrected = replace(prediction, confidence=confidence, probs=probs, layers=layers)
        if prediction.std is None:
            return corrected
        return replace(corrected, std=std, lower=lower, upper=upper)

    def _moved(self, f: Tensor) -> Tensor:
        return self.slope * f + self.offset

    def _left(self, f: Tensor, variance: Tensor) -> Tensor:
        """Variance ``(n,)`` of the corrected log-odds ``f (n,)``, where it was ``variance``."""
        line = _line(f.clamp(-LARGEST, LARGEST))
        covariance = line.new_tensor(self.covariance)
        left = ((line @ covariance) * line).sum(1).clamp_min(1e-12)
        before = line.square() @ line.new_tensor(PRIOR)
        learned = (1 / left - 1 / before).clamp_min(0.0)
        scaled = self.slope**2 * variance
        known = 1 / scaled.clamp_min(1e-12) + learned
        return OWN * scaled + (1 - OWN) / known

    def __str__(self) -> str:
        example = torch.tensor(0.9, dtype=torch.float64)
        shown = self._moved(log_odds(example)).sigmoid()
        labels = "label" if self.n == 1 else "labels"
        found = f"{self.right} right, {self.expected:.1f} expected"
        return f"{self.n} {labels}: {found}. A confidence of 0.90 becomes {shown:.2f}."


def learn_correction(prediction: Prediction, labels: Any) -> Correction:
    """Learn from labelled samples of the data at hand how to correct the confidences on all of them.

    Args:
        prediction: of the labelled samples, made as that of the others is (the same context).
        labels: ``(n,)`` true classes; -1 for a class the network does not know.

    Example:
        >>> p = Prediction(torch.zeros(2).long(), torch.full((2, 2), 0.5), torch.full((2,), 0.5))
        >>> correction = learn_correction(p, [0, 0])
        >>> round(correction.offset, 2), correction.slope, correction.right
        (0.4, 1.0, 2)
    """
    y = as_labels(labels, *checked(prediction).probs.shape).cpu()
    if not len(y):
        raise ValueError("no labelled sample: label some of the data at hand first, ten or more")
    right = (prediction.label.cpu() == y).double()
    confidence = prediction.confidence.detach().cpu().double()
    f = log_odds(confidence).clamp(-LARGEST, LARGEST)
    a, b = _likeliest(f, right)
    fitted = (1 + a) * f + b
    covariance = logistic_covariance(_line(f), torch.ones_like(f), _PRECISION, fitted)
    first, second = map(tuple, covariance.tolist())
    return Correction(1 + a, b, (first, second), len(y), int(right.sum()), float(confidence.sum()))


def _line(f: Tensor) -> Tensor:
    """``(n, 2)`` what slope and offset are multiplied by."""
    return torch.stack([f, torch.ones_like(f)], dim=1)


def _likeliest(f: Tensor, right: Tensor) -> tuple[float, float]:
    """Slope ``a``, at least -1, and offset ``b`` of the largest posterior."""
    one = torch.ones_like(f)
    a, b = logistic(_line(f), right, one, _PRECISION, f).tolist()
    if a < -1:  # more confident samples are wrong more often: then confidences tell nothing, and are even
        return -1.0, float(logistic(one[:, None], right, one, _PRECISION[1:]))
    return a, b


def _variance(prediction: Prediction, std: Tensor) -> Tensor:
    """Variance ``(n,)`` of the log-odds: by the ends of the interval, or by the standard deviation where an
    end was cut off at 0 or 1.
    """
    p = prediction.confidence.double()
    slope = (p * (1 - p)).clamp_min(1e-12)
    sd = std.double() / slope
    if prediction.lower is not None and prediction.upper is not None:
        ends = log_odds(prediction.upper.double()) - log_odds(prediction.lower.double())
        sd = torch.minimum(sd, ends / (2 * INTERVAL_SD))
    return sd.square()


def _with_term(terms: LayerTerms | None, change: Tensor) -> LayerTerms | None:
    """Terms with one more, in their unit; what adds up to the correction still does."""
    if terms is None or not terms.additive or terms.scale != "log-odds":
        return terms
    column = change.to(terms.mean)[:, None]
    mean = torch.cat([terms.mean, column], dim=1)
    std = None if terms.std is None else pad(terms.std, (0, 1))
    return replace(terms, names=(*terms.names, TERM), mean=mean, std=std)
