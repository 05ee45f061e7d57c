"""The fast path computes the covariances and posteriors of `salgp.gp`, for every kernel and in both
precisions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import salgp
from salgp.calibrators.layerwise.salgp import SALGP
from salgp.calibrators.layerwise.structures import rows_of
from salgp.features import Features
from salgp.gp import fast as module
from salgp.gp.covariance import Index, Rows, Stationary, Sum, gaps
from salgp.gp.fast import plan_of
from salgp.gp.kernels import KERNELS, Kernel, stationary
from salgp.gp.regression import Posterior


def posterior(kernel: str, m: int = 30) -> Posterior:
    g = torch.Generator().manual_seed(0)
    rows = Rows(
        {"a": torch.randn(m, 5, generator=g).double() + 3.0, "b": torch.rand(m, 1, generator=g).double()}
    )
    covariance = Sum((Stationary("a", kernel, "first"), Stationary("b", kernel)))
    values = {
        "first.log_lengthscale": 0.7,
        "first.log_variance": -1.0,
        "b.log_lengthscale": -0.5,
        "b.log_variance": 0.3,
    }
    theta = {k: torch.tensor(v, dtype=torch.float64) for k, v in values.items()}
    root = 0.05 * torch.randn(m, 12, generator=g).double()
    return Posterior(covariance, theta, rows, torch.randn(m, generator=g).double(), root)


def queries(n: int = 101) -> Rows:
    g = torch.Generator().manual_seed(1)
    return Rows({"a": torch.randn(n, 5, generator=g) + 3.0, "b": torch.rand(n, 1, generator=g).double()})


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_in_place_are_the_kernels(kernel: str) -> None:
    squared = torch.linspace(0, 50, 40, dtype=torch.float64).reshape(8, 5)
    total = torch.ones_like(squared)
    KERNELS[kernel].add_into(total, KERNELS[kernel].c * squared, torch.empty_like(squared), 2.0)
    torch.testing.assert_close(total, 1.0 + 2.0 * stationary(kernel, squared, torch.zeros(()).double()))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("block", [32 * 1024, 10**7])
def test_double_precision_equals_the_posterior(
    kernel: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", block // 4)
    p, rows = posterior(kernel), queries()
    plan = plan_of(p)
    mean, variance = p(rows)
    for layers in (False, True):
        found = plan.moments(rows, layers)
        torch.testing.assert_close(found[0], mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], variance, rtol=1e-10, atol=1e-12)
    K = torch.cat([cross.clone() for _, cross in plan.blocks(rows)])
    torch.testing.assert_close(K, p.covariance_to(rows), rtol=1e-10, atol=1e-12)


def test_terms_have_their_own_moments() -> None:
    p, rows = posterior("matern52"), queries()
    _, _, means, variances = plan_of(p).moments(rows, layers=True)
    compared = gaps(rows, p.rows, p.covariance)
    for i, term in enumerate(p.covariance.terms):
        mean, variance = p.moments(
            term(p.theta, compared), p.theta[f"{('first', 'b')[i]}.log_variance"].exp()
        )
        torch.testing.assert_close(means[:, i], mean, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(variances[:, i], variance, rtol=1e-10, atol=1e-12)


def test_single_precision_is_close() -> None:
    p, rows = posterior("matern52"), queries()
    mean, variance, _, _ = plan_of(p, torch.float32).moments(rows)
    torch.testing.assert_close(mean, p(rows)[0], rtol=0, atol=2e-5)
    torch.testing.assert_close(variance, p(rows)[1], rtol=0, atol=2e-5)


def test_rows_equal_to_inducing_rows_and_far_rows() -> None:
    p = posterior("matern52")
    for rows in (p.rows, Rows({"a": p.rows.blocks["a"] + 1e6, "b": p.rows.blocks["b"] + 1e6})):
        mean, variance, _, _ = plan_of(p).moments(rows)
        torch.testing.assert_close(mean, p(rows)[0], atol=1e-6, rtol=0)
        torch.testing.assert_close(variance, p(rows)[1], atol=1e-6, rtol=0)


def test_other_covariances_have_no_plan() -> None:
    p = posterior("rbf")
    assert plan_of(Posterior(p.covariance * Index("layer", 2), p.theta, p.rows, p.alpha, p.root)) is None
    assert (
        plan_of(Posterior(Stationary("a", per="layer", n_groups=2), p.theta, p.rows, p.alpha, p.root)) is None
    )


class Cauchy(Kernel):
    """``1 / (1 + r^2)``: a kernel from outside the package."""

    def value(self, square: torch.Tensor, slope: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        value = 1.0 / (1.0 + square)
        return value, 2.0 * square * value.square() if slope else None


@pytest.mark.filterwarnings("ignore::salgp.gp.optimise.AtBoundWarning")
def test_a_kernel_added_to_the_table_works_everywhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gradient, fit, prediction, scoring of a store: one entry of the table is all a kernel needs."""
    monkeypatch.setitem(KERNELS, "cauchy", Cauchy())
    squared = torch.linspace(0, 9, 12, dtype=torch.float64).reshape(3, 4)
    log_l = torch.tensor(0.2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: stationary("cauchy", squared, x), log_l)
    g = torch.Generator().manual_seed(0)
    features = Features(2 * torch.randn(60, 3, generator=g), {"a": torch.randn(60, 4, generator=g)})
    calibrator = SALGP("sum", kernel="cauchy").fit(features, torch.arange(60) % 3)
    expected = calibrator.predict(features).confidence
    plan = plan_of(calibrator.fitted_.posterior)
    mean = plan.moments(rows_of(calibrator.structure_, features))[0]
    torch.testing.assert_close((features.confidence + mean).clamp(1e-6, 1 - 1e-6), expected)
    again = salgp.load(calibrator.save(tmp_path)).predict(features).confidence
    assert torch.equal(again, expected)
