"""Interval coverage: right intervals give their level, also where counts are discrete; wrong
ones do not.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom, norm

from salgp import Prediction, metrics


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
    return metrics.interval_coverage(sigmoid(stated), correct, *ends, n_bins=bins)


@pytest.mark.parametrize(("centre", "spread"), [(0.5, 0.0), (1.0, 0.6), (4.5, 0.0), (4.5, 0.7)])
def test_right_intervals_give_their_level(centre: float, spread: float) -> None:
    assert np.mean([world(centre, spread, max(spread, 1e-6), seed) for seed in range(12)]) == pytest.approx(
        0.9, abs=0.03
    )


def test_intervals_that_claim_too_little_or_too_much_are_told() -> None:
    assert np.mean([world(1.0, 1.0, 0.1, seed) for seed in range(5)]) < 0.6
    assert np.mean([world(1.0, 0.0, 1.5, seed) for seed in range(5)]) > 0.99


def test_good_intervals_cover_where_every_answer_of_a_bin_is_right() -> None:
    """98 to 100 % right: most bins hold no error, and an interval below 1 never holds an accuracy of 1."""
    rng = np.random.default_rng(0)
    s = rng.uniform(0.985, 0.999, 400)
    correct = rng.random(400) < s
    bars = 0.5 * (1 - s)
    scores = [metrics.interval_coverage(s, rng.random(400) < s, s - bars, s + bars) for _ in range(20)]
    assert np.mean(scores) > 0.85
    assert metrics.interval_coverage(s, correct, s, s) == pytest.approx(0.9, abs=0.1)


def test_evaluate_reports_this_coverage() -> None:
    p = Prediction(
        torch.zeros(500).long(),
        torch.stack([torch.linspace(0.9, 0.99, 500), torch.linspace(0.1, 0.01, 500)], 1),
        torch.linspace(0.9, 0.99, 500),
        lower=torch.linspace(0.85, 0.98, 500),
        upper=torch.linspace(0.95, 1.0, 500),
    )
    right = torch.rand(500, generator=torch.Generator().manual_seed(0)) < p.confidence
    assert metrics.evaluate(p, (~right).long()).coverage > 0.9


def test_by_the_definition() -> None:
    """Bin by bin and draw by draw: where the count falls in the mixture of binomials."""
    rng = np.random.default_rng(0)
    n, n_bins, level = 36, 6, 0.5
    s = rng.uniform(0.3, 0.97, n)
    low, high = s - rng.uniform(0.02, 0.2, n), np.minimum(s + rng.uniform(0.01, 0.2, n), 0.999)
    correct = rng.random(n) < s**1.3
    z = norm.ppf((np.arange(200) + 0.5) / 200)
    order, total = np.argsort(s), 0.0
    logit = lambda x: math.log(x / (1 - x))
    for rows in np.array_split(order, n_bins):
        k, m = int(correct[rows].sum()), len(rows)
        start = end = 0.0
        for draw in z:
            mean = 0.0
            for i in rows:
                half = logit(high[i]) - logit(s[i]) if draw > 0 else logit(s[i]) - logit(low[i])
                mean += 1 / (1 + math.exp(-(logit(s[i]) + half / norm.ppf(0.75) * draw))) / m
            start += binom.cdf(k - 1, m, mean) / 200
            end += binom.cdf(k, m, mean) / 200
        total += m * max(0.0, min(end, 0.75) - max(start, 0.25)) / (end - start)
    found = metrics.interval_coverage(s, correct, low, high, n_bins=n_bins, level=level)
    assert found == pytest.approx(total / n, abs=1e-9)
