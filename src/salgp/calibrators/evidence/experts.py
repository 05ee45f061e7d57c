"""Two opinions on whether a prediction is right: one for data as they were, one for data that have moved.

Each expert is the monotone model of `salgp.calibrators.evidence.model` with an offset per predicted class.

- The expert **in domain** learns from originals, with a little help from copies where errors are rare. It is
  mixed with plain temperature scaling, ``f_in = (1 - k) t + k f``, and ``k`` is chosen by what leaving each
  sample out says: 0 unless the layers clearly help. A network that temperature scaling calibrates well keeps
  just that.
- The expert **for shift** learns from copies. Novelty counts at every layer, and errors weigh more than
  correct answers, since a shift met in the field is rarely one of those rehearsed.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from salgp.calibrators.evidence.model import (
    LogOdds,
    columns,
    fit_log_odds,
    lasting,
    leave_group_out,
    sample_weights,
    within,
)
from salgp.calibrators.evidence.rows import LARGEST, FittedRows, View
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.storage import storable

__all__ = ["Expert", "InDomain", "Opinion", "choose_trust", "fit_in_domain", "fit_shift", "mixed"]

OWN = 3
"""Columns that are not of a layer: one, and the network's log-odds as they are and at their usual length."""
TRUSTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the layers in domain that are tried."""
PLAIN_PRECISION = 4.0
SHIFT_CLEAN, SHIFT_LARGEST, SHIFT_SPREAD = 0.05, 4.0, 1.0
"""The expert for shift: weight of originals, bound of ``t``, spread of the classes' offsets."""


@dataclass(frozen=True, eq=False)
class Opinion:
    """Log-odds of being correct, and what they are made of, side by side: one number for the whole, one for
    the predicted class and one for each layer.

    Args:
        means: ``(n, 2 + L)``; parts are counted from their usual value.
        variances: ``(n, 2 + L)``.
    """

    means: Tensor
    variances: Tensor

    @property
    def mean(self) -> Tensor:
        """``(n,)`` of the log-odds."""
        return self.means[:, 0]

    @property
    def variance(self) -> Tensor:
        """``(n,)`` of the log-odds."""
        return self.variances[:, 0]

    @property
    def terms(self) -> Tensor:
        """``(n, 1 + L)`` part of the predicted class and of each layer."""
        return self.means[:, 1:]

    @property
    def term_variance(self) -> Tensor:
        """``(n, 1 + L)``."""
        return self.variances[:, 1:]

    @property
    def rest(self) -> Tensor:
        """``(n,)`` what neither the predicted class nor a layer adds."""
        return self.mean - self.terms.sum(dim=1)


def mixed(inside: Opinion, shift: Opinion, lean: Tensor, unseen: float) -> Opinion:
    """The opinion of both experts, ``lean`` ``(n,)`` being the weight of the one for shift, whose log-odds
    have a variance of ``unseen`` besides.
    """
    a, b = 1 - lean[:, None], lean[:, None]
    extra = pad(lean.new_full((1,), unseen), (0, shift.variances.shape[1] - 1))
    variances = torch.addcmul(a.square() * inside.variances, b.square(), shift.variances + extra)
    return Opinion(torch.lerp(inside.means, shift.means, b), variances)


@storable
@dataclass(frozen=True, eq=False)
class Expert:
    """A fitted opinion.

    Args:
        posterior: of the weights of the columns and of the offsets of the classes.
        typical: ``(p,)`` mean of the columns over the originals.
        largest: bound of what the network says.
        persistent: does the novelty of a layer count only as far as later layers share it?
    """

    posterior: LogOdds
    typical: Tensor
    largest: float
    persistent: bool

    def columns(self, view: View) -> Tensor:
        """Columns ``(n, p)`` of the model."""
        return columns(_network(view, self.largest), view.gated, view.height, self.persistent)

    def log_odds(self, view: View) -> Tensor:
        """Mean ``(n,)`` alone."""
        X = self.columns(view)
        model = self.posterior.to(X)
        return X @ model.weights + model.offsets[view.label]

    def opinion(self, view: View) -> Opinion:
        """Mean, variance and terms."""
        novelty = lasting(view.height) if self.persistent else view.height
        x = torch.cat([_network(view, self.largest), view.gated, novelty], dim=1)
        return self.former(x, view.label)

    @cached_property
    def former(self) -> OpinionFormer:
        """What makes an opinion of log-odds, agreements and novelties."""
        return opinion_former(self.posterior, self.typical)


