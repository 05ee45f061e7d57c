"""Gaussian process calibrators fitted to any number of rows, with memory that does not grow.

1. Hyperparameters on a stratified subset, in memory.
2. Inducing rows: chosen greedily from the subset, then one pass in which every part of the data proposes the
   rows they explain least, and the greedy choice repeated over both.
3. Exact conditioning on **all** rows by one pass of summed statistics: the inducing posterior needs only sums
   over rows (`salgp.gp.regression.Statistics`). With a Bernoulli likelihood the pass is repeated, each time
   with the sites around the last posterior, until the bound stops rising.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from sklearn.base import clone
from torch import Tensor

from salgp.calibrators.base import Source
from salgp.calibrators.checks import bounded_logits, floor_zeros
from salgp.calibrators.gp.structures import Structure, flat_rows, observe
from salgp.features import Features
from salgp.gp.fitting import Fitted
from salgp.gp.kernels import Rows, gaps
from salgp.gp.likelihood import Sites, bernoulli_sites, gaussian_sites
from salgp.gp.linalg import cholesky, lower_inverse
from salgp.gp.regression import (
    INDUCING_JITTER,
    Posterior,
    Statistics,
    condition_inducing,
    inducing_log_evidence,
    inducing_rows,
    statistics,
)
from salgp.io import storable

__all__ = []

C = TypeVar("C")
GENERIC_BLOCK = 1_000_000
"""Covariance entries computed at once."""
MAX_PASSES = 20
"""Most passes over all rows with a Bernoulli likelihood."""
POOL = 16
"""Candidates for inducing rows that are kept, as a multiple of their number."""


@storable
@dataclass(frozen=True, eq=False)
class GPState:
    """Where a fit stands.

    Args:
        structure: covariance and row layout.
        fitted: hyperparameters, inducing rows and current posterior.
        weight: of each row in the likelihood.
        zeros: what takes the place of probabilities of 0.
    """

    structure: Structure
    fitted: Fitted
    weight: float
    zeros: Tensor | None = None

    def prepared(self, features: Features) -> Features:
        """Rows of the data as the fit in memory sees them."""
        return floor_zeros(bounded_logits(features), self.zeros)


@storable
@dataclass(frozen=True, eq=False)
class PassSummary:
    """Sums of one pass over some rows.

    Args:
        summary: statistics of the inducing posterior.
        constant: what the sites add to the log evidence.
    """

    summary: Statistics
    constant: Tensor

    def __add__(self, other: PassSummary) -> PassSummary:
        return PassSummary(self.summary + other.summary, self.constant + other.constant)


@storable
@dataclass(frozen=True, eq=False)
class Candidates:
    """At most ``most`` rows proposed as inducing rows: those with the largest conditional variance."""

    rows: Rows
    variance: Tensor
    most: int

    def __add__(self, other: Candidates) -> Candidates:
        rows = Rows.concatenate([self.rows, other.rows])
        return Candidates(rows, torch.cat([self.variance, other.variance]), self.most).best()

    def best(self) -> Candidates:
        """Without the rows beyond ``most``."""
        index = self.variance.topk(min(self.most, len(self.variance))).indices
        return Candidates(self.rows[index], self.variance[index], self.most)


def fit_rows(calibrator: Any, source: Source) -> dict[str, Any]:
    """The learned attributes of a calibrator with ``structure_`` and ``fitted_``, fitted to all rows."""
    if calibrator.inference == "exact":
        raise ValueError(
            "a store is fitted with inducing rows: set inference='auto' or 'inducing', or fit "
            "store.to_features() in memory"
        )
    learned = _learn(calibrator, source)
    weight = _weight(calibrator, learned["structure_"])
    state = GPState(learned["structure_"], learned["fitted_"], weight, learned.get("zeros_"))
    state = _choose_inducing(state, source, calibrator.n_inducing)
    state = _condition(_start(state, source), source)
    return {**learned, "fitted_": state.fitted}


def take_learned(calibrator: C, learned: Mapping[str, Any]) -> C:
    """Give a calibrator its learned attributes."""
    for name, value in learned.items():
        setattr(calibrator, name, value)
    return calibrator


def propose(state: GPState, features: Features, labels: Tensor, number: int) -> Candidates:
    """The rows that the inducing rows explain least."""
    posterior = state.fitted.posterior
    rows = flat_rows(state.structure, state.prepared(features))
    left = torch.cat([posterior.moments(Kfu, prior)[1] for _, Kfu, prior in _blocks(posterior, rows)])
    return Candidates(rows, left, POOL * len(posterior.alpha)).best()


@torch.no_grad()
def sum_rows(state: GPState, features: Features, labels: Tensor, number: int = 0) -> PassSummary:
    """Statistics of the samples on the inducing rows; Bernoulli sites are taken around the posterior."""
    fitted = state.fitted
    likelihood = "bernoulli" if len(fitted.mean_weights) else "gaussian"
    seen = observe(state.structure, state.prepared(features), labels, likelihood)
    known = seen.offset(fitted.mean_weights)
    offset = torch.zeros_like(seen.target) if known is None else known
    parts = []
    for part, Kfu, prior in _blocks(fitted.posterior, seen.rows):
        sites = _sites(fitted, seen.target[part], offset[part], Kfu, prior, state.weight)
        summary = statistics(Kfu.T, prior, sites.target - offset[part], sites.noise)
        parts.append(PassSummary(summary, sites.constant))
    return sum(parts[1:], parts[0])


def _learn(calibrator: Any, source: Source) -> dict[str, Any]:
    fitted = clone(calibrator).set_params(inference="inducing").fit(*source.subset())
    return {name: value for name, value in vars(fitted).items() if name.endswith("_")}


def _choose_inducing(state: GPState, source: Source, n_inducing: int) -> GPState:
    """Greedy choice over the subset's inducing rows and what a pass over all rows proposed."""
    posterior = state.fitted.posterior
    K = posterior.covariance(posterior.theta, gaps(posterior.rows, posterior.rows, posterior.covariance))
    root = lower_inverse(cholesky(K, start=INDUCING_JITTER)).T.contiguous()
    explained = replace(posterior, alpha=torch.zeros_like(posterior.alpha), root=root)
    best = source.over_rows("proposals", propose, _with(state, explained))
    rows = Rows.concatenate([posterior.rows, best.rows])
    chosen = rows[inducing_rows(posterior.covariance, posterior.theta, rows, n_inducing)]
    return _with(state, _prior(posterior, chosen))


