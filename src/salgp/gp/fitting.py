"""Fit a GP with a given structure to residuals or to correctness; shared by all GP calibrators.

Free functions on values: `fit_gaussian` and `fit_bernoulli` learn hyperparameters and condition; `Fitted` is
all that prediction needs. Exact inference is used while the matrix is small, inducing rows (greedy
conditional variance) beyond that; which one was used is part of the result.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from salgp.gp.covariance import Covariance
from salgp.gp.kernels import Gaps, Rows, gaps, self_gaps
from salgp.gp.likelihood import (
    Sites,
    bernoulli_sites,
    exact_leave_out_density,
    gaussian_sites,
    inducing_leave_out_density,
    laplace_sites,
)
from salgp.gp.linalg import threads_for
from salgp.gp.optimise import (
    AtBoundWarning,
    Fit,
    NotConvergedWarning,
    Parameter,
    Scale,
    maximise,
    restarted,
    started,
    typical_square,
)
from salgp.gp.regression import (
    Posterior,
    Statistics,
    condition_exact,
    condition_inducing,
    exact_log_evidence,
    inducing_log_evidence,
    inducing_rows,
    statistics,
)
from salgp.io import storable

__all__ = ["EXACT_LIMIT", "Fitted", "Settings", "fit_bernoulli", "fit_gaussian"]

EXACT_LIMIT = 1200
"""Largest number of rows for which ``inference="auto"`` factorises the full matrix."""


LEAVE_OUT_TOLERANCE = 3e-5
"""Relative change at which a search by leave-one-out density stops: the density is flat around its optimum,
and less than this is lost.
"""


@dataclass(frozen=True)
class Settings:
    """How to learn: see the arguments of `salgp.SALGP` of the same names; each observation stands in
    ``repeats`` consecutive rows, and ``inference="auto"`` is exact up to ``exact_limit`` rows.
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
    exact_limit: int = EXACT_LIMIT
    start: str = "data"
    fixed: Mapping[str, float] = field(default_factory=dict)
    approximation: str = "bound"
    prior: str | None = None

    def exact(self, n_rows: int) -> bool:
        """Is the exact matrix affordable, or asked for?"""
        if self.inference not in ("auto", "exact", "inducing"):
            raise ValueError(f"inference must be 'auto', 'exact' or 'inducing', got {self.inference!r}")
        return self.inference == "exact" or (self.inference == "auto" and n_rows <= self.exact_limit)

    def largest_matrix(self, n_rows: int) -> int:
        """Entries of the largest matrix of a fit to ``n_rows`` rows."""
        return n_rows * (n_rows if self.exact(n_rows) else min(self.n_inducing, n_rows))

    def laplace(self) -> bool:
        """Expand a Bernoulli likelihood around the mode, and not bound it?"""
        if self.approximation not in ("bound", "laplace"):
            raise ValueError(f"approximation must be 'bound' or 'laplace', got {self.approximation!r}")
        return self.approximation == "laplace"

    def leaves_out(self) -> bool:
        """Learn by leave-one-out density, and not by evidence? By default where observations are repeated."""
        if self.objective not in ("auto", "evidence", "leave-one-out"):
            raise ValueError(
                f"objective must be 'auto', 'evidence' or 'leave-one-out', got {self.objective!r}"
            )
        return self.objective == "leave-one-out" or (self.objective == "auto" and self.repeats > 1)