@storable
@dataclass(frozen=True, eq=False)
class InDomain:
    """The expert in domain: temperature scaling and layers, mixed.

    Args:
        expert: what the layers say.
        trust: weight ``k`` of the layers.
        plain: ``(2, 2)`` covariance of a constant and a slope of ``t`` around temperature scaling.
    """

    expert: Expert
    trust: float
    plain: Tensor

    def log_odds(self, view: View) -> Tensor:
        """Mean ``(n,)`` alone."""
        k = self.trust
        return view.t if k == 0 else (1 - k) * view.t + k * self.expert.log_odds(view)

    def opinion(self, view: View) -> Opinion:
        """Mean, variance and terms; temperature scaling has no terms of layers."""
        k, n_terms = self.trust, 1 + view.agreement.shape[1]
        if k == 1:
            return self.expert.opinion(view)
        plain = torch.stack([view.t, _plain_variance(self.plain, view.t)])
        mean, variance = pad(plain[..., None], (0, n_terms))
        if k == 0:
            return Opinion(mean, variance)
        layers = self.expert.opinion(view)
        return Opinion((1 - k) * mean + k * layers.means, (1 - k) ** 2 * variance + k**2 * layers.variances)


@dataclass(frozen=True, eq=False)
class OpinionFormer:
    """A posterior in the form that makes an opinion with the fewest operations: means are sums over columns,
    variances sums of squares of such sums.

    Args:
        columns: ``(p - 1, a)`` weights of the network's log-odds, agreements and novelties in the ``2 + L``
            means and in the roots of the variances.
        given: ``(C, a)`` what the predicted class and the constant add to them.
        squares: ``(a - 2 - L, 2 + L)`` which roots make which variance.
        spare: ``(C, 2 + L)`` what the predicted class adds to the variances.
    """

    columns: Tensor
    given: Tensor
    squares: Tensor
    spare: Tensor

    def __call__(self, X: Tensor, label: Tensor) -> Opinion:
        """The opinion on numbers ``(n, p - 1)`` and predicted classes ``(n,)``."""
        here = self.to(X)
        both = torch.addmm(here.given[label], X, here.columns)
        means, roots = both.tensor_split([here.squares.shape[1]], dim=1)
        return Opinion(means, torch.addmm(here.spare[label], roots.square(), here.squares))

    def to(self, X: Tensor) -> OpinionFormer:
        """The same where ``X`` is."""
        if self.columns.device == X.device and self.columns.dtype == X.dtype:
            return self
        return OpinionFormer(*(getattr(self, f.name).to(X) for f in fields(self)))


def opinion_former(model: LogOdds, typical: Tensor) -> OpinionFormer:
    """A posterior in this form; ``typical`` ``(p,)`` are the usual columns, from which a layer's part counts.

    The whole has mean ``x . w + delta_c`` and variance ``phi' S phi + 1 / D_c``, see
    `salgp.calibrators.evidence.model`; the offset of a class and the two columns of a layer likewise.
    """
    S, pull, C = model.covariance, model.pull, len(model.offsets)
    p = len(model.weights)
    L = (p - OWN) // 2
    layer = torch.arange(L, device=S.device)
    a, v = layer + OWN, layer + OWN + L
    means, roots, squares = S.new_zeros(p, 2 + L), S.new_zeros(p, 2 * L), S.new_zeros(p + 2 * L, 2 + L)
    means[:, 0] = model.weights
    means[a, layer + 2], means[v, layer + 2] = model.weights[a], model.weights[v]
    first = S[a, a].clamp_min(0).sqrt()
    both = torch.where(first > 0, S[a, v] / first, 0.0)
    roots[a, layer], roots[v, layer] = first, both
    roots[v, layer + L] = (S[v, v] - both.square()).clamp_min(0).sqrt()
    whole = _root(S)
    squares[:p, 0] = squares[p + layer, layer + 2] = squares[p + L + layer, layer + 2] = 1.0
    offset, usual = model.offsets[:, None], typical.to(S)
    given = torch.cat(
        [
            offset,
            offset,
            -(usual @ means[:, 2:]).expand(C, L),
            -pull @ whole,
            -(usual @ roots).expand(C, 2 * L),
        ],
        dim=1,
    )
    own = (((pull @ S) * pull).sum(dim=1) + model.spare).clamp_min(0)
    spare = torch.cat([model.spare[:, None], own[:, None], S.new_zeros(C, L)], dim=1)
    weights = torch.cat([means, whole, roots], dim=1)
    numbers = torch.cat([weights[1 : OWN + L], -weights[OWN + L :]])  # novelties count against
    return OpinionFormer(numbers, given + weights[0], squares, spare)


