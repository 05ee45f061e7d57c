"""Bayesian binning into quantiles: the average over all equal-frequency binnings, weighted by their evidence.

Binning ``M`` has ``B`` bins of equally many samples; bin ``b`` holds ``n_b`` samples, ``m_b`` of them
correct, and has a Beta(``alpha_b``, ``beta_b``) prior on its share of correct ones. The evidence of a binning
is

    p(D | M) = prod_b B(m_b + alpha_b, n_b - m_b + beta_b) / B(alpha_b, beta_b),

its prediction ``(m_b + alpha_b) / (n_b + alpha_b + beta_b)``; binnings from ``n^(1/3) / 10`` to ``10
n^(1/3)`` bins are averaged with weights proportional to the evidence. In the original ``alpha_b = (2 / B)
centre_b`` and ``beta_b = (2 / B) (1 - centre_b)``. Reference: Naeini, Cooper and Hauskrecht, AAAI 2015.

netcal's class of the same name is another method by default: bins of equal width, weights by the Bayesian
information criterion, and only the best binnings up to an elbow of their scores. The two agree where the data
decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.scaling.toplabel import TopLabel, TopLabelCalibrator

__all__ = ["BBQ", "Binnings", "average", "binnings", "log_evidence", "sorted_by_confidence"]

Prior = tuple[float, float] | None
"""``alpha`` and ``beta`` of every bin; None for the original prior."""

STRENGTH = 2.0
"""Equivalent sample size of the original prior, shared by all bins of a binning."""


@dataclass(repr=False, eq=False)
class BBQ(TopLabelCalibrator):
    """Bayesian average over equal-frequency binnings of the top-label confidence.

    Args:
        alpha: prior pseudo-count of correct samples in every bin; None (with ``beta`` None) is the original
            prior.
        beta: prior pseudo-count of wrong samples in every bin.

    Attributes:
        n_bins_: ``(models,)`` number of bins of each binning.
        weights_: ``(models,)`` their posterior weights.

    Example:
        >>> from salgp import Features
        >>> f = Features(torch.tensor([[3.0, 0.0]]).repeat(98, 1))
        >>> bbq = BBQ(alpha=1.0, beta=1.0).fit(f, [0] * 68 + [1] * 30)
        >>> bbq.predict(f[:1]).confidence  # all binnings agree: (68 + 1) / (98 + 2)
        tensor([0.6900])
    """

    name: ClassVar[str] = "bbq"

    alpha: float | None = None
    beta: float | None = None

    def _learn(self, top: TopLabel, correct: Tensor) -> None:
        score, hit = sorted_by_confidence(top, correct)
        self._keep(binnings(score, hit), self._prior())

    def _keep(self, bins: Binnings, prior: Prior) -> None:
        """Keep the average over all binnings."""
        found = average(bins, prior)
        kept = bins.n_bins, found.weights, found.at, found.value
        self.n_bins_, self.weights_, self.steps_at_, self.steps_ = map(torch.tensor, kept)

    def _prior(self) -> Prior:
        if self.alpha is None and self.beta is None:
            return None
        if self.alpha is None or self.beta is None or min(self.alpha, self.beta) <= 0:
            got = f"{self.alpha} and {self.beta}"
            raise ValueError(f"alpha and beta must both be positive, or both None; got {got}")
        return self.alpha, self.beta

    def _confidence(self, top: TopLabel) -> Tensor:
        place = torch.searchsorted(self.steps_at_, top.confidence.double(), right=True)
        return self.steps_[place - 1]


@dataclass(frozen=True)
class Binnings:
    """All binnings, their bins one after the other: model number, edges, samples and hits of each bin."""

    model: np.ndarray
    n_bins: np.ndarray  # (models,)
    left: np.ndarray
    right: np.ndarray
    size: np.ndarray
    hits: np.ndarray


@dataclass(frozen=True)
class Average:
    """The averaged step function: ``value[i]`` from ``at[i]`` on; and the weight of each binning."""

    weights: np.ndarray
    at: np.ndarray
    value: np.ndarray


def sorted_by_confidence(top: TopLabel, correct: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Confidences in rising order, and 1 where the answer is correct."""
    score = top.confidence.cpu().double().numpy()
    hit = correct.cpu().numpy()
    order = np.lexsort((hit, score))
    return score[order], hit[order].astype(np.float64)


def binnings(score: np.ndarray, hit: np.ndarray) -> Binnings:
    """Every equal-frequency binning of sorted scores; edges lie midway between the samples they part."""
    n = len(score)
    root = n ** (1 / 3)
    fewest = max(1, int(root / 10))
    most = min(n, math.ceil(10 * root))
    n_bins = np.arange(fewest, most + 1)
    edges = [_edges(score, b) for b in n_bins]
    left = np.concatenate([edge[:-1] for edge in edges])
    right = np.concatenate([edge[1:] for edge in edges])
    model = np.repeat(np.arange(len(n_bins)), n_bins)
    total = np.concatenate([[0.0], np.cumsum(hit)])
    last = np.diff(model, append=-1) != 0
    low = np.searchsorted(score, left) * (left > 0)
    high = np.where(last, n, np.searchsorted(score, right))
    hits = total[high] - total[low]
    return Binnings(model, n_bins, left, right, high - low, hits)


def _edges(score: np.ndarray, n_bins: int) -> np.ndarray:
    """Edges of bins of equally many sorted scores."""
    even = np.arange(1, n_bins) * len(score) / n_bins
    cuts = np.rint(even).astype(int)
    midway = (score[cuts - 1] + score[cuts]) / 2
    return np.concatenate([[0.0], midway, [1.0]])


def _pseudo_counts(bins: Binnings, prior: Prior) -> tuple[np.ndarray, np.ndarray]:
    """``alpha_b`` and ``beta_b`` of each bin."""
    if prior is not None:
        alpha, beta = prior
        return np.full_like(bins.left, alpha), np.full_like(bins.left, beta)
    strength = STRENGTH / bins.n_bins[bins.model]
    centre = (bins.left + bins.right) / 2
    return strength * centre, strength * (1 - centre)


def log_evidence(bins: Binnings, prior: Prior) -> np.ndarray:
    """``log p(D | M)`` of each binning, ``(models,)``."""
    from scipy.special import betaln

    a, b = (np.maximum(x, 1e-12) for x in _pseudo_counts(bins, prior))
    posterior = betaln(bins.hits + a, bins.size - bins.hits + b)
    return np.bincount(bins.model, posterior - betaln(a, b))


def average(bins: Binnings, prior: Prior) -> Average:
    """Sum the step functions of all binnings: each bin adds its weighted jump at its left edge."""
    from scipy.special import softmax

    weights = softmax(log_evidence(bins, prior))
    a, b = _pseudo_counts(bins, prior)
    value = (bins.hits + a) / np.maximum(bins.size + a + b, 1e-300)
    first = np.diff(bins.model, prepend=-1) != 0
    rise = np.where(first, value, value - np.roll(value, 1))
    jump = weights[bins.model] * rise
    order = np.lexsort((~first, bins.left))
    steps = np.cumsum(jump[order]).clip(0, 1)
    return Average(weights, bins.left[order], steps)
