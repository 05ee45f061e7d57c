"""The report's first sentences: what is wrong, what the correction achieves, what to do."""

from __future__ import annotations

import math
from dataclasses import dataclass

from salgp.report.keeping import Keep
from salgp.report.summary import Side

__all__ = ["Verdict", "verdict"]

SMALL = 0.015
"""A confidence error below this needs no correction."""


@dataclass(frozen=True)
class Verdict:
    """The report in sentences."""

    headline: str
    action: str
    tone: str


def verdict(before: Side, after: Side, method: str, keep: Keep) -> Verdict:
    """Say what is wrong, what the correction achieves, and what to do."""
    small = min(before.ece, after.ece)
    improved = after.ece < before.ece
    tone = (
        "good"
        if after.ece < SMALL or (improved and after.ece < 0.5 * before.ece)
        else "fair"
        if improved or small < SMALL
        else "poor"
    )
    return Verdict(
        f"{_diagnosis(before)}; {_result(before, after, method)}.",
        _action(keep, len(after.confidence), after.accuracy),
        tone,
    )


def _points(x: float) -> str:
    whole = max(round(100 * abs(x)), 1)
    return f"{whole} point" + ("s" if whole != 1 else "")


def _within(x: float) -> str:
    whole = max(math.ceil(100 * x - 0.05), 1)
    return f"{whole} point" + ("s" if whole != 1 else "")


def _diagnosis(before: Side) -> str:
    gap = before.stated - before.accuracy
    if before.ece < SMALL:
        return f"The network's confidence is already right to within {_within(before.ece)}"
    if abs(gap) < 0.5 * before.ece:
        return (
            f"The network's confidence is off by {_points(before.ece)}, too high in places and too "
            f"low in others"
        )
    return f"The network is {'overconfident' if gap > 0 else 'underconfident'} by {_points(before.ece)}"


def _result(before: Side, after: Side, method: str) -> str:
    if before.ece < SMALL and after.ece < SMALL:
        return f"after {method} it still is"
    if after.ece < before.ece:
        return f"after {method} it is within {_within(after.ece)}"
    return f"{method} does not help here: it is off by {_points(after.ece)}"


def _action(keep: Keep, n: int, accuracy: float) -> str:
    human = n - keep.after
    if accuracy == 1:
        return f"All {n:,} predictions are right; none needs a human."
    wrong = f"at most {100 * keep.error:.2g} % of the automatic answers may be wrong"
    if human == 0:
        return f"If {wrong}, no prediction needs a human."
    if human == n:
        return f"If {wrong}, all {n:,} predictions should go to a human."
    return f"If {wrong}, {human:,} of {n:,} predictions should go to a human."
