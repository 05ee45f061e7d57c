"""Maximise an objective over named, bounded parameters, and say plainly how it ended.

Hyperparameters: names, starting points, bounds and priors.

`logistic` is a logistic regression with a normal prior on its weights.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.gp.linalg import (
    NotPositiveDefiniteError,
    cholesky,
    inverse_positive,
    one_blas_thread,
    solve_positive,
)

__all__ = ["logistic", "logistic_covariance", "warn_unless_converged"]

GPYTORCH_START = 0.6931471805599453
"""Where GPyTorch starts every positive parameter: ``softplus(0) = log 2``."""
GPYTORCH_NOISE = 1e-4
"""Smallest noise variance of GPyTorch's Gaussian likelihood."""
STRIDE = 1_000_003
"""A prime: multiples of it, modulo the number of rows, pick rows of all layers alike (an even stride would
pick one layer's).
"""


@dataclass(frozen=True)
class Scale:
    """Data-driven scales for starting points: typical squared distance per block, and the variance of the
    target.
    """

    squared: Mapping[str, float]
    variance: float


@dataclass(frozen=True, eq=False)
class Parameter:
    """A learnable array with its starting point and bounds (positive quantities are stored as logarithms).

    Args:
        name: under which ``theta`` holds it.
        start: where a search begins.
        lower: smallest value.
        upper: largest value.
        prior: mean and standard deviation of its normal prior; None where only the bounds are known.
    """

    name: str
    start: Tensor
    lower: float
    upper: float
    prior: tuple[float, float] | None = None

    def log_prior(self, value: Tensor) -> Tensor | float:
        """Log density of the prior; 0 where there is none."""
        if self.prior is None:
            return 0.0
        mean, std = self.prior
        return -(0.5 * ((value - mean) / std).square() + math.log(std * math.sqrt(2.0 * math.pi))).sum()

    def is_bound(self, value: Tensor) -> bool:
        """Is some entry of the value on a bound?"""
        near = 1e-6 * (self.upper - self.lower)
        return bool(((value <= self.lower + near) | (value >= self.upper - near)).any())


def started(
    parameters: Sequence[Parameter], prior: str | None = None, gpytorch: bool = False
) -> list[Parameter]:
    """The parameters with the prior and the starting points that were asked for.

    Args:
        parameters: as a covariance names them, started at scales of the data.
        prior: of lengthscales; None, or ``dimension-scaled``.
        gpytorch: start where GPyTorch starts.
    """
    doubled = [name for name, count in Counter(p.name for p in parameters).items() if count > 1]
    if doubled:
        raise ValueError(
            f"two terms of the covariance have a parameter called {doubled[0]!r}; give one of them "
            f"another name, e.g. Stationary('x', 'rbf', name='slow')"
        )
    if prior not in (None, "dimension-scaled"):
        raise ValueError(f"prior must be None or 'dimension-scaled', got {prior!r}")
    moved = [_gpytorch_start(p) if gpytorch else p for p in parameters]
    if prior is None:
        return moved
    return [_dimension_scaled(p, float(own.start.mean())) for p, own in zip(moved, parameters, strict=True)]


def _gpytorch_start(p: Parameter) -> Parameter:
    """Started where GPyTorch starts a positive parameter, away from its bounds; others as they are."""
    if "log_" not in p.name:
        return p
    start = math.log(GPYTORCH_START)
    lower = math.log(GPYTORCH_NOISE) if p.name == "log_noise" else min(p.lower, start - 20.0)
    return Parameter(p.name, torch.full_like(p.start, start), lower, max(p.upper, start + 20.0))


def _dimension_scaled(p: Parameter, typical: float) -> Parameter:
    """Lengthscales under the log-normal prior of Hvarfner et al. (2024), location ``log sqrt(D) + sqrt(2)``
    and scale ``sqrt(3)`` for inputs of unit variance; others as they are.

    Two samples of unit variance in ``D`` dimensions are ``sqrt(2 D)`` apart, so that in the units of the data
    the location is the logarithm of the ``typical`` distance, less ``log sqrt(2)``, plus ``sqrt(2)``.
    """
    if "log_lengthscale" not in p.name:
        return p
    location, scale = typical - 0.5 * math.log(2.0) + math.sqrt(2.0), math.sqrt(3.0)
    return Parameter(p.name, p.start, location - 10.0 * scale, location + 10.0 * scale, (location, scale))


