"""The threshold of least cost, given the prices of acting wrongly and of asking."""

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from salgp.decide.rule import ALWAYS, NEVER, Rule
from salgp.metrics.interval import exact_interval
from salgp.metrics.metric import FloatArray

__all__ = []

_GRID = np.linspace(-3, 3, 25)
"""Thresholds tried, in log-odds around the one that is best for calibrated confidences."""


def cheapest(
    confidence: FloatArray, wrong: NDArray[np.bool_], cost_wrong: float, cost_ask: float, assurance: float
) -> Rule:
    """The threshold of least observed cost among a few that the prices alone determine.

    Acting costs ``(1 - confidence) cost_wrong`` on average, so ``1 - cost_ask / cost_wrong`` is best for
    calibrated confidences; the others are there for confidences that are not. The bound holds for all of them
    together, hence for the one chosen.
    """
    if not 0 < cost_ask < cost_wrong < math.inf:
        raise ValueError(f"expected 0 < cost_ask < cost_wrong, got {cost_ask} and {cost_wrong}")
    limits = _limits(cost_wrong, cost_ask)
    acts = confidence[:, None] > limits  # (n, thresholds)
    n, asked, failed = len(wrong), (~acts).sum(0), acts[wrong].sum(0)
    chosen = np.argmin(cost_ask * asked + cost_wrong * failed)
    seen = np.array([asked[chosen], failed[chosen]])
    delta = (1 - assurance) / (2 * len(limits))
    _, (asking, failing) = exact_interval(seen, n, 1 - 2 * delta)
    return Rule(
        (float(limits[chosen]),),
        assurance=assurance,
        n=n,
        kept=n - int(seen[0]),
        wrong=int(seen[1]),
        cost_wrong=cost_wrong,
        cost_ask=cost_ask,
        cost_bound=float(min(cost_ask * asking + cost_wrong * failing, cost_wrong)),
    )


def _limits(cost_wrong: float, cost_ask: float) -> FloatArray:
    best = math.log((cost_wrong - cost_ask) / cost_ask)
    return np.r_[ALWAYS, expit(best + _GRID), NEVER]
