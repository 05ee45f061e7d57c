"""A few labels from the field: what they are worth, with layer evidence and with temperature scaling."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from act_data import MOST, Suite, plain, read_suite, suite_sets
from torch import Tensor

from salgp import Features, Prediction
from salgp.calibrators import get
from salgp.calibrators.base import CalibrationWarning
from salgp.estimate import learn_correction
from salgp.metrics import ece, interval_coverage

COUNTS = (0, 5, 10, 20, 50, 100)
DRAWS, LEFT, WINDOW = 3, 100, 50
"""Draws of the labelled samples, samples that must be left to score on, and the context of ours."""
OURS, SCALED, ANEW, PLATT = (
    "layer evidence, corrected",
    "temperature, corrected",
    "temperature, fitted to the labels alone",
    "Platt, fitted to the labels alone",
)


@dataclass(frozen=True)
class Point:
    """Score of one method on what is left of one set."""

    network: str
    kind: str
    count: int
    method: str
    ece: float
    held: float


def section(data: Path, cache: Path, quick: bool) -> str:
    names = [name for name in suite_sets(cache) if name.endswith("-0")]
    points = [
        point for name in (names[:2] if quick else names) for point in points_of(read_suite(cache, name))
    ]
    networks, shown = sorted({point.network for point in points}), (OURS, SCALED, ANEW, PLATT)
    lines = [
        f"ECE of what is left of every set after so many of its samples, drawn at random, were labelled: "
        f"mean over the shifted sets of a network (up to {MOST:,} samples of each, {DRAWS} draws), then over "
        f"{len(networks)} networks (seed 0; tables of fewer than {max(COUNTS) + LEFT} samples are left out). "
        f"*Corrected* is `salgp.estimate.learn_correction`, whose prior was chosen on the development sets; "
        f"layer evidence has windows of {WINDOW} as its context. Fits to the labels alone need right and "
        f"wrong answers among them; where there are none of one kind, the calibration set's temperature "
        f"stays.",
        "",
        *table(points, "shift", shown),
        "",
        "The same in domain, where labels could only cost:",
        "",
        *table(points, "in", shown),
        "",
        held(points),
    ]
    return "\n".join(lines)


def points_of(suite: Suite) -> list[Point]:
    """Scores on every set of one network."""
    ours, scaled = suite.evidence(), suite.temperature()
    sets = [("in", suite.test), *(("shift", pair) for pair in suite.shifted.values())]
    found = []
    for kind, (features, labels) in sets:
        known = (labels >= 0).nonzero()[:MOST, 0]
        batch, y = plain(features[known]), labels[known]
        both = {OURS: ours.predict(batch, context=WINDOW), SCALED: scaled.predict(batch)}
        found += [
            Point(suite.name, kind, count, method, *score)
            for count in COUNTS
            if len(y) >= max(COUNTS) + LEFT
            for method, score in scores(both, batch, y, count)
        ]
    print(suite.name, len(found), flush=True)
    return found


def scores(
    both: dict[str, Prediction], batch: Features, y: Tensor, count: int
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Scores of every method on what is left, for each draw of ``count`` labelled samples."""
    for draw in range(DRAWS):
        order = torch.randperm(len(y), generator=torch.Generator().manual_seed(draw))
        known, left = order[:count], order[count:]
        for method, prediction in both.items():
            rest = prediction[left]
            yield (
                method,
                score(learn_correction(prediction[known], y[known])(rest) if count else rest, y[left]),
            )
        right = int((batch.label[known] == y[known]).sum())
        for method, name in ((ANEW, "temperature"), (PLATT, "platt")):
            fitted = both[SCALED][left]
            if 0 < right < count:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", CalibrationWarning)  # few samples, and many errors
                    fitted = get(name).fit(batch[known], y[known]).predict(batch[left])
            yield method, score(fitted, y[left])


def score(prediction: Prediction, y: Tensor) -> tuple[float, float]:
    """ECE, and the share of samples whose interval held; NaN without intervals."""
    right = (prediction.label == y).double().numpy()
    if prediction.lower is None or prediction.upper is None:
        return ece(prediction.confidence.double().numpy(), right), float("nan")
    ends = prediction.lower.double().numpy(), prediction.upper.double().numpy()
    s = prediction.confidence.double().numpy()
    return ece(s, right), float(interval_coverage(s, right, *ends))


def table(points: list[Point], kind: str, methods: tuple[str, ...]) -> list[str]:
    """One row for each method, one column for each number of labels."""
    head = f"| labels | {' | '.join(map(str, COUNTS))} |"
    rows = [
        f"| {method} | {' | '.join(f'{mean(points, kind, count, method):.3f}' for count in COUNTS)} |"
        for method in methods
    ]
    return [head, "|---|" + "---|" * len(COUNTS), *rows]


def mean(points: list[Point], kind: str, count: int, method: str, what: str = "ece") -> float:
    """Mean over the sets of a network, then over networks."""
    chosen = [p for p in points if (p.kind, p.count, p.method) == (kind, count, method)]
    networks = {p.network for p in chosen}
    return float(np.mean([np.mean([getattr(p, what) for p in chosen if p.network == n]) for n in networks]))


def held(points: list[Point]) -> str:
    """What became of the intervals."""
    shares = ", ".join(f"{mean(points, 'shift', count, OURS, 'held'):.0%}" for count in COUNTS)
    home = ", ".join(f"{mean(points, 'in', count, OURS, 'held'):.0%}" for count in COUNTS)
    return f"Of our 90 % intervals held, by the number of labels: {shares} under shift; {home} in domain."
