"""Which expert to ask about a single sample: was it disturbed, or is it merely difficult?

Without other samples beside it, a sample tells by where it lies. The gate is a logistic regression *copy or
original?* on the first whitened coordinates of every layer, their squares and the evidence. Its answer is the
weight of the expert for shift.

A guard keeps it from costing anything in domain. A sample is handed over only if it looks more disturbed than
99 of 100 originals did when the gate had not seen them. Fewer than 200 originals cannot tell who is one in a
hundred: the gate stays closed. Only where handing over more of them was seen to help them does it open
earlier.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from salgp.calibrators.evidence.model import within
from salgp.calibrators.evidence.rows import FittedRows, View
from salgp.gp.logistic import logistic
from salgp.storage import storable

__all__ = ["CLIP", "Gate", "choose_guard", "fit_gate"]

PRIOR = 0.1
"""Share of disturbed samples that the gate expects."""
RIDGE = 20.0
FOLDS = 3
MOST_ROWS = 6000
"""Rows the gate is fitted to: all originals, and as many copies as there is room for."""
CLIP = 8.0
GUARDS, MOST = (0.9, 0.95, 0.98), 0.99
"""Shares of originals left as they are, tried in this order, and the share where none of them helps. Not all:
one strange original would close the gate for good.
"""
FEWEST = 200
"""Originals it takes to know who is one in a hundred."""
LARGEST_GUARD = 0.99


@storable
@dataclass(frozen=True, eq=False)
class Gate:
    """A fitted gate.

    Args:
        centre: ``(p,)`` mean of its inputs over the originals.
        scale: ``(p,)`` their standard deviation.
        weights: ``(1 + p,)`` of a constant and the inputs.
        guard: answers up to this one count as 0.
    """

    centre: Tensor
    scale: Tensor
    weights: Tensor
    guard: float

    def __call__(self, view: View, place: Tensor) -> Tensor:
        """Weight ``(n,)`` of the expert for shift, from 0 to 1."""
        x = _standard(_inputs(view, place), self.centre.to(view.t), self.scale.to(view.t))
        weights = self.weights.to(view.t)
        share = torch.sigmoid(torch.addmv(weights[0], x, weights[1:]))
        return _passed(share, self.guard)


def fit_gate(
    rows: FittedRows, place: Tensor, inside: Tensor, shift: Tensor, share: float | None = None
) -> Gate:
    """Learn to tell copies from originals. The order of the rows does not matter.

    Args:
        rows: both.
        place: ``(n, q L)`` whitened coordinates, see `salgp.calibrators.evidence.reference.Evidence`.
        inside: ``(n,)`` log-odds by the expert in domain, each row left out of it.
        shift: ``(n,)`` log-odds by the expert for shift.
        share: of originals that must stay untouched; None to choose it.
    """
    x = _inputs(rows.view, place)
    first = ~rows.is_copy
    centre, scale = x[first].mean(dim=0), x[first].std(dim=0, correction=0).clamp_min(1e-6)
    used = _some(rows)
    x, copy = _with_one(_standard(x[used], centre, scale)), rows.is_copy[used].to(x)
    fold = _folds(rows)[used]
    unseen = torch.zeros_like(copy)
    for k in range(FOLDS):
        held = fold == k
        if bool(held.any()) and 0 < float(copy[~held].mean()) < 1:
            unseen[held] = torch.sigmoid(x[held] @ _weights(x[~held], copy[~held]))
    seen = unseen[copy == 0]  # of the originals, in the order of the rows
    if share is None:
        guard = choose_guard(seen, inside[first], shift[first], rows.correct[first])
    else:
        guard = _bounded(seen.quantile(share))
    return Gate(centre, scale, _weights(x, copy), guard)


def choose_guard(share: Tensor, inside: Tensor, shift: Tensor, correct: Tensor) -> float:
    """Lowest guard under which handing originals over clearly helps them, by one standard error; else the one
    that one in a hundred passes, or 1 where there are too few originals to know it.

    Args:
        share: ``(n,)`` what a gate that has not seen them says of the originals.
        inside: ``(n,)`` log-odds by the expert in domain.
        shift: ``(n,)`` log-odds by the expert for shift.
        correct: ``(n,)`` 0 or 1.

    Example:
        >>> share = torch.linspace(0, 0.8, 201, dtype=torch.float64)
        >>> right = (share < 0.7).double()
        >>> surely, hardly = torch.full((201,), 3.0).double(), torch.full((201,), -3.0).double()
        >>> round(
        ...     choose_guard(share, surely, hardly, right), 4
        ... )  # the last tenth is wrong: handing it over helps
        0.72
        >>> round(choose_guard(share, surely, hardly, torch.ones(201).double()), 4)
        0.792
        >>> choose_guard(share[:100], surely[:100], hardly[:100], torch.ones(100).double())
        1.0
    """
    before = _loss(inside, correct)
    for tried in GUARDS:
        guard = _bounded(share.quantile(tried))
        change = _loss(inside + _passed(share, guard) * (shift - inside), correct) - before
        if float(change.mean() + change.std() / len(change) ** 0.5) <= 0 and bool((change != 0).any()):
            return guard
    return _bounded(share.quantile(MOST)) if len(share) >= FEWEST else 1.0


def _loss(f: Tensor, correct: Tensor) -> Tensor:
    return softplus(f) - correct * f


def _passed(share: Tensor, guard: float) -> Tensor:
    if guard == 1:
        return torch.zeros_like(share)
    return ((share - guard) / (1 - guard)).clamp_min(0.0)


def _bounded(guard: Tensor) -> float:
    return float(guard.clamp_max(LARGEST_GUARD))


def _weights(x: Tensor, copy: Tensor) -> Tensor:
    among = float(copy.mean())
    weight = torch.where(copy > 0, PRIOR / among, (1 - PRIOR) / (1 - among))
    prior = torch.full((x.shape[1],), RIDGE).to(x)
    prior[0] = 1e-3
    return logistic(x, copy, weight, prior)


def _some(rows: FittedRows) -> Tensor:
    """Rows to learn from: all originals, and every so many copies in the order of their confidence."""
    first, others = (~rows.is_copy).nonzero()[:, 0], rows.is_copy.nonzero()[:, 0]
    room = max(MOST_ROWS - len(first), len(first))
    step = -(-len(others) // room)
    return torch.cat([first, others[rows.view.t[others].argsort(stable=True)][::step]])


def _folds(rows: FittedRows) -> Tensor:
    """Fold ``(n,)`` of each row: groups are dealt out in the order of their originals' confidence."""
    first = (~rows.is_copy).nonzero()[:, 0]
    rank = rows.view.t[first].argsort(stable=True).argsort()
    fold = torch.zeros(int(rows.group.max()) + 1, dtype=torch.long, device=rank.device)
    fold[rows.group[first]] = rank % FOLDS
    return fold[rows.group]


def _inputs(view: View, place: Tensor) -> Tensor:
    x = within(place.to(view.t), 6)
    N = view.novelty
    evidence = [within(view.agreement, 6), view.height, within(N, 4)]
    return torch.cat([x, x.square(), *evidence, within(view.own[:, :1], 10)], dim=1)


def _standard(x: Tensor, centre: Tensor, scale: Tensor) -> Tensor:
    return within((x - centre) / scale, CLIP)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([torch.ones_like(x[:, :1]), x], dim=1)
