"""Coverage and width of the intervals around confidences.

The true probability of being correct is never seen for one sample; it is seen, up to sampling noise, as the
accuracy of many samples of like confidence. So intervals are checked by bins of confidence.

Exact intervals of a share, after Clopper and Pearson (1934): all shares under which what was seen, or
something further off, is not too improbable. They cover with *at least* the stated probability, for any
number of samples. Redrawing outcomes does not: a bin of three right answers is right in every resample, and
its interval would have no width.
"""

import numpy as np
import torch
from scipy.special import bdtr, betaincinv, ndtri

from salgp.logits import log_odds
from salgp.metrics.binned import ReliabilityBins, assign_bins
from salgp.metrics.metric import (
    ArrayLike,
    FloatArray,
    IntArray,
    Statistic,
    as_scored,
    as_scores,
    mean_of,
    metric,
)

__all__ = ["exact_interval"]

_STEPS = ndtri(np.arange(0.5, 200) / 200)[:, None]
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

    s, c = as_scored(confidence, correct)
    low, high = _checked_ends(lower, upper, len(s))
    centre, below, above = (log_odds(torch.from_numpy(x), 1e-9).numpy() for x in (s, low, high))
    half = ndtri((1 + level) / 2)
    up, down = (above - centre) / half, (centre - below) / half
    index, edges = assign_bins(s, n_bins, "mass")
    total = 0.0
    for b in range(len(edges) - 1):
        rows = np.flatnonzero(index == b)
        chance = _chances(centre[rows], down[rows], up[rows])
        right = int(c[rows].sum())
        total += len(rows) * _share_inside(right, len(rows), chance, level)
    return float(total / len(s))


def _chances(centre: FloatArray, down: FloatArray, up: FloatArray) -> FloatArray:
    """Mean chance of a bin to be right, at every quantile ``(points,)`` of its log-odds.

    ``down`` and ``up`` are the standard deviations of the log-odds below and above ``centre``.
    """
    odds = centre + np.where(_STEPS > 0, up, down) * _STEPS
    return (1 / (1 + np.exp(-odds))).mean(1)


def _share_inside(right: int, count: int, chance: FloatArray, level: float) -> float:
    """Share of ``[F(right - 1), F(right)]`` inside the central ``level``."""
    start = bdtr(right - 1, count, chance).mean() if right else 0.0
    end = bdtr(right, count, chance).mean()
    if end <= start:
        return 0.0
    tail = (1 - level) / 2
    inside = min(end, 1 - tail) - max(start, tail)
    return float(max(inside, 0.0) / (end - start))


@metric("Width of the intervals", "Mean width of the 90 % intervals.", larger_is_better=False, name="width")
def interval_width(lower: ArrayLike, upper: ArrayLike) -> Statistic:
    """Mean width of the intervals.

    Example:
        >>> round(interval_width([0.4, 0.8], [0.6, 1.0]), 3)
        0.2
    """
    low, high = _checked_ends(lower, upper)
    return mean_of(high - low)


def accuracy_band(bins: ReliabilityBins, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
    """Exact interval of the accuracy of each bin.

    Args:
        bins: of `salgp.metrics.reliability_bins`.
        level: probability with which it holds the true accuracy of the bin, at least.

    Returns:
        Lower and upper ends, ``(B,)`` each; NaN in empty bins.

    Example:
        >>> from salgp.metrics import reliability_bins
        >>> bins = reliability_bins([0.4] * 50 + [0.9] * 50, [1, 0] * 25 + [1] * 50, n_bins=2)
        >>> lower, upper = accuracy_band(bins)
        >>> lower.round(2), upper.round(2)
        (array([0.38, 0.94]), array([0.62, 1.  ]))
    """
    hits = np.rint(np.nan_to_num(bins.accuracy) * bins.count)
    return exact_interval(hits.astype(np.int64), bins.count, level)


def exact_interval(
    hits: IntArray | int, n: IntArray | int, level: float = 0.9
) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends for ``hits`` of ``n`` each; NaN where ``n`` is 0.

    Example:
        >>> lower, upper = exact_interval(np.array([0, 9]), np.array([10, 10]))
        >>> lower.round(3), upper.round(3)
        (array([0.   , 0.606]), array([0.259, 0.995]))
    """
    if not 0 < level < 1:
        raise ValueError(f"expected 0 < level < 1, got {level}")
    tail, missed = (1 - level) / 2, n - hits
    lower = betaincinv(np.maximum(hits, 1), missed + 1, tail)  # 1: not used, but defined
    upper = betaincinv(hits + 1, np.maximum(missed, 1), 1 - tail)
    unknown = np.where(n > 0, 0.0, np.nan)
    lower, upper = np.where(hits > 0, lower, 0.0), np.where(missed > 0, upper, 1.0)
    return lower + unknown, upper + unknown


def _checked_ends(lower: ArrayLike, upper: ArrayLike, n: int | None = None) -> tuple[FloatArray, FloatArray]:
    low = as_scores(lower, "lower", n)
    high = as_scores(upper, "upper", len(low))
    crossed = np.flatnonzero(low > high)
    if len(crossed):
        row = crossed[0]
        raise ValueError(f"lower must not exceed upper; in row {row} it is {low[row]:g} > {high[row]:g}")
    return low, high
