"""Experts, gate and environment of layer evidence, against loops and hand-made cases."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_calibrator import fitted, world
from torch import Tensor

import salgp
from salgp.calibrators import get
from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.check import _missed, _window_numbers
from salgp.calibrators.evidence.environment import Context, Environment, Surroundings, fit_environment
from salgp.calibrators.evidence.experts import TRUSTS, choose_trust
from salgp.calibrators.evidence.gate import choose_guard, fit_gate
from salgp.calibrators.evidence.reference import layer_evidence, make_reference
from salgp.calibrators.evidence.rows import FittedRows, View
from salgp.calibrators.evidence.strangeness import energy, fit_strangeness
from salgp.calibrators.evidence.windows import window_numbers
from salgp.export import export_head
from salgp.features import Features
from salgp.metrics import nll_correct


def made_rows(n: int = 400, seed: int = 0) -> tuple[FittedRows, Tensor, Tensor]:
    """Originals and two families at two strengths, and the log-odds of two experts."""
    g = torch.Generator().manual_seed(seed)
    family = torch.arange(3).repeat_interleave(n)
    level = torch.where(torch.arange(3 * n) % 2 == 0, 0.5, 1.0)
    strength = torch.where(family == 0, 0.0, level).double()
    t = (2.0 + torch.randn(3 * n, generator=g)).double()
    correct = torch.bernoulli(torch.sigmoid(t - 3.0 * strength), generator=g)
    A = -0.5 * strength[:, None] + torch.randn(3 * n, 2, generator=g)
    label = torch.randint(3, (3 * n,), generator=g)
    own = torch.stack([t, t.clamp_max(4.0)], dim=1)
    view = View(own, A, torch.zeros(3 * n, 2).double(), label)
    return FittedRows(view, correct, torch.arange(n).repeat(3), family, strength), t, t - 2.5 * strength


def crowding(count: int, n: int, share: float) -> float:
    """The formula of the docstring."""
    usual = 1 + (n - 1) * share
    r = max(0.0, math.log((count + 5 * share) / (usual + 5 * share)))
    return r**3 / (r**2 + 4 / usual)


def test_trust_is_the_smallest_weight_within_one_standard_error() -> None:
    g = torch.Generator().manual_seed(0)
    t, layers = torch.randn(2, 200, generator=g).double().unbind()
    correct = torch.bernoulli(torch.sigmoid(0.5 * t + 0.5 * layers), generator=g)
    losses = []
    for k in TRUSTS:
        p = 1 / (1 + np.exp(-((1 - k) * t.numpy() + k * layers.numpy())))
        losses.append(-np.where(correct.numpy() > 0, np.log(p), np.log(1 - p)))
    best = min(losses, key=lambda loss: loss.mean())
    allowed = [
        k
        for k, loss in zip(TRUSTS, losses, strict=True)
        if loss.mean() <= best.mean() + (loss - best).std(ddof=1) / 200**0.5
    ]
    assert choose_trust(t, layers, correct) == min(allowed)


def test_trust_is_nothing_where_layers_are_noise_and_all_where_they_know() -> None:
    g = torch.Generator().manual_seed(1)
    t = torch.randn(500, generator=g).double() + 1
    correct = torch.bernoulli(torch.sigmoid(t), generator=g)
    assert choose_trust(t, t + torch.randn(500, generator=g), correct) == 0.0
    assert choose_trust(t, 6 * (2 * correct - 1), correct) == 1.0


def test_moved_is_the_formula_of_the_docstring() -> None:
    zeros = torch.zeros(2, 2).double()
    centre, spread = torch.tensor([0.8, 0.9]), torch.tensor([0.1, 0.2])
    flat = Environment(torch.zeros(3, 2), centre, spread, zeros[0], zeros, torch.ones(3) / 3)
    means, counts = [(0.7, 0.9), (0.3, 1.0)], [50, 10]
    found = flat.displacement(torch.tensor(means).double(), torch.tensor(counts))
    for row in range(2):
        for j in range(2):
            u = (means[row][j] - float(centre[j])) / float(spread[j])
            u = u * u * u / (u * u + 4 / counts[row])
            assert float(found[row, j]) == pytest.approx(math.copysign(math.log(1 + abs(u)), u), abs=1e-6)


def test_a_window_leans_by_a_weighted_sum_from_0_to_1() -> None:
    w, S = torch.tensor([-0.5, 0.25]).double(), torch.tensor([[2.0, 0.5], [0.5, 1.0]]).double()
    environment = Environment(torch.zeros(1, 2), torch.zeros(2), torch.ones(2), w, S, torch.ones(1))
    m = torch.tensor([[-0.4, 0.2], [1.0, -1.0], [-3.0, 0.0]]).double()
    torch.testing.assert_close(environment.lean(m), torch.tensor([0.25, 0.0, 1.0]).double())
    expected = [2 * a * a + a * b + b * b for a, b in m.tolist()]
    torch.testing.assert_close(environment.lean_variance(m), torch.tensor(expected).double())


def test_gate_and_window_are_heard_as_two_witnesses() -> None:
    calibrator, (features, _) = fitted(), world(60, 3, 0.7)
    model = calibrator.evidence_
    assert model.shift is not None
    assert model.gate is not None
    assert model.environment is not None
    evidence = layer_evidence(model.reference, features)
    view = model.view(features, evidence)
    inside, shift = model.inside.log_odds(view), model.shift.log_odds(view)
    opinions = model.environment.opinions(inside, shift, view.label)
    k = model.environment.lean(
        model.environment.displacement(opinions.mean(dim=0, keepdim=True), torch.tensor([60]))
    )
    g = model.gate(view, evidence.place)
    assert bool((g > 0).any())
    assert 0 < float(k) < 1
    f = inside + (1 - (1 - g * min(1.0, float(k) / 0.4)) * (1 - k)) * (shift - inside)
    for i, c in enumerate(view.label.tolist()):
        r = crowding(int((view.label == c).sum()), 60, float(model.environment.shares[c]))
        f[i] -= model.environment.crowded * float(k) * r
    found = calibrator.predict(features, context="all").confidence
    torch.testing.assert_close(found, torch.sigmoid(f), rtol=0, atol=1e-7)


def test_the_gate_is_believed_as_far_as_the_window_has_seen_something() -> None:
    eye = torch.eye(2).double()
    environment = Environment(torch.zeros(1, 2), torch.zeros(2), torch.ones(2), eye[0], eye, torch.ones(1))
    m = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [0.2, 0.0], [0.4, 0.0], [0.7, 0.0], [3.0, 0.0]]).double()
    found = environment.joined(torch.full((6,), 0.5).double(), m)
    expected = [0.0, 0.0, 1 - 0.75 * 0.8, 1 - 0.5 * 0.6, 1 - 0.5 * 0.3, 1.0]
    torch.testing.assert_close(found, torch.tensor(expected).double())
    nothing = environment.displacement(torch.zeros(1, 2).double(), torch.tensor([0]))
    assert float(environment.joined(torch.tensor([0.5]).double(), nothing)) == 0.5


def test_an_empty_context_tells_nothing() -> None:
    calibrator, (features, _) = fitted(), world(30, 3, 1.0)
    empty = calibrator.predict(features, context=Context(torch.zeros(5).double()))
    torch.testing.assert_close(empty.confidence, calibrator.predict(features).confidence, rtol=0, atol=1e-7)


def test_a_context_of_another_network_is_refused() -> None:
    with pytest.raises(ValueError, match="holds 5 sums"):
        fitted().predict(world(30, 3)[0], context=Context(torch.zeros(12).double()))


@pytest.mark.parametrize(
    "numbers",
    [
        {},
        {"shift": 0.0, "domain": None, "classes": [1]},
        {"shift": 0.0, "domain": 0.0, "classes": 3},
        {"shift": 0.0, "domain": 0.0, "classes": [[1]]},
        {"shift": 0.0, "domain": 0.0, "classes": ["one"]},
        {"shift": 0.0, "domain": 0.0, "classes": [4, -1]},
        {"shift": math.nan, "domain": 0.0, "classes": [4, 1]},
    ],
)
def test_numbers_that_are_no_context_are_refused(numbers: Any) -> None:
    with pytest.raises(ValueError, match="a context h"):
        Context.from_dict(numbers)


def test_crowding_is_the_formula_of_the_docstring() -> None:
    shares = torch.tensor([0.5, 0.3, 0.2]).double()
    none = torch.zeros(2, 2).double()
    environment = Environment(none[:1].expand(3, 2), none[0], torch.ones(2), none[0], none, shares)
    counts = torch.tensor([[10.0, 2.0, 28.0], [20.0, 12.0, 8.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
    sums = torch.cat([torch.zeros(4, 2), counts], dim=1).double()
    window, label = torch.arange(4).repeat_interleave(3), torch.arange(3).repeat(4)
    found = environment.surroundings(sums, window, label).crowding
    for i, (w, c) in enumerate(zip(window.tolist(), label.tolist(), strict=True)):
        n = int(counts[w].sum())
        expected = crowding(int(counts[w, c]), n, float(shares[c])) if n else 0.0
        assert float(found[i]) == pytest.approx(expected, abs=1e-12)
    assert float(found[2]) > 0.5  # 28 instead of 9
    assert float(found[:2].max()) == 0.0


def test_crowding_counts_as_far_as_the_window_has_moved() -> None:
    eye = torch.eye(2).double()
    flat = torch.zeros(1, 2), torch.zeros(2), torch.ones(2)
    environment = Environment(*flat, eye[0], eye, torch.ones(1), crowded=0.5, crowded_variance=0.04)
    m = torch.tensor([[0.0, 0.0], [0.5, 0.0], [3.0, 0.0], [torch.nan, torch.nan]]).double()
    seen = Surroundings(m, torch.full((4,), 2.0).double())
    torch.testing.assert_close(environment.doubt(seen), torch.tensor([0.0, 0.5, 1.0, 0.0]).double())
    expected = torch.tensor([0.0, 0.04, 0.16, 0.0]).double()
    torch.testing.assert_close(environment.doubt_variance(seen), expected)


def test_a_network_that_answers_with_one_class_when_lost_is_found_out() -> None:
    """Under shift many answers become class 0, whatever the sample: no layer tells, the window does."""
    rows, inside, _ = made_rows(600)
    g = torch.Generator().manual_seed(8)
    lost = (torch.rand(len(rows), generator=g) < 0.8 * rows.strength) & rows.is_copy
    view = replace(rows.view, label=torch.where(lost, 0, rows.view.label))
    correct = torch.where(lost, (torch.rand(len(rows), generator=g) < 1 / 3).double(), rows.correct)
    collapsed = FittedRows(view, correct, rows.group, rows.family, rows.strength)
    shift = inside - 2.0 * rows.strength
    environment = fit_environment(collapsed, inside, shift, 3, window=50, seed=0)

    def doubt(strength: float, seen_by: FittedRows) -> Tensor:
        some = (rows.strength == strength).nonzero()[:50, 0]
        label = seen_by.view.label[some]
        opinions = environment.opinions(inside[some], shift[some], label)
        one = torch.zeros_like(label)
        seen = environment.surroundings(environment.sums(opinions, label, one, 1), one, label)
        found = environment.doubt(seen)
        return torch.stack([found[label == 0].mean(), found[label != 0].mean()])

    moved, still, mixed = doubt(1.0, collapsed), doubt(0.0, collapsed), doubt(1.0, rows)
    assert float(moved[0]) > 0.3
    assert float(moved[1]) == 0.0
    assert float(still.max()) < 0.02  # where nothing has moved the mix of classes does not matter
    assert float(mixed.max()) < 0.1  # where it is as usual neither


def test_without_crowding_the_mix_of_classes_does_not_matter() -> None:
    shifted = world(400, 3, 1.5)[0]
    order = shifted.label.argsort(stable=True)
    alike = shifted[order[:60]]
    mean = {}
    for crowding in (True, False):
        calibrator = fitted(crowding=crowding)
        environment = calibrator.evidence_.environment
        assert environment is not None
        assert (environment.crowded > 0) == crowding
        mean[crowding] = float(calibrator.predict(alike, context="all").confidence.mean())
    assert mean[True] < mean[False]


def test_in_a_mixed_window_the_gate_tells_who_has_moved() -> None:
    calibrator = fitted()
    clean, _ = world(70, 3)
    shifted, _ = world(30, 4, 1.5)
    whole = Features.concatenate([Features(f.logits, f.layers) for f in (clean, shifted)])
    before = torch.cat([calibrator.predict(f).confidence for f in (clean, shifted)])
    after = calibrator.predict(whole, context="all").confidence
    assert float((after - before).abs()[:70].mean()) < 0.05  # of the clean ones hardly anything changes
    alone = LayerEvidence.predict(fitted(gated=False), whole, context="all").confidence
    assert float(after[70:].mean()) < float(alone[70:].mean())


def test_environment_learns_what_shift_does_and_nothing_in_domain() -> None:
    rows, inside, _ = made_rows()
    shift = inside - 4.0 * rows.strength  # more than the truth, which is 3
    environment = fit_environment(rows, inside, shift, 3, window=50, seed=0)
    opinions = environment.opinions(inside, shift, rows.view.label)
    for strength, limit in ((0.0, 0.1), (0.5, 0.5), (1.0, 0.45)):  # either expert errs more
        some = (rows.strength == strength).nonzero()[:50, 0]
        m = environment.displacement(opinions[some].mean(dim=0, keepdim=True), torch.tensor([50]))
        f = inside[some] + environment.lean(m) * (shift - inside)[some]
        assert float((f - (rows.view.t[some] - 3.0 * strength)).abs().mean()) < limit


def test_left_out_families_are_missed_by_what_makes_their_mean_right() -> None:
    f, correct = torch.tensor([2.0, 1.0, 3.0, 0.5]).double(), torch.tensor([1.0, 0.0, 0.0, 1.0]).double()
    delta = _missed(f, correct)
    assert float(torch.sigmoid(f + delta).mean()) == pytest.approx((2 + 0.5) / 5, abs=1e-9)


def test_windows_of_one_strength() -> None:
    number = _window_numbers(torch.tensor([0.1, 0.1, 0.1, 0.5, 0.5]), 2)
    assert number.unique(return_inverse=True)[1].tolist() == [0, 0, 1, 2, 2]


def test_gate_tells_disturbed_from_original_and_spares_originals() -> None:
    rows, _, _ = made_rows()
    noise = torch.randn(len(rows), 4, generator=torch.Generator().manual_seed(3))
    place = torch.where(rows.is_copy[:, None], 1.5, 0.0) + noise
    inside = shift = torch.zeros(len(rows)).double()
    gate = fit_gate(rows, place, inside, shift, 0.9)
    lean = gate(rows.view, place)
    assert float((lean[~rows.is_copy] > 0).double().mean()) < 0.13
    assert float(lean[rows.is_copy].mean()) > 0.3
    assert (lean >= 0).all()
    assert (lean <= 1).all()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(4))
    same = fit_gate(rows[order], place[order], inside, shift, 0.9)
    torch.testing.assert_close(same.weights, gate.weights, atol=1e-7, rtol=1e-6)
    assert same.guard == pytest.approx(gate.guard, abs=1e-7)


def test_guard_lets_few_originals_pass_unless_that_helps_them() -> None:
    g = torch.Generator().manual_seed(5)
    share, inside = torch.rand(200, generator=g).double() * 0.9, torch.full((200,), 2.0).double()
    shift = torch.full((200,), -1.0).double()
    right = torch.ones(200).double()
    most = float(share.quantile(0.99))
    assert choose_guard(share, inside, shift, right) == pytest.approx(most)  # handing over only costs
    wrong = torch.where(share > share.quantile(0.9), 0.0, right)
    assert choose_guard(share, inside, shift, wrong) == pytest.approx(float(share.quantile(0.9)))
    assert choose_guard(torch.ones(200).double(), inside, shift, right) == 0.99
    few = [x[:199] for x in (share, inside, shift, right)]
    assert choose_guard(*few) == 1.0  # nobody knows who is one in a hundred
    # the lowest guard whose gain is beyond one standard error, by brute force
    mixed = torch.where(torch.rand(200, generator=g) < 0.9 - 0.5 * (share > 0.8), 1.0, 0.0).double()
    expected = most
    for tried in (0.98, 0.95, 0.9):
        guard = np.quantile(share.numpy(), tried)
        lean = np.maximum((share.numpy() - guard) / (1 - guard), 0)
        p, q = 1 / (1 + np.exp(-(2.0 - 3.0 * lean))), 1 / (1 + np.exp(-2.0))
        y = mixed.numpy()
        after, before = (-(y * np.log(c) + (1 - y) * np.log(1 - c)) for c in (p, q))
        gain = before - after
        if gain.mean() >= gain.std(ddof=1) / np.sqrt(200) and (gain != 0).any():
            expected = guard
    assert choose_guard(share, inside, shift, mixed) == pytest.approx(expected)


def test_novelty_is_energy_disagreement_and_distance() -> None:
    g = torch.Generator().manual_seed(6)
    t, A, N = (torch.randn(shape, generator=g).double() for shape in ((50,), (50, 3), (50, 3)))
    logits = torch.randn(50, 4, generator=g)
    view = View(torch.stack([t, t], dim=1), A, N, torch.zeros(50, dtype=torch.long))
    usual = fit_strangeness(view, energy(logits, 2.0))
    e = -np.log(np.exp(logits.double().numpy() / 2).sum(axis=1))
    a = A.numpy().mean(axis=1)
    standard = [(x - np.median(x)) / (1.4826 * np.median(np.abs(x - np.median(x)))) for x in (e, a)]

    def beyond(z: np.ndarray) -> np.ndarray:
        return np.log1p(np.log1p(np.exp(z)))

    expected = beyond(standard[0]) + beyond(-standard[1]) + beyond(N.numpy()).max(axis=1) / 3
    np.testing.assert_allclose(usual(view, energy(logits, 2.0)).numpy(), expected, rtol=1e-9)


def test_prediction_without_context_does_not_depend_on_its_neighbours() -> None:
    calibrator, (features, _) = fitted(), world(60, 3, 0.7)
    whole, one = calibrator.predict(features), calibrator.predict(features[[7]])
    torch.testing.assert_close(one.confidence, whole.confidence[[7]], rtol=0, atol=1e-7)


def test_contexts_of_every_form_agree() -> None:
    calibrator, (features, _) = fitted(), world(100, 3, 1.0)
    everything = calibrator.predict(features, context="all").confidence
    parts = calibrator.context(features[:30]) + calibrator.context(features[30:])
    forms: list[Any] = [100, np.zeros(100, int), torch.zeros(100).long(), calibrator.context(features)]
    for context in [*forms, features, parts, Context.from_dict(parts.as_dict())]:
        found = calibrator.predict(features, context=context).confidence
        torch.testing.assert_close(found, everything, rtol=0, atol=1e-7)
    halves = [calibrator.predict(part, "all").confidence for part in (features[:50], features[50:])]
    windows = calibrator.predict(features, 50).confidence
    torch.testing.assert_close(windows, torch.cat(halves), rtol=0, atol=1e-7)
    assert float((windows - everything).abs().max()) > 1e-4


def test_terms_of_a_context_add_up_and_name_the_environment() -> None:
    calibrator, (features, _) = fitted(), world(80, 3, 1.5)
    prediction = calibrator.predict(features, context="all")
    assert prediction.layers is not None
    assert prediction.layers.names[-1] == "environment"
    before = torch.logit(features.confidence.double())
    inside = before.abs() < 12  # single precision of the softmax
    whole = torch.logit(prediction.confidence) - before
    torch.testing.assert_close(prediction.layers.mean.sum(dim=1)[inside], whole[inside], atol=1e-2, rtol=1e-3)


@pytest.mark.parametrize(
    ("context", "error", "says"),
    [
        ("some", ValueError, "context must be 'all'"),
        (0, ValueError, "at least 1 sample"),
        (2.5, TypeError, "whole number"),
        (np.zeros(3, int), ValueError, "one whole number or name per sample"),
    ],
)
def test_a_context_that_makes_no_sense_is_refused(context: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fitted().predict(world(20, 3)[0], context=context)


def test_sorted_samples_are_no_windows() -> None:
    features, _ = world(200, 3)
    order = features.confidence.argsort()
    with pytest.raises(ValueError, match="sorted by confidence"):
        fitted().predict(features[order], context=50)
    assert window_numbers("all", features.confidence[order]).tolist() == [0] * 200


def test_a_context_needs_copies_and_a_method_that_takes_it() -> None:
    features, labels = world(100, 1)
    with pytest.raises(ValueError, match="without perturbed copies"):
        LayerEvidence().fit(features, labels).predict(features, context="all")
    with pytest.raises(ValueError, match="takes no context"):
        get("temperature").fit(features, labels).predict(features, context="all")


def test_every_fit_measures_itself() -> None:
    clean, y = world(250, 1)
    parts = [Features(clean.logits, clean.layers, torch.arange(250), torch.zeros(250), torch.zeros(250))]
    for family, noise in ((1, 0.7), (1, 1.5), (2, 0.7), (2, 1.5)):  # two families of the same nature
        copy = world(250, 1, noise)[0]
        where = torch.full((250,), family), torch.full((250,), noise / 1.5)
        parts.append(Features(copy.logits, copy.layers, torch.arange(250), *where))
    calibrator = LayerEvidence().fit(Features.concatenate(parts), y.repeat(5), reference=world(400, 0))
    assert set(calibrator.check_) == {"in domain", "left-out families"}
    for table in calibrator.check_.values():
        assert set(table) == {"uncalibrated", "temperature", "layer evidence"}
    alone = torch.softmax(clean.logits.double(), dim=1).amax(dim=1)  # the network as it is
    expected = nll_correct(alone, clean.correct(y))
    assert calibrator.check_["in domain"]["uncalibrated"]["nll"] == pytest.approx(expected, rel=1e-6)
    shifted = calibrator.check_["left-out families"]
    assert shifted["layer evidence"]["nll"] < shifted["temperature"]["nll"]
    assert "temperature scaling" in calibrator.verdict_
    features, labels = world(100, 1)
    assert "nothing is known about shift" in LayerEvidence().fit(features, labels).verdict_


def test_where_layers_do_not_help_the_answer_is_temperature_scaling() -> None:
    calibrator = fitted(trust=0.0, gated=False)
    features, _ = world(50, 5)
    tempered = torch.softmax(features.logits.double() / calibrator.evidence_.temperature, 1).amax(1)
    torch.testing.assert_close(calibrator.predict(features).confidence, tempered, atol=1e-6, rtol=0)


def test_context_and_check_survive_saving(tmp_path: Path) -> None:
    calibrator, (features, _) = fitted(), world(60, 3, 1.0)
    again = salgp.load(calibrator.save(tmp_path / "saved"))
    for context in (None, "all"):
        a, b = calibrator.predict(features, context), again.predict(features, context)
        assert torch.equal(a.confidence, b.confidence)
        assert torch.equal(a.upper, b.upper)
    assert again.check_ == calibrator.check_


def test_evidence_has_a_place_in_every_layer() -> None:
    calibrator, (features, _) = fitted(), world(9, 3)
    reference = calibrator.evidence_.reference
    first = reference.layers["one"].project(features.layers["one"])[:, :16].float()
    torch.testing.assert_close(layer_evidence(reference, features).place[:, : first.shape[1]], first)


def test_a_narrow_layer_has_a_narrow_place() -> None:
    g = torch.Generator().manual_seed(0)
    wide, narrow = torch.randn(120, 40, generator=g), torch.randn(120, 5, generator=g)
    features = Features(torch.randn(120, 3, generator=g), {"wide": wide, "narrow": narrow})
    reference = make_reference(features, torch.arange(120) % 3, width=32)
    place = layer_evidence(reference, features[:7]).place
    assert place.shape == (7, 16 + 5)
    for name, columns in (("wide", place[:, :16]), ("narrow", place[:, 16:])):
        expected = reference.layers[name].project(features.layers[name][:7])[:, :16].float()
        torch.testing.assert_close(columns, expected, atol=1e-4, rtol=1e-4)


def test_an_exported_gate_gives_the_same_confidence(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    calibrator, (features, _) = fitted(), world(40, 3, 3.0)
    assert calibrator.evidence_.gate is not None
    session = onnxruntime.InferenceSession(str(export_head(calibrator, tmp_path / "head.onnx")))
    given = {"logits": features.logits, **{f"layers.{k}": x for k, x in features.layers.items()}}
    found = session.run(["confidence"], {k: x.numpy() for k, x in given.items()})[0]
    np.testing.assert_allclose(found, calibrator.predict(features).confidence.numpy(), atol=1e-5)
    inside = calibrator.evidence_.inside.log_odds(
        calibrator.evidence_.view(features, layer_evidence(calibrator.evidence_.reference, features))
    )
    assert np.abs(found - torch.sigmoid(inside).numpy()).max() > 0.01  # the gate did something


def test_variance_of_temperature_scaling_is_that_of_a_ridge_logistic_regression() -> None:
    calibrator, (features, _) = fitted(trust=0.0, gated=False), world(30, 5)
    t = calibrator.seen_.view.t[~calibrator.seen_.is_copy].numpy()
    p = 1 / (1 + np.exp(-t))
    H = 4.0 * np.eye(2)
    for ti, pi in zip(t, p, strict=True):
        H += pi * (1 - pi) * np.outer([1, ti], [1, ti])
    model = calibrator.evidence_
    view = model.view(features, layer_evidence(model.reference, features))
    x = np.stack([np.ones(30), view.t.numpy()], axis=1)
    expected = np.einsum("ni,ij,nj->n", x, np.linalg.inv(H), x)
    np.testing.assert_allclose(model.inside.opinion(view).variance.numpy(), expected, rtol=1e-9)


def test_few_errors_do_not_make_the_interval_useless() -> None:
    features, labels = world(200, 5)
    almost = features.label.where(torch.arange(200) > 1, labels)  # at most two errors
    found = LayerEvidence(trust=0.0).fit(features, almost).predict(features)
    sure = found.confidence > 0.99
    assert float(found.lower[sure].mean()) > 0.9
