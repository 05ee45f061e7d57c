"""Smooth monotone maps of the top-label confidence: Platt scaling and beta calibration.

Both are logistic regressions on one or two functions of the confidence ``s`` with the target *correct*. They
work on the log-odds ``u = log s - log(1 - s)``, which stay exact where ``s`` itself rounds to 1.
Targets are smoothed as Platt does, ``(n_1 + 1) / (n_1 + 2)`` and ``1 / (n_0 + 2)``, so that a calibration set
without errors, or one that a threshold separates, still has a finite optimum.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.toplabel import from_top_label, top_label
from salgp.features import Features
from salgp.gp.likelihood import logistic
from salgp.prediction import Prediction

__all__ = ["fit_logistic", "platt_targets"]


class PlattScaling(Calibrator):
    """A sigmoid of the top label's log-odds, ``sigmoid(a u + b)``.

    Attributes:
        slope_: ``a``.
        intercept_: ``b``.

    Reference: Platt, Probabilistic outputs for support vector machines, 1999.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0]]).repeat(98, 1))
        >>> platt = PlattScaling().fit(f, [0] * 68 + [1] * 30)
        >>> platt.predict(f[:1]).confidence  # close to the 68 / 98 that are right
        tensor([0.6935])
    """

    name: ClassVar[str] = "platt"
    gives_confidence_only: ClassVar[bool] = True

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        top = top_label(features)
        X = torch.stack([top.log_odds, torch.ones_like(top.log_odds)], dim=1)
        self.slope_, self.intercept_ = fit_logistic(X, platt_targets(top.label == labels)).tolist()

    def _predict(self, features: Features) -> Prediction:
        u = top_label(features).log_odds
        confidence = torch.sigmoid(self.slope_ * u + self.intercept_)
        return from_top_label(features, confidence, self.rest_temperature_)


class BetaCalibration(Calibrator):
    """A likelihood ratio of two beta distributions, ``sigmoid(a log s - b log(1 - s) + d)`` with ``a, b >=
    0``.

    Unlike the sigmoid it holds the identity (``a = b = 1, d = 0``) and S-shaped maps both ways; the
    constraint keeps it monotone. Reference: Kull, Silva Filho and Flach, Beta calibration, AISTATS 2017.

    Attributes:
        a_: weight of ``log s``.
        b_: weight of ``-log(1 - s)``.
        intercept_: ``d``.

    Example:
        >>> f = Features(torch.tensor([[3.0, 0.0], [1.0, 0.0]]).repeat(50, 1))
        >>> beta = BetaCalibration().fit(f, [0, 1] * 30 + [0, 0] * 20)
        >>> beta.a_ >= 0 and beta.b_ >= 0
        True
    """

    name: ClassVar[str] = "beta"
    gives_confidence_only: ClassVar[bool] = True

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        top = top_label(features)
        X = _beta_inputs(top.log_odds)
        lower = X.new_tensor([0.0, 0.0, -torch.inf])
        self.a_, self.b_, self.intercept_ = fit_logistic(
            X, platt_targets(top.label == labels), lower
        ).tolist()

    def _predict(self, features: Features) -> Prediction:
        X = _beta_inputs(top_label(features).log_odds)
        weights = torch.tensor([self.a_, self.b_, self.intercept_], dtype=X.dtype).to(X.device)
        confidence = torch.sigmoid(X @ weights)
        return from_top_label(features, confidence, self.rest_temperature_)


def platt_targets(correct: Tensor) -> Tensor:
    """Smoothed targets ``(n_1 + 1) / (n_1 + 2)`` for correct samples and ``1 / (n_0 + 2)`` for wrong ones.

    Example:
        >>> platt_targets(torch.tensor([True, True, False]))
        tensor([0.7500, 0.7500, 0.3333], dtype=torch.float64)
    """
    right = int(correct.sum())
    wrong = len(correct) - right
    return torch.where(correct, (right + 1) / (right + 2), 1 / (wrong + 2)).double()


def fit_logistic(X: Tensor, targets: Tensor, lower: Tensor | None = None, ridge: float = 1e-9) -> Tensor:
    """Coefficients of a logistic regression of few columns, by projected Newton steps.

    Minimises ``mean(softplus(X w) - t X w) + ridge |scale * w|^2 / 2`` subject to ``w >= lower``. Columns are
    scaled first, so that large scores are no problem; the small ridge decides where the data do not.

    Args:
        X: ``(n, k)`` inputs, including the constant column if there is to be one.
        targets: ``(n,)`` in [0, 1].
        lower: ``(k,)`` smallest allowed coefficients; each 0 or minus infinity.
        ridge: weight of the penalty.

    Returns:
        ``(k,)`` coefficients on the scale of ``X``.

    Example:
        >>> fit_logistic(
        ...     torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
        ... ).exp()  # odds 3 : 1
        tensor([3.0000], dtype=torch.float64)
    """
    scale = X.abs().amax(dim=0).clamp_min(1e-30)
    prior = X.new_full((X.shape[1],), ridge * len(X))
    return logistic(X / scale, targets, torch.ones_like(targets), prior, lower=lower) / scale


def _beta_inputs(u: Tensor) -> Tensor:
    """Columns ``log s``, ``-log(1 - s)`` and 1, from the log-odds."""
    return torch.stack([-softplus(-u), softplus(u), torch.ones_like(u)], dim=1)
