"""Baselines of accuracy estimation: their definitions in plain loops, and what all of them must do."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

from salgp import Prediction
from salgp_study.estimators import (
    BASELINES,
    _transport_costs,
    atc,
    cbpe,
    cot,
    difference_of_confidences,
    importance_weighting,
)


def drawn(n: int, seed: int, sharp: float) -> tuple[Prediction, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    probs = (sharp * torch.randn(n, 3, generator=g, dtype=torch.float64)).softmax(1)
    y = torch.multinomial(probs, 1, generator=g)[:, 0]
    return Prediction(probs.argmax(1), probs, probs.amax(1), novelty=-probs.amax(1)), y


@pytest.mark.parametrize("estimator", BASELINES.values(), ids=BASELINES)
def test_more_of_the_source_is_estimated_right(estimator: Callable[..., float]) -> None:
    p, y = drawn(1500, 1, 2.0)
    found = estimator(*drawn(1500, 0, 2.0), p)
    assert abs(found - float((p.label == y).double().mean())) < 0.04


@pytest.mark.parametrize("estimator", BASELINES.values(), ids=BASELINES)
def test_a_shift_that_confidence_shows_lowers_the_estimate(estimator: Callable[..., float]) -> None:
    source = drawn(1500, 0, 2.0)
    before, after = (estimator(*source, drawn(1500, 2, sharp)[0]) for sharp in (2.0, 1.0))
    assert after < before - 0.05


def test_atc_by_its_definition() -> None:
    p, y = drawn(500, 0, 1.5)
    new, _ = drawn(300, 1, 1.0)
    scores = (p.probs * p.probs.log()).sum(1).numpy()
    threshold = np.sort(scores)[int((p.label != y).sum())]
    expected = np.mean([(q * q.log()).sum().item() >= threshold for q in new.probs])
    assert atc(p, y, new, "entropy") == pytest.approx(expected)


def test_cbpe_repairs_miscalibrated_probabilities_of_the_source() -> None:
    p, y = drawn(6000, 0, 2.0)
    sharp = p.probs**3 / (p.probs**3).sum(1, keepdim=True)
    bold = Prediction(p.label, sharp, sharp.amax(1))
    truth = float((p.label == y).double().mean())
    assert abs(float(bold.confidence.mean()) - truth) > 0.1
    assert abs(cbpe(bold, y, bold) - truth) < 0.01


def test_transport_is_the_optimum_of_its_linear_program() -> None:
    p, _ = drawn(30, 0, 1.0)
    y = np.array([0] * 5 + [1] * 10 + [2] * 15)
    cost = 1 - p.probs.numpy()
    rows = np.kron(np.eye(30), np.ones(3))
    columns = np.kron(np.ones(30), np.eye(3))
    given = np.concatenate([np.ones(30), [5, 10, 15]])
    best = linprog(cost.ravel(), A_eq=np.vstack([rows, columns]), b_eq=given)
    assert _transport_costs(p, y).sum() == pytest.approx(best.fun)
    assert cot(p, torch.from_numpy(y), p) == pytest.approx(1 - best.fun / 30)


def test_baselines_by_their_definitions() -> None:
    p, y = drawn(400, 5, 1.5)
    new, _ = drawn(150, 6, 1.0)
    right = (p.label == y).numpy()
    fall = p.confidence.mean() - new.confidence.mean()
    assert difference_of_confidences(p, y, new) == pytest.approx(right.mean() - float(fall))
    low = Prediction(p.label, p.probs, p.confidence * 0)
    least = max(right.mean() - float(p.confidence.mean()), 0)
    assert difference_of_confidences(p, y, low) == pytest.approx(least)
    scores = np.sort(p.confidence.numpy())
    threshold = scores[int((~right).sum())]
    assert atc(p, y, new) == pytest.approx(np.mean(new.confidence.numpy() >= threshold))
    assert atc(p, (p.label + 1) % 3, new) == 0.0
    assert _cbpe(p, y, new) == pytest.approx(cbpe(p, y, new))
    assert _weighted(p, right, new) == pytest.approx(importance_weighting(p, y, new), rel=1e-4)


def _cbpe(p: Prediction, y: torch.Tensor, new: Prediction) -> float:
    columns = []
    for k in range(3):
        curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
        columns.append(curve.fit(p.probs[:, k].numpy(), (y == k).numpy()).predict(new.probs[:, k].numpy()))
    total = 0.0
    for i, row in enumerate(np.stack(columns, 1)):
        total += row[int(new.label[i])] / row.sum() if row.sum() > 0 else 1 / 3
    return total / len(new)


def _weighted(p: Prediction, right: np.ndarray, new: Prediction) -> float:
    def columns(q: Prediction) -> np.ndarray:
        assert q.novelty is not None
        logs = np.log(np.maximum(q.probs.numpy(), 1e-6))
        return np.column_stack([logs, q.confidence.numpy(), q.novelty.numpy()])

    rows = np.concatenate([columns(p), columns(new)])
    rows = (rows - rows.mean(0)) / rows.std(0)
    where = np.repeat([0, 1], [len(p), len(new)])
    separator = LogisticRegression(C=1.0, max_iter=5000, tol=1e-10).fit(rows, where)
    weight = np.exp(rows[: len(p)] @ separator.coef_[0])
    return float((weight * right).sum() / weight.sum())