def _root(S: Tensor) -> Tensor:
    """``R`` with ``R R' = S``."""
    values, vectors = torch.linalg.eigh(S)
    return vectors * values.clamp_min(0).sqrt()


def fit_in_domain(
    rows: FittedRows,
    n_classes: int,
    *,
    clean: float,
    ridge: float,
    class_spread: float,
    trust: float | None = None,
) -> tuple[InDomain, Tensor, Tensor]:
    """Fit the expert in domain.

    Args:
        rows: originals and copies.
        n_classes: the network knows.
        clean: share of the weight given to originals.
        ridge: pull of the weights.
        class_spread: of the classes' offsets.
        trust: weight of the layers; None to choose it.

    Returns:
        The expert, and mean and variance ``(n,)`` of every row's log-odds without its own group.
    """
    weight = sample_weights(rows.is_copy, rows.correct, clean, 1.0)
    if clean < 1 and bool(rows.is_copy.any()):
        weight = weight / clean  # an original counts as one sample
    expert = _fitted(rows, weight, n_classes, ridge, class_spread, largest=20.0, persistent=True)
    X, label = expert.columns(rows.view), rows.view.label
    f, variance = leave_group_out(X, label, rows.correct, weight, expert.posterior, rows.group)
    first = ~rows.is_copy
    k = choose_trust(rows.view.t[first], f[first], rows.correct[first]) if trust is None else trust
    plain = _plain_covariance(rows.view.t[first])
    own = _plain_variance(plain, rows.view.t)
    in_domain = InDomain(expert, k, plain)
    return in_domain, (1 - k) * rows.view.t + k * f, (1 - k) ** 2 * own + k**2 * variance


def fit_shift(rows: FittedRows, n_classes: int, *, caution: float, ridge: float) -> Expert:
    """Fit the expert for shift to copies, whose errors count ``caution`` times."""
    weight = sample_weights(rows.is_copy, rows.correct, SHIFT_CLEAN, caution)
    return _fitted(rows, weight, n_classes, ridge, SHIFT_SPREAD, largest=SHIFT_LARGEST, persistent=False)


def choose_trust(t: Tensor, layers: Tensor, correct: Tensor) -> float:
    """Smallest weight of the layers whose likelihood is within one standard error of the best one's.

    Args:
        t: ``(n,)`` log-odds by temperature scaling.
        layers: ``(n,)`` log-odds by the layers, each sample left out of the fit.
        correct: ``(n,)`` 0 or 1.

    Example:
        >>> right = (torch.arange(100) % 4 > 0).double()
        >>> choose_trust(torch.full((100,), 1.1).double(), 4 * (2 * right - 1), right)
        1.0
        >>> choose_trust(torch.full((100,), 1.1).double(), torch.full((100,), 1.0).double(), right)
        0.0
    """
    mixed = torch.stack([(1 - k) * t + k * layers for k in TRUSTS], dim=1)
    loss = softplus(mixed) - correct[:, None] * mixed
    mean = loss.mean(dim=0)
    best = int(mean.argmin())
    error = (loss - loss[:, best : best + 1]).std(dim=0) / len(t) ** 0.5
    enough = mean <= mean[best] + error.nan_to_num(0.0)
    return TRUSTS[int(enough.nonzero()[0, 0])]


def _plain_covariance(t: Tensor) -> Tensor:
    """Covariance ``(2, 2)`` of a constant and a slope by which temperature scaling may be off: its curvature
    on the originals, and a prior of standard deviation 1/2 for each.
    """
    X = torch.stack([torch.ones_like(t), t], dim=1)
    p = torch.sigmoid(t)
    curvature = X.T @ ((p * (1 - p))[:, None] * X) + PLAIN_PRECISION * torch.eye(2).to(t)
    return inverse_positive(cholesky(curvature))


def _plain_variance(covariance: Tensor, t: Tensor) -> Tensor:
    (a, b), (_, c) = covariance.tolist()
    return t * (c * t + 2 * b) + a


def _network(view: View, largest: float) -> Tensor:
    """``(n, 2)`` what the network itself says, within this bound."""
    return view.own if largest >= LARGEST else within(view.own, largest)


def _fitted(
    rows: FittedRows,
    weight: Tensor,
    n_classes: int,
    ridge: float,
    spread: float,
    *,
    largest: float,
    persistent: bool,
) -> Expert:
    view = rows.view
    X = columns(_network(view, largest), view.gated, view.height, persistent)
    posterior = fit_log_odds(X, view.label, rows.correct, weight, n_classes, ridge, spread)
    return Expert(posterior, X[~rows.is_copy].mean(dim=0), largest, persistent)
