"""Likelihood, Brier, ranking and interval scores against scikit-learn, loops and special cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score, roc_curve

from salgp import metrics


def multiclass(n: int = 500, c: int = 5, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.ones(c), n), rng.integers(c, size=n)


def ranked(n: int = 300, decimals: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Scores with many ties."""
    rng = np.random.default_rng(0)
    s = rng.random(n).round(decimals)
    return s, (rng.random(n) < 0.3 + 0.6 * s).astype(float)


@pytest.mark.parametrize("c", [2, 5, 1000])
def test_nll_and_brier_equal_scikit_learn(c: int) -> None:
    probs, labels = multiclass(300, c)
    assert metrics.nll(probs, labels) == pytest.approx(
        log_loss(labels, probs, labels=np.arange(c)), rel=1e-12
    )
    theirs = brier_score_loss(labels, probs, labels=np.arange(c), scale_by_half=False)
    assert metrics.brier(probs, labels) == pytest.approx(theirs, rel=1e-12)


def test_scores_of_correctness_equal_scikit_learn() -> None:
    s, c = ranked()
    s = np.concatenate([s, [0.0, 1.0]])
    c = np.concatenate([c, [1.0, 0.0]])
    assert metrics.nll_correct(s, c) == pytest.approx(log_loss(c, s), rel=1e-9)
    assert metrics.brier_correct(s, c) == pytest.approx(brier_score_loss(c, s), rel=1e-12)


def test_unknown_classes_are_left_out_of_multiclass_scores() -> None:
    probs, labels = multiclass()
    mixed = labels.copy()
    mixed[::3] = -1
    for metric in (metrics.nll, metrics.brier, metrics.classwise_ece):
        assert metric(probs, mixed) == pytest.approx(metric(probs[mixed >= 0], labels[mixed >= 0]))
        with pytest.raises(ValueError, match="every label is -1"):
            metric(probs, np.full(len(labels), -1))


def test_nll_of_a_certain_error_is_finite() -> None:
    assert metrics.nll([[1.0, 0.0]], [1]) == pytest.approx(-np.log(np.finfo(float).eps))
    assert np.isfinite(metrics.nll_correct([0.0, 1.0], [1, 0]))


@pytest.mark.parametrize("scheme", ["width", "mass"])
def test_brier_decomposition_adds_up(scheme) -> None:
    rng = np.random.default_rng(0)
    s = rng.random(700)
    c = rng.random(700) < s**2
    parts = metrics.brier_decomposition(s, c, 10, scheme)
    assert parts.brier == pytest.approx(metrics.brier_correct(s, c), rel=1e-12)
    bins = metrics.reliability_bins(s, c, 10, scheme)
    assert parts.reliability == pytest.approx(np.nansum(bins.share * bins.gap**2))
    assert parts.resolution == pytest.approx(np.nansum(bins.share * (bins.accuracy - c.mean()) ** 2))


def test_brier_decomposition_of_discrete_forecasts_hides_nothing() -> None:
    s, c = ranked()
    assert metrics.brier_decomposition(s, c, 100).within_bin == pytest.approx(0, abs=1e-15)


def test_auroc_equals_scikit_learn_with_ties() -> None:
    s, c = ranked()
    assert metrics.auroc(s, c) == pytest.approx(roc_auc_score(c, s), abs=1e-12)
    assert metrics.ood_auroc(-s, 1 - c) == pytest.approx(roc_auc_score(1 - c, -s), abs=1e-12)


def test_auroc_equals_counting_pairs() -> None:
    s, c = ranked(60)
    pairs = [(a > b) + 0.5 * (a == b) for a in s[c == 1] for b in s[c == 0]]
    assert metrics.auroc(s, c) == pytest.approx(np.mean(pairs))


def test_fpr95_reads_the_roc_curve() -> None:
    rng = np.random.default_rng(0)
    novelty, is_ood = (
        np.concatenate([rng.normal(0, 1, 400), rng.normal(1.5, 1, 300)]),
        np.repeat([0, 1], [400, 300]),
    )
    false_rate, true_rate, _ = roc_curve(1 - is_ood, -novelty, drop_intermediate=False)
    assert metrics.fpr95(novelty, is_ood) == pytest.approx(false_rate[true_rate >= 0.95].min())


def test_risk_coverage_by_definition() -> None:
    rng = np.random.default_rng(0)
    s, c = rng.random(50), rng.integers(0, 2, 50)
    order = np.argsort(-s)
    by_hand = [np.mean(1 - c[order[:k]]) for k in range(1, 51)]
    curve = metrics.risk_coverage(s, c)
    assert curve.risk == pytest.approx(by_hand)
    assert curve.coverage[-1] == 1
    assert metrics.aurc(s, c) == pytest.approx(np.mean(by_hand))


def test_aurc_with_ties_is_the_mean_over_random_orders() -> None:
    s, c = ranked(40)
    rng = np.random.default_rng(1)
    areas = []
    for _ in range(4000):
        order = np.lexsort((rng.random(40), -s))
        areas.append(np.mean(np.cumsum(1 - c[order]) / np.arange(1, 41)))
    assert metrics.aurc(s, c) == pytest.approx(np.mean(areas), abs=4 * np.std(areas) / 60)
    assert metrics.aurc(s, c) == pytest.approx(metrics.risk_coverage(s, c).area, abs=1e-12)


@pytest.mark.parametrize("outcome", [0, 1])
def test_one_kind_only(outcome: int) -> None:
    s, c = [0.2, 0.6, 0.9], [outcome] * 3
    assert np.isnan(metrics.auroc(s, c))
    assert np.isnan(metrics.fpr95(s, c))
    assert metrics.aurc(s, c) == pytest.approx(1 - outcome)


def test_interval_ends_must_be_in_order() -> None:
    with pytest.raises(ValueError, match=r"row 1 it is 0.5 > 0.4"):
        metrics.interval_width([0.1, 0.5], [0.2, 0.4])


def test_mean_variance() -> None:
    assert metrics.mean_variance(torch.tensor([0.0, 0.2])) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="negative"):
        metrics.mean_variance([-0.1])
