"""Calibration samples as their own reference: each is judged by others, as a new sample will be."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp import Features, LayerEvidence
from salgp.calibrators.evidence.classes import farness
from salgp.calibrators.evidence.left_out import FOLDS, OwnReference
from salgp.calibrators.evidence.reference import layer_evidence, make_reference
from salgp.calibrators.evidence.shift import shift_report


def world(n: int, seed: int = 0, width: int = 12) -> tuple[Features, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=g)
    logits = 2 * x[:, :3]
    labels = (logits + 1.5 * torch.randn(n, 3, generator=g)).argmax(1)
    return Features(logits, {"a": x, "b": x[:, :5] ** 3}), labels


def with_copies(features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """Originals, and one copy of each."""
    n, g = len(features), torch.Generator().manual_seed(9)
    layers = {
        name: torch.cat([x, x + 0.3 * torch.randn(x.shape, generator=g)])
        for name, x in features.layers.items()
    }
    number = torch.arange(n).repeat(2)
    family = (torch.arange(2 * n) >= n).long()
    return Features(features.logits.repeat(2, 1), layers, number, family), labels.repeat(2)


def own_of(features: Features, labels: Tensor, form: str = "full") -> OwnReference:
    first = features if features.groups is None else features[: len(features) // 2]
    plain = Features(first.logits, first.layers)
    known = make_reference(plain, labels[: len(plain)], form=form)
    return OwnReference(features, labels, known, 64, form=form)


@pytest.mark.parametrize("form", ["full", "statistics"])
def test_every_row_is_judged_by_a_reference_of_the_other_folds(form: str) -> None:
    plain, y = world(60)
    features, labels = with_copies(plain, y)
    found = own_of(features, labels, form).evidence()
    rank = plain.confidence.argsort().argsort()
    for fold in range(FOLDS):
        others = (rank % FOLDS != fold).nonzero()[:, 0]
        rows = (rank % FOLDS == fold).nonzero()[:, 0]
        both = torch.cat([rows, rows + 60])  # the copies of a sample are judged as it is
        expected = layer_evidence(make_reference(plain[others], y[others], form=form), features[both])
        torch.testing.assert_close(found.novelty[both], expected.novelty, atol=2e-3, rtol=0)
        torch.testing.assert_close(found.agreement[both], expected.agreement, atol=4e-3, rtol=0)
        torch.testing.assert_close(found.length[both], expected.length)


def test_a_place_is_told_in_the_space_of_all() -> None:
    features, labels = world(60)
    known = make_reference(features, labels)
    found = own_of(features, labels).evidence()
    torch.testing.assert_close(found.place, layer_evidence(known, features).place)


def test_distances_to_classes_are_of_others_too() -> None:
    features, labels = world(60)
    some = torch.tensor([3, 50, 7])
    found = own_of(features, labels).farness(some)
    rank = features.confidence.argsort().argsort()
    for place, row in enumerate(some.tolist()):
        others = (rank % FOLDS != rank[row] % FOLDS).nonzero()[:, 0]
        expected = farness(make_reference(features[others], labels[others]), features[[row]])
        torch.testing.assert_close(found[:, place], expected[:, 0], atol=4e-3, rtol=0)


@pytest.mark.parametrize("n", [2, 3, 12])
def test_few_samples(n: int) -> None:
    features, labels = world(n)
    found = own_of(features, labels).evidence()
    assert found.novelty.shape == (n, 2)
    assert bool(found.agreement.isfinite().all() and found.novelty.isfinite().all())


def test_new_samples_look_no_stranger_than_those_fitted_on() -> None:
    """Whitened along 40 directions by 100 samples: with each left out of the search alone, new samples
    seem two standard deviations further away than they are.
    """
    rises, naive = [], []
    for seed in range(4):
        features, labels = world(1100, seed, 40)
        known, y, new = features[:100], labels[:100], features[100:]
        calibrator = LayerEvidence().fit(known, y)
        rises.append(float(calibrator.standard_novelty(new)[:, 0].mean()))
        made = make_reference(known, y)
        own = layer_evidence(made, known, torch.arange(100)).novelty[:, 0]
        naive.append(float((layer_evidence(made, new).novelty[:, 0].mean() - own.mean()) / own.std()))
    assert min(naive) > 1.0
    assert max(map(abs, rises)) < 0.6


def test_batches_of_the_same_source_are_not_called_shifted() -> None:
    called = 0
    for seed in range(25):
        features, labels = world(300, seed, 20)
        calibrator = LayerEvidence().fit(features[:150], labels[:150])
        called += shift_report(calibrator, features[150:], draws=99).p_value < 0.05
    assert called <= 4  # 1.25 expected; more than 4 of 25 has a probability of .7 %


def test_the_order_of_rows_does_not_matter() -> None:
    features, labels = world(90)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(1))
    a = own_of(features, labels).evidence()
    b = own_of(features[order], labels[order]).evidence()
    torch.testing.assert_close(a.novelty[order], b.novelty, atol=2e-3, rtol=0)
