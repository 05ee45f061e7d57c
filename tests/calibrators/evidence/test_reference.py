"""Distances to reference samples: parity with loops, leaving samples out, special cases, storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp.calibrators.evidence.reference import Reference, layer_evidence, make_reference
from salgp.features import Features
from salgp.storage import pack, unpack


def samples(n: int = 60, seed: int = 0, shift: float = 0.0) -> tuple[Features, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    centres = 3.0 * torch.eye(3, 5)
    a = centres[labels] + torch.randn(n, 5, generator=g) + shift
    b = torch.cat([a, torch.randn(n, 4, generator=g)], dim=1)
    return Features(2.0 * a[:, :3], {"a": a, "b": b}), labels


def loops(
    reference: Reference, features: Features, leave: list[int] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, sample by sample and in NumPy."""
    A, N = np.zeros((len(features), 2)), np.zeros((len(features), 2))
    for j, (name, space) in enumerate(reference.layers.items()):
        for i, x in enumerate(features.layers[name].double().numpy()):
            y = (x / np.linalg.norm(x) - space.centre.numpy()) @ space.directions.numpy()
            d = np.linalg.norm(space.points.numpy() - y, axis=1)
            keep = np.arange(len(d)) != (leave[i] if leave else -1)
            own = reference.classes.numpy() == int(features.label[i])
            near = [np.sort(d[keep & mask])[: reference.k].mean() for mask in (own, ~own, np.ones_like(own))]
            A[i, j], N[i, j] = np.log(near[1]) - np.log(near[0]), np.log(near[2])
    return A, N


def test_matches_the_definition() -> None:
    reference = make_reference(*samples(), k=4)
    query, _ = samples(17, seed=1)
    found = layer_evidence(reference, query)
    A, N = loops(reference, query)
    np.testing.assert_allclose(found.agreement.numpy(), A, atol=1e-6)
    np.testing.assert_allclose(found.novelty.numpy(), N, atol=1e-6)


def test_a_sample_is_left_out_of_its_own_reference() -> None:
    features, labels = samples(30)
    reference = make_reference(features, labels, k=2)
    own = torch.arange(30)
    own[5] = -1
    found = layer_evidence(reference, features, own)
    _, N = loops(reference, features, own.tolist())
    np.testing.assert_allclose(found.novelty.numpy(), N, atol=1e-5)
    assert (found.novelty > layer_evidence(reference, features).novelty).all(dim=1).sum() == 29


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, (query, _) = make_reference(*samples()), samples(23, seed=2)
    whole = layer_evidence(reference, query)
    monkeypatch.setattr("salgp.neighbours.CHUNK_ENTRIES", 2 * 7 * len(reference))
    parts = layer_evidence(reference, query)
    torch.testing.assert_close(whole.agreement, parts.agreement)
    torch.testing.assert_close(whole.novelty, parts.novelty)


def test_length_of_features_does_not_matter() -> None:
    reference, (query, _) = make_reference(*samples()), samples(9, seed=3)
    scaled = Features(query.logits, {k: 7.5 * x for k, x in query.layers.items()})
    torch.testing.assert_close(
        layer_evidence(reference, query).agreement, layer_evidence(reference, scaled).agreement
    )


def test_far_samples_are_novel_and_wrong_labels_disagree() -> None:
    reference = make_reference(*samples(150))
    near, labels = samples(60, seed=4)
    far = Features(near.logits, {k: -x for k, x in near.layers.items()})
    assert (
        layer_evidence(reference, far).novelty.median(0).values
        > layer_evidence(reference, near).novelty.median(0).values
    ).all()
    wrong = Features(3.0 * torch.nn.functional.one_hot((labels + 1) % 3, 3).float(), near.layers)
    right = Features(3.0 * torch.nn.functional.one_hot(labels, 3).float(), near.layers)
    assert (layer_evidence(reference, right).agreement.mean(0) > 0.1).all()
    assert (layer_evidence(reference, wrong).agreement.mean(0) < -0.1).all()


def test_whitened_reference_has_unit_variance() -> None:
    space = make_reference(*samples(400)).layers["a"]
    spread = space.points.std(dim=0)
    assert (spread <= 1.01).all()
    assert spread[0] > 0.99


