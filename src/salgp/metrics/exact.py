"""Intervals of a share that hold for any number of samples, also where none or all are right.

Clopper and Pearson (1934): all shares under which what was seen, or something further off, is not too
improbable. They cover with *at least* the stated probability. Redrawing outcomes does not: a bin of three
right answers is right in every resample, and its interval would have no width.
"""

from __future__ import annotations

import numpy as np
from scipy.special import betaincinv

from salgp.metrics.binned import ReliabilityBins
from salgp.metrics.checks import FloatArray, IntArray

__all__ = ["exact_interval"]


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
    hits = np.rint(np.nan_to_num(bins.accuracy) * bins.count).astype(np.int64)
    return exact_interval(hits, bins.count, level)


def exact_interval(hits: IntArray, n: IntArray, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
    """Lower and upper ends for ``hits`` of ``n`` each; NaN where ``n`` is 0.

    Example:
        >>> lower, upper = exact_interval(np.array([0, 9]), np.array([10, 10]))
        >>> lower.round(3), upper.round(3)
        (array([0.   , 0.606]), array([0.259, 0.995]))
    """
    if not 0 < level < 1:
        raise ValueError(f"expected 0 < level < 1, got {level}")
    tail = (1 - level) / 2
    some, missed = np.maximum(hits, 1), np.maximum(n - hits, 1)  # 1: not used, but defined
    lower = np.where(hits > 0, betaincinv(some, n - hits + 1, tail), 0.0)
    upper = np.where(hits < n, betaincinv(hits + 1, missed, 1 - tail), 1.0)
    return np.where(n > 0, lower, np.nan), np.where(n > 0, upper, np.nan)
