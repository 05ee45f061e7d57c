"""Figures of the report as small inline SVG, which follow the page's colours and say what they show.

The slider: how many wrong answers are acceptable, and what every choice means.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from salgp.metrics import ReliabilityBins, RiskCoverage, accuracy_band, reliability_bins
from salgp.metrics.metric import FloatArray
from salgp.report.page import percent
from salgp.report.selective import ASSURANCE, OperatingPoint, least_promise, nice_step
from salgp.report.summary import Scored
from salgp.report.text import no_promise, share
from salgp.svg import Canvas, Frame

__all__ = []

N_BINS = 10
Tick = tuple[float, str]
QUARTERS = [(k / 4, f"{25 * k} %") for k in range(5)]


def reliability(side: Scored, name: str) -> Markup:
    """Reliability diagram: how often right, by stated confidence."""
    bins = reliability_bins(side.confidence, side.correct, N_BINS)
    gap = f"mean gap between stated confidence and how often it is right {100 * side.ece:.1f} points"
    words = f"Reliability diagram, {name}: {gap}."
    canvas = Canvas(420, 326, words, "plot")
    frame = Frame(canvas, 62, 12, 332, 216)
    frame.y_axis(QUARTERS, "how often it is right")
    frame.x_axis(QUARTERS, "stated confidence")
    canvas.line(frame.x(0), frame.y(0), frame.x(1), frame.y(1), "diagonal")
    heights = 38 * bins.share / bins.share.max()
    ends = np.stack(accuracy_band(bins), 1)
    width = frame.width / N_BINS - 6
    for b in np.flatnonzero(bins.count).tolist():
        x, height = frame.x(bins.edges[b]) + 3, heights[b]
        _draw_bar(frame, bins, b, ends[b], x, width)
        canvas.rect(x, 322 - height, width, height, "count", f"{bins.count[b]:,} predictions")
    canvas.text(58, 320, "number", anchor="end")
    return canvas.markup()


def risk_coverage(
    before: Scored, after: Scored, point: OperatingPoint, ticks: Sequence[Tick]
) -> tuple[Markup, Frame]:
    """Error rate among the used predictions, by the share used, with a mark at the acceptable error."""
    key = "the calibrated curve is solid, the model's own dashed."
    words = f"Error rate among the predictions used, by the share used, surest first; {key}"
    canvas = Canvas(640, 226, words, "plot wide")
    frame = Frame(canvas, 66, 12, 542, 160, ticks[-1][0])
    frame.y_axis(ticks, "wrong among them")
    frame.x_axis(QUARTERS, "share of predictions used (the surest ones)")
    _draw_curve(frame, before.curve, "curve before")
    _draw_curve(frame, after.curve, "curve after")
    frame.across(point.error, css="limit", id="limit")
    kept = {"before": point.before, "after": point.after}
    for side, number in kept.items():
        used = number / len(after.correct)
        frame.dot(used, point.error, 6, f"dot {side}", id=f"dot-{side}")
    return canvas.markup(), frame


def _draw_bar(frame: Frame, bins: ReliabilityBins, b: int, ends: FloatArray, x: float, width: float) -> None:
    """One bar up to how often the answers are right, its error bar, and a mark at the stated confidence."""
    stated, right = bins.confidence[b], bins.accuracy[b]
    least, most = ends
    often = f"{100 * right:.0f} % ({100 * least:.0f} to {100 * most:.0f} %)"
    words = f"{bins.count[b]:,} predictions say {100 * stated:.0f} % and are right {often}"
    faint = " faint" if bins.share[b] < 0.01 else ""
    canvas, middle = frame.canvas, x + width / 2
    upper, low, high = map(frame.y, (right, least, most))
    canvas.rect(x, upper, width, frame.y(0) - upper, f"right{faint}", words)
    canvas.line(middle, low, middle, high, f"bar{faint}")
    for end in (low, high):
        canvas.line(middle - 4, end, middle + 4, end, f"bar{faint}")
    canvas.rect(x - 2, frame.y(stated) - 2, width + 4, 4, f"stated{faint}", words)


def _draw_curve(frame: Frame, curve: RiskCoverage, css: str) -> None:
    """The curve, at no more than 400 points."""
    n = len(curve.risk)
    picked = np.linspace(0, n - 1, min(400, n)).astype(int)
    points = np.stack([curve.coverage, curve.risk], axis=1)
    frame.curve(points[picked], css)


def slider(
    before: Scored, after: Scored, levels: Sequence[OperatingPoint], point: OperatingPoint
) -> dict[str, Any]:
    """The curve of errors over coverage, and what tiles and sentences say at each level."""
    ticks = _error_ticks(before, after, levels[-1].error)
    figure, frame = risk_coverage(before, after, point, ticks)
    every = max(len(levels) // 8, 1)
    steps = [*levels[::every], point]
    return {
        "risk_figure": figure,
        "points": [_tile(k, levels, len(after.correct), frame) for k in levels],
        "position": list(levels).index(point),
        "steps": [level for level in levels if level in steps],
    }


def _tile(point: OperatingPoint, levels: Sequence[OperatingPoint], n: int, frame: Frame) -> dict[str, Any]:
    human = n - point.after
    return {
        "error": share(point.error),
        "advice": _advice(point, least_promise(levels, point)),
        "before": f"{point.before:,}",
        "after": f"{point.after:,}",
        "human": f"{human:,}",
        "share": round(100 * human / n, 1),
        "threshold": _limit(point),
        "wrong": f"{point.wrong:,}",
        "xb": round(frame.x(point.before / n), 1),
        "xa": round(frame.x(point.after / n), 1),
        "y": round(frame.y(point.error), 1),
    }


def _advice(point: OperatingPoint, least: float | None) -> str:
    """What the tile says below the number of answers that go to a human."""
    if point.threshold is None:
        return f"They {no_promise(point, least)}."
    promise = f"At most {share(point.error)} of them are wrong, with {percent(ASSURANCE)} assurance."
    return f"Answers used without asking: {_limit(point)}. {promise}"


def _limit(point: OperatingPoint) -> str:
    if point.threshold is None:
        return "no limit is good enough"
    return "any confidence" if point.everything else f"above {percent(point.threshold, 1)}"


def _error_ticks(before: Scored, after: Scored, top: float) -> list[Tick]:
    """Round steps that hold the error rate and a little of what the curves do above it."""
    start = len(before.correct) // 10
    settled = max(side.curve.risk[start:].max() for side in (before, after))
    needed = min(max(float(settled), top), 1.5 * top)
    step = nice_step(needed / 5)
    n_steps = math.ceil(needed / step - 1e-9)
    values = [k * step for k in range(n_steps + 1)]
    return [(value, share(value)) for value in values]
