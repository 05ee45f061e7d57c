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

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.evidence.model import (
    LogOdds,
    columns,
    fit_log_odds,
    leave_group_out,
    sample_weights,
    within,
)
from salgp.calibrators.evidence.rows import SeenRows, View
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.storage import storable

__all__ = ["Expert", "InDomain", "Opinion", "choose_trust", "fit_in_domain", "fit_shift"]

TRUSTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Weights of the layers in domain that are tried."""
PLAIN_PRECISION = 4.0
SHIFT_CLEAN, SHIFT_LARGEST, SHIFT_SPREAD = 0.05, 4.0, 1.0
"""The expert for shift: weight of originals, bound of ``t``, spread of the classes' offsets."""


@dataclass(frozen=True, eq=False)
class Opinion:
    """Log-odds of being correct, and what they are made of.

    Args:
        mean: ``(n,)``.
        variance: ``(n,)``.
        terms: ``(n, 1 + L)`` part of the predicted class and of each layer, beyond their usual value.
        term_variance: ``(n, 1 + L)``.
    """

    mean: Tensor
    variance: Tensor
    terms: Tensor
    term_variance: Tensor


@storable
@dataclass(frozen=True, eq=False)
class Expert:
    """A fitted opinion.

    Args:
        posterior: of the weights of the columns and of the offsets of the classes.
        typical: ``(p,)`` mean of the columns over the originals.
        largest: bound of ``t``.
        persistent: does the novelty of a layer count only as far as later layers share it?
    """

    posterior: LogOdds
    typical: Tensor
    largest: float
    persistent: bool

    def columns(self, view: View) -> Tensor:
        """Columns ``(n, p)`` of the model."""
        t = within(view.t, self.largest)
        return columns(t, view.agreement, view.novelty, self.persistent)

    def log_odds(self, view: View) -> Tensor:
        """Mean ``(n,)`` alone."""
        X = self.columns(view)
        model = self.posterior.to(X)
        return X @ model.weights + model.offsets[view.label]

    def opinion(self, view: View) -> Opinion:
        """Mean, variance and terms."""
        X = self.columns(view)
        model = self.posterior.to(X)
        terms, spread = self._terms(X, model, view.label)
        return Opinion(*model.moments(X, view.label), terms, spread)

    def _terms(self, X: Tensor, model: LogOdds, label: Tensor) -> tuple[Tensor, Tensor]:
        L = (X.shape[1] - 2) // 2
        off, w, S = X - self.typical.to(X), model.weights, model.covariance
        agreement, novelty = off[:, 2 : 2 + L], off[:, 2 + L :]
        u, v = w[2 : 2 + L], w[2 + L :]
        layers = agreement * u + novelty * v
        a, b = torch.arange(2, 2 + L), torch.arange(2 + L, 2 + 2 * L)
        spread = agreement.square() * S[a, a] + novelty.square() * S[b, b] + 2 * agreement * novelty * S[a, b]
        pull = model.pull[label]
        own = ((pull @ S) * pull).sum(dim=1) + model.spare[label]
        terms = torch.cat([model.offsets[label][:, None], layers], dim=1)
        return terms, torch.cat([own[:, None], spread], dim=1).clamp_min(0)


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
        layers, k = self.expert.opinion(view), self.trust
        return Opinion(
            (1 - k) * view.t + k * layers.mean,
            (1 - k) ** 2 * _plain_variance(self.plain, view.t) + k**2 * layers.variance,
            k * layers.terms,
            k**2 * layers.term_variance,
        )


def fit_in_domain(
    rows: SeenRows,
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
    made = InDomain(expert, k, plain)
    return made, (1 - k) * rows.view.t + k * f, (1 - k) ** 2 * own + k**2 * variance


def fit_shift(rows: SeenRows, n_classes: int, *, caution: float, ridge: float) -> Expert:
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
    S = covariance.to(t)
    return S[0, 0] + 2 * S[0, 1] * t + S[1, 1] * t.square()


def _fitted(
    rows: SeenRows,
    weight: Tensor,
    n_classes: int,
    ridge: float,
    spread: float,
    *,
    largest: float,
    persistent: bool,
) -> Expert:
    view = rows.view
    X = columns(within(view.t, largest), view.agreement, view.novelty, persistent)
    posterior = fit_log_odds(X, view.label, rows.correct, weight, n_classes, ridge, spread)
    return Expert(posterior, X[~rows.is_copy].mean(dim=0), largest, persistent)
