"""Class mix: recovered, with an honest deviation; corrections that are Bayes' rule and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp import Prediction
from salgp.estimate import accuracy, adapt, class_mix

SOURCE = np.array([0.6, 0.3, 0.1])
TARGET = np.array([0.2, 0.3, 0.5])


def drawn(n: int, seed: int, mix: np.ndarray) -> tuple[Prediction, torch.Tensor]:
    """Normal classes; probabilities exact for ``SOURCE``, labels drawn from ``mix``."""
    rng = np.random.default_rng(seed)
    y = rng.choice(3, n, p=mix)
    x = 2 * np.eye(3)[y] + rng.normal(size=(n, 3))
    density = np.exp(-0.5 * ((x[:, None] - 2 * np.eye(3)) ** 2).sum(-1)) * SOURCE
    probs = torch.from_numpy(density / density.sum(1, keepdims=True))
    return Prediction(probs.argmax(1), probs, probs.amax(1)), torch.from_numpy(y)


CALIBRATION = drawn(5000, 999, SOURCE)[0]
"""Many samples, so that their own error hardly counts."""


def test_mix_is_found_with_an_honest_deviation() -> None:
    """200 batches of 400: standardised errors of unit size, 90 % intervals cover 90 %."""
    errors, hits = [], []
    for seed in range(200):
        mix = class_mix(drawn(400, seed, TARGET)[0], SOURCE, CALIBRATION)
        low, high = mix.interval()
        errors.append((mix.share - TARGET) / mix.std)
        hits.append((low <= TARGET) & (high >= TARGET))
        assert mix.converged
    assert np.abs(np.std(errors, axis=0) - 1).max() < 0.2
    assert np.abs(np.mean(hits, axis=0) - 0.9).max() < 0.07


def test_nothing_moved_is_rarely_denied() -> None:
    low = [class_mix(drawn(300, seed, SOURCE)[0], SOURCE, CALIBRATION).p_value < 0.1 for seed in range(200)]
    assert np.mean(low) < 0.1 + 3 * 0.021
    moved = class_mix(drawn(300, 0, TARGET)[0], SOURCE, CALIBRATION)
    assert moved.p_value < 1e-6
    assert "has changed" in str(moved)
    assert "not visibly" in str(class_mix(drawn(300, 1, SOURCE)[0], SOURCE, CALIBRATION))


def test_adapted_probabilities_are_those_of_the_new_mix() -> None:
    prediction, _ = drawn(50, 0, TARGET)
    density = prediction.probs.numpy() / SOURCE * TARGET
    expected = density / density.sum(1, keepdims=True)
    adapted = adapt(prediction, TARGET, SOURCE)
    np.testing.assert_allclose(adapted.probs.numpy(), expected, rtol=1e-12)
    assert torch.equal(adapted.label, prediction.label)
    np.testing.assert_allclose(adapted.confidence, expected[np.arange(50), prediction.label])
    same = adapt(prediction, SOURCE, SOURCE)
    np.testing.assert_allclose(same.probs, prediction.probs, rtol=1e-12)


def test_accuracy_where_only_the_mix_moved() -> None:
    prediction, y = drawn(20000, 3, TARGET)
    truth = float((prediction.label == y).double().mean())
    mix = class_mix(prediction, SOURCE, CALIBRATION)
    assert abs(accuracy(prediction).value - truth) > 0.03
    assert abs(accuracy(adapt(prediction, mix.share, SOURCE)).value - truth) < 0.012


def test_error_bars_move_with_the_confidence() -> None:
    probs = torch.tensor([[0.6, 0.4]], dtype=torch.float64)
    std = torch.tensor([0.01], dtype=torch.float64)
    given = Prediction(torch.tensor([0]), probs, probs[:, 0], std, probs[:, 0] - 0.05, probs[:, 0] + 0.05)
    adapted = adapt(given, [0.25, 0.75], [0.5, 0.5])

    def moved(s: float) -> float:
        return s / (s + 3 * (1 - s))

    assert float(adapted.lower[0]) == pytest.approx(moved(0.55))
    assert float(adapted.upper[0]) == pytest.approx(moved(0.65))
    assert float(adapted.std[0]) == pytest.approx((moved(0.6001) - moved(0.5999)) / 0.0002 * 0.01, rel=1e-5)


@pytest.mark.parametrize("mix", [[0.5, 0.5], [0.5, 0.5, 0.5], [1.0, 0.0, 0.0], [float("nan"), 0.5, 0.5]])
def test_wrong_mixes_say_so(mix: list[float]) -> None:
    with pytest.raises(ValueError, match="a class mix must"):
        class_mix(drawn(10, 0, SOURCE)[0], mix, CALIBRATION)


def biased(p: Prediction) -> Prediction:
    """Probabilities that are wrong class by class: one class counts three times."""
    probs = p.probs * torch.tensor([3.0, 1.0, 1.0], dtype=torch.float64)
    probs /= probs.sum(1, keepdim=True)
    return Prediction(probs.argmax(1), probs, probs.amax(1))


def test_calibration_takes_back_what_was_wrong_class_by_class() -> None:
    calibration = biased(drawn(20_000, 999, SOURCE)[0])
    assert class_mix(calibration, SOURCE, calibration).p_value == pytest.approx(1.0)
    same = [
        class_mix(biased(drawn(300, s, SOURCE)[0]), SOURCE, calibration).p_value < 0.1 for s in range(200)
    ]
    assert 0.04 < np.mean(same) < 0.17
    moved = class_mix(biased(drawn(2000, 7, TARGET)[0]), SOURCE, calibration)
    assert moved.p_value < 1e-6
    np.testing.assert_allclose(moved.share, TARGET, atol=0.05)


def test_calibration_of_another_network_and_an_empty_batch_are_refused() -> None:
    p = drawn(50, 0, SOURCE)[0]
    two = Prediction(torch.zeros(4, dtype=torch.long), torch.full((4, 2), 0.5), torch.full((4,), 0.5))
    with pytest.raises(ValueError, match="calibration has probabilities"):
        class_mix(p, SOURCE, two)
    with pytest.raises(ValueError, match="empty batch"):
        class_mix(p[:0], SOURCE, p)


def counted(n: int, seed: int) -> tuple[Prediction, np.ndarray]:
    """Calibration samples and the mix counted on them."""
    calibration, y = drawn(n, seed, SOURCE)
    return calibration, np.bincount(y.numpy(), minlength=3) / n


@pytest.mark.parametrize("batch", [300, 5000])
def test_a_mix_counted_on_few_samples_is_not_called_moved(batch: int) -> None:
    """100 times 300 calibration samples and a batch; p < .01 in 1 % by rights, 90 % intervals hold 90 %."""
    low, hits = [], []
    for seed in range(100):
        calibration, source = counted(300, 10_000 + seed)
        mix = class_mix(drawn(batch, seed, SOURCE)[0], source, calibration)
        low.append(mix.p_value < 0.01)
        lower, upper = mix.interval()
        hits.append((lower <= SOURCE) & (upper >= SOURCE))
    assert np.mean(low) <= 0.03
    assert np.abs(np.mean(hits, axis=0) - 0.9).max() < 0.07


def test_a_real_change_is_found_with_an_honest_deviation_also_from_few_samples() -> None:
    errors, p_values = [], []
    for seed in range(60):
        calibration, source = counted(300, 20_000 + seed)
        mix = class_mix(drawn(1000, seed, TARGET)[0], source, calibration)
        errors.append((mix.share - TARGET) / mix.std)
        p_values.append(mix.p_value)
    assert max(p_values) < 1e-6
    assert np.abs(np.std(errors, axis=0) - 1).max() < 0.25


def test_shares_sum_to_one_within_a_thousandth() -> None:
    p = Prediction(torch.zeros(4).long(), torch.full((4, 2), 0.5), torch.full((4,), 0.5))
    assert class_mix(p, [0.5, 0.5009], p).n == 4
    with pytest.raises(ValueError, match="sum to 1"):
        class_mix(p, [0.5, 0.5015], p)
    batch, _ = drawn(300, 0, SOURCE)
    rounded, exact = (class_mix(batch, factor * SOURCE, CALIBRATION) for factor in (0.9995, 1.0))
    np.testing.assert_allclose(rounded.share, exact.share, atol=1e-9)
    assert rounded.p_value == pytest.approx(exact.p_value, rel=1e-6)
