"""Leave-one-out predictive density in closed form, an objective for hyperparameters.

Rows come in consecutive groups of equal size, all seen together or not at all: in the stacked models a group
is a sample, whose residual is repeated once per layer. The log density of each row given all *other groups*
is a fair objective for the hyperparameters there. The evidence is not: it counts a repeated observation as so
many, and is largest where the noise vanishes.

With ``Q = (K + N)^-1`` the rows of group ``g`` given the others are ``N(y_g - Q_gg^-1 (Q y)_g, Q_gg^-1)``
(the grouped form of Rasmussen & Williams 2006, eq. 5.12). With inducing rows, ``D' D`` the hat matrix of the
posterior and ``H = (D' D)_gg``, the mean is ``y_g - (1 - H)^-1 (y_g - mean_g)`` and the covariance ``N_g^1/2
H (1 - H)^-1 N_g^1/2`` plus noise and what the inducing rows leave unexplained.
"""

import torch
from torch import Tensor

from salgp.gp.linalg import cholesky, eye_like, inverse_positive, solve_lower
from salgp.gp.regression import INDUCING_JITTER, LOG_2PI

__all__ = []


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
    n = len(y) // size
    Q = inverse_positive(cholesky(K + noise.diag()))
    grid = Q.reshape(n, size, n, size)
    blocks = grid.diagonal(dim1=0, dim2=2)
    covariance = torch.linalg.inv(blocks.permute(2, 0, 1))
    pull = (Q @ y).reshape(n, size, 1)
    return _log_density((covariance @ pull).flatten(), _diagonal(covariance))


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
    scale = noise.sqrt()
    C = solve_lower(cholesky(Kuu, start=INDUCING_JITTER), Kuf) / scale
    explained = noise * C.square().sum(dim=0)
    left = (prior - explained).clamp_min(0.0)
    off, added = _leave_groups_out(C, y / scale, size)
    return _log_density(scale * off, noise * (1.0 + added) + left)


def _leave_groups_out(C: Tensor, z: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """``(1 - H)^-1 (z - mean)`` and the diagonal of ``H (1 - H)^-1``, ``(n,)`` each."""
    D = solve_lower(cholesky(C @ C.T + eye_like(C)), C)
    G = D.T.reshape(-1, size, len(D))
    H = G @ G.mT
    residual = z - (D @ z) @ D
    gap = residual.reshape(-1, size, 1)
    sides = torch.cat([gap, H], dim=-1)
    rest = torch.eye(size).to(H) - H
    solved = torch.linalg.solve(rest, sides)
    off = solved[..., 0].flatten()
    return off, _diagonal(solved[..., 1:])


def _diagonal(blocks: Tensor) -> Tensor:
    return blocks.diagonal(dim1=-2, dim2=-1).flatten()


def _log_density(off: Tensor, variance: Tensor) -> Tensor:
    terms = LOG_2PI + variance.log() + off.square() / variance
    return -0.5 * terms.sum()
