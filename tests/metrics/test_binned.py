"""Binned and smooth calibration errors against independent implementations, double loops and
special cases.
"""

from __future__ import annotations

import itertools
import warnings

import numpy as np
import pytest
import torch

from salgp import metrics


def sample(n: int = 3000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Overconfident: accuracy is the confidence squared."""
    rng = np.random.default_rng(seed)
    confidence = rng.beta(3, 1.2, n)
    return confidence, (rng.random(n) < confidence**2).astype(float)


def loop_gaps(
    confidence: np.ndarray, correct: np.ndarray, edges: np.ndarray
) -> list[tuple[int, float, float]]:
    """(count, gap, accuracy) of each bin that holds samples, by the definition."""
    out = []
    for k, (a, b) in enumerate(itertools.pairwise(edges)):
        inside = [
            (s, c) for s, c in zip(confidence, correct, strict=True) if (a < s <= b) or (k == 0 and s == 0)
        ]
        if inside:
            s, c = np.mean(inside, axis=0)
            out.append((len(inside), s - c, c))
    return out


@pytest.mark.parametrize("n_bins", [1, 7, 15])
def test_ece_and_mce_equal_the_double_loop(n_bins: int) -> None:
    s, c = sample(400)
    gaps = loop_gaps(s, c, np.linspace(0, 1, n_bins + 1))
    assert metrics.ece(s, c, n_bins) == pytest.approx(sum(m * abs(g) for m, g, _ in gaps) / len(s), abs=1e-12)
    assert metrics.mce(s, c, n_bins) == pytest.approx(max(abs(g) for _, g, _ in gaps), abs=1e-12)


def test_debiased_l2_equals_the_double_loop() -> None:
    s, c = sample(400)
    gaps = loop_gaps(s, c, np.linspace(0, 1, 16))
    squared = sum(m * (g**2 - (a * (1 - a) / (m - 1) if m > 1 else 0)) for m, g, a in gaps) / len(s)
    assert metrics.debiased_ece(s, c, norm="l2") == pytest.approx(squared**0.5, abs=1e-12)


def test_debiased_l1_is_the_limit_of_random_redraws() -> None:
    s, c = sample(400)
    gaps = loop_gaps(s, c, np.linspace(0, 1, 16))
    m, g, a = map(np.array, zip(*gaps, strict=True))
    redrawn = (
        np.abs(g + np.sqrt(a * (1 - a) / m) * np.random.default_rng(1).normal(size=(200_000, len(g))))
        @ m
        / len(s)
    )
    plain = metrics.ece(s, c)
    assert metrics.debiased_ece(s, c) == pytest.approx(2 * plain - redrawn.mean(), abs=2e-4)


def test_debiasing_takes_most_of_the_bias_of_calibrated_data() -> None:
    plain, debiased = [], []
    for seed in range(50):
        rng = np.random.default_rng(seed)
        s = rng.random(500)
        c = rng.random(500) < s
        plain.append(metrics.ece(s, c))
        debiased.append(metrics.debiased_ece(s, c))
    assert np.mean(debiased) < 0.7 * np.mean(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ece_agrees_with_torchmetrics_away_from_edges(dtype: torch.dtype) -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    s, c = (torch.as_tensor(x) for x in sample())
    s = s.to(dtype)
    for norm, ours in (("l1", metrics.ece), ("max", metrics.mce)):
        theirs = binary_calibration_error(s, c.int(), n_bins=15, norm=norm).item()
        assert ours(s, c) == pytest.approx(theirs, abs=1e-12 if dtype == torch.float64 else 2e-6)


def test_ece_agrees_with_torchmetrics_multiclass() -> None:
    from torchmetrics.functional.classification import multiclass_calibration_error

    probs = torch.softmax(
        torch.randn(2000, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2, dim=1
    )
    labels = torch.randint(7, (2000,), generator=torch.Generator().manual_seed(1))
    confidence, label = probs.max(dim=1)
    theirs = multiclass_calibration_error(probs, labels, 7, n_bins=10).item()
    assert metrics.ece(confidence, label == labels, 10) == pytest.approx(
        theirs, abs=2e-6
    )  # theirs is in single precision


def test_confidence_one_shares_the_last_bin_where_torchmetrics_opens_another() -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    s, c = torch.tensor([1.0, 0.95], dtype=torch.float64), torch.tensor([0, 1])
    assert metrics.ece(s, c, 10) == pytest.approx(abs(1.95 - 1) / 2)
    assert binary_calibration_error(s, c, n_bins=10).item() == pytest.approx((1.0 + 0.05) / 2)


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_agrees_with_netcal(scheme: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        netcal = pytest.importorskip("netcal.metrics")
    s, c = sample(3000)
    equal = scheme == "width"
    assert metrics.ece(s, c, 15, scheme) == pytest.approx(
        netcal.ECE(15, equal_intervals=equal, detection=True).measure(s[:, None], c), abs=1e-10
    )
    assert metrics.mce(s, c, 15, scheme) == pytest.approx(
        netcal.MCE(15, equal_intervals=equal, detection=True).measure(s[:, None], c), abs=1e-10
    )
    if not equal:
        assert metrics.adaptive_ece(s, c) == pytest.approx(
            netcal.ACE(15, equal_intervals=False, detection=True).measure(s[:, None], c), abs=1e-10
        )


def test_classwise_is_the_mean_of_one_against_rest() -> None:
    from torchmetrics.functional.classification import binary_calibration_error

    rng = np.random.default_rng(0)
    probs, labels = rng.dirichlet(np.ones(4), 800), rng.integers(-1, 4, 800)
    known = labels >= 0
    each = [
        binary_calibration_error(
            torch.tensor(probs[known, k]), torch.tensor(labels[known] == k).int(), n_bins=15
        ).item()
        for k in range(4)
    ]
    assert metrics.classwise_ece(probs, labels) == pytest.approx(np.mean(each), abs=1e-12)


def test_bins_are_right_closed_and_hold_both_ends() -> None:
    bins = metrics.reliability_bins([0.0, 0.1, 0.2, 0.2000001, 0.999, 1.0], [0, 0, 1, 1, 1, 0], n_bins=5)
    assert bins.count.tolist() == [3, 1, 0, 0, 2]
    assert np.isnan(bins.accuracy[2])
    assert bins.accuracy[[0, 1, 4]] == pytest.approx([1 / 3, 1, 0.5])
    assert bins.share.sum() == pytest.approx(1)
    assert bins.gap[4] == pytest.approx(0.4995)


def test_equal_mass_bins_hold_equally_many_and_keep_ties_together() -> None:
    s, c = sample(3000)
    assert set(metrics.reliability_bins(s, c, 15, "mass").count) == {200}
    tied = metrics.reliability_bins([0.3] * 50 + [0.8] * 50, [1] * 100, 15, "mass")
    assert tied.count.tolist() == [50, 50]


@pytest.mark.parametrize(
    "metric", [metrics.ece, metrics.mce, metrics.adaptive_ece, metrics.debiased_ece, metrics.smooth_ece]
)
def test_order_of_samples_never_matters(metric) -> None:
    s, c = sample(500)
    s = s.round(2)  # many ties
    order = np.random.default_rng(3).permutation(len(s))
    assert metric(s, c) == pytest.approx(metric(s[order], c[order]), abs=1e-12)


def test_smooth_ece_agrees_with_relplot() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        relplot = pytest.importorskip("relplot")
    for seed in range(3):
        s, c = sample(2000, seed)
        assert metrics.smooth_ece(s, c) == pytest.approx(relplot.smECE(s, c), abs=1.5e-3)
        calibrated = (np.random.default_rng(seed).random(2000) < s).astype(float)
        assert metrics.smooth_ece(s, calibrated) == pytest.approx(relplot.smECE(s, calibrated), abs=2e-3)


def test_smooth_ece_solves_its_equation_by_quadrature() -> None:
    """The reflected kernel written out as a sum of mirror images, the integral as a fine Riemann sum."""
    s, c = sample(150)
    sigma = metrics.smooth_ece(s, c)
    t = (np.arange(4000) + 0.5) / 4000
    images = np.concatenate([s + 2 * k for k in range(-3, 4)] + [-s + 2 * k for k in range(-3, 4)])
    kernel = np.exp(-0.5 * ((t[:, None] - images) / sigma) ** 2) / (sigma * np.sqrt(2 * np.pi))
    smoothed = kernel @ np.tile(c - s, 14) / len(s)
    assert np.abs(smoothed).mean() == pytest.approx(sigma, abs=1e-5)


def test_smooth_ece_of_perfect_predictions_is_zero() -> None:
    assert metrics.smooth_ece([1.0, 0.0, 1.0], [1, 0, 1]) == 0.0


def test_one_gap_everywhere_is_every_error() -> None:
    s, c = np.full(10, 0.8), np.array([1] * 5 + [0] * 5)
    for metric in (metrics.ece, metrics.mce, metrics.adaptive_ece, metrics.smooth_ece):
        assert metric(s, c) == pytest.approx(0.3, abs=1e-6)


def test_bins_without_samples_are_counted_also_at_the_end() -> None:
    bins = metrics.reliability_bins([0.1, 0.3, 0.3], [0, 1, 0], n_bins=4)
    assert bins.count.tolist() == [1, 2, 0, 0]
    np.testing.assert_allclose(bins.confidence, [0.1, 0.3, np.nan, np.nan])
    np.testing.assert_allclose(bins.accuracy, [0.0, 0.5, np.nan, np.nan])
    np.testing.assert_allclose(bins.edges, [0, 0.25, 0.5, 0.75, 1])


@pytest.mark.parametrize("n", [2, 3, 5, 8])
@pytest.mark.parametrize("n_bins", [1, 2, 3, 5, 12])
def test_equal_mass_edges_of_few_samples_by_the_definition(n: int, n_bins: int) -> None:
    """Bin b ends at sample floor(b n / B) in order; edges that coincide, or hold nothing, are one."""
    s = np.random.default_rng(n).permutation(np.linspace(0.1, 0.9, n))
    ends = {sorted(s)[b * n // n_bins - 1] for b in range(1, n_bins) if b * n // n_bins >= 1}
    expected = [0.0, *sorted(e for e in ends if e < s.max()), 1.0]
    np.testing.assert_allclose(metrics.reliability_bins(s, s > 0.5, n_bins, "mass").edges, expected)


def test_smooth_ece_is_the_same_from_both_ends() -> None:
    """To be right with confidence s is to be wrong with 1 - s; the grid favours no side."""
    s, c = sample(300)
    s[:3] = 0.0, 1.0, 1.0
    assert metrics.smooth_ece(s, c) == pytest.approx(metrics.smooth_ece(1 - s, 1 - c), abs=1e-9)
    assert metrics.smooth_ece(s, c) > 0.05
