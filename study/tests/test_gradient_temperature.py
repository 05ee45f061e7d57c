"""The study's temperature by gradient steps."""

from __future__ import annotations

import pytest
import torch

from salgp import Features
from salgp.logits import best_temperature
from salgp_study.gradient_temperature import GradientTemperature


def test_few_steps_depend_on_the_start_and_many_reach_the_optimum() -> None:
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(300, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(z, 1), 1, generator=generator)[:, 0]
    low, high = (GradientTemperature(init=t).fit(Features(z), labels).temperature_ for t in (0.5, 2.0))
    assert high - low > 0.3
    long = GradientTemperature(init=2.0, steps=1000, lr=1.0).fit(Features(z[:50]), labels[:50])
    assert long.temperature_ == pytest.approx(best_temperature(z[:50], labels[:50])[0], rel=1e-3)
