"""One sample by itself, with the least work: the model of layer evidence in NumPy.

A service that is asked about one image at a time pays for starting operations, not for their arithmetic. A
large network leaves nothing of them in the processor's cache, and starting one in PyTorch then costs ten
times what it computes. So a single sample is judged by the same formulas on small NumPy arrays, made ready
once. Only the products with directions and reference points stay in PyTorch, which knows how many threads it
may use. The modules beside this one explain the formulas; a test holds both ways together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from salgp.calibrators.evidence.experts import Expert, InDomain
from salgp.calibrators.evidence.gate import CLIP, Gate
from salgp.calibrators.evidence.model import LARGEST_LOG_ODDS, STRETCH, TOLERATED, Scales
from salgp.calibrators.evidence.reference import LARGEST_LOG_RATIO, PLACE, Reference
from salgp.calibrators.evidence.rows import LARGEST
from salgp.calibrators.evidence.strangeness import DISTANCE, Strangeness
from salgp.features import Features
from salgp.neighbours import BLOCK

__all__ = ["Judgement", "SingleSample"]

Array = NDArray[Any]

LOST = 1e-100
"""Odds of all other classes against the predicted one, below which their digits are lost."""


@dataclass(frozen=True, eq=False)
class Judgement:
    """What is said of one sample, all in log-odds.

    Args:
        mean: that it is correct.
        variance: of that.
        terms: ``(2 + L,)`` parts of the change, of confidence, predicted class and layers.
        term_variance: ``(2 + L,)``.
        novelty: how strange the sample is.
        odds: ``(c,)`` by which the other classes share, tempered; whatever their sum.
    """

    mean: float
    variance: float
    terms: Array
    term_variance: Array
    novelty: float
    odds: Array


class SingleSample:
    """A fitted model, made ready to judge one sample at a time."""

    def __init__(
        self,
        reference: Reference,
        temperature: float,
        scales: Scales,
        usual: Strangeness,
        inside: InDomain,
        shift: Expert | None,
        gate: Gate | None,
        unseen: float,
    ) -> None:
        self._look = _Look(reference)
        self._temperature = temperature
        self._scales = [_numbers(x) for x in (scales.agreement, scales.novelty, scales.spread)]
        self._length = max(float(scales.length), 1e-12)
        self._known = TOLERATED * max(float(scales.longest), 1e-12)
        self._usual = usual.centre.tolist(), usual.scale.tolist()
        self._inside = _InDomain(inside)
        self._shift = None if shift is None else _Expert(shift)
        self._gate = None if gate is None or gate.guard == 1 else _Gate(gate)
        self._unseen = unseen

    def __call__(self, features: Features) -> Judgement:
        """What is said of the one sample of ``features``."""
        label = int(features.label)
        z = features.logits.numpy()[0].astype(np.float64)
        z -= (top := float(z[label]))
        raw, _ = _log_odds(np.exp(z), label)
        odds = np.exp(z / self._temperature)
        t, rest = _log_odds(odds, label)
        if rest < LOST:
            odds = _odds_among_others(z / self._temperature, label)
        energy = -top / self._temperature - math.log1p(rest)
        agreement, novelty, place, length = self._look(features, label)
        scale, middle, spread = self._scales
        seen = _Seen(t, agreement / scale, (novelty - middle) / spread, self._steady(z, label, length))
        mean, variance, own = self._opinion(seen, label, place)
        chance, far = -math.log(max(len(z) - 1, 1)), max(length / self._known, 1.0)
        f, unsure = chance + (float(mean[0]) - chance) / far, float(variance[0])
        mean[0], variance[0] = f - raw - mean[1:].sum(), own
        strange = self._strangeness(seen, energy) + math.log(far)
        return Judgement(f, unsure, mean, variance, strange, odds)

    def _steady(self, z: Array, label: int, length: float) -> float:
        """Log-odds at the usual length of the last layer's features."""
        stretch = min(max(length / self._length, 1 / STRETCH), STRETCH)
        return min(_log_odds(np.exp(z / (self._temperature * stretch)), label)[0], LARGEST_LOG_ODDS)

    def _opinion(self, seen: _Seen, label: int, place: Array) -> tuple[Array, Array, float]:
        """Means and variances of the whole and of its parts, and the variance of the confidence's part."""
        mean, variance = self._inside(seen, label)
        lean = 0.0 if self._gate is None or self._shift is None else self._gate(seen, place)
        if lean == 0 or self._shift is None:
            return mean, variance, variance[0]
        stays = (1 - lean) ** 2
        shift, unsure = self._shift(seen, label)
        unsure[0] += self._unseen
        own = stays * variance[0]
        return mean + lean * (shift - mean), stays * variance + lean**2 * unsure, own

    def _strangeness(self, seen: _Seen, energy: float) -> float:
        (e, a), (e_scale, a_scale) = self._usual
        agreed = (float(seen.agreement.sum()) / len(seen.agreement) - a) / a_scale
        return _height((energy - e) / e_scale) + _height(-agreed) + DISTANCE * float(seen.height.max())


