"""Coverage and width of the intervals around confidences.

The true probability of being correct is never seen for one sample; it is seen, up to sampling noise, as the
accuracy of many samples of like confidence. So intervals are checked by bins of confidence.
"""

from __future__ import annotations

import numpy as np
import torch

from salgp.logits import log_odds
from salgp.metrics.binned import assign_bins
from salgp.metrics.checks import ArrayLike, FloatArray, as_binary, as_scores
from salgp.metrics.metric import Statistic, mean_of, metric

__all__ = []

_POINTS = 200
"""Quantiles of the normal distribution by which confidences vary within their intervals."""


@metric(
    "Coverage of the intervals",
    "Share of samples whose interval holds the accuracy of its bin; 0.9 where the 90 % intervals are right.",
    larger_is_better=None,
    name="coverage",
)
def interval_coverage(
    confidence: ArrayLike,
    correct: ArrayLike,
    lower: ArrayLike,
    upper: ArrayLike,
    n_bins: int = 15,
    level: float = 0.9,
) -> float:
    """Share of samples in bins whose number of correct answers falls where the intervals say it will.

    The number of correct answers of a bin varies with the confidences, as their intervals say (normal in
    log-odds, all of a bin together), and with the sampling of its answers. With ``F`` the distribution that
    follows for the count ``k``, the bin counts by the share of ``[F(k - 1), F(k)]`` inside the central
    ``level``: a count is discrete, so where nearly all answers are right, a yes or no per bin would miss any
    interval. Right intervals give ``level`` on average, too wide ones more, too narrow ones less.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        lower: ``(n,)`` lower ends.
        upper: ``(n,)`` upper ends.
        n_bins: number of bins of equal mass.
        level: of the intervals.

    Returns:
        A value in [0, 1].

    Example:
        >>> rng = np.random.default_rng(0)
        >>> p = rng.uniform(0.2, 0.95, 3000)
        >>> correct = rng.random(3000) < p
        >>> round(interval_coverage(p, correct, p - 0.01, p + 0.01, n_bins=60), 1)
        0.9
    """
    from scipy.special import bdtr, ndtri

    s, c, low, high = _checked(confidence, correct, lower, upper)
    centre, below, above = (log_odds(torch.from_numpy(x), 1e-9).numpy() for x in (s, low, high))
    half = ndtri((1 + level) / 2)
    z = ndtri((np.arange(_POINTS) + 0.5) / _POINTS)[:, None]
    index, edges = assign_bins(s, n_bins, "mass")
    total = 0.0
    for rows in (np.flatnonzero(index == b) for b in range(len(edges) - 1)):
        step = np.where(z > 0, above[rows] - centre[rows], centre[rows] - below[rows]) / half
        chance = (1 / (1 + np.exp(-(centre[rows] + step * z)))).mean(axis=1)  # (points,)
        right, count = int(c[rows].sum()), len(rows)
        start = bdtr(right - 1, count, chance).mean() if right else 0.0
        end = bdtr(right, count, chance).mean()
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
