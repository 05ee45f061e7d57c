"""Maximise an objective over named, bounded parameters, and say plainly how it ended.

Hyperparameters: names, starting points, bounds and priors.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.gp.linalg import NotPositiveDefiniteError, one_blas_thread

__all__ = ["AtBoundWarning", "Fit", "Parameter", "Scale", "maximise", "started", "tell_unless_settled"]

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


def started(
    parameters: Sequence[Parameter],
    start: str = "data",
    prior: str | None = None,
    fixed: Mapping[str, float] | None = None,
) -> list[Parameter]:
    """The parameters with the starting points, prior and fixed values that were asked for.

    Args:
        parameters: as a covariance names them, started at scales of the data.
        start: ``data`` to leave them there, or ``gpytorch`` for where GPyTorch starts.
        prior: of lengthscales; None, or ``dimension-scaled``.
        fixed: values of parameters that are not learned, by name.
    """
    held = fixed or {}
    doubled = [name for name, count in Counter(p.name for p in parameters).items() if count > 1]
    if doubled:
        raise ValueError(
            f"two terms of the covariance have a parameter called {doubled[0]!r}; give one of them "
            f"another name, e.g. Stationary('x', 'rbf', name='slow')"
        )
    unknown = set(held) - {p.name for p in parameters}
    if unknown:
        known = ", ".join(p.name for p in parameters)
        raise ValueError(f"cannot fix {sorted(unknown)[0]!r}; the hyperparameters are {known}")
    if start not in ("data", "gpytorch"):
        raise ValueError(f"start must be 'data' or 'gpytorch', got {start!r}")
    if prior not in (None, "dimension-scaled"):
        raise ValueError(f"prior must be None or 'dimension-scaled', got {prior!r}")
    moved = [_gpytorch_start(p) for p in parameters] if start == "gpytorch" else list(parameters)
    if prior:
        moved = [
            _dimension_scaled(p, float(own.start.mean())) for p, own in zip(moved, parameters, strict=True)
        ]
    return [_fixed(p, held[p.name]) if p.name in held else p for p in moved]


def _gpytorch_start(p: Parameter) -> Parameter:
    """Started where GPyTorch starts a positive parameter, away from its bounds; others as they are."""
    if "log_" not in p.name:
        return p
    start = float(torch.tensor(GPYTORCH_START).log())
    lower = float(torch.tensor(GPYTORCH_NOISE).log()) if p.name == "log_noise" else min(p.lower, start - 20.0)
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


def _fixed(p: Parameter, value: float) -> Parameter:
    return Parameter(p.name, torch.full_like(p.start, value), value, value)


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
        restarts: final value of every restart; the best one is ``value``.
        at_bounds: names of parameters of which at least one entry ended on a bound.
    """

    theta: Mapping[str, Tensor]
    value: float
    converged: bool
    reason: str
    history: tuple[float, ...]
    restarts: tuple[float, ...] = ()
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
        optimizer: ``"lbfgs"`` (bounded quasi-Newton), ``"adam"`` (2000 steps, rate 5e-3) on the parameters as
            they are, or ``"adam-softplus"``: the same on ``log(exp(v) - 1)`` of positive parameters ``v``,
            which is what a step of GPyTorch changes.
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
    if optimizer not in ("lbfgs", "adam", "adam-softplus"):
        raise ValueError(f"unknown optimizer {optimizer!r}; choose 'lbfgs', 'adam' or 'adam-softplus'")
    searches: dict[str, Callable[..., Fit]] = {
        "lbfgs": _lbfgs,
        "adam": _adam,
        "adam-softplus": _adam_softplus,
    }
    run = searches[optimizer]
    steps = max_steps or (200 if optimizer == "lbfgs" else 2000)
    starts = [_flatten([p.start for p in each]) for each in restarted(parameters, restarts, seed)]
    fits = [run(objective, parameters, start, steps, tolerance, learning_rate) for start in starts]
    best = max(fits, key=lambda fit: fit.value if np.isfinite(fit.value) else -np.inf)
    usable = np.isfinite(best.value) and best.value > NO_VALUE
    reason = best.reason if usable else "no starting point has a finite objective"
    return Fit(
        best.theta,
        best.value,
        bool(best.converged and usable),
        reason,
        best.history,
        tuple(fit.value for fit in fits),
        _at_bounds(parameters, best.theta),
    )


def restarted(parameters: Sequence[Parameter], restarts: int, seed: int) -> list[list[Parameter]]:
    """The parameters themselves, and ``restarts`` copies that start at seeded random points within the
    bounds.
    """
    generator = np.random.default_rng(seed)
    lower, upper = _bounds(parameters)
    centre = _flatten([p.start for p in parameters])
    starts = [
        np.clip(centre + 0.25 * (upper - lower) * generator.uniform(-1, 1, centre.shape), lower, upper)
        for _ in range(restarts)
    ]
    return [
        list(parameters),
        *(
            [
                replace(p, start=start)
                for p, start in zip(parameters, _named(parameters, x).values(), strict=True)
            ]
            for x in starts
        ),
    ]


