"""Class probabilities by logits and layers: the fit, its limits, and what a calibrator makes of them."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from blobs import fitted, world
from torch import Tensor

import salgp
from salgp import LayerEvidence
from salgp.calibrators import get
from salgp.calibrators.evidence.class_probabilities import (
    SLOPE_PRECISION,
    WEIGHT_RATE,
    ClassModel,
    class_log_distances,
    fit_classes,
)
from salgp.calibrators.evidence.layer_spaces import Reference, make_reference
from salgp.features import Features
from salgp.metrics import nll
from salgp.sets import fit_sets

pytestmark = pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")


def seen_classes(n: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Weak logits, one layer that knows the class and one that knows nothing."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(4, (n,), generator=g)
    own = torch.eye(4, dtype=torch.float64)[y]
    noise = torch.randn(3, n, 4, generator=g, dtype=torch.float64)
    return own + noise[0], torch.stack([1 - own + 0.8 * noise[1], noise[2]]), y


def posterior(logits: Tensor, far: Tensor, y: Tensor, model: ClassModel, temperature: float) -> float:
    """Minus its logarithm, by the words of the module."""
    scale = far.flatten(1).std(dim=1)
    chosen = model(logits, far).gather(1, y[:, None]).log().sum()
    slope = SLOPE_PRECISION * (model.slope * temperature - 1) ** 2 / 2
    return float(slope + WEIGHT_RATE * (model.weights * scale).sum() - chosen)


def test_the_fit_is_the_largest_posterior() -> None:
    logits, far, y = seen_classes()
    model = fit_classes(logits, far, y, 1.7)
    best = posterior(logits, far, y, model, 1.7)
    assert float(model.weights[0]) > 0.5
    for step in (-0.05, 0.05):
        assert posterior(logits, far, y, replace(model, slope=model.slope + step), 1.7) > best
        for layer in range(2):
            weights = model.weights.clone()
            weights[layer] = (weights[layer] + step).clamp_min(0)
            if not torch.equal(weights, model.weights):
                assert posterior(logits, far, y, replace(model, weights=weights), 1.7) > best


def test_a_layer_that_contradicts_the_truth_gets_no_weight() -> None:
    logits, far, y = seen_classes()
    assert fit_classes(logits, -far[:1], y, 1.0).weights.tolist() == [0.0]


def test_without_layers_it_is_temperature_scaling() -> None:
    features, labels = world(200, 1)
    temperature = get("temperature").fit(features, labels)
    model = ClassModel(1 / temperature.temperature_, torch.zeros(2, dtype=torch.float64))
    probs = model(features.logits, torch.rand(2, 200, 3, dtype=torch.float64))
    torch.testing.assert_close(probs, temperature.predict(features).probs.double(), atol=1e-6, rtol=0)


def test_unknown_true_classes_teach_nothing() -> None:
    logits, far, y = seen_classes()
    far = far / far.flatten(1).std(dim=1)[:, None, None]
    some = fit_classes(logits[:300], far[:, :300], y[:300], 1.0)
    hidden = fit_classes(logits, far, torch.where(torch.arange(400) < 300, y, -1), 1.0)
    torch.testing.assert_close(hidden.weights, some.weights, rtol=0.05, atol=1e-3)
    none = fit_classes(logits, far, torch.full_like(y, -1), 2.0)
    assert none.slope == 0.5
    assert none.weights.tolist() == [0.0, 0.0]


def test_a_class_without_points_is_as_far_as_the_others_on_average() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    features = Features(torch.zeros(30, 3), {"a": x})
    far = class_log_distances(make_reference(features, torch.arange(30) % 2), features)
    torch.testing.assert_close(far[0, :, 2], far[0, :, :2].mean(dim=1))
    assert float(far.amax()) <= 6.0


def test_all_classes_on_equal_terms() -> None:
    ours = fitted()
    features, _ = world(100, 2, 1.0)
    alone, classes = ours.predict(features), ours.predict_classes(features)
    assert torch.equal(alone.label, classes.label)
    torch.testing.assert_close(alone.confidence, classes.confidence)
    torch.testing.assert_close(classes.probs.sum(dim=1), torch.ones(100, dtype=torch.float64))


def test_as_far_as_the_shift_weight_goes_the_label_has_its_confidence() -> None:
    ours = fitted()
    features, _ = world(200, 2, 6.0)
    samples = ours._samples(features)
    k = torch.maximum(ours.mixture_(samples).shift_weight, 1 - 1 / samples.norm_excess)
    given = ours.predict_classes(features)
    own = given.probs.gather(1, given.label[:, None])[:, 0]
    plain = ours.classes_model_(features.logits, class_log_distances(ours.reference_, features))
    expected = (1 - k) * plain.gather(1, given.label[:, None])[:, 0] + k * given.confidence
    assert float(k.max()) > 0.5
    torch.testing.assert_close(own, expected)


@pytest.mark.parametrize("context", [None, 50])
def test_memory_does_not_grow_with_the_samples(context: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Distances to every class are held for a few samples at a time, and the answer is the same."""
    ours = fitted()
    features, _ = world(100, 2, 2.0)
    whole = ours.predict_classes(features, context)
    seen: list[int] = []

    def watched(reference: Reference, part: Features) -> Tensor:
        seen.append(len(part))
        return class_log_distances(reference, part)

    monkeypatch.setattr("salgp.calibrators.evidence.calibrator.class_log_distances", watched)
    monkeypatch.setattr("salgp.calibrators.evidence.class_probabilities.ENTRIES", 30 * 2 * 3)
    found = ours.predict_classes(features, context)
    assert seen == [30, 30, 30, 10]
    torch.testing.assert_close(found.probs, whole.probs, atol=1e-5, rtol=0)
    torch.testing.assert_close(found.confidence, whole.confidence)


