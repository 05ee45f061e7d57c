"""Gaussian and Bernoulli sites: tempering, the logistic bound against quadrature, and its monotone
updates.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.gp.likelihood import bernoulli_sites, gaussian_sites, sigmoid_moments
from salgp.gp.regression import exact_log_evidence

CORRECT = torch.tensor([1.0, 0.0], dtype=torch.float64)


def gauss_hermite(dimensions: int, points: int = 80) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    x, w = torch.as_tensor(nodes), torch.as_tensor(weights / weights.sum())
    return torch.cartesian_prod(*[x] * dimensions).reshape(-1, dimensions), torch.cartesian_prod(
        *[w] * dimensions
    ).reshape(-1, dimensions).prod(1)


def true_log_evidence(K: Tensor, mean: Tensor, correct: Tensor) -> float:
    x, w = gauss_hermite(len(K))
    f = mean + x @ torch.linalg.cholesky(K).T
    return float(torch.logsumexp(torch.nn.functional.logsigmoid((2 * correct - 1) * f).sum(1) + w.log(), 0))


def bound(
    K: Tensor, prior_mean: Tensor, correct: Tensor, mean: Tensor, variance: Tensor
) -> tuple[float, Tensor, Tensor]:
    """Value of the bound with sites around (mean, variance), and the posterior these sites lead to."""
    sites = bernoulli_sites(correct, mean, variance)
    value = exact_log_evidence(K, sites.target - prior_mean, sites.noise) + sites.constant
    gain = K @ torch.linalg.inv(K + sites.noise.diag())
    return float(value), prior_mean + gain @ (sites.target - prior_mean), (K - gain @ K).diagonal()


@pytest.mark.parametrize("size", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("prior_mean", [-1.0, 0.0, 2.0])
@pytest.mark.parametrize("n", [1, 2])
def test_bernoulli_bound_rises_and_stays_below_the_evidence(size: float, prior_mean: float, n: int) -> None:
    K = size * torch.tensor([[1.0, 0.6], [0.6, 1.5]], dtype=torch.float64)[:n, :n]
    m, correct = torch.full((n,), prior_mean, dtype=torch.float64), CORRECT[:n]
    truth = true_log_evidence(K, m, correct)
    mean, variance, values = m, K.diagonal(), []
    for _ in range(40):
        value, mean, variance = bound(K, m, correct, mean, variance)
        values.append(value)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(values))
    assert values[-1] <= truth + 1e-9
    assert values[-1] == pytest.approx(truth, abs=0.12 * n * max(1.0, size**0.5))
    assert values[-1] - values[-2] < 1e-6


def test_bernoulli_bound_holds_at_any_sites() -> None:
    K = torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=torch.float64)
    m = torch.tensor([0.3, -0.7], dtype=torch.float64)
    truth = true_log_evidence(K, m, CORRECT)
    for mean in (-4.0, 0.0, 3.0):
        for variance in (0.0, 0.1, 10.0):
            assert (
                bound(
                    K,
                    m,
                    CORRECT,
                    torch.full((2,), mean, dtype=torch.float64),
                    torch.full((2,), variance, dtype=torch.float64),
                )[0]
                <= truth
            )


@pytest.mark.parametrize("f", [-8.0, -0.5, 0.0, 1e-9, 3.0])
@pytest.mark.parametrize("weight", [1.0, 0.2])
def test_sites_touch_the_likelihood_where_they_are_made(f: float, weight: float) -> None:
    """At ``f = +-xi`` the bound is tight: the site equals the (tempered) log likelihood."""
    mean = torch.tensor([f, f], dtype=torch.float64)
    sites = bernoulli_sites(CORRECT, mean, torch.zeros_like(mean), weight)
    site = torch.distributions.Normal(mean, sites.noise.sqrt()).log_prob(sites.target).sum() + sites.constant
    expected = weight * torch.nn.functional.logsigmoid((2 * CORRECT - 1) * mean).sum()
    torch.testing.assert_close(site, expected, rtol=1e-9, atol=1e-9)


def test_tempered_gaussian_site_is_the_density_to_that_power() -> None:
    y, f = torch.tensor([0.3, -0.2], dtype=torch.float64), torch.tensor([0.1, 0.4], dtype=torch.float64)
    log_noise = torch.tensor(-1.3, dtype=torch.float64)
    weight = 0.2
    sites = gaussian_sites(y, log_noise, weight)
    site = torch.distributions.Normal(f, sites.noise.sqrt()).log_prob(y).sum() + sites.constant
    expected = (weight * torch.distributions.Normal(f, (0.5 * log_noise).exp()).log_prob(y)).sum()
    torch.testing.assert_close(site, expected, rtol=1e-12, atol=1e-12)


def test_untempered_gaussian_site_has_no_constant() -> None:
    assert float(gaussian_sites(CORRECT, torch.tensor(-1.0, dtype=torch.float64)).constant) == pytest.approx(
        0.0, abs=1e-15
    )


@pytest.mark.parametrize("variance", [0.0, 0.3, 4.0])
def test_sigmoid_moments_match_dense_quadrature(variance: float) -> None:
    mean = torch.tensor([-3.0, 0.0, 1.0], dtype=torch.float64)
    first, std = sigmoid_moments(mean, torch.full_like(mean, variance))
    grid = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-0.5 * grid.square())
    values = torch.sigmoid(mean[:, None] + variance**0.5 * grid)
    expected = values @ density / density.sum()
    spread = ((values - expected[:, None]).square() @ density / density.sum()).sqrt()
    torch.testing.assert_close(first, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(std, spread, rtol=0, atol=1e-5)


def test_sigmoid_moments_stay_inside_at_the_extremes() -> None:
    mean = torch.tensor([-1e4, 1e4, 0.0], dtype=torch.float64)
    first, std = sigmoid_moments(mean, torch.tensor([1.0, 1.0, 1e8], dtype=torch.float64))
    assert bool(((first >= 0) & (first <= 1 + 1e-12)).all())
    assert float(std[2]) == pytest.approx(0.5, abs=0.01)
    assert bool(torch.isfinite(std).all())
