"""Exact intervals of shares: parity with SciPy, coverage in small bins, no interval without a width."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest

from salgp import metrics
from salgp.metrics.interval import exact_interval


@pytest.mark.parametrize("level", [0.5, 0.9, 0.99])
def test_exact_intervals_are_those_of_scipy(level: float) -> None:
    pairs = [(0, 1), (1, 1), (0, 7), (3, 7), (7, 7), (231, 250)]
    lower, upper = exact_interval(*np.array(pairs).T, level)
    for (hits, n), low, high in zip(pairs, lower, upper, strict=True):
        theirs = binomtest(hits, n).proportion_ci(level)
        assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_accuracy_band_is_that_of_every_bin() -> None:
    confidence = np.repeat([0.1, 0.5, 0.9], [40, 100, 250])
    correct = np.concatenate([np.arange(40) < 6, np.arange(100) < 47, np.arange(250) < 231])
    bins = metrics.reliability_bins(confidence, correct, n_bins=5)
    assert bins.count.tolist() == [40, 0, 100, 0, 250]
    lower, upper = metrics.accuracy_band(bins)
    for b, hits in {0: 6, 2: 47, 4: 231}.items():
        theirs = binomtest(hits, int(bins.count[b])).proportion_ci(0.9)
        assert (lower[b], upper[b]) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert np.isnan([*lower[[1, 3]], *upper[[1, 3]]]).all()


@pytest.mark.parametrize("n", [100, 300])
def test_band_covers_in_small_bins_too(n: int) -> None:
    """Calibrated confidences, most near 1: bins of few samples, many of them all right."""
    rng = np.random.default_rng(0)
    held, width = [], []
    for _ in range(150):
        s = 1 - 0.5 * rng.beta(0.4, 3, n)
        bins = metrics.reliability_bins(s, rng.random(n) < s)
        lower, upper = metrics.accuracy_band(bins)
        filled = bins.count > 0
        held += ((lower <= bins.confidence) & (bins.confidence <= upper))[filled].tolist()
        width += (upper - lower)[filled].tolist()
    assert np.mean(held) >= 0.9
    assert min(width) > 0


@pytest.mark.parametrize("level", [0.0, 1.0, float("nan")])
def test_levels_outside_are_refused(level: float) -> None:
    with pytest.raises(ValueError, match="0 < level < 1"):
        exact_interval(np.array([1]), np.array([2]), level)
