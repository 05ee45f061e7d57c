"""Agreement and novelty against double loops, and what must not break them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from blobs import fitted, world
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.layer_spaces import (
    Evidence,
    Reference,
    ReferenceSettings,
    coordinates,
    layer_evidence,
    make_reference,
    principal_directions,
    squared_distances,
    unit_length,
    whitened_space,
)
from salgp.features import Features


def looped(reference: Reference, features: Features) -> tuple[np.ndarray, np.ndarray]:
    """Agreement and novelty, one sample, layer and point at a time."""
    n, L = len(features), len(reference.spaces)
    agreement, novelty = np.zeros((n, L)), np.zeros((n, L))
    classes = reference.classes.tolist()
    for j, (name, space) in enumerate(reference.spaces.items()):
        V, centre = space.directions.double().numpy(), space.centre.double().numpy()
        points = reference.points[j].double().numpy()[:, : V.shape[1]]
        for i in range(n):
            x = features.layers[name][i].double().numpy()
            place = x / np.linalg.norm(x) @ V - centre
            least = [math.inf] * reference.n_classes
            for point, c in zip(points, classes, strict=True):
                least[c] = min(least[c], float(np.linalg.norm(place - point)))
            y = int(features.label[i])
            other = min(least[c] for c in range(reference.n_classes) if c != y)
            lacking = math.isinf(least[y]) or math.isinf(other)
            agreement[i, j] = math.inf if lacking else math.log(other / least[y])
            novelty[i, j] = math.log(min(least))
    return agreement, novelty


@pytest.mark.parametrize("lacking", [None, 1])
def test_agreement_and_novelty_equal_a_double_loop(lacking: int | None) -> None:
    """Layers of unequal width; also where a class has no points."""
    known, labels = world(60, 0)
    labels = labels if lacking is None else torch.where(labels == lacking, -1, labels)
    reference = make_reference(known, labels)
    new, _ = world(40, 1)
    found = layer_evidence(reference, new)
    agreement, novelty = looped(reference, new)
    np.testing.assert_allclose(found.agreement.numpy(), agreement, atol=2e-4)
    np.testing.assert_allclose(found.novelty.numpy(), novelty, atol=2e-4)
    assert np.isinf(agreement).any() == (lacking is not None)


def test_samples_of_unknown_class_are_left_out_of_the_points() -> None:
    known, labels = world(60, 0)
    some = torch.arange(60) % 3 > 0
    hidden = make_reference(known, torch.where(some, labels, -1))
    assert len(hidden.classes) == int(some.sum())
    assert hidden.classes.tolist() == sorted(labels[some].tolist())


def test_a_reference_without_any_point_says_nothing() -> None:
    known, labels = world(30, 0)
    found = layer_evidence(make_reference(known, torch.full_like(labels, -1)), known)
    assert bool(found.agreement.isinf().all())
    assert bool((found.novelty == 0).all())


def test_a_class_without_points_changes_no_other_confidence_to_nothing() -> None:
    features, labels = world(120, 2)
    known, classes = world(200, 0)
    calibrator = LayerEvidence(layers_in_domain=True).fit(
        features, labels, reference=(known, torch.where(classes == 2, -1, classes))
    )
    p = calibrator.predict(features)
    assert p.confidence.isfinite().all()
    lacking = features.label == 2  # the agreement counts as usual there
    samples = calibrator._samples(features)
    assert bool((samples.agreement[lacking] == 0).all())
    assert bool((samples.agreement[~lacking] != 0).any())


@pytest.mark.parametrize("size", [1e-75, 1e74])
def test_the_length_of_features_does_not_matter(size: float) -> None:
    known, labels = world(60, 0)
    scaled = [
        Features(f.logits, {name: size * x.double() for name, x in f.layers.items()})
        for f in (known, world(20, 1)[0])
    ]
    a = layer_evidence(make_reference(known, labels), world(20, 1)[0])
    b = layer_evidence(make_reference(scaled[0], labels), scaled[1])
    torch.testing.assert_close(a.agreement, b.agreement, atol=2e-2, rtol=1e-2)  # points in half precision
    torch.testing.assert_close(a.novelty, b.novelty, atol=2e-2, rtol=1e-2)
    torch.testing.assert_close(b.norm / a.norm, torch.full((20,), size, dtype=torch.float64))


def test_one_sample_as_in_a_batch_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, (new, _) = fitted().reference_, world(30, 1)
    whole = layer_evidence(reference, new)
    monkeypatch.setattr("salgp.calibrators.evidence.layer_spaces.ENTRIES", 7 * reference.columns[1].numel())
    pieces = layer_evidence(reference, new)
    single = [layer_evidence(reference, new[[i]]) for i in range(30)]
    for name in ("agreement", "novelty", "coordinates", "norm"):
        expected = getattr(whole, name)
        alone = torch.cat([getattr(one, name) for one in single])
        torch.testing.assert_close(getattr(pieces, name), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(alone, expected, atol=1e-5, rtol=1e-5)


def test_no_samples_have_no_evidence() -> None:
    found = layer_evidence(fitted().reference_, world(3, 1)[0][:0])
    assert isinstance(found, Evidence)
    assert found.agreement.shape == (0, 2)


def test_agreement_is_bounded_where_a_sample_is_a_point() -> None:
    known, labels = world(60, 0)
    right = Features(50.0 * torch.eye(3)[labels], known.layers)
    found = layer_evidence(make_reference(known, labels), right)
    assert float(found.novelty.min()) == pytest.approx(math.log(0.03), abs=1e-6)
    assert bool((found.agreement < 6).all())


def test_whitening_makes_unit_covariance() -> None:
    """But for the thousandth of the largest variance that keeps noise small."""
    x = world(400, 0)[0].layers["two"].double()
    unit = unit_length(x)
    space = whitened_space(*principal_directions(unit), 4)
    white = space.whitened(x).double().numpy()
    variance = np.linalg.eigvalsh(np.cov(unit.numpy().T))[::-1][:4]
    np.testing.assert_allclose(
        np.cov(white.T), np.diag(variance / (variance + 1e-3 * variance[0])), atol=1e-5
    )
    np.testing.assert_allclose(white.mean(axis=0), 0, atol=1e-6)


def test_more_features_than_samples_have_the_same_directions() -> None:
    x = torch.randn(20, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    _, variance, V = principal_directions(x)
    expected = np.linalg.eigvalsh(np.cov(x.numpy().T))[::-1][:20]
    np.testing.assert_allclose(variance.numpy(), expected, atol=1e-10)
    assert V.shape == (30, 20)


def test_many_samples_of_a_class_become_few_points() -> None:
    known, labels = world(300, 0)
    reference = make_reference(known, labels, ReferenceSettings(size=5))
    assert reference.classes.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    x = coordinates(reference, known)[0]
    D = squared_distances(reference, x)
    rows = torch.arange(300)
    assert bool((D[:, rows, labels] <= D.amax(dim=2)).all())
    assert float((D.argmin(dim=2) == labels).double().mean()) > 0.8


def test_the_last_layer_gives_the_norm() -> None:
    new, _ = world(20, 1)
    found = layer_evidence(fitted().reference_, new)
    length = new.layers["two"].double().norm(dim=1)
    torch.testing.assert_close(found.norm, length, atol=1e-6, rtol=0)


def test_coordinates_are_the_leading_ones_of_every_layer() -> None:
    g = torch.Generator().manual_seed(0)
    wide, narrow = torch.randn(120, 40, generator=g), torch.randn(120, 5, generator=g)
    features = Features(torch.randn(120, 3, generator=g), {"wide": wide, "narrow": narrow})
    reference = make_reference(features, torch.arange(120) % 3, ReferenceSettings(width=32))
    found = layer_evidence(reference, features[:7]).coordinates
    assert found.shape == (7, 16 + 5)
    columns: dict[str, Tensor] = {"wide": found[:, :16], "narrow": found[:, 16:]}
    for name, x in columns.items():
        expected = reference.spaces[name].whitened(features.layers[name][:7])[:, :16].double()
        torch.testing.assert_close(x, expected)
