"""The whole posterior covariance between rows, which predictions are compared with."""

from __future__ import annotations

from torch import Tensor

from salgp.gp.covariance import gaps
from salgp.gp.kernels import Rows
from salgp.gp.regression import Posterior

__all__ = ["joint"]


def joint(posterior: Posterior, rows: Rows) -> tuple[Tensor, Tensor]:
    """Posterior mean ``(..., N)`` and full covariance ``(..., N, N)`` within each leading index."""
    Kfu = posterior.covariance_to(rows)
    reduced = Kfu @ posterior.root
    prior = posterior.covariance(posterior.theta, gaps(rows, rows, posterior.covariance))
    return Kfu @ posterior.alpha, prior - reduced @ reduced.mT
