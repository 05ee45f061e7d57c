"""The model behind `salgp.calibrators.evidence.calibrator`: columns, weights of the samples, a convex fit,
and its leave-one-out.

Free functions and values. Rows are samples; ``X`` holds the columns ``(n, p)`` of the log-odds of being
correct, ``label`` the predicted class, a group with an offset of its own:

    f_i = x_i . w + delta[label_i],      w_j >= 0 for j >= 1,      delta_c ~ N(0, spread^2).

The posterior of ``(w, delta)`` is kept without its ``(C, C)`` part. With ``B`` the curvature between weights
and offsets and ``D`` that of the offsets, ``phi_i = x_i - (D^-1 B)[label_i]`` gives

    cov(f_i, f_j) = phi_i' S phi_j + [label_i = label_j] / D[label_i],      S = (A - B' D^-1 B)^-1,

so that a thousand classes cost a thousand rows, not a million entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.evidence.reference import Evidence, wide
from salgp.features import Features
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.gp.optimise import tell_unless_settled
from salgp.gp.threads import one_blas_thread
from salgp.storage import storable

__all__ = [
    "LARGEST_LOG_ODDS",
    "STRETCH",
    "TOLERATED",
    "LogOdds",
    "Scales",
    "beyond",
    "columns",
    "fit_log_odds",
    "gated",
    "height",
    "lasting",
    "leave_group_out",
    "log_odds",
    "network_log_odds",
    "robust_scale",
    "sample_weights",
    "scales_of",
    "standardised",
    "within",
]

PRECISE = {"maxiter": 5000, "maxfun": 50_000, "ftol": 1e-15, "gtol": 1e-8}
"""The optimum is unique; it is found to the last digits, so that neither order nor history of the samples
shows.
"""

GROUP_ENTRIES = 100_000
"""Entries of the covariances of groups that are left out at once."""

LARGEST_LOG_ODDS = 4.0
"""The model's ``t`` is kept within this bound: beyond 98 %, more confidence of the network says little more.
"""

STRETCH = 8.0
"""Features are made at most so many times as long, or as short."""

TOLERATED = 2.0
"""Features may be so many times as long as the longest of an original before their confidence fades."""


@storable
@dataclass(frozen=True, eq=False)
class Scales:
    """Location and scale of the evidence on the original calibration samples.

    Args:
        agreement: ``(L,)`` standard deviation of the agreement.
        novelty: ``(L,)`` median of the novelty.
        spread: ``(L,)`` median absolute deviation of the novelty, scaled to a standard deviation.
        length: ``()`` median length of the last layer's features.
        longest: ``()`` the largest of them.
    """

    agreement: Tensor
    novelty: Tensor
    spread: Tensor
    length: Tensor
    longest: Tensor


@storable
@dataclass(frozen=True, eq=False)
class LogOdds:
    """Posterior of the log-odds of being correct.

    Args:
        weights: ``(p,)`` of the columns.
        offsets: ``(C,)`` of the predicted classes.
        covariance: ``(p, p)`` of the weights, ``S``.
        pull: ``(C, p)``, ``D^-1 B``: how an offset gives way to the weights.
        spare: ``(C,)`` variance of an offset with the weights given, ``1 / D``.
    """

    weights: Tensor
    offsets: Tensor
    covariance: Tensor
    pull: Tensor
    spare: Tensor

    def to(self, X: Tensor) -> LogOdds:
        """The same posterior where ``X`` is."""
        if self.weights.device == X.device and self.weights.dtype == X.dtype:
            return self
        return LogOdds(
            self.weights.to(X), self.offsets.to(X), self.covariance.to(X), self.pull.to(X), self.spare.to(X)
        )

    def moments(self, X: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance ``(n,)`` of the log-odds."""
        phi = X - self.pull[label]
        mean = X @ self.weights + self.offsets[label]
        return mean, ((phi @ self.covariance) * phi).sum(dim=1) + self.spare[label]

    def joint(self, X: Tensor, label: Tensor) -> Tensor:
        """Covariance ``(..., n, n)`` of the log-odds of rows ``(..., n, p)``."""
        phi = X - self.pull[label]
        same = label[..., :, None] == label[..., None, :]
        return phi @ self.covariance @ phi.mT + same * self.spare[label][..., None, :]


