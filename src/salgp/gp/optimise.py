"""Maximise an objective over named, bounded parameters, and say plainly how it ended.

Hyperparameters: names, starting points, bounds and priors.

`logistic` is a logistic regression with a normal prior on its weights.
"""

import itertools
import math
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.gp import linalg
from salgp.gp.linalg import cholesky

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

    def log_prior(self, theta: Mapping[str, Tensor]) -> Tensor | float:
        """Log density of the prior; 0 where there is none."""
        if self.prior is None:
            return 0.0
        mean, std = self.prior
        scaled = (theta[self.name] - mean) / std
        log_norm = math.log(std * math.sqrt(2.0 * math.pi))
        return -(0.5 * scaled.square() + log_norm).sum()

    def is_bound(self, value: Tensor) -> bool:
        """Is some entry of the value on a bound?"""
        near = 1e-6 * (self.upper - self.lower)
        lower, upper = self.lower + near, self.upper - near
        return bool(((value <= lower) | (value >= upper)).any())


Parameters = Sequence[Parameter]
Array = np.ndarray


def started(parameters: Parameters, prior: str | None = None, gpytorch: bool = False) -> list[Parameter]:
    """The parameters with the prior and the starting points that were asked for.

    Args:
        parameters: as a covariance names them, started at scales of the data.
        prior: of lengthscales; None, or ``dimension-scaled``.
        gpytorch: start where GPyTorch starts.
    """
    names = [p.name for p in parameters]
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        advice = "give one of them another name, e.g. Stationary('x', 'rbf', name='slow')"
        raise ValueError(f"two terms of the covariance have a parameter called {doubled[0]!r}; {advice}")
    if prior not in (None, "dimension-scaled"):
        raise ValueError(f"prior must be None or 'dimension-scaled', got {prior!r}")
    moved = [_gpytorch_start(p) if gpytorch else p for p in parameters]
    if prior is None:
        return moved
    typical = [float(p.start.mean()) for p in parameters]
    return list(map(_dimension_scaled, moved, typical))


def _gpytorch_start(p: Parameter) -> Parameter:
    """Started where GPyTorch starts a positive parameter, away from its bounds; others as they are."""
    if "log_" not in p.name:
        return p
    start = math.log(GPYTORCH_START)
    lower, upper = min(p.lower, start - 20.0), max(p.upper, start + 20.0)
    if p.name == "log_noise":
        lower = math.log(GPYTORCH_NOISE)
    return Parameter(p.name, torch.full_like(p.start, start), lower, upper)


def _dimension_scaled(p: Parameter, typical: float) -> Parameter:
    """Lengthscales under the log-normal prior of Hvarfner et al. (2024), location ``log sqrt(D) + sqrt(2)``
    and scale ``sqrt(3)`` for inputs of unit variance; others as they are.

    Two samples of unit variance in ``D`` dimensions are ``sqrt(2 D)`` apart, so that in the units of the data
    the location is the logarithm of the ``typical`` distance, less ``log sqrt(2)``, plus ``sqrt(2)``.
    """
    if "log_lengthscale" not in p.name:
        return p
    location = typical - 0.5 * math.log(2.0) + math.sqrt(2.0)
    scale = math.sqrt(3.0)
    lower, upper = location - 10.0 * scale, location + 10.0 * scale
    return Parameter(p.name, p.start, lower, upper, (location, scale))


def typical_square(block: Tensor, most: int = 500) -> float:
    """Median squared distance between rows; the scale of a block. Rows are chosen by a stride that visits
    every layer.
    """
    n = len(block)
    steps = torch.arange(min(n, most), device=block.device)
    rows = block[steps * STRIDE % n].double()
    squared = torch.pdist(rows).square()
    largest = float(squared.max()) if len(squared) else 0.0
    positive = squared[squared > 1e-12 * largest]
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
    parameters: Parameters,
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
        search = partial(_lbfgs, objective, steps=max_steps or 200, tolerance=tolerance)
    else:
        search = partial(_adam, objective, steps=max_steps or 2000, rate=learning_rate)
    fits = list(map(search, restarted(parameters, restarts, seed)))
    finite = [fit for fit in fits if np.isfinite(fit.value)]
    best = max(finite or fits, key=operator.attrgetter("value"))
    if not best.value > NO_VALUE:
        best = replace(best, converged=False, reason="no starting point has a finite objective")
    at_bounds = [p.name for p in parameters if p.is_bound(best.theta[p.name])]
    return replace(best, at_bounds=tuple(at_bounds))


