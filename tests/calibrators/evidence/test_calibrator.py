"""Layer evidence as a whole: in domain and under shift, terms, order of rows, updates, safety, saving."""

from __future__ import annotations

import threading
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blobs import augmented_world, fitted, world
from torch import Tensor, nn

import salgp
from salgp.calibrators import get
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features
from salgp.network.extract import read_calibration_data
from salgp.network.reader import Reader
from salgp.prediction import Prediction

pytestmark = pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")


def nll(prediction: Prediction, features: Features, labels: Tensor) -> float:
    p, c = prediction.confidence.clamp(1e-6, 1 - 1e-6), features.correct(labels).double()
    return float(-(c * p.log() + (1 - c) * (1 - p).log()).mean())


def test_holds_under_shift_where_temperature_scaling_does_not() -> None:
    """In domain the logits of this world are the best there is: one temperature is right, and nothing to be
    won.
    """
    ours, temperature = fitted(), get("temperature").fit(*world(250, 1))
    gain: dict[tuple[float, object], float] = {}
    for noise, context in ((0.0, None), (2.0, None), (0.0, 50), (2.0, 50)):
        features, labels = world(1000, 2, noise)
        before, after = temperature.predict(features), ours.predict(features, context)
        gain[noise, context] = nll(before, features, labels) - nll(after, features, labels)
    assert gain[0.0, None] > -0.02
    assert gain[0.0, 50] > -0.005
    assert gain[2.0, None] > 0.05
    assert gain[2.0, 50] > gain[2.0, None]


def test_terms_add_up_to_the_whole_correction() -> None:
    features, _ = world(40, 3, 1.0)
    before = torch.logit(features.confidence.double())
    inside = before.abs() < 12  # single precision of the softmax
    for context, names in ((None, ()), ("all", ("context",))):
        prediction = fitted().predict(features, context)
        assert prediction.layers is not None
        assert prediction.layers.names == ("confidence", "predicted class", "one", "two", *names)
        whole = torch.logit(prediction.confidence) - before
        terms = prediction.layers.mean.sum(dim=1)
        torch.testing.assert_close(terms[inside], whole[inside], atol=1e-2, rtol=1e-3)


def test_novelty_never_raises_and_agreement_never_lowers_confidence() -> None:
    calibrator = fitted(layers_in_domain=True)
    assert calibrator.mixture_.shift is not None
    for expert in (calibrator.mixture_.in_domain, calibrator.mixture_.shift):
        assert (expert.weights[1:] >= 0).all()
    x = torch.zeros(3, 6)
    x[0, 0], x[1, 1], x[2, 5] = 3.0, 3.0, 30.0  # as its class, as another class, as nothing seen before
    logits = torch.tensor([[9.0, 0.0, 0.0]]).repeat(3, 1)
    sure = Features(logits, {"one": x, "two": torch.cat([x, x[:, :3].square()], dim=1)})
    p = calibrator.predict(sure)
    assert p.confidence[0] >= p.confidence[1]
    assert p.confidence[0] > p.confidence[2]
    samples = calibrator._samples(sure)
    f_shift = calibrator.mixture_.shift.log_odds(samples.design, samples.label)
    assert f_shift[0] > f_shift[1]
    assert p.novelty is not None
    assert p.novelty[2] > p.novelty[0]


def test_interval_is_wider_under_shift_and_holds_the_confidence() -> None:
    calibrator = fitted()
    near, far = (calibrator.predict(world(500, 5, noise)[0]) for noise in (0.0, 2.0))
    for p in (near, far):
        assert (p.lower <= p.confidence).all()
        assert (p.confidence <= p.upper).all()
    assert (far.upper - far.lower).mean() > (near.upper - near.lower).mean()


def test_augmented_samples_follow_their_original_in_any_order() -> None:
    first, position = Features(torch.zeros(6, 2), groups=torch.tensor([4, 9, 1, 9, 4, 1])).originals
    assert first.tolist() == [0, 1, 2]
    assert position.tolist() == [0, 1, 2, 1, 0, 2]


def test_a_class_that_is_predicted_wrongly_loses_confidence() -> None:
    features, labels = world(600, 13)
    spoilt = torch.where((features.label == 1) & (torch.arange(600) % 2 == 0), 2, labels)
    calibrator = LayerEvidence().fit(features, spoilt)
    p, offsets = calibrator.predict(features), calibrator.mixture_.in_domain.offsets
    assert calibrator.mixture_.layers_in_domain
    assert offsets[1] < min(offsets[0], offsets[2])
    assert p.confidence[features.label == 1].mean() < p.confidence[features.label != 1].mean()


