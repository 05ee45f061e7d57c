"""Weighted Gaussian process regression, exact and with inducing rows, behind one `Posterior`.

Model: ``f ~ GP(0, k)``, ``y_i = f_i + e_i``, ``e_i ~ N(0, noise_i)``.

Exact: ``log N(y | 0, K + diag(noise))``. Inducing (Titsias 2009): with ``Q = Kfu Kuu^-1 Kuf``,
``log N(y | 0, Q + diag(noise)) - 1/2 sum_i (k_ii - q_ii) / noise_i``, a lower bound of the exact evidence
that is tight when the inducing rows are all rows. It depends on the data only through the sums in
`Statistics`, so it can be computed in one pass over any number of rows, on any number of machines.

Both posteriors have the same form: ``mean(x) = k(x, U) alpha``, ``cov(x, x') = k(x, x') - k(x, U) R R' k(U,
x')``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salgp.gp import linalg
from salgp.gp.covariance import Covariance, Theta
from salgp.gp.kernels import Rows
from salgp.gp.linalg import cholesky, solve_lower
from salgp.io import storable

__all__ = ["Posterior", "Statistics", "inducing_rows", "remaining"]

INDUCING_JITTER = 1e-8
"""Smallest jitter of inducing covariances: their rows are often alike, and a fixed one keeps the objective
smooth.
"""

TOLERANCE = 1e-6
"""No more inducing rows are picked when the best remaining variance is below this share of the mean one."""

LOG_2PI = math.log(2.0 * math.pi)


@storable
@dataclass(frozen=True, eq=False)
class Posterior:
    """A conditioned GP: everything needed to predict, nothing else.

    Args:
        covariance: the formula ``k``.
        theta: its learned parameters.
        rows: the rows ``U`` it is expressed on (all rows, or the inducing ones).
        alpha: ``(m,)`` weights of the mean.
        root: ``(m, r)`` root ``R`` of what the data removed from the prior covariance.
    """

    covariance: Covariance
    theta: Theta
    rows: Rows
    alpha: Tensor
    root: Tensor

    def covariance_to(self, rows: Rows) -> Tensor:
        """``k(rows, U)``, ``(..., N, m)``."""
        return self.covariance.between(self.theta, rows, self.rows)

    def prior_variance(self, rows: Rows) -> Tensor:
        """``k(x, x)`` of each row, ``(..., N)``."""
        return self.covariance.variance(self.theta, rows)

    def project(self, Kfu: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``Kfu @ alpha`` and ``Kfu @ R``; linear, so the parts of a sum or an average need no
        product of their own.
        """
        return Kfu @ self.alpha, Kfu @ self.root

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of ``f`` at each row."""
        mean, reduced = self.project(self.covariance_to(rows))
        return mean, remaining(self.prior_variance(rows), reduced)


def remaining(prior: Tensor, reduced: Tensor) -> Tensor:
    """Posterior variance: ``prior - |reduced|^2``, with ``reduced = k(x, U) R``."""
    removed = torch.linalg.vector_norm(reduced, dim=-1).square()
    return (prior - removed).clamp_min(0.0)


def exact_log_evidence(K: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """``log N(y | 0, K + diag(noise))``.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> exact_log_evidence(one[:, None], 0 * one, one)
        tensor(-1.2655, dtype=torch.float64)
    """
    return _LogGaussian.apply(K + noise.diag(), y)  # type: ignore[no-untyped-call]


def condition_exact(covariance: Covariance, theta: Theta, rows: Rows, y: Tensor, noise: Tensor) -> Posterior:
    """Posterior given all rows: ``alpha = (K + N)^-1 y`` and ``R R' = (K + N)^-1``."""
    L = cholesky(covariance.between(theta, rows, rows) + noise.diag())
    root = linalg.lower_inverse(L).T.contiguous()
    alpha = root @ (root.T @ y)
    return Posterior(covariance, theta, rows, alpha, root)


@storable
@dataclass(frozen=True, eq=False)
class Statistics:
    """Sums over rows that determine the inducing posterior and bound; two passes add up with ``+``.

    Args:
        A: ``Kuf N^-1 Kfu``, ``(m, m)``.
        b: ``Kuf N^-1 y``, ``(m,)``.
        yy: ``y' N^-1 y``.
        log_noise: ``sum log noise``.
        trace: ``sum k_ii / noise_i``.
        n: number of rows.
    """

    A: Tensor
    b: Tensor
    yy: Tensor
    log_noise: Tensor
    trace: Tensor
    n: int

    def __add__(self, other: Statistics) -> Statistics:
        theirs = vars(other)
        sums = [mine + theirs[name] for name, mine in vars(self).items()]
        return Statistics(*sums)


