"""The slider: how many wrong answers are acceptable, and what every choice means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from salgp.report import figures
from salgp.report.page import percent
from salgp.report.selective import ASSURANCE, OperatingPoint, least_promise, nice_step
from salgp.report.summary import Scored
from salgp.report.text import no_promise, share

__all__ = ["slider"]


def slider(
    before: Scored, after: Scored, levels: Sequence[OperatingPoint], point: OperatingPoint
) -> dict[str, Any]:
    """The curve of errors over coverage, and what tiles and sentences say at each level."""
    n, top = len(after.correct), levels[-1].error
    figure, frame = figures.risk_coverage(before, after, point, _error_ticks(before, after, top))
    points = [
        {
            "error": share(k.error),
            "advice": _advice(k, least_promise(levels, k)),
            "before": f"{k.before:,}",
            "after": f"{k.after:,}",
            "human": f"{n - k.after:,}",
            "share": round(100 * (n - k.after) / n, 1),
            "threshold": _limit(k),
            "wrong": f"{k.wrong:,}",
            "xb": round(frame.x(k.before / n), 1),
            "xa": round(frame.x(k.after / n), 1),
            "y": round(frame.y(k.error), 1),
        }
        for k in levels
    ]
    every = max(len(levels) // 8, 1)
    return {
        "risk_figure": figure,
        "points": points,
        "position": list(levels).index(point),
        "steps": [k for i, k in enumerate(levels) if i % every == 0 or k == point],
    }


def _advice(point: OperatingPoint, least: float | None) -> str:
    """What the tile says below the number of answers that go to a human."""
    if point.threshold is None:
        return f"They {no_promise(point, least)}."
    return (
        f"Answers used without asking: {_limit(point)}. At most {share(point.error)} of them are wrong, with "
        f"{percent(ASSURANCE)} assurance."
    )


def _limit(point: OperatingPoint) -> str:
    if point.threshold is None:
        return "no limit is good enough"
    return "any confidence" if point.everything else f"above {percent(point.threshold, 1)}"


def _error_ticks(before: Scored, after: Scored, top: float) -> list[float]:
    """Round steps that hold the error rate and a little of what the curves do above it."""
    settled = [float(s.curve.risk[len(s.curve.risk) // 10 :].max()) for s in (before, after)]
    needed = min(max(*settled, top), 1.5 * top)
    step = nice_step(needed / 5)
    return [k * step for k in range(math.ceil(needed / step - 1e-9) + 1)]