def test_rows_may_come_in_any_order() -> None:
    features, y = augmented_world(120, 1)
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0))
    new = world(100, 2, 1.0)[0]
    a = LayerEvidence().fit(features, y, reference=world(200, 0))
    b = LayerEvidence().fit(features[order], y[order], reference=world(200, 0))
    for context in (None, 50):
        one, other = a.predict(new, context), b.predict(new, context)
        torch.testing.assert_close(one.confidence, other.confidence, atol=1e-6, rtol=0)


def test_one_sample_is_predicted_as_in_a_batch() -> None:
    calibrator, (features, _) = fitted(), world(100, 4)
    many = calibrator.predict(features).numpy()
    for rows in (slice(0, 1), slice(0, 3)):
        few = calibrator.predict(features[torch.arange(100)[rows]])
        for name, values in few.numpy().items():
            np.testing.assert_allclose(values, many[name][rows], rtol=1e-5, atol=1e-7, err_msg=name)
    assert not any(x.is_inference() for x in (few.probs, few.layers.mean, few.std, features.label))  # type: ignore[union-attr]


def test_without_reference_a_sample_is_not_its_own_neighbour() -> None:
    features, labels = world(200, 6)
    calibrator = LayerEvidence().fit(features, labels)
    fresh, fresh_labels = world(600, 7)
    p = calibrator.predict(fresh)
    gap = float(p.confidence.mean() - fresh.correct(fresh_labels).double().mean())
    assert abs(gap) < 0.06  # a sample compared with itself would look familiar and spoil this


def test_explain_names_every_term() -> None:
    line = fitted().explain(world(10, 8)[0], 3)
    assert " -> " in line
    assert all(name in line for name in ("one", "two", "confidence"))


def test_relevance_and_novelty_of_the_calibration_samples() -> None:
    calibrator = fitted()
    assert set(calibrator.relevance_) == {"one", "two"}
    assert all(v >= 0 for v in calibrator.relevance_.values())
    novelty = calibrator.standard_novelty(world(250, 1)[0])
    assert novelty.shape == (250, 2)
    torch.testing.assert_close(novelty.quantile(0.5, dim=0), torch.zeros(2).double())


def test_fewer_points_stay_close_to_many() -> None:
    features, labels = world(800, 10)
    many, few = fitted(), fitted(size=10)
    assert len(few.reference_.classes) == 30
    assert nll(few.predict(features), features, labels) < nll(many.predict(features), features, labels) + 0.05


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"layers_in_domain": 0.5}, "layers_in_domain"),
        ({"width": 0}, "width"),
        ({"size": 0}, "size"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        LayerEvidence(**wrong).fit(*world(30, 0))


@pytest.mark.filterwarnings("ignore:.*are in the reference too")
def test_from_network_to_prediction_in_one_call() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(6, 12), nn.ReLU()), nn.Linear(12, 3))
    x, y = world(120, 11)[0].layers["one"], world(120, 11)[1]
    found = read_calibration_data(model, [(x, y)], Reader(), "auto")
    direct = LayerEvidence().fit(found.features, found.labels, reference=salgp.extract(model, [(x, y)]))
    p = direct.predict(salgp.extract(model, [x])[0])
    assert p.confidence.shape == (120,)
    assert bool(((p.confidence > 0) & (p.confidence < 1)).all())


def test_where_the_layers_are_not_used_it_is_temperature_scaling() -> None:
    calibrator = LayerEvidence(layers_in_domain=False).fit(*world(200, 1))
    features, _ = world(50, 5)
    tempered = torch.softmax(features.logits.double() / calibrator.scales_.temperature, 1).amax(1)
    torch.testing.assert_close(calibrator.predict(features).confidence, tempered, atol=1e-6, rtol=0)


def test_a_context_without_augmented_samples_is_refused() -> None:
    calibrator = LayerEvidence().fit(*world(100, 1))
    with pytest.raises(ValueError, match="augmented"):
        calibrator.predict(world(10, 2)[0], context="all")


# --- few samples, no errors, one class: finite, and not more sure than there is reason to be


@pytest.mark.parametrize("n", [3, 20, 49])
def test_few_samples_are_temperature_scaling(n: int) -> None:
    """With fewer than ten errors the layers are not used in domain, whatever they seem to know."""
    features, labels = world(n, 9)
    calibrator = LayerEvidence().fit(features, labels)
    assert int((features.label != labels).sum()) < 10
    assert not calibrator.mixture_.layers_in_domain
    new = world(40, 5)[0]
    tempered = torch.softmax(new.logits.double() / calibrator.scales_.temperature, 1).amax(1)
    near = calibrator._samples(new).norm_excess == 1  # not longer than any calibration sample
    assert float(near.double().mean()) > 0.9
    torch.testing.assert_close(calibrator.predict(new).confidence[near], tempered[near], atol=1e-6, rtol=0)


