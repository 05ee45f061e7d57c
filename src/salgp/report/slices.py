"""Parts of the data, one by one: is the confidence right for every class, camera or customer?

In a part where every confidence is right, the number of correct answers has mean ``sum s`` and variance
``sum s (1 - s)``. A part is called off where the difference is too large for chance, after Holm's correction
for the number of parts looked at: of many parts, some look bad by luck.

What unlabelled data from elsewhere tell: how sure the model is there, and what to expect of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr
from torch import Tensor

from salgp.estimate import Estimate, accuracy
from salgp.features import Features
from salgp.metrics.interval import exact_interval
from salgp.metrics.metric import to_double
from salgp.prediction import Prediction
from salgp.report.page import percent
from salgp.report.selective import OperatingPoint
from salgp.report.summary import Scored, term_shares

__all__ = []

FEWEST = 10
"""Smaller parts and fewer new samples get no verdict."""

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


@dataclass(frozen=True)
class Confusion:
    """Confusion of one class with another.

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
    """Every part of every column, the most samples first; tested together.

    Args:
        before: the model's own confidence.
        after: the calibrated one.
        columns: name to ``(n,)`` values.
    """
    parts = [(column, *part) for column in columns for part in _parts(columns[column])]
    tested = [rows for *_, rows in parts if rows.sum() >= FEWEST]
    adjusted = iter(holm([_p_value(after, rows) for rows in tested]))
    found = []
    for name, value, rows in parts:
        n, right = int(rows.sum()), _share(after.correct[rows])
        said, stated = (float(x.confidence[rows].mean()) for x in (before, after))
        verdict = "too few to say"
        if n >= FEWEST:
            verdict = _verdict(next(adjusted), _excess(after, rows))
        found.append(Slice(name, value, n, right, said, stated, verdict))
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: small ones stay small only as far as the number of tests allows.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=float)
    order = np.argsort(p)
    scaled = p[order] * np.arange(p.size, 0, -1)
    adjusted = np.empty_like(p)
    adjusted[order] = np.minimum(np.maximum.accumulate(scaled), 1.0)
    return [float(x) for x in adjusted]


def confusions(after: Scored, labels: np.ndarray, most: int = 8) -> list[Confusion]:
    """The errors made most often; samples of unknown classes left out."""
    predicted = after.prediction.label.cpu().numpy()
    wrong = (predicted != labels) & (labels >= 0)
    errors = np.stack([labels, predicted], 1)[wrong]
    pairs, count = np.unique(errors, axis=0, return_counts=True)
    found = []
    for i in np.argsort(-count, kind="stable")[:most]:
        true, other = pairs[i].tolist()
        of_true = labels == true
        confidence = after.confidence[of_true & (predicted == other)].mean()
        share = count[i] / of_true.sum()
        found.append(Confusion(true, other, int(count[i]), float(share), float(confidence)))
    return found


