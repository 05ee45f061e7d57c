"""The best monotone step function: isotonic regression of *correct* on the confidence.

Plain isotonic regression maps the ends of the confidence range to exactly 0 and 1 whenever the samples there
agree, and one sample that does not makes the log-likelihood infinite. Here two pseudo-samples are added, a
correct one with the lowest confidence seen and a wrong one with the highest: the outer blocks become ``1 / (k
+ 1)`` or more and ``k / (k + 1)`` or less, monotony is kept, and a set without errors gives Laplace's ``(n +
1) / (n + 2)``. Apart from that the result is scikit-learn's, with the same linear interpolation between the
blocks. Reference: Zadrozny and Elkan, KDD 2002.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.toplabel import from_top_label, top_label
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["IsotonicRegression", "interpolate", "monotone_fit"]


class IsotonicRegression(Calibrator):
    """Monotone step function of the confidence, never exactly 0 or 1.

    Args:
        mode: ``"top-label"`` maps the confidence and scales the other classes; ``"one-vs-rest"`` maps each
            class's probability by a function of its own and normalises, which can let another class overtake
            the label.

    Attributes:
        x_: ``(k, m)`` knots, one row per function.
        y_: ``(k, m)`` values there.

    Example:
        >>> f = Features(torch.tensor([[0.2, 0.0], [1.0, 0.0], [3.0, 0.0]]).repeat(30, 1))
        >>> iso = IsotonicRegression().fit(f, torch.tensor([1, 0, 0]).repeat(30))
        >>> iso.predict(f[:3]).confidence
        tensor([0.0323, 0.9836, 0.9836])
    """

    name: ClassVar[str] = "isotonic"
    gives_confidence_only: ClassVar[bool] = True
    suits_few_values: ClassVar[bool] = True

    def __init__(self, mode: Literal["top-label", "one-vs-rest"] = "top-label") -> None:
        self.mode = mode

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.mode == "top-label":
            top = top_label(features)
            knots = [monotone_fit(_numpy(top.confidence), _numpy(top.label == labels))]
        elif self.mode == "one-vs-rest":
            columns, y = _numpy(features.probs.T.contiguous()), _numpy(labels)
            knots = [monotone_fit(p, y == k) for k, p in enumerate(columns)]
        else:
            raise ValueError(f"mode must be 'top-label' or 'one-vs-rest', got {self.mode!r}")
        self.x_, self.y_ = _padded([x for x, _ in knots]), _padded([y for _, y in knots])

    def _predict(self, features: Features) -> Prediction:
        if self.mode == "top-label":
            confidence = interpolate(top_label(features).confidence[None], self.x_, self.y_)[0]
            return from_top_label(features, confidence, self.rest_temperature_)
        mapped = interpolate(features.probs.T.contiguous(), self.x_, self.y_).T
        return Prediction.from_probs(features, mapped.div_(mapped.sum(dim=1, keepdim=True)))


def monotone_fit(score: np.ndarray, hit: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Knots ``(x, y)`` of the isotonic regression of ``hit`` on ``score``, with the two pseudo-samples.

    Args:
        score: ``(n,)`` larger means more likely a hit.
        hit: ``(n,)`` booleans.

    Returns:
        Both ends of every constant piece, and the values there.

    Example:
        >>> monotone_fit(np.array([0.5, 0.9, 0.9]), np.array([True, True, True]))  # Laplace: 4 / 5
        (array([0.5, 0.9]), array([0.8, 0.8]))
    """
    from scipy.optimize import isotonic_regression

    order = np.argsort(score)
    x = score[order]
    x = np.concatenate([x[:1], x, x[-1:]]).astype(np.float64)
    y = np.concatenate([[1.0], hit[order].astype(np.float64), [0.0]])
    first = np.concatenate([[0], np.nonzero(x[1:] != x[:-1])[0] + 1])  # start of each run of equal scores
    weight = np.diff(first, append=len(x)).astype(np.float64)
    fit = isotonic_regression(np.add.reduceat(y, first) / weight, weights=weight)
    starts, ends = fit.blocks[:-1], fit.blocks[1:] - 1
    knots = np.unique(np.concatenate([starts, ends]))
    return x[first][knots], fit.x[knots]


def interpolate(at: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Piecewise linear functions through ``(x, y)``, constant beyond the ends, in the precision of ``at``.

    Args:
        at: ``(k, n)`` where to evaluate; one row per function.
        x: ``(k, m)`` knots, increasing; equal ones make a step.
        y: ``(k, m)`` values there.

    Returns:
        ``(k, n)`` values.

    Example:
        >>> interpolate(
        ...     torch.tensor([[0.0, 1.5, 9.0]]), torch.tensor([[1.0, 2.0]]), torch.tensor([[10.0, 20.0]])
        ... )
        tensor([[10., 15., 20.]])
    """
    x, y = x.to(at), y.to(at)
    width = x.diff(dim=1)
    slope = torch.where(width > 0, y.diff(dim=1) / width, 0.0)
    values = torch.empty_like(at)
    for i in range(len(at)):  # row by row: the temporaries stay in cache
        _interpolate_row(at[i], x[i], y[i], slope[i], values[i])
    return values


def _interpolate_row(at: Tensor, x: Tensor, y: Tensor, slope: Tensor, out: Tensor) -> None:
    """``y_j + slope_j (at - x_j)`` on the piece ``j`` that holds each point; a single knot is a constant."""
    if len(slope) == 0:
        out.fill_(y[0])
        return
    torch.clamp(at, x[0], x[-1], out=out)
    piece = torch.searchsorted(x[1:-1], out, out_int32=True)
    out -= x.index_select(0, piece)
    out *= slope.index_select(0, piece)
    out += y.index_select(0, piece)


def _padded(rows: list[np.ndarray]) -> Tensor:
    """Rows of different lengths as one matrix, each continued by its last value."""
    width = max(len(r) for r in rows)
    return torch.tensor(np.stack([np.pad(r, (0, width - len(r)), mode="edge") for r in rows]))


def _numpy(x: Tensor) -> np.ndarray:
    return x.cpu().numpy()
