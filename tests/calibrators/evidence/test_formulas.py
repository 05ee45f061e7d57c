"""Every formula of the evidence and of the model, derived once more: dense NumPy, loops, known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from salgp.calibrators.evidence import condense, reference
from salgp.calibrators.evidence.model import (
    LARGEST_LOG_ODDS,
    STRETCH,
    Scales,
    columns,
    gated,
    height,
    log_odds,
    network_log_odds,
    sample_weights,
    scales_of,
    standardised,
)
from salgp.calibrators.evidence.reference import Evidence, layer_evidence, make_reference, white_space
from salgp.calibrators.layerwise.inputs import design
from salgp.features import Features


def plus(x: float) -> float:
    """log(1 + e^x)."""
    return math.log1p(math.exp(-abs(x))) + max(x, 0.0)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def test_columns_are_the_formula_sample_by_sample() -> None:
    t, A, N = random(30), random(30, 3, seed=1), 3 * random(30, 3, seed=2)
    X = columns(t[:, None], gated(A, N), height(N)).numpy()
    every = columns(t[:, None], gated(A, N), height(N), persistent=False).numpy()
    for i in range(30):
        for k in range(3):
            gate = 1 / (1 + 0.3 * plus(float(N[i, k]) - 1))
            assert X[i, 2 + k] == pytest.approx(float(A[i, k]) * gate, rel=1e-12)
            shared = min(float(x) for x in N[i, k:])  # as far as all later layers share it
            assert X[i, 5 + k] == pytest.approx(-math.log1p(plus(shared)), rel=1e-12)
            assert every[i, 5 + k] == pytest.approx(-math.log1p(plus(float(N[i, k]))), rel=1e-12)
    np.testing.assert_allclose(X[:, 0], 1.0)
    np.testing.assert_allclose(X[:, 1], t)


def test_novelty_that_only_an_early_layer_sees_does_not_persist() -> None:
    """Direction of the persistence: early novelty is forgiven by a calm late layer, not the other way."""
    zero = torch.zeros(1, 1).double()
    early = columns(zero, torch.zeros(1, 2).double(), height(torch.tensor([[5.0, 0.0]]).double()))[0, 4:]
    late = columns(zero, torch.zeros(1, 2).double(), height(torch.tensor([[0.0, 5.0]]).double()))[0, 4:]
    calm, loud = -math.log1p(plus(0.0)), -math.log1p(plus(5.0))
    assert early.tolist() == pytest.approx([calm, calm])
    assert late.tolist() == pytest.approx([calm, loud])


def test_log_odds_are_those_of_the_tempered_softmax_within_their_bound() -> None:
    features = Features(3 * random(40, 4).float())
    z = features.logits.double().numpy() / 1.7
    s = (np.exp(z) / np.exp(z).sum(1, keepdims=True)).max(1)
    expected = np.log(s / (1 - s))
    np.testing.assert_allclose(log_odds(features, 1.7, 50.0), expected, atol=1e-9)
    np.testing.assert_allclose(log_odds(features, 1.7, 1.0), np.clip(expected, -1, 1), atol=1e-9)
    assert (expected > 1).any()


def test_the_model_sees_log_odds_up_to_four() -> None:
    evidence = Evidence(random(3, 2), random(3, 2, seed=1), torch.zeros(3, 2), torch.ones(3))
    sure = Features(torch.tensor([[9.0, 0.0], [0.0, 3.0], [-9.0, 9.0]]))
    scales = Scales(torch.ones(2), torch.zeros(2), torch.ones(2), torch.ones(()), torch.ones(()))
    assert LARGEST_LOG_ODDS == 4.0
    assert design(sure, evidence, 1.0, scales)[:, 1].tolist() == pytest.approx([4.0, 3.0, 4.0])


def steady_log_odds(features: Features, evidence: Evidence, temperature: float, scales: Scales) -> Tensor:
    """The second of both log-odds; the first are those of the network as they are."""
    as_they_are, steady = network_log_odds(features, evidence, temperature, scales, 20.0).unbind(dim=1)
    torch.testing.assert_close(as_they_are, log_odds(features, temperature, 20.0))
    return steady


def test_steady_log_odds_are_those_at_the_usual_length() -> None:
    """Features twice as short give logits twice as small; at their usual length nothing has changed."""
    z = 0.5 * random(30, 4, seed=3)
    scales = Scales(torch.ones(1), torch.zeros(1), torch.ones(1), torch.tensor(5.0), torch.tensor(9.0))
    at_home = log_odds(Features(z), 1.3, LARGEST_LOG_ODDS)
    for stretch in (0.2, 0.5, 1.0, 3.0):
        length = torch.full((30,), 5.0 * stretch).double()
        evidence = Evidence(random(30, 1), random(30, 1), torch.zeros(30, 1), length)
        found = steady_log_odds(Features(stretch * z), evidence, 1.3, scales)
        torch.testing.assert_close(found, at_home)
    for length, factor in ((0.0, 1 / STRETCH), (1e9, STRETCH)):  # bounded
        evidence = Evidence(random(30, 1), random(30, 1), torch.zeros(30, 1), torch.full((30,), length))
        found = steady_log_odds(Features(z), evidence, 1.3, scales)
        torch.testing.assert_close(found, log_odds(Features(z), 1.3 * factor, LARGEST_LOG_ODDS))
    assert float(at_home.max()) <= LARGEST_LOG_ODDS


def test_the_length_is_that_of_the_last_layer() -> None:
    x, y = random(200, 3, seed=4), random(200, 5, seed=5)
    features = Features(x, {"a": x, "b": y})
    reference = make_reference(features, features.label)
    expected = y.square().sum(dim=1).sqrt()
    torch.testing.assert_close(layer_evidence(reference, features).length, expected)
    torch.testing.assert_close(layer_evidence(reference, features[:3]).length, expected[:3])  # at once


def test_scales_are_standard_deviation_median_and_scaled_median_deviation() -> None:
    A, N = 2 * random(101, 2), 3 + 0.5 * random(101, 2, seed=1)
    length = random(101, seed=2).abs()
    scales = scales_of(Evidence(A, N, torch.zeros(101, 2), length))
    assert float(scales.length) == pytest.approx(float(np.median(length.numpy())))
    np.testing.assert_allclose(scales.agreement, A.numpy().std(axis=0))
    np.testing.assert_allclose(scales.novelty, np.median(N.numpy(), axis=0))
    deviation = np.median(np.abs(N.numpy() - np.median(N.numpy(), axis=0)), axis=0)
    np.testing.assert_allclose(scales.spread, deviation / 0.6744897501960817, rtol=1e-4)
    many = torch.randn(20_000, 1, generator=torch.Generator().manual_seed(3)).double()
    wide = scales_of(Evidence(many, 5 * many, torch.zeros(20_000, 1), many[:, 0]))
    assert float(wide.spread) == pytest.approx(5.0, rel=0.03)  # a standard deviation for the normal law
    one = torch.ones(5, 1).double()
    flat = scales_of(Evidence(one, one, torch.zeros(5, 1), one[:, 0]))
    assert float(flat.agreement) == float(flat.spread) == 1e-6


def test_standardised_evidence_and_the_rows_its_scale_comes_from() -> None:
    evidence = Evidence(random(20, 2), random(20, 2, seed=1), torch.zeros(20, 2), torch.ones(20).double())
    first = torch.arange(12)
    features = Features(random(20, 3, seed=2).float())
    scales = scales_of(evidence[first])
    X = design(features, evidence, 1.0, scales)
    N = evidence.novelty.numpy()
    centre = np.median(N[:12], axis=0)
    spread = 1.4826 * np.median(np.abs(N[:12] - centre), axis=0)
    found = standardised(evidence, scales)
    np.testing.assert_allclose(found[0], evidence.agreement.numpy() / evidence.agreement.numpy()[:12].std(0))
    np.testing.assert_allclose(found[1], (N - centre) / spread)
    np.testing.assert_allclose(
        X, columns(log_odds(features, 1.0, 4.0)[:, None], gated(*found), height(found[1]))
    )


def test_weights_of_originals_copies_and_their_errors() -> None:
    is_copy = torch.tensor([False, False, True, True, True, True])
    correct = torch.tensor([1.0, 0.0, 1.0, 0.0, 0.0, 1.0]).double()
    weight = sample_weights(is_copy, correct, 0.6, 3.0)
    assert weight[:2].tolist() == pytest.approx([0.6, 0.6])
    assert float(weight.sum()) == pytest.approx(2.0)  # as many as there are originals
    assert weight[2:].tolist() == pytest.approx([0.1, 0.3, 0.3, 0.1])
    assert sample_weights(torch.zeros(2) > 0, correct[:2], 0.6, 3.0).tolist() == [1.0, 1.0]


def test_a_space_is_unit_length_centred_and_whitened_with_a_ridge() -> None:
    x = random(50, 6) * torch.tensor([5.0, 3.0, 2.0, 1.0, 0.5, 0.2])
    features, labels = Features(random(50, 3).float(), {"a": x.float()}), torch.arange(50) % 3
    space = make_reference(features, labels, width=4, precision="single").layers["a"]
    unit = x.float().double().numpy()
    unit = unit / np.linalg.norm(unit, axis=1, keepdims=True)
    centred = unit - unit.mean(axis=0)
    variance, V = np.linalg.eigh(centred.T @ centred / 49)
    variance, V = variance[::-1][:4], V[:, ::-1][:, :4]
    expected = centred @ (V / np.sqrt(variance + 1e-3 * variance[0]))
    assert space.points.shape == (50, 4)
    np.testing.assert_allclose(space.points.abs(), np.abs(expected), atol=1e-5)
    again = make_reference(features[:4], labels[:4], precision="single").layers[
        "a"
    ]  # fewer rows than columns
    few = unit[:4] - unit[:4].mean(axis=0)
    values = np.linalg.svd(few, compute_uv=False) ** 2 / 3
    kept = values[values > 1e-6 * values[0]]
    np.testing.assert_allclose(again.points.square().sum(0), 3 * kept / (kept + 1e-3 * kept[0]), rtol=1e-4)


def test_directions_of_less_than_a_millionth_are_dropped() -> None:
    variance = torch.tensor([2.0, 2 * 1.1e-6, 2 * 0.9e-6, 0.0]).double()
    space = white_space(torch.zeros(4).double(), variance, torch.eye(4).double(), 4)
    assert space.directions.shape == (4, 2)
    scale = [(2 + 2e-3) ** -0.5, (2.2e-6 + 2e-3) ** -0.5]
    np.testing.assert_allclose(space.directions, np.eye(4)[:, :2] * scale, rtol=1e-5)
    flat = white_space(torch.zeros(3), torch.zeros(3), torch.eye(3), 2)
    assert flat.directions.shape == (3, 1)  # one direction where nothing varies
    assert flat.points.shape == (0, 1)


def test_coordinates_of_new_samples_and_of_zeros() -> None:
    space = white_space(torch.tensor([0.5, 0.0]), torch.tensor([1.0, 0.5]), torch.eye(2), 2)
    scale = np.array([1.001**-0.5, 0.501**-0.5])
    np.testing.assert_allclose(space.project(torch.tensor([[3.0, 4.0]])), [[0.1, 0.8] * scale], rtol=1e-6)
    np.testing.assert_allclose(space.project(torch.zeros(1, 2)), [[-0.5, 0.0] * scale], rtol=1e-6)
    rough = space.project(torch.tensor([[3.0, 4.0]]), precise=False)
    assert rough.dtype == torch.float32
    np.testing.assert_allclose(rough, [[0.1, 0.8] * scale], rtol=1e-5)


def test_agreement_is_bounded_by_six() -> None:
    """A copy of a reference sample is infinitely near; the logarithm is cut at six, novelty at log 1e-9."""
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.3], [0.4, -1.0]])
    features = Features(torch.tensor([[5.0, 0.0], [0.0, 5.0], [5.0, 0.0], [0.0, 5.0]]), {"a": x})
    made = make_reference(features, torch.tensor([0, 1, 0, 1]), k=1, precision="single")
    assert layer_evidence(made, features).agreement.flatten().tolist() == pytest.approx([6.0] * 4)
    wrong = Features(features.logits.flip(1), {"a": x})
    assert layer_evidence(made, wrong).agreement.flatten().tolist() == pytest.approx([-6.0] * 4)


def test_class_statistics_against_a_loop() -> None:
    x, classes = random(60, 3) @ random(3, 3, seed=5), torch.arange(60) % 4
    names, means, factors = condense.class_statistics(x, classes, most=1000)
    X = x.numpy()
    groups = [X[classes.numpy() == c] for c in range(4)]
    scatter = [(g - g.mean(0)).T @ (g - g.mean(0)) for g in groups]
    within = sum(scatter) / (60 - 4)
    within = within + 1e-2 * np.trace(within) / 3 * np.eye(3)
    assert names.tolist() == [0, 1, 2, 3]
    for c in range(4):
        np.testing.assert_allclose(means[c], groups[c].mean(0))
        drawn = (scatter[c] + 3 * within) / (15 + 3)
        np.testing.assert_allclose(factors[c] @ factors[c].T, np.linalg.inv(drawn), rtol=1e-8)
    shared = condense.class_statistics(x, classes, most=4 * 9 - 1)[2]
    assert shared.shape == (1, 3, 3)
    np.testing.assert_allclose(shared[0] @ shared[0].T, np.linalg.inv(within), rtol=1e-8)
    assert condense.class_statistics(x, classes, most=4 * 9)[2].shape == (4, 3, 3)


@pytest.mark.parametrize("shared", [False, True])
def test_distances_by_class_statistics_are_mahalanobis(shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "FACTOR_ENTRIES", 1 if shared else 10**6)
    x, labels = random(90, 4).float() + 2 * torch.eye(3, 4)[torch.arange(90) % 3], torch.arange(90) % 3
    made = make_reference(Features(x[:, :3], {"a": x}), labels, form="statistics")
    query = Features(random(12, 3, seed=7).float(), {"a": random(12, 4, seed=8).float()})
    space = made.layers["a"]
    found = layer_evidence(made, query)
    y = space.project(query.layers["a"]).numpy()
    D = np.zeros((12, 3))
    for c in range(3):
        F = space.factors[0 if shared else c].double().numpy()
        D[:, c] = np.linalg.norm((y - space.points[c].double().numpy()) @ F, axis=1)
    own = D[np.arange(12), query.label]
    D_other = D.copy()
    D_other[np.arange(12), query.label] = np.inf
    np.testing.assert_allclose(found.agreement[:, 0], np.log(D_other.min(1)) - np.log(own), atol=1e-4)
    np.testing.assert_allclose(found.novelty[:, 0], np.log(D.min(1)), atol=1e-4)


def test_herded_samples_follow_the_mean() -> None:
    x = random(40, 3)
    chosen, total, free = [], np.zeros(3), list(range(40))
    for t in range(7):
        wanted = (t + 1) * x.numpy().mean(0) - total
        best = min(free, key=lambda i: float(np.square(x.numpy()[i] - wanted).sum()))
        free.remove(best)
        chosen.append(best)
        total = total + x.numpy()[best]
    assert torch.equal(condense.few_points(x, 7, "herding", 0), x[chosen])


def test_drawn_samples_are_rows_in_order_and_follow_the_seed() -> None:
    x = torch.arange(30.0)[:, None]
    first, other = (condense.few_points(x, 5, "sample", seed).flatten() for seed in (0, 1))
    assert len(first.unique()) == 5
    assert torch.equal(first, first.sort().values)
    assert not torch.equal(first, other)
    assert torch.equal(condense.few_points(x, 30, "sample", 0), x)


def test_points_in_eight_bits_are_off_by_half_a_step() -> None:
    x = random(50, 3)
    kept, step = condense.packed_points(x, "8-bit")
    assert step is not None
    np.testing.assert_allclose(step, x.abs().amax(0) / 127, rtol=1e-6)
    assert float((condense.unpacked(kept, step) - x).abs().div(step).max()) <= 0.5 + 1e-4
    assert int(kept.abs().max()) == 127


def test_a_few_points_for_each_of_many_classes() -> None:
    given = [(None, 2), (None, 50), (None, 51), (None, 2000), (None, 5000), (7, 10**6)]
    expected = [200, 200, 196, 5, 5, 7]
    assert [reference.points_per_class(size, n) for size, n in given] == expected
