"""Bayesian binning into quantiles with a prior chosen on the calibration set.

The prior comes from cross-validation or from the evidence. The paper compares such priors with fixed ones;
`salgp.calibrators` has the method itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from salgp.calibrators import register
from salgp.calibrators.scaling.bbq import BBQ, Binnings, average, binnings, log_evidence, sorted_by_confidence
from salgp.calibrators.scaling.toplabel import TopLabel
from salgp.gp.optimise import warn_unless_converged

__all__ = ["SelectedBBQ"]

GRID = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Pseudo-counts tried in cross-validation."""
FOLDS = 5
"""Of the cross-validation."""


@register
@dataclass(repr=False, eq=False)
class SelectedBBQ(BBQ):
    """`BBQ` with ``alpha`` and ``beta`` from the calibration set.

    Args:
        select: ``"cross-validation"`` over `GRID` by ``criterion``, or ``"empirical-bayes"``: the largest
            evidence of the calibration set.
        criterion: ``"nll"``, ``"ece"`` or ``"mce"`` of the held-out folds (``"cross-validation"`` only).

    Attributes:
        alpha_: pseudo-count in use.
        beta_: pseudo-count in use.
    """

    name: ClassVar[str] = "selected-bbq"

    select: Literal["cross-validation", "empirical-bayes"] = "cross-validation"
    criterion: Literal["nll", "ece", "mce"] = "nll"

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        score, hit = sorted_by_confidence(top, correct)
        bins = binnings(score, hit)
        if self.select == "cross-validation":
            prior = _cross_validated(score, hit, _criterion(self.criterion))
        elif self.select == "empirical-bayes":
            prior = _empirical_bayes(bins)
        else:
            raise ValueError(f"select must be 'cross-validation' or 'empirical-bayes', got {self.select!r}")
        self.alpha_, self.beta_ = prior
        self._keep(bins, prior)


def _empirical_bayes(bins: Binnings) -> tuple[float, float]:
    """``alpha`` and ``beta`` of the largest evidence averaged over the binnings."""
    from scipy.optimize import minimize
    from scipy.special import logsumexp

    def loss(log_prior: np.ndarray) -> float:
        alpha, beta = np.exp(log_prior)
        return -float(logsumexp(log_evidence(bins, (alpha, beta))))

    found = minimize(loss, np.zeros(2), method="L-BFGS-B", bounds=[(np.log(1e-2), np.log(1e3))] * 2)
    warn_unless_converged(found, "the search for the prior")
    alpha, beta = np.exp(found.x).tolist()
    return alpha, beta


def _cross_validated(
    score: np.ndarray, hit: np.ndarray, loss: Callable[[np.ndarray, np.ndarray], float]
) -> tuple[float, float]:
    """The pair of the smallest held-out loss; samples in order of confidence go to the folds in turn."""
    folds = min(FOLDS, len(score))
    fold = np.arange(len(score)) % folds
    training = [binnings(score[fold != k], hit[fold != k]) for k in range(folds)]

    def held_out(prior: tuple[float, float]) -> float:
        predicted = np.empty_like(score)
        for k, bins in enumerate(training):
            found = average(bins, prior)
            predicted[fold == k] = found.value[np.searchsorted(found.at, score[fold == k], side="right") - 1]
        return loss(predicted, hit)

    return min(itertools.product(GRID, GRID), key=held_out)


def _criterion(name: str) -> Callable[[np.ndarray, np.ndarray], float]:
    from salgp.metrics import ece, mce, nll_correct

    known: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {"nll": nll_correct, "ece": ece, "mce": mce}
    if name not in known:
        raise ValueError(f"criterion must be one of {', '.join(known)}, got {name!r}")
    return known[name]