def sample_weights(is_copy: Tensor, correct: Tensor, clean: float, caution: float) -> Tensor:
    """Weight of each row: ``clean`` of the total for originals, the rest for copies, whose errors count
    ``caution`` times.

    The total is the number of originals: copies of a sample are no new information.

    Example:
        >>> sample_weights(torch.tensor([False, True, True]), torch.tensor([1.0, 1.0, 0.0]), 0.7, 2.0)
        tensor([0.7000, 0.1000, 0.2000])
    """
    n = float((~is_copy).sum())
    if not bool(is_copy.any()):
        return torch.ones_like(correct)
    copies = is_copy * torch.where(correct > 0, 1.0, caution)
    return torch.where(is_copy, n * (1 - clean) * copies / copies.sum(), clean).to(correct)


def within(x: Tensor, bound: float) -> Tensor:
    """Values kept from ``-bound`` to ``bound``.

    Example:
        >>> within(torch.tensor([-5.0, 1.0, 5.0]), 2.0)
        tensor([-2.,  1.,  2.])
    """
    return x.clamp(-bound, bound)


def log_odds(features: Features, temperature: float | Tensor, largest: float) -> Tensor:
    """Log-odds ``log s / (1 - s)`` of the tempered confidence, without cancellation and at most ``largest``,
    ``(n,)``. They are never below ``-log(c - 1)``. Each sample may have a temperature of its own, ``(n, 1)``.
    """
    t = -_behind(features, temperature).logsumexp(dim=1)
    return torch.minimum(t, t.new_full((), largest))  # torch 2.13 exports two clamps of a clamp wrongly


def network_log_odds(
    features: Features, evidence: Evidence, temperature: float, scales: Scales, largest: float
) -> Tensor:
    """What the network itself says, ``(n, 2)``: log-odds of the tempered confidence, at most ``largest``, and
    those it would give if the features of its last layer had their usual length, at most `LARGEST_LOG_ODDS`.

    A dim image gives short features, short features small logits, and small logits a low confidence, however
    clear the answer is. Divided by the length, relative to the usual one, logits say how clear it is.
    """
    usual = scales.length.to(evidence.length).clamp_min(1e-12)
    stretch = (evidence.length / usual).clamp(1 / STRETCH, STRETCH)
    behind = _behind(features, temperature)
    both = torch.stack([behind.logsumexp(dim=1), (behind / stretch[:, None]).logsumexp(dim=1)], dim=1)
    return torch.minimum(-both, torch.tensor([largest, LARGEST_LOG_ODDS]).to(both))


def beyond(evidence: Evidence, scales: Scales) -> Tensor:
    """How many times longer than anything known, ``(n,)``: 1 up to `TOLERATED` times the longest original.

    Distances are measured at unit length, so length is what they cannot see, and the one thing that grows
    without limit: a column in other units makes long features, long features large logits, and these a
    confidence of 1, right or wrong. Log-odds are divided by this number, so that they fall back to chance.

    Example:
        >>> at = torch.tensor([0.0, 1.0, 6.0, 60.0])
        >>> evidence = Evidence(torch.zeros(4, 1), torch.zeros(4, 1), torch.zeros(4, 0), at)
        >>> one = torch.ones(1)
        >>> beyond(evidence, Scales(one, one, one, torch.tensor(1.0), torch.tensor(3.0)))
        tensor([ 1.,  1.,  1., 10.])
    """
    known = TOLERATED * scales.longest.to(evidence.length).clamp_min(1e-12)
    return (evidence.length / known).clamp_min(1.0)


def _behind(features: Features, temperature: float | Tensor) -> Tensor:
    """Tempered logits ``(n, c)`` from that of the predicted class on, which is left out."""
    z = wide(features.logits) / temperature
    return z.scatter(1, features.label[:, None], -torch.inf) - z.amax(dim=1, keepdim=True)