def test_prototypes_shrink_the_reference_and_keep_the_meaning() -> None:
    features, labels = samples(300)
    small = make_reference(features, labels, form="prototypes", size=5)
    assert len(small) == 15
    assert small.classes.bincount().tolist() == [5, 5, 5]
    query, _ = samples(80, seed=5)
    full = layer_evidence(make_reference(features, labels), query).agreement[:, 0]
    assert np.corrcoef(full, layer_evidence(small, query).agreement[:, 0])[0, 1] > 0.8
    again = make_reference(features, labels, form="prototypes", size=5)
    assert torch.equal(again.layers["b"].points, small.layers["b"].points)


def test_more_prototypes_than_samples_keeps_every_sample() -> None:
    features, labels = samples(12)
    assert len(make_reference(features, labels, form="prototypes", size=50)) == 12


@pytest.mark.parametrize("form", ["full", "prototypes", "statistics"])
def test_a_class_without_reference_samples_is_judged_as_usual(form: str) -> None:
    features, labels = samples(90)
    some = labels != 2
    reference = make_reference(features[some], labels[some], form=form, size=10)
    query = Features(torch.tensor([[0.0, 0.0, 5.0]]), {k: x[:1] for k, x in features.layers.items()})
    found = layer_evidence(reference, query).agreement[0]
    own = torch.arange(60) if form == "full" else None
    seen = layer_evidence(reference, features[some], own)
    present = features[some].label != 2
    np.testing.assert_allclose(found, np.median(seen.agreement[present], axis=0), atol=1e-6)
    assert (found > 0).all()


@pytest.mark.parametrize("form", ["full", "prototypes", "statistics"])
def test_samples_of_unknown_class_do_not_stand_for_class_0(form: str) -> None:
    """Class 0 has no reference sample, so its agreement is the usual one, and not that with strangers."""
    features, labels = samples(90)
    reference = make_reference(features, torch.where(labels == 0, -1, labels), form=form, size=10)
    query = Features(torch.tensor([[5.0, 0.0, 0.0]]), {k: x[:1] for k, x in features.layers.items()})
    own = torch.arange(90) if form == "full" else None
    seen = layer_evidence(reference, features, own).agreement[features.label != 0]
    assert reference.typical is not None
    np.testing.assert_allclose(reference.typical, np.median(seen, axis=0), atol=1e-6)
    np.testing.assert_allclose(layer_evidence(reference, query).agreement[0], reference.typical, atol=1e-6)


@pytest.mark.parametrize("form", ["full", "prototypes", "statistics"])
def test_a_reference_without_class_scores_is_judged_by_its_true_classes(form: str) -> None:
    """The usual agreement is the one that a network that is always right would have."""
    features, labels = samples(90)
    labels = torch.where(torch.arange(90) < 6, -1, torch.where(labels == 2, 0, labels))
    silent = Features(torch.zeros(90, 3), features.layers)
    found = make_reference(silent, labels, form=form, size=10).typical
    right = Features(5.0 * torch.eye(3)[labels.clamp_min(0)], features.layers)
    reference = make_reference(right, labels, form=form, size=10)
    own = torch.arange(90) if form == "full" else None
    seen = layer_evidence(reference, right, own).agreement[labels >= 0]
    assert found is not None
    np.testing.assert_allclose(found, np.median(seen, axis=0), atol=1e-6)
    assert (found > 0.1).all()


def test_a_reference_without_scores_and_known_classes_has_no_usual_agreement() -> None:
    features, _ = samples(12)
    silent = Features(torch.zeros(12, 3), features.layers)
    reference = make_reference(silent, torch.full((12,), -1))
    assert (layer_evidence(reference, features).agreement == 0).all()


def test_a_reference_of_one_class_says_nothing_about_agreement() -> None:
    features, _ = samples(12)
    reference = make_reference(features, torch.zeros(12, dtype=torch.long))
    assert (layer_evidence(reference, features).agreement == 0).all()


def test_constant_and_tiny_layers_stay_finite() -> None:
    x = torch.ones(6, 4)
    features = Features(torch.eye(3).repeat(2, 1), {"constant": x, "zero": 0 * x})
    found = layer_evidence(make_reference(features, torch.arange(6) % 3), features)
    assert found.agreement.isfinite().all()
    assert found.novelty.isfinite().all()


def test_survives_storage_bit_for_bit() -> None:
    reference, (query, _) = make_reference(*samples()), samples(9, seed=6)
    tensors: dict[str, torch.Tensor] = {}
    again = unpack(pack(reference, tensors), tensors)
    assert torch.equal(layer_evidence(again, query).agreement, layer_evidence(reference, query).agreement)


@pytest.mark.parametrize("wrong", [{"k": 0}, {"width": 0}, {"size": 0}])
def test_wrong_arguments_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_reference(*samples(), **wrong)
