"""Platt scaling and beta calibration."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch.nn.functional import softplus

from salgp import Features
from salgp.calibrators.scaling.toplabel import (
    BetaCalibration,
    PlattScaling,
    fit_logistic,
    platt_targets,
    top_label,
)


def drawn(n: int = 600, c: int = 4, temperature: float = 2.0, seed: int = 0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return Features(z), torch.multinomial(torch.softmax(z / temperature, 1), 1, generator=generator)[:, 0]


def test_log_odds_are_those_of_the_confidence() -> None:
    f, _ = drawn(50)
    torch.testing.assert_close(top_label(f).log_odds, torch.logit(f.confidence), atol=1e-9, rtol=1e-6)
    before = f.logits.clone()
    assert len(top_label(f).log_odds) == 50
    assert torch.equal(f.logits, before)


def test_platt_equals_sklearn() -> None:
    calibration = pytest.importorskip("sklearn.calibration")
    f, labels = drawn()
    u = top_label(f).log_odds.numpy()
    reference = calibration._SigmoidCalibration().fit(u, f.correct(labels).numpy().astype(int))
    ours = PlattScaling().fit(f, labels).predict(f).confidence.numpy()
    np.testing.assert_allclose(ours, reference.predict(u), atol=1e-4)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("ours", "theirs"), [(PlattScaling, "LogisticCalibration"), (BetaCalibration, "BetaCalibration")]
)
def test_close_to_netcal(ours: type, theirs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    scaling = pytest.importorskip("netcal.scaling")
    f, labels = drawn(2000)
    reference = getattr(scaling, theirs)(method="mle")
    reference.fit(f.confidence.numpy(), f.correct(labels).numpy().astype(int))
    expected = reference.transform(f.confidence.numpy())
    got = ours().fit(f, labels).predict(f).confidence.numpy()
    assert (
        np.abs(got - expected).max() < 0.005
    )  # it does not smooth the targets, and has a weak prior on the weights


def test_logistic_fit_equals_a_general_optimiser() -> None:
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(300, 3, generator=generator, dtype=torch.float64)
    t = (
        torch.rand(300, generator=generator) < torch.sigmoid(X @ torch.tensor([1.0, -1.0, 0.3]).double())
    ).double()

    def loss(w: np.ndarray) -> float:
        eta = X.numpy() @ w
        return float(np.mean(np.logaddexp(0, eta) - t.numpy() * eta))

    for lower in (None, torch.tensor([0.0, 0.0, -torch.inf]).double()):
        bounds = None if lower is None else [(0, None), (0, None), (None, None)]
        best = minimize(
            loss, np.zeros(3), bounds=bounds, method="L-BFGS-B", options={"ftol": 1e-14, "gtol": 1e-9}
        )
        found = fit_logistic(X, t, lower)
        np.testing.assert_allclose(found.numpy(), best.x, atol=1e-4)
        assert loss(found.numpy()) <= best.fun + 1e-9


def test_bounded_fits_end_where_no_free_weight_has_a_slope() -> None:
    g = torch.Generator().manual_seed(0)
    lower = torch.tensor([0.0, 0.0, -torch.inf], dtype=torch.float64)
    for i in range(200):
        size = 10.0 ** float(4 * torch.rand(1, generator=g) - 2)
        u = (size * torch.randn(20 + i, generator=g, dtype=torch.float64)).clamp(-87, 87)
        correct = (u > u.median()) == bool(i % 2) if i % 3 else torch.rand(20 + i, generator=g) < 0.7
        X, t = torch.stack([-softplus(-u), softplus(u), torch.ones_like(u)], dim=1), platt_targets(correct)
        w = fit_logistic(X, t, lower)
        scale = X.abs().amax(0)
        slope = X.T @ (torch.sigmoid(X @ w) - t) / len(t) / scale + 1e-9 * scale * w
        assert bool((w >= lower).all())
        assert float(torch.where(w > lower, slope.abs(), (-slope).clamp_min(0)).max()) < 1e-9


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_large_and_small_scores_give_the_same_fit(scale: float) -> None:
    f, labels = drawn(200)
    u = top_label(f).log_odds
    X = torch.stack([u * scale, torch.ones_like(u)], dim=1)
    plain = fit_logistic(torch.stack([u, torch.ones_like(u)], dim=1), platt_targets(f.correct(labels)))
    found = fit_logistic(X, platt_targets(f.correct(labels)))
    torch.testing.assert_close(found * torch.tensor([scale, 1.0]).double(), plain, rtol=1e-5, atol=1e-7)


def test_all_correct_gives_laplace() -> None:
    f, _ = drawn(98)
    for method in (PlattScaling(), BetaCalibration()):
        torch.testing.assert_close(
            method.fit(f, f.label).predict(f).confidence,
            torch.full((98,), 0.99, dtype=torch.float64),
            atol=1e-4,
            rtol=0,
        )


def test_beta_is_monotone_and_holds_the_identity() -> None:
    f, labels = drawn(4000, temperature=1.0)
    beta = BetaCalibration().fit(f, labels)
    assert beta.a_ >= 0
    assert beta.b_ >= 0
    order = f.confidence.argsort()
    assert bool((beta.predict(f).confidence[order].diff() >= -1e-12).all())
    assert float((beta.predict(f).confidence - f.confidence).abs().mean()) < 0.02
    wrong_way = torch.where(f.confidence > f.confidence.median(), (f.label + 1) % 4, f.label)
    backwards = BetaCalibration().fit(f, wrong_way)
    assert (backwards.a_, backwards.b_) == (0.0, 0.0)
