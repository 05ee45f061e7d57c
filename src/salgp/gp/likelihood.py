"""Likelihoods as Gaussian sites of the weighted regression.

Gaussian: the residual itself with one noise variance. Bernoulli on correctness: the logistic likelihood is
bounded by a Gaussian in the log-odds ``f`` whose precision depends on ``xi = sqrt(E f^2)`` (Jaakkola & Jordan
2000; the same bound as mean-field Polya-Gamma augmentation). For fixed ``xi`` everything is the weighted
regression of `salgp.gp.regression`; updating ``xi`` never lowers the bound, so there is no step size to tune.

The leave-one-out predictive density has a closed form.

Rows come in consecutive groups of equal size, all seen together or not at all: in the stacked models a group
is a sample, whose residual is repeated once per layer. The log density of each row given all *other groups*
is a fair objective for the hyperparameters there. The evidence is not: it counts a repeated observation as so
many, and is largest where the noise vanishes.

With ``Q = (K + N)^-1`` the rows of group ``g`` given the others are ``N(y_g - Q_gg^-1 (Q y)_g, Q_gg^-1)``
(the grouped form of Rasmussen & Williams 2006, eq. 5.12). With inducing rows, ``D' D`` the hat matrix of the
posterior and ``H = (D' D)_gg``, the mean is ``y_g - (1 - H)^-1 (y_g - mean_g)`` and the covariance ``N_g^1/2
H (1 - H)^-1 N_g^1/2`` plus noise and what the inducing rows leave unexplained.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from salgp.gp.linalg import cholesky, inverse_positive, solve_lower
from salgp.gp.regression import INDUCING_JITTER, LOG_2PI

__all__ = ["sigmoid_moments"]


@dataclass(frozen=True, eq=False)
class Sites:
    """Gaussian stand-in for a likelihood: ``log p(y|f) ~ log N(target | f, noise) + constant``."""

    target: Tensor
    noise: Tensor
    constant: Tensor


def gaussian_sites(y: Tensor, log_noise: Tensor, weight: float = 1.0) -> Sites:
    """Sites of ``N(y | f, exp(log_noise))^weight``; a weight below 1 tempers repeated observations.

    Example:
        >>> y = torch.zeros(2, dtype=torch.float64)
        >>> gaussian_sites(y, torch.zeros((), dtype=torch.float64), weight=0.5).noise
        tensor([2., 2.], dtype=torch.float64)
    """
    noise = log_noise.exp() / weight
    constant = 0.5 * (LOG_2PI + noise.log()) - 0.5 * weight * (LOG_2PI + log_noise)
    return Sites(y, noise.expand_as(y), len(y) * constant)


def bernoulli_sites(correct: Tensor, mean: Tensor, variance: Tensor, weight: float = 1.0) -> Sites:
    """Sites of ``sigmoid((2 correct - 1) f)^weight`` around the current posterior of the log-odds ``f``.

    Args:
        correct: ``(n,)`` 0 or 1.
        mean: ``(n,)`` current mean of ``f``.
        variance: ``(n,)`` its current variance.
        weight: of each observation.
    """
    xi = (mean.square() + variance).sqrt().clamp_min(1e-6)
    w = torch.tanh(0.5 * xi) / (2.0 * xi)
    target = (correct - 0.5) / w
    noise = 1.0 / (weight * w)
    bound = torch.nn.functional.logsigmoid(xi) - 0.5 * xi + 0.5 * w * xi.square()
    constant = weight * (bound + 0.5 * w * target.square()) + 0.5 * (LOG_2PI + noise.log())
    return Sites(target, noise, constant.sum())


def sigmoid_moments(mean: Tensor, variance: Tensor, points: int = 32) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of ``sigmoid(f)`` for ``f ~ N(mean, variance)``, by Gauss-Hermite
    quadrature.

    Example:
        >>> sigmoid_moments(torch.zeros(1), torch.zeros(1))
        (tensor([0.5000]), tensor([0.]))
    """
    nodes, weights = (torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in _hermite(points))
    values = torch.sigmoid(mean[..., None] + variance.clamp_min(0.0).sqrt()[..., None] * nodes)
    first = values @ weights
    return first, ((values - first[..., None]).square() @ weights).clamp_min(0.0).sqrt()


@functools.cache
def _hermite(points: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return nodes, weights / weights.sum()


def exact_leave_out_density(K: Tensor, y: Tensor, noise: Tensor, size: int = 1) -> Tensor:
    """Sum over rows of ``log p(y_i | all other groups)``, by the full matrix.

    Args:
        K: ``(n, n)`` prior covariance.
        y: ``(n,)`` observations.
        noise: ``(n,)`` their noise variances.
        size: rows of a group.

    Example:
        >>> y = torch.ones(2, dtype=torch.float64)
        >>> float(
        ...     exact_leave_out_density(0 * y.diag(), 0 * y, y / (2 * torch.pi))
        ... ) == 0.0  # two normals of height one
        True
    """
    Q = inverse_positive(cholesky(K + noise.diag()))
    blocks = Q.reshape(len(y) // size, size, len(y) // size, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    covariance = torch.linalg.inv(blocks)
    off = (covariance @ (Q @ y).reshape(-1, size, 1))[..., 0]
    return _log_density(off, covariance.diagonal(dim1=-2, dim2=-1))


def inducing_leave_out_density(
    Kuu: Tensor, Kuf: Tensor, prior: Tensor, y: Tensor, noise: Tensor, size: int = 1
) -> Tensor:
    """The same with inducing rows.

    Args:
        Kuu: ``(m, m)`` covariance of the inducing rows.
        Kuf: ``(m, n)`` with all rows.
        prior: ``(n,)`` prior variances.
        y: ``(n,)`` observations.
        noise: ``(n,)`` their noise variances.
        size: rows of a group.
    """
    C = solve_lower(cholesky(Kuu, start=INDUCING_JITTER), Kuf) / noise.sqrt()
    z = y / noise.sqrt()
    D = solve_lower(cholesky(C @ C.T + torch.eye(len(C), dtype=C.dtype, device=C.device)), C)
    G = D.T.reshape(-1, size, len(D))
    H, gap = G @ G.mT, (z - (D @ z) @ D).reshape(-1, size)
    eye = torch.eye(size, dtype=H.dtype, device=H.device)
    solved = torch.linalg.solve(eye - H, torch.cat([gap[..., None], H], dim=-1))
    left = (prior - noise * C.square().sum(dim=0)).clamp_min(0.0).reshape(-1, size)
    noise = noise.reshape(-1, size)
    variance = noise * (1.0 + solved[..., 1:].diagonal(dim1=-2, dim2=-1)) + left
    return _log_density(noise.sqrt() * solved[..., 0], variance)


def _log_density(off: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (LOG_2PI + variance.log() + off.square() / variance).sum()