def standardised(evidence: Evidence, scales: Scales) -> tuple[Tensor, Tensor]:
    """Agreement ``A`` and novelty ``N`` in units of the original calibration samples."""
    N = (evidence.novelty - scales.novelty.to(evidence.novelty)) / scales.spread.to(evidence.novelty)
    return evidence.agreement / scales.agreement.to(N), N


def gated(A: Tensor, N: Tensor) -> Tensor:
    """Agreements ``g(N) A``: what a layer says of an input it does not know counts less."""
    return A / (1.0 + 0.3 * softplus(N - 1.0))


def height(N: Tensor) -> Tensor:
    """Novelties ``h(N)``, from 0, as steep as a logarithm."""
    return torch.log1p(softplus(N))


def columns(t: Tensor, agreement: Tensor, novelty: Tensor, persistent: bool = True) -> Tensor:
    """Columns of the model, ``(n, 1 + q + 2 L)``: one, ``t``, agreements, negative novelties.

    Args:
        t: ``(n, q)`` log-odds by the network, within their bounds.
        agreement: ``(n, L)`` from `gated`.
        novelty: ``(n, L)`` from `height`.
        persistent: count the novelty of a layer only as far as all later layers share it.
    """
    if persistent:
        novelty = lasting(novelty)
    return torch.cat([torch.ones_like(t[:, :1]), t, agreement, -novelty], dim=1)


def lasting(novelty: Tensor) -> Tensor:
    """Novelty ``(n, L)`` of each layer as far as all later layers share it.

    Example:
        >>> lasting(torch.tensor([[3.0, 1.0, 2.0]]))
        tensor([[1., 1., 2.]])
    """
    if torch.compiler.is_exporting():  # ONNX has no running minimum
        L = novelty.shape[1]
        earlier = torch.full((L, L), torch.inf, dtype=novelty.dtype, device=novelty.device).tril(-1)
        return (novelty[:, None, :] + earlier).amin(dim=-1)
    return novelty.flip(1).cummin(dim=1).values.flip(1)


def scales_of(evidence: Evidence) -> Scales:
    """Location and scale of the evidence of the original calibration samples."""
    spread = evidence.agreement.std(dim=0, correction=0).clamp_min(1e-6)
    length = evidence.length
    return Scales(spread, *robust_scale(evidence.novelty), length.quantile(0.5), length.amax())


def robust_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    """Median ``(p,)`` of the columns of ``x (n, p)``, and their median absolute deviation as a standard
    deviation.

    Example:
        >>> robust_scale(torch.tensor([[0.0], [1.0], [2.0], [3.0], [1e9]]))
        (tensor([2.]), tensor([1.4826]))
    """
    median = x.quantile(0.5, dim=0)
    return median, (1.4826 * (x - median).abs().quantile(0.5, dim=0)).clamp_min(1e-6)


def fit_log_odds(
    X: Tensor,
    label: Tensor,
    correct: Tensor,
    weight: Tensor,
    n_classes: int,
    ridge: float,
    class_spread: float,
) -> LogOdds:
    """Largest posterior under ``w_j >= 0``, and the Laplace approximation around it.

    Args:
        X: ``(n, p)`` columns; the first is one, the second the tempered log-odds.
        label: ``(n,)`` predicted classes.
        correct: ``(n,)`` 0 or 1.
        weight: ``(n,)`` of the rows.
        n_classes: ``C``.
        ridge: strength of the pull of the weights to 0, and of the second to 1.
        class_spread: prior standard deviation of a class's offset; 0 for none.
    """
    from scipy.optimize import minimize

    p, C = X.shape[1], n_classes if class_spread > 0 else 0
    prior = torch.full((p + C,), 2.0 * ridge, dtype=X.dtype, device=X.device)
    prior[0], prior[1], prior[p:] = 1e-2, 0.2 * ridge, class_spread**-2 if C else 0.0
    centre = torch.zeros_like(prior)
    centre[1] = 1.0

    def loss(v: object) -> tuple[float, object]:
        v_ = torch.as_tensor(v).to(X)
        f, off = X @ v_[:p] + (v_[p:][label] if C else 0.0), v_ - centre
        wrong = weight * (torch.sigmoid(f) - correct)
        value = (weight * (softplus(f) - correct * f)).sum() + 0.5 * (prior * off.square()).sum()
        slope = torch.cat([X.T @ wrong, _by_class(wrong, label, C)]) + prior * off
        return float(value), slope.cpu().numpy()

    start = torch.zeros_like(prior)
    start[1:p], start[1] = 0.1, 1.0
    bounds = [(None, None)] + [(0.0, None)] * (p - 1) + [(None, None)] * C
    v0 = start.cpu().numpy()
    with one_blas_thread():
        found = minimize(loss, v0, jac=True, method="L-BFGS-B", bounds=bounds, options=PRECISE)
    _tell_unless_settled(found, bounds)
    v = torch.as_tensor(found.x).to(X)
    offsets = v[p:] if C else X.new_zeros(n_classes)
    return _around(
        X, label, weight, v[:p], offsets, prior[:p], prior[p:] if C else torch.full_like(offsets, torch.inf)
    )


