"""Monotone logistic regression with an offset for each predicted class.

The log-odds of a correct prediction are

    f = a + b t + sum_l u_l A_l - v log(1 + max(N, 0)) + delta_class,      b, u, v >= 0,

with ``t`` the network's own (tempered) log-odds, ``A_l`` the agreement of layer ``l`` and ``N`` the novelty
of the last layer, standardised on the calibration samples. Signs are fixed, so that the model extrapolates
sanely: more agreement never lowers a confidence, more novelty never raises one. The penalty is that of normal
priors: ``b`` around 1, the other weights and ``delta_class`` around 0. The problem is convex.

The Laplace posterior of ``(w, delta)`` is kept without its ``(C, C)`` part. With ``B`` the curvature between
weights and offsets and ``D`` that of the offsets, ``phi_i = x_i - (D^-1 B)[label_i]`` gives

    cov(f_i, f_j) = phi_i' S phi_j + [label_i = label_j] / D[label_i],      S = (A - B' D^-1 B)^-1,

so that a thousand classes cost a thousand rows, not a million entries.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.gp.linalg import cholesky, inverse_positive, one_blas_thread
from salgp.gp.optimise import warn_unless_converged
from salgp.io import storable

__all__ = ["MonotoneLogistic"]

RIDGE = 0.4
"""Prior precision of the weights of agreement and novelty, and of offsets; constant and slope: a fortieth."""
PRECISE = {"maxiter": 5000, "maxfun": 50_000, "ftol": 1e-15, "gtol": 1e-8}
"""The optimum is unique; found to the last digits, the result does not depend on the order of rows."""
GROUP_ENTRIES = 100_000
"""Entries of the covariances of groups that are left out at once."""


@storable
@dataclass(frozen=True, eq=False)
class MonotoneLogistic:
    """Posterior of the log-odds of being correct; of several models at once where its tensors have one more
    axis in front, as then all that it returns.

    Args:
        weights: ``(p,)`` of the columns.
        offsets: ``(C,)`` of the predicted classes.
        covariance: ``(p, p)`` of the weights, ``S``.
        pull: ``(C, p)``, ``D^-1 B``: how an offset depends on the weights.
        class_variance: ``(C,)`` variance of an offset given the weights, ``1 / D``.
    """

    weights: Tensor
    offsets: Tensor
    covariance: Tensor
    pull: Tensor
    class_variance: Tensor

    @cached_property
    def slopes(self) -> Tensor:
        """Mean and standard deviation ``(2, 1, p)`` of the weights."""
        deviation = self.covariance.diagonal(0, -2, -1).clamp_min(0).sqrt()
        return torch.stack([self.weights, deviation], dim=-2).unsqueeze(-2)

    @cached_property
    def levels(self) -> Tensor:
        """Mean and standard deviation ``(2, C)`` of the offsets, the latter given the weights."""
        return torch.stack([self.offsets, self.class_variance.sqrt()], dim=-2)

    @cached_property
    def columns_to_layers(self) -> Tensor:
        """Layer of each column, ``(p, L)``: the novelty belongs to the last one, the first two to none."""
        p = self.weights.shape[-1]
        layers = torch.eye(p).to(self.weights)[:, 2:-1]
        layers[-1, -1] = 1.0
        return layers.contiguous()

    def log_odds(self, X: Tensor, label: Tensor) -> Tensor:
        """Mean ``(n,)`` of the log-odds of rows ``(n, p)``."""
        return self.weights @ X.mT + self.offsets.index_select(-1, label)

    def variance(self, X: Tensor, label: Tensor) -> Tensor:
        """Variance ``(n,)`` of the log-odds."""
        phi = X - self.pull.index_select(-2, label)
        own = self.class_variance.index_select(-1, label)
        return ((phi @ self.covariance) * phi).sum(dim=-1) + own

    def joint(self, X: Tensor, label: Tensor) -> Tensor:
        """Covariance ``(..., n, n)`` of the log-odds of rows ``(..., n, p)``."""
        phi = X - self.pull[label]
        same = label[..., :, None] == label[..., None, :]
        own = same * self.class_variance[label][..., None, :]
        return phi @ self.covariance @ phi.mT + own


def fit_monotone(
    X: Tensor, label: Tensor, correct: Tensor, weight: Tensor, n_classes: int, offsets: bool = True
) -> MonotoneLogistic:
    """Largest posterior under ``w_j >= 0``, and the Laplace approximation around it.

    Args:
        X: ``(n, p)`` columns; the first is one, the second the tempered log-odds.
        label: ``(n,)`` predicted classes.
        correct: ``(n,)`` 0 or 1.
        weight: ``(n,)`` of the rows.
        n_classes: ``C``.
        offsets: have predicted classes offsets of their own?
    """
    from scipy.optimize import Bounds, minimize

    p, C = X.shape[1], n_classes if offsets else 0
    prior, centre = X.new_full((p + C,), RIDGE), X.new_zeros(p + C)
    prior[:2] = RIDGE / 40
    centre[1] = 1.0
    least = np.full(p + C, -np.inf)
    least[1:p] = 0.0
    loss, start = _loss(X, label, correct, weight, prior, centre), centre.cpu().numpy().copy()
    with one_blas_thread():
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=Bounds(least), options=PRECISE)
    found.jac = np.where(found.x > least, found.jac, 0.0)  # on a bound, a slope may point outwards
    warn_unless_converged(found, "layer evidence")
    w, delta = torch.as_tensor(found.x).to(X).split([p, C])
    w_prior, class_prior = prior.split([p, C])
    if not offsets:
        delta = X.new_zeros(n_classes)
        class_prior = torch.full_like(delta, torch.inf)
    return _laplace(X, label, weight, w, delta, w_prior, class_prior)


def _loss(
    X: Tensor, label: Tensor, correct: Tensor, weight: Tensor, prior: Tensor, centre: Tensor
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Minus the log posterior and its slope, as a function of weights and offsets."""
    p = X.shape[1]
    C = len(prior) - p

    def loss(v: np.ndarray) -> tuple[float, np.ndarray]:
        v_ = torch.as_tensor(v).to(X)
        f = X @ v_[:p]
        f = f + v_[p:][label] if C else f
        off, wrong = v_ - centre, weight * (torch.sigmoid(f) - correct)
        lost = (weight * (softplus(f) - correct * f)).sum()
        value = lost + 0.5 * (prior * off.square()).sum()
        slope = torch.cat([X.T @ wrong, _sum_by_class(wrong, label, C)])
        return float(value), (slope + prior * off).cpu().numpy()

    return loss


