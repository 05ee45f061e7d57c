"""Scores on perturbations that were not rehearsed, and the layers that are worth reading."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.choice import leave_family_out, select_layers
from salgp.features import Features
from salgp.metrics import nll_correct


def world(n: int, seed: int, noise: float = 0.0) -> tuple[Features, Tensor]:
    """A layer that knows more than the logits, a layer that is its copy, and one of noise."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=g)
    x = (
        1.8 * torch.eye(3, 6)[labels]
        + 0.6 * torch.randn(n, 6, generator=g)
        + noise * torch.randn(n, 6, generator=g)
    )
    layers = {"good": x, "same": 2 * x + 0.01, "noise": torch.randn(n, 4, generator=g)}
    return Features(4.0 * (x[:, :3] + 0.8 * torch.randn(n, 3, generator=g)), layers), labels


def rehearsed(n: int = 150) -> tuple[Features, Tensor]:
    parts = [world(n, 1, noise)[0] for noise in (0.0, 0.4, 1.2)]
    together = [
        Features(f.logits, f.layers, torch.arange(n), torch.full((n,), i)) for i, f in enumerate(parts)
    ]
    return Features.concatenate(together), world(n, 1)[1].repeat(3)


def test_a_family_is_scored_by_a_model_that_has_not_seen_it() -> None:
    features, labels = rehearsed()
    reference = world(300, 0)
    found = leave_family_out(features, labels, reference)
    kept, held = features.families != 2, features.families == 2
    direct = LayerEvidence().fit(features[kept], labels[kept], reference)
    expected = nll_correct(direct.predict(features[held]).confidence, features[held].correct(labels[held]))
    assert found.nll[2] == pytest.approx(expected, rel=1e-6)
    assert sorted(found.ece) == [0, 1, 2]
    assert found.loss == pytest.approx(sum(found.nll.values()) / 3)


def test_originals_are_scored_without_themselves() -> None:
    features, labels = world(150, 1)
    found = leave_family_out(features, labels, world(300, 0))
    fitted = LayerEvidence().fit(features, labels, world(300, 0))
    assert list(found.nll) == [0]
    assert found.nll[0] == pytest.approx(nll_correct(fitted.loo_confidence_, features.correct(labels)))


def test_layers_that_add_nothing_are_dropped() -> None:
    choice = select_layers(*rehearsed(), reference=world(300, 0))
    assert len({"good", "same"} & set(choice.names)) == 1
    assert [len(names) for names, _ in choice.path] == [3, 2, 1]
    assert str(choice).count("\n") == 2


def test_nothing_is_dropped_that_pays_its_cost() -> None:
    features, labels = rehearsed()
    everything, single = (select_layers(features, labels, world(300, 0), cost=cost) for cost in (0.0, 10.0))
    assert len(single.names) == 1
    losses = {len(names): loss for names, loss in everything.path}
    assert losses[len(everything.names)] == min(losses.values())
    with pytest.raises(ValueError, match="cost must not be negative"):
        select_layers(features, labels, cost=-1.0)


def test_calibrate_reads_only_the_layers_that_pay() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    features, y = world(120, 3)
    x = features.layers["good"]
    classifier = salgp.calibrate(model, [(x, y)], layer_cost=10.0)
    assert len(classifier.calibrator.layer_widths_) == 1
    assert set(classifier.features(x).layers) == set(classifier.calibrator.layer_widths_)
    assert classifier(x).confidence.isfinite().all()
    with pytest.raises(ValueError, match="layer_cost needs layer evidence"):
        salgp.calibrate(model, [(x, y)], method="temperature", layer_cost=0.1)
