"""What a calibrator returns: calibrated confidence, its uncertainty, and each layer's part in the correction.

The label is always the network's own. ``probs`` puts the calibrated confidence on that label and scales the
other classes proportionally; where another class then has more mass than the label, `Prediction.flips` says
so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.features import Features

__all__ = [
    "INTERVAL",
    "LayerTerms",
    "Prediction",
    "confidence_points",
    "share_others",
    "spread_confidence",
    "term_points",
]

INTERVAL = 0.90
"""Probability mass of the interval ``[lower, upper]``."""

_PER_SAMPLE = ("label", "probs", "confidence", "std", "lower", "upper", "novelty", "clipped")
_Z = 1.6448536269514722  # standard normal quantile of (1 + INTERVAL) / 2


@dataclass(frozen=True, eq=False)
class LayerTerms:
    """Per-layer correction: mean and standard deviation, ``(n, L)``.

    Args:
        names: layer (or other term) names, length ``L``.
        mean: ``(n, L)`` correction attributed to each layer.
        std: ``(n, L)`` its posterior standard deviation, or None.
        scale: unit of ``mean`` and ``std``: ``"confidence"`` points or ``"log-odds"``.
        additive: do the terms add up to the whole correction (`sum`), or is each a whole prediction of its
            own?
    """

    names: tuple[str, ...]
    mean: Tensor
    std: Tensor | None = None
    scale: str = "confidence"
    additive: bool = False


@dataclass(frozen=True, eq=False)
class Prediction:
    """Calibrated output for ``n`` samples.

    Args:
        label: ``(n,)`` the network's own label.
        probs: ``(n, c)`` class probabilities; rows sum to 1.
        confidence: ``(n,)`` calibrated probability that ``label`` is correct.
        std: ``(n,)`` standard deviation of the confidence, or None where the method has none.
        lower: ``(n,)`` lower end of the 90 % interval of the confidence, inside [0, 1].
        upper: ``(n,)`` upper end.
        layers: per-layer corrections where the method has them.
        novelty: ``(n,)`` larger means less like the data the calibrator has seen, where the method has it.
        clipped: ``(n,)`` where the confidence had to be clipped into [eps, 1 - eps]; `n_clipped` counts them.

    Example:
        >>> import torch
        >>> f = Features(torch.tensor([[2.0, 0.0, 0.0]]))
        >>> p = Prediction.from_confidence(f, torch.tensor([0.4]))
        >>> p.label, p.probs, p.flips
        (tensor([0]), tensor([[0.4000, 0.3000, 0.3000]]), tensor([False]))
    """

    label: Tensor
    probs: Tensor
    confidence: Tensor
    std: Tensor | None = None
    lower: Tensor | None = None
    upper: Tensor | None = None
    layers: LayerTerms | None = None
    novelty: Tensor | None = None
    clipped: Tensor | None = None

    def __len__(self) -> int:
        return len(self.label)

    @property
    def flips(self) -> Tensor:
        """Boolean ``(n,)``: another class has more probability than the (kept) label."""
        return self.probs.amax(dim=1) > self.confidence * (1 + 1e-6) + 1e-12

    @property
    def n_clipped(self) -> int:
        """How many confidences had to be clipped into [eps, 1 - eps]."""
        return 0 if self.clipped is None else int(self.clipped.sum())

    def __getitem__(self, rows: slice | Tensor | np.ndarray) -> Prediction:
        return self._each(lambda x: x[rows])

    def to(self, device: torch.device | str) -> Prediction:
        """The same prediction with every tensor on ``device``."""
        return self._each(lambda x: x.to(device))

    def numpy(self) -> Mapping[str, np.ndarray]:
        """The per-sample arrays as NumPy, keyed by field name; absent ones are left out."""
        return {k: getattr(self, k).cpu().numpy() for k in _PER_SAMPLE if getattr(self, k) is not None}

    @staticmethod
    def concatenate(parts: Sequence[Prediction]) -> Prediction:
        """Stack predictions of the same calibrator."""
        first = parts[0]
        if len(parts) == 1:
            return first

        def join(pieces: list[Any]) -> Tensor | None:
            return None if pieces[0] is None else torch.cat(pieces)

        terms = [p.layers for p in parts if p.layers is not None]
        layers = (
            replace(terms[0], mean=torch.cat([t.mean for t in terms]), std=join([t.std for t in terms]))
            if terms
            else None
        )
        joined: dict[str, Any] = {k: join([getattr(p, k) for p in parts]) for k in _PER_SAMPLE}
        return replace(first, layers=layers, **joined)

    def _each(self, function: Callable[[Tensor], Tensor]) -> Prediction:
        """Apply ``function`` to every per-sample tensor."""

        def on(x: Tensor | None) -> Tensor | None:
            return None if x is None else function(x)

        terms = self.layers
        if terms is not None:
            terms = replace(terms, mean=function(terms.mean), std=on(terms.std))
        changed: dict[str, Any] = {k: on(getattr(self, k)) for k in _PER_SAMPLE}
        return replace(self, layers=terms, **changed)

    @staticmethod
    def from_probs(features: Features, probs: Tensor) -> Prediction:
        """A method that gives a whole distribution: the confidence is the mass on the network's label."""
        label = features.label
        return Prediction(label, probs, probs.gather(1, label[:, None])[:, 0])

    @staticmethod
    def from_confidence(
        features: Features,
        confidence: Tensor,
        std: Tensor | None = None,
        interval: tuple[Tensor, Tensor] | None = None,
        *,
        layers: LayerTerms | None = None,
        novelty: Tensor | None = None,
        eps: float = 1e-6,
    ) -> Prediction:
        """A method that gives the confidence only: the other classes share the rest proportionally.

        Args:
            features: what was predicted on.
            confidence: ``(n,)``; values outside [eps, 1 - eps] are clipped and counted.
            std: ``(n,)`` its standard deviation.
            interval: lower and upper end; by default the Gaussian one around ``confidence``.
            layers: per-layer corrections.
            novelty: ``(n,)`` novelty score.
            eps: distance kept from 0 and 1.
        """
        inside = confidence.clamp(eps, 1 - eps)
        if interval is None and std is not None:
            interval = (confidence - _Z * std, confidence + _Z * std)
        low, high = (
            (None, None)
            if interval is None
            else (interval[0].clamp(0, 1).minimum(inside), interval[1].clamp(0, 1).maximum(inside))
        )
        label = features.label
        probs = spread_confidence(features.probs.to(inside.dtype), label, inside)
        return Prediction(label, probs, inside, std, low, high, layers, novelty, inside != confidence)


