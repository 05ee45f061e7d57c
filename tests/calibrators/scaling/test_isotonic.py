"""Isotonic regression."""

from __future__ import annotations

import numpy as np
import pytest
import sklearn.isotonic
import torch

from salgp import Features
from salgp.calibrators.scaling.toplabel import IsotonicRegression, interpolate, monotone_fit


def drawn(n: int = 500, c: int = 3, seed: int = 0) -> tuple[Features, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, c, generator=generator, dtype=torch.float64)
    return Features(z), torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]


def with_pseudo_samples(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.concatenate([x, [x.min(), x.max()]]), np.concatenate([y.astype(float), [1.0, 0.0]])


@pytest.mark.parametrize("decimals", [1, 2, 12])
def test_top_label_equals_sklearn_with_the_two_pseudo_samples(decimals: int) -> None:
    f, labels = drawn()
    x, y = np.round(f.confidence.numpy(), decimals), f.correct(labels).numpy()
    reference = sklearn.isotonic.IsotonicRegression(out_of_bounds="clip").fit(*with_pseudo_samples(x, y))
    at = np.linspace(0, 1, 301)
    xs, ys = monotone_fit(x, y)
    np.testing.assert_allclose(
        interpolate(torch.tensor(at), torch.tensor(xs), torch.tensor(ys)).numpy(),
        reference.predict(at),
        atol=1e-12,
    )


def test_interior_blocks_are_those_of_plain_sklearn() -> None:
    f, labels = drawn(3000)
    plain = (
        sklearn.isotonic.IsotonicRegression(out_of_bounds="clip")
        .fit(f.confidence.numpy(), f.correct(labels).numpy())
        .predict(f.confidence.numpy())
    )
    ours = IsotonicRegression().fit(f, labels).predict(f).confidence.numpy()
    inner = (f.confidence.numpy() > 0.5) & (f.confidence.numpy() < 0.95)
    np.testing.assert_allclose(ours[inner], plain[inner], atol=1e-9)


def test_never_zero_or_one() -> None:
    f, _ = drawn(100)
    for labels, value in ((f.label, 101 / 102), ((f.label + 1) % 3, 1 / 102)):
        p = IsotonicRegression().fit(f, labels).predict(f)
        assert bool(((p.probs > 0) & (p.probs < 1)).all())
        torch.testing.assert_close(p.confidence, torch.full((100,), value, dtype=torch.float64))


def test_monotone() -> None:
    f, labels = drawn()
    order = f.confidence.argsort()
    assert bool((IsotonicRegression().fit(f, labels).predict(f).confidence[order].diff() >= 0).all())
