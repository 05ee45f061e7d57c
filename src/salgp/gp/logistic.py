"""Logistic regression with a normal prior, and the covariance of its weights."""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.gp.linalg import cholesky, inverse_positive, solve_positive

__all__ = ["logistic", "logistic_covariance"]


def logistic(
    X: Tensor,
    y: Tensor,
    weight: Tensor,
    prior: Tensor,
    offset: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Weights ``(p,)`` of the largest posterior of a logistic regression, by Newton's steps.

    Args:
        X: ``(n, p)`` inputs.
        y: ``(n,)`` 0 or 1.
        weight: ``(n,)`` of the rows.
        prior: ``(p,)`` precision of the weights around 0.
        offset: ``(n,)`` added to the log-odds.
        start: ``(p,)`` weights to begin with; by default 0.

    Example:
        >>> X, y = torch.ones(4, 1).double(), torch.tensor([1.0, 1.0, 1.0, 0.0]).double()
        >>> logistic(X, y, torch.ones(4).double(), torch.zeros(1).double()).exp()  # odds 3 : 1
        tensor([3.0000], dtype=torch.float64)
    """
    w = torch.zeros_like(prior) if start is None else start
    base = torch.zeros_like(y) if offset is None else offset
    for _ in range(50):
        p = torch.sigmoid(X @ w + base)
        slope = X.T @ (weight * (p - y)) + prior * w
        curvature = _curvature(X, p, weight, prior)
        step = solve_positive(curvature, slope)
        reach = float((X @ step).abs().max().clamp_min(1e-9))
        w = w - min(1.0, 5.0 / reach) * step
        if float(step.abs().max()) < 1e-9:
            break
    return w


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
    return inverse_positive(cholesky(_curvature(X, torch.sigmoid(log_odds), weight, prior)))


def _curvature(X: Tensor, p: Tensor, weight: Tensor, prior: Tensor) -> Tensor:
    return X.T @ ((weight * p * (1 - p))[:, None] * X) + prior.diag()
