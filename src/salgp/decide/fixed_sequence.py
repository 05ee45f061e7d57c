"""Learn-then-Test: which thresholds are tested, in which order, and how far the tests carry.

Sort ``n`` labelled samples by confidence. Rule ``m`` acts on what is more confident than the ``(m + 1)``-th
of them. It passes at level ``d`` if so few of those ``m`` answers are wrong that

    p_m = P(Binomial(m, error) <= wrong among the first m)  <=  d.

A walk goes from a start to more and more samples and ends before the first rule that fails (Angelopoulos et
al. 2021: a fixed order needs no correction for the number of rules). Where to start? From the few most
confident a single unlucky one ends the walk; from half of the samples nothing is found where only a tenth can
be trusted. So walks start at six shares of the samples, ``0, 1/32, 1/16, 1/8, 1/4, 1/2``. Start ``k`` has to
pass at its own part ``a_k = delta / 6``; behind it a walk goes on at ``a_0 + ... + a_k``. The furthest rule
that any walk reaches is kept. In the upper half, where most networks end, that is all of ``delta``.

Why that is enough. Call a rule bad if its true error exceeds ``error``. Suppose answers below the confidence
where the error crosses ``error`` are each wrong with a chance of at least ``error``. Given how many samples
lie above that confidence, those are independent draws with just the error ``error``, and the further ones are
wrong at least as often: every bad rule passes at level ``d`` with a chance of at most ``d``. A walk that ends
at a bad rule has passed either the first bad rule of the order, at ``a_0 + ... + a_k`` if that lies behind
start ``k``, or a later start ``j > k`` at ``a_j``. These chances add up to ``delta``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import bdtr

from salgp.decide.rule import ALWAYS
from salgp.metrics.metric import FloatArray, IntArray

__all__ = ["samples_needed"]

STARTS = (0.0, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
"""Shares of the samples at which walks start."""

STEP = 1.002
"""Ratio of two consecutive numbers of samples in the order."""


@dataclass(frozen=True, eq=False)
class Sorted:
    """Labelled answers from the most to the least confident.

    Args:
        confidence: ``(n,)`` falling.
        errors: ``(n + 1,)`` wrong answers among the first 0, 1, ..., n.
    """

    confidence: FloatArray
    errors: IntArray

    @staticmethod
    def of(confidence: FloatArray, wrong: NDArray[np.bool_]) -> Sorted:
        """Sort them."""
        order = np.argsort(-confidence, kind="stable")
        errors = np.append(0, np.cumsum(wrong[order]))
        return Sorted(confidence[order], errors)

    def above(self, limits: FloatArray) -> IntArray:
        """How many samples lie strictly above each threshold."""
        return np.searchsorted(-self.confidence, -limits, side="left")


@dataclass(frozen=True, eq=False)
class Order:
    """Tests in the order of more and more samples, fixed without labels.

    Args:
        limits: ``(k,)`` falling thresholds.
        entry: ``(k,)`` level at which a walk may start here; negative where none may.
        level: ``(k,)`` level at which a walk may go on.
    """

    limits: FloatArray
    entry: FloatArray
    level: FloatArray


def furthest(samples: Sorted, order: Order, error: float) -> int | None:
    """Index of the furthest rule that a walk reaches; None if none starts."""
    kept = samples.above(order.limits)
    p = bdtr(samples.errors[kept], kept, error)
    failed = np.append(p > order.level, True)
    starts = np.flatnonzero(p <= order.entry).tolist()
    ends = [start + int(np.argmax(failed[start:])) - 1 for start in starts]
    return max(ends, default=None)


def own_order(samples: Sorted, error: float, delta: float) -> Order:
    """Thresholds at the samples' own confidences, for numbers of samples that do not depend on them.

    Tied confidences may leave fewer samples above a threshold. Tests that keep too few to pass whatever their
    labels are left out, and the part of a start that is left out goes to the next.
    """
    n = len(samples.confidence)
    counts = _counts(samples_needed(error, 1 - delta), n)
    limits = np.append(samples.confidence, ALWAYS)[counts]
    stretch = np.searchsorted(STARTS, counts / n, side="right") - 1
    entry, level = _levels(stretch, samples.above(limits), error, delta)
    used = level > 0
    return Order(limits[used], entry[used], level[used])


def _levels(stretch: IntArray, kept: IntArray, error: float, delta: float) -> tuple[FloatArray, FloatArray]:
    """Levels of `Order` for tests behind start ``stretch (k,)``; negative where a test is left out."""
    entry, level = np.full((2, len(kept)), -1.0)
    behind, part = 0.0, 0.0
    for k in range(len(STARTS)):
        part += delta / len(STARTS)
        enough = kept >= samples_needed(error, 1 - part)
        members = np.flatnonzero((stretch == k) & enough)
        if len(members):
            behind += part
            entry[members[0]], level[members] = part, behind
            part = 0.0
    return entry, level


def samples_needed(error: float, assurance: float = 0.95, observed: float = 0.0) -> int:
    """Kept samples needed to show an error rate of at most ``error`` if ``observed`` of them are wrong.

    Example:
        >>> samples_needed(0.05), samples_needed(0.05, observed=0.03)
        (59, 386)
    """
    if not 0 < error < 1:
        raise ValueError(f"error must be between 0 and 1, got {error}")
    if not 0 < assurance < 1:
        raise ValueError(f"assurance must be between 0 and 1, got {assurance}")
    if not 0 <= observed < error:
        raise ValueError(f"an observed error of {observed} can never show one of at most {error}")
    delta = 1 - assurance
    return _smallest(lambda kept: bdtr(math.ceil(observed * kept), kept, error) <= delta)


def _smallest(passes: Callable[[int], bool]) -> int:
    low, high = 0, 1
    while not passes(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if passes(middle) else (middle, high)
    return high


def _counts(first: int, n: int) -> IntArray:
    """Numbers of samples from ``first`` to ``n`` in steps of `STEP`, at least 1."""
    if first > n:
        return np.zeros(0, dtype=np.int64)
    steps = math.ceil(math.log(n / first, STEP)) + 1
    counts = np.ceil(first * STEP ** np.arange(steps))
    return np.unique(np.minimum(counts, n).astype(int))
