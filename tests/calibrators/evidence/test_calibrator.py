"""Layer evidence: the convex fit, monotone extrapolation, additive terms, copies, and the science."""

from __future__ import annotations

import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import salgp
from salgp.calibrators import get
from salgp.calibrators.copies import originals
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.model import (
    LogOdds,
    fit_log_odds,
    leave_group_out,
    sample_weights,
)
from salgp.calibrators.evidence.shift import _permutation_p, shift_report
from salgp.features import Features
from salgp.network.reader import Reader
from salgp.network.rehearsal import rehearse
from salgp.prediction import Prediction


def world(n: int, seed: int, noise: float = 0.0) -> tuple[Features, Tensor]:
    """Three blobs seen through a linear network that is too sure of itself."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=g)
    x = 1.8 * torch.eye(3, 6)[labels] + 0.8 * torch.randn(n, 6, generator=g)
    x = x + noise * torch.randn(n, 6, generator=g)
    hidden = torch.cat([x, x[:, :3].square()], dim=1)
    return Features(6.0 * x[:, :3], {"one": x, "two": hidden}), labels


def fitted(**arguments: Any) -> LayerEvidence:
    clean, labels = world(250, 1)
    copies = [world(250, 1, noise)[0] for noise in (0.5, 1.5)]
    together = Features.concatenate(
        [
            Features(f.logits, f.layers, torch.arange(250), torch.full((250,), family))
            for family, f in enumerate((clean, *copies))
        ]
    )
    return LayerEvidence(**arguments).fit(together, labels.repeat(3), reference=world(400, 0))


def fit_one(X: Tensor, correct: Tensor, weight: Tensor, ridge: float) -> LogOdds:
    """Without offsets of classes."""
    return fit_log_odds(X, torch.zeros(len(X), dtype=torch.long), correct, weight, 1, ridge, 0.0)


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
    assert gain[0.0, None] > -0.005
    assert gain[0.0, 50] > -0.003
    assert gain[2.0, None] > 0.05
    assert gain[2.0, 50] > gain[2.0, None]


def test_terms_add_up_to_the_whole_correction() -> None:
    features, _ = world(40, 3)
    prediction = fitted().predict(features)
    assert prediction.layers is not None
    assert prediction.layers.names == ("confidence", "predicted class", "one", "two")
    before = torch.logit(features.confidence.double())
    inside = before.abs() < 12  # single precision of the softmax
    whole = torch.logit(prediction.confidence) - before
    torch.testing.assert_close(prediction.layers.mean.sum(dim=1)[inside], whole[inside], atol=1e-2, rtol=1e-3)


def test_novelty_never_raises_and_agreement_never_lowers_confidence() -> None:
    calibrator = fitted(trust=1.0)
    assert calibrator.evidence_.shift is not None
    for expert in (calibrator.evidence_.inside.expert, calibrator.evidence_.shift):
        assert (expert.posterior.weights[1:] >= 0).all()
    sure = Features(
        torch.tensor([[9.0, 0.0, 0.0]]).repeat(3, 1),
        {k: x[:1].repeat(3, 1) for k, x in world(9, 4)[0].layers.items()},
    )
    x = torch.zeros(3, 6)
    x[0, 0], x[1, 1], x[2, 5] = 3.0, 3.0, 30.0  # as its class, as another class, as nothing seen before
    sure = Features(sure.logits, {"one": x, "two": torch.cat([x, x[:, :3].square()], dim=1)})
    p = calibrator.predict(sure)
    assert p.confidence[0] > p.confidence[1]
    assert p.confidence[0] > p.confidence[2]
    assert p.novelty is not None
    assert p.novelty[2] > p.novelty[0]


def test_interval_is_wider_under_shift_and_holds_the_confidence() -> None:
    calibrator = fitted()
    near, far = (calibrator.predict(world(500, 5, noise)[0]) for noise in (0.0, 2.0))
    for p in (near, far):
        assert (p.lower <= p.confidence).all()
        assert (p.confidence <= p.upper).all()
    assert (far.upper - far.lower).mean() > (near.upper - near.lower).mean()


def test_copies_of_an_original_follow_it_in_any_order() -> None:
    first, position = originals(Features(torch.zeros(6, 2), groups=torch.tensor([4, 9, 1, 9, 4, 1])))
    assert first.tolist() == [0, 1, 2]
    assert position.tolist() == [0, 1, 2, 1, 0, 2]


def test_weights_of_originals_and_copies() -> None:
    is_copy = torch.tensor([False, False, True, True, True, True])
    correct = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    w = sample_weights(is_copy, correct, 0.8, 3.0)
    assert float(w.sum()) == pytest.approx(2.0)
    assert w[:2].tolist() == pytest.approx([0.8, 0.8])
    assert float(w[4] / w[2]) == pytest.approx(3.0)
    assert sample_weights(is_copy & False, correct, 0.8, 3.0).tolist() == [1.0] * 6


def test_weights_are_the_optimum_scikit_learn_finds() -> None:
    """Without active bounds the fit is ridge logistic regression."""
    from sklearn.linear_model import LogisticRegression

    g = torch.Generator().manual_seed(0)
    X = torch.randn(400, 4, generator=g, dtype=torch.float64)
    X[:, 0] = 1.0
    correct = torch.bernoulli(
        torch.sigmoid(X @ torch.tensor([0.3, 1.0, 0.8, 0.6], dtype=torch.float64)), generator=g
    )
    w = fit_one(X, correct, torch.ones(400, dtype=torch.float64), 1e-6).weights
    peer = LogisticRegression(C=1e6, tol=1e-10, max_iter=1000).fit(X[:, 1:], correct)
    np.testing.assert_allclose(w.numpy(), np.r_[peer.intercept_, peer.coef_[0]], atol=2e-3)


def test_covariance_is_the_inverse_curvature() -> None:
    X = torch.randn(50, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    correct = (X[:, 1] > 0).double()
    found = fit_one(X, correct, torch.ones(50, dtype=torch.float64), 0.5)
    w, S = found.weights, found.covariance

    def loss(v: Tensor) -> Tensor:
        f = X @ v
        prior = torch.tensor([1e-2, 0.1, 1.0], dtype=torch.float64)
        return (torch.nn.functional.softplus(f) - correct * f).sum() + 0.5 * (
            prior * (v - torch.tensor([0.0, 1.0, 0.0])) ** 2
        ).sum()

    H = torch.autograd.functional.hessian(loss, w)
    torch.testing.assert_close(S @ H, torch.eye(3, dtype=torch.float64), atol=1e-8, rtol=1e-8)


def test_leave_group_out_is_close_to_refitting() -> None:
    g = torch.Generator().manual_seed(2)
    X = torch.cat([torch.ones(80, 1), torch.randn(80, 2, generator=g).abs()], dim=1).double()
    correct = torch.bernoulli(torch.sigmoid(X @ torch.tensor([-1.0, 1.0, 0.7]).double()), generator=g)
    weight, group = torch.full((80,), 0.5, dtype=torch.float64), torch.arange(80) % 20
    label = torch.arange(80) // 7 % 3
    model = fit_log_odds(X, label, correct, weight, 3, 0.2, 0.7)
    found, spread = leave_group_out(X, label, correct, weight, model, group)
    for k in range(0, 20, 5):
        keep = group != k
        without = fit_log_odds(X[keep], label[keep], correct[keep], weight[keep], 3, 0.2, 0.7)
        mean, variance = without.moments(X[~keep], label[~keep])
        torch.testing.assert_close(torch.sigmoid(found[~keep]), torch.sigmoid(mean), atol=0.02, rtol=0)
        torch.testing.assert_close(spread[~keep], variance, atol=0.05, rtol=0.1)
    assert (torch.sigmoid(found) - torch.sigmoid(model.moments(X, label)[0])).abs().max() > 0.01


def test_posterior_with_offsets_is_that_of_the_whole_design() -> None:
    """Offsets as columns of ones and zeros, solved without any block structure."""
    g = torch.Generator().manual_seed(3)
    X = torch.cat([torch.ones(90, 1), torch.randn(90, 2, generator=g).abs()], dim=1).double()
    label = torch.randint(4, (90,), generator=g)
    correct = torch.bernoulli(
        torch.sigmoid(
            X @ torch.tensor([-1.0, 1.0, 0.7]).double() + torch.tensor([0.0, 1.0, -1.0, 0.5])[label]
        ),
        generator=g,
    )
    model = fit_log_odds(X, label, correct, torch.ones(90).double(), 4, 0.2, 0.8)
    whole = torch.cat([X, torch.eye(4).double()[label]], dim=1)
    v = torch.cat([model.weights, model.offsets])
    prior = torch.tensor([1e-2, 0.04, 0.4, *[0.8**-2] * 4]).double()
    p = torch.sigmoid(whole @ v)
    slope = whole.T @ (p - correct) + prior * (v - torch.tensor([0.0, 1.0, 0, 0, 0, 0, 0]))
    assert (slope.abs() < 2e-3).all()
    H = whole.T @ ((p * (1 - p))[:, None] * whole) + prior.diag()
    torch.testing.assert_close(model.joint(X, label), whole @ torch.linalg.inv(H) @ whole.T)
    torch.testing.assert_close(model.moments(X, label)[1], model.joint(X, label).diag())


def test_a_class_the_network_falls_into_loses_confidence() -> None:
    features, labels = world(600, 13)
    spoilt = torch.where((features.label == 1) & (torch.arange(600) % 2 == 0), 2, labels)
    calibrator = LayerEvidence().fit(features, spoilt)
    p, offsets = calibrator.predict(features), calibrator.evidence_.inside.expert.posterior.offsets
    assert calibrator.evidence_.inside.trust > 0
    assert offsets[1] < min(offsets[0], offsets[2])
    even = LayerEvidence(class_spread=0.0).fit(features, spoilt)
    assert not even.evidence_.inside.expert.posterior.offsets.any()
    assert p.confidence[features.label == 1].mean() < p.confidence[features.label != 1].mean()


def test_rows_may_come_in_any_order_where_families_are_known() -> None:
    clean, labels = world(120, 1)
    copies = [world(120, 1, noise)[0] for noise in (0.5, 1.5)]
    parts = [
        Features(f.logits, f.layers, torch.arange(120), torch.full((120,), i))
        for i, f in enumerate((clean, *copies))
    ]
    together, y = Features.concatenate(parts), labels.repeat(3)
    order = torch.randperm(360, generator=torch.Generator().manual_seed(0))
    a = LayerEvidence().fit(together, y, reference=world(200, 0)).predict(clean)
    b = LayerEvidence().fit(together[order], y[order], reference=world(200, 0)).predict(clean)
    torch.testing.assert_close(a.confidence, b.confidence, atol=1e-6, rtol=0)


def test_shift_report_sees_a_shift_and_only_a_shift() -> None:
    calibrator = fitted()
    still, moved = (shift_report(calibrator, world(150, 12, noise)[0]) for noise in (0.0, 1.5))
    assert still.p_value > 0.02
    assert moved.p_value < 0.005
    assert moved.confidence < still.confidence
    assert all(moved.rise[name] > still.rise[name] for name in ("one", "two"))
    assert "expected accuracy" in str(moved)


def test_shift_report_of_a_large_batch_takes_little_time_and_memory() -> None:
    """Permutations are drawn of the smaller part only; 999 of all would need 400 million random numbers."""
    scores = np.random.default_rng(0).normal(size=400_000 + 300)
    tracemalloc.start()
    began = time.process_time()
    p_value = _permutation_p(scores, 400_000, 999, 0)
    took, held = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    mirrored = _permutation_p(-scores[::-1], 300, 999, 0)
    assert took < 5
    assert held < 40e6
    assert 0.001 < p_value < 1
    assert p_value == pytest.approx(mirrored, abs=0.1)


def test_single_precision_scores_like_double() -> None:
    calibrator, (features, _) = fitted(), world(300, 13, 0.5)
    fast, slow = (calibrator.predictor(False, precision)(features) for precision in ("single", "double"))
    torch.testing.assert_close(fast.confidence, slow.confidence, rtol=0, atol=1e-5)
    torch.testing.assert_close(slow.confidence, calibrator.predict(features).confidence, rtol=0, atol=0)


def test_few_samples_give_ordinary_tensors_and_the_numbers_of_many() -> None:
    calibrator, (features, _) = fitted(), world(100, 4)
    few, many = calibrator.predict(features[:3]), calibrator.predict(features)
    for name, values in few.numpy().items():
        np.testing.assert_allclose(values, many.numpy()[name][:3], rtol=1e-6, atol=1e-9)
    assert not any(x.is_inference() for x in (few.probs, few.layers.mean, few.std, features.label))  # type: ignore[union-attr]
    assert not calibrator.evidence_.reference.index.fast.is_inference()
    weight = torch.ones(3, dtype=torch.float64, requires_grad=True)
    (weight * few.confidence).sum().backward()  # would be refused with what inference mode leaves
    assert weight.grad is not None
    assert torch.equal(weight.grad, few.confidence)


def test_few_samples_are_judged_on_one_thread_and_the_setting_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calibrator, (features, _) = fitted(), world(10, 4)
    asked: list[int] = []
    inner = LayerEvidence._predict

    def watched(self: LayerEvidence, features: Features) -> Prediction:
        asked.append(torch.get_num_threads())
        return inner(self, features)

    monkeypatch.setattr(LayerEvidence, "_predict", watched)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        calibrator.predict(features)
        assert asked == [1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_shift_report_is_calibrated_without_shift() -> None:
    calibrator = fitted()
    p = [shift_report(calibrator, world(60, seed)[0], draws=99, seed=seed).p_value for seed in range(20, 50)]
    assert 0.25 < float(np.mean(p)) < 0.75


def test_without_reference_a_sample_is_not_its_own_neighbour() -> None:
    features, labels = world(200, 6)
    calibrator = LayerEvidence().fit(features, labels)
    fresh, fresh_labels = world(600, 7)
    p = calibrator.predict(fresh)
    gap = float(p.confidence.mean() - fresh.correct(fresh_labels).double().mean())
    assert abs(gap) < 0.06  # a sample compared with itself would look familiar and spoil this


def test_explain_names_every_term() -> None:
    features, _ = world(10, 8)
    line = fitted().explain(features, 3)
    assert " -> " in line
    assert all(name in line for name in ("one", "two", "confidence"))


def test_leave_one_out_scores_tell_what_to_expect() -> None:
    calibrator, (features, labels) = fitted(), world(2000, 14)
    assert calibrator.loo_scores_["nll"] == pytest.approx(
        nll(calibrator.predict(features), features, labels), abs=0.06
    )
    assert calibrator.loo_scores_["ece"] < 0.1
    assert (calibrator.loo_std_ > 0).all()


def test_relevance_per_layer() -> None:
    relevance = fitted().relevance_
    assert set(relevance) == {"one", "two"}
    assert all(v >= 0 for v in relevance.values())


def test_all_correct_and_unknown_classes_are_fine() -> None:
    features, labels = world(60, 9)
    for y in (features.label, torch.where(torch.arange(60) > 0, -1, labels)):
        p = LayerEvidence().fit(features, y).predict(features)
        assert p.confidence.isfinite().all()
        assert (p.confidence.mean() > 0.5) == bool((y >= 0).all())


def test_prototypes_stay_close_to_the_full_reference() -> None:
    features, labels = world(800, 10)
    full, small = fitted(reference="full"), fitted(size=10)
    assert len(small.evidence_.reference) == 30
    assert (
        nll(small.predict(features), features, labels) < nll(full.predict(features), features, labels) + 0.05
    )


@pytest.mark.parametrize("wrong", [{"clean": 0.0}, {"caution": 0.0}, {"ridge": 0.0}, {"class_spread": -1.0}])
def test_wrong_arguments_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="need 0 < clean"):
        LayerEvidence(**wrong).fit(*world(30, 0))


@pytest.mark.filterwarnings("ignore:.*are in the reference too")
def test_from_network_to_prediction_in_one_call() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Sequential(nn.Linear(6, 12), nn.ReLU()), nn.Linear(12, 3))
    x, y = world(120, 11)[0].layers["one"], world(120, 11)[1]
    found = rehearse(model, [(x, y)], Reader())
    features, labels = found.features, found.labels
    direct = LayerEvidence().fit(features, labels, reference=salgp.extract(model, [(x, y)]))
    p = direct.predict(salgp.extract(model, [x])[0])
    assert p.confidence.shape == (120,)


def test_update_is_a_fit_to_all_rows_and_forget_takes_it_back(tmp_path: Path) -> None:
    (old, labels), (new, new_labels), (fresh, _) = world(200, 20), world(60, 21), world(100, 22)
    calibrator = LayerEvidence(trust=1.0).fit(old, labels, reference=world(300, 0))
    before, expected = calibrator.predict(fresh), calibrator.loo_scores_
    after = calibrator.update(new, new_labels).predict(fresh)
    assert calibrator.loo_scores_ != expected
    scratch = LayerEvidence(trust=1.0).fit(old, labels, reference=world(300, 0))
    both, y = Features.concatenate([old, new]), torch.cat([labels, new_labels])
    again = scratch._refresh(scratch._observed(both, y)).predict(fresh)
    torch.testing.assert_close(again.confidence, after.confidence, atol=1e-6, rtol=0)
    assert float((after.confidence - before.confidence).abs().max()) > 1e-3
    loaded = salgp.load(calibrator.save(tmp_path))
    back = loaded.forget(new, new_labels).predict(fresh)
    torch.testing.assert_close(back.confidence, before.confidence, atol=1e-6, rtol=0)
    with pytest.raises(ValueError, match="not among those"):
        loaded.forget(new, new_labels)
    with pytest.raises(ValueError, match="cannot forget every sample"):
        loaded.forget(old, labels)


def test_an_update_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator, (more, labels) = fitted(), world(30, 21)
    before, rows, scores = calibrator.predict(more), len(calibrator.seen_), calibrator.loo_scores_

    def failing(*_: object, **__: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("salgp.calibrators.evidence.calibrator.fit_in_domain", failing)
    with pytest.raises(RuntimeError, match="no memory"):
        calibrator.update(more, labels)
    assert len(calibrator.seen_) == rows
    assert calibrator.loo_scores_ == scores
    assert torch.equal(calibrator.predict(more).confidence, before.confidence)


def test_suggest_asks_for_uncertain_samples_that_differ() -> None:
    features, _ = world(200, 23, 1.0)
    calibrator = fitted()
    chosen = calibrator.suggest(features, 5)
    assert len(set(chosen.tolist())) == 5
    assert calibrator.predict(features).std[chosen].mean() > calibrator.predict(features).std.mean()
