"""Answers that can be used without asking: a limit on the confidence with a guarantee.

Limits are chosen by `salgp.decide`: with the stated assurance, at most the acceptable share of the answers
above the limit is wrong, also among answers that were not used to choose it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from salgp.decide import ALWAYS, choose_threshold
from salgp.report.summary import Scored

__all__ = []

ASSURANCE = 0.95
"""Probability that a limit keeps its promise."""

N_LEVELS = 60
"""Positions of the slider, about."""

USED = 0.8
"""Share of the answers that the default limit uses at least."""


@dataclass(frozen=True)
class OperatingPoint:
    """How many predictions can be kept so that, with `ASSURANCE`, at most ``error`` of them are wrong.

    Args:
        error: acceptable share of wrong ones among the kept.
        before: number kept by the model's own confidence.
        after: number kept by the calibrated confidence.
        threshold: calibrated confidence above which predictions are kept; None where none are.
        wrong: wrong ones among those kept by the calibrated confidence.
    """

    error: float
    before: int
    after: int
    threshold: float | None
    wrong: int = 0

    @property
    def everything(self) -> bool:
        """Does the limit keep every answer there could be?"""
        return self.threshold is not None and self.threshold <= ALWAYS


def acceptable_levels(
    before: Scored, after: Scored, labels: Tensor, wanted: float | None = None
) -> list[OperatingPoint]:
    """What is kept at acceptable errors up to where every answer can be, in round steps; and at ``wanted``,
    exactly.
    """
    if wanted is not None and not 0 < wanted < 1:
        raise ValueError(f"the acceptable share of wrong answers must be above 0 and below 1, got {wanted}")
    levels = _round_levels(1 - after.accuracy, len(labels))
    if wanted is not None:
        levels.add(wanted)
    return [_operating_point(before, after, labels, error) for error in sorted(levels)]


def _round_levels(error_rate: float, n: int) -> set[float]:
    """Round steps up to an error rate that chance hardly exceeds."""
    std = math.sqrt(error_rate * (1 - error_rate) / n)
    top = min(max(error_rate + 3 * std + 4 / n, 1e-3), 0.95)
    step = nice_step(top / N_LEVELS)
    beyond = math.ceil(top / step - 1e-9) + 1
    return {round(k * step, 12) for k in range(1, beyond)}


def chosen_level(levels: Sequence[OperatingPoint], wanted: float | None, n: int) -> OperatingPoint:
    """The level of the error that was asked for, whatever it keeps; by default the smallest acceptable error
    at which at least `USED` of the ``n`` answers can be used.
    """
    if wanted is not None:
        return min(levels, key=lambda point: abs(point.error - wanted))
    return next((point for point in levels if point.after >= USED * n), levels[-1])


def least_promise(levels: Sequence[OperatingPoint], point: OperatingPoint) -> float | None:
    """The smallest error above that of ``point`` at which some answers can be used; None where none can."""
    usable = (level.error for level in levels if level.after)
    return next((error for error in usable if error > point.error), None)


def nice_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below ``least``.

    Example:
        >>> nice_step(0.0031)
        0.005
    """
    power = 10.0 ** math.floor(math.log10(least))
    steps = (m * power for m in (1, 2, 5, 10))
    return round(next(step for step in steps if step >= least * (1 - 1e-9)), 12)


def _operating_point(before: Scored, after: Scored, labels: Tensor, error: float) -> OperatingPoint:
    own = choose_threshold(before.prediction, labels, error, ASSURANCE)
    rule = choose_threshold(after.prediction, labels, error, ASSURANCE)
    limit = rule.threshold[0] if rule.reachable else None
    return OperatingPoint(error, own.kept, rule.kept, limit, rule.wrong)
