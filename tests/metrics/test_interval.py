"""Predictive coverage: right intervals give their level, also where counts are discrete; wrong
ones do not.
"""

from __future__ import annotations

import numpy as np
import pytest

from salgp import metrics


def world(centre: float, spread: float, claimed: float, seed: int, bins: int = 60, size: int = 50) -> float:
    """Bins of like confidence whose true log-odds miss the stated ones by ``spread``, with intervals that
    claim ``claimed``.
    """
    rng = np.random.default_rng(seed)
    stated = centre + np.linspace(-0.5, 0.5, bins).repeat(size)
    truth = stated + spread * rng.standard_normal(bins).repeat(size)
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    correct = rng.random(bins * size) < sigmoid(truth)
    half = 1.6448536269514722 * claimed
    ends = sigmoid(stated - half), sigmoid(stated + half)
    return metrics.predictive_coverage(sigmoid(stated), correct, *ends, n_bins=bins)


@pytest.mark.parametrize(("centre", "spread"), [(0.5, 0.0), (1.0, 0.6), (4.5, 0.0), (4.5, 0.7)])
def test_right_intervals_give_their_level(centre: float, spread: float) -> None:
    assert np.mean([world(centre, spread, max(spread, 1e-6), seed) for seed in range(12)]) == pytest.approx(
        0.9, abs=0.03
    )


def test_intervals_that_claim_too_little_or_too_much_are_told() -> None:
    assert np.mean([world(1.0, 1.0, 0.1, seed) for seed in range(5)]) < 0.6
    assert np.mean([world(1.0, 0.0, 1.5, seed) for seed in range(5)]) > 0.99


def test_same_seed_same_value() -> None:
    assert world(1.0, 0.5, 0.5, 3) == world(1.0, 0.5, 0.5, 3)
