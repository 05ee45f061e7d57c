"""The threshold of least cost, given the prices of acting wrongly and of asking."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from salgp.decide.rule import ALWAYS, NEVER, Rule
from salgp.metrics.interval import exact_interval

__all__ = []

_GRID = np.linspace(-3, 3, 25)
"""Thresholds tried, in log-odds around the one that is best for calibrated confidences."""


def cheapest(
    confidence: NDArray[np.float64],
    wrong: NDArray[np.bool_],
    cost_wrong: float,
    cost_ask: float,
    assurance: float,
) -> Rule:
    """The threshold of least observed cost among a few that the prices alone determine.

    Acting costs ``(1 - confidence) cost_wrong`` on average, so ``1 - cost_ask / cost_wrong`` is best for
    calibrated confidences; the others are there for confidences that are not. The bound holds for all of them
    together, hence for the one chosen.
    """
    if not 0 < cost_ask < cost_wrong < math.inf:
        raise ValueError(f"expected 0 < cost_ask < cost_wrong, got {cost_ask} and {cost_wrong}")
    best = math.log((cost_wrong - cost_ask) / cost_ask)
    limits = np.concatenate([[ALWAYS], 1 / (1 + np.exp(-(best + _GRID))), [NEVER]])
    acts = confidence[:, None] > limits  # (n, thresholds)
    asked, failed = (~acts).sum(0), (acts & wrong[:, None]).sum(0)
    n = len(wrong)
    chosen = int(np.argmin(cost_ask * asked + cost_wrong * failed))
    delta = (1 - assurance) / (2 * len(limits))
    seen = np.array([asked[chosen], failed[chosen]])
    asking, failing = exact_interval(seen, np.array([n, n]), 1 - 2 * delta)[1]
    return Rule(
        (float(limits[chosen]),),
        assurance=assurance,
        n=n,
        kept=int(acts[:, chosen].sum()),
        wrong=int(failed[chosen]),
        cost_wrong=cost_wrong,
        cost_ask=cost_ask,
        cost_bound=float(min(cost_ask * asking + cost_wrong * failing, cost_wrong)),
    )