def leave_group_out(
    X: Tensor, label: Tensor, correct: Tensor, weight: Tensor, model: MonotoneLogistic, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance ``(n,)`` of every row's log-odds by the model fitted without its whole group, by one
    Newton step from the optimum.

    With ``V`` the covariance of a group's log-odds, ``W = weight p (1 - p)`` and ``U = V (1 - W V)^-1``, the
    mean is ``f_g - U weight (correct - p)`` and the covariance ``U``.
    """
    f, variance = model.log_odds(X, label), model.variance(X, label)
    p = torch.sigmoid(f)
    out = f.clone()
    curvature, wrong = weight * p * (1 - p), weight * (correct - p)
    for rows in _groups_by_size(group):  # (g, size)
        V = model.joint(X[rows], label[rows])
        one = torch.eye(rows.shape[1]).to(V)
        U = torch.linalg.solve(one - V * curvature[rows][:, None, :], V)
        change = U @ wrong[rows][:, :, None]
        out[rows] = f[rows] - change[:, :, 0]
        variance[rows] = U.diagonal(dim1=1, dim2=2)
    return out, variance


def _groups_by_size(group: Tensor) -> Iterator[Tensor]:
    """Rows ``(g, size)`` of groups that have the same size, some at a time."""
    order, sizes = group.argsort(stable=True), torch.bincount(group)
    start = sizes.cumsum(0) - sizes
    for size in sizes[sizes > 0].unique().tolist():
        first = start[sizes == size][:, None]
        rows = order[first + torch.arange(size, device=group.device)]
        yield from rows.split(max(1, GROUP_ENTRIES // size**2))


def _laplace(
    X: Tensor, label: Tensor, weight: Tensor, w: Tensor, offsets: Tensor, prior: Tensor, class_prior: Tensor
) -> MonotoneLogistic:
    """Posterior with the curvature at ``w`` and ``offsets``; an infinite prior keeps the offsets at 0."""
    s = torch.sigmoid(X @ w + offsets[label])
    curvature = weight * s * (1 - s)
    curved = curvature[:, None] * X
    A = X.T @ curved + prior.diag()
    B = X.new_zeros(len(offsets), X.shape[1])
    B.index_add_(0, label, curved)
    D = _sum_by_class(curvature, label, len(offsets)) + class_prior
    pull = B / D[:, None]
    covariance = inverse_positive(cholesky(A - B.T @ pull)).contiguous()
    return MonotoneLogistic(w, offsets, covariance, pull, 1.0 / D)


def _sum_by_class(x: Tensor, label: Tensor, n_classes: int) -> Tensor:
    return x.new_zeros(n_classes).index_add_(0, label, x) if n_classes else x.new_zeros(0)
