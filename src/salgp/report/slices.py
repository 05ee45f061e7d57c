"""Parts of the data, one by one: is the confidence right for every class, camera or customer?

In a part where every confidence is right, the number of correct answers has mean ``sum s`` and variance
``sum s (1 - s)``. A part is called off where the difference is too large for chance, after Holm's correction
for the number of parts looked at: of many parts, some look bad by luck.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr

from salgp.metrics.exact import exact_interval
from salgp.report.summary import Scored

__all__ = ["Confusion", "Slice", "confusions", "holm", "slices"]

FEWEST = 10
"""Smaller parts are listed, but not judged."""

LEVEL = 0.05
"""Chance of calling any part off where all are right."""


@dataclass(frozen=True)
class Slice:
    """One part of the data.

    Args:
        column: what the data are parted by.
        value: the part.
        n: its samples.
        accuracy: share of right answers, with the ends of its 90 % interval.
        before: mean confidence of the model.
        after: mean calibrated confidence.
        verdict: ``overconfident``, ``underconfident``, ``right`` or ``too few to say``.
    """

    column: str
    value: str
    n: int
    accuracy: tuple[float, float, float]
    before: float
    after: float
    verdict: str

    @property
    def gap(self) -> float:
        """Calibrated confidence minus accuracy."""
        return self.after - self.accuracy[0]


@dataclass(frozen=True)
class Confusion:
    """One class taken for another.

    Args:
        true: the class it was.
        predicted: the class it was taken for.
        count: how often.
        share: of the samples of the true class.
        confidence: mean calibrated confidence of these errors.
    """

    true: int
    predicted: int
    count: int
    share: float
    confidence: float


def slices(before: Scored, after: Scored, columns: Mapping[str, Sequence[Any]]) -> list[Slice]:
    """Every part of every column, the most samples first; judged together.

    Args:
        before: the model's own confidence.
        after: the calibrated one.
        columns: name to ``(n,)`` values.
    """
    rows = [(name, value, rows) for name, values in columns.items() for value, rows in _parts(values)]
    found = [(int(r.sum()) >= FEWEST, *_surprise(after, r)) for _, _, r in rows]
    adjusted = iter(holm([p for enough, p, _ in found if enough]))
    verdicts = [_verdict(enough, next(adjusted) if enough else 1.0, over) for enough, _, over in found]
    return [
        Slice(
            name,
            value,
            int(r.sum()),
            _share(after.correct[r]),
            float(before.confidence[r].mean()),
            float(after.confidence[r].mean()),
            verdict,
        )
        for (name, value, r), verdict in zip(rows, verdicts, strict=True)
    ]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: small ones stay small only as far as the number of tests allows.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    scaled = p[order] * (len(p) - np.arange(len(p)))
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def confusions(after: Scored, labels: np.ndarray, most: int = 8) -> list[Confusion]:
    """The errors made most often; samples of unknown classes left out."""
    predicted = after.prediction.label.cpu().numpy()
    wrong = (predicted != labels) & (labels >= 0)
    pairs, count = np.unique(np.stack([labels[wrong], predicted[wrong]], 1), axis=0, return_counts=True)
    order = np.argsort(-count, kind="stable")[:most]

    def one(i: int) -> Confusion:
        true, other = pairs[i].tolist()
        rows = (labels == true) & (predicted == other)
        share = float(count[i] / (labels == true).sum())
        return Confusion(true, other, int(count[i]), share, float(after.confidence[rows].mean()))

    return [one(int(i)) for i in order]


def _parts(values: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    text = np.array([str(v) for v in values])
    names, count = np.unique(text, return_counts=True)
    return [(str(names[i]), text == names[i]) for i in np.argsort(-count, kind="stable")]


def _surprise(side: Scored, rows: np.ndarray) -> tuple[float, bool]:
    """Two-sided p-value of the number of right answers, and whether there are fewer than stated."""
    s, right = side.confidence[rows], side.correct[rows]
    excess = float(s.sum() - right.sum())
    spread = float(np.sqrt((s * (1 - s)).sum()))
    return 2 * float(ndtr(-max(abs(excess) - 0.5, 0.0) / max(spread, 1e-12))), excess > 0


def _verdict(enough: bool, p_value: float, over: bool) -> str:
    if not enough:
        return "too few to say"
    if p_value >= LEVEL:
        return "right"
    return "overconfident" if over else "underconfident"


def _share(right: np.ndarray) -> tuple[float, float, float]:
    """Share of right answers and the ends of its exact 90 % interval (Clopper and Pearson)."""
    low, high = exact_interval(right.sum(keepdims=True), np.array([len(right)]), 0.9)
    return float(right.mean()), float(low[0]), float(high[0])
