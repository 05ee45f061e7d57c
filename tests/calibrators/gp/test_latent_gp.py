"""Latent Gaussian process calibration."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators.gp import latent_gp
from salgp.calibrators.gp.latent_gp import (
    GPCalibration,
    _basis,
    _chunks,
    _cubature,
    _objective,
    _posterior,
)
from salgp.calibrators.scaling.temperature import TemperatureScaling
from salgp.metrics import ece, nll


def drawn(n: int, c: int, bend: float, seed: int = 0) -> tuple[Features, torch.Tensor]:
    """Labels from ``softmax(g(z))`` with a bent ``g``."""
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    g = z + bend * torch.relu(z)
    return Features(z), torch.multinomial(torch.softmax(g, 1), 1, generator=generator)[:, 0]


def test_derivatives_of_the_objective() -> None:
    f, labels = drawn(20, 3, 0.0)
    basis = _basis(torch.linspace(-5, 5, 4, dtype=torch.float64), 1.3, 3.0)
    v = torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def value(x: torch.Tensor) -> torch.Tensor:
        log_p = torch.log_softmax(f.logits + basis(f.logits) @ x, dim=1)
        return log_p.gather(1, labels[:, None]).sum() - 0.5 * x @ x

    got, gradient, curvature, slack = _objective(_chunks(f.logits, labels, basis), basis.amplitude, v)
    assert got == pytest.approx(float(value(v)))
    torch.testing.assert_close(gradient, torch.autograd.functional.jacobian(value, v))
    torch.testing.assert_close(curvature, -torch.autograd.functional.hessian(value, v))
    assert slack >= 0


def test_basis_reproduces_the_kernel_at_the_inducing_points() -> None:
    u = torch.linspace(-3, 3, 6, dtype=torch.float64)
    A = _basis(u, 2.0, 2.0)(u)
    K = 4 * torch.exp(-0.5 * ((u[:, None] - u) / 2) ** 2)
    torch.testing.assert_close(A @ A.T, K, atol=1e-4, rtol=0)


def test_posterior_is_the_optimum_and_keeps_few_rows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    f, labels = drawn(200, 3, -0.5)
    basis = _basis(torch.linspace(-6, 6, 8, dtype=torch.float64), 1.0, 3.0)
    kept = _posterior(f.logits, labels, basis)
    _, gradient, *_ = _objective(_chunks(f.logits, labels, basis), basis.amplitude, kept.mean)
    assert float(gradient.norm()) < 1e-2
    monkeypatch.setattr(latent_gp, "SEARCH_ELEMENTS", 1)
    again = _posterior(f.logits, labels, basis)
    torch.testing.assert_close(again.mean, kept.mean)
    assert again.bound == pytest.approx(kept.bound)


def test_bound_is_below_the_evidence_by_sampling() -> None:
    f, labels = drawn(30, 3, -0.5)
    basis = _basis(torch.linspace(-6, 6, 5, dtype=torch.float64), 0.5, 4.0)
    found = _posterior(f.logits, labels, basis)
    v = torch.randn(20_000, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_p = torch.log_softmax(f.logits[:, :, None] + basis(f.logits) @ v.T, dim=1)
    log_likelihood = log_p.gather(1, labels[:, None, None].expand(-1, 1, len(v))).sum(dim=(0, 1))
    evidence = float(torch.logsumexp(log_likelihood, 0) - np.log(len(v)))
    assert evidence - 1.0 < found.bound < evidence + 0.2  # second order, so not strictly a bound


def test_cubature_points_have_the_moments() -> None:
    A = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    cov, mean = A @ A.T + torch.eye(4), torch.arange(4).double()
    points = _cubature(mean, cov)
    torch.testing.assert_close(points.mean(dim=0), mean)
    torch.testing.assert_close((points - mean).T @ (points - mean) / len(points), cov)


def test_beats_temperature_where_the_map_is_bent() -> None:
    f, labels = drawn(1500, 4, -0.8)
    new, truth = drawn(3000, 4, -0.8, seed=1)
    gp, ts = (m.fit(f, labels).predict(new) for m in (GPCalibration(), TemperatureScaling()))
    best = nll(torch.softmax(new.logits - 0.8 * torch.relu(new.logits), 1), truth)
    assert nll(gp.probs, truth) < nll(ts.probs, truth) - 0.005
    assert nll(gp.probs, truth) < best + 0.01


@pytest.mark.parametrize("scale", [1e-6, 0.01, 50.0, 1000.0, 1e6])
def test_the_scale_of_the_logits_does_not_matter(scale: float) -> None:
    """They are divided by their temperature where the prior, which is in logits, would not suit them."""
    f, labels = drawn(400, 4, -0.6)
    new, truth = drawn(2000, 4, -0.6, seed=1)
    plain = GPCalibration().fit(f, labels)
    scaled = GPCalibration().fit(Features(scale * f.logits), labels)
    assert plain.scale_ == 1.0
    assert scaled.scale_ == pytest.approx(1.851 * scale, rel=1e-3)  # temperature scaling's of these logits
    found = scaled.predict(Features(scale * new.logits)).confidence
    assert ece(found, new.label == truth) < 0.02  # .36 for logits times 1,000 as they are
    other = GPCalibration().fit(Features(100 * f.logits), labels).predict(Features(100 * new.logits))
    torch.testing.assert_close(found, other.confidence, atol=1e-6, rtol=0)


def test_std_shrinks_with_data() -> None:
    few, many = (GPCalibration().fit(*drawn(n, 3, -0.8)) for n in (60, 3000))
    new = drawn(200, 3, 0.0, seed=2)[0]
    assert float(few.predict(new).std.mean()) > 2 * float(many.predict(new).std.mean())


def test_too_few_inducing_points_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        GPCalibration(n_inducing=1).fit(*drawn(20, 3, 0.0))
