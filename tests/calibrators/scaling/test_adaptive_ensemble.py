"""The adaptive calibrator ensemble, against the steps of its authors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from salgp import Features
from salgp.calibrators.scaling.temperature import AdaptiveCalibratorEnsemble
from salgp.logits import best_temperature


def drawn(n: int, seed: int = 0, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    z = 3 * torch.randn(n, 5, generator=g, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(z / 1.5, 1), 1, generator=g)[:, 0]
    return z + noise * torch.randn(z.shape, generator=g, dtype=z.dtype), labels


def by_sampling(z: torch.Tensor, y: torch.Tensor, new: torch.Tensor, draws: int) -> np.ndarray:
    """All errors and a tenth as many correct samples, drawn; logits mixed by the ratio of confidences."""
    right = z.argmax(1) == y
    wrong, correct = (~right).nonzero()[:, 0], right.nonzero()[:, 0]
    rng = np.random.default_rng(0)
    rows = [wrong.repeat(draws)]  # many draws of the hard set at once: the expectation of one
    rows.append(correct[rng.choice(len(correct), draws * int(0.1 * len(wrong)))])
    hard = torch.cat(rows)
    t_easy, t_hard = best_temperature(z, y)[0], best_temperature(z[hard], y[hard])[0]
    mean = [torch.softmax(x, 1).amax(1).mean() for x in (new, z)]
    alpha = mean[0] / mean[1]
    mixed = alpha * new / t_easy + (1 - alpha) * new / t_hard
    return torch.softmax(mixed, 1).amax(1).numpy()


@pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")
def test_parity_with_the_steps_of_the_authors() -> None:
    z, y = drawn(2000)
    new = drawn(500, 1)[0] / 2
    ace = AdaptiveCalibratorEnsemble().fit(Features(z), y)
    np.testing.assert_allclose(
        ace.predict(Features(new), "all").confidence.numpy(), by_sampling(z, y, new, 200), atol=2e-3
    )


def test_windows_are_predicted_apart_and_other_samples_can_be_the_window() -> None:
    z, y = drawn(600)
    ace = AdaptiveCalibratorEnsemble().fit(Features(z), y)
    easy, hard = Features(drawn(40, 2)[0]), Features(drawn(40, 3)[0] / 3)
    both = Features(torch.cat([easy.logits, hard.logits]))
    together = ace.predict(both, ["a"] * 40 + ["b"] * 40).confidence
    apart = torch.cat([ace.predict(f, "all").confidence for f in (easy, hard)])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(ace.predict(hard, ace.context(hard)).confidence, apart[40:])
    assert float(ace.predict(hard).confidence.mean()) > float(apart[40:].mean())


@pytest.mark.filterwarnings("ignore::salgp.calibrators.base.CalibrationWarning")
def test_without_errors_it_is_temperature_scaling() -> None:
    z, _ = drawn(80)
    ace = AdaptiveCalibratorEnsemble().fit(Features(z), z.argmax(1))
    assert ace.hard_temperature_ == ace.easy_temperature_