def statistics(Kuf: Tensor, prior: Tensor, y: Tensor, noise: Tensor) -> Statistics:
    """Sums over one batch of rows.

    Args:
        Kuf: ``(m, n)`` covariance with the inducing rows.
        prior: ``(n,)`` variances ``k_ii``.
        y: ``(n,)`` targets.
        noise: ``(n,)`` their noise variances.
    """
    weighted = Kuf / noise
    yy, trace = (y * y / noise).sum(), (prior / noise).sum()
    return Statistics(weighted @ Kuf.T, weighted @ y, yy, noise.log().sum(), trace, len(y))


def inducing_log_evidence(Kuu: Tensor, s: Statistics) -> Tensor:
    """Titsias' collapsed lower bound of the log evidence, from the summed statistics."""
    Luu, A = _whiten(Kuu, s)
    LB = cholesky(A + linalg.eye_like(A))
    c = solve_lower(LB, solve_lower(Luu, s.b))
    fit = s.n * LOG_2PI + s.log_noise + linalg.log_determinant(LB) + s.yy - c @ c
    return -0.5 * (fit + s.trace - A.diagonal().sum())


def condition_inducing(covariance: Covariance, theta: Theta, inducing: Rows, s: Statistics) -> Posterior:
    """Posterior on the inducing rows from the summed statistics of all data."""
    Luu, A = _whiten(covariance.between(theta, inducing, inducing), s)
    inverse = linalg.lower_inverse(Luu)
    half = linalg.spectral_root(A)
    whitened = inverse @ s.b
    alpha = inverse.T @ (whitened - half @ (half.T @ whitened))
    return Posterior(covariance, theta, inducing, alpha, inverse.T @ half)


def inducing_rows(covariance: Covariance, theta: Theta, rows: Rows, m: int, pool: int = 64) -> Tensor:
    """Indices of ``m`` rows chosen greedily by conditional variance (pivoted Cholesky).

    Each pick is the row whose prior variance is least explained by the rows picked so far. Columns of the
    covariance are computed for a pool of likely candidates at a time, each at most once.

    Args:
        covariance: the formula ``k``.
        theta: its parameters.
        rows: candidates.
        m: number of rows to pick.
        pool: number of candidate columns computed at once.

    Returns:
        Indices ``(m',)``, ``m' <= m``, in order of picking.
    """
    n = len(rows)
    left = covariance.variance(theta, rows).clone()
    threshold = TOLERANCE * float(left.mean())
    factor = left.new_zeros(min(m, n), n)
    picked: list[int] = []
    columns: dict[int, Tensor] = {}
    for k in range(len(factor)):
        best = int(left.argmax())
        if float(left[best]) <= threshold:
            break
        if best not in columns:
            likely = left.topk(min(pool, n)).indices.tolist()
            candidates = dict.fromkeys([best, *likely])
            new = [i for i in candidates if i not in columns]
            computed = covariance.between(theta, rows[new], rows)
            columns |= zip(new, computed, strict=True)
        explained = factor[:k, best] @ factor[:k]
        rest = columns.pop(best) - explained
        factor[k] = rest / left[best].sqrt()
        left = (left - factor[k].square()).clamp_min_(0.0)
        left[best] = 0.0
        picked.append(best)
    return torch.tensor(picked, device=left.device)


class _LogGaussian(torch.autograd.Function):
    """``log N(y | 0, C)`` with the closed-form gradient ``(a a' - C^-1) / 2``, ``a = C^-1 y``; one
    factorisation in all.
    """

    @staticmethod
    def forward(ctx: Any, C: Tensor, y: Tensor) -> Tensor:
        L = cholesky(C)
        alpha = linalg.solve_factored(L, y)
        ctx.save_for_backward(L, alpha)
        return -0.5 * (len(y) * LOG_2PI + linalg.log_determinant(L) + y @ alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        L, alpha = ctx.saved_tensors
        inverse = linalg.inverse_positive(L)
        slope = inverse.mul_(-0.5).addr_(alpha, alpha, alpha=0.5)
        return grad * slope, -grad * alpha


def _whiten(Kuu: Tensor, s: Statistics) -> tuple[Tensor, Tensor]:
    Luu = cholesky(Kuu, start=INDUCING_JITTER)
    return Luu, solve_lower(Luu, solve_lower(Luu, s.A).T)
