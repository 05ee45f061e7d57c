"""Fitting by value: optima against a search of our own on a dense matrix, bounds and starting points where
they are said to be, and what is told when a fit went wrong.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from references import gpytorch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal, norm

from salgp.gp import fitting
from salgp.gp.covariance import Stationary
from salgp.gp.fitting import Observations, Settings, _matters, _report, fit_gp
from salgp.gp.kernels import Rows
from salgp.gp.optimise import (
    AtBoundWarning,
    Fit,
    NotConvergedWarning,
    Parameter,
    Scale,
    _gpytorch_start,
    started,
    typical_square,
)

EXACT = Settings(inference="exact", objective="evidence")


def made(n: int = 40, seed: int = 0) -> tuple[Rows, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=g, dtype=torch.float64) * 6
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    return Rows({"x": x}), y


def kernel(rows: Rows, length: float, variance: float) -> np.ndarray:
    x = rows.blocks["x"].numpy()[:, 0]
    return variance * np.exp(-0.5 * (x[:, None] - x[None]) ** 2 / length**2)


def hold(monkeypatch: pytest.MonkeyPatch, values: dict[str, float]) -> None:
    """Let searches leave some parameters where they are."""

    def held(*args: Any, **options: Any) -> list[Parameter]:
        return [
            Parameter(p.name, torch.full_like(p.start, v), v - 1e-9, v + 1e-9) if v is not None else p
            for p in started(*args, **options)
            for v in [values.get(p.name)]
        ]

    monkeypatch.setattr(fitting, "started", held)


def test_gaussian_fit_is_the_optimum_of_the_dense_evidence() -> None:
    rows, y = made()

    def negative(v: np.ndarray) -> float:
        K = kernel(rows, math.exp(v[0]), math.exp(v[1])) + math.exp(v[2]) * np.eye(len(y))
        return -float(multivariate_normal(np.zeros(len(y)), K).logpdf(y.numpy()))

    best = minimize(negative, [-0.5, 0.0, -2.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9})
    found = fit_gp(Stationary("x", "rbf"), Observations(rows, y), EXACT)
    theta = found.posterior.theta
    ours = [float(theta["x.log_lengthscale"]), float(theta["x.log_variance"]), found.log_noise]
    np.testing.assert_allclose(ours, best.x, atol=0.02)
    assert found.log_evidence == pytest.approx(-best.fun, abs=1e-4)
    assert (found.inference, found.converged, found.at_bounds) == ("exact", True, ())
    assert found.y is not None
    torch.testing.assert_close(found.y, y)
    inverse = np.linalg.inv(
        kernel(rows, math.exp(ours[0]), math.exp(ours[1])) + math.exp(ours[2]) * np.eye(40)
    )
    new = torch.tensor([[1.0], [3.3]], dtype=torch.float64)
    x = rows.blocks["x"].numpy()[:, 0]
    cross = math.exp(ours[1]) * np.exp(-0.5 * (new.numpy() - x[None]) ** 2 / math.exp(ours[0]) ** 2)
    mean, variance = found.posterior(Rows({"x": new}))
    np.testing.assert_allclose(mean, cross @ inverse @ y.numpy(), atol=1e-8)
    np.testing.assert_allclose(variance, math.exp(ours[1]) - np.diag(cross @ inverse @ cross.T), atol=1e-8)


@pytest.mark.filterwarnings("ignore::salgp.gp.optimise.AtBoundWarning")
def test_repeated_observations_are_learned_by_leaving_each_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the noise fixed, one lengthscale: the best of a fine grid of the density, observation by
    observation.
    """
    rows, y = made(24)
    y = y.reshape(12, 2).mean(1).repeat_interleave(2)
    hold(monkeypatch, {"x.log_variance": 0.0, "log_noise": -1.5})
    found = fit_gp(Stationary("x", "rbf"), Observations(rows, y), Settings(inference="exact", repeats=2))

    def density(length: float) -> float:
        K, total = kernel(rows, length, 1.0) + math.exp(-1.5) * np.eye(24), 0.0
        for i in range(12):
            out = [2 * i, 2 * i + 1]
            kept = [j for j in range(24) if j not in out]
            solved = np.linalg.solve(K[np.ix_(kept, kept)], K[np.ix_(kept, out)])
            mean = solved.T @ y.numpy()[kept]
            left = K[np.ix_(out, out)] - K[np.ix_(out, kept)] @ solved
            total += float(multivariate_normal(mean, left).logpdf(y.numpy()[out]))
        return total

    lengths = np.geomspace(0.1, 5.0, 400)
    best = lengths[np.argmax([density(v) for v in lengths])]
    assert float(found.posterior.theta["x.log_lengthscale"].exp()) == pytest.approx(best, rel=0.03)
    by_evidence = Settings(inference="exact", repeats=2, objective="evidence")
    other = fit_gp(Stationary("x", "rbf"), Observations(rows, y), by_evidence)
    assert other.log_evidence > found.log_evidence
    assert found.log_noise == pytest.approx(-1.5)


