"""LaSCal: its error by loops, and the temperature it finds under a known label shift."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from salgp_study.lascal import label_shift_error, label_shift_temperature


def drawn(n: int, mix: list[float], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits that are right for even classes, of samples with another class mix."""
    rng = np.random.default_rng(seed)
    y = rng.choice(3, n, p=mix)
    x = np.eye(3)[y] + 0.8 * rng.normal(size=(n, 3))
    return torch.from_numpy(x / 0.8**2), torch.from_numpy(y)


def test_error_by_loops() -> None:
    rng = np.random.default_rng(0)
    source, target, y = rng.dirichlet([1, 1, 1], 60), rng.dirichlet([1, 1, 1], 40), rng.integers(0, 3, 60)
    weights, total = np.array([0.5, 1.0, 2.0]), 0.0
    for k in range(3):
        edges = [0.0, *np.quantile(target[:, k], [0.25, 0.5, 0.75]), 1.0]
        for low, high in pairwise(edges):
            inside = [p for p in target[:, k] if low < p <= high]
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
