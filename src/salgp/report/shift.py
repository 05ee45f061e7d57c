"""What unlabelled data from elsewhere tell: how sure the model is there, and what to expect of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from salgp.estimate import Estimate, accuracy
from salgp.features import Features
from salgp.prediction import Prediction
from salgp.report.selective import OperatingPoint
from salgp.report.summary import term_shares

__all__ = ["LayerNotice", "Shift", "shift"]


@dataclass(frozen=True)
class LayerNotice:
    """Mean size of a term's correction on the labelled and on the new data, in points."""

    name: str
    known: float
    new: float


@dataclass(frozen=True)
class Shift:
    """A comparison of labelled data with unlabelled new data.

    Args:
        n: new samples.
        sentence: what it means.
        tone: ``good``, ``fair`` or ``poor``.
        model: its own mean confidence on known and new data.
        calibrated: mean calibrated confidence on known and new data.
        expected: accuracy to expect of the new data, with its interval.
        std: mean standard deviation of the confidence on both, or None.
        novel: share of new samples more novel than 95 % of the known ones, or None.
        human: share of the new samples that falls below the threshold chosen on the known ones.
        layers: how much each layer corrects on both.
    """

    n: int
    sentence: str
    tone: str
    model: tuple[float, float]
    calibrated: tuple[float, float]
    expected: Estimate
    std: tuple[float, float] | None
    novel: float | None
    human: float
    layers: list[LayerNotice]


def shift(
    known: tuple[Features, Prediction],
    new: tuple[Features, Prediction],
    point: OperatingPoint,
    measured: float | None = None,
) -> Shift:
    """Compare predictions on known and on new data; no labels of the new data are needed.

    Args:
        known: the labelled data.
        new: the unlabelled ones.
        point: the threshold chosen on the labelled data.
        measured: accuracy on the labelled data; where the estimate is off there, the sentence says so.
    """
    before = _mean(known[0].confidence), _mean(new[0].confidence)
    after = _mean(known[1].confidence), _mean(new[1].confidence)
    drop = after[0] - after[1]
    tone = "good" if drop < 0.03 else "fair" if drop < 0.1 else "poor"
    human = 1.0 if point.threshold is None else float((new[1].confidence <= point.threshold).double().mean())
    expected = accuracy(new[1])
    stds = [p.std for _, p in (known, new)]
    std = None if stds[0] is None or stds[1] is None else (_mean(stds[0]), _mean(stds[1]))
    return Shift(
        len(new[1]),
        _sentence(before, after, expected, measured),
        tone,
        before,
        after,
        expected,
        std,
        _novel(known[1], new[1]),
        human,
        _notices(known, new),
    )


def _sentence(
    before: tuple[float, float], after: tuple[float, float], expected: Estimate, measured: float | None
) -> str:
    drop = after[0] - after[1]
    low, high = round(100 * expected.lower), round(100 * expected.upper)
    expect = f"expect about {round(100 * expected.value)} of 100 answers to be right ({low} to {high})"
    if abs(drop) < 0.03:
        return f"The new data look like the labelled data: {expect}{_off(after[0], measured)}."
    instead = _off(after[0], measured) or f", instead of {round(100 * after[0])}"
    if drop < 0:
        return f"The new data look easier: {expect}{instead}."
    unnoticed = before[1] > before[0] - 0.5 * drop
    still = f"the model still says {100 * before[1]:.0f} %, but " if unnoticed else ""
    return f"The new data differ: {still}{expect}{instead}."


def _off(estimated: float, measured: float | None) -> str:
    """What to know of the estimate, where it was wrong on the labelled data."""
    if measured is None or abs(estimated - measured) < 0.03:
        return ""
    return (
        f". Take this with care: of the labelled data it expects {round(100 * estimated)}, and "
        f"{round(100 * measured)} are right"
    )


def _novel(known: Prediction, new: Prediction) -> float | None:
    if known.novelty is None or new.novelty is None:
        return None
    limit = np.quantile(known.novelty.double().cpu().numpy(), 0.95)
    return float((new.novelty.double().cpu().numpy() > limit).mean())


def _notices(known: tuple[Features, Prediction], new: tuple[Features, Prediction]) -> list[LayerNotice]:
    theirs = {share.name: share.size for share in term_shares(*new)}
    ours = term_shares(*known)
    return [LayerNotice(s.name, s.size, theirs[s.name]) for s in ours if s.name in theirs]


def _mean(x: object) -> float:
    return float(x.double().mean())  # type: ignore[attr-defined]