def restarted(parameters: Parameters, restarts: int, seed: int) -> list[list[Parameter]]:
    """The parameters themselves, and ``restarts`` copies that start at seeded random points within the
    bounds.
    """
    generator = np.random.default_rng(seed)
    centre, lower, upper = _box(parameters)
    every, reach = [list(parameters)], 0.25 * (upper - lower)
    for _ in range(restarts):
        away = reach * generator.uniform(-1, 1, centre.shape)
        theta = _named(parameters, np.clip(centre + away, lower, upper))
        every += [[replace(p, start=theta[p.name]) for p in parameters]]
    return every


def warn_unless_converged(found: Any, what: str) -> None:
    """Warn where a search of `scipy.optimize.minimize` ended short of its optimum.

    A line search that can no longer see a difference also reports failure; with a gradient that is nothing
    beside the objective it has arrived all the same.

    Example:
        >>> from scipy.optimize import minimize
        >>> warn_unless_converged(minimize(lambda x: (x**2).sum(), [1.0], method="L-BFGS-B"), "a parabola")
    """
    flat = "jac" in found and _is_flat(found.jac, float(found.fun))
    if not found.success and not flat:
        warnings.warn(f"{what} did not converge: {found.message}", NotConvergedWarning, stacklevel=3)


def _is_flat(gradient: Array, value: float) -> bool:
    """Would a whole unit step along the steepest direction change the objective by less than 0.2 %?"""
    steepest = float(np.abs(gradient).max(initial=0.0))
    return steepest <= 2e-3 * (1.0 + abs(value))