def spread_confidence(probs: Tensor, label: Tensor, confidence: Tensor) -> Tensor:
    """Put ``confidence`` on ``label`` and scale the other classes proportionally; rows sum to 1.

    Where the other classes have no mass at all (a softmax of exactly 1), they share it evenly.

    Example:
        >>> spread_confidence(torch.tensor([[0.8, 0.2, 0.0]]), torch.tensor([0]), torch.tensor([0.6]))
        tensor([[0.6000, 0.4000, 0.0000]])
    """
    others = probs.scatter(1, label[:, None], 0.0)
    return share_others(others, others.sum(dim=1), label, confidence)


def share_others(others: Tensor, rest: Tensor, label: Tensor, confidence: Tensor) -> Tensor:
    """`spread_confidence` for probabilities whose label is already cut out; overwrites and returns
    ``others``.

    Args:
        others: ``(n, c)`` probabilities with 0 at the label.
        rest: ``(n,)`` their row sums.
        label: ``(n,)``.
        confidence: ``(n,)``.
    """
    left = 1 - confidence
    some = rest > math.sqrt(torch.finfo(others.dtype).tiny)
    scale = torch.where(some, left / rest.clamp_min(torch.finfo(others.dtype).tiny), 0.0)
    even = torch.where(some, 0.0, left / max(others.shape[1] - 1, 1))
    return others.mul_(scale[:, None]).add_(even[:, None]).scatter_(1, label[:, None], confidence[:, None])


