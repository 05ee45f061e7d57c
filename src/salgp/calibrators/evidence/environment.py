"""Calibrate the environment, not only the sample.

One sample cannot tell *shifted* from *difficult*; a window of some tens of unlabelled ones can. Two numbers
describe a window: how confident the expert for shift is on average, and how confident the expert in domain,
each compared with what they say of originals predicted to be of the same classes. With ``n`` samples and
``u`` their rise in standard deviations,

    m = sign(u') log(1 + |u'|),     u' = u u^2 / (u^2 + 4 / n),

which is close to 0 where the window looks like the calibration set. The window's weight of the expert for
shift is ``k = w . m``, kept from 0 to 1. Where a gate says that a single sample looks disturbed, with weight
``g``, both are heard, as two witnesses of one event are:

    f = f_in + (1 - (1 - g') (1 - k)) (f_shift - f_in),     g' = g min(1, k / 0.4).

The gate is believed as far as the window has seen something too. ``w`` is learned across the environments of
the rehearsal: every family of perturbations at every strength, and the originals. Where nothing has moved,
``m = 0`` and ``f`` is the expert in domain, by construction. In a window of which only a part has moved, the
gate tells which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.evidence.gate import logistic
from salgp.calibrators.evidence.rows import FittedRows
from salgp.gp.linalg import cholesky, inverse_positive
from salgp.storage import storable

__all__ = ["Context", "Environment", "fit_environment"]

SHRINK = 4.0
RIDGE, FLOOR = 0.0025, 0.3
"""Pull of the weights to 0 per row, on columns of unit mean square; smaller ones are not blown up to that, so
that a number which hardly moved in the rehearsal gets no large weight.
"""
CREDIBLE = 0.4
"""Weight of the window from which on the gate is believed in full."""
WINDOWS, CLEAN_WINDOWS, CLEAN_WEIGHT = 6, 24, 4.0
"""Windows drawn from each environment and from the originals, and the weight of the latter's rows."""
CLASS_PRIOR = 10.0
"""Samples by which the usual opinion on a class is pulled to that on all."""


@storable
@dataclass(frozen=True, eq=False)
class Context:
    """What unlabelled samples seen together tell of their environment: sums, so that more can be added.

    Args:
        total: ``(2,)`` sums over the samples.
        count: number of samples.

    Example:
        >>> a = Context(torch.tensor([1.0, 2.0]), 4)
        >>> (a + a).count, a.mean
        (8, tensor([0.2500, 0.5000]))
    """

    total: Tensor
    count: int

    def __add__(self, other: Context) -> Context:
        return Context(self.total + other.total, self.count + other.count)

    @property
    def mean(self) -> Tensor:
        """``(2,)``."""
        return self.total / max(self.count, 1)

    def as_dict(self) -> dict[str, float]:
        """Plain numbers, for a file or a message."""
        return {"shift": float(self.total[0]), "domain": float(self.total[1]), "count": self.count}

    @staticmethod
    def from_dict(numbers: dict[str, float]) -> Context:
        """The context that `as_dict` gave."""
        total = torch.tensor([numbers["shift"], numbers["domain"]], dtype=torch.float64)
        return Context(total, int(numbers["count"]))


@storable
@dataclass(frozen=True, eq=False)
class Environment:
    """How calibration moves with what a window shows.

    Args:
        usual: ``(C, 2)`` mean opinion on originals of each predicted class, from the mean of all.
        centre: ``(2,)`` mean over originals.
        spread: ``(2,)`` standard deviation.
        weights: ``(2,)``.
        covariance: ``(2, 2)`` of the weights.
    """

    usual: Tensor
    centre: Tensor
    spread: Tensor
    weights: Tensor
    covariance: Tensor

    def opinions(self, inside: Tensor, shift: Tensor, label: Tensor) -> Tensor:
        """Two numbers per sample ``(n, 2)`` whose mean over a window describes it."""
        return _confidences(inside, shift) - self.usual.to(inside)[label]

    def displacement(self, mean: Tensor, count: Tensor) -> Tensor:
        """``m (w, 2)`` of windows with these means ``(w, 2)`` and numbers of samples ``(w,)``; NaN where a
        window has none, so that nothing is known.
        """
        m = _compressed((mean - self.centre.to(mean)) / self.spread.to(mean), count.to(mean))
        return torch.where(count.to(mean)[:, None] > 0, m, torch.nan)

    def lean(self, m: Tensor) -> Tensor:
        """Weight ``k (n,)`` of the expert for shift in windows with ``m (n, 2)``; 0 if nothing is known."""
        return (_known(m) @ self.weights.to(m)).clamp(0.0, 1.0)

    def joined(self, gate: Tensor, m: Tensor) -> Tensor:
        """Weight ``(n,)`` of the expert for shift where a gate says ``gate (n,)`` of each sample. The gate
        alone decides where nothing is known of the window.
        """
        k = self.lean(m)
        credit = torch.where(m[:, 0].isnan(), 1.0, (k / CREDIBLE).clamp(max=1.0))
        return 1 - (1 - gate * credit) * (1 - k)

    def lean_variance(self, m: Tensor) -> Tensor:
        """Variance ``(n,)`` of ``k``."""
        m = _known(m)
        return ((m @ self.covariance.to(m)) * m).sum(dim=1)


