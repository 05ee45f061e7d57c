"""Fit a GP with a given structure to residuals; shared by all GP calibrators.

`fit_gp` learns the hyperparameters and conditions; `Fitted` is all that prediction needs. Exact inference is
used while the matrix is small, inducing rows (greedy conditional variance) beyond that; which one was used is
part of the result.

`extend` adds samples to a fitted GP, whose hyperparameters stay as they are. With inducing rows that is an
addition of summed statistics; exactly, it is a new factorisation.
"""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.gp import optimise, regression
from salgp.gp.covariance import Covariance, Theta, gaps
from salgp.gp.kernels import Gaps, Rows
from salgp.gp.leave_out import exact_leave_out_density, inducing_leave_out_density
from salgp.gp.optimise import AtBoundWarning, Fit, NotConvergedWarning, Parameter, Scale, maximise, started
from salgp.gp.regression import Posterior, Statistics
from salgp.io import storable

__all__ = ["Fitted", "Observations", "Settings", "extend", "fit_gp"]

LEAVE_OUT_TOLERANCE = 3e-5
"""Relative change at which a search by leave-one-out density stops: the density is flat around its optimum,
and the loss is smaller than this.
"""


@dataclass(frozen=True)
class Settings:
    """How to learn: see the arguments of `salgp.SALGP` of the same names; each observation stands in
    ``repeats`` consecutive rows, and the search begins at the values of ``start`` (see `Fitted.learned`).
    """

    inference: str = "auto"
    n_inducing: int = 256
    optimizer: str = "lbfgs"
    max_steps: int | None = None
    learning_rate: float = 5e-3
    restarts: int = 0
    seed: int = 0
    objective: str = "auto"
    repeats: int = 1
    exact_limit: int = 1200
    prior: str | None = None
    start: Mapping[str, Tensor] | None = None

    def exact(self, n_rows: int) -> bool:
        """Is the exact matrix affordable, or asked for?"""
        if self.inference not in ("auto", "exact", "inducing"):
            raise ValueError(f"inference must be 'auto', 'exact' or 'inducing', got {self.inference!r}")
        return self.inference == "exact" or (self.inference == "auto" and n_rows <= self.exact_limit)

    def largest_matrix(self, n_rows: int) -> int:
        """Entries of the largest matrix of a fit to ``n_rows`` rows."""
        return n_rows * (n_rows if self.exact(n_rows) else min(self.n_inducing, n_rows))

    def leaves_out(self) -> bool:
        """Learn by leave-one-out density, and not by evidence? By default where observations are repeated."""
        if self.objective not in ("auto", "evidence", "leave-one-out"):
            what = "'auto', 'evidence' or 'leave-one-out'"
            raise ValueError(f"objective must be {what}, got {self.objective!r}")
        return self.objective == "leave-one-out" or (self.objective == "auto" and self.repeats > 1)


@dataclass(frozen=True, eq=False)
class Observations:
    """Samples as a GP sees them.

    Args:
        rows: ``N`` flat rows; a stacked structure has one per sample and layer.
        target: ``(N,)`` residuals.
    """

    rows: Rows
    target: Tensor