class _Seen:
    """Log-odds, agreement and novelty of the layers, and both as the model counts them; and log-odds at the
    usual length.
    """

    def __init__(self, t: float, agreement: Array, novelty: Array, steady: float) -> None:
        self.t, self.agreement, self.novelty, self.steady = t, agreement, novelty, steady
        self.gated = agreement / (1.0 + 0.3 * np.logaddexp(0.0, novelty - 1.0))
        self.height = np.log1p(np.logaddexp(0.0, novelty))


class _Look:
    """Agreement and novelty of every layer, the place of a sample, and the length of its last layer."""

    def __init__(self, reference: Reference) -> None:
        directions, centre = reference.directions
        index = reference.index
        self._names = tuple(reference.layers)
        self._directions = [D.mT.contiguous() for D in directions]
        self._centre = _numbers(centre)
        self._widths = [len(D) for D in directions]
        self._first = [0, *accumulate(self._widths[:-1])]
        self._fast, self._squares = index.fast, index.squares
        self._points = index.points.numpy()
        self._layer = np.arange(len(directions))[:, None]
        self._start, self._size = index.start.tolist(), index.size.tolist()
        self._k, self._most = reference.k, reference.k + index.spare
        self._place = None if set(reference.places) == {PLACE} else reference.places

    def __call__(self, features: Features, label: int) -> tuple[Array, Array, Array, float]:
        query, length = self._query(features)
        own, other, anyone = self._distances(query.astype(np.float32), label)
        agreement = np.minimum(np.maximum(other - own, -LARGEST_LOG_RATIO), LARGEST_LOG_RATIO)
        return agreement, anyone, self._placed(query), length

    def _query(self, features: Features) -> tuple[Array, float]:
        """Whitened coordinates ``(L, q)``, and the length of the last layer's features."""
        x = np.concatenate([features.layers[name].numpy()[0] for name in self._names], dtype=np.float64)
        length = np.sqrt(np.add.reduceat(x * x, self._first))
        parts = torch.from_numpy(x).split(self._widths)
        along = torch.cat([D @ part for D, part in zip(self._directions, parts, strict=True)]).numpy()
        query: Array = along.reshape(self._centre.shape) / np.maximum(length, 1e-12)[:, None] - self._centre
        return query, float(length[-1])

    def _distances(self, query: Array, label: int) -> Array:
        """Logarithms ``(3, L)`` of the mean distances to the own class, to others, and to any."""
        x = torch.from_numpy(query)[:, None]
        D = torch.baddbmm(self._squares, x, self._fast, alpha=-2).numpy()[:, 0]
        run = slice(self._start[label], self._start[label] + self._size[label])
        own = _least_places(D[:, run], self._most) + run.start
        D[:, run] = np.inf
        column = np.concatenate([own, _least_in_blocks(D, self._most)], axis=1)
        apart = self._points[self._layer, column] - query[:, None]
        distance = np.sqrt(np.einsum("lkq,lkq->lk", apart, apart, dtype=np.float64))
        sides = np.sort(distance.reshape(len(query), 2, -1))[:, :, : self._k]
        anyone = np.sort(sides.reshape(len(query), 1, -1))[:, :, : self._k]
        mean = np.concatenate([sides, anyone], axis=1).sum(axis=-1) / self._k
        return np.log(np.maximum(mean, 1e-9)).T

    def _placed(self, query: Array) -> Array:
        if self._place is None:
            return query[:, :PLACE].ravel()
        return np.concatenate([x[:width] for x, width in zip(query, self._place, strict=True)])


