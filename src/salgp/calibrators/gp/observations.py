"""What a layerwise GP is fitted to: rows, targets, weights and mean of the observations, made in one place.

A fit, an update, and a pass over a store that does not fit into memory all see their samples through
`observe`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.gp.structures import Structure, rows_of
from salgp.features import Features
from salgp.gp.rows import Rows

__all__ = ["LIKELIHOODS", "Observations", "flat_rows", "log_odds_design", "observe"]

LIKELIHOODS = ("gaussian", "bernoulli")


@dataclass(frozen=True, eq=False)
class Observations:
    """Samples as a GP sees them.

    Args:
        rows: ``N`` flat rows; a stacked structure has one per sample and layer.
        target: ``(N,)`` residuals (Gaussian) or correctness (Bernoulli).
        weight: of each row in the likelihood.
        design: ``(N, p)`` columns of the parametric mean of the log-odds; ``(N, 0)`` where the mean is zero.
    """

    rows: Rows
    target: Tensor
    weight: float
    design: Tensor

    def offset(self, mean_weights: Tensor) -> Tensor | None:
        """``(N,)`` parametric log-odds, or None where the mean is zero."""
        return self.design @ mean_weights if self.design.shape[1] else None


def observe(
    structure: Structure,
    features: Features,
    labels: Tensor,
    likelihood: str,
    tempering: bool = False,
    design: Tensor | None = None,
) -> Observations:
    """Observations of labelled samples.

    Args:
        structure: covariance and row layout.
        features: of the samples.
        labels: ``(n,)`` true classes.
        likelihood: ``gaussian`` on the residual, ``bernoulli`` on correctness.
        tempering: weigh each of a sample's ``L`` rows by ``1/L``.
        design: ``(n, p)`` columns of a Bernoulli likelihood's mean, by default those of `log_odds_design`.
    """
    if likelihood not in LIKELIHOODS:
        raise ValueError(f"likelihood must be 'gaussian' or 'bernoulli', got {likelihood!r}")
    repeats = structure.repeats
    weight = 1.0 / repeats if tempering else 1.0
    rows = flat_rows(structure, features)
    if likelihood == "gaussian":
        target = features.residual(labels).double().repeat_interleave(repeats)
        return Observations(rows, target, weight, target.new_zeros(len(target), 0))
    columns = log_odds_design(features) if design is None else design
    target = features.correct(labels).double().repeat_interleave(repeats)
    return Observations(rows, target, weight, columns.repeat_interleave(repeats, 0))


def flat_rows(structure: Structure, features: Features) -> Rows:
    """Rows of the features, one after the other."""
    rows = rows_of(structure, features)
    return rows.flatten() if structure.stacked else rows


def log_odds_design(features: Features, limit: float = 12.0) -> Tensor:
    """Columns of the parametric mean: one, and ``logit(s)`` computed from the logits without cancellation."""
    z = features.logits.double()
    rest = z.scatter(1, features.label[:, None], -torch.inf).logsumexp(dim=1)
    return torch.stack([torch.ones_like(rest), (z.amax(dim=1) - rest).clamp(-limit, limit)], dim=1)