def typical_square(block: Tensor, most: int = 500) -> float:
    """Median squared distance between rows; the scale of a block. Rows are chosen by a stride that visits
    every layer.
    """
    some = block[torch.arange(min(len(block), most), device=block.device) * STRIDE % len(block)].double()
    squared = torch.pdist(some).square()
    positive = squared[squared > 1e-12 * float(squared.max())] if len(squared) else squared
    return float(positive.median()) if len(positive) else 1.0


Objective = Callable[[Mapping[str, Tensor]], Tensor]

NO_VALUE = -1e300
"""Objective where the covariance cannot be factorised: finite, so that a line search can step back from it.
"""


class NotConvergedWarning(UserWarning):
    """Hyperparameter optimisation stopped before it converged; the message says why."""


class AtBoundWarning(NotConvergedWarning):
    """A noise or a lengthscale ended on its bound: the data do not determine it. The message says which."""


@dataclass(frozen=True, eq=False)
class Fit:
    """Outcome of an optimisation.

    Args:
        theta: the best parameters found.
        value: objective at ``theta``.
        converged: did the optimiser meet its own tolerance?
        reason: why it stopped.
        history: objective values in the order of evaluation.
        at_bounds: names of parameters of which at least one entry ended on a bound.
    """

    theta: Mapping[str, Tensor]
    value: float
    converged: bool
    reason: str
    history: tuple[float, ...] = ()
    at_bounds: tuple[str, ...] = ()


def maximise(
    objective: Objective,
    parameters: Sequence[Parameter],
    *,
    optimizer: str = "lbfgs",
    max_steps: int | None = None,
    learning_rate: float = 5e-3,
    tolerance: float = 1e-6,
    restarts: int = 0,
    seed: int = 0,
) -> Fit:
    """Maximise ``objective(theta)`` within the bounds of ``parameters``.

    Args:
        objective: maps named tensors to a scalar; differentiated by autograd.
        parameters: names, starting points, bounds.
        optimizer: ``"lbfgs"`` (bounded quasi-Newton), or ``"adam"`` with the steps of GPyTorch.
        max_steps: iterations; 200 for L-BFGS, 2000 for Adam where None.
        learning_rate: of Adam.
        tolerance: relative change of the objective at which L-BFGS stops.
        restarts: further runs from seeded random points; the best objective wins.
        seed: of the restarts.

    Returns:
        The outcome; nothing is raised when it did not converge.

    Example:
        >>> start = Parameter("x", torch.zeros((), dtype=torch.float64), -5.0, 5.0)
        >>> fit = maximise(lambda theta: -((theta["x"] - 2.0) ** 2), [start])
        >>> round(float(fit.theta["x"]), 4), fit.converged
        (2.0, True)
    """
    if optimizer not in ("lbfgs", "adam"):
        raise ValueError(f"unknown optimizer {optimizer!r}; choose 'lbfgs' or 'adam'")
    if optimizer == "lbfgs":
        search = functools.partial(_lbfgs, steps=max_steps or 200, tolerance=tolerance)
    else:
        search = functools.partial(_adam, steps=max_steps or 2000, rate=learning_rate)
    fits = [search(objective, each) for each in restarted(parameters, restarts, seed)]
    best = max(fits, key=lambda fit: fit.value if np.isfinite(fit.value) else -np.inf)
    if not best.value > NO_VALUE:
        best = replace(best, converged=False, reason="no starting point has a finite objective")
    return replace(best, at_bounds=tuple(p.name for p in parameters if p.is_bound(best.theta[p.name])))


def restarted(parameters: Sequence[Parameter], restarts: int, seed: int) -> list[list[Parameter]]:
    """The parameters themselves, and ``restarts`` copies that start at seeded random points within the
    bounds.
    """
    generator = np.random.default_rng(seed)
    lower, upper = _bounds(parameters)
    centre = _flatten([p.start for p in parameters])
    every = [list(parameters)]
    for _ in range(restarts):
        start = centre + 0.25 * (upper - lower) * generator.uniform(-1, 1, centre.shape)
        theta = _named(parameters, np.clip(start, lower, upper))
        every.append([replace(p, start=theta[p.name]) for p in parameters])
    return every


