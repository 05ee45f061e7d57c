"""Rivals: their authors' definitions in plain loops, and what all of them must do."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.exceptions import NotFittedError

from salgp import Prediction
from salgp.estimate import (
    ATC,
    CBPE,
    AverageConfidence,
    DifferenceOfConfidences,
    Estimator,
    ImportanceWeighting,
)

ALL = [AverageConfidence(), ATC(), ATC("entropy"), DifferenceOfConfidences(), CBPE(), ImportanceWeighting()]


def drawn(n: int, seed: int, sharp: float) -> tuple[Prediction, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (sharp * torch.randn(n, 3, generator=g, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(probs, 1, generator=g)[:, 0]
    return Prediction(probs.argmax(1), probs, probs.amax(1), novelty=-probs.amax(1)), y


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'score', '')}")
def test_home_is_estimated_right(estimator: Estimator) -> None:
    estimator.fit(*drawn(4000, 0, 2.0))
    p, y = drawn(4000, 1, 2.0)
    assert abs(estimator.estimate(p) - float((p.label == y).double().mean())) < 0.03


@pytest.mark.parametrize("estimator", ALL, ids=lambda e: f"{type(e).__name__}-{getattr(e, 'score', '')}")
def test_a_shift_that_confidence_shows_lowers_the_estimate(estimator: Estimator) -> None:
    estimator.fit(*drawn(4000, 0, 2.0))
    home = estimator.estimate(drawn(4000, 2, 2.0)[0])
    assert estimator.estimate(drawn(4000, 1, 1.0)[0]) < home - 0.05


@pytest.mark.parametrize("estimator", [ATC, DifferenceOfConfidences, CBPE, ImportanceWeighting])
def test_an_unfitted_estimator_says_so(estimator: type[Estimator]) -> None:
    p, y = drawn(50, 0, 2.0)
    with pytest.raises(NotFittedError, match=f"this {estimator.__name__} is not fitted; call fit"):
        estimator().estimate(p)
    assert 0 <= estimator().fit(p, y).estimate(p) <= 1


def test_atc_threshold_by_its_definition() -> None:
    p, y = drawn(500, 0, 1.5)
    error = float((p.label != y).double().mean())
    fitted = ATC("entropy").fit(p, y)
    scores = (p.probs * p.probs.log()).sum(1).numpy()
    assert (scores < fitted.threshold_).mean() == pytest.approx(error)
    new, _ = drawn(300, 1, 1.0)
    expected = np.mean([(q * q.log()).sum().item() >= fitted.threshold_ for q in new.probs])
    assert fitted.estimate(new) == pytest.approx(expected)
    with pytest.raises(ValueError, match="score must be"):
        ATC("margin")


def test_cbpe_repairs_miscalibrated_probabilities_at_home() -> None:
    p, y = drawn(6000, 0, 2.0)
    sharp = p.probs**3 / (p.probs**3).sum(1, keepdim=True)
    bold = Prediction(p.label, sharp, sharp.amax(1))
    truth = float((p.label == y).double().mean())
    assert abs(float(bold.confidence.mean()) - truth) > 0.1
    assert abs(CBPE().fit(bold, y).estimate(bold) - truth) < 0.02
