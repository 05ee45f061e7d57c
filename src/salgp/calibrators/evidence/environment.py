"""Calibrate the environment, not only the sample.

One sample cannot tell *shifted* from *difficult*; a window of some tens of unlabelled ones can. Two numbers
describe a window: how confident the expert for shift is on average, and how confident the expert in domain,
each compared with what they say of originals predicted to be of the same classes. With ``n`` samples and
``u`` their rise in standard deviations,

    m = sign(u') log(1 + |u'|),     u' = u u^2 / (u^2 + 4 / n),

which is close to 0 where the window looks like the calibration set. The window's weight of the expert for
shift is ``k = w . m``, kept from 0 to 1. Where a gate says that a single sample looks disturbed, with weight
``g``, both are heard, as two witnesses of one event are:

    f = f_in + (1 - (1 - g') (1 - k)) (f_shift - f_in) - k v r_c,     g' = g min(1, k / 0.4).

The gate is believed as far as the window has seen something too. The last term is **crowding**. A network
that is lost often answers with one and the same class. Where a window has ``n_c`` answers of class ``c``,
and ``pi_c`` is the share of that class among the answers to originals,

    r_c = r r^2 / (r^2 + 4 / e),     r = max(0, log((n_c + 5 pi_c) / (e + 5 pi_c))),     e = 1 + (n - 1) pi_c,

where ``e`` is how many such answers are expected in a window with a sample that is one of them. For if the
true classes are mixed as usual, a class that is answered ten times as often as usual is right one time
in ten at best. With ``v = 1``, the most there is, its odds are divided by ten. ``w`` and ``v`` are learned
across the environments of the rehearsal: every family of perturbations at every strength, and the originals.
Where nothing has moved, ``m = 0`` and ``f`` is the expert in domain, by construction, whatever the mix of
classes. In a window of which only a part has moved, the gate tells which.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from salgp.calibrators.evidence.rows import FittedRows
from salgp.gp.logistic import logistic, logistic_covariance
from salgp.storage import storable

__all__ = ["Context", "Environment", "Surroundings", "fit_environment"]

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
EXPECTED = 5.0
"""Samples of the usual mix of classes that are added to a window before its classes are compared with it."""


@storable
@dataclass(frozen=True, eq=False)
class Context:
    """What unlabelled samples seen together tell of their environment: sums, so that more can be added.

    Args:
        total: ``(2 + C,)`` sums over the samples: of two numbers, and how often each class was predicted.

    Example:
        >>> a = Context(torch.tensor([1.0, 2.0, 3.0, 1.0]))  # four samples, three of them of the first class
        >>> (a + a).count, a.mean
        (8, tensor([0.2500, 0.5000]))
    """

    total: Tensor

    def __add__(self, other: Context) -> Context:
        return Context(self.total + other.total)

    @property
    def count(self) -> int:
        """Number of samples."""
        return round(float(self.total[2:].sum()))

    @property
    def mean(self) -> Tensor:
        """``(2,)`` of the two numbers."""
        return self.total[:2] / max(self.count, 1)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for a file or a message."""
        shift, domain, *classes = self.total.tolist()
        return {"shift": shift, "domain": domain, "classes": [round(x) for x in classes]}

    @staticmethod
    def from_dict(numbers: Mapping[str, Any]) -> Context:
        """The context that `as_dict` gave; raises `ValueError` for anything else."""
        try:
            found = [numbers["shift"], numbers["domain"], *numbers["classes"]]
            total = torch.tensor(found, dtype=torch.float64)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"a context has the numbers 'shift', 'domain' and the list 'classes'; got {numbers!r:.100}"
            ) from error
        if total.ndim != 1 or not bool(total.isfinite().all()) or bool((total[2:] < 0).any()):
            raise ValueError(f"a context holds finite sums, and counts from 0 on; got {numbers!r:.100}")
        return Context(total)


@dataclass(frozen=True, eq=False)
class Surroundings:
    """What the window of each sample shows.

    Args:
        m: ``(n, 2)`` how far both experts' confidences have moved; NaN where nothing is known of the window.
        crowding: ``(n,)`` how much more often than usual the sample's class is predicted in it, ``r_c``.
    """

    m: Tensor
    crowding: Tensor

    def to(self, x: Tensor) -> Surroundings:
        """The same where ``x`` is."""
        return Surroundings(self.m.to(x), self.crowding.to(x))


