"""Calibration errors over bins of confidence.

Bins are right-closed intervals ``(a, b]`` as in Guo et al. (2017); a confidence of exactly 0 falls in the
first bin and of exactly 1 in the last. Numbers are put into bins in double precision. torchmetrics differs on
purpose in nothing but edges: its bins are left-closed, and confidences of exactly 1 get a bin of their own
behind the last.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import numpy as np
from scipy.special import ndtr

from salgp.metrics.metric import (
    ArrayLike,
    FloatArray,
    Groups,
    IntArray,
    Statistic,
    as_distribution,
    as_scored,
    metric,
)

__all__ = []

Scheme: TypeAlias = Literal["width", "mass"]
"""Bins of equal ``"width"``, or holding equally many samples (equal ``"mass"``)."""


@dataclass(frozen=True, eq=False)
class ReliabilityBins:
    """Confidence and accuracy by bin; empty bins hold NaN.

    Args:
        edges: ``(B + 1,)`` bin edges from 0 to 1.
        count: ``(B,)`` samples in each bin.
        confidence: ``(B,)`` mean confidence.
        accuracy: ``(B,)`` observed accuracy.
    """

    edges: FloatArray
    count: IntArray
    confidence: FloatArray
    accuracy: FloatArray

    @property
    def share(self) -> FloatArray:
        """Share of the samples in each bin, ``(B,)``."""
        return np.asarray(self.count / self.count.sum())

    @property
    def gap(self) -> FloatArray:
        """Mean confidence minus accuracy, ``(B,)``: positive where overconfident."""
        return self.confidence - self.accuracy


def reliability_bins(
    confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, scheme: Scheme = "width"
) -> ReliabilityBins:
    """Mean confidence and accuracy in bins of confidence: the numbers behind a reliability diagram.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.
        scheme: equal width or equal mass; samples of the same confidence always share a bin.

    Returns:
        The bins, empty ones included.

    Example:
        >>> bins = reliability_bins([0.2, 0.9, 0.7, 1.0], [0, 1, 1, 0], n_bins=2)
        >>> bins.count, bins.accuracy.round(2)
        (array([1, 3]), array([0.  , 0.67]))
    """
    s, c = as_scored(confidence, correct)
    index, edges = assign_bins(s, n_bins, scheme)
    totals = partial(np.bincount, index, minlength=len(edges) - 1)
    count = totals()
    with np.errstate(invalid="ignore"):
        mean_s, mean_c = totals(s) / count, totals(c) / count
    return ReliabilityBins(edges, count, mean_s, mean_c)


@metric(
    "Confidence error (ECE)",
    "Mean gap between the stated confidence and how often it is right.",
    larger_is_better=False,
    heading="ECE",
)
def ece(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, scheme: Scheme = "width") -> Statistic:
    """Expected calibration error of the top label, ``sum_b n_b / n |accuracy_b - confidence_b|``.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.
        scheme: ``"width"`` (Guo et al. 2017), or ``"mass"`` (Nguyen & O'Connor 2015).

    Returns:
        A value in [0, 1].

    Example:
        >>> round(ece([0.9, 0.9, 0.6, 0.6], [1, 1, 1, 0]), 3)
        0.1
    """
    return _of_bins(confidence, correct, n_bins, scheme, _mean_gap)


@metric(
    "Largest confidence error (MCE)",
    "Largest gap between confidence and accuracy of any bin.",
    larger_is_better=False,
)
def mce(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, scheme: Scheme = "width") -> Statistic:
    """Maximum calibration error, ``max_b |accuracy_b - confidence_b|`` over the bins that hold samples.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.
        scheme: equal width or equal mass.

    Returns:
        A value in [0, 1].

    Example:
        >>> round(mce([0.9, 0.9, 0.6, 0.4], [1, 1, 1, 0]), 3)
        0.4
    """
    return _of_bins(confidence, correct, n_bins, scheme, _largest_gap)


@metric(
    "Confidence error, equal bins (ACE)",
    "Plain mean of the gaps of bins with equally many samples.",
    larger_is_better=False,
)
def adaptive_ece(confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15) -> Statistic:
    """Adaptive calibration error of Nixon et al. (2019) for the top label: plain mean of the gaps of
    equal-mass bins.

    `ece` with ``scheme="mass"`` weights the same gaps by the number of samples; the two differ where ties or
    a remainder make the bins unequal.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.

    Returns:
        A value in [0, 1].

    Example:
        >>> round(adaptive_ece([0.9, 0.8, 0.6, 0.4], [1, 1, 1, 0], n_bins=2), 3)
        0.075
    """
    return _of_bins(confidence, correct, n_bins, "mass", _plain_mean_gap)


@metric(
    "Confidence error without label noise",
    "Confidence error less what label noise alone adds.",
    larger_is_better=False,
)
def debiased_ece(
    confidence: ArrayLike,
    correct: ArrayLike,
    n_bins: int = 15,
    scheme: Scheme = "width",
    norm: Literal["l1", "l2"] = "l1",
) -> Statistic:
    r"""Calibration error less the part that label noise alone adds (Kumar, Liang & Ma 2019).

    ``"l1"``: their ``2 E - mean(E of redrawn labels)`` under the normal approximation
    :math:`g_b \sim N(\hat g_b, a_b (1 - a_b) / n_b)` of the gap of bin b, in closed form (the mean of a
    folded normal) where they draw at random. ``"l2"``: the root of
    :math:`\sum_b \frac{n_b}{n} [g_b^2 - a_b (1 - a_b) / (n_b - 1)]`; bins of one sample are not corrected.
    Both are cut at 0.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.
        scheme: equal width or equal mass.
        norm: mean absolute or root mean squared gap.

    Returns:
        A value in [0, 1], at most the uncorrected error.

    Example:
        >>> confidence, correct = [0.9, 0.9, 0.6, 0.6], [1, 1, 1, 0]
        >>> debiased_ece(confidence, correct) < ece(confidence, correct)
        True
    """
    if norm not in ("l1", "l2"):
        raise ValueError(f"norm must be 'l1' or 'l2', got {norm!r}")
    formula = _debiased_l1 if norm == "l1" else _debiased_l2
    return _of_bins(confidence, correct, n_bins, scheme, formula)


@metric(
    "Confidence error of every class",
    "Mean over classes of the gap between probability and frequency.",
    larger_is_better=False,
)
def classwise_ece(probs: ArrayLike, labels: ArrayLike, n_bins: int = 15) -> Statistic:
    """Mean over classes of the calibration error of each class probability (Kull et al. 2019).

    Args:
        probs: ``(n, c)`` rows sum to 1.
        labels: ``(n,)`` true classes; samples of an unknown class (-1) are left out.
        n_bins: number of equal-width bins.

    Returns:
        A value in [0, 1].

    Example:
        >>> round(classwise_ece([[0.7, 0.3], [0.2, 0.8]], [0, 1]), 3)
        0.25
    """
    p, y = as_distribution(probs, labels)
    known = np.flatnonzero(y >= 0)
    if not len(known):
        raise ValueError("every label is -1 (unknown): the classwise error needs samples of known classes")
    each = [ece.formula(p[known, k], y[known] == k, n_bins) for k in range(p.shape[1])]
    return Statistic(len(y), partial(_mean_of, each, known))


def assign_bins(confidence: FloatArray, n_bins: int, scheme: Scheme) -> tuple[IntArray, FloatArray]:
    """Bin index ``(n,)`` and edges ``(B + 1,)``; tied equal-mass edges are merged, so that B may be less than
    asked for.
    """
    if n_bins < 1:
        raise ValueError(f"n_bins must be at least 1, got {n_bins}")
    if scheme not in ("width", "mass"):
        raise ValueError(f"scheme must be 'width' or 'mass', got {scheme!r}")
    edges = np.linspace(0, 1, n_bins + 1)
    if scheme == "mass":
        edges = _mass_edges(confidence, n_bins)
    index = np.searchsorted(edges, confidence, side="left") - 1
    return np.clip(index, 0, len(edges) - 2), edges


def _mass_edges(confidence: FloatArray, n_bins: int) -> FloatArray:
    last = np.arange(1, n_bins) * len(confidence) // n_bins - 1  # of each bin but the final one
    ordered = np.sort(confidence)
    inner = np.unique(ordered[last[last >= 0]])
    inside = (inner > 0) & (inner < ordered[-1])
    return np.concatenate([[0.0], inner[inside], [1.0]])


def _mean_of(each: list[Statistic], rows: IntArray, weights: FloatArray) -> FloatArray:
    return np.mean([one.of_weights(weights[..., rows]) for one in each], axis=0)


@dataclass(frozen=True, eq=False)
class Binned:
    """Samples in bins: what is summed over each, ``(n,)`` confidence less correctness, and correctness."""

    groups: Groups
    gap: FloatArray
    correct: FloatArray

    def means(self, weights: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Count, mean gap and accuracy of every bin, ``(..., B)`` each; 0 where it is empty."""
        count = self.groups.totals(weights)
        some = np.maximum(count, 1)
        gap = self.groups.totals(weights, self.gap) / some
        return count, gap, self.groups.totals(weights, self.correct) / some


Formula: TypeAlias = Callable[[Binned, FloatArray], FloatArray]


def _of_bins(
    confidence: ArrayLike, correct: ArrayLike, n_bins: int, scheme: Scheme, formula: Formula
) -> Statistic:
    s, c = as_scored(confidence, correct)
    index, edges = assign_bins(s, n_bins, scheme)
    binned = Binned(Groups(index, len(edges) - 1), s - c, c)
    return Statistic(len(s), partial(formula, binned))


def _mean_gap(binned: Binned, weights: FloatArray) -> FloatArray:
    gap = np.abs(binned.groups.totals(weights, binned.gap))
    return gap.sum(-1) / weights.sum(-1)


def _largest_gap(binned: Binned, weights: FloatArray) -> FloatArray:
    _, gap, _ = binned.means(weights)
    return np.abs(gap).max(-1)


def _plain_mean_gap(binned: Binned, weights: FloatArray) -> FloatArray:
    count, gap, _ = binned.means(weights)
    return np.abs(gap).sum(-1) / (count > 0).sum(-1)


def _debiased_l1(binned: Binned, weights: FloatArray) -> FloatArray:
    count, gap, accuracy = binned.means(weights)
    gap = np.abs(gap)
    std = np.sqrt(_noise(accuracy, count))
    folded = np.where(std > 0, _folded_mean(gap, std), gap)
    mean = np.average(2 * gap - folded, -1, count)
    return np.maximum(mean, 0.0)


def _debiased_l2(binned: Binned, weights: FloatArray) -> FloatArray:
    count, gap, accuracy = binned.means(weights)
    noise = (count > 1) * _noise(accuracy, count - 1)
    mean = np.average(gap**2 - noise, -1, count)
    return np.sqrt(np.maximum(mean, 0.0))


def _noise(accuracy: FloatArray, n: FloatArray) -> FloatArray:
    return accuracy * (1 - accuracy) / np.maximum(n, 1)


def _folded_mean(mean: FloatArray, std: FloatArray) -> FloatArray:
    """Mean of the absolute value of a normal variable; undefined where ``std`` is 0."""
    z = mean / np.where(std > 0, std, 1.0)
    bell = np.sqrt(2 / np.pi) * std * np.exp(-(z**2) / 2)
    return bell + mean * (1 - 2 * ndtr(-z))
