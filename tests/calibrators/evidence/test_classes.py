"""Class probabilities by logits and layers: the fit, its limits, and what a calibrator makes of them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_calibrator import fitted, world
from torch import Tensor

import salgp
from salgp import LayerEvidence
from salgp.calibrators import get
from salgp.calibrators.evidence.classes import (
    SLOPE_PULL,
    WEIGHT_PULL,
    ClassModel,
    farness,
    fit_classes,
    some_originals,
)
from salgp.calibrators.evidence.reference import Reference, make_reference
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
    prior = (
        SLOPE_PULL * (model.slope * temperature - 1) ** 2 / 2 + WEIGHT_PULL * (model.weights * scale).sum()
    )
    return float(prior - chosen)


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


def test_a_layer_that_contradicts_the_truth_is_not_heard() -> None:
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
    some = fit_classes(logits[:300], far[:, :300] / far.flatten(1).std(dim=1)[:, None, None], y[:300], 1.0)
    far = far / far.flatten(1).std(dim=1)[:, None, None]
    hidden = fit_classes(logits, far, torch.where(torch.arange(400) < 300, y, -1), 1.0)
    torch.testing.assert_close(hidden.weights, some.weights, rtol=0.05, atol=1e-3)
    none = fit_classes(logits, far, torch.full_like(y, -1), 2.0)
    assert none.slope == 0.5
    assert none.weights.tolist() == [0.0, 0.0]


def test_a_class_without_points_is_as_far_as_the_others_on_average() -> None:
    x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
    features = Features(torch.zeros(30, 3), {"a": x})
    far = farness(make_reference(features, torch.arange(30) % 2), features)
    torch.testing.assert_close(far[0, :, 2], far[0, :, :2].mean(dim=1))
    assert float(far.amax()) <= 6.0


def test_a_fit_looks_at_so_many_rows_as_it_needs() -> None:
    assert some_originals(3, 0, 2).tolist() == [0, 1, 2]
    assert len(some_originals(10**6, 4, 10)) == 100_000
    assert int(some_originals(10**6, 4, 10)[-1]) == 10**6 - 1


@pytest.mark.parametrize("form", ["prototypes", "full", "statistics"])
def test_all_classes_on_equal_terms(form: str) -> None:
    ours = fitted(reference=form)
    features, _ = world(100, 2, 1.0)
    alone, classes = ours.predict(features), ours.predict_classes(features)
    assert torch.equal(alone.label, classes.label)
    torch.testing.assert_close(alone.confidence, classes.confidence)
    torch.testing.assert_close(classes.probs.sum(dim=1), torch.ones(100, dtype=torch.float64))


def test_where_the_expert_for_shift_is_heard_the_label_has_its_confidence() -> None:
    ours = fitted()
    features, _ = world(200, 2, 6.0)
    evidence_ = ours.evidence_
    found = salgp.calibrators.evidence.reference.layer_evidence(evidence_.reference, features)
    lean = evidence_.heard(evidence_.view(features, found), found, None)
    given = ours.predict_classes(features)
    own = given.probs.gather(1, given.label[:, None])[:, 0]
    plain = evidence_.classes(features.logits, farness(evidence_.reference, features))
    expected = (1 - lean) * plain.gather(1, given.label[:, None])[:, 0] + lean * given.confidence
    assert float(lean.max()) > 0.9
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
        return farness(reference, part)

    monkeypatch.setattr("salgp.calibrators.evidence.calibrator.farness", watched)
    monkeypatch.setattr("salgp.calibrators.evidence.classes.ENTRIES", 30 * 2 * features.n_classes)
    monkeypatch.setattr(LayerEvidence, "_chunk", lambda self: 70)
    found = ours.predict_classes(features, context)
    assert seen == ([30, 30, 10, 30] if context is None else [30, 30, 30, 10])
    torch.testing.assert_close(found.probs, whole.probs)
    torch.testing.assert_close(found.confidence, whole.confidence)


def test_a_context_is_taken() -> None:
    ours = fitted()
    features, _ = world(100, 2, 2.0)
    torch.testing.assert_close(
        ours.predict_classes(features, 50).confidence, ours.predict(features, 50).confidence
    )
    assert not torch.equal(ours.predict_classes(features, 50).probs, ours.predict_classes(features).probs)


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


def test_saved_loaded_updated(tmp_path: Path) -> None:
    ours = fitted()
    features, labels = world(60, 5)
    before = ours.predict_classes(features).probs
    loaded = salgp.load(ours.save(tmp_path / "cal"))
    assert torch.equal(loaded.predict_classes(features).probs, before)
    loaded.update(features, labels)
    torch.testing.assert_close(loaded.evidence_.classes.weights, ours.evidence_.classes.weights)


def test_without_a_reference_a_sample_is_not_its_own_neighbour() -> None:
    """Labels without sense: a sample that were its own neighbour would seem to know its label."""
    features, labels = world(200, 1)
    shuffled = labels[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    model = LayerEvidence().fit(features, shuffled).evidence_
    assert model.classes is not None
    far = farness(model.reference, features, torch.arange(200))
    assert nll(model.classes(features.logits, far), shuffled) > 0.97 * math.log(3)
    assert nll(model.classes(features.logits, farness(model.reference, features)), shuffled) < 0.5


def test_what_no_fit_gives_is_refused() -> None:
    for slope, weights in ((-1.0, torch.zeros(2)), (1.0, torch.tensor([-1.0])), (1.0, torch.zeros(2, 2))):
        with pytest.raises(ValueError, match="weights of the classes"):
            ClassModel(slope, weights)
    ours = fitted()
    with pytest.raises(ValueError, match="3 weights for 2 layers"):
        replace(ours.evidence_, classes=ClassModel(1.0, torch.zeros(3)))
    ours.evidence_ = replace(ours.evidence_, classes=None)
    with pytest.raises(ValueError, match="fit it anew"):
        ours.predict_classes(world(3, 0)[0])