def test_a_context_is_taken() -> None:
    ours = fitted()
    features, _ = world(100, 2, 2.0)
    inside, alone = ours.predict_classes(features, 50), ours.predict_classes(features)
    torch.testing.assert_close(inside.confidence, ours.predict(features, 50).confidence)
    assert not torch.equal(inside.probs, alone.probs)


def test_better_classes_make_shorter_sets() -> None:
    """A network that sees half of what its layer knows."""

    def sample(seed: int, n: int = 600) -> tuple[Features, Tensor]:
        g = torch.Generator().manual_seed(seed)
        y = torch.randint(5, (n,), generator=g)
        x = 2.5 * torch.eye(5)[y] + torch.randn(n, 5, generator=g)
        return Features(x + 1.2 * torch.randn(n, 5, generator=g), {"a": x}), y

    ours = LayerEvidence().fit(*sample(0), reference=sample(1))
    temperature = get("temperature").fit(*sample(0))
    sizes, scores = [], []
    for predict in (temperature.predict, ours.predict_classes):
        home, labels = sample(2)
        away, truth = sample(3)
        scores.append(nll(predict(away).probs, truth))
        sizes.append(float(fit_sets(predict(home), labels, 0.95)(predict(away)).sum(dim=1).double().mean()))
    assert bool(ours.predict_classes(away).flips.any())  # another class may come first
    assert scores[1] < 0.9 * scores[0]
    assert sizes[1] < 0.95 * sizes[0]


def test_features_that_are_too_long_get_chance() -> None:
    home = world(40, 7)[0]
    far = Features(1e6 * home.logits, {name: 1e6 * x for name, x in home.layers.items()})
    probs = fitted().predict_classes(far).probs
    torch.testing.assert_close(probs, torch.full_like(probs, 1 / 3), atol=0.05, rtol=0)


def test_saved_loaded_updated(tmp_path: Path) -> None:
    ours = deepcopy(fitted())
    features, labels = world(60, 5)
    before = ours.predict_classes(features).probs
    loaded = salgp.load(ours.save(tmp_path / "cal"))
    assert torch.equal(loaded.predict_classes(features).probs, before)
    loaded.update(features, labels)
    torch.testing.assert_close(loaded.classes_model_.weights, ours.classes_model_.weights)


def test_without_a_reference_a_sample_is_not_its_own_neighbour() -> None:
    """Labels without sense: a sample that were its own neighbour would seem to know its label."""
    features, labels = world(200, 1)
    shuffled = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    calibrator = LayerEvidence().fit(features, shuffled)
    fresh, truth = world(300, 2)
    other = truth[torch.randperm(300, generator=torch.Generator().manual_seed(0))]
    distance = class_log_distances(calibrator.reference_, fresh)
    assert nll(calibrator.classes_model_(fresh.logits, distance), other) < 1.1 * math.log(3)
