"""How many answers can be used without asking: a limit on the confidence, and what it does to predictions it
was not chosen on.

A limit that is chosen where its error is counted looks better than it is. So each one is also chosen on one
half of the predictions and tried on the other, both ways.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from salgp.report.summary import FloatArray, Side

__all__ = ["Cuts", "Keep", "Tried", "acceptable_levels", "cuts", "nice_error", "nice_step"]

FEWEST = 40
"""Predictions needed to try a limit on a half of them."""


@dataclass(frozen=True)
class Tried:
    """Limits chosen on one half of the predictions and tried on the other, both ways: how many are kept, how
    many of them are wrong.
    """

    kept: int
    wrong: int

    @property
    def error(self) -> float:
        """Share of wrong ones among the kept."""
        return self.wrong / max(self.kept, 1)


@dataclass(frozen=True)
class Keep:
    """How many predictions can be kept so that at most ``error`` of them are wrong.

    Args:
        error: acceptable share of wrong ones among the kept.
        before: number kept by the network's own confidence.
        after: number kept by the calibrated confidence.
        threshold: calibrated confidence from which predictions are kept; None where none are.
        tried: what such limits do to predictions they were not chosen on; None where there are too few to
            say.
    """

    error: float
    before: int
    after: int
    threshold: float | None
    tried: Tried | None = None


@dataclass(frozen=True, eq=False)
class Cuts:
    """Every possible limit on the confidence, surest first: predictions of equal confidence are kept together
    or not at all.

    Args:
        limit: ``(g,)`` the different confidences, falling.
        kept: ``(g,)`` predictions at or above each.
        wrong: ``(g,)`` wrong ones among them.
    """

    limit: FloatArray
    kept: NDArray[np.intp]
    wrong: NDArray[np.intp]

    def choose(self, error: float) -> int:
        """Number of the cut that keeps most with at most ``error`` of them wrong; -1 where none does.

        Example:
            >>> cuts(np.array([0.9, 0.8, 0.8, 0.6]), np.array([True, True, False, True])).choose(0.25)
            2
        """
        fine = np.flatnonzero(self.wrong <= error * self.kept + 1e-9)
        return int(fine[-1]) if len(fine) else -1

    def at(self, limit: float) -> tuple[int, int]:
        """How many predictions reach ``limit``, and how many of them are wrong."""
        above = int(np.searchsorted(-self.limit, -limit, side="right"))
        return (int(self.kept[above - 1]), int(self.wrong[above - 1])) if above else (0, 0)


def cuts(confidence: FloatArray, correct: NDArray[np.bool_]) -> Cuts:
    """All possible limits.

    Example:
        >>> cuts(np.array([0.9, 0.8, 0.8, 0.6]), np.array([True, True, False, True])).kept.tolist()
        [1, 3, 4]
    """
    order = np.argsort(-confidence, kind="stable")
    ranked = confidence[order]
    last = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))  # of each run of equal confidences
    return Cuts(ranked[last], last + 1, np.cumsum(~correct[order], dtype=np.intp)[last])


def acceptable_levels(before: Side, after: Side, n_levels: int = 100) -> list[Keep]:
    """What is kept at acceptable errors from 0 to the network's whole error rate, in round steps."""
    top = max(1 - after.accuracy, 1e-3)
    step = nice_step(top / n_levels)
    own, corrected = (cuts(s.confidence, s.correct) for s in (before, after))
    halves = _halves(after)

    def keep(error: float) -> Keep:
        chosen, network = corrected.choose(error), own.choose(error)
        limit = None if chosen < 0 else float(corrected.limit[chosen])
        return Keep(error, _count(own, network), _count(corrected, chosen), limit, _try(halves, error))

    return [keep(round(k * step, 12)) for k in range(math.ceil(top / step - 1e-9) + 1)]


def nice_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below ``least``.

    Example:
        >>> nice_step(0.0031)
        0.005
    """
    power = 10.0 ** math.floor(math.log10(least))
    return round(min(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9)), 12)


def nice_error(error_rate: float) -> float:
    """Half the error rate, rounded down to 1, 2 or 5 times a power of ten.

    Example:
        >>> nice_error(0.09)
        0.02
    """
    if error_rate <= 0:
        return 0.0
    half = error_rate / 2
    power = 10.0 ** math.floor(math.log10(half))
    return round(max(m * power for m in (1, 2, 5) if m * power <= half * (1 + 1e-9)), 12)


def _count(found: Cuts, chosen: int) -> int:
    return 0 if chosen < 0 else int(found.kept[chosen])


def _halves(side: Side) -> tuple[Cuts, Cuts] | None:
    """Two random halves of the predictions, always the same ones."""
    n = len(side.correct)
    if n < FEWEST:
        return None
    order = np.random.default_rng(0).permutation(n)
    one, two = (
        cuts(side.confidence[rows], side.correct[rows]) for rows in (order[: n // 2], order[n // 2 :])
    )
    return one, two


def _try(halves: tuple[Cuts, Cuts] | None, error: float) -> Tried | None:
    """Choose on each half, count on the other."""
    if halves is None:
        return None
    kept = wrong = 0
    for chosen_on, tried_on in (halves, halves[::-1]):
        chosen = chosen_on.choose(error)
        k, w = (0, 0) if chosen < 0 else tried_on.at(float(chosen_on.limit[chosen]))
        kept, wrong = kept + k, wrong + w
    return Tried(kept, wrong)
