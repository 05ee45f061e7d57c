"""Accuracy without labels: intervals that cover, and a spread measured on environments."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from salgp import Features, Prediction
from salgp.calibrators import get
from salgp.decide import Rule
from salgp.estimate import (
    Spread,
    accuracy,
    error_above,
    measure_spread,
    per_class,
    sampling_spread,
)


def batch(n: int, seed: int, bias: float = 0.0, low: float = 0.5) -> tuple[Prediction, torch.Tensor]:
    """Answers whose accuracy is the confidence plus ``bias``, and their labels."""
    g = torch.Generator().manual_seed(seed)
    s = low + (1 - low) * torch.rand(n, generator=g, dtype=torch.float64)
    right = torch.rand(n, generator=g) < s + bias
    label = torch.randint(0, 3, (n,), generator=g)
    probs = ((1 - s) / 2)[:, None].repeat(1, 3).scatter(1, label[:, None], s[:, None])
    return Prediction(label, probs, s), torch.where(right, label, (label + 1) % 3)


def true(prediction: Prediction, labels: torch.Tensor) -> float:
    return float((prediction.label == labels).double().mean())


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_interval_of_calibrated_confidences_covers(level: float) -> None:
    """1,000 batches of 200; 3 sd of the share covered are .047 and .028."""
    hits = 0
    for seed in range(1000):
        p, y = batch(200, seed)
        found = accuracy(p, level=level)
        hits += found.lower <= true(p, y) <= found.upper
    assert abs(hits / 1000 - level) < 3 * math.sqrt(level * (1 - level) / 1000) + 0.01


def test_own_error_bars_widen_the_interval_and_do_not_fade_with_n() -> None:
    p, _ = batch(20000, 0)
    wide = Prediction(p.label, p.probs, p.confidence, std=torch.full((20000,), 0.03))
    found = accuracy(wide)
    assert found.upper - found.lower == pytest.approx(2 * 1.645 * 0.03, rel=0.02)


@pytest.mark.parametrize("name", ["temperature", "isotonic", "platt"])
@pytest.mark.parametrize("n", [200, 5000])
def test_sampling_spread_makes_intervals_right_in_domain(name: str, n: int) -> None:
    """100 calibrators of 300 samples, too sure networks; 3 sd of the share covered are .09."""
    rng = np.random.default_rng(0)

    def samples(size: int) -> tuple[Features, torch.Tensor]:
        y = rng.integers(0, 5, size)
        return Features(
            torch.from_numpy(3.4 * (2 * np.eye(5)[y] + rng.normal(size=(size, 5))))
        ), torch.from_numpy(y)

    held, bare = [], []
    for _ in range(100):
        fitted_on, y = samples(300)
        calibrator = get(name).fit(fitted_on, y)
        spread = sampling_spread(calibrator.predict(fitted_on))
        features, truth = samples(n)
        p = calibrator.predict(features)
        for found, shares in ((accuracy(p, spread), held), (accuracy(p), bare)):
            shares.append(found.lower <= true(p, truth) <= found.upper)
    assert np.mean(held) > 0.82
    assert n == 200 or np.mean(bare) < 0.6, "chance alone is too little"


def test_sampling_spread_is_that_of_a_share() -> None:
    p, _ = batch(300, 0)
    a = float(p.confidence.mean())
    found = sampling_spread(p)
    assert found.at(0.3) == pytest.approx(math.sqrt(a * (1 - a) / 300))
    assert found.confidence == pytest.approx(a)
    with pytest.raises(ValueError, match="got an empty one"):
        sampling_spread(p[:0])


def test_spread_recovers_how_far_environments_err() -> None:
    """Gaps of sd .02 + .3 * distance: intervals on new environments cover 90 %."""
    rng = np.random.default_rng(0)

    def environment(seed: int) -> tuple[Prediction, torch.Tensor]:
        low = float(rng.uniform(0.1, 0.5))
        return batch(2000, seed, float(rng.normal() * (0.02 + 0.3 * (0.5 - low) / 2)), low)

    spread = measure_spread([environment(seed) for seed in range(60)], confidence=0.75)
    assert 0.005 < spread.base < 0.04
    assert 0.15 < spread.slope < 0.45
    hits = []
    for seed in range(100, 300):
        p, y = environment(seed)
        found = accuracy(p, spread)
        hits.append(found.lower <= true(p, y) <= found.upper)
    assert 0.82 < np.mean(hits) <= 1


def test_parts_of_a_batch() -> None:
    p, _ = batch(600, 0)
    rule = Rule((0.8,))
    acted = rule(p)
    assert error_above(p, rule).value == pytest.approx(1 - float(p.confidence[acted].mean()))
    assert error_above(p, rule).n == int(acted.sum())
    classes = per_class(p)
    for k in range(3):
        assert classes[k].value == pytest.approx(float(p.confidence[p.label == k].mean()))
    nothing = error_above(p, Rule((1.0,)))
    assert math.isnan(nothing.value)
    assert (nothing.lower, nothing.upper, nothing.n) == (0.0, 1.0, 0)
    assert str(nothing) == str(accuracy(p[:0])) == "nothing to estimate from"


def test_wrong_arguments_say_so() -> None:
    p, _ = batch(10, 0)
    with pytest.raises(ValueError, match="level must be"):
        accuracy(p, level=90)
    with pytest.raises(ValueError, match="got none"):
        measure_spread([], 0.9)
    assert Spread(0.01, 0.5, 0.9).at(0.7) == pytest.approx(0.11)


def test_a_spread_measured_at_one_level_is_stretched_to_another() -> None:
    wide = Spread(0.05, 0.0, 0.8, factor=3.0, level=0.9)
    p = Prediction(torch.zeros(10**6).long(), torch.full((10**6, 2), 0.5), torch.full((10**6,), 0.8))
    half = [accuracy(p, spread=wide, level=level).upper - 0.8 for level in (0.5, 0.9, 0.95)]
    assert half == sorted(half)
    assert half[1] == pytest.approx(0.15, abs=1e-3)
    assert half[2] / half[1] == pytest.approx(1.95996 / 1.64485, abs=1e-3)
