"""LaSCal: its error by loops, and the temperature it finds under a known label shift."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from salgp.features import Features
from salgp_study.lascal import label_shift_error, label_shift_temperature
from salgp_study.suite.methods import LaSCal


def drawn(n: int, mix: list[float], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right for even classes, of samples with another class mix."""
    rng = np.random.default_rng(seed)
    y = rng.choice(3, n, p=mix)
    x = np.eye(3)[y] + 0.8 * rng.normal(size=(n, 3))
    return torch.from_numpy(x / 0.8**2), torch.from_numpy(y)


@pytest.mark.parametrize("decimals", [16, 1])
def test_error_by_loops(decimals: int) -> None:
    """With one decimal there are ties, and bins without samples."""
    rng = np.random.default_rng(0)
    source, target = (rng.dirichlet([1, 1, 1], n).round(decimals) for n in (60, 40))
    y = rng.integers(0, 3, 60)
    weights, total = np.array([0.5, 1.0, 2.0]), 0.0
    for k in range(3):
        edges = [-1.0, *np.quantile(target[:, k], [0.25, 0.5, 0.75]), 1.0]
        for low, high in pairwise(edges):
            inside = [p for p in target[:, k] if low < p <= high]
            if len(inside) < 2:
                continue
            hits = sum(low < p <= high and label == k for p, label in zip(source[:, k], y, strict=True))
            rate = weights[k] * 39 / 60 * hits / (len(inside) - 1)
            total += sum((p - rate) ** 2 for p in inside) / 40 / 3
    assert label_shift_error(source, y, target, weights, n_bins=4) == pytest.approx(total)


def test_temperature_for_another_class_mix() -> None:
    """Twice too sure: the best temperature on labelled target samples is found without their labels."""
    source, y = drawn(3000, [1 / 3, 1 / 3, 1 / 3], 0)
    target, truth = drawn(3000, [0.6, 0.3, 0.1], 1)
    found = label_shift_temperature(2 * source, y, 2 * target, 3 * np.array([0.6, 0.3, 0.1]))
    losses = {
        t: float(torch.nn.functional.cross_entropy(2 * target / t, truth)) for t in np.geomspace(0.5, 6, 60)
    }
    best = min(losses, key=losses.__getitem__)
    assert found == pytest.approx(best, rel=0.25)


def test_the_suite_gives_it_the_whole_test_set_and_estimated_weights() -> None:
    source, y = drawn(3000, [1 / 3, 1 / 3, 1 / 3], 0)
    target, _ = drawn(3000, [0.6, 0.3, 0.1], 1)
    unknown = torch.full((1,), -1)
    method = LaSCal().fit(Features(2 * torch.cat([source, source[:1]])), torch.cat([y, unknown]))
    weights = method.weights(Features(2 * target))
    np.testing.assert_allclose(weights, [1.8, 0.9, 0.3], atol=0.1)
    temperature = label_shift_temperature(2 * source, y, 2 * target, weights)
    wanted = (2 * target / temperature).softmax(dim=1).max(dim=1).values
    torch.testing.assert_close(method.predict(Features(2 * target)).confidence, wanted)


def test_a_class_without_calibration_samples_counts_as_one() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.0, 3.0, 0.0], [3.0, 0.0, 0.0], [0.0, 3.0, 0.0]])
    method = LaSCal().fit(Features(logits), torch.tensor([0, 1, 1, 0]))
    assert np.isfinite(method.weights(Features(logits))).all()
    np.testing.assert_allclose(method.weights(Features(logits)) @ [0.4, 0.4, 0.2], 1.0)