@storable
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted GP.

    Args:
        posterior: predicts the latent function.
        log_noise: learned noise of a Gaussian likelihood (0 for Bernoulli).
        mean_weights: weights of the parametric mean's columns (empty where the mean is zero).
        log_evidence: (bound of the) log marginal likelihood.
        inference: ``exact`` or ``inducing``.
        converged: did the optimiser converge?
        reason: why it stopped.
        at_bounds: names of hyperparameters that ended on a bound: a variance at its lower one is a term
            switched off, a noise or a lengthscale there is not determined by the data.
        y: site targets, for exact inference.
        noise: site noise, for exact inference.
        summary: summed statistics, for inducing inference.
    """

    posterior: Posterior
    log_noise: float
    mean_weights: Tensor
    log_evidence: float
    inference: str
    converged: bool
    reason: str
    at_bounds: tuple[str, ...] = ()
    y: Tensor | None = None
    noise: Tensor | None = None
    summary: Statistics | None = None

    def to(self, device: torch.device | str) -> Fitted:
        """The same GP, and what it was conditioned on, on another device."""
        parts = {name: getattr(self, name) for name in ("posterior", "mean_weights", "y", "noise", "summary")}
        return replace(self, **{name: x.to(device) for name, x in parts.items() if x is not None})


@dataclass(frozen=True, eq=False)
class _Problem:
    """Fixed part of a fit: rows and their gaps, computed once for the whole search."""

    covariance: Covariance
    rows: Rows
    inducing: Rows | None
    full: Gaps
    small: Gaps | None
    own: Gaps
    parameters: Sequence[Parameter] = ()

    def log_prior(self, theta: Mapping[str, Tensor]) -> Tensor | float:
        return sum(p.log_prior(theta[p.name]) for p in self.parameters)

    def log_evidence(self, theta: Mapping[str, Tensor], y: Tensor, noise: Tensor) -> Tensor:
        if self.small is None:
            return exact_log_evidence(self.covariance(theta, self.full), y, noise)
        return inducing_log_evidence(self.covariance(theta, self.small), self.summarise(theta, y, noise))

    def leave_out_density(
        self, theta: Mapping[str, Tensor], y: Tensor, noise: Tensor, repeats: int
    ) -> Tensor:
        if self.small is None:
            return exact_leave_out_density(self.covariance(theta, self.full), y, noise, repeats)
        Kuu, Kuf, prior = (
            self.covariance(theta, self.small),
            self.covariance(theta, self.full),
            self.covariance(theta, self.own),
        )
        return inducing_leave_out_density(Kuu, Kuf, prior, y, noise, repeats)

    def summarise(self, theta: Mapping[str, Tensor], y: Tensor, noise: Tensor) -> Statistics:
        return statistics(self.covariance(theta, self.full), self.covariance(theta, self.own), y, noise)

    def condition(
        self, theta: Mapping[str, Tensor], y: Tensor, noise: Tensor
    ) -> tuple[Posterior, Statistics | None]:
        if self.inducing is None:
            return condition_exact(self.covariance, theta, self.rows, y, noise), None
        summary = self.summarise(theta, y, noise)
        return condition_inducing(self.covariance, theta, self.inducing, summary), summary

    def moments(self, theta: Mapping[str, Tensor], posterior: Posterior) -> tuple[Tensor, Tensor]:
        return posterior.moments(self.covariance(theta, self.full).T, self.covariance(theta, self.own))


def fit_gaussian(
    covariance: Covariance, rows: Rows, y: Tensor, settings: Settings, weight: Tensor | float = 1.0
) -> Fitted:
    """Learn hyperparameters and noise of ``N(y | f, noise)`` by evidence or leave-one-out density, then
    condition.

    Args:
        covariance: formula of the prior.
        rows: ``N`` flat rows.
        y: ``(N,)`` targets.
        settings: how to learn.
        weight: of each observation in the likelihood; below 1 for repeated ones.
    """
    with threads_for(settings.largest_matrix(len(rows))):
        return _fit_gaussian(covariance, rows, y, settings, weight)


def _fit_gaussian(
    covariance: Covariance, rows: Rows, y: Tensor, settings: Settings, weight: Tensor | float
) -> Fitted:
    variance = max(float(y.var(correction=0)) + float(y.mean()) ** 2, 1e-6)
    noise_start = torch.tensor(0.3 * variance, dtype=torch.float64).log()
    log_noise = Parameter("log_noise", noise_start, float(noise_start) - 10.0, float(noise_start) + 5.0)
    problem, parameters = _prepare(covariance, rows, variance, settings, [log_noise])

    def evidence(theta: Mapping[str, Tensor]) -> Tensor:
        sites = gaussian_sites(y, theta["log_noise"], weight)
        return problem.log_evidence(theta, sites.target, sites.noise) + sites.constant

    def density(theta: Mapping[str, Tensor]) -> Tensor:
        sites = gaussian_sites(y, theta["log_noise"], weight)
        return problem.leave_out_density(theta, sites.target, sites.noise, settings.repeats)

    def posterior(theta: Mapping[str, Tensor]) -> Tensor:
        return (density if settings.leaves_out() else evidence)(theta) + problem.log_prior(theta)

    fit = _search(posterior, parameters, settings, LEAVE_OUT_TOLERANCE if settings.leaves_out() else 1e-6)
    if settings.leaves_out() or settings.prior:
        fit = replace(fit, value=float(evidence(fit.theta)))
    _report(fit)
    theta = dict(fit.theta)
    sites = gaussian_sites(y, theta["log_noise"], weight)
    noise = float(theta.pop("log_noise"))
    return _finish(problem, theta, sites, fit, noise, y.new_zeros(0))


def fit_bernoulli(
    covariance: Covariance,
    rows: Rows,
    correct: Tensor,
    design: Tensor,
    settings: Settings,
    weight: Tensor | float = 1.0,
) -> Fitted:
    """Learn log-odds of correctness ``f = design @ weights + g``, ``g ~ GP``, by the Jaakkola-Jordan bound.

    Args:
        covariance: formula of ``g``.
        rows: ``N`` flat rows.
        correct: ``(N,)`` 0 or 1.
        design: ``(N, p)`` columns of the parametric mean; the first is free (bias), the others have weights
            >= 0.
        settings: how to learn.
        weight: of each observation in the likelihood.
    """
    with threads_for(settings.largest_matrix(len(rows))):
        return _fit_bernoulli(covariance, rows, correct, design, settings, weight)


def _fit_bernoulli(
    covariance: Covariance,
    rows: Rows,
    correct: Tensor,
    design: Tensor,
    settings: Settings,
    weight: Tensor | float,
) -> Fitted:
    problem, parameters = _prepare(covariance, rows, 1.0, settings, _mean_parameters(design))
    observed = _Observed(correct, design, weight, settings.laplace())
    climbs = [
        _climb(problem, start, observed, settings)
        for start in restarted(parameters, settings.restarts, settings.seed)
    ]
    fit, sites = max(climbs, key=lambda climb: climb[0].value)
    sites = _at_mode(problem, fit.theta, observed, sites) if observed.laplace else sites
    _report(fit)
    weights = torch.cat([fit.theta["mean.bias"][None], fit.theta["mean.slopes"]])
    centred = replace(sites, target=sites.target - design @ weights)
    theta = {k: v for k, v in fit.theta.items() if not k.startswith("mean.")}
    return _finish(problem, theta, centred, fit, 0.0, weights)


@dataclass(frozen=True, eq=False)
class _Observed:
    """Fixed part of a Bernoulli fit: what was seen, and the columns of its mean."""

    correct: Tensor
    design: Tensor
    weight: Tensor | float
    laplace: bool = False

    def sites(self, mean: Tensor, variance: Tensor) -> Sites:
        if self.laplace:
            return laplace_sites(self.correct, mean, self.weight)
        return bernoulli_sites(self.correct, mean, variance, self.weight)


def _climb(
    problem: _Problem, parameters: list[Parameter], seen: _Observed, settings: Settings
) -> tuple[Fit, Sites]:
    """Alternate a few steps on the hyperparameters with an update of the sites; neither lowers the bound."""
    stride, total = (
        (10, settings.max_steps or 300) if settings.optimizer == "lbfgs" else (50, settings.max_steps or 2000)
    )
    fit = Fit({p.name: p.start for p in parameters}, -float("inf"), False, "not started", ())
    sites = seen.sites(_mean(fit.theta, seen.design), torch.ones_like(seen.correct))
    enough = len(seen.correct) ** 0.5
    for done in range(0, total, stride):
        step = _round(
            problem, parameters, seen, sites, replace(settings, max_steps=min(stride, total - done)), fit
        )
        gain, fit = step.value - fit.value, step
        mean = _mean(fit.theta, seen.design)
        posterior, _ = problem.condition(fit.theta, sites.target - mean, sites.noise)
        correction, variance = problem.moments(fit.theta, posterior)
        sites = seen.sites(mean + correction, variance)
        if gain < 1e-4 * enough:
            break
    if gain < 1e-2 * enough:
        return replace(fit, converged=True, reason="the bound stopped rising"), sites
    return replace(fit, converged=False, reason=f"the bound was still rising after {total} steps"), sites


def _at_mode(
    problem: _Problem, theta: Mapping[str, Tensor], seen: _Observed, sites: Sites, rounds: int = 100
) -> Sites:
    """Newton's steps to the mode at fixed hyperparameters; sites that are expanded there."""
    fixed, before = _mean(theta, seen.design), torch.full_like(seen.correct, torch.inf)
    for _ in range(rounds):
        posterior, _ = problem.condition(theta, sites.target - fixed, sites.noise)
        correction, variance = problem.moments(theta, posterior)
        if float((correction - before).abs().max()) < 1e-10 * (1.0 + float(correction.abs().max())):
            break
        before = correction
        sites = seen.sites(fixed + correction, variance)
    return sites