def test_a_search_can_begin_where_another_ended() -> None:
    rows, y = made(40)
    found = fit_gp(Stationary("x", "rbf"), Observations(rows, y), EXACT)
    assert set(found.learned) == {"x.log_lengthscale", "x.log_variance", "log_noise"}
    again = fit_gp(
        Stationary("x", "rbf"), Observations(rows, y), replace(EXACT, max_steps=1, start=found.learned)
    )
    assert again.converged
    assert again.log_evidence == pytest.approx(found.log_evidence, abs=1e-6)
    for name, value in found.learned.items():
        torch.testing.assert_close(again.learned[name], value, rtol=0, atol=1e-3)


@pytest.mark.filterwarnings("ignore::salgp.gp.optimise.AtBoundWarning")
def test_inducing_rows_at_every_row_give_the_exact_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, y = made(30)
    hold(monkeypatch, {"x.log_lengthscale": -0.3, "x.log_variance": 0.2})
    exact = fit_gp(Stationary("x", "rbf"), Observations(rows, y), EXACT)
    every = replace(EXACT, inference="inducing", n_inducing=30)
    inducing = fit_gp(Stationary("x", "rbf"), Observations(rows, y), every)
    assert inducing.log_noise == pytest.approx(exact.log_noise, abs=1e-3)
    assert (inducing.inference, inducing.y) == ("inducing", None)
    assert inducing.summary is not None
    assert inducing.log_evidence == pytest.approx(exact.log_evidence, abs=1e-3)
    new = Rows({"x": torch.linspace(0, 6, 9, dtype=torch.float64)[:, None]})
    for ours, theirs in zip(inducing.posterior(new), exact.posterior(new), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("inference", "n_rows", "expected"),
    [("auto", 1200, True), ("auto", 1201, False), ("exact", 10**6, True), ("inducing", 3, False)],
)
def test_which_inference(inference: str, n_rows: int, expected: bool) -> None:
    settings = Settings(inference)
    assert settings.exact(n_rows) is expected
    assert settings.largest_matrix(n_rows) == n_rows * (n_rows if expected else min(256, n_rows))


def test_which_objective() -> None:
    assert [Settings(repeats=k).leaves_out() for k in (1, 2)] == [False, True]
    assert Settings(objective="leave-one-out").leaves_out()
    assert not Settings(objective="evidence", repeats=2).leaves_out()
    for wrong in ({"objective": "x"}, {"inference": "x"}):
        one = Settings(**wrong)
        with pytest.raises(ValueError, match="must be"):
            _ = one.leaves_out(), one.exact(1)


def test_gpytorchs_starting_points_are_gpytorchs() -> None:
    scaled = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    zero = torch.zeros((), dtype=torch.float64)
    length = _gpytorch_start(Parameter("x.log_lengthscale", zero, -1.0, 1.0))
    assert float(length.start.exp()) == pytest.approx(scaled.base_kernel.lengthscale.item())
    variance = _gpytorch_start(Parameter("x.log_variance", zero, -50.0, 50.0))
    assert float(variance.start.exp()) == pytest.approx(scaled.outputscale.item())
    assert (variance.lower, variance.upper) == (-50.0, 50.0)
    assert (length.lower, length.upper) == pytest.approx((float(length.start) - 20, float(length.start) + 20))
    noise = _gpytorch_start(Parameter("log_noise", zero, -1.0, 1.0))
    assert float(noise.start.exp()) == pytest.approx(likelihood.noise.item(), rel=2e-4)  # plus its least
    assert math.exp(noise.lower) == pytest.approx(
        likelihood.noise_covar.raw_noise_constraint.lower_bound.item()
    )
    other = Parameter("layer.W", zero, -1.0, 1.0)
    assert _gpytorch_start(other) is other


