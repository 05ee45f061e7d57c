"""Leave-one-out density of grouped rows: against leaving each group out for real."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from salgp.calibrators.gp.salgp import SALGP
from salgp.features import Features
from salgp.gp.covariance import Stationary, gaps
from salgp.gp.kernels import Rows
from salgp.gp.leave_out import exact_leave_out_density, inducing_leave_out_density
from salgp.gp.regression import condition_exact, condition_inducing, statistics

N, SIZE = 24, 3
COVARIANCE = Stationary("x", "matern52")
THETA = {"x.log_lengthscale": torch.tensor(0.3).double(), "x.log_variance": torch.tensor(-0.2).double()}


def data() -> tuple[Rows, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x = torch.randn(N, 2, generator=g, dtype=torch.float64)
    y = torch.sin(2 * x[:, 0]).reshape(-1, SIZE).mean(dim=1).repeat_interleave(SIZE)
    return Rows({"x": x}), y, 0.1 + 0.2 * torch.rand(N, generator=g, dtype=torch.float64)


def density(y: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (math.log(2 * math.pi) + variance.log() + (y - mean).square() / variance).sum()


@pytest.mark.parametrize("size", [1, SIZE])
def test_exact_equals_leaving_each_group_out(size: int) -> None:
    rows, y, noise = data()
    found = exact_leave_out_density(COVARIANCE(THETA, gaps(rows, rows, COVARIANCE)), y, noise, size)
    expected = torch.zeros((), dtype=torch.float64)
    for start in range(0, N, size):
        out = torch.arange(start, start + size)
        kept = torch.tensor([i for i in range(N) if i not in out.tolist()])
        mean, variance = condition_exact(COVARIANCE, THETA, rows[kept], y[kept], noise[kept])(rows[out])
        expected = expected + density(y[out], mean, variance + noise[out])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("size", [1, SIZE])
def test_inducing_equals_leaving_each_group_out(size: int) -> None:
    rows, y, noise = data()
    inducing = rows[torch.arange(0, N, 4)]
    Kuf, prior = (
        COVARIANCE(THETA, gaps(inducing, rows, COVARIANCE)),
        COVARIANCE.variance(THETA, rows),
    )
    found = inducing_leave_out_density(
        COVARIANCE(THETA, gaps(inducing, inducing, COVARIANCE)), Kuf, prior, y, noise, size
    )
    expected = torch.zeros((), dtype=torch.float64)
    for start in range(0, N, size):
        out = torch.arange(start, start + size)
        kept = torch.tensor([i for i in range(N) if i not in out.tolist()])
        sums = statistics(Kuf[:, kept], prior[kept], y[kept], noise[kept])
        mean, variance = condition_inducing(COVARIANCE, THETA, inducing, sums)(rows[out])
        expected = expected + density(y[out], mean, variance + noise[out])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_single_rows_agree_with_the_textbook_formula() -> None:
    rows, y, noise = data()
    K = COVARIANCE(THETA, gaps(rows, rows, COVARIANCE))
    inverse = torch.linalg.inv(K + noise.diag())  # Rasmussen & Williams (2006), eq. 5.12
    variance = 1.0 / inverse.diagonal()
    mean = y - (inverse @ y) * variance
    torch.testing.assert_close(exact_leave_out_density(K, y, noise), density(y, mean, variance))


@pytest.mark.parametrize("inducing", [False, True])
def test_gradients(inducing: bool) -> None:
    rows, y, noise = data()
    few = rows[torch.arange(0, N, 4)]

    def value(log_lengthscale: Tensor, log_noise: Tensor) -> Tensor:
        theta = {**THETA, "x.log_lengthscale": log_lengthscale}
        n = noise * log_noise.exp()
        if not inducing:
            return exact_leave_out_density(COVARIANCE(theta, gaps(rows, rows, COVARIANCE)), y, n, SIZE)
        Kuf, prior = (
            COVARIANCE(theta, gaps(few, rows, COVARIANCE)),
            COVARIANCE.variance(theta, rows),
        )
        return inducing_leave_out_density(
            COVARIANCE(theta, gaps(few, few, COVARIANCE)), Kuf, prior, y, n, SIZE
        )

    start = (
        torch.tensor(0.3, dtype=torch.float64, requires_grad=True),
        torch.tensor(0.1, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(value, start, atol=1e-5)


def world(n: int, seed: int) -> tuple[Features, Tensor]:
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    h = torch.randn(n, 3, generator=g)
    layers = {
        k: torch.tanh(h @ torch.randn(3, 8, generator=fixed)) + 0.2 * torch.randn(n, 8, generator=g)
        for k in "abc"
    }
    logits = 3.0 * h @ torch.randn(3, 4, generator=fixed)
    right = torch.rand(n, generator=g) < torch.sigmoid(1.0 + 1.5 * torch.sin(2 * h[:, 0]))
    return Features(logits, layers), torch.where(right, logits.argmax(1), (logits.argmax(1) + 1) % 4)


@pytest.mark.filterwarnings("ignore::salgp.gp.optimise.NotConvergedWarning")
def test_repeated_observations_are_believed_less_than_by_evidence() -> None:
    """The exact evidence of stacked rows takes three copies of a residual for three observations and drives
    the noise to zero.
    """
    features, labels = world(100, 0)
    new, truth = world(500, 1)
    found = {}
    for objective in ("evidence", "auto"):
        gp = SALGP("ml", inference="exact", objective=objective).fit(features, labels)
        p = gp.predict(new).layers
        assert p is not None
        assert p.std is not None
        y = new.residual(truth).double()[:, None].expand_as(p.mean)
        found[objective] = (
            float(density(y, p.mean, p.std.square() + math.exp(gp.fitted_.log_noise))) / y.numel()
        )
    assert found["auto"] > found["evidence"]


def test_unknown_objectives_are_refused() -> None:
    features, labels = world(30, 0)
    with pytest.raises(ValueError, match="objective must be"):
        SALGP("ml", objective="luck").fit(features, labels)
