"""The page "The model on one page", written again in plain NumPy, predicts what the library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import salgp

NOISES = (0.7, 1.5)


def world(n: int, seed: int, noise: float = 0.0) -> tuple[salgp.Features, torch.Tensor]:
    """Four classes seen by two layers of unequal width."""
    g, fixed = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    y = torch.randint(4, (n,), generator=g)
    x = 2.2 * torch.eye(4, 24)[y] + (1 + noise) * 0.7 * torch.randn(n, 24, generator=g)
    mixing = torch.randn(24, 40, generator=fixed)
    return salgp.Features(3.0 * x[:, :4], {"early": torch.tanh(x @ mixing / 5), "late": x}), y


def fitted() -> salgp.LayerEvidence:
    labels = world(300, 1)[1]
    parts = []
    for family, noise in enumerate((0.0, *NOISES)):
        f = world(300, 1, noise)[0]
        parts.append(salgp.Features(f.logits, f.layers, torch.arange(300), torch.full((300,), family)))
    features = salgp.Features.concatenate(parts)
    return salgp.LayerEvidence(layers_in_domain=True).fit(features, labels.repeat(3), reference=world(500, 0))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def evidence(c: Any, z: np.ndarray, layers: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Section 1 of the page."""
    y, C, rows = z.argmax(axis=1), z.shape[1], np.arange(len(z))
    A, N, places = [], [], []
    for j, (x, space) in enumerate(zip(layers, c.reference_.spaces.values(), strict=True)):
        V, mu = space.directions.double().numpy(), space.centre.double().numpy()  # scaled, and mu V
        p = x / np.linalg.norm(x, axis=1, keepdims=True) @ V - mu
        points = c.reference_.points[j].double().numpy()[:, : V.shape[1]]
        D = np.linalg.norm(p[:, None] - points[None], axis=2)
        classes = c.reference_.classes.numpy()
        d = np.stack([D[:, classes == k].min(axis=1) for k in range(C)], axis=1)
        own, other = d[rows, y], np.where(np.arange(C) == y[:, None], np.inf, d).min(axis=1)
        A.append(np.log(other) - np.log(own))
        N.append(np.log(d.min(axis=1)))
        places.append(p[:, :16])
    (a0, a1), (n0, n1) = c.scales_.agreement.numpy(), c.scales_.novelty.numpy()
    tempered = z / c.scales_.temperature
    rest = np.where(np.arange(C) == y[:, None], -np.inf, tempered)
    t = np.minimum(tempered[rows, y] - np.log(np.exp(rest).sum(axis=1)), 20)
    excess = np.linalg.norm(layers[-1], axis=1) / float(c.scales_.largest_norm)
    A, N = (np.stack(A, axis=1) - a0) / a1, (np.stack(N, axis=1) - n0) / n1
    return {"y": y, "t": t, "A": A, "N": N, "p": np.hstack(places), "excess": np.maximum(excess, 1)}


def expert(model: Any, e: dict[str, np.ndarray]) -> np.ndarray:
    """Section 2: one monotone regression."""
    a, b, *u, v = model.weights.numpy()
    f = a + b * e["t"] + e["A"] @ np.array(u) - v * np.log1p(np.maximum(e["N"][:, -1], 0))
    return f + model.offsets.numpy()[e["y"]]


def confidence(c: Any, z: np.ndarray, layers: list[np.ndarray], window: np.ndarray) -> np.ndarray:
    """Sections 2 and 3."""
    e, m, families = evidence(c, z, layers), c.mixture_, len(NOISES)
    y, f_in, f_shift = e["y"], expert(m.in_domain, e), expert(m.shift, e)
    q = m.score.numpy()[0] + np.hstack([e["A"], e["N"], e["p"]]) @ m.score.numpy()[1:]
    s = np.stack([sigmoid(q), sigmoid(f_shift)], axis=1)
    s = (s - m.window.centre.numpy()) / m.window.scale.numpy()
    f = np.empty(len(z))
    for number in np.unique(window):
        here = np.flatnonzero(window == number)
        n, u = len(here), s[here].mean(axis=0)
        shrunk = u**3 / (u**2 + m.window.noise / n)
        k = np.clip(m.window.weights.numpy() @ (np.sign(shrunk) * np.log1p(np.abs(shrunk))), 0, 1)
        for i in here:
            expected = 1 + (n - 1) * float(m.window.shares[y[i]])
            r = max(0.0, np.log((y[here] == y[i]).sum() / expected))
            over = r**3 / (r**2 + 4 / expected)
            f[i] = f_in[i] + k * (f_shift[i] - f_in[i]) - k * m.window.over_prediction * over
            f[i] /= np.sqrt(1 + np.pi / 8 * k**2 * m.shift_variance / (families - 1))
    chance = -np.log(z.shape[1] - 1)
    return sigmoid(chance + (f - chance) / e["excess"])


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_page_predicts_what_the_library_does(factor: float) -> None:
    calibrator = fitted()
    for noise in (0.0, 0.7, 2.0):
        found, _ = world(150, 5, noise)
        layers = {name: factor * x for name, x in found.layers.items()}
        features = salgp.Features(found.logits, layers)
        arrays = features.logits.double().numpy(), [x.double().numpy() for x in layers.values()]
        for context, window in ((None, np.arange(150)), (50, np.arange(150) // 50)):
            expected = calibrator.predict(features, context).confidence.numpy()
            np.testing.assert_allclose(confidence(calibrator, *arrays, window), expected, rtol=0, atol=1e-6)
