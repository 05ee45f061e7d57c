"""Why a confidence changed: the part of every term, in confidence points that add up to after minus before.

A calibrator's terms may be log-odds or confidence (`LayerTerms.scale`). Here they become one unit, the change
of the confidence itself: 0.05 is five points. Python's ``explain``, the command line and the report all use
these functions.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["Explanation", "explain_sample", "shown_term", "term_points"]


Points = tuple[tuple[str, ...], Tensor]
"""Names of terms, and ``(n, k)`` numbers of each."""


@dataclass(frozen=True)
class Explanation:
    """Why the confidence of one sample changed; prints as one line.

    Args:
        label: the class predicted.
        network_confidence: the network's own.
        confidence: the calibrated one.
        lower: end of its 90 % interval, or None.
        upper: other end, or None.
        points: confidence points of every term, largest first; they add up to the change.
    """

    label: int
    network_confidence: float
    confidence: float
    lower: float | None
    upper: float | None
    points: Mapping[str, float]

    @property
    def reasons(self) -> str:
        """The terms and their points in words."""
        return ", ".join(f"{shown_term(name)} {value + 0.0:+.2f}" for name, value in self.points.items())

    def __str__(self) -> str:
        return f"{self.network_confidence:.2f} -> {self.calibrated}: {self.reasons}"

    @property
    def calibrated(self) -> str:
        """The calibrated confidence in words, with its interval."""
        bar = "" if self.lower is None else f" ({self.lower:.2f} to {self.upper:.2f})"
        return f"{self.confidence:.2f}{bar}"


def explain_sample(features: Features, prediction: Prediction) -> Explanation:
    """Why the confidence of a single sample changed.

    Args:
        features: of one sample.
        prediction: of that sample; without terms there are no points.

    Example:
        >>> from salgp.prediction import LayerTerms
        >>> f = Features(torch.tensor([[2.0, 0.0]]))
        >>> terms = LayerTerms(("confidence", "conv"), torch.tensor([[0.0, -1.0]]), None, "log-odds", True)
        >>> p = Prediction.from_log_odds(f, torch.tensor([1.0]), torch.tensor([0.01]), layers=terms)
        >>> print(explain_sample(f, p))
        0.88 -> 0.73 (0.70 to 0.76): conv -0.15, confidence +0.00
    """
    ends = prediction.lower, prediction.upper
    lower, upper = (x if x is None else float(x[0]) for x in ends)
    label, points = int(prediction.label[0]), _largest_first(features, prediction)
    before, after = features.confidence[0], prediction.confidence[0]
    return Explanation(label, float(before), float(after), lower, upper, points)


def _largest_first(features: Features, prediction: Prediction) -> dict[str, float]:
    """Points of the first sample by term."""
    if prediction.layers is None:
        return {}
    names, values = term_points(features, prediction)
    points = zip(names, values[0].tolist(), strict=True)
    return dict(sorted(points, key=lambda item: -abs(item[1])))


def shown_term(name: str) -> str:
    """A term's name for people: layers that are only numbered are called layers.

    Example:
        >>> shown_term("4"), shown_term("conv1")
        ('layer 4', 'conv1')
    """
    return f"layer {name}" if name.isdecimal() else name


def term_points(features: Features, prediction: Prediction) -> Points:
    """Part of each term in each confidence, in confidence points that add up to after minus before.

    Terms in log-odds are shared by `confidence_points`; terms in confidence are points already. Layers that
    each make a whole correction of their own count by their share in the average. What is left over (the
    parametric mean, clipping, what only one layer's rows share) goes to the term ``confidence`` where the
    terms are log-odds and have one, and to a term ``rest`` otherwise, if there is any.

    Returns:
        Names and ``(n, k)`` points.

    Example:
        >>> from salgp.prediction import LayerTerms
        >>> f = Features(torch.tensor([[2.0, 0.0]]))
        >>> terms = LayerTerms(("conv",), torch.tensor([[-0.3]]), None, "confidence", True)
        >>> names, points = term_points(f, Prediction.from_confidence(f, f.confidence - 0.3, layers=terms))
        >>> names, points
        (('conv',), tensor([[-0.3000]], dtype=torch.float64))
    """
    terms = prediction.layers
    if terms is None:
        raise ValueError("this prediction has no layer terms to explain")
    shared = 1 if terms.additive else max(len(terms.names), 1)
    parts = terms.mean.double() / shared
    before, after = features.confidence.double(), prediction.confidence.double()
    if terms.scale != "log-odds":
        return _with_rest(terms.names, parts, after - before)
    tiny = torch.finfo(torch.float64).tiny
    start = torch.logit(before, eps=tiny).clamp(-40, 40)
    end = torch.logit(after, eps=tiny)
    names, parts = _with_rest(terms.names, parts, end - start, into="confidence")
    return names, confidence_points(start, parts)


def _with_rest(names: tuple[str, ...], parts: Tensor, change: Tensor, into: str = "rest") -> Points:
    """The parts and, in one of them or in a term of its own, what they leave of the change."""
    rest = change - parts.sum(dim=1)
    if into in names:
        parts = parts.clone()
        parts[:, names.index(into)] += rest
    elif (rest.abs() > 1e-6).any():
        return (*names, "rest"), torch.cat([parts, rest[:, None]], dim=1)
    return names, parts


def confidence_points(log_odds: float | Tensor, terms: Tensor) -> Tensor:
    """Share of each log-odds term in the change of confidence, in confidence points; the shares add up to the
    change exactly.

    Terms that raise and terms that lower the confidence are two sides with sums ``P`` and ``N``. Each side
    gets its effect on the sigmoid averaged over coming first and coming second (the Shapley value of two
    players), ``[s(a + P) - s(a) + s(a + P + N) - s(a + N)] / 2`` for the first; inside a side the terms share
    in proportion to their size. So no share exceeds one point, none has the wrong sign, and two large terms
    that cancel are both seen.

    Args:
        log_odds: of the confidence before any term is added, ``a``; one number, or ``(n,)``.
        terms: ``(k,)`` terms in log-odds, or ``(n, k)``.

    Returns:
        Points, shaped as ``terms``.

    Example:
        >>> confidence_points(2.0, torch.tensor([-2.0, 0.0]))
        tensor([-0.3808,  0.0000], dtype=torch.float64)
        >>> confidence_points(0.0, torch.tensor([3.0, -3.0]))
        tensor([ 0.4526, -0.4526], dtype=torch.float64)
    """
    t = terms.double()
    a = torch.as_tensor(log_odds, dtype=torch.float64, device=t.device)
    up, down = t.clamp_min(0), t.clamp_max(0)
    P, N = up.sum(-1), down.sum(-1)
    start, risen, fallen, end = map(torch.sigmoid, (a, a + P, a + N, a + (P + N)))
    raised = (risen - start + end - fallen) / 2
    lowered = (fallen - start + end - risen) / 2
    return up * _ratio(raised, P) + down * _ratio(lowered, N)


def _ratio(points: Tensor, size: Tensor) -> Tensor:
    """Points for each unit of a side's sum, 0 where the side is empty."""
    return torch.where(size == 0, 0.0, points / torch.where(size == 0, 1.0, size))[..., None]
