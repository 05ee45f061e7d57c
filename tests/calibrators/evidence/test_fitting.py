"""What a fit chooses: the layer weight, the shift score, the weights of windows; and the rows it keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from blobs import augmented_world, fitted, world
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.fitting import (
    LAYER_WEIGHTS,
    _folds,
    choose_layer_weight,
    fit_mixture,
    fit_score,
)
from salgp.calibrators.evidence.mixture import score_inputs


def losses(t: Tensor, layers: Tensor, correct: Tensor) -> list[np.ndarray]:
    out = []
    for b in LAYER_WEIGHTS:
        p = 1 / (1 + np.exp(-((1 - b) * t.numpy() + b * layers.numpy())))
        out.append(-np.where(correct.numpy() > 0, np.log(p), np.log(1 - p)))
    return out


def test_the_layer_weight_is_the_smallest_within_one_standard_error() -> None:
    g = torch.Generator().manual_seed(0)
    t, layers = torch.randn(2, 300, generator=g).double().unbind()
    correct = torch.bernoulli(torch.sigmoid(0.4 * t + 1.2 * layers), generator=g)
    each = losses(t, layers, correct)
    best = min(each, key=lambda loss: loss.mean())
    allowed = [
        b
        for b, loss in zip(LAYER_WEIGHTS, each, strict=True)
        if loss.mean() <= best.mean() + (loss - best).std(ddof=1) / 300**0.5
    ]
    found = choose_layer_weight(t, layers, correct)
    assert found == min(allowed)
    assert found > 0


@pytest.mark.parametrize(("errors", "weight"), [(9, 0.0), (10, 1.0)])
def test_with_fewer_than_ten_errors_the_layers_get_no_weight(errors: int, weight: float) -> None:
    correct = (torch.arange(400) >= errors).double()
    t = torch.full((400,), 3.0).double()
    assert choose_layer_weight(t, 6 * (2 * correct - 1), correct) == weight


def test_layers_must_beat_a_slope_and_a_constant() -> None:
    """What the layers add here is only that the network is too sure by a constant."""
    g = torch.Generator().manual_seed(1)
    t = 2 + torch.randn(500, generator=g).double()
    correct = torch.bernoulli(torch.sigmoid(0.6 * t - 1.0), generator=g)
    layers = 0.6 * t - 1.0
    each = losses(t, layers, correct)
    assert each[-1].mean() < each[0].mean() - 0.05  # beats temperature scaling by far
    assert choose_layer_weight(t, layers, correct) == 0.0


def test_noise_gets_no_weight() -> None:
    g = torch.Generator().manual_seed(1)
    t = torch.randn(500, generator=g).double() + 1
    correct = torch.bernoulli(torch.sigmoid(t), generator=g)
    assert choose_layer_weight(t, t + torch.randn(500, generator=g), correct) == 0.0


def test_the_order_of_rows_does_not_matter() -> None:
    rows = fitted().training_rows_
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    a, b = (fit_mixture(r, 3, class_sd=1.0, layer_weight=None, seed=0) for r in (rows, rows[order]))
    assert a.layer_weight == b.layer_weight
    for one, other in ((a.in_domain, b.in_domain), (a.shift, b.shift)):
        torch.testing.assert_close(one.weights, other.weights, atol=1e-6, rtol=0)
        torch.testing.assert_close(one.offsets, other.offsets, atol=1e-6, rtol=0)
    torch.testing.assert_close(a.score.weights, b.score.weights, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(a.window.weights, b.window.weights, atol=1e-5, rtol=1e-5)
    assert a.window.over_prediction == pytest.approx(b.window.over_prediction, abs=1e-5)


def test_augmented_samples_share_the_fold_of_their_original() -> None:
    rows = fitted().training_rows_
    fold = _folds(rows)
    assert fold[:250].tolist() == fold[250:500].tolist() == fold[500:].tolist()
    assert max(torch.bincount(fold[:250])) - min(torch.bincount(fold[:250])) <= 1


def test_the_shift_score_is_a_ridge_logistic_regression() -> None:
    from sklearn.linear_model import LogisticRegression

    rows = fitted().training_rows_
    score, left_out = fit_score(rows)
    x = score_inputs(rows.samples)
    z = ((x - score.centre) / score.scale).clamp(-6, 6).numpy()
    first = rows.original
    torch.testing.assert_close(score.centre, x[first].mean(dim=0))
    y = (~first).double().numpy()
    weight = np.where(y > 0, 0.1 / y.mean(), 0.9 / (1 - y.mean()))
    peer = LogisticRegression(C=1 / 20.0, tol=1e-8, max_iter=5000).fit(z, y, sample_weight=weight)
    np.testing.assert_allclose(score.weights[1:].numpy(), peer.coef_[0], atol=2e-4)
    assert float(score.weights[0]) == pytest.approx(float(peer.intercept_[0]), abs=1e-2)
    assert float(left_out[~first].mean()) > float(left_out[first].mean())
    assert float((left_out - score(rows.samples)).abs().max()) > 1e-4  # other rows, other weights


def test_joined_rows_keep_their_groups_apart() -> None:
    rows = fitted().training_rows_
    both = rows.joined(rows)
    assert len(both) == 2 * len(rows)
    assert len(both.group.unique()) == 500
    assert rows.families == [1, 2]
    back = both.without(rows)
    assert len(back) == len(rows)
    with pytest.raises(ValueError, match="another"):
        rows.without(back[torch.arange(3)].joined(back[torch.arange(3)]))


def test_augmented_samples_teach_little_in_domain() -> None:
    features, labels = augmented_world(250, 1)
    wrong = torch.where(features.families > 0, (features.label + 1) % 3, labels)
    spoilt = LayerEvidence(layer_weight=1.0).fit(features, wrong, reference=world(400, 0))
    usual = fitted(layer_weight=1.0)
    samples = usual._samples(world(200, 2)[0])
    inside = [torch.sigmoid(c.mixture_.inside(samples)).mean() for c in (usual, spoilt)]
    assert abs(float(inside[0] - inside[1])) < 0.1
    shifted = [torch.sigmoid(c.mixture_.shifted(samples)).mean() for c in (usual, spoilt)]
    assert float(shifted[1]) < 0.1 < 0.5 < float(shifted[0])