def fit_environment(
    rows: FittedRows, inside: Tensor, shift: Tensor, n_classes: int, *, window: int, seed: int
) -> Environment:
    """Learn across rehearsed environments.

    Args:
        rows: originals and copies.
        inside: ``(n,)`` log-odds by the expert in domain.
        shift: ``(n,)`` by the expert for shift.
        n_classes: the network knows.
        window: samples per window.
        seed: of the windows.
    """
    generator = torch.Generator().manual_seed(seed)
    label, first = rows.view.label, ~rows.is_copy
    values = _confidences(inside, shift)
    usual = _usual(values[first], label[first], n_classes)
    values = values - usual[label]
    centre, spread = values[first].mean(dim=0), values[first].std(dim=0, correction=0).clamp_min(1e-6)
    picked = [
        (index, torch.full((index.numel(),), weight).to(values))
        for index, weight in _windows(rows, window, generator)
    ]
    index = torch.cat([part for part, _ in picked])  # (w, window)
    weight = torch.cat([part for _, part in picked])
    u = (values[index].mean(dim=1) - centre) / spread
    m = _compressed(u, torch.full((len(u),), float(window)).to(u))
    flat = index.flatten()
    X = m.repeat_interleave(window, dim=0) * (shift - inside)[flat, None]
    scale = (X.square().mean(dim=0) + FLOOR**2).sqrt()
    weight = weight * (len(rows) / weight.sum())
    prior = torch.full((X.shape[1],), RIDGE * len(rows)).to(X)
    w = logistic(X / scale, rows.correct[flat], weight, prior, inside[flat])
    p = torch.sigmoid(inside[flat] + (X / scale) @ w)
    curvature = (X / scale).T @ ((weight * p * (1 - p))[:, None] * (X / scale)) + prior.diag()
    covariance = inverse_positive(cholesky(curvature)) / (scale[:, None] * scale)
    return Environment(usual, centre, spread, w / scale, covariance)


def _windows(rows: FittedRows, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, float]]:
    """Random windows ``(w, size)`` of every environment, and the weight of their rows."""
    for family in [0, *rows.families]:
        here = rows.family == family
        for strength in rows.strength[here].unique():
            members = (here & (rows.strength == strength)).nonzero()[:, 0]
            members = members[rows.view.t[members].argsort(stable=True)]  # the order of the rows is nothing
            count = WINDOWS if family else CLEAN_WINDOWS
            draws = [_draw(len(members), size, generator) for _ in range(count)]
            yield members[torch.stack(draws).to(members.device)], CLEAN_WEIGHT if family == 0 else 1.0


def _draw(n: int, size: int, generator: torch.Generator) -> Tensor:
    if n >= size:
        return torch.randperm(n, generator=generator)[:size]
    return torch.randint(n, (size,), generator=generator)


def _known(m: Tensor) -> Tensor:
    """``m``, and 0 where nothing is known."""
    return torch.where(m.isnan(), 0.0, m)


def _confidences(inside: Tensor, shift: Tensor) -> Tensor:
    return torch.stack([torch.sigmoid(shift), torch.sigmoid(inside)], dim=1)


def _usual(values: Tensor, label: Tensor, n_classes: int) -> Tensor:
    total = values.new_zeros(n_classes, 2).index_add_(0, label, values - values.mean(dim=0))
    count = torch.bincount(label, minlength=n_classes).to(values)
    return total / (count[:, None] + CLASS_PRIOR)


def _compressed(u: Tensor, count: Tensor) -> Tensor:
    shrunk = u.pow(3) / (u.square() + SHRINK / count[:, None].clamp_min(1.0))
    return shrunk.sign() * torch.log1p(shrunk.abs())
