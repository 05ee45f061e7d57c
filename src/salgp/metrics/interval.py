"""Does the interval around each confidence hold what it promises?

The true probability of being correct is never seen for one sample; it is seen, up to sampling noise, as the
accuracy of many samples of like confidence. So intervals are checked by bins of confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from salgp.logits import log_odds
from salgp.metrics.binned import Scheme, assign_bins
from salgp.metrics.checks import ArrayLike, FloatArray, IntArray, as_binary, as_scores
from salgp.metrics.metric import Groups, Statistic, mean_of, metric

__all__ = ["IntervalBins", "interval_bins", "interval_coverage", "interval_width", "predictive_coverage"]


@dataclass(frozen=True, eq=False)
class IntervalBins:
    """Mean interval and observed accuracy by bin of confidence; bins without samples are left out.

    Args:
        count: ``(B,)`` samples in each bin.
        confidence: ``(B,)`` mean confidence.
        lower: ``(B,)`` mean lower end.
        upper: ``(B,)`` mean upper end.
        accuracy: ``(B,)`` observed accuracy.
    """

    count: IntArray
    confidence: FloatArray
    lower: FloatArray
    upper: FloatArray
    accuracy: FloatArray

    @property
    def covered(self) -> NDArray[np.bool_]:
        """Does the mean interval hold the observed accuracy? ``(B,)``."""
        return _inside(self.lower, self.upper, self.accuracy)


def interval_bins(
    confidence: ArrayLike,
    correct: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    n_bins: int = 15,
    scheme: Scheme = "mass",
) -> IntervalBins:
    """Mean interval and observed accuracy in bins of confidence.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        lower: ``(n,)`` lower ends.
        upper: ``(n,)`` upper ends.
        n_bins: number of bins.
        scheme: equal mass keeps the sampling noise of the accuracies alike; or equal width.

    Returns:
        The bins that hold samples.

    Example:
        >>> bins = interval_bins(
        ...     [0.5, 0.5, 0.9, 0.9], [1, 0, 0, 0], [0.4, 0.4, 0.8, 0.8], [0.6, 0.6, 1.0, 1.0], n_bins=2
        ... )
        >>> bins.covered
        array([ True, False])
    """
    s, c, low, high = _checked(confidence, correct, lower, upper)
    index, edges = assign_bins(s, n_bins, scheme)
    count = np.bincount(index, minlength=len(edges) - 1)
    some = count > 0
    means = [np.bincount(index, x, len(count))[some] / count[some] for x in (s, low, high, c)]
    return IntervalBins(count[some], *means)


@metric(
    "Intervals that hold",
    "Share of samples in bins whose mean interval holds the accuracy.",
    larger_is_better=True,
    name="coverage",
)
def interval_coverage(
    confidence: ArrayLike,
    correct: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    n_bins: int = 15,
    scheme: Scheme = "mass",
) -> Statistic:
    """Share of samples in bins whose mean interval holds the bin's observed accuracy.

    The accuracy of a bin of m samples has a sampling error of ``sqrt(a (1 - a) / m)``; intervals much
    narrower than that are missed by chance alone, so read coverage together with `interval_width`.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        lower: ``(n,)`` lower ends.
        upper: ``(n,)`` upper ends.
        n_bins: number of bins.
        scheme: equal mass or equal width.

    Returns:
        A value in [0, 1].

    Example:
        >>> interval_coverage(
        ...     [0.5, 0.5, 0.9, 0.9], [1, 0, 0, 0], [0.4, 0.4, 0.8, 0.8], [0.6, 0.6, 1.0, 1.0], n_bins=2
        ... )
        0.5
    """
    s, c, low, high = _checked(confidence, correct, lower, upper)
    index, edges = assign_bins(s, n_bins, scheme)
    groups = Groups(index, len(edges) - 1)

    def of_weights(weights: FloatArray) -> FloatArray:
        count, a, b, hits = groups.totals(weights), *(groups.totals(weights, x) for x in (low, high, c))
        return np.asarray((count * _inside(a, b, hits)).sum(axis=-1) / count.sum(axis=-1))

    return Statistic(len(s), of_weights)


def predictive_coverage(
    confidence: ArrayLike,
    correct: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    n_bins: int = 15,
    level: float = 0.9,
    draws: int = 400,
    seed: int = 0,
) -> float:
    """Share of samples in bins whose number of correct answers falls where the intervals say it will.

    The number of correct answers of a bin varies with the confidences, as their intervals say (normal in
    log-odds, all of a bin together), and with the luck of its draws. With ``F`` the distribution that follows
    for the count ``k``, the bin counts by the share of ``[F(k - 1), F(k)]`` inside the central ``level``: a
    count is discrete, and where nearly all answers are right, asking only whether ``k`` is inside a range
    would call any interval too wide. Right intervals give ``level`` on average.

    Args:
        confidence: ``(n,)`` in (0, 1).
        correct: ``(n,)`` 0/1 or boolean.
        lower: ``(n,)`` lower ends.
        upper: ``(n,)`` upper ends.
        n_bins: number of bins of equal mass.
        level: of the intervals.
        draws: of the confidences within their intervals.
        seed: of the draws.

    Returns:
        A value in [0, 1].

    Example:
        >>> rng = np.random.default_rng(0)
        >>> p = rng.uniform(0.2, 0.95, 3000)
        >>> correct = rng.random(3000) < p
        >>> round(predictive_coverage(p, correct, p - 0.01, p + 0.01, n_bins=60), 1)
        0.9
    """
    from scipy.stats import binom, norm

    s, c, low, high = _checked(confidence, correct, lower, upper)
    centre, below, above = (log_odds(torch.from_numpy(x), 1e-9).numpy() for x in (s, low, high))
    wide = norm.ppf((1 + level) / 2)
    up, down = (above - centre) / wide, (centre - below) / wide
    z = np.random.default_rng(seed).standard_normal(draws)[:, None]
    index, edges = assign_bins(s, n_bins, "mass")
    total = 0.0
    for b in range(len(edges) - 1):
        rows = index == b
        if not rows.any():
            continue
        drawn = centre[rows] + np.where(z > 0, up[rows], down[rows]) * z  # (draws, samples of the bin)
        chance = (1 / (1 + np.exp(-drawn))).mean(axis=1)
        right, count = c[rows].sum(), rows.sum()
        start = binom.cdf(right - 1, count, chance).mean()
        end = binom.cdf(right, count, chance).mean()
        inside = max(0.0, min(end, (1 + level) / 2) - max(start, (1 - level) / 2))
        total += count * (inside / (end - start) if end > start else 0.0)
    return float(total / len(s))


@metric(
    "Width of the intervals",
    "Mean width of the 90 % intervals.",
    larger_is_better=False,
    name="width",
)
def interval_width(lower: ArrayLike, upper: ArrayLike) -> Statistic:
    """Mean width of the intervals.

    Example:
        >>> round(interval_width([0.4, 0.8], [0.6, 1.0]), 3)
        0.2
    """
    low, high = _checked_ends(lower, upper)
    return mean_of(high - low)


def _inside(lower: FloatArray, upper: FloatArray, x: FloatArray) -> NDArray[np.bool_]:
    slack = 1e-9 * np.maximum(np.abs(x), 1.0)  # sums of equal numbers may round differently
    return np.asarray((lower - slack <= x) & (x <= upper + slack))


def _checked(
    confidence: ArrayLike, correct: ArrayLike, lower: ArrayLike, upper: ArrayLike
) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
    s = as_scores(confidence, "confidence")
    low, high = _checked_ends(lower, upper, len(s))
    return s, as_binary(correct, "correct", len(s)), low, high


def _checked_ends(lower: ArrayLike, upper: ArrayLike, n: int | None = None) -> tuple[FloatArray, FloatArray]:
    low = as_scores(lower, "lower", n)
    high = as_scores(upper, "upper", len(low))
    if (low > high).any():
        row = int(np.argmax(low > high))
        raise ValueError(f"lower must not exceed upper; in row {row} it is {low[row]:g} > {high[row]:g}")
    return low, high