def _lbfgs(objective: Objective, parameters: Parameters, steps: int, tolerance: float) -> Fit:
    from scipy.optimize import minimize

    history: list[float] = []

    def negative(x: Array) -> tuple[float, Array]:
        value, gradient = _value_and_gradient(objective, parameters, x)
        history.append(value)
        return -value, -gradient

    start, lower, upper = _box(parameters)
    options = {"maxiter": steps, "ftol": tolerance, "gtol": 1e-5, "maxcor": 20}
    bounds = np.stack([lower, upper], axis=1)
    with linalg.one_blas_thread():
        found = minimize(negative, start, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    value, x = -float(found.fun), found.x
    flat = _at_precision(-found.jac, x, lower, upper, value)
    reason = found.message + (": numerical precision reached" if flat and not found.success else "")
    return Fit(_named(parameters, x), value, found.success or flat, reason, tuple(history))


def _adam(objective: Objective, parameters: Parameters, steps: int, rate: float) -> Fit:
    path = list(itertools.islice(_adam_path(objective, parameters, rate), steps))
    history = tuple(value for value, _ in path)
    flat = steps > 20 and abs(history[-1] - history[-20]) <= 1e-3 * (1.0 + abs(history[-1]))
    reason = f"ran its {steps} steps" + ("" if flat else " and was still improving")
    best = np.nan_to_num(history, nan=-np.inf).argmax()
    value, x = path[best]
    return Fit(_named(parameters, x), value, flat, reason, history)


def _adam_path(objective: Objective, parameters: Parameters, rate: float) -> Iterator[tuple[float, Array]]:
    """Objective and parameters before each step of Adam, as GPyTorch takes them.

    What a step changes of a positive parameter ``v``, kept as its logarithm, is ``x`` with ``softplus(x) =
    v``.
    """
    start, lower, upper = map(torch.as_tensor, _box(parameters))
    logs = ["log_" in p.name for p in parameters]
    is_log = torch.as_tensor(_per_entry(parameters, logs))
    x = _unsoftened(start, is_log).requires_grad_(True)
    adam = torch.optim.Adam([x], lr=rate)
    while True:
        with torch.enable_grad():
            at = _softened(x, is_log)
        values = at.detach().numpy()
        value, gradient = _value_and_gradient(objective, parameters, values)
        yield value, values
        adam.zero_grad()
        at.backward(-torch.as_tensor(gradient))
        adam.step()
        with torch.no_grad():
            inside = _softened(x, is_log).clamp(lower, upper)
            x.copy_(_unsoftened(inside, is_log))


def _at_precision(gradient: Array, x: Array, lower: Array, upper: Array, value: float) -> bool:
    """Is the objective flat in the directions that the bounds leave free?"""
    free = np.where(gradient > 0, x < upper, x > lower)
    return math.isfinite(value) and _is_flat(gradient * free, value)


def _softened(x: Tensor, is_log: Tensor) -> Tensor:
    """``log softplus(x)`` where the value is a logarithm, ``x`` elsewhere."""
    return torch.where(is_log, softplus(x, threshold=1e9).log(), x)


def _unsoftened(values: Tensor, is_log: Tensor) -> Tensor:
    """Inverse of `_softened`."""
    v = values.exp()
    return torch.where(is_log, v + torch.log(-torch.expm1(-v)), values)


def _value_and_gradient(objective: Objective, parameters: Parameters, x: Array) -> tuple[float, Array]:
    theta = _named(parameters, x)
    inputs = [value.requires_grad_(True) for value in theta.values()]
    with torch.enable_grad():
        try:
            value = objective(theta)
        except linalg.NotPositiveDefiniteError:
            return NO_VALUE, np.zeros_like(x)
        gradients = torch.autograd.grad(value, inputs, materialize_grads=True)
    return float(value.detach()), np.nan_to_num(_flatten(gradients))


def _named(parameters: Parameters, x: Array) -> dict[str, Tensor]:
    theta, at = {}, 0
    for p in parameters:
        size = p.start.numel()
        part = torch.tensor(x[at : at + size], device=p.start.device)
        theta[p.name] = part.reshape(p.start.shape)
        at += size
    return theta


def _flatten(tensors: Sequence[Tensor]) -> Array:
    parts = [t.double().numpy(force=True) for t in tensors]
    return np.concatenate([[], *parts], axis=None)


def _box(parameters: Parameters) -> tuple[Array, Array, Array]:
    """Starting points, lower and upper bounds of all entries."""
    lower = _per_entry(parameters, [p.lower for p in parameters])
    upper = _per_entry(parameters, [p.upper for p in parameters])
    start = _flatten([p.start for p in parameters])
    return start.clip(lower, upper), lower, upper


def _per_entry(parameters: Parameters, values: Sequence[float]) -> Array:
    """The value of each parameter, once for each of its entries."""
    sizes = [p.start.numel() for p in parameters]
    return np.repeat(values, np.array(sizes, dtype=int))


def logistic(
    X: Tensor,
    y: Tensor,
    weight: Tensor,
    prior: Tensor,
    offset: Tensor | None = None,
    lower: Tensor | None = None,
) -> Tensor:
    """Weights ``(p,)`` of the largest posterior of a logistic regression, by projected Newton steps.

    Args:
        X: ``(n, p)`` inputs.
        y: ``(n,)`` in [0, 1].
        weight: ``(n,)`` of the rows.
        prior: ``(p,)`` precision of the weights around 0.
        offset: ``(n,)`` added to the log-odds.
        lower: ``(p,)`` smallest allowed weights; by default none.

    Example:
        >>> X, y = torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
        >>> logistic(X, y, torch.ones(4).double(), torch.zeros(1).double()).exp()  # odds 3 : 1
        tensor([3.0000], dtype=torch.float64)
    """
    w = torch.zeros_like(prior)
    base = torch.zeros_like(y) if offset is None else offset
    floor = torch.full_like(prior, -torch.inf) if lower is None else lower

    def loss(w: Tensor) -> float:
        f = X @ w + base
        misfit = weight @ (softplus(f) - y * f)
        return float(misfit + 0.5 * (prior * w) @ w)

    value = loss(w)
    for _ in range(100):
        p = torch.sigmoid(X @ w + base)
        slope = X.T @ (weight * (p - y)) + prior * w
        free = ((w > floor) | (slope < 0)).to(prior)  # the others stay at their bounds
        curvature = _curvature(X, p, weight, prior) * torch.outer(free, free)
        step = linalg.solve_positive(curvature + (1 - free).diag(), slope * free)
        reach = float((X @ step).abs().max().clamp_min(1e-9))
        share = min(1.0, 5.0 / reach)
        w, value = _descend(loss, w, value, share * step, floor)
        if float(step.abs().max()) < 1e-9:
            break
    return w


def _descend(
    loss: Callable[[Tensor], float], w: Tensor, value: float, step: Tensor, floor: Tensor
) -> tuple[Tensor, float]:
    """``w - step``, nowhere below ``floor``, and the loss there; the step is halved until the loss does not
    rise.
    """
    for halving in range(20):
        moved = torch.maximum(w - 0.5**halving * step, floor)
        reached = loss(moved)
        if reached <= value + 1e-12 * abs(value):
            break
    return moved, reached


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
    curvature = _curvature(X, torch.sigmoid(log_odds), weight, prior)
    return linalg.inverse_positive(cholesky(curvature))


def _curvature(X: Tensor, p: Tensor, weight: Tensor, prior: Tensor) -> Tensor:
    variance = (weight * p * (1 - p))[:, None]
    return X.T @ (variance * X) + prior.diag()
