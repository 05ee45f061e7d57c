"""What a fit chooses: layers in domain or not, shift score, weights of windows; and the rows it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blobs import augmented_world, fitted, world
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.fitting import fit_mixture, fit_score, layers_help


def loss(f: Tensor, correct: Tensor) -> np.ndarray:
    p = 1 / (1 + np.exp(-f.numpy()))
    return -np.where(correct.numpy() > 0, np.log(p), np.log(1 - p))


@pytest.mark.parametrize("strength", [0.02, 0.2, 1.2])
def test_layers_must_beat_the_network_by_one_standard_error(strength: float) -> None:
    from sklearn.linear_model import LogisticRegression

    g = torch.Generator().manual_seed(0)
    t, layers = torch.randn(2, 300, generator=g).double().unbind()
    layers = 0.4 * t + strength * layers
    correct = torch.bernoulli(torch.sigmoid(layers), generator=g)
    gains = []
    for i in range(300):
        others = np.arange(300) != i
        peer = LogisticRegression(C=1e6, tol=1e-8).fit(t.numpy()[others, None], correct.numpy()[others])
        f = torch.tensor(peer.decision_function(t.numpy()[[i], None]))
        gains.append(float((loss(f, correct[[i]]) - loss(layers[[i]], correct[[i]]))[0]))
    assert layers_help(t, layers, correct) == (np.mean(gains) > np.std(gains, ddof=1) / 300**0.5)


@pytest.mark.parametrize(("errors", "help"), [(9, False), (10, True)])
def test_with_fewer_than_ten_errors_the_layers_are_not_used(errors: int, help: bool) -> None:
    correct = (torch.arange(400) >= errors).double()
    t = torch.full((400,), 3.0).double()
    assert layers_help(t, 6 * (2 * correct - 1), correct) == help


def test_layers_must_beat_a_slope_and_a_constant() -> None:
    """What the layers add here is only that the network is too sure by a constant."""
    g = torch.Generator().manual_seed(1)
    t = 2 + torch.randn(500, generator=g).double()
    correct = torch.bernoulli(torch.sigmoid(0.6 * t - 1.0), generator=g)
    layers = 0.6 * t - 1.0
    assert loss(layers, correct).mean() < loss(t, correct).mean() - 0.05  # beats temperature scaling by far
    assert not layers_help(t, layers, correct)


def test_noise_does_not_help() -> None:
    g = torch.Generator().manual_seed(1)
    t = torch.randn(500, generator=g).double() + 1
    correct = torch.bernoulli(torch.sigmoid(t), generator=g)
    assert not layers_help(t, t + torch.randn(500, generator=g), correct)


def test_the_order_of_rows_does_not_matter() -> None:
    rows = fitted().training_rows_
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    a, b = (fit_mixture(r, 3, layers_in_domain=None, seed=0) for r in (rows, rows[order]))
    assert a.layers_in_domain == b.layers_in_domain
    for one, other in ((a.in_domain, b.in_domain), (a.shift, b.shift)):
        torch.testing.assert_close(one.weights, other.weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(one.offsets, other.offsets, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.score, b.score, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(a.window.weights, b.window.weights, atol=1e-5, rtol=1e-5)
    assert a.window.over_prediction == pytest.approx(b.window.over_prediction, abs=1e-5)


def test_the_shift_score_is_a_ridge_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    rows = fitted().training_rows_
    score, X, first = fit_score(rows), rows.samples.score_inputs, rows.original
    y = (~first).double().numpy()
    weight = np.where(y > 0, 250 / 9 / 500, 1.0)  # augmented samples have a tenth of the total
    peer = LogisticRegression(C=1 / 20.0, tol=1e-10, max_iter=5000).fit(X[:, 1:].numpy(), y, weight)
    np.testing.assert_allclose(score[1:].numpy(), peer.coef_[0], atol=2e-3)
    assert float(score[0]) == pytest.approx(float(peer.intercept_[0]), abs=2e-2)
    q = X @ score
    assert float(q[~first].mean()) > float(q[first].mean()) + 0.1


def test_joined_rows_keep_their_groups_apart() -> None:
    rows = fitted().training_rows_
    both = rows.joined(rows)
    assert len(both) == 2 * len(rows)
    assert len(both.group.unique()) == 500
    assert rows.families == [1, 2]


def test_augmented_samples_teach_little_in_domain() -> None:
    features, labels = augmented_world(250, 1)
    wrong = torch.where(features.families > 0, (features.label + 1) % 3, labels)
    spoilt = LayerEvidence(layers_in_domain=True).fit(features, wrong, reference=world(400, 0))
    usual = fitted(layers_in_domain=True)
    samples = usual._samples(world(200, 2)[0])
    X, label, both = samples.design, samples.label, (usual.mixture_, spoilt.mixture_)
    inside = [torch.sigmoid(m.in_domain.log_odds(X, label)).mean() for m in both]
    assert abs(float(inside[0] - inside[1])) < 0.1
    shifted = [torch.sigmoid(m.shift.log_odds(X, label)).mean() for m in both]
    assert float(shifted[1]) < 0.1 < 0.5 < float(shifted[0])
