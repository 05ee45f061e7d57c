"""Two experts, the shift weight of a window, over-prediction, contexts, and features that are too long."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from blobs import fitted, world

from salgp.calibrators.evidence import fitting
from salgp.calibrators.evidence.fitting import TrainingRows, fit_mixture
from salgp.calibrators.evidence.layer_spaces import layer_evidence
from salgp.calibrators.evidence.mixture import Mixture, Scales
from salgp.calibrators.evidence.windows import Context, compressed, over_prediction, window_sums
from salgp.features import Features


def by_hand(u: float, noise: float) -> float:
    shrunk = u**3 / (u**2 + noise)
    return math.copysign(math.log(1 + abs(shrunk)), shrunk)


def test_compressed_by_hand() -> None:
    u, noise = torch.tensor([[0.5, -2.0], [3.0, 0.1]]).double(), torch.tensor([16.0, 16.0 / 50]).double()
    expected = [[by_hand(float(x), float(m)) for x in row] for row, m in zip(u, noise, strict=True)]
    np.testing.assert_allclose(compressed(u, noise[:, None]).numpy(), expected, atol=1e-12)
    assert abs(by_hand(0.5, 16)) < 0.01  # one sample half a standard deviation away tells nothing
    assert by_hand(0.5, 16 / 10_000) == pytest.approx(math.log(1.5), abs=0.01)


def test_over_prediction_by_hand() -> None:
    cases = [(1, 1, 0.1), (40, 50, 0.1), (5, 50, 0.1), (0, 10, 0.3), (10, 10, 0.5)]
    columns = torch.tensor(cases, dtype=torch.float64).T
    found = over_prediction(*columns)
    for value, (count, n, share) in zip(found.tolist(), cases, strict=True):
        usual = 1 + (n - 1) * share
        r = max(0.0, math.log(max(count, 1) / usual))
        assert value == pytest.approx(r**3 / (r**2 + 4 / usual), abs=1e-12)
    assert found[0] == 0  # a single sample is not predicted too often
    assert found[2] == 0  # nor is a class as often as usual


def test_a_window_of_one_is_a_single_sample() -> None:
    calibrator, (features, _) = fitted(), world(40, 3, 1.0)
    alone, one = calibrator.predict(features), calibrator.predict(features, context=list(range(40)))
    torch.testing.assert_close(one.confidence, alone.confidence, rtol=0, atol=1e-9)
    first = calibrator.predict(features[[7]], context=1)
    torch.testing.assert_close(first.confidence, alone.confidence[7:8], rtol=0, atol=1e-6)


def test_the_confidence_is_the_formula_of_the_docstring() -> None:
    calibrator, (features, _) = fitted(), world(60, 3, 1.0)
    mixture, samples = calibrator.mixture_, calibrator._samples(features)
    assert mixture.shift is not None
    assert mixture.window is not None
    assert mixture.score is not None
    window, label = mixture.window, samples.label
    f_in = samples.design @ mixture.in_domain.weights + mixture.in_domain.offsets[label]
    f_shift = samples.design @ mixture.shift.weights + mixture.shift.offsets[label]
    s = torch.sigmoid(torch.stack([samples.score_inputs @ mixture.score, f_shift], dim=1))
    u = ((s - window.centre) / window.scale).mean(dim=0)
    k = sum(float(w) * by_hand(float(x), window.noise / 60) for w, x in zip(window.weights, u, strict=True))
    assert 0 < k < 1
    f = f_in + k * (f_shift - f_in)
    for i, c in enumerate(label.tolist()):
        count = torch.tensor([float((label == c).sum())])
        r = float(over_prediction(count, torch.tensor([60.0]), window.shares[c : c + 1]))
        f[i] -= k * window.over_prediction * r
    f /= (1 + math.pi / 8 * k**2 * mixture.level_variance) ** 0.5
    f = (f + math.log(2)) / samples.norm_excess - math.log(2)
    found = calibrator.predict(features, context="all").confidence
    torch.testing.assert_close(found, torch.sigmoid(f), rtol=0, atol=1e-7)


def test_no_shift_weight_where_a_window_looks_like_calibration() -> None:
    calibrator, mixture = fitted(), fitted().mixture_
    assert mixture.window is not None
    mean = {}
    for noise in (0.0, 1.5):
        samples = calibrator._samples(world(500, 3, noise)[0])
        sums = window_sums(mixture.parts(samples), torch.arange(500) // 50)
        k = mixture(samples, sums).shift_weight
        mean[noise] = float(k.mean())
        assert bool(((k >= 0) & (k <= 1)).all())
    assert mean[0.0] < 0.05
    assert mean[1.5] > 0.4
    usual = torch.zeros(1, 5).double()
    usual[0, 2:] = 50 * mixture.window.shares  # statistics at their mean, classes as often as usual
    m, r = mixture.window.describe(usual, torch.zeros(3).long(), torch.arange(3))
    assert mixture.window.weigh(m).tolist() == [0, 0, 0]
    torch.testing.assert_close(r, torch.zeros(3).double(), atol=1e-3, rtol=0)


def test_terms_add_up_to_the_change_of_log_odds() -> None:
    calibrator = fitted(layers_in_domain=True)
    for factor in (1.0, 50.0):
        features = longer(world(40, 3, 1.0)[0], factor)
        top, _ = features.logits.double().max(dim=1)
        before = (top - features.other_logits.double().logsumexp(dim=1)).clamp_max(20)
        for context in (None, "all"):
            p = calibrator.predict(features, context)
            assert p.layers is not None
            after = torch.logit(p.confidence)
            kept = after.abs() < 13  # confidences end at a millionth
            terms = p.layers.mean.sum(dim=1)
            torch.testing.assert_close(terms[kept], (after - before)[kept], atol=1e-6, rtol=1e-6)
            assert float(kept.double().mean()) > 0.9


# --- a column in other units


def longer(features: Features, factor: float) -> Features:
    """What a column in other units does to a network without normalisation: everything grows."""
    return Features(factor * features.logits, {name: factor * x for name, x in features.layers.items()})


@pytest.mark.parametrize("layers", [False, True])
@pytest.mark.parametrize("context", [None, "all"])
def test_a_table_in_other_units_gets_chance(layers: bool, context: str | None) -> None:
    """One column times 10,000: the linear network is as sure as can be, and its confidence is chance."""
    calibrator, (home, _) = fitted(layers_in_domain=layers), world(200, 3)
    x = home.layers["one"].clone()
    x[:, 0] *= 10_000
    moved = Features(6.0 * x[:, :3], {"one": x, "two": torch.cat([x, x[:, :3].square()], dim=1)})
    near, far = calibrator.predict(home, context), calibrator.predict(moved, context)
    assert float(near.confidence.mean()) > 0.7
    off = (far.confidence - 1 / 3).abs()
    assert float(off.median()) < 1e-3
    assert float(off.max()) < 0.1  # a sample whose column is near 0 is not that far away
    assert far.novelty is not None
    assert near.novelty is not None
    assert float((far.novelty - near.novelty).median()) > 5


def test_log_odds_are_divided_by_the_norm_excess() -> None:
    calibrator, (home, _) = fitted(), world(50, 4)
    moved = Features(home.logits, longer(home, 30.0).layers)
    norm = layer_evidence(calibrator.reference_, moved).norm
    excess = (norm / calibrator.scales_.largest_norm).clamp_min(1.0)
    assert bool((excess > 1.5).any())
    samples = replace(calibrator._samples(moved), norm_excess=torch.ones(50).double())
    free, chance = calibrator.mixture_(samples).mean, -math.log(2)
    expected = torch.sigmoid(chance + (free - chance) / excess)
    torch.testing.assert_close(calibrator.predict(moved).confidence, expected)


def test_up_to_the_longest_nothing_changes() -> None:
    calibrator = fitted()
    assert bool((calibrator._samples(world(250, 1)[0]).norm_excess == 1).all())
    assert bool((calibrator._samples(longer(world(250, 1)[0], 1.5)).norm_excess > 1).any())


def lost_in_domain(mixture: Mixture, rows: TrainingRows) -> float:
    """Mean confidence that the calibration samples lose where each is a window of its own."""
    assert mixture.window is not None
    samples = rows.samples[rows.original.nonzero()[:, 0]]
    own = mixture.in_domain.log_odds(samples.design, samples.label)
    return float((torch.sigmoid(own) - torch.sigmoid(mixture(samples).mean)).mean())


def test_the_noise_is_the_least_that_costs_nothing_in_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, tried, lost = fitted().training_rows_, fitting.NOISE, []
    for noise in tried:
        monkeypatch.setattr(fitting, "NOISE", (noise,))
        lost.append(lost_in_domain(fit_mixture(rows, 3, layers_in_domain=None, seed=0), rows))
    assert lost == sorted(lost, reverse=True)
    monkeypatch.setattr(fitting, "NOISE", tried)
    for i, most in enumerate([lost[0] + 1e-9, lost[1] + 1e-9, lost[2] + 1e-9, 0.0]):
        monkeypatch.setattr(fitting, "LOST", most)
        found = fit_mixture(rows, 3, layers_in_domain=None, seed=0).window
        assert found is not None
        assert found.noise == tried[i]


# --- contexts


def test_contexts_add_up() -> None:
    calibrator, (features, _) = fitted(), world(90, 3, 1.0)
    parts = [calibrator.context(features[i : i + 30]) for i in (0, 30, 60)]
    whole = calibrator.context(features)
    together = parts[0] + parts[1] + parts[2]
    torch.testing.assert_close(together.total, whole.total, atol=1e-4, rtol=1e-6)
    assert together.count == 90
    p = calibrator.predict(features, context=whole)
    torch.testing.assert_close(
        p.confidence, calibrator.predict(features, "all").confidence, atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        p.confidence, calibrator.predict(features, features).confidence, atol=1e-6, rtol=0
    )


def test_environments_are_windows_of_their_own() -> None:
    calibrator = fitted()
    near, far = world(50, 3)[0], world(50, 4, 1.5)[0]
    both = Features.concatenate([near, far])
    found = calibrator.predict(both, context=["yard"] * 50 + ["street"] * 50).confidence
    expected = torch.cat([calibrator.predict(f, "all").confidence for f in (near, far)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


def test_an_empty_context_tells_nothing() -> None:
    calibrator, (features, _) = fitted(), world(30, 3, 1.0)
    empty = calibrator.predict(features, context=Context(torch.zeros(5).double()))
    torch.testing.assert_close(empty.confidence, calibrator.predict(features).confidence, rtol=0, atol=1e-9)


def test_a_context_of_another_network_is_refused() -> None:
    with pytest.raises(ValueError, match="5 sums"):
        fitted().predict(world(30, 3)[0], context=Context(torch.zeros(12).double()))


def test_without_over_prediction_the_mix_of_classes_does_not_matter() -> None:
    shifted = world(400, 3, 1.5)[0]
    alike = shifted[shifted.label.argsort(stable=True)[:60]]
    mean = {}
    for wanted in (True, False):
        calibrator = fitted(over_prediction=wanted)
        assert calibrator.mixture_.window is not None
        assert (calibrator.mixture_.window.over_prediction > 0) == wanted
        mean[wanted] = float(calibrator.predict(alike, context="all").confidence.mean())
    assert mean[True] < mean[False]


def test_variance_in_domain_without_layers_is_that_of_a_ridge_logistic_regression() -> None:
    calibrator, (features, _) = fitted(layers_in_domain=False), world(30, 5)
    rows = calibrator.training_rows_
    t = rows.samples.t[rows.original].numpy()
    p, H = 1 / (1 + np.exp(-t)), 4.0 * np.eye(2)
    for ti, pi in zip(t, p, strict=True):
        H += pi * (1 - pi) * np.outer([1, ti], [1, ti])
    samples = calibrator._samples(features)
    x = np.stack([np.ones(30), samples.t.numpy()], axis=1)
    expected = np.einsum("ni,ij,nj->n", x, np.linalg.inv(H), x)
    alone = replace(calibrator.mixture_, shift=None, score=None, window=None)
    np.testing.assert_allclose(alone.variance(samples, torch.zeros(30).double()).numpy(), expected, rtol=1e-8)


def test_an_unseen_family_widens_the_interval_by_the_squared_shift_weight() -> None:
    calibrator, samples = fitted(), fitted()._samples(world(40, 3, 1.5)[0])
    mixture = calibrator.mixture_
    k = mixture(samples).shift_weight
    assert float(k.max()) > 0.1
    none, some = (replace(mixture, shift_variance=v).variance(samples, k) for v in (0.0, 0.7))
    torch.testing.assert_close(some - none, 0.7 * k.square())


def test_confidence_is_the_mean_over_what_families_tell_of_the_level() -> None:
    calibrator, samples = fitted(), fitted()._samples(world(40, 3, 1.5)[0])
    mixture = calibrator.mixture_
    plain, some = (replace(mixture, level_variance=v)(samples) for v in (0.0, 3.0))
    k, draws = plain.shift_weight, torch.randn(200_000, generator=torch.Generator().manual_seed(0)).double()
    assert bool((k > 0.5).any())
    for i in range(40):
        level = 3.0**0.5 * float(k[i]) * draws
        mean = float(torch.sigmoid(plain.mean[i] + level).mean())
        assert float(torch.sigmoid(some.mean[i])) == pytest.approx(mean, abs=0.02)


def test_scales_of_another_shape_are_refused() -> None:
    """A pair in place of the largest norm, in a file edited on purpose, would fail in a prediction."""
    pair, one = torch.zeros(2), torch.zeros(())
    for energy, largest_norm in ((pair, pair), (one, one)):
        with pytest.raises(ValueError, match="largest norm"):
            Scales(1.0, torch.zeros(2, 3), torch.zeros(2, 3), energy, largest_norm)
