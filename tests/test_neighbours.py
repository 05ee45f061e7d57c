"""Nearest neighbours and the methods that rest on them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from salgp import Features, neighbours
from salgp.calibrators.density import (
    DeepKNN,
    DensityAwareCalibration,
    TrustScore,
    _fit_weights,
    _squared_error,
)
from salgp.metrics import auroc, nll
from salgp.neighbours import class_distances, nearest


def points(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("d", [1, 7])
def test_nearest_equals_sklearn(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, q = points(200, d), points(50, d, 1)
    for entries in (2**24, 1000):  # in one piece and in many
        monkeypatch.setattr(neighbours, "ENTRIES", entries)
        distance, index = nearest(q, x, 5)
        expected, rows = NearestNeighbors(n_neighbors=5).fit(x.numpy()).kneighbors(q.numpy())
        np.testing.assert_allclose(distance.numpy(), expected, atol=1e-12)
        np.testing.assert_array_equal(index.numpy(), rows)
        own, _ = nearest(x, x, 3, leave_one_out=True)
        np.testing.assert_allclose(
            own.numpy(), NearestNeighbors(n_neighbors=3).fit(x.numpy()).kneighbors()[0], atol=1e-12
        )


def test_duplicates_are_at_distance_zero_even_far_from_the_origin() -> None:
    x = points(50, 64, dtype=torch.float32) + 1e3
    assert float(nearest(x, x, 1)[0].max()) == 0.0
    assert float(nearest(x.repeat(2, 1), x.repeat(2, 1), 1, leave_one_out=True)[0].max()) == 0.0


def test_too_small_a_reference() -> None:
    assert nearest(points(3, 2), points(4, 2), 10)[0].shape == (3, 4)
    with pytest.raises(ValueError, match="no neighbours to compare with"):
        nearest(points(1, 2), points(1, 2), 1, leave_one_out=True)


def test_class_distances_equal_a_double_loop() -> None:
    x, q = points(30, 3), points(12, 3, 1)
    classes, label = torch.arange(30) % 3, torch.arange(12) % 4  # class 3 has no reference
    same, other = class_distances(q, label, x, classes)
    for i in range(12):
        d = [(float((q[i] - x[j]).norm()), int(classes[j]) == int(label[i])) for j in range(30)]
        assert float(same[i]) == pytest.approx(min((v for v, own in d if own), default=math.inf))
        assert float(other[i]) == pytest.approx(min(v for v, own in d if not own))


def test_left_out_a_row_is_not_its_own_neighbour_of_any_class() -> None:
    """The label of a row, as the network predicts it, need not be its class."""
    x, classes = points(30, 3), torch.arange(30) % 3
    label = torch.where(torch.arange(30) % 4 == 0, (classes + 1) % 3, classes)
    same, other = class_distances(x, label, x, classes, leave_one_out=True)
    for i in range(30):
        d = [(float((x[i] - x[j]).norm()), int(classes[j] == label[i])) for j in range(30) if j != i]
        assert float(same[i]) == pytest.approx(min(v for v, own in d if own))
        assert float(other[i]) == pytest.approx(min(v for v, own in d if not own))


def test_huge_and_tiny_features_are_searched_alike() -> None:
    x, q = points(300, 5), points(20, 5, 1)
    index = nearest(q, x, 4)[1]
    for size in (1e-25, 1e25):
        assert torch.equal(nearest(size * q, size * x, 4)[1], index)


def shifted_world(n: int = 300, seed: int = 0) -> tuple[Features, torch.Tensor]:
    """Two clusters a network knows, and a share of samples far away on which it is as sure and no better than
    chance.
    """
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 2, (n,), generator=generator)
    far = torch.rand(n, generator=generator) < 0.4
    x = torch.randn(n, 4, generator=generator) * 0.3 + 2 * labels[:, None] - 1
    x = torch.where(
        far[:, None], torch.randn(n, 4, generator=generator) * torch.tensor([1.0, -1.0, 1.0, -1.0]) * 6, x
    )
    guess = torch.where(far, torch.randint(0, 2, (n,), generator=generator), labels)
    z = torch.nn.functional.one_hot(guess, 2) * (3 + torch.rand(n, 1, generator=generator))
    return Features(z, {"noise": torch.randn(n, 3, generator=generator), "body": x}), labels


def reference() -> tuple[Features, torch.Tensor]:
    f, labels = shifted_world(400, seed=9)
    kept = f.layers["body"].norm(dim=1) < 4
    return f[kept], labels[kept]


def test_density_gradient() -> None:
    z, labels = points(20, 4), torch.arange(20) % 4
    T = (1 + points(20, 1, 3).abs()[:, 0]).requires_grad_()
    p = torch.softmax(z / T[:, None], 1)
    loss = (p - torch.nn.functional.one_hot(labels, 4)).pow(2).sum(1).mean()
    value, slope = _squared_error(z, labels, T.detach())
    assert value == pytest.approx(float(loss.detach()))
    torch.testing.assert_close(slope, torch.autograd.grad(loss, T)[0])


def test_density_weights_are_an_optimum() -> None:
    z, labels = 3 * points(200, 3), torch.arange(200) % 3
    labels = z.argmax(1).where(torch.arange(200) % 2 > 0, labels)
    S = points(200, 2, 4).abs()
    w = _fit_weights(z, labels, S)
    best = _squared_error(z, labels, (w[0] + S @ w[1:]).clamp_min(0.05))[0]
    for seed in range(20):
        other = (w + 0.1 * points(3, 1, seed)[:, 0]).clamp_min(0)
        assert best <= _squared_error(z, labels, (other[0] + S @ other[1:]).clamp_min(0.05))[0] + 1e-7


def test_density_lowers_confidence_far_from_the_training_data() -> None:
    f, labels = shifted_world()
    new, truth = shifted_world(seed=1)
    fitted = DensityAwareCalibration(k=10).fit(f, labels, reference())
    p = fitted.predict(new)
    far = new.layers["body"].norm(dim=1) > 4
    assert float(p.confidence[far].mean()) < float(p.confidence[~far].mean()) - 0.1
    assert nll(p.probs, truth) < nll(new.probs, truth)
    assert fitted.reference_["body"].shape == reference()[0].layers["body"].shape


@pytest.mark.parametrize(
    "method",
    [TrustScore(), DeepKNN(), DensityAwareCalibration(k=10)],
)
@pytest.mark.parametrize("known", [True, False])
def test_neighbours_spot_errors(method: TrustScore, known: bool) -> None:
    f, labels = shifted_world()
    new, truth = shifted_world(seed=1)
    p = method.fit(f, labels, reference() if known else None).predict(new)
    right = (p.label == truth).numpy()
    raw = auroc(new.confidence.numpy(), right)
    assert auroc(p.confidence.numpy(), right) > raw + 0.1


def test_trust_score_uses_the_named_layer_and_refuses_others() -> None:
    f, labels = shifted_world(100)
    assert TrustScore().fit(f, labels).layer_ == "body"
    assert TrustScore(layer="noise").fit(f, labels).x_.shape[1] == 3
    with pytest.raises(KeyError, match="known layers: noise, body"):
        TrustScore(layer="tail").fit(f, labels)


def test_deep_knn_credibility_by_hand() -> None:
    f, labels = shifted_world(60)
    fitted = DeepKNN(k=4).fit(f, labels, reference())
    new = shifted_world(5, seed=3)[0]
    known, classes = reference()
    rank = fitted.nonconformity_.numpy()
    for i, got in enumerate((-fitted.predict(new).novelty).tolist()):
        alpha = 0
        for name in ("noise", "body"):
            rows = (
                NearestNeighbors(n_neighbors=4)
                .fit(known.layers[name].numpy())
                .kneighbors(new.layers[name][i : i + 1].numpy())[1][0]
            )
            alpha += int((classes[rows] != new.label[i]).sum())
        share = (np.sum(rank >= alpha) + 0.5) / (len(rank) + 1)
        assert got == pytest.approx(math.log(share / (1 - share)), abs=1e-6)