def tell_unless_settled(found: Any, what: str) -> None:
    """Warn where a search of `scipy.optimize.minimize` ended short of its optimum.

    A line search that can no longer see a difference also reports failure; with a gradient that is nothing
    beside the objective it has arrived all the same.

    Example:
        >>> from scipy.optimize import minimize
        >>> tell_unless_settled(minimize(lambda x: (x**2).sum(), [1.0], method="L-BFGS-B"), "a parabola")
    """
    slope = np.abs(np.asarray(found.jac)).max(initial=0.0) if "jac" in found else np.inf
    if not found.success and not slope <= 2e-3 * (1.0 + abs(float(found.fun))):
        warnings.warn(f"{what} did not converge: {found.message}", NotConvergedWarning, stacklevel=3)


def _lbfgs(
    objective: Objective,
    parameters: Sequence[Parameter],
    start: np.ndarray,
    steps: int,
    tolerance: float,
    _: float,
) -> Fit:
    from scipy.optimize import minimize

    history: list[float] = []

    def negative(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = _value_and_gradient(objective, parameters, x)
        history.append(value)
        return -value, -gradient

    lower, upper = _bounds(parameters)
    if bool((lower == upper).all()):
        value = -negative(lower)[0]
        return Fit(_named(parameters, lower), value, True, "every parameter is fixed", tuple(history))
    with one_blas_thread():
        result = minimize(
            negative,
            np.clip(start, lower, upper),
            jac=True,
            method="L-BFGS-B",
            bounds=list(zip(lower, upper, strict=True)),
            options={"maxiter": steps, "ftol": tolerance, "gtol": 1e-5, "maxcor": 20},
        )
    flat = _at_precision(-np.asarray(result.jac), result.x, lower, upper, -float(result.fun))
    reason = str(result.message) + (": numerical precision reached" if flat and not result.success else "")
    return Fit(
        _named(parameters, result.x), -float(result.fun), bool(result.success or flat), reason, tuple(history)
    )


def _adam(
    objective: Objective,
    parameters: Sequence[Parameter],
    start: np.ndarray,
    steps: int,
    _: float,
    rate: float,
    positive: np.ndarray | None = None,
) -> Fit:
    """Adam inside the bounds; entries marked ``positive`` are logarithms that move as ``softplus``."""
    lower, upper = (torch.as_tensor(b) for b in _bounds(parameters))
    moves = _Moves(
        torch.zeros(len(start), dtype=torch.bool) if positive is None else torch.as_tensor(positive)
    )
    x = moves.to_steps(torch.as_tensor(start).clamp(lower, upper)).requires_grad_(True)
    step, history = torch.optim.Adam([x], lr=rate), []
    best_value, best = -np.inf, moves.to_values(x.detach())
    for _step in range(steps):
        at = moves.to_values(x.detach())
        value, gradient = _value_and_gradient(objective, parameters, at.numpy())
        history.append(value)
        if value > best_value:
            best_value, best = value, at.clone()
        x.grad = -torch.as_tensor(gradient) * moves.slope(x.detach())
        step.step()
        with torch.no_grad():
            x.copy_(moves.to_steps(moves.to_values(x).clamp(lower, upper)))
    flat = len(history) > 20 and abs(history[-1] - history[-20]) <= 1e-3 * (1.0 + abs(history[-1]))
    reason = f"ran its {steps} steps" + ("" if flat else " and was still improving")
    return Fit(_named(parameters, best.numpy()), best_value, flat, reason, tuple(history))


def _adam_softplus(
    objective: Objective,
    parameters: Sequence[Parameter],
    start: np.ndarray,
    steps: int,
    tolerance: float,
    rate: float,
) -> Fit:
    logs = [np.full(p.start.numel(), "log_" in p.name) for p in parameters]
    positive = np.concatenate([np.zeros(0, bool), *logs])
    return _adam(objective, parameters, start, steps, tolerance, rate, positive)


@dataclass(frozen=True, eq=False)
class _Moves:
    """What a step of Adam changes: the value itself, or ``x`` with ``log softplus(x)`` = value."""

    positive: Tensor

    def to_steps(self, values: Tensor) -> Tensor:
        v = values.exp()
        return torch.where(self.positive, v + torch.log(-torch.expm1(-v)), values)

    def to_values(self, x: Tensor) -> Tensor:
        return torch.where(self.positive, torch.nn.functional.softplus(x, threshold=1e9).log(), x)

    def slope(self, x: Tensor) -> Tensor:
        soft = torch.nn.functional.softplus(x, threshold=1e9)
        return torch.where(self.positive, torch.sigmoid(x) / soft, torch.ones_like(x))


def _at_bounds(parameters: Sequence[Parameter], theta: Mapping[str, Tensor]) -> tuple[str, ...]:
    ended = []
    for p in parameters:
        near = 1e-6 * (p.upper - p.lower)
        value = theta[p.name]
        if near > 0 and bool(((value <= p.lower + near) | (value >= p.upper - near)).any()):
            ended.append(p.name)
    return tuple(ended)


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
