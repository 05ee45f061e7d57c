"""Weighted Gaussian process regression, exact and with inducing rows, behind one `Posterior`.

Model: ``f ~ GP(0, k)``, ``y_i = f_i + e_i``, ``e_i ~ N(0, noise_i)``; a likelihood enters only through ``y``
and ``noise`` (its Gaussian sites).

Exact: ``log N(y | 0, K + diag(noise))``. Inducing (Titsias 2009): with ``Q = Kfu Kuu^-1 Kuf``,
``log N(y | 0, Q + diag(noise)) - 1/2 sum_i (k_ii - q_ii) / noise_i``, a lower bound of the exact evidence
that is tight when the inducing rows are all rows. It depends on the data only through the sums in
`Statistics`, so it can be computed in one pass over any number of rows, on any number of machines.

Both posteriors have the same form: ``mean(x) = k(x, U) alpha``, ``cov(x, x') = k(x, x') - k(x, U) R R' k(U,
x')``.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from salgp.gp.covariance import Covariance
from salgp.gp.kernels import Rows
from salgp.gp.linalg import (
    cholesky,
    inverse_positive,
    log_determinant,
    lower_inverse,
    solve_factored,
    solve_lower,
    spectral_root,
)
from salgp.io import storable

__all__ = ["Posterior", "Statistics", "inducing_rows", "remaining"]

INDUCING_JITTER = 1e-8
"""Smallest jitter of inducing covariances: their rows are often alike, and a fixed one keeps the objective
smooth.
"""

BLOCK = 1_000_000
"""Covariance entries computed at once."""

TREND_PRECISION = 1.0 / 75.0
"""Prior precision of a trend's weights, that of equal chances between 0 and 30: it matters only for a
column on which the data have little information.
"""

LOG_2PI = math.log(2.0 * math.pi)


@storable
@dataclass(frozen=True, eq=False)
class Trend:
    """Uncertainty of the weights ``w`` of a parametric mean, ``y = X w + f + e``: universal kriging.

    With ``C = k + N`` the covariance of the data, ``var(x' w + f(x)) = var f(x) + r' (X' C^-1 X)^-1 r``,
    ``r = x - X' C^-1 k(., x)``. Reference: Rasmussen & Williams 2006, eq. 2.42.

    Args:
        explained: ``(m, p)`` weights ``C^-1 X`` on the rows ``U``, so that ``r = x - k(x, U) @ explained``.
        root: ``(p, p)`` root of the covariance of the weights.
    """

    explained: Tensor
    root: Tensor

    def variance(self, columns: Tensor, explained: Tensor) -> Tensor:
        """What the weights add to the variance where the columns are ``(n, p)``, ``explained`` being
        ``k(x, U) @ self.explained``.
        """
        return ((columns - explained) @ self.root).square().sum(dim=-1)


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
        trend: of the columns of the parametric mean; None where the mean is zero.
    """

    covariance: Covariance
    theta: Mapping[str, Tensor]
    rows: Rows
    alpha: Tensor
    root: Tensor
    trend: Trend | None = None

    def covariance_to(self, rows: Rows) -> Tensor:
        """``k(rows, U)``, ``(..., N, m)``."""
        return self.covariance.between(self.theta, rows, self.rows)

    def prior_variance(self, rows: Rows) -> Tensor:
        """``k(x, x)`` of each row, ``(..., N)``."""
        return self.covariance.variance(self.theta, rows)

    def moments(self, Kfu: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of any linear functional with covariance ``Kfu`` to ``U`` and variance
        ``prior``.
        """
        mean, reduced = self.project(Kfu)
        return mean, remaining(prior, reduced)

    def project(self, Kfu: Tensor) -> tuple[Tensor, Tensor]:
        """Mean ``Kfu @ alpha`` and ``Kfu @ R``; linear, so the parts of a sum or an average need no
        product of their own.
        """
        return Kfu @ self.alpha, Kfu @ self.root

    def __call__(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """Posterior mean and variance of ``f`` at each row."""
        return self.moments(self.covariance_to(rows), self.prior_variance(rows))

    def blocks(self, rows: Rows) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Covariance to ``U``, ``(b, m)``, and prior variance ``(b,)`` of each block of few rows."""
        size = max(1, BLOCK // len(self.alpha))
        for start in range(0, len(rows), size):
            part = slice(start, min(start + size, len(rows)))
            yield part, self.covariance_to(rows[part]), self.prior_variance(rows[part])

    def on_rows(self, rows: Rows) -> Posterior:
        """The prior, to be expressed on other rows."""
        alpha = self.alpha.new_zeros(len(rows))
        return Posterior(self.covariance, self.theta, rows, alpha, alpha[:, None])

    def without_noise(self) -> Posterior:
        """What is left to be known where ``f`` is 0 at the rows ``U``."""
        K = self.covariance_to(self.rows)
        root = lower_inverse(cholesky(K, start=INDUCING_JITTER)).T.contiguous()
        return Posterior(self.covariance, self.theta, self.rows, torch.zeros_like(self.alpha), root)


def remaining(prior: Tensor, reduced: Tensor) -> Tensor:
    """Posterior variance: ``prior - |reduced|^2``, with ``reduced = k(x, U) R``."""
    return (prior - torch.linalg.vector_norm(reduced, dim=-1).square()).clamp_min(0.0)


def exact_log_evidence(K: Tensor, y: Tensor, noise: Tensor) -> Tensor:
    """``log N(y | 0, K + diag(noise))``.

    Example:
        >>> one = torch.ones(1, dtype=torch.float64)
        >>> exact_log_evidence(one[:, None], 0 * one, one)
        tensor(-1.2655, dtype=torch.float64)
    """
    value: Tensor = _LogGaussian.apply(K + noise.diag(), y)  # type: ignore[no-untyped-call]
    return value


def condition_exact(
    covariance: Covariance,
    theta: Mapping[str, Tensor],
    rows: Rows,
    y: Tensor,
    noise: Tensor,
    X: Tensor | None = None,
) -> Posterior:
    """Posterior given all rows, ``X`` being their columns of the trend: ``alpha = (K + N)^-1 y`` and ``R R' =
    (K + N)^-1``.
    """
    L = cholesky(covariance.between(theta, rows, rows) + noise.diag())
    root = lower_inverse(L).T.contiguous()
    X = y.new_zeros(len(y), 0) if X is None else X
    explained = root @ (root.T @ X)
    return Posterior(covariance, theta, rows, root @ (root.T @ y), root, _trend(explained, X.T @ explained))


def _trend(explained: Tensor, information: Tensor) -> Trend | None:
    if not len(information):
        return None
    prior = TREND_PRECISION * torch.eye(len(information), dtype=explained.dtype, device=explained.device)
    return Trend(explained, lower_inverse(cholesky(information + prior)).T)


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
        constant: what the sites add to the log evidence.
        B: ``Kuf N^-1 X``, ``(m, p)``, of the columns of the trend.
        XX: ``X' N^-1 X``, ``(p, p)``.
    """

    A: Tensor
    b: Tensor
    yy: Tensor
    log_noise: Tensor
    trace: Tensor
    n: int
    constant: Tensor
    B: Tensor
    XX: Tensor

    def __add__(self, other: Statistics) -> Statistics:
        return Statistics(*map(operator.add, vars(self).values(), vars(other).values()))

    def __sub__(self, other: Statistics) -> Statistics:
        return Statistics(*map(operator.sub, vars(self).values(), vars(other).values()))


def statistics(
    Kuf: Tensor,
    prior: Tensor,
    y: Tensor,
    noise: Tensor,
    X: Tensor | None = None,
    constant: Tensor | None = None,
) -> Statistics:
    """Sums over one batch of rows.

    Args:
        Kuf: ``(m, n)`` covariance with the inducing rows.
        prior: ``(n,)`` variances ``k_ii``.
        y: ``(n,)`` targets.
        noise: ``(n,)`` their noise variances.
        X: ``(n, p)`` columns of the trend, where there is one.
        constant: what the sites add to the log evidence.
    """
    weighted = Kuf / noise
    X = y.new_zeros(len(y), 0) if X is None else X
    sums = (y * y / noise).sum(), noise.log().sum(), (prior / noise).sum()
    constant = y.new_zeros(()) if constant is None else constant
    of_trend = weighted @ X, (X / noise[:, None]).T @ X
    return Statistics(weighted @ Kuf.T, weighted @ y, *sums, len(y), constant, *of_trend)


def inducing_log_evidence(Kuu: Tensor, s: Statistics) -> Tensor:
    """Titsias' collapsed lower bound of the log evidence, from the summed statistics."""
    Luu, A = _whiten(Kuu, s)
    LB = cholesky(A + torch.eye(len(A), dtype=A.dtype, device=A.device))
    c = solve_lower(LB, solve_lower(Luu, s.b))
    fit = s.n * LOG_2PI + s.log_noise + log_determinant(LB) + s.yy - c @ c
    return -0.5 * (fit + s.trace - A.diagonal().sum()) + s.constant


def condition_inducing(
    covariance: Covariance, theta: Mapping[str, Tensor], inducing: Rows, s: Statistics
) -> Posterior:
    """Posterior on the inducing rows from the summed statistics of all data."""
    Luu, A = _whiten(covariance.between(theta, inducing, inducing), s)
    inverse = lower_inverse(Luu)
    half = spectral_root(A)

    def solve(sums: Tensor) -> Tensor:
        whitened = inverse @ sums
        return inverse.T @ (whitened - half @ (half.T @ whitened))

    explained = solve(s.B)
    trend = _trend(explained, s.XX - s.B.T @ explained)
    return Posterior(covariance, theta, inducing, solve(s.b), inverse.T @ half, trend)


def inducing_rows(
    covariance: Covariance,
    theta: Mapping[str, Tensor],
    rows: Rows,
    m: int,
    pool: int = 64,
    tolerance: float = 1e-6,
) -> Tensor:
    """Indices of ``m`` rows chosen greedily by conditional variance (pivoted Cholesky).

    Each pick is the row whose prior variance is least explained by the rows picked so far. Columns of the
    covariance are computed for a pool of likely candidates at a time, each at most once.

    Args:
        covariance: the formula ``k``.
        theta: its parameters.
        rows: candidates.
        m: number of rows to pick.
        pool: number of candidate columns computed at once.
        tolerance: stop early when the best remaining variance falls below this fraction of the mean prior
            variance.

    Returns:
        Indices ``(m',)``, ``m' <= m``, in order of picking.
    """
    left = covariance.variance(theta, rows).clone()
    threshold = tolerance * float(left.mean())
    factor = left.new_zeros(min(m, len(rows)), len(rows))
    picked: list[int] = []
    columns: dict[int, Tensor] = {}
    while len(picked) < len(factor):
        best = int(left.argmax())
        if float(left[best]) <= threshold:
            break
        if best not in columns:
            likely = left.topk(min(pool, len(rows))).indices.tolist()
            new = [best, *(i for i in likely if i != best and i not in columns)]
            columns |= zip(new, covariance.between(theta, rows[new], rows), strict=True)
        k = len(picked)
        direction = (columns.pop(best) - factor[:k, best] @ factor[:k]) / left[best].sqrt()
        factor[k] = direction
        left = (left - direction.square()).clamp_min_(0.0)
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
        alpha = solve_factored(L, y)
        ctx.save_for_backward(L, alpha)
        return -0.5 * (len(y) * LOG_2PI + log_determinant(L) + y @ alpha)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        L, alpha = ctx.saved_tensors
        slope = inverse_positive(L).mul_(-0.5).addr_(alpha, alpha, alpha=0.5)
        return grad * slope, -grad * alpha


def _whiten(Kuu: Tensor, s: Statistics) -> tuple[Tensor, Tensor]:
    Luu = cholesky(Kuu, start=INDUCING_JITTER)
    return Luu, solve_lower(Luu, solve_lower(Luu, s.A).T)
