"""Weighted regression: against scikit-learn and dense formulas, the inducing bound, greedy rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from posteriors import joint
from torch import Tensor

from salgp.gp.covariance import Index, Stationary, gaps
from salgp.gp.kernels import Rows
from salgp.gp.regression import (
    condition_exact,
    condition_inducing,
    exact_log_evidence,
    inducing_log_evidence,
    inducing_rows,
    statistics,
)

G = torch.Generator().manual_seed(1)
N = 18
X = torch.randn(N, 2, generator=G, dtype=torch.float64)
Y = torch.sin(2.0 * X[:, 0]) + 0.1 * torch.randn(N, generator=G, dtype=torch.float64)
NOISE = 0.05 + 0.1 * torch.rand(N, generator=G, dtype=torch.float64)
ROWS = Rows({"x": X}, {"layer": torch.arange(N) % 3})
NEW = Rows(
    {"x": torch.randn(5, 2, generator=G, dtype=torch.float64)}, {"layer": torch.tensor([0, 1, 2, -1, 0])}
)
COVARIANCE = Stationary("x") + Index("layer", 3)
THETA = {
    "x.log_lengthscale": torch.tensor(0.1, dtype=torch.float64),
    "x.log_variance": torch.tensor(-0.2, dtype=torch.float64),
    "layer.log_shared": torch.tensor(-1.5, dtype=torch.float64),
    "layer.log_own": torch.tensor([-2.0, -1.0, -3.0], dtype=torch.float64),
}
K = COVARIANCE(THETA, gaps(ROWS, ROWS, COVARIANCE))


def sums_for(chosen: Tensor) -> tuple[Tensor, object]:
    return K[chosen][:, chosen], statistics(K[chosen], K.diagonal(), Y, NOISE)


def test_evidence_is_the_multivariate_normal_density() -> None:
    expected = torch.distributions.MultivariateNormal(
        torch.zeros(N, dtype=torch.float64), K + NOISE.diag()
    ).log_prob(Y)
    torch.testing.assert_close(exact_log_evidence(K, Y, NOISE), expected, rtol=1e-12, atol=0)


def test_posterior_matches_scikit_learn() -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern

    plain = Stationary("x")
    kernel = ConstantKernel(math.exp(-0.2), "fixed") * Matern(math.exp(0.1), "fixed", nu=2.5)
    reference = GaussianProcessRegressor(kernel, alpha=NOISE.numpy(), optimizer=None).fit(
        X.numpy(), Y.numpy()
    )
    mean, covariance = reference.predict(NEW.blocks["x"].numpy(), return_cov=True)
    posterior = condition_exact(plain, THETA, ROWS, Y, NOISE)
    ours = joint(posterior, NEW)
    torch.testing.assert_close(ours[0], torch.as_tensor(mean), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(ours[1], torch.as_tensor(covariance), rtol=1e-8, atol=1e-10)
    evidence = exact_log_evidence(plain(THETA, gaps(ROWS, ROWS, plain)), Y, NOISE)
    assert float(evidence) == pytest.approx(reference.log_marginal_likelihood(), rel=1e-10)


def test_joint_agrees_with_single_rows_and_is_positive() -> None:
    posterior = condition_exact(COVARIANCE, THETA, ROWS, Y, NOISE)
    mean, variance = posterior(NEW)
    joint_mean, covariance = joint(posterior, NEW)
    torch.testing.assert_close(mean, joint_mean)
    torch.testing.assert_close(variance, covariance.diagonal(), rtol=1e-9, atol=1e-12)
    assert float(torch.linalg.eigvalsh(covariance)[0]) > -1e-10


def test_evidence_gradients() -> None:
    def value(root: Tensor, y: Tensor, noise: Tensor) -> Tensor:
        return exact_log_evidence(root @ root.T, y, noise)

    root = torch.randn(5, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        value,
        (
            root.requires_grad_(True),
            Y[:5].clone().requires_grad_(True),
            NOISE[:5].clone().requires_grad_(True),
        ),
    )


def test_inducing_bound_gradients() -> None:
    def value(log_lengthscale: Tensor, log_own: Tensor, noise: Tensor) -> Tensor:
        theta = {**THETA, "x.log_lengthscale": log_lengthscale, "layer.log_own": log_own}
        few = ROWS[:4]
        prior = COVARIANCE(theta, gaps(ROWS, ROWS, COVARIANCE)).diagonal()
        sums = statistics(COVARIANCE(theta, gaps(few, ROWS, COVARIANCE)), prior, Y, noise)
        return inducing_log_evidence(COVARIANCE(theta, gaps(few, few, COVARIANCE)), sums)

    inputs = (THETA["x.log_lengthscale"], THETA["layer.log_own"], NOISE)
    assert torch.autograd.gradcheck(value, tuple(x.clone().requires_grad_(True) for x in inputs))


def test_inducing_bound_is_the_formula_and_rises_to_the_evidence() -> None:
    exact = float(exact_log_evidence(K, Y, NOISE))
    values = []
    for m in (2, 5, 10, N):
        chosen = inducing_rows(COVARIANCE, THETA, ROWS, m)
        Kuu, sums = sums_for(chosen)
        bound = float(inducing_log_evidence(Kuu, sums))  # type: ignore[arg-type]
        Q = K[:, chosen] @ torch.linalg.solve(Kuu, K[chosen])
        density = torch.distributions.MultivariateNormal(
            torch.zeros(N, dtype=torch.float64), Q + NOISE.diag()
        ).log_prob(Y)
        assert bound == pytest.approx(float(density - 0.5 * ((K - Q).diagonal() / NOISE).sum()), rel=1e-5)
        values.append(bound)
    assert values == sorted(values)
    assert values[-1] <= exact + 1e-6
    assert values[-1] == pytest.approx(exact, rel=1e-6)


def test_inducing_posterior_is_the_formula() -> None:
    chosen = inducing_rows(COVARIANCE, THETA, ROWS, 6)
    Kuu, sums = sums_for(chosen)
    inducing = ROWS[chosen]
    mean, variance = condition_inducing(COVARIANCE, THETA, inducing, sums)(NEW)  # type: ignore[arg-type]
    kus = COVARIANCE(THETA, gaps(inducing, NEW, COVARIANCE))
    S = torch.linalg.inv(Kuu + (K[chosen] / NOISE) @ K[chosen].T)
    torch.testing.assert_close(mean, kus.T @ S @ ((K[chosen] / NOISE) @ Y), rtol=1e-5, atol=1e-7)
    prior = condition_exact(COVARIANCE, THETA, ROWS, Y, NOISE).prior_variance(NEW)
    expected = prior - (kus * torch.linalg.solve(Kuu, kus)).sum(0) + (kus * (S @ kus)).sum(0)
    torch.testing.assert_close(variance, expected, rtol=1e-5, atol=1e-7)


def test_greedy_rows_are_those_of_a_plain_pivoted_cholesky() -> None:
    left, factor, expected = K.diagonal().clone(), torch.zeros(0, N, dtype=torch.float64), []
    for _ in range(10):
        best = int(left.argmax())
        direction = (K[best] - factor[:, best] @ factor) / left[best].sqrt()
        factor = torch.cat([factor, direction[None]])
        left = (left - direction.square()).clamp_min(0.0)
        left[best] = 0.0
        expected.append(best)
    for pool in (1, 3, 64):
        assert inducing_rows(COVARIANCE, THETA, ROWS, 10, pool=pool).tolist() == expected


def test_greedy_rows_skip_duplicates_and_stop_when_all_is_explained() -> None:
    doubled = Rows.concatenate([ROWS, ROWS])
    chosen = inducing_rows(COVARIANCE, THETA, doubled, 2 * N)
    assert len(chosen) == N
    assert len({int(i) % N for i in chosen}) == N
    constant = Rows({"x": torch.ones(9, 2, dtype=torch.float64)}, {"layer": torch.zeros(9, dtype=torch.long)})
    assert len(inducing_rows(COVARIANCE, THETA, constant, 5)) == 1


def test_posterior_of_a_row_without_noise_is_its_target() -> None:
    posterior = condition_exact(COVARIANCE, THETA, ROWS, Y, torch.full_like(Y, 1e-10))
    mean, variance = posterior(ROWS)
    torch.testing.assert_close(mean, Y, rtol=0, atol=1e-6)
    assert float(variance.max()) < 1e-6


def test_far_away_the_posterior_is_the_prior() -> None:
    posterior = condition_exact(Stationary("x"), THETA, ROWS, Y, NOISE)
    mean, variance = posterior(
        Rows({"x": torch.full((1, 2), 1e4, dtype=torch.float64)}, {"layer": torch.zeros(1, dtype=torch.long)})
    )
    assert abs(float(mean)) < 1e-12
    assert float(variance) == pytest.approx(math.exp(-0.2))


def test_weighting_a_row_is_repeating_it() -> None:
    once = condition_exact(COVARIANCE, THETA, ROWS, Y, NOISE / 3.0)
    thrice = condition_exact(COVARIANCE, THETA, Rows.concatenate([ROWS] * 3), Y.repeat(3), NOISE.repeat(3))
    for a, b in zip(once(NEW), thrice(NEW), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_greedy_rows_compute_no_column_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(Rows, "__getitem__", lambda rows, index: asked.extend(index) or take(rows, index))
    inducing_rows(COVARIANCE, THETA, ROWS, 12, pool=3)
    assert 12 <= len(asked) == len(set(asked)) < N


def take(rows: Rows, index: list[int]) -> Rows:
    return Rows({"x": rows.blocks["x"][index]}, {"layer": rows.groups["layer"][index]})


def test_statistics_are_sums_that_add_up_field_by_field() -> None:
    first, second = torch.arange(N) < 11, torch.arange(N) >= 11
    whole = statistics(K[:5], K.diagonal(), Y, NOISE)
    one, other = (
        statistics(K[:5][:, part], K.diagonal()[part], Y[part], NOISE[part]) for part in (first, second)
    )
    A, b = torch.zeros(5, 5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    yy = log_noise = trace = 0.0
    for i in range(N):
        k = K[:5, i]
        A += torch.outer(k, k) / NOISE[i]
        b += k * Y[i] / NOISE[i]
        yy += float(Y[i] ** 2 / NOISE[i])
        log_noise += math.log(float(NOISE[i]))
        trace += float(K[i, i] / NOISE[i])
    expected = (A, b, yy, log_noise, trace, N)
    names = ("A", "b", "yy", "log_noise", "trace", "n")
    for name, value in zip(names, expected, strict=True):
        for found in (whole, one + other):
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-12)