def term_points(features: Features, prediction: Prediction) -> tuple[tuple[str, ...], Tensor]:
    """What each term did to each confidence, in confidence points that add up to after minus before.

    Terms in log-odds are shared by `confidence_points`; terms in confidence are points already. Layers that
    each make a whole correction of their own count by their share in the average. What is left over (the
    parametric mean, clipping, what only one layer's rows share) goes to the term ``confidence`` where the
    terms are log-odds and have one, and to a term ``rest`` otherwise, if there is any.

    Returns:
        Names and ``(n, k)`` points.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0]]))
        >>> terms = LayerTerms(("conv",), torch.tensor([[-0.3]]), None, "confidence", True)
        >>> names, points = term_points(f, Prediction.from_confidence(f, f.confidence - 0.3, layers=terms))
        >>> names, points
        (('conv',), tensor([[-0.3000]], dtype=torch.float64))
    """
    terms = prediction.layers
    if terms is None:
        raise ValueError("this prediction has no layer terms to explain")
    mean = terms.mean.double() / (1 if terms.additive else max(len(terms.names), 1))
    before, after = features.confidence.double(), prediction.confidence.double()
    tiny = torch.finfo(torch.float64).tiny
    in_log_odds = terms.scale == "log-odds"
    start, end = (torch.logit(x, eps=tiny) for x in (before, after)) if in_log_odds else (before, after)
    start = start.clamp(-40, 40) if in_log_odds else start
    rest = end - start - mean.sum(dim=1)
    names = terms.names
    if in_log_odds and "confidence" in names:
        mean = mean.clone()
        mean[:, names.index("confidence")] += rest
    elif float(rest.abs().max() if len(rest) else 0.0) > 1e-6:
        names, mean = (*names, "rest"), torch.cat([mean, rest[:, None]], dim=1)
    return names, confidence_points(start, mean) if in_log_odds else mean


def confidence_points(log_odds: float | Tensor, terms: Tensor) -> Tensor:
    """Share of each log-odds term in the change of confidence, in confidence points; the shares add up to the
    change.

    The Shapley value of each term: its effect on ``sigmoid`` averaged over all orders of adding the terms, so
    that no share can exceed one point in size even where large terms cancel. With ``sigmoid(x) = 1/2 +
    int_0^inf sin(w x) / sinh(pi w) dw`` it is an integral over the frequency ``w`` and the share ``q`` of the
    other terms that are there already,

    int_0^1 dq int_0^inf dw Im[ e^(iwa) (e^(iwt_j) - 1) prod_(i != j) (1 - q + q e^(iwt_i)) ] / sinh(pi w),

    a polynomial in ``q`` (Gauss-Legendre) and analytic in ``w`` (midpoint rule): exact to about 1e-10 at a
    cost that grows with the square of the number of terms.

    Args:
        log_odds: of the confidence before any term is added; one number, or ``(n,)``.
        terms: ``(k,)`` terms in log-odds, or ``(n, k)``.

    Returns:
        Points, shaped as ``terms``.

    Example:
        >>> confidence_points(2.0, torch.tensor([-2.0, 0.0]))
        tensor([-0.3808,  0.0000], dtype=torch.float64)
    """
    t = torch.atleast_2d(terms).double()
    a = torch.as_tensor(log_odds, dtype=torch.float64, device=t.device).expand(len(t))
    few = max(1, POINT_ENTRIES // max(1, t.shape[1] ** 2))
    parts = [_shapley(a[i : i + few], t[i : i + few]) for i in range(0, len(t), few)]
    points = torch.cat(parts) if parts else torch.zeros_like(t)
    return points.reshape(terms.shape)


POINT_ENTRIES = 20_000
"""Samples times squared terms that `confidence_points` works on at once."""


def _shapley(a: Tensor, t: Tensor) -> Tensor:
    """Shapley values ``(n, k)`` of terms ``t`` added to ``a`` inside a sigmoid."""
    n, k = t.shape
    if k == 0 or n == 0:
        return torch.zeros_like(t)
    largest = float((a.abs() + t.abs().sum(dim=1)).max())
    step = 2 * math.pi / (largest + 30.0)
    w = (torch.arange(math.ceil(11.0 / step), dtype=t.dtype, device=t.device) + 0.5) * step
    nodes, weights = (torch.as_tensor(x).to(t) for x in np.polynomial.legendre.leggauss(k // 2 + 1))
    q = (0.5 * (nodes + 1))[:, None]
    total = torch.zeros_like(t)
    for frequency in w:
        turn = torch.exp(1j * frequency * t)  # (n, k)
        there = 1 - q + q * turn[:, None, :]  # (n, Q, k)
        start = torch.exp(1j * frequency * a)[:, None] * (turn - 1)
        average = torch.einsum("q,nqk->nk", 0.5 * weights.to(there.dtype), _others(there))
        total += step / torch.sinh(math.pi * frequency) * (start * average).imag
    return total


def _others(x: Tensor) -> Tensor:
    """Product over the last axis of all entries but the own one."""
    one = torch.ones_like(x[..., :1])
    before = torch.cat([one, x[..., :-1]], dim=-1).cumprod(dim=-1)
    after = torch.cat([one, x[..., 1:].flip(-1)], dim=-1).cumprod(dim=-1).flip(-1)
    return before * after