def warn_unless_converged(found: Any, what: str) -> None:
    """Warn where a search of `scipy.optimize.minimize` ended short of its optimum.

    A line search that can no longer see a difference also reports failure; with a gradient that is nothing
    beside the objective it has arrived all the same.

    Example:
        >>> from scipy.optimize import minimize
        >>> warn_unless_converged(minimize(lambda x: (x**2).sum(), [1.0], method="L-BFGS-B"), "a parabola")
    """
    slope = np.abs(np.asarray(found.jac)).max(initial=0.0) if "jac" in found else np.inf
    if not found.success and not slope <= 2e-3 * (1.0 + abs(float(found.fun))):
        warnings.warn(f"{what} did not converge: {found.message}", NotConvergedWarning, stacklevel=3)


def _lbfgs(objective: Objective, parameters: Sequence[Parameter], steps: int, tolerance: float) -> Fit:
    from scipy.optimize import minimize

    history: list[float] = []

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _value_and_gradient(objective, parameters, x)
        history.append(value)
        return -value, -gradient

    lower, upper = _bounds(parameters)
    with one_blas_thread():
        found = minimize(
            negative,
            np.clip(_flatten([p.start for p in parameters]), lower, upper),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(lower, upper, strict=True)),
            options={"maxiter": steps, "ftol": tolerance, "gtol": 1e-5, "maxcor": 20},
        )
    value = -float(found.fun)
    flat = _at_precision(-np.asarray(found.jac), found.x, lower, upper, value)
    reason = str(found.message) + (": numerical precision reached" if flat and not found.success else "")
    return Fit(_named(parameters, found.x), value, bool(found.success or flat), reason, tuple(history))


def _adam(objective: Objective, parameters: Sequence[Parameter], steps: int, rate: float) -> Fit:
    """Adam as GPyTorch takes its steps: what a step changes of a positive parameter ``v``, kept as its
    logarithm, is ``x`` with ``softplus(x) = v``.
    """
    lower, upper = (torch.as_tensor(bound) for bound in _bounds(parameters))
    logarithm = torch.cat([torch.full((p.start.numel(),), "log_" in p.name) for p in parameters])
    at = torch.as_tensor(_flatten([p.start for p in parameters])).clamp(lower, upper)
    x = _unsoftened(at, logarithm).requires_grad_(True)
    adam, history = torch.optim.Adam([x], lr=rate), []
    best_value, best = -np.inf, at
    for _ in range(steps):
        with torch.enable_grad():
            at = _softened(x, logarithm)
        value, gradient = _value_and_gradient(objective, parameters, at.detach().numpy())
        history.append(value)
        if value > best_value:
            best_value, best = value, at.detach()
        adam.zero_grad()
        at.backward(-torch.as_tensor(gradient))
        adam.step()
        with torch.no_grad():
            x.copy_(_unsoftened(_softened(x, logarithm).clamp(lower, upper), logarithm))
    flat = len(history) > 20 and abs(history[-1] - history[-20]) <= 1e-3 * (1.0 + abs(history[-1]))
    reason = f"ran its {steps} steps" + ("" if flat else " and was still improving")
    return Fit(_named(parameters, best.numpy()), best_value, flat, reason, tuple(history))


def _softened(x: Tensor, logarithm: Tensor) -> Tensor:
    """``log softplus(x)`` where the value is a logarithm, ``x`` elsewhere."""
    return torch.where(logarithm, torch.nn.functional.softplus(x, threshold=1e9).log(), x)


def _unsoftened(values: Tensor, logarithm: Tensor) -> Tensor:
    """Inverse of `_softened`."""
    v = values.exp()
    return torch.where(logarithm, v + torch.log(-torch.expm1(-v)), values)


def _at_precision(
    gradient: np.ndarray, x: np.ndarray, lower: np.ndarray, upper: np.ndarray, value: float
) -> bool:
    """Would a whole unit step along the steepest free direction change the objective by less than 0.2 %?"""
    free = np.where(gradient > 0, x < upper, x > lower)
    return bool(np.isfinite(value) and np.abs(gradient * free).max(initial=0.0) <= 2e-3 * (1.0 + abs(value)))


