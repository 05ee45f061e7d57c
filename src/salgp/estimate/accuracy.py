"""Accuracy of an unlabelled batch, estimated from its calibrated confidences, with an interval.

A confidence is the probability of being right, so the expected accuracy of a batch is the mean confidence.
Two things make the truth differ. *Chance*: ``n`` answers with confidences ``c_i`` are right a random number
of times, with variance ``sum c_i (1 - c_i)``; it fades with ``n``. *Calibration*: under shift all confidences
err together; no number of samples helps. `Spread` measures the second on environments whose labels are known
and which the calibrator has not seen. It grows with the distance from the calibration data:

    sd = base + slope * |mean confidence on calibration data - mean confidence now|.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from salgp.decide import Rule
from salgp.labels import as_labels
from salgp.metrics.metric import FloatArray, to_double
from salgp.prediction import INTERVAL_SD, Prediction, checked

__all__ = [
    "Estimate",
    "Spread",
    "accuracy",
    "error_above",
    "from_sums",
    "measure_spread",
    "per_class",
    "sampling_spread",
]

_BASES = np.geomspace(0.001, 0.2, 40)
_SLOPES = np.linspace(0, 1, 41)


@dataclass(frozen=True)
class Estimate:
    """A share estimated without labels.

    Args:
        value: the estimate; NaN where there is nothing to estimate from, with the interval from 0 to 1.
        lower: lower end of the interval.
        upper: upper end.
        level: of the interval.
        n: samples it rests on.

    Example:
        >>> print(Estimate(0.87, 0.84, 0.9, 0.9, 500))
        87.0 % (84.0 to 90.0 %)
        >>> print(Estimate(float("nan"), 0.0, 1.0, 0.9, 0))
        nothing to estimate from
    """

    value: float
    lower: float
    upper: float
    level: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.value):
            return "nothing to estimate from"
        return f"{100 * self.value:.1f} % ({100 * self.lower:.1f} to {100 * self.upper:.1f} %)"


@dataclass(frozen=True)
class Spread:
    """Difference of mean confidence and accuracy on data unlike the calibration data.

    Args:
        base: standard deviation on calibration data.
        slope: what is added per point of distance from there.
        confidence: mean confidence on calibration data.
        factor: half-width of the interval of ``level`` in standard deviations, as the environments had it.
        level: of the interval ``factor`` belongs to.
        n_environments: how many were measured.
    """

    base: float
    slope: float
    confidence: float
    factor: float = INTERVAL_SD
    level: float = 0.9
    n_environments: int = 0

    def at(self, mean_confidence: float) -> float:
        """Standard deviation of accuracy around the mean confidence there."""
        return self.base + self.slope * abs(self.confidence - mean_confidence)


def accuracy(prediction: Prediction, spread: Spread | float | None = None, level: float = 0.9) -> Estimate:
    """Expected accuracy of an unlabelled batch.

    Args:
        prediction: of the batch.
        spread: systematic error of the confidences: measured (`measure_spread`), of sampling
            (`sampling_spread`), a standard deviation, or by default the mean of the calibrator's own error
            bars. For a calibrator without error bars, such as temperature scaling, the default interval
            holds the chance of the batch only: give it a spread.
        level: of the interval.

    Returns:
        The mean confidence and its interval.

    Example:
        >>> import torch
        >>> half, s = torch.full((400, 2), 0.5), torch.full((400,), 0.8)
        >>> p = Prediction(torch.zeros(400, dtype=torch.long), half, s)
        >>> print(accuracy(p), "or", accuracy(p, spread=0.05))
        80.0 % (76.7 to 83.3 %) or 80.0 % (71.1 to 88.9 %)
    """
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    if isinstance(spread, float | int) and not 0 <= spread < math.inf:
        raise ValueError(f"spread must be 0 or more, got {spread}")
    n, total, variance = _sums(checked(prediction))
    if spread is None and prediction.std is not None and n:
        spread = float(prediction.std.mean())  # error bars of one calibrator err together
    return from_sums(n, total, variance, spread, level)


def error_above(
    prediction: Prediction, rule: Rule, spread: Spread | float | None = None, level: float = 0.9
) -> Estimate:
    """Expected share of wrong answers among those a rule acts on.

    Example:
        >>> import torch
        >>> p = Prediction(
        ...     torch.zeros(2, dtype=torch.long), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.6])
        ... )
        >>> round(error_above(p, Rule((0.8,))).value, 3)
        0.1
    """
    right = accuracy(prediction[rule(prediction)], spread, level)
    return replace(right, value=1 - right.value, lower=1 - right.upper, upper=1 - right.lower)


def per_class(
    prediction: Prediction, spread: Spread | float | None = None, level: float = 0.9
) -> dict[int, Estimate]:
    """Expected share of right answers of every predicted class; NaN for a class that was never predicted.

    Example:
        >>> import torch
        >>> p = Prediction(torch.tensor([0, 1]), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.6]))
        >>> {k: round(e.value, 2) for k, e in per_class(p).items()}
        {0: 0.9, 1: 0.6}
    """
    n_classes = checked(prediction).probs.shape[1]
    return {k: accuracy(prediction[prediction.label == k], spread, level) for k in range(n_classes)}


def measure_spread(
    environments: Iterable[tuple[Prediction, Any]], confidence: float, level: float = 0.9
) -> Spread:
    """Measure what calibration does not know on labelled environments it was not fitted on.

    The line ``base + slope * distance`` is the likeliest one for normal gaps whose sampling noise is known;
    the factor is the share ``level`` of the standardised gaps, never below the normal one.

    Args:
        environments: predictions and labels, one pair each; a dozen or more.
        confidence: mean confidence on the calibration data.
        level: of the intervals the spread is for.

    Example:
        >>> import torch
        >>> def at(share):
        ...     p = Prediction(
        ...         torch.zeros(1000, dtype=torch.long), torch.full((1000, 2), 0.5), torch.full((1000,), 0.8)
        ...     )
        ...     return p, (torch.arange(1000) >= 1000 * share).long()
        >>> spread = measure_spread([at(0.7), at(0.75), at(0.85), at(0.9)], confidence=0.8)
        >>> 0.05 < spread.at(0.8) < 0.11
        True
    """
    rows = [_gap(prediction, labels) for prediction, labels in environments]
    if not rows:
        raise ValueError("a spread is measured on labelled environments, got none")
    gap, mean, chance = np.array(rows, dtype=np.float64).T
    distance = np.abs(confidence - mean)
    base, slope = _likeliest_line(gap, distance, chance)
    variance = (base + slope * distance) ** 2 + chance
    ratio = np.abs(gap) / np.sqrt(variance)
    n = len(ratio)
    k = min(math.ceil((n + 1) * level), n)
    factor = max(float(np.sort(ratio)[k - 1]), _normal(level))
    return Spread(base, slope, confidence, factor, level, n)


def sampling_spread(calibration: Prediction) -> Spread:
    """The sampling error on calibration data of a calibrator without error bars.

    Fitting matches the mean confidence ``a`` to the accuracy of ``n`` calibration samples, which is off by
    ``sqrt(a (1 - a) / n)``; a new batch inherits that. It says nothing of other places: `measure_spread`
    does.

    Args:
        calibration: prediction of the samples that the calibrator was fitted on.

    Example:
        >>> import torch
        >>> s = torch.full((400,), 0.8)
        >>> p = Prediction(torch.zeros(400, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> round(sampling_spread(p).base, 3)
        0.02
    """
    n = len(checked(calibration))
    if not n:
        raise ValueError("expected the prediction of the calibration samples, got an empty one")
    mean = float(calibration.confidence.detach().double().mean())
    variance = max(mean * (1 - mean), 0.0)
    return Spread(math.sqrt(variance / n), 0.0, mean)


def from_sums(
    n: int, confidence: float, variance: float, spread: Spread | float | None, level: float
) -> Estimate:
    """`accuracy` from sums over the samples: of the confidences ``c`` and of ``c (1 - c)``.

    Example:
        >>> print(from_sums(400, 320.0, 64.0, None, 0.9))
        80.0 % (76.7 to 83.3 %)
    """
    if n == 0:
        return Estimate(math.nan, 0.0, 1.0, level, 0)
    value = confidence / n
    systematic = spread.at(value) if isinstance(spread, Spread) else spread or 0.0
    std = math.hypot(math.sqrt(variance) / n, systematic)
    half = _factor(spread, level) * std
    lower, upper = max(value - half, 0.0), min(value + half, 1.0)
    return Estimate(value, lower, upper, level, n)


def _factor(spread: Spread | float | None, level: float) -> float:
    """Half-width of the interval of ``level`` in standard deviations; one that was measured at another level
    is stretched as that of a normal distribution.
    """
    if not isinstance(spread, Spread):
        return _normal(level)
    return spread.factor * (_normal(level) / _normal(spread.level))


def _likeliest_line(gap: FloatArray, distance: FloatArray, chance: FloatArray) -> tuple[float, float]:
    """Base and slope under which the gaps ``(environments,)`` are the likeliest."""
    sd = _BASES[:, None, None] + _SLOPES[:, None] * distance  # (bases, slopes, environments)
    variance = sd**2 + chance
    loss = gap**2 / variance + np.log(variance)
    i, j = divmod(int(loss.sum(-1).argmin()), len(_SLOPES))
    return float(_BASES[i]), float(_SLOPES[j])


def _gap(prediction: Prediction, labels: Any) -> tuple[float, float, float]:
    """Mean confidence less accuracy, mean confidence, and variance of the accuracy by chance."""
    n, total, variance = _sums(prediction)
    y = as_labels(labels, *prediction.probs.shape).cpu()
    right = int((prediction.label.cpu() == y).sum())
    return total / n - right / n, total / n, variance / n**2


def _sums(prediction: Prediction) -> tuple[int, float, float]:
    """Number of samples, sum of the confidences ``c``, and of ``c (1 - c)``."""
    c = to_double(prediction.confidence)
    total, variance = np.sum([c, c * (1 - c)], axis=1).tolist()
    return len(c), total, variance


def _normal(level: float) -> float:
    return float(ndtri((1 + level) / 2))