def leave_group_out(
    X: Tensor, label: Tensor, correct: Tensor, weight: Tensor, model: LogOdds, group: Tensor
) -> tuple[Tensor, Tensor]:
    """Mean and variance ``(n,)`` of every row's log-odds by the model fitted without its whole group, by one
    Newton step from the optimum.

    With ``V`` the covariance of a group's log-odds, ``W = weight p (1 - p)`` and ``U = V (1 - W V)^-1``, the
    mean is ``f_g - U weight (correct - p)`` and the covariance ``U``.
    """
    f, variance = model.moments(X, label)
    p = torch.sigmoid(f)
    out = f.clone()
    curvature, wrong = weight * p * (1 - p), weight * (correct - p)
    for rows in _groups_of_a_size(group):  # (g, size)
        V = model.joint(X[rows], label[rows])
        left = torch.eye(rows.shape[1]).to(V) - V * curvature[rows][:, None, :]
        U = torch.linalg.solve(left, V)
        out[rows] = f[rows] - (U @ wrong[rows][:, :, None])[:, :, 0]
        variance[rows] = U.diagonal(dim1=1, dim2=2)
    return out, variance


def _groups_of_a_size(group: Tensor) -> Iterator[Tensor]:
    """Rows ``(g, size)`` of groups that have the same size, so many that their squares fit into the cache."""
    order, sizes = group.argsort(stable=True), torch.bincount(group)
    start = sizes.cumsum(0) - sizes
    for size in sizes[sizes > 0].unique().tolist():
        first = start[sizes == size]
        rows = order[first[:, None] + torch.arange(size, device=group.device)]
        yield from rows.split(max(1, GROUP_ENTRIES // size**2))


def _tell_unless_settled(found: Any, bounds: Sequence[tuple[float | None, float | None]]) -> None:
    """Warn where the search ended short of its optimum; on a bound, a slope that points outwards is fine."""
    inner = np.array([low is None or x > low for x, (low, _) in zip(found.x, bounds, strict=True)])
    from scipy.optimize import OptimizeResult

    tell_unless_settled(OptimizeResult(found, jac=np.where(inner, found.jac, 0.0)), "layer evidence")


def _around(
    X: Tensor, label: Tensor, weight: Tensor, w: Tensor, offsets: Tensor, prior: Tensor, class_prior: Tensor
) -> LogOdds:
    """Posterior with the curvature at ``w`` and ``offsets``; an infinite prior keeps the offsets at 0."""
    s = torch.sigmoid(X @ w + offsets[label])
    curved = (weight * s * (1 - s))[:, None] * X
    A, B = X.T @ curved + prior.diag(), X.new_zeros(len(offsets), X.shape[1]).index_add_(0, label, curved)
    D = _by_class(weight * s * (1 - s), label, len(offsets)) + class_prior
    pull = B / D[:, None]
    covariance = inverse_positive(cholesky(A - B.T @ pull)).contiguous()
    return LogOdds(w, offsets, covariance, pull, 1.0 / D)


def _by_class(x: Tensor, label: Tensor, n_classes: int) -> Tensor:
    return x.new_zeros(n_classes).index_add_(0, label, x) if n_classes else x.new_zeros(0)