@storable
@dataclass(frozen=True, eq=False)
class Environment:
    """How calibration moves with what a window shows.

    Args:
        usual: ``(C, 2)`` mean opinion on originals of each predicted class, from the mean of all.
        centre: ``(2,)`` mean over originals.
        spread: ``(2,)`` standard deviation.
        weights: ``(2,)``, ``w``.
        covariance: ``(2, 2)`` of the weights.
        shares: ``(C,)`` of the predicted classes among the originals, ``pi``.
        crowded: weight of crowding, ``v``.
        crowded_variance: of that weight.
    """

    usual: Tensor
    centre: Tensor
    spread: Tensor
    weights: Tensor
    covariance: Tensor
    shares: Tensor
    crowded: float = 0.0
    crowded_variance: float = 0.0

    def opinions(self, inside: Tensor, shift: Tensor, label: Tensor) -> Tensor:
        """Two numbers per sample ``(n, 2)`` whose mean over a window describes it."""
        return _confidences(inside, shift) - self.usual.to(inside)[label]

    def sums(self, opinions: Tensor, label: Tensor, window: Tensor, n_windows: int) -> Tensor:
        """``(w, 2 + C)`` of the samples of each window, whose numbers are ``window (n,)``."""
        C = len(self.shares)
        moved = opinions.new_zeros(n_windows, 2).index_add_(0, window, opinions)
        one = torch.ones_like(opinions[:, 0])
        counts = opinions.new_zeros(n_windows * C).index_add_(0, window * C + label, one)
        return torch.cat([moved, counts.reshape(n_windows, C)], dim=1)

    def parts(self, opinions: Tensor, label: Tensor) -> Tensor:
        """What each sample adds to the sums of its window, ``(n, 2 + C)``."""
        return torch.cat([opinions, one_hot(label, len(self.shares)).to(opinions)], dim=1)

    def surroundings(self, sums: Tensor, window: Tensor, label: Tensor) -> Surroundings:
        """What windows with these sums ``(w, 2 + C)`` show to samples predicted to be of the classes
        ``label (n,)``, in the windows ``window (n,)``.
        """
        moved, counts = sums[:, :2], sums[:, 2:]
        n = counts.sum(dim=1)
        m = self.displacement(moved / n.clamp_min(1.0)[:, None], n)
        shares = self.shares.to(sums)
        return Surroundings(m[window], _crowding(counts[window, label], n[window], shares[label]))

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

    def doubt(self, seen: Surroundings) -> Tensor:
        """What crowding takes from the log-odds, ``k v r (n,)``."""
        return self.crowded * self.lean(seen.m) * seen.crowding

    def lean_variance(self, m: Tensor) -> Tensor:
        """Variance ``(n,)`` of ``k``."""
        m = _known(m)
        return ((m @ self.covariance.to(m)) * m).sum(dim=1)

    def doubt_variance(self, seen: Surroundings) -> Tensor:
        """Variance ``(n,)`` of `doubt` from that of its weight."""
        return self.crowded_variance * (self.lean(seen.m) * seen.crowding).square()


def fit_environment(
    rows: FittedRows,
    inside: Tensor,
    shift: Tensor,
    n_classes: int,
    *,
    window: int,
    seed: int,
    crowding: bool = True,
) -> Environment:
    """Learn across rehearsed environments.

    Args:
        rows: originals and copies.
        inside: ``(n,)`` log-odds by the expert in domain.
        shift: ``(n,)`` by the expert for shift.
        n_classes: the network knows.
        window: samples per window.
        seed: of the windows.
        crowding: learn from how often each class is predicted?
    """
    label, first = rows.view.label, ~rows.is_copy
    values = _confidences(inside, shift)
    usual = _usual(values[first], label[first], n_classes)
    values = values - usual[label]
    centre, spread = values[first].mean(dim=0), values[first].std(dim=0, correction=0).clamp_min(1e-6)
    nothing = torch.zeros(2).to(values), torch.zeros(2, 2).to(values)
    start = Environment(usual, centre, spread, *nothing, _shares(label[first], n_classes).to(values))
    drawn = _drawn(rows, window, seed)
    flat, number = drawn.index.flatten(), torch.arange(len(drawn.index)).repeat_interleave(window)
    number = number.to(flat.device)
    sums = start.sums(values[flat], label[flat], number, len(drawn.index))
    seen = start.surroundings(sums, number, label[flat])
    gap, correct = (shift - inside)[flat], rows.correct[flat]
    w, covariance = _weights(seen.m * gap[:, None], correct, drawn.weight, inside[flat], len(rows))
    leaning = replace(start, weights=w, covariance=covariance)
    if not crowding:
        return leaning
    k = leaning.lean(seen.m)
    crowded = (-k * seen.crowding)[:, None]
    v, variance = _weights(crowded, correct, drawn.weight, inside[flat] + k * gap, len(rows))
    return replace(leaning, crowded=min(max(0.0, float(v)), 1.0), crowded_variance=float(variance))


@dataclass(frozen=True, eq=False)
class _Drawn:
    """Windows ``index (w, size)`` of rows, and the weight of each place in them, ``(w size,)``."""

    index: Tensor
    weight: Tensor


def _drawn(rows: FittedRows, window: int, seed: int) -> _Drawn:
    generator = torch.Generator().manual_seed(seed)
    picked = [
        (index, torch.full((index.numel(),), weight).to(rows.correct))
        for index, weight in _windows(rows, window, generator)
    ]
    weight = torch.cat([part for _, part in picked])
    return _Drawn(torch.cat([part for part, _ in picked]), weight * (len(rows) / weight.sum()))


def _weights(X: Tensor, correct: Tensor, weight: Tensor, offset: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Weights ``(p,)`` of columns ``X (n, p)`` added to log-odds, and their covariance."""
    scale = (X.square().mean(dim=0) + FLOOR**2).sqrt()
    X = X / scale
    prior = torch.full((X.shape[1],), RIDGE * n).to(X)
    w = logistic(X, correct, weight, prior, offset)
    covariance = logistic_covariance(X, weight, prior, offset + X @ w)
    return w / scale, covariance / (scale[:, None] * scale)


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


def _shares(label: Tensor, n_classes: int) -> Tensor:
    """Share ``(C,)`` of each predicted class; half a sample more of each, so that none is 0."""
    count = torch.bincount(label, minlength=n_classes).double() + 0.5
    return count / count.sum()


def _crowding(count: Tensor, n: Tensor, share: Tensor) -> Tensor:
    """``r_c (n,)`` of a class with ``count`` answers out of ``n``, whose usual share is ``share``."""
    usual = 1 + (n - 1) * share
    ratio = torch.log((count + EXPECTED * share) / (usual + EXPECTED * share)).relu()
    return ratio.pow(3) / (ratio.square() + SHRINK / usual)