def _round(
    problem: _Problem,
    parameters: list[Parameter],
    seen: _Observed,
    sites: Sites,
    settings: Settings,
    fit: Fit,
) -> Fit:
    def objective(theta: Mapping[str, Tensor]) -> Tensor:
        return (
            problem.log_evidence(theta, sites.target - _mean(theta, seen.design), sites.noise)
            + sites.constant
            + problem.log_prior(theta)
        )

    return _search(
        objective, [replace(p, start=fit.theta[p.name]) for p in parameters], replace(settings, restarts=0)
    )


def _prepare(
    covariance: Covariance, rows: Rows, variance: float, settings: Settings, more: Sequence[Parameter]
) -> tuple[_Problem, list[Parameter]]:
    """Rows and distances of a fit, and all its parameters: those of the covariance, and ``more``."""
    scale = Scale({name: typical_square(rows.blocks[name]) for name, _ in covariance.reads()}, variance)
    some = next(iter(rows.blocks.values()))
    parameters = started(
        [*covariance.parameters(scale), *more], settings.start, settings.prior, settings.fixed
    )
    parameters = [replace(p, start=p.start.to(some.device)) for p in parameters]
    own = self_gaps(rows, covariance)
    if settings.exact(len(rows)):
        compared = gaps(rows, rows, covariance)
        return _Problem(covariance, rows, None, compared, None, own, parameters), parameters
    start = {p.name: p.start for p in parameters}
    inducing = rows[inducing_rows(covariance, start, rows, settings.n_inducing)]
    return _Problem(
        covariance,
        rows,
        inducing,
        gaps(inducing, rows, covariance),
        gaps(inducing, inducing, covariance),
        own,
        parameters,
    ), parameters