def _parts(values: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    text = np.array([str(v) for v in values])
    names, count = np.unique(text, return_counts=True)
    ordered = names[np.argsort(-count, kind="stable")].tolist()
    return [(name, text == name) for name in ordered]


def _excess(side: Scored, rows: np.ndarray) -> float:
    """Right answers that were stated, less those that there are."""
    return float((side.confidence - side.correct)[rows].sum())


def _p_value(side: Scored, rows: np.ndarray) -> float:
    """Two-sided p-value of the number of right answers."""
    s = side.confidence[rows]
    spread = np.sqrt((s * (1 - s)).sum())
    distance = max(abs(_excess(side, rows)) - 0.5, 0.0)
    return 2 * float(ndtr(-distance / max(spread, 1e-12)))


def _verdict(p_value: float, excess: float) -> str:
    if p_value >= LEVEL:
        return "right"
    return "overconfident" if excess > 0 else "underconfident"


def _share(right: np.ndarray) -> tuple[float, float, float]:
    """Share of right answers and the ends of its exact 90 % interval (Clopper and Pearson)."""
    low, high = exact_interval(int(right.sum()), len(right))
    return float(right.mean()), float(low), float(high)


@dataclass(frozen=True)
class Shift:
    """A comparison of labelled data with unlabelled new data.

    Args:
        n: new samples.
        sentence: what it means.
        tone: ``good``, ``fair`` or ``poor``.
        rows: name, and the value on known and on new data, in words.
    """

    n: int
    sentence: str
    tone: str
    rows: list[tuple[str, str, str]]


Predicted = tuple[Features, Prediction]
Pair = tuple[float, float]


def shift(known: Predicted, new: Predicted, point: OperatingPoint, measured: float | None = None) -> Shift:
    """Compare predictions on known and on new data; no labels of the new data are needed.

    Args:
        known: the labelled data.
        new: the unlabelled ones.
        point: the threshold chosen on the labelled data.
        measured: accuracy on the labelled data; where the estimate is off there, the sentence says so.
    """
    (old_features, old), (new_features, now) = known, new
    before = _mean(old_features.confidence), _mean(new_features.confidence)
    after = _mean(old.confidence), _mean(now.confidence)
    shares = {
        "model's own confidence": before,
        "corrected confidence: the share of right answers to expect": after,
        "would go to a human, by the same limit": (_human(old, point), _human(now, point)),
    }
    if old.novelty is not None and now.novelty is not None:
        unlike = _beyond(old.novelty, now.novelty)
        shares["more novel than 95 % of the labelled data"] = (0.05, unlike)
    rows = [(name, percent(a, 1), percent(b, 1)) for name, (a, b) in shares.items()]
    rows += _term_rows(known, new)
    expected, tone = accuracy(now), _tone(after[0] - after[1], len(now))
    return Shift(len(now), _sentence(before, after, expected, measured), tone, rows)


def _tone(drop: float, n: int) -> str:
    if n < FEWEST or 0.03 <= drop < 0.1:
        return "fair"
    return "good" if drop < 0.03 else "poor"


def _term_rows(known: Predicted, new: Predicted) -> list[tuple[str, str, str]]:
    """Mean size of every term that both have."""
    theirs = {term.name: f"{100 * term.size:.1f}" for term in term_shares(*new)}
    mine = {term.name: f"{100 * term.size:.1f}" for term in term_shares(*known)}
    both = [name for name in mine if name in theirs]
    return [(f"mean correction by {name}, points", mine[name], theirs[name]) for name in both]


def _sentence(before: Pair, after: Pair, expected: Estimate, measured: float | None) -> str:
    drop, off = after[0] - after[1], _off(after[0], measured)
    value, low, high = map(_of_100, (expected.value, expected.lower, expected.upper))
    expect = f"expect about {value} of 100 answers to be right ({low} to {high})"
    if expected.n < FEWEST:
        samples = "sample" if expected.n == 1 else "samples"
        return f"Only {expected.n} new {samples}, too few to compare: {expect}{off}."
    if abs(drop) < 0.03:
        return f"The new data look like the labelled data: {expect}{off}."
    instead = off or f", instead of {_of_100(after[0])}"
    if drop < 0:
        return f"The new data look easier: {expect}{instead}."
    unnoticed = before[1] > before[0] - 0.5 * drop
    still = f"the model still says {100 * before[1]:.0f} %, but " if unnoticed else ""
    return f"The new data differ: {still}{expect}{instead}."


def _off(estimated: float, measured: float | None) -> str:
    """Caveat of the estimate, where it was wrong on the labelled data."""
    if measured is None or abs(estimated - measured) < 0.03:
        return ""
    return (
        f". Take this with care: of the labelled data it expects {_of_100(estimated)}, and "
        f"{_of_100(measured)} are right"
    )


def _of_100(share: float) -> int:
    return round(100 * share)


def _beyond(known: Tensor, new: Tensor) -> float:
    """Share of the new novelties above 95 % of the known ones."""
    limit = np.quantile(to_double(known), 0.95)
    return float((to_double(new) > limit).mean())


def _human(prediction: Prediction, point: OperatingPoint) -> float:
    """Share of the answers below the limit."""
    return 1.0 if point.threshold is None else _mean(prediction.confidence <= point.threshold)


def _mean(x: Tensor) -> float:
    return float(x.double().mean())
