"""Confidences that are no probabilities: nobody decides, estimates or watches with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from salgp import Features, Monitor, Prediction, estimate
from salgp.decide import Rule, choose_threshold
from salgp.sets import AdaptiveCoverage, fit_sets

N = 60
LABELS = torch.arange(N) % 3


def good() -> Prediction:
    probs = (torch.eye(3)[LABELS] + torch.rand(N, 3, generator=torch.Generator().manual_seed(0))).double()
    probs = probs / probs.sum(1, keepdim=True)
    return Prediction(probs.argmax(1), probs, probs.amax(1))


def bad(value: float) -> Prediction:
    """One confidence among many, and its probability, is no probability."""
    p = good()
    confidence, probs = p.confidence.clone(), p.probs.clone()
    confidence[7] = probs[7, 1] = value
    return replace(p, confidence=confidence, probs=probs)


USES: dict[str, Callable[[Prediction], Any]] = {
    "threshold": lambda p: choose_threshold(p, LABELS, 0.2, 0.8),
    "threshold per class": lambda p: choose_threshold(p, LABELS, 0.2, 0.8, per_class=True),
    "threshold by costs": lambda p: choose_threshold(p, LABELS, cost_wrong=10.0, cost_ask=1.0),
    "rule": lambda p: Rule((0.5,))(p),
    "sets fitted": lambda p: fit_sets(p, LABELS),
    "sets used": lambda p: fit_sets(good(), LABELS)(p),
    "accuracy": lambda p: estimate.accuracy(p),
    "accuracy per class": lambda p: estimate.per_class(p),
    "error above": lambda p: estimate.error_above(p, Rule((0.1,))),
    "class mix": lambda p: estimate.class_mix(p, [1 / 3] * 3, good()),
    "adapt": lambda p: estimate.adapt(p, [0.2, 0.3, 0.5], [1 / 3] * 3),
    "monitor": lambda p: Monitor.start(p),
    "fed": lambda p: Monitor.start(good()).feed(p),
    "observed": lambda p: Monitor.start(good()).observe(p, LABELS),
}


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.5, 1.5])
@pytest.mark.parametrize("use", USES)
def test_refused(use: str, value: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        USES[use](bad(value))
    USES[use](good())


@pytest.mark.parametrize("use", USES)
def test_numbers_alone_are_no_prediction(use: str) -> None:
    p = good()
    for given in (
        p.confidence,
        p.probs,
        p.confidence.numpy(),
        p.probs.tolist(),
        Features(p.probs.log()),
        None,
    ):
        with pytest.raises(TypeError, match=f"expected a salgp.Prediction, .* got a {type(given).__name__}"):
            USES[use](given)


@pytest.mark.parametrize("spread", [math.nan, -0.1, math.inf])
def test_spreads_that_are_none(spread: float) -> None:
    with pytest.raises(ValueError, match="spread must be 0 or more"):
        estimate.accuracy(good(), spread=spread)


@pytest.mark.parametrize(
    "how", [(0.0, 0.1), (1.0, 0.1), (2.0, 0.1), (0.9, 0.0), (0.9, -1.0), (0.9, math.nan)]
)
def test_adaptive_coverage_that_cannot_be(how: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        AdaptiveCoverage(*how)


@pytest.mark.parametrize("by", ["all", "class", "novelty"])
def test_sets_need_samples(by: str) -> None:
    with pytest.raises(ValueError, match="need labelled samples, got none"):
        fit_sets(good()[:0], LABELS[:0], by=by)
