"""Gaussian process calibrators fitted to any number of rows, with memory that does not grow.

1. Hyperparameters on a stratified subset, in memory.
2. Inducing rows: chosen greedily from the subset, then one pass in which every part of the data proposes the
   rows they explain least, and the greedy choice repeated over both.
3. Exact conditioning on **all** rows by one pass of summed statistics: the inducing posterior needs only sums
   over rows (`salgp.gp.regression.Statistics`). With a Bernoulli likelihood the pass is repeated, each time
   with the sites around the last posterior, until the bound stops rising.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from sklearn.base import clone
from torch import Tensor

from salgp.calibrators.base import Source
from salgp.calibrators.checks import bounded_logits, floor_zeros
from salgp.calibrators.gp.structures import Structure, observe, rows_of
from salgp.features import Features
from salgp.gp.fitting import Fitted, sums_of, with_sums
from salgp.gp.kernels import Rows
from salgp.gp.regression import Posterior, Statistics, inducing_rows
from salgp.io import storable

__all__ = []

MAX_PASSES = 20
"""Most passes over all rows with a Bernoulli likelihood."""
POOL = 16
"""Candidates for inducing rows that are kept, as a multiple of their number."""


@storable
@dataclass(frozen=True, eq=False)
class GPState:
    """Intermediate state of a fit.

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


def fit_rows(calibrator: Any, source: Source) -> None:
    """Fit a calibrator that learns ``structure_`` and ``fitted_`` to all rows."""
    settings = calibrator.get_params()
    if settings["inference"] == "exact":
        raise ValueError(
            "a store is fitted with inducing rows: set inference='auto' or 'inducing', or fit "
            "store.to_features() in memory"
        )
    learned = clone(calibrator).set_params(inference="inducing").fit(*source.subset())
    structure = learned.structure_
    weight = 1.0 / structure.repeats if settings.get("tempering") else 1.0
    state = GPState(structure, learned.fitted_, weight, learned.zero_logits_)
    state = _choose_inducing(state, source, settings["n_inducing"])
    state = _condition(_start(state, source), source)
    calibrator.__dict__.update({k: v for k, v in vars(learned).items() if k.endswith("_")})
    calibrator.fitted_ = state.fitted


def propose(state: GPState, features: Features, labels: Tensor, number: int) -> Candidates:
    """The rows that the inducing rows explain least."""
    posterior = state.fitted.posterior
    rows = rows_of(state.structure, state.prepared(features)).flatten()
    left = torch.cat([posterior.moments(Kfu, prior)[1] for _, Kfu, prior in posterior.blocks(rows)])
    return Candidates(rows, left, POOL * len(posterior.alpha)).best()


@torch.no_grad()
def sum_rows(state: GPState, features: Features, labels: Tensor, number: int = 0) -> Statistics:
    """Statistics of the samples on the inducing rows; Bernoulli sites are taken around the posterior."""
    likelihood = "gaussian" if state.fitted.is_gaussian else "bernoulli"
    seen = observe(state.structure, state.prepared(features), labels, likelihood)
    return sums_of(state.fitted, replace(seen, weight=state.weight))


def _choose_inducing(state: GPState, source: Source, n_inducing: int) -> GPState:
    """Greedy choice over the subset's inducing rows and what a pass over all rows proposed."""
    posterior = state.fitted.posterior
    best = source.over_rows("proposals", propose, _with(state, posterior.without_noise()))
    rows = Rows.concatenate([posterior.rows, best.rows])
    chosen = rows[inducing_rows(posterior.covariance, posterior.theta, rows, n_inducing)]
    return _with(state, posterior.on_rows(chosen))


def _start(state: GPState, source: Source) -> GPState:
    """The state before the first pass: the prior, or for Bernoulli sites the posterior of the subset."""
    if not state.fitted.is_gaussian:
        subset = source.subset()
        for _ in range(3):
            state = replace(state, fitted=with_sums(state.fitted, sum_rows(state, *subset)))
    return state


def _condition(state: GPState, source: Source) -> GPState:
    """Passes over all rows until the posterior has converged: one for Gaussian, a few for Bernoulli sites."""
    rounds = 1 if state.fitted.is_gaussian else MAX_PASSES
    for index in range(rounds):
        before = state.fitted.log_evidence
        total = source.over_rows(f"sums-{index}", sum_rows, state)
        state = replace(state, fitted=with_sums(state.fitted, total))
        gain = state.fitted.log_evidence - before
        if rounds == 1 or (index > 0 and gain < 1e-4 * source.rows**0.5):
            return state
    reason = f"the bound was still rising after {rounds} passes"
    return replace(state, fitted=replace(state.fitted, converged=False, reason=reason))


def _with(state: GPState, posterior: Posterior) -> GPState:
    return replace(state, fitted=replace(state.fitted, posterior=posterior))