def test_no_errors_and_no_correct_sample() -> None:
    features, _ = world(60, 9)
    new = world(40, 5)[0]
    right = LayerEvidence().fit(features, features.label)
    assert right.scales_.temperature > 0.5  # no errors are no reason to be much more sure than the network
    assert not right.mixture_.layers_in_domain
    wrong = LayerEvidence().fit(features, (features.label + 1) % 3).predict(new)
    assert float(wrong.confidence.mean()) < 0.6
    unknown = LayerEvidence().fit(features, torch.where(torch.arange(60) > 0, -1, features.label))
    for p in (right.predict(new), wrong, unknown.predict(new)):
        assert p.confidence.isfinite().all()
        assert p.upper.isfinite().all()


def test_one_predicted_class_only() -> None:
    features, labels = augmented_world(80, 9)
    logits = features.logits.clone()
    logits[:, 0] = logits.amax(dim=1) + 1.0
    lone = Features(logits, features.layers, features.groups, features.families, features.strengths)
    calibrator = LayerEvidence().fit(lone, labels)
    for context in (None, "all"):
        p = calibrator.predict(lone[torch.arange(80)], context)
        assert p.confidence.isfinite().all()
        accuracy = float((labels[:80] == 0).double().mean())
        assert float(p.confidence.mean()) == pytest.approx(accuracy, abs=0.15)


def test_one_class_in_the_reference_only() -> None:
    features, labels = world(80, 9)
    p = (
        LayerEvidence()
        .fit(features, labels, reference=(features, torch.zeros_like(labels)))
        .predict(features)
    )
    assert p.confidence.isfinite().all()


# --- updates


def test_update_is_a_fit_to_all_rows() -> None:
    (old, labels), (new, new_labels), (fresh, _) = world(200, 20), world(60, 21), world(100, 22)
    calibrator = LayerEvidence(layers_in_domain=True).fit(old, labels, reference=world(300, 0))
    before = calibrator.predict(fresh)
    after = calibrator.update(new, new_labels).predict(fresh)
    scratch = LayerEvidence(layers_in_domain=True).fit(old, labels, reference=world(300, 0))
    both, y = Features.concatenate([old, new]), torch.cat([labels, new_labels])
    again = scratch._refit(scratch._observed(both, y)).predict(fresh)
    torch.testing.assert_close(again.confidence, after.confidence, atol=1e-6, rtol=0)
    assert float((after.confidence - before.confidence).abs().max()) > 1e-3


def test_an_update_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator, (more, labels) = deepcopy(fitted()), world(30, 21)
    before, rows = calibrator.predict(more), len(calibrator.training_rows_)

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("salgp.calibrators.evidence.calibrator.fit_mixture", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        calibrator.update(more, labels)
    assert len(calibrator.training_rows_) == rows
    assert torch.equal(calibrator.predict(more).confidence, before.confidence)


def test_two_threads_that_update_lose_no_row() -> None:
    calibrator = LayerEvidence().fit(*world(60, 1), reference=world(100, 0))
    parts = [world(5, seed) for seed in range(30, 38)]

    def add(some: list[tuple[Features, Tensor]]) -> None:
        for features, labels in some:
            calibrator.update(features, labels)

    threads = [threading.Thread(target=add, args=(parts[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calibrator.training_rows_) == 60 + 40


def test_suggest_asks_for_uncertain_samples_that_differ() -> None:
    features, _ = world(200, 23, 1.0)
    calibrator = fitted()
    chosen = calibrator.suggest(features, 5)
    assert len(set(chosen.tolist())) == 5
    assert calibrator.predict(features).std[chosen].mean() > calibrator.predict(features).std.mean()


def test_context_and_check_survive_saving(tmp_path: Path) -> None:
    calibrator, (features, _) = fitted(), world(60, 3, 1.0)
    again = salgp.load(calibrator.save(tmp_path / "saved"))
    for context in (None, "all"):
        a, b = calibrator.predict(features, context), again.predict(features, context)
        assert torch.equal(a.confidence, b.confidence)
        assert torch.equal(a.upper, b.upper)
    assert again.check_ == calibrator.check_
    assert again.verdict_ == calibrator.verdict_