def test_the_scale_of_a_block_is_the_median_squared_distance() -> None:
    block = torch.randn(31, 3, generator=torch.Generator().manual_seed(0))
    pairs = [float((a - b).double().square().sum()) for i, a in enumerate(block) for b in block[:i]]
    assert typical_square(block) == pytest.approx(sorted(pairs)[(len(pairs) - 1) // 2], rel=1e-6)
    doubled = torch.cat([block, block])  # the distance of a row to its double does not count
    assert typical_square(doubled) == pytest.approx(typical_square(block), rel=0.05)
    assert typical_square(torch.ones(4, 2)) == typical_square(torch.ones(1, 2)) == 1.0


def test_what_is_told_of_a_fit() -> None:
    zero = torch.zeros((), dtype=torch.float64)
    fit = Fit({"a.log_lengthscale": zero + 2, "log_noise": zero}, 0.0, True, "", ())
    _report(fit)
    with pytest.warns(NotConvergedWarning, match="did not converge: too slow"):
        _report(replace(fit, converged=False, reason="too slow"))
    with pytest.warns(AtBoundWarning, match=r"bounds: a\.log_lengthscale = 2$"):
        _report(replace(fit, at_bounds=("a.log_lengthscale",)))
    with pytest.warns(AtBoundWarning, match=r"log_noise = 0; every correct sample .* noise can vanish"):
        _report(replace(fit, at_bounds=("log_noise",)))
    off = replace(fit, at_bounds=("a.log_lengthscale", "a.log_variance"))
    _report(off)  # the term is switched off: its lengthscale means nothing
    assert not _matters("a.log_lengthscale", off)
    assert not _matters("a.log_variance", fit)


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Parameter]:
    """What a search is started with, found by not searching."""
    seen: list[Parameter] = []

    def stay(objective: object, parameters: list[Parameter], **rest: object) -> Fit:
        seen.extend(parameters)
        return Fit({p.name: p.start for p in parameters}, 0.0, True, "", ())

    monkeypatch.setattr(fitting, "maximise", stay)
    return seen


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 0.0), (0.2, 3.0), (0.0, 0.0)])
def test_a_search_starts_with_three_tenths_of_the_mean_square_as_noise(
    monkeypatch: pytest.MonkeyPatch, scale: float, offset: float
) -> None:
    rows, y = made(30)
    y = offset + scale * y
    parameters = recorded(monkeypatch)
    fit_gp(Stationary("x", "rbf"), Observations(rows, y), EXACT)
    seen = {p.name: p for p in parameters}
    square = max(float(np.mean(y.numpy() ** 2)), 1e-6)
    noise = seen["log_noise"]
    assert float(noise.start) == pytest.approx(math.log(0.3 * square))
    assert (noise.lower, noise.upper) == pytest.approx((float(noise.start) - 10, float(noise.start) + 5))
    assert float(seen["x.log_variance"].start.exp()) == pytest.approx(square)


def test_the_scale_of_many_rows_is_that_of_five_hundred_from_all_over() -> None:
    block = torch.randn(1300, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    some = block[[i * 1_000_003 % 1300 for i in range(500)]]
    assert typical_square(block) == pytest.approx(float(torch.pdist(some).square().median()))


def test_a_dimension_scaled_prior_gives_the_largest_posterior_of_the_dense_model() -> None:
    rows, y = made()
    x = rows.blocks["x"].numpy()[:, 0]
    distances = np.abs(x[:, None] - x[None])[np.triu_indices(len(x), 1)]
    location = math.log(np.median(distances)) - 0.5 * math.log(2) + math.sqrt(2)

    def negative(v: np.ndarray) -> float:
        K = kernel(rows, math.exp(v[0]), math.exp(v[1])) + math.exp(v[2]) * np.eye(len(y))
        evidence = float(multivariate_normal(np.zeros(len(y)), K).logpdf(y.numpy()))
        return -evidence - float(norm(location, math.sqrt(3)).logpdf(v[0]))

    best = minimize(negative, [-0.5, 0.0, -2.0], method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-9})
    found = fit_gp(Stationary("x", "rbf"), Observations(rows, y), replace(EXACT, prior="dimension-scaled"))
    theta = found.posterior.theta
    ours = [float(theta["x.log_lengthscale"]), float(theta["x.log_variance"]), found.log_noise]
    np.testing.assert_allclose(ours, best.x, atol=0.02)
    plain = fit_gp(Stationary("x", "rbf"), Observations(rows, y), EXACT)
    assert found.log_evidence < plain.log_evidence
    assert float(theta["x.log_lengthscale"]) > float(plain.posterior.theta["x.log_lengthscale"])


@pytest.mark.parametrize("width", [20, 400])
def test_the_prior_follows_the_dimension(width: int) -> None:
    """On samples of unit variance its location is ``log sqrt(D) + sqrt(2)``."""
    x = torch.randn(400, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scale = Scale({"x": typical_square(x)}, 1.0)
    lengthscale, variance = started(Stationary("x").parameters(scale), prior="dimension-scaled")
    assert variance.prior is None
    assert lengthscale.prior == pytest.approx((0.5 * math.log(width) + math.sqrt(2), math.sqrt(3)), abs=0.1)


def test_an_unknown_prior_is_refused() -> None:
    rows, y = made(10)
    with pytest.raises(ValueError, match="dimension-scaled"):
        fit_gp(Stationary("x"), Observations(rows, y), replace(EXACT, prior="wide"))