@storable
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted GP.

    Args:
        posterior: predicts the latent function.
        log_noise: logarithm of the learned noise variance.
        log_evidence: (bound of the) log marginal likelihood.
        converged: did the optimiser converge?
        reason: why it stopped.
        at_bounds: names of hyperparameters that ended on a bound: a variance at its lower one is a term
            switched off, a noise or a lengthscale there is not determined by the data.
        y: residuals, for exact inference.
        summary: summed statistics, for inducing inference.
    """

    posterior: Posterior
    log_noise: float
    log_evidence: float
    converged: bool
    reason: str
    at_bounds: tuple[str, ...] = ()
    y: Tensor | None = None
    summary: Statistics | None = None

    @property
    def inference(self) -> str:
        """``exact`` or ``inducing``."""
        return "exact" if self.summary is None else "inducing"

    @property
    def learned(self) -> dict[str, Tensor]:
        """Hyperparameters of covariance and noise, from which another search can begin."""
        noise = torch.tensor(self.log_noise, dtype=torch.float64)
        return {**self.posterior.theta, "log_noise": noise}


@dataclass(frozen=True, eq=False)
class _Problem:
    """Fixed part of a fit: rows and their gaps, computed once for the whole search."""

    covariance: Covariance
    seen: Observations
    repeats: int
    inducing: Rows | None
    parameters: Sequence[Parameter]
    full: Gaps
    small: Gaps | None
    single: Gaps

    def log_prior(self, theta: Theta) -> Tensor | float:
        return sum(p.log_prior(theta) for p in self.parameters)

    def log_evidence(self, theta: Theta) -> Tensor:
        if self.small is None:
            K, noise = self.covariance(theta, self.full), self.noise(theta)
            return regression.exact_log_evidence(K, self.seen.target, noise)
        Kuu = self.covariance(theta, self.small)
        return regression.inducing_log_evidence(Kuu, self.summarise(theta))

    def leave_out_density(self, theta: Theta) -> Tensor:
        K = self.covariance(theta, self.full)
        y, noise = self.seen.target, self.noise(theta)
        if self.small is None:
            return exact_leave_out_density(K, y, noise, self.repeats)
        Kuu = self.covariance(theta, self.small)
        return inducing_leave_out_density(Kuu, K, self.prior_variance(theta), y, noise, self.repeats)

    def noise(self, theta: Theta) -> Tensor:
        return theta["log_noise"].exp().expand_as(self.seen.target)

    def prior_variance(self, theta: Theta) -> Tensor:
        return self.covariance(theta, self.single)[..., 0, 0]

    def summarise(self, theta: Theta) -> Statistics:
        K, prior = self.covariance(theta, self.full), self.prior_variance(theta)
        return regression.statistics(K, prior, self.seen.target, self.noise(theta))


def fit_gp(covariance: Covariance, seen: Observations, settings: Settings) -> Fitted:
    """Learn hyperparameters and noise of ``N(y | f, noise)`` by evidence or leave-one-out density, then
    condition.

    Args:
        covariance: formula of the prior.
        seen: residuals ``y``.
        settings: how to learn.
    """
    problem = _prepare(covariance, seen, settings)
    leaves_out = settings.leaves_out()

    likelihood = problem.leave_out_density if leaves_out else problem.log_evidence
    fit = maximise(
        lambda theta: likelihood(theta) + problem.log_prior(theta),
        problem.parameters,
        optimizer=settings.optimizer,
        max_steps=settings.max_steps,
        learning_rate=settings.learning_rate,
        tolerance=LEAVE_OUT_TOLERANCE if leaves_out else 1e-6,
        restarts=settings.restarts,
        seed=settings.seed,
    )
    if leaves_out or settings.prior:
        fit = replace(fit, value=float(problem.log_evidence(fit.theta)))
    _report(fit)
    return _condition(problem, fit)


def _prepare(covariance: Covariance, seen: Observations, settings: Settings) -> _Problem:
    """Rows and distances of a fit, and the parameters of covariance and noise."""
    rows = seen.rows
    parameters = _parameters(covariance, seen, settings)
    inducing, small = None, None
    if settings.exact(len(rows)):
        full = gaps(rows, rows, covariance)
    else:
        theta = {p.name: p.start for p in parameters}
        inducing = rows[regression.inducing_rows(covariance, theta, rows, settings.n_inducing)]
        small = gaps(inducing, inducing, covariance)
        full = gaps(inducing, rows, covariance)
    each = rows.single()
    single, repeats = gaps(each, each, covariance), settings.repeats
    return _Problem(covariance, seen, repeats, inducing, parameters, full, small, single)


def _parameters(covariance: Covariance, seen: Observations, settings: Settings) -> list[Parameter]:
    """Hyperparameters of covariance and noise, started at scales of the data or where another fit ended."""
    y, blocks = seen.target, seen.rows.blocks
    variance = max(float(y.var(correction=0)) + float(y.mean()) ** 2, 1e-6)
    squared = {name: optimise.typical_square(blocks[name]) for name, _ in covariance.reads()}
    start = math.log(0.3 * variance)
    level = torch.tensor(start, dtype=torch.float64)
    log_noise = Parameter("log_noise", level, start - 10.0, start + 5.0)
    every = [*covariance.parameters(Scale(squared, variance)), log_noise]
    found = started(every, settings.prior, gpytorch=settings.optimizer == "adam")
    known = settings.start or {}
    return [replace(p, start=known.get(p.name, p.start).to(y.device)) for p in found]


def _condition(problem: _Problem, fit: Fit) -> Fitted:
    """The GP with the hyperparameters that were found."""
    theta, noise = dict(fit.theta), problem.noise(fit.theta)
    outcome = float(theta.pop("log_noise")), fit.value, fit.converged, fit.reason, fit.at_bounds
    rows, y = problem.seen.rows, problem.seen.target
    if problem.inducing is None:
        posterior = regression.condition_exact(problem.covariance, theta, rows, y, noise)
        return Fitted(posterior, *outcome, y=y)
    summary = problem.summarise(fit.theta)
    posterior = regression.condition_inducing(problem.covariance, theta, problem.inducing, summary)
    return Fitted(posterior, *outcome, summary=summary)


def _report(fit: Fit) -> None:
    if not fit.converged:
        why = f"hyperparameter optimisation did not converge: {fit.reason}"
        warnings.warn(why, NotConvergedWarning, stacklevel=6)
    undetermined = [name for name in fit.at_bounds if name == "log_noise" or _matters(name, fit)]
    if undetermined:
        ends = ", ".join(f"{name} = {_shown(fit.theta[name])}" for name in undetermined)
        why = f"hyperparameters ended on their bounds: {ends}"
        if "log_noise" in undetermined:
            why += "; every correct sample has the residual 1 - s exactly, so that the noise can vanish"
        warnings.warn(why, AtBoundWarning, stacklevel=6)


def _matters(name: str, fit: Fit) -> bool:
    """Is it the lengthscale of a term whose own variance is not switched off?"""
    term, _, what = name.rpartition(".")
    return what.startswith("log_lengthscale") and f"{term}.log_variance" not in fit.at_bounds


def _shown(value: Tensor) -> str:
    numbers = ", ".join(f"{v:.3g}" for v in value.flatten().tolist())
    return f"[{numbers}]" if value.ndim else numbers


@torch.no_grad()
def extend(fitted: Fitted, new: Observations) -> Fitted:
    """Condition on further samples."""
    p = fitted.posterior
    if fitted.summary is None:
        assert fitted.y is not None
        rows = Rows.concatenate([p.rows, new.rows])
        y = torch.cat([fitted.y, new.target])
        noise = torch.full_like(y, fitted.log_noise).exp()
        posterior = regression.condition_exact(p.covariance, p.theta, rows, y, noise)
        return replace(fitted, posterior=posterior, y=y)
    Kuf, prior = p.covariance_to(new.rows).mT, p.prior_variance(new.rows)
    noise = torch.full_like(new.target, fitted.log_noise).exp()
    summary = fitted.summary + regression.statistics(Kuf, prior, new.target, noise)
    posterior = regression.condition_inducing(p.covariance, p.theta, p.rows, summary)
    return replace(fitted, posterior=posterior, summary=summary)