class _Expert:
    """An opinion: means and variances ``(2 + L,)``."""

    def __init__(self, expert: Expert) -> None:
        former = expert.former
        self._columns, self._given = _numbers(former.columns), _numbers(former.given)
        self._squares, self._spare = _numbers(former.squares), _numbers(former.spare)
        self._means = self._squares.shape[1]
        self._largest, self._persistent = min(expert.largest, LARGEST), expert.persistent

    def __call__(self, seen: _Seen, label: int) -> tuple[Array, Array]:
        own = np.clip([seen.t, seen.steady], -self._largest, self._largest)
        novelty = np.minimum.accumulate(seen.height[::-1])[::-1] if self._persistent else seen.height
        both = self._given[label] + np.concatenate([own, seen.gated, novelty]) @ self._columns
        roots = both[self._means :]
        return both[: self._means], self._spare[label] + (roots * roots) @ self._squares


class _InDomain:
    """Temperature scaling and layers, mixed."""

    def __init__(self, inside: InDomain) -> None:
        (self._a, self._b), (_, self._c) = inside.plain.tolist()
        self._trust = inside.trust
        self._expert = _Expert(inside.expert)

    def __call__(self, seen: _Seen, label: int) -> tuple[Array, Array]:
        k, t = self._trust, seen.t
        if k == 0:
            mean, variance = np.zeros((2, 2 + len(seen.gated)))
        else:
            mean, variance = self._expert(seen, label)
        if k == 1:
            return mean, variance
        mean, variance = k * mean, k**2 * variance
        mean[0] += (1 - k) * t
        variance[0] += (1 - k) ** 2 * (t * (self._c * t + 2 * self._b) + self._a)
        return mean, variance


class _Gate:
    """Weight of the expert for shift."""

    def __init__(self, gate: Gate) -> None:
        weights = _numbers(gate.weights)
        self._centre, self._scale = _numbers(gate.centre), _numbers(gate.scale)
        self._constant, self._weights, self._guard = float(weights[0]), weights[1:], gate.guard

    def __call__(self, seen: _Seen, place: Array) -> float:
        x = _within(place.astype(np.float32), 6).astype(np.float64)
        evidence = (_within(seen.agreement, 6), seen.height, _within(seen.novelty, 4))
        inputs = np.concatenate([x, x * x, *evidence, [max(min(seen.t, 10.0), -10.0)]])
        far = _within((inputs - self._centre) / self._scale, CLIP)
        share = 1 / (1 + math.exp(-self._constant - float(far @ self._weights)))
        return max((share - self._guard) / (1 - self._guard), 0.0)


def _log_odds(odds: Array, label: int) -> tuple[float, float]:
    """Log-odds of the predicted class, from the odds of all against it; and what the others have in all."""
    rest = float(odds.sum()) - float(odds[label])
    rest = rest if rest > 0.01 else float(np.delete(odds, label).sum())  # no digits cancelled
    return (min(-math.log(rest), LARGEST) if rest > 0 else LARGEST), rest


def _odds_among_others(z: Array, label: int) -> Array:
    """By which the other classes share, where against the predicted one they have too little to be told."""
    z[label] = -np.inf
    odds: Array = np.exp(z - z.max())
    return odds


def _least_places(D: Array, k: int) -> Array:
    return np.argpartition(D, k - 1, axis=1)[:, :k]


def _least_in_blocks(D: Array, k: int) -> Array:
    """Columns of the ``k`` smallest entries of each row. They lie in the ``k`` blocks with the smallest
    minima; the entries of a block stand ``m / BLOCK`` columns apart.
    """
    blocks = D.reshape(len(D), BLOCK, -1)
    if blocks.shape[-1] <= k:
        return _least_places(D, k)
    chosen = _least_places(blocks.min(axis=1), k)
    row = np.arange(len(D))[:, None]
    place = _least_places(blocks[row, :, chosen].reshape(len(D), -1), k)
    return place % BLOCK * blocks.shape[-1] + chosen[row, place // BLOCK]


def _within(x: Array, bound: float) -> Array:
    return np.minimum(np.maximum(x, -bound), bound)


def _height(z: float) -> float:
    return float(np.log1p(np.logaddexp(0.0, z)))


def _numbers(x: Tensor) -> Array:
    """In double precision."""
    return x.detach().double().numpy()
