"""Calibration samples as their own reference: evidence as new samples will have it."""

from __future__ import annotations

import pytest
import torch
from blobs import augmented_world, world

from salgp.calibrators.evidence import calibrator as module
from salgp.calibrators.evidence import layer_spaces
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.cross_fitting import fold_references, own_reference, split_reference
from salgp.calibrators.evidence.layer_spaces import (
    Reference,
    ReferenceSettings,
    layer_evidence,
    make_reference,
)
from salgp.features import Features


def test_evidence_is_of_the_kind_that_new_samples_have() -> None:
    features, labels = world(150, 0)
    whole = make_reference(features, labels)
    _, seen = own_reference(features, labels, ReferenceSettings())
    fresh, itself = layer_evidence(whole, world(600, 1)[0]), layer_evidence(whole, features)
    for name in ("agreement", "novelty"):
        a, b = getattr(seen, name), getattr(fresh, name)
        assert float(((a.mean(dim=0) - b.mean(dim=0)).abs() / b.std(dim=0)).max()) < 0.25
    assert float(itself.novelty.mean()) < float(fresh.novelty.mean()) - 1.0  # each its own nearest point
    torch.testing.assert_close(seen.coordinates, itself.coordinates)
    torch.testing.assert_close(seen.norm, itself.norm)


def test_folds_leave_out_a_sample_and_all_that_is_made_of_it() -> None:
    features, labels = augmented_world(60, 0)
    rows_seen = []
    for reference, samples, rows in fold_references(features, labels, ReferenceSettings()):
        assert len(reference.classes) == 54
        assert len(samples) == len(rows) == 18
        groups = features.groups[rows]
        assert len(groups.unique()) == 6
        assert torch.bincount(groups)[groups.unique()].tolist() == [3] * 6
        rows_seen.append(rows)
    assert sorted(torch.cat(rows_seen).tolist()) == list(range(180))


def test_a_fold_is_compared_with_a_reference_of_the_others() -> None:
    """Narrowed features are those of the layer as far as unit length and whitening go."""
    features, labels = world(60, 0)
    reference, samples, rows = next(iter(fold_references(features, labels, ReferenceSettings())))
    others = torch.tensor([i for i in range(60) if i not in rows.tolist()])
    direct = make_reference(features[others], labels[others])
    a, b = layer_evidence(reference, samples), layer_evidence(direct, features[rows])
    torch.testing.assert_close(a.agreement, b.agreement, atol=0.02, rtol=0.02)  # points in half precision
    torch.testing.assert_close(a.novelty, b.novelty, atol=0.02, rtol=0.02)


def test_every_second_sample_becomes_the_reference_where_there_are_many(monkeypatch) -> None:
    features, labels = augmented_world(60, 0)
    known, rest = split_reference(features)
    assert len(known) == 30
    assert len(rest) == 3 * 30
    assert bool((features.families[known] == 0).all())
    assert not set(features.groups[known].tolist()) & set(features.groups[rest].tolist())
    monkeypatch.setattr(module, "MANY", 50)
    calibrator = LayerEvidence().fit(features, labels)
    assert len(calibrator.reference_.classes) == 30
    assert len(calibrator.training_rows_) == 90


def test_two_samples_are_enough_for_folds() -> None:
    features = Features(torch.eye(2), {"a": torch.eye(2)})
    _, found = own_reference(features, torch.arange(2), ReferenceSettings())
    assert bool(found.agreement.isinf().all())  # no other class, or no own, among the others
    assert bool(found.novelty.isfinite().all())


def test_the_cost_without_a_reference_is_linear_in_the_calibration_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Distances from samples to reference points, over a whole fit: the calibration set is condensed."""
    pairs = []
    real = layer_spaces.squared_distances

    def counted(reference: Reference, x: torch.Tensor) -> torch.Tensor:
        pairs.append(x.shape[1] * reference.columns[0].shape[-1])
        return real(reference, x)

    monkeypatch.setattr(layer_spaces, "squared_distances", counted)
    totals = []
    for n in (1500, 3000, 6000):
        pairs.clear()
        LayerEvidence(size=60).fit(*world(n, 0))
        totals.append(sum(pairs))
    assert totals[0] > 1500
    assert totals[1] / totals[0] < 2.2
    assert totals[2] / totals[1] < 2.2