def _value_and_gradient(
    objective: Objective, parameters: Sequence[Parameter], x: np.ndarray
) -> tuple[float, np.ndarray]:
    with torch.enable_grad():
        theta = {k: v.requires_grad_(True) for k, v in _named(parameters, x).items()}
        try:
            value = objective(theta)
        except NotPositiveDefiniteError:
            return NO_VALUE, np.zeros_like(x)
        gradients = torch.autograd.grad(value, list(theta.values()), allow_unused=True)
    filled = [torch.zeros_like(t) if g is None else g for t, g in zip(theta.values(), gradients, strict=True)]
    return float(value.detach()), np.nan_to_num(_flatten(filled))


def _named(parameters: Sequence[Parameter], x: np.ndarray) -> dict[str, Tensor]:
    theta, at = {}, 0
    for p in parameters:
        size = p.start.numel()
        theta[p.name] = torch.as_tensor(x[at : at + size].copy()).reshape(p.start.shape).to(p.start.device)
        at += size
    return theta


def _flatten(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(t.detach().double().cpu().reshape(-1).numpy() for t in tensors)])


def _bounds(parameters: Sequence[Parameter]) -> tuple[np.ndarray, np.ndarray]:
    lower = np.concatenate([np.zeros(0), *(np.full(p.start.numel(), p.lower) for p in parameters)])
    return lower, np.concatenate([np.zeros(0), *(np.full(p.start.numel(), p.upper) for p in parameters)])


def logistic(
    X: Tensor,
    y: Tensor,
    weight: Tensor,
    prior: Tensor,
    offset: Tensor | None = None,
    start: Tensor | None = None,
    lower: Tensor | None = None,
) -> Tensor:
    """Weights ``(p,)`` of the largest posterior of a logistic regression, by projected Newton steps.

    Args:
        X: ``(n, p)`` inputs.
        y: ``(n,)`` in [0, 1].
        weight: ``(n,)`` of the rows.
        prior: ``(p,)`` precision of the weights around 0.
        offset: ``(n,)`` added to the log-odds.
        start: ``(p,)`` weights to begin with; by default 0.
        lower: ``(p,)`` smallest allowed weights; by default none.

    Example:
        >>> X, y = torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
        >>> logistic(X, y, torch.ones(4).double(), torch.zeros(1).double()).exp()  # odds 3 : 1
        tensor([3.0000], dtype=torch.float64)
    """
    w = torch.zeros_like(prior) if start is None else start
    base = torch.zeros_like(y) if offset is None else offset
    floor = torch.full_like(prior, -torch.inf) if lower is None else lower

    def loss(w: Tensor) -> float:
        f = X @ w + base
        return float(weight @ (softplus(f) - y * f) + 0.5 * (prior * w) @ w)

    value = loss(w)
    for _ in range(100):
        p = torch.sigmoid(X @ w + base)
        slope = X.T @ (weight * (p - y)) + prior * w
        free = ((w > floor) | (slope < 0)).to(prior)  # the others stay at their bounds
        curvature = _curvature(X, p, weight, prior) * torch.outer(free, free) + (1 - free).diag()
        step = solve_positive(curvature, slope * free)
        reach = float((X @ step).abs().max().clamp_min(1e-9))
        rate = min(1.0, 5.0 / reach)
        before = w
        for halving in range(20):
            w = torch.maximum(before - rate * 0.5**halving * step, floor)
            reached = loss(w)
            if reached <= value + 1e-12 * abs(value):
                break
        value = reached
        if float(step.abs().max()) < 1e-9:
            break
    return w


def logistic_covariance(X: Tensor, weight: Tensor, prior: Tensor, log_odds: Tensor) -> Tensor:
    """Covariance ``(p, p)`` of the weights where the fit says ``log_odds (n,)``, by Laplace's approximation.

    Args:
        X: ``(n, p)`` inputs.
        weight: ``(n,)`` of the rows.
        prior: ``(p,)`` precision of the weights around 0.
        log_odds: ``(n,)`` of the fit.

    Example:
        >>> one = torch.ones(16, 1).double()
        >>> logistic_covariance(one, one[:, 0], torch.zeros(1).double(), 0 * one[:, 0])  # 16 fair coins
        tensor([[0.2500]], dtype=torch.float64)
    """
    return inverse_positive(cholesky(_curvature(X, torch.sigmoid(log_odds), weight, prior)))


def _curvature(X: Tensor, p: Tensor, weight: Tensor, prior: Tensor) -> Tensor:
    return X.T @ ((weight * p * (1 - p))[:, None] * X) + prior.diag()
