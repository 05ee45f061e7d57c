"""Fit a GP with a given structure to residuals or to correctness; shared by all GP calibrators.

Free functions on values: `fit_gaussian` and `fit_bernoulli` learn hyperparameters and condition; `Fitted` is
all that prediction needs. Exact inference is used while the matrix is small, inducing rows (greedy
conditional variance) beyond that; which one was used is part of the result.

`extend` and `retract` add labelled samples to a fitted GP and take some back. Hyperparameters stay as they
are. With inducing rows that is an addition or subtraction of summed statistics; exactly, it is a new
factorisation. For a Bernoulli likelihood the sites of the samples already known are kept, those of new
samples are refined until they converge.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from salgp.gp.covariance import Covariance, Theta, gaps
from salgp.gp.kernels import Gaps, Rows
from salgp.gp.likelihood import (
    Sites,
    bernoulli_sites,
    exact_leave_out_density,
    gaussian_sites,
    inducing_leave_out_density,
)
from salgp.gp.optimise import (
    AtBoundWarning,
    Fit,
    NotConvergedWarning,
    Objective,
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

__all__ = [
    "Fitted",
    "Observations",
    "Settings",
    "extend",
    "fit_bernoulli",
    "fit_gaussian",
    "retract",
    "sums_of",
    "with_sums",
]

LEAVE_OUT_TOLERANCE = 3e-5
"""Relative change at which a search by leave-one-out density stops: the density is flat around its optimum,
and the loss is smaller than this.
"""

MOST_ROUNDS = 50
"""Refinements of the Bernoulli sites of new samples."""


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
            raise ValueError(
                f"objective must be 'auto', 'evidence' or 'leave-one-out', got {self.objective!r}"
            )
        return self.objective == "leave-one-out" or (self.objective == "auto" and self.repeats > 1)


@dataclass(frozen=True, eq=False)
class Observations:
    """Samples as a GP sees them.

    Args:
        rows: ``N`` flat rows; a stacked structure has one per sample and layer.
        target: ``(N,)`` residuals (Gaussian) or correctness (Bernoulli).
        design: ``(N, p)`` columns of the parametric mean of the log-odds; ``(N, 0)`` where the mean is zero.
        weight: of each row in the likelihood; below 1 for repeated ones.
    """

    rows: Rows
    target: Tensor
    design: Tensor
    weight: float = 1.0


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
        design: columns of the parametric mean of each row, for exact inference.
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
    design: Tensor | None = None
    summary: Statistics | None = None

    @property
    def is_gaussian(self) -> bool:
        """Was it fitted to residuals, and not to correctness?"""
        return len(self.mean_weights) == 0

    @property
    def learned(self) -> dict[str, Tensor]:
        """Hyperparameters of covariance and noise, from which another search can begin."""
        noise = torch.tensor(self.log_noise, dtype=torch.float64)
        return {**self.posterior.theta, "log_noise": noise}


@dataclass(frozen=True, eq=False)
class _Problem:
    """Fixed part of a fit: rows and their gaps, computed once for the whole search."""

    covariance: Covariance
    rows: Rows
    inducing: Rows | None
    parameters: Sequence[Parameter]
    full: Gaps
    small: Gaps | None
    single: Gaps

    def log_prior(self, theta: Theta) -> Tensor | float:
        return sum(p.log_prior(theta[p.name]) for p in self.parameters)

    def log_evidence(self, theta: Theta, sites: Sites) -> Tensor:
        if self.small is not None:
            return inducing_log_evidence(self.covariance(theta, self.small), self.summarise(theta, sites))
        K = self.covariance(theta, self.full)
        return exact_log_evidence(K, sites.target, sites.noise) + sites.constant

    def leave_out_density(self, theta: Theta, sites: Sites, repeats: int) -> Tensor:
        K = self.covariance(theta, self.full)
        if self.small is None:
            return exact_leave_out_density(K, sites.target, sites.noise, repeats)
        Kuu, prior = self.covariance(theta, self.small), self.prior_variance(theta)
        return inducing_leave_out_density(Kuu, K, prior, sites.target, sites.noise, repeats)

    def prior_variance(self, theta: Theta) -> Tensor:
        return self.covariance(theta, self.single)[..., 0, 0]

    def summarise(self, theta: Theta, sites: Sites, design: Tensor | None = None) -> Statistics:
        K, prior = self.covariance(theta, self.full), self.prior_variance(theta)
        return statistics(K, prior, sites.target, sites.noise, design, sites.constant)

    def condition(self, theta: Theta, sites: Sites) -> Posterior:
        if self.inducing is None:
            return condition_exact(self.covariance, theta, self.rows, sites.target, sites.noise)
        return condition_inducing(self.covariance, theta, self.inducing, self.summarise(theta, sites))


def fit_gaussian(covariance: Covariance, seen: Observations, settings: Settings) -> Fitted:
    """Learn hyperparameters and noise of ``N(y | f, noise)`` by evidence or leave-one-out density, then
    condition.

    Args:
        covariance: formula of the prior.
        seen: residuals ``y``.
        settings: how to learn.
    """
    y = seen.target
    leaves_out = settings.leaves_out()
    variance = max(float(y.var(correction=0)) + float(y.mean()) ** 2, 1e-6)
    start = math.log(0.3 * variance)
    log_noise = Parameter("log_noise", torch.tensor(start, dtype=torch.float64), start - 10.0, start + 5.0)
    problem = _prepare(covariance, seen.rows, variance, settings, [log_noise])

    def learned(theta: Theta) -> Tensor:
        sites = gaussian_sites(y, theta["log_noise"], seen.weight)
        if leaves_out:
            return problem.leave_out_density(theta, sites, settings.repeats) + problem.log_prior(theta)
        return problem.log_evidence(theta, sites) + problem.log_prior(theta)

    tolerance = LEAVE_OUT_TOLERANCE if leaves_out else 1e-6
    fit = _search(learned, problem.parameters, settings, tolerance)
    sites = gaussian_sites(y, fit.theta["log_noise"], seen.weight)
    if leaves_out or settings.prior:
        fit = replace(fit, value=float(problem.log_evidence(fit.theta, sites)))
    return _finish(problem, fit, sites, y.new_zeros(0), seen.design)


def fit_bernoulli(covariance: Covariance, seen: Observations, settings: Settings) -> Fitted:
    """Learn log-odds of correctness ``f = design @ weights + g``, ``g ~ GP``, by the Jaakkola-Jordan bound.

    Args:
        covariance: formula of ``g``.
        seen: correctness; the weight of the first column of the design is free (bias), the others are >= 0.
        settings: how to learn.
    """
    problem = _prepare(covariance, seen.rows, 1.0, settings, _mean_parameters(seen.design))
    starts = restarted(problem.parameters, settings.restarts, settings.seed)
    climbs = (_climb(problem, start, seen, settings) for start in starts)
    fit, sites = max(climbs, key=lambda climb: climb[0].value)
    weights = torch.cat([fit.theta["mean.bias"][None], fit.theta["mean.slopes"]])
    centred = replace(sites, target=sites.target - seen.design @ weights)
    return _finish(problem, fit, centred, weights, seen.design)


def _climb(
    problem: _Problem, parameters: Sequence[Parameter], seen: Observations, settings: Settings
) -> tuple[Fit, Sites]:
    """Alternate a few steps on the hyperparameters with an update of the sites; neither lowers the bound."""
    stride, total = (10, 300) if settings.optimizer == "lbfgs" else (50, 2000)
    total = settings.max_steps or total

    def mean(theta: Theta) -> Tensor:
        return seen.design[:, 0] * theta["mean.bias"] + seen.design[:, 1:] @ theta["mean.slopes"]

    fit = Fit({p.name: p.start for p in parameters}, -math.inf, False, "not started")
    sites = bernoulli_sites(seen.target, mean(fit.theta), torch.ones_like(seen.target), seen.weight)
    enough = len(seen.target) ** 0.5

    def centred(theta: Theta) -> Sites:
        return replace(sites, target=sites.target - mean(theta))

    def bound(theta: Theta) -> Tensor:
        return problem.log_evidence(theta, centred(theta)) + problem.log_prior(theta)

    for done in range(0, total, stride):
        few = replace(settings, max_steps=min(stride, total - done), restarts=0)
        before, here = fit.value, [replace(p, start=fit.theta[p.name]) for p in parameters]
        fit = _search(bound, here, few)
        posterior = problem.condition(fit.theta, centred(fit.theta))
        K = problem.covariance(fit.theta, problem.full)
        correction, variance = posterior.moments(K.T, problem.prior_variance(fit.theta))
        sites = bernoulli_sites(seen.target, mean(fit.theta) + correction, variance, seen.weight)
        if fit.value - before < 1e-4 * enough:
            break
    if fit.value - before < 1e-2 * enough:
        return replace(fit, converged=True, reason="the bound stopped rising"), sites
    return replace(fit, converged=False, reason=f"the bound was still rising after {total} steps"), sites


def _mean_parameters(design: Tensor) -> list[Parameter]:
    bias = Parameter("mean.bias", design.new_zeros(()), -30.0, 30.0)
    return [bias, Parameter("mean.slopes", design.new_full((design.shape[1] - 1,), 0.5), 0.0, 30.0)]


def _prepare(
    covariance: Covariance, rows: Rows, variance: float, settings: Settings, more: Sequence[Parameter]
) -> _Problem:
    """Rows and distances of a fit, and all its parameters: those of the covariance, and ``more``."""
    scale = Scale({name: typical_square(rows.blocks[name]) for name, _ in covariance.reads()}, variance)
    every = [*covariance.parameters(scale), *more]
    device = next(iter(rows.blocks.values())).device
    known = settings.start or {}
    parameters = [
        replace(p, start=known.get(p.name, p.start).to(device))
        for p in started(every, settings.prior, gpytorch=settings.optimizer == "adam")
    ]
    each = rows.single()
    single = gaps(each, each, covariance)
    if settings.exact(len(rows)):
        return _Problem(covariance, rows, None, parameters, gaps(rows, rows, covariance), None, single)
    start = {p.name: p.start for p in parameters}
    inducing = rows[inducing_rows(covariance, start, rows, settings.n_inducing)]
    full, small = gaps(inducing, rows, covariance), gaps(inducing, inducing, covariance)
    return _Problem(covariance, rows, inducing, parameters, full, small, single)


def _search(
    objective: Objective, parameters: Sequence[Parameter], settings: Settings, tolerance: float = 1e-6
) -> Fit:
    names = ("optimizer", "max_steps", "learning_rate", "restarts", "seed")
    options: dict[str, Any] = {name: getattr(settings, name) for name in names}
    return maximise(objective, parameters, tolerance=tolerance, **options)


def _finish(problem: _Problem, fit: Fit, sites: Sites, weights: Tensor, design: Tensor) -> Fitted:
    """Say how the search ended, and condition."""
    _report(fit)
    log_noise = float(fit.theta.get("log_noise", 0.0))
    theta = {k: v for k, v in fit.theta.items() if k != "log_noise" and not k.startswith("mean.")}
    rows = problem.rows if problem.inducing is None else problem.inducing
    inference = "exact" if problem.inducing is None else "inducing"
    nothing = Posterior(problem.covariance, theta, rows, weights[:0], weights[:0])
    outcome = (fit.value, inference, fit.converged, fit.reason, fit.at_bounds)
    empty = Fitted(nothing, log_noise, weights, *outcome)
    if problem.inducing is None:
        return _exact_again(empty, rows, sites.target, sites.noise, design)
    return reconditioned(empty, problem.summarise(theta, sites, design))


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


@torch.no_grad()
def extend(fitted: Fitted, new: Observations) -> Fitted:
    """Condition on further samples: on residuals as they are, or with Bernoulli sites refined around the
    posterior that includes them.
    """
    if fitted.is_gaussian:
        return _with_sites(fitted, new, _gaussian_sites(fitted, new))
    mean, variance = fitted.posterior(new.rows)
    offset = new.design @ fitted.mean_weights
    for _ in range(MOST_ROUNDS):
        sites = bernoulli_sites(new.target, mean + offset, variance, new.weight)
        extended = _with_sites(fitted, new, replace(sites, target=sites.target - offset))
        before = mean
        mean, variance = extended.posterior(new.rows)
        if float((mean - before).abs().max()) < 1e-8:
            break
    return extended


@torch.no_grad()
def retract(fitted: Fitted, gone: Observations) -> Fitted:
    """Condition on all but the given samples, which must be among those known; residuals only."""
    rows, n_known = gone.rows, len(fitted.posterior.rows) if fitted.summary is None else fitted.summary.n
    if len(rows) >= n_known:
        raise ValueError(f"cannot forget {len(rows)} rows: the calibrator knows {n_known}")
    if fitted.summary is not None:
        summary = _summary_of(fitted.posterior, gone, _gaussian_sites(fitted, gone))
        return reconditioned(fitted, fitted.summary - summary)
    known = _numbers(fitted.posterior.rows)
    keep = torch.ones(len(known), dtype=torch.bool, device=known.device)
    for row in _numbers(rows):
        same = (keep & (known == row).all(dim=1)).nonzero()
        if not len(same):
            raise ValueError("a sample to forget is not among those the calibrator was fitted on")
        keep[same[0]] = False
    return _exact_again(fitted, fitted.posterior.rows[keep], *(x[keep] for x in _observed(fitted)))


def _with_sites(fitted: Fitted, new: Observations, sites: Sites) -> Fitted:
    if fitted.summary is not None:
        return reconditioned(fitted, fitted.summary + _summary_of(fitted.posterior, new, sites))
    rows = Rows.concatenate([fitted.posterior.rows, new.rows])
    more = sites.target, sites.noise, new.design
    return _exact_again(fitted, rows, *map(torch.cat, zip(_observed(fitted), more, strict=True)))


def _gaussian_sites(fitted: Fitted, new: Observations) -> Sites:
    return gaussian_sites(new.target, new.target.new_tensor(fitted.log_noise), new.weight)


def _observed(fitted: Fitted) -> tuple[Tensor, Tensor, Tensor]:
    """Site targets, site noise and columns of the mean of an exact fit."""
    assert fitted.y is not None
    assert fitted.noise is not None
    assert fitted.design is not None
    return fitted.y, fitted.noise, fitted.design


def _numbers(rows: Rows) -> Tensor:
    """All that a row holds, ``(N, d)``."""
    groups = (g[:, None] for g in rows.groups.values())
    return torch.cat([x.double() for x in (*rows.blocks.values(), *groups)], dim=1)


def sums_of(fitted: Fitted, seen: Observations) -> Statistics:
    """Sums over samples on the inducing rows, with Bernoulli sites taken around the posterior."""
    offset = seen.design @ fitted.mean_weights
    parts = []
    for part, Kfu, prior in fitted.posterior.blocks(seen.rows):
        y, own = seen.target[part], offset[part]
        if fitted.is_gaussian:
            sites = gaussian_sites(y, y.new_tensor(fitted.log_noise), seen.weight)
        else:
            mean, variance = fitted.posterior.moments(Kfu, prior)
            sites = bernoulli_sites(y, mean + own, variance, seen.weight)
        design = seen.design[part]
        parts.append(statistics(Kfu.T, prior, sites.target - own, sites.noise, design, sites.constant))
    return sum(parts[1:], parts[0])


def with_sums(fitted: Fitted, total: Statistics) -> Fitted:
    """The same GP on the same inducing rows, given the sums of all data, with their evidence."""
    p = fitted.posterior
    evidence = inducing_log_evidence(p.covariance_to(p.rows), total)
    return replace(reconditioned(fitted, total), log_evidence=float(evidence))


def _summary_of(posterior: Posterior, new: Observations, sites: Sites) -> Statistics:
    """Sums over the samples on the inducing rows of a posterior."""
    Kuf, prior = posterior.covariance_to(new.rows).mT, posterior.prior_variance(new.rows)
    return statistics(Kuf, prior, sites.target, sites.noise, new.design, sites.constant)


def reconditioned(fitted: Fitted, summary: Statistics) -> Fitted:
    """The same GP on the same inducing rows, given other sums."""
    p = fitted.posterior
    posterior = condition_inducing(p.covariance, p.theta, p.rows, summary)
    return replace(fitted, posterior=posterior, summary=summary)


def _exact_again(fitted: Fitted, rows: Rows, y: Tensor, noise: Tensor, design: Tensor) -> Fitted:
    p = fitted.posterior
    posterior = condition_exact(p.covariance, p.theta, rows, y, noise, design)
    return replace(fitted, posterior=posterior, y=y, noise=noise, design=design)