def _search(
    objective: Callable[[Mapping[str, Tensor]], Tensor],
    parameters: list[Parameter],
    settings: Settings,
    tolerance: float = 1e-6,
) -> Fit:
    return maximise(
        objective,
        parameters,
        optimizer=settings.optimizer,
        max_steps=settings.max_steps,
        tolerance=tolerance,
        learning_rate=settings.learning_rate,
        restarts=settings.restarts,
        seed=settings.seed,
    )


def _report(fit: Fit) -> None:
    if not fit.converged:
        warnings.warn(
            f"hyperparameter optimisation did not converge: {fit.reason}", NotConvergedWarning, stacklevel=7
        )
    undetermined = [name for name in fit.at_bounds if name == "log_noise" or _matters(name, fit)]
    if undetermined:
        ends = ", ".join(f"{name} = {_shown(fit.theta[name])}" for name in undetermined)
        why = (
            "; every correct sample has the residual 1 - s exactly, so that the noise can vanish"
            if "log_noise" in undetermined
            else ""
        )
        warnings.warn(f"hyperparameters ended on their bounds: {ends}{why}", AtBoundWarning, stacklevel=7)


def _matters(name: str, fit: Fit) -> bool:
    """Is it the lengthscale of a term whose own variance is not switched off?"""
    term, _, what = name.rpartition(".")
    return what.startswith("log_lengthscale") and f"{term}.log_variance" not in fit.at_bounds


def _shown(value: Tensor) -> str:
    numbers = ", ".join(f"{v:.3g}" for v in value.reshape(-1).tolist())
    return f"[{numbers}]" if value.ndim else numbers


def _finish(
    problem: _Problem, theta: Mapping[str, Tensor], sites: Sites, fit: Fit, log_noise: float, weights: Tensor
) -> Fitted:
    posterior, summary = problem.condition(theta, sites.target, sites.noise)
    kept = {"y": sites.target, "noise": sites.noise} if summary is None else {}
    inference = "exact" if summary is None else "inducing"
    return Fitted(
        posterior,
        log_noise,
        weights,
        fit.value,
        inference,
        fit.converged,
        fit.reason,
        fit.at_bounds,
        summary=summary,
        **kept,
    )


def _mean_parameters(design: Tensor) -> list[Parameter]:
    bias = Parameter("mean.bias", design.new_zeros(()), -30.0, 30.0)
    return [bias, Parameter("mean.slopes", design.new_full((design.shape[1] - 1,), 0.5), 0.0, 30.0)]


def _mean(theta: Mapping[str, Tensor], design: Tensor) -> Tensor:
    return design[:, 0] * theta["mean.bias"] + design[:, 1:] @ theta["mean.slopes"]
