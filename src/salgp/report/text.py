"""The report in words: its first sentences.

"Better" is said only where the paired bootstrap agrees, so that no sentence contradicts a figure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from salgp.report.selective import ASSURANCE, OperatingPoint
from salgp.report.summary import Change, Scored

__all__ = []

SMALL = 0.015
"""A confidence error below this needs no correction."""

FEWEST = 50
"""Samples below which no verdict is given without a caveat."""

NEARLY_ALL = 0.9
"""Where more than this share goes to a human, the model is of little use."""

MOSTLY_WRONG = 0.5
"""A model is also of little use where more than this share of its answers may be wrong."""


@dataclass(frozen=True)
class Verdict:
    """The report in sentences."""

    headline: str
    action: str
    tone: str


def verdict(
    before: Scored,
    after: Scored,
    method: str,
    point: OperatingPoint,
    changes: Sequence[Change],
    least: float | None = None,
) -> Verdict:
    """Say what is wrong, what the correction achieves, and what to do.

    Args:
        before: the model's own confidence.
        after: the calibrated one.
        method: name of the calibrator.
        point: the limit chosen.
        changes: of all metrics; that of the confidence error comes first, the others beside it.
        least: the smallest acceptable error that can be promised, where that of ``point`` cannot.
    """
    n = len(after.confidence)
    said = f"{_diagnosis(before)}; {_result(before, after, method, changes)}."
    if n < FEWEST:
        samples = "one labelled prediction" if n == 1 else f"{n} labelled predictions"
        said = f"Only {samples}: too few for a verdict. {said}"
    action = _action(point, n, after.accuracy, least)
    return Verdict(said, action, _tone(before, after, point, changes))


def share(error: float) -> str:
    """An acceptable share of wrong answers, with as many digits as it was given.

    Example:
        >>> share(0.05), share(0.125), share(0.0004)
        ('5 %', '12.5 %', '0.04 %')
    """
    return f"{100 * error:.3g} %"


def no_promise(point: OperatingPoint, least: float | None) -> str:
    """What the labelled answers do not allow, so that all go to a human, and what they do."""
    instead = "" if least is None else f"; the least that can be promised here is about {share(least)}"
    return f"allow no promise of at most {share(point.error)} wrong answers{instead}"


def _tone(before: Scored, after: Scored, point: OperatingPoint, changes: Sequence[Change]) -> str:
    n, change = len(after.confidence), _of_ece(changes)
    if n - point.after > NEARLY_ALL * n or change == "worse":
        return "poor"
    if n < FEWEST:
        return "fair"
    if point.error >= MOSTLY_WRONG:
        return "poor"
    improved = _others(changes, "better") and not _others(changes, "worse")
    if change == "better":
        improved = after.ece < 0.5 * before.ece
    return "good" if after.ece < SMALL or improved else "fair"


def _of_ece(changes: Sequence[Change]) -> str:
    return next((c.verdict for c in changes if c.metric.name == "ece"), "unchanged")


def _others(changes: Sequence[Change], kind: str) -> str:
    """Headings of the other metrics with this verdict."""
    return ", ".join(c.metric.heading for c in changes if c.metric.name != "ece" and c.verdict == kind)


def _points(x: float) -> str:
    whole = max(round(100 * x), 1)
    return "1 point" if whole == 1 else f"{whole} points"


def _within(x: float) -> str:
    return _points(math.ceil(100 * x - 0.05) / 100)


def _diagnosis(before: Scored) -> str:
    if before.ece < SMALL:
        return f"The model's confidence is already right to within {_within(before.ece)}"
    if abs(before.excess) < 0.5 * before.ece:
        sides = "too high in places and too low in others"
        return f"The model's confidence is off by {_points(before.ece)}, {sides}"
    return (
        f"The model is {'overconfident' if before.excess > 0 else 'underconfident'} by {_points(before.ece)}"
    )


def _result(before: Scored, after: Scored, method: str, changes: Sequence[Change]) -> str:
    better, worse, change = _others(changes, "better"), _others(changes, "worse"), _of_ece(changes)
    if change == "worse":
        return f"{method} makes it worse here: it is then off by {_points(after.ece)}"
    if change == "better":
        still = f", but {worse} gets worse" if worse else ""
        return f"after {method} it is right to within {_within(after.ece)}{_side(after)}{still}"
    parts = (better and f"improves {better}", worse and f"worsens {worse}")
    found = ", but ".join(filter(None, parts))
    if before.ece < SMALL and after.ece < SMALL:
        return f"after {method} it still is" + (f", and {method} {found}" if found else "")
    if found:
        return f"{method} {found}, with no clear change of the confidence error ({_points(after.ece)})"
    return f"{method} makes no clear difference here: it is then off by {_points(after.ece)}"


def _side(after: Scored) -> str:
    """Nothing where what is left goes both ways."""
    if after.ece < SMALL or abs(after.excess) < 0.5 * after.ece:
        return ""
    return ", still too sure" if after.excess > 0 else ", on the careful side"


def _action(point: OperatingPoint, n: int, accuracy: float, least: float | None) -> str:
    human, allowed = n - point.after, f"at most {share(point.error)}"
    sure = f"with {100 * ASSURANCE:.0f} % assurance"
    if human == n:
        return f"All should go to a human: these {n:,} labelled answers {no_promise(point, least)}."
    if human == 0 and accuracy == 1:
        return f"All {n:,} predictions are right; {sure}, {allowed} of such answers are wrong."
    if human == 0:
        return f"Used without asking, {allowed} of the answers are wrong, {sure}."
    return f"Send {human:,} of {n:,} predictions to a human; of the others, {allowed} are wrong, {sure}."