def _start(state: GPState, source: Source) -> GPState:
    """The state before the first pass: the prior, or for Bernoulli sites the posterior of the subset."""
    state = _with(state, _prior(state.fitted.posterior, state.fitted.posterior.rows))
    if len(state.fitted.mean_weights):
        features, labels = source.subset()
        for _ in range(3):
            state = replace(state, fitted=_updated(state.fitted, sum_rows(state, features, labels)))
    return state


def _condition(state: GPState, source: Source) -> GPState:
    """Passes over all rows until the posterior is settled: one for Gaussian, a few for Bernoulli sites."""
    rounds = MAX_PASSES if len(state.fitted.mean_weights) else 1
    for index in range(rounds):
        before = state.fitted.log_evidence
        fitted = _updated(state.fitted, source.over_rows(f"sums-{index}", sum_rows, state))
        state = replace(state, fitted=fitted)
        if rounds == 1 or (index > 0 and fitted.log_evidence - before < 1e-4 * source.rows**0.5):
            return state
    reason = f"the bound was still rising after {rounds} passes"
    return replace(state, fitted=replace(state.fitted, converged=False, reason=reason))


def _updated(fitted: Fitted, total: PassSummary) -> Fitted:
    """The posterior on the same inducing rows, given the sums of a pass."""
    posterior = fitted.posterior
    Kuu = posterior.covariance(posterior.theta, gaps(posterior.rows, posterior.rows, posterior.covariance))
    evidence = float(inducing_log_evidence(Kuu, total.summary) + total.constant)
    new = condition_inducing(posterior.covariance, posterior.theta, posterior.rows, total.summary)
    return replace(
        fitted,
        posterior=new,
        log_evidence=evidence,
        inference="inducing",
        y=None,
        noise=None,
        summary=total.summary,
    )


def _prior(posterior: Posterior, rows: Rows) -> Posterior:
    """The same GP on other rows, not yet conditioned on anything."""
    alpha = posterior.alpha.new_zeros(len(rows))
    return replace(posterior, rows=rows, alpha=alpha, root=alpha[:, None])


def _with(state: GPState, posterior: Posterior) -> GPState:
    return replace(state, fitted=replace(state.fitted, posterior=posterior))


def _weight(calibrator: Any, structure: Structure) -> float:
    """Weight of a row in the likelihood: 1, or ``1/L`` for tempered stacked rows."""
    tempered = structure.stacked and calibrator.get_params().get("tempering", False)
    return 1.0 / len(structure.layers) if tempered else 1.0


def _blocks(posterior: Posterior, rows: Rows) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Covariance with the inducing rows ``(b, m)`` and prior variance ``(b,)`` of each block of rows, in
    double precision.
    """
    size = max(1, GENERIC_BLOCK // len(posterior.alpha))
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, posterior.covariance_to(rows[part]), posterior.prior_variance(rows[part])


def _sites(fitted: Fitted, y: Tensor, offset: Tensor, Kfu: Tensor, prior: Tensor, weight: float) -> Sites:
    if len(fitted.mean_weights) == 0:
        return gaussian_sites(y, torch.tensor(fitted.log_noise, dtype=y.dtype, device=y.device), weight)
    mean, variance = fitted.posterior.moments(Kfu, prior)
    return bernoulli_sites(y, mean + offset, variance, weight)
