"""Estimates without labels, derived once more: direct maximisation, numerical curvature, loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import chi2, norm

from salgp import Prediction
from salgp.decide import Rule
from salgp.estimate import (
    Spread,
    accuracy,
    adapt,
    class_mix,
    error_above,
    measure_spread,
    mix,
    per_class,
)
from salgp.estimate.accuracy import from_sums
from salgp.estimate.mix import ClassMix, _factors, _scaled


def drawn(n: int, seed: int, sharp: float = 1.5, novelty: bool = False) -> tuple[Prediction, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (sharp * torch.randn(n, 3, generator=g, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(probs, 1, generator=g)[:, 0]
    new = torch.randn(n, generator=g, dtype=torch.float64) if novelty else None
    return Prediction(probs.argmax(1), probs, probs.amax(1), novelty=new), y


def test_interval_adds_chance_and_what_calibration_does_not_know() -> None:
    p, _ = drawn(50, 0)
    c = p.confidence.numpy()
    chance = math.sqrt(sum(x * (1 - x) for x in c)) / 50
    for level, spread, unknown in ((0.9, None, 0.0), (0.8, 0.04, 0.04), (0.5, Spread(0.02, 0.3, 0.9), None)):
        extra = 0.02 + 0.3 * abs(0.9 - c.mean()) if unknown is None else unknown
        half = norm.ppf((1 + level) / 2) * math.sqrt(chance**2 + extra**2)
        found = accuracy(p, spread, level)
        assert (found.value, found.n, found.level) == (pytest.approx(c.mean()), 50, level)
        assert found.lower == pytest.approx(max(c.mean() - half, 0))
        assert found.upper == pytest.approx(min(c.mean() + half, 1))
    measured = Spread(0.02, 0.3, 0.9, factor=2.5, level=0.8)
    half = 2.5 * math.sqrt(chance**2 + measured.at(float(c.mean())) ** 2)
    assert accuracy(p, measured, 0.8).lower == pytest.approx(c.mean() - half)
    assert str(from_sums(400, 320.0, 64.0, 0.0, 0.9)) == "80.0 % (76.7 to 83.3 %)"
    assert (from_sums(4, 4.0, 0.0, 0.3, 0.9).upper, from_sums(4, 0.0, 0.0, 0.3, 0.9).lower) == (1.0, 0.0)


def test_error_above_a_rule_is_the_mirror_of_its_accuracy() -> None:
    p, _ = drawn(200, 1)
    acted = p.confidence > 0.7
    found = error_above(p, Rule((0.7,)), 0.02, 0.8)
    c = p.confidence[acted].numpy()
    half = norm.ppf(0.9) * math.sqrt((c * (1 - c)).sum() / len(c) ** 2 + 0.02**2)
    assert found.value == pytest.approx(1 - c.mean())
    assert (found.lower, found.upper) == (
        pytest.approx(1 - c.mean() - half),
        pytest.approx(1 - c.mean() + half),
    )
    each = per_class(p, 0.02, 0.8)
    assert each[1].lower == pytest.approx(accuracy(p[p.label == 1], 0.02, 0.8).lower)


def test_measured_spread_is_the_likeliest_line_by_loops() -> None:
    environments, rows = [], []
    for seed in range(7):
        p, y = drawn(150, seed, sharp=0.5 + 0.4 * seed)
        wrong = torch.rand(150, generator=torch.Generator().manual_seed(50 + seed)) < 0.05 * seed
        y = torch.where(wrong, (p.label + 1) % 3, y)
        environments.append((p, y))
        c = p.confidence.numpy()
        gap = c.mean() - float((p.label == y).double().mean())
        rows.append((gap, abs(0.8 - c.mean()), (c * (1 - c)).sum() / 150**2))
    best = (math.inf, 0.0, 0.0)
    for base in np.geomspace(0.001, 0.2, 40):
        for slope in np.linspace(0, 1, 41):
            loss = 0.0
            for gap, distance, chance in rows:
                variance = (base + slope * distance) ** 2 + chance
                loss += gap**2 / variance + math.log(variance)
            best = min(best, (loss, base, slope))
    found = measure_spread(environments, confidence=0.8, level=0.7)
    assert (found.base, found.slope) == (pytest.approx(best[1]), pytest.approx(best[2]))
    ratios = sorted(abs(g) / math.sqrt((best[1] + best[2] * d) ** 2 + v) for g, d, v in rows)
    assert found.factor == pytest.approx(max(ratios[math.ceil(8 * 0.7) - 1], norm.ppf(0.85)))
    assert (found.confidence, found.level, found.n_environments) == (0.8, 0.7, 7)
    assert measure_spread(environments, confidence=0.8, level=0.99).factor >= norm.ppf(0.995) - 1e-12


def test_class_mix_is_the_likeliest_one_with_its_curvature(monkeypatch: pytest.MonkeyPatch) -> None:
    source = np.array([0.5, 0.3, 0.2])
    (p, _), (calibration, _) = drawn(300, 3), drawn(400, 4)
    with monkeypatch.context() as patch:
        patch.setattr(mix, "_source_variance", lambda ratio, *_: np.zeros(ratio.shape[1]))
        found = class_mix(p, source, calibration)
    factors = mix._factors(calibration.probs.numpy(), source)
    batch, known = (mix._scaled(each.probs.numpy(), factors) for each in (p, calibration))
    np.testing.assert_allclose(known.mean(0), source, atol=1e-8)
    ratio = batch / source

    def loss(v: np.ndarray) -> float:
        share = np.array([v[0], v[1], 1 - v[0] - v[1]])
        return -float(np.log(np.maximum(ratio @ share, 1e-300)).sum())

    best = minimize(
        loss, found.share[:2] + 0.01, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12}
    )
    np.testing.assert_allclose(found.share[:2], best.x, atol=1e-5)
    h, H = 1e-4, np.zeros((2, 2))
    for i in range(2):
        for j in range(2):
            e, f = np.eye(2)[i] * h, np.eye(2)[j] * h
            x = found.share[:2]
            H[i, j] = (loss(x + e + f) - loss(x + e - f) - loss(x - e + f) + loss(x - e - f)) / (4 * h * h)
    S = np.linalg.inv(H)
    third = S.sum()
    np.testing.assert_allclose(found.std, np.sqrt([S[0, 0], S[1, 1], third]), rtol=1e-3)
    pooled = np.cov(np.concatenate([batch, known])[:, :2].T, bias=True) * (1 / 300 + 1 / 400)
    difference = (batch.mean(0) - source)[:2]
    assert found.p_value == pytest.approx(
        chi2.sf(difference @ np.linalg.inv(pooled) @ difference, 2), rel=1e-6
    )
    assert (class_mix(p, source, calibration).std > found.std).all(), "calibration samples err too"
    low, high = found.interval(0.8)
    np.testing.assert_allclose(high - low, 2 * norm.ppf(0.9) * found.std)
    assert (found.n, found.converged) == (300, True)
    monkeypatch.setattr(mix, "STEPS", 1)
    assert not class_mix(p, source, calibration).converged
    largest = int(np.argmax(np.abs(found.share - source)))
    assert f"class {largest}, from {source[largest]:.1%} to {found.share[largest]:.1%}" in str(found)


def test_a_class_that_does_not_occur_any_more() -> None:
    p, _ = drawn(20, 4)
    adapted = adapt(p, [0.5, 0.5, 0.0], [0.5, 0.3, 0.2])
    assert float(adapted.probs[:, 2].abs().max()) == 0.0
    np.testing.assert_allclose(adapted.probs.sum(1), 1.0)
    assert adapted.std is adapted.lower is adapted.upper is None


def test_a_measured_factor_is_stretched_at_other_levels() -> None:
    """Without a level of its own it belongs to 90 %."""
    p, _ = drawn(50, 0)
    c = p.confidence.numpy()
    wide = Spread(0.02, 0.3, 0.9, factor=3.0)
    one = math.sqrt((c * (1 - c)).sum() / 50**2 + wide.at(float(c.mean())) ** 2)
    assert accuracy(p, wide).lower == pytest.approx(c.mean() - 3.0 * one)
    assert accuracy(p, wide, 0.8).lower == pytest.approx(
        c.mean() - 3.0 * norm.ppf(0.9) / norm.ppf(0.95) * one
    )
    assert wide.n_environments == 0, "nothing was measured"
    assert accuracy(p, Spread(0.02, 0.3, 0.9)).lower == pytest.approx(c.mean() - 1.645 * one, abs=1e-4)


def test_a_mix_that_did_not_move_at_all() -> None:
    """Two kinds of samples in the proportion in which the source would give them."""
    probs = torch.tensor([[0.8, 0.2]] * 30 + [[0.2, 0.8]] * 30, dtype=torch.float64)
    prediction = Prediction(probs.argmax(1), probs, probs.amax(1))
    found = class_mix(prediction, [0.5, 0.5], prediction)
    np.testing.assert_allclose(found.share, [0.5, 0.5])
    assert found.p_value == pytest.approx(1.0)


def test_a_mix_stays_between_nothing_and_everything_and_is_put_in_words() -> None:
    source = np.array([0.5, 0.5])
    mix = ClassMix(np.array([0.98, 0.02]), np.array([0.05, 0.05]), source, 0.011, 40, True)
    low, high = mix.interval()
    half = norm.ppf(0.95) * 0.05
    np.testing.assert_allclose(low, [0.98 - half, 0.0])
    np.testing.assert_allclose(high, [1.0, 0.02 + half])
    assert "has not visibly changed (p = 0.011, 40 samples)" in str(mix)
    assert "has changed" in str(ClassMix(mix.share, mix.std, source, 0.0099, 40, True))


def test_a_certain_confidence_stays_certain_under_another_mix() -> None:
    probs = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    p = Prediction(torch.tensor([0]), probs, probs[:, 0], probs[:, 0] * 0.01, probs[:, 0] - 0.1, probs[:, 0])
    adapted = adapt(p, [0.25, 0.75], [0.5, 0.5])
    assert float(adapted.confidence[0]) == 1.0
    assert float(adapted.upper[0]) == pytest.approx(1.0)
    assert float(adapted.lower[0]) == pytest.approx(0.9), "the confidence did not move, nor do its ends"


def test_the_class_that_changed_most_is_named() -> None:
    share, source = np.array([0.5, 0.3, 0.2]), np.array([0.45, 0.05, 0.5])
    assert "most: class 2, from 50.0% to 20.0%" in str(ClassMix(share, 0 * share, source, 0.0, 40, True))


def test_factors_settle_for_every_class() -> None:
    """Class 0 is right from the first step on; the other two are not."""
    probs = np.array([[1.0, 0.0, 0.0]] * 10 + [[0.0, 0.7, 0.3]] * 5 + [[0.0, 0.4, 0.6]] * 5)
    source = np.array([0.5, 0.25, 0.25])
    np.testing.assert_allclose(_scaled(probs, _factors(probs, source)).mean(0), source, atol=1e-8)
