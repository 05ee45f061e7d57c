"""PseudoCal on a network that is known."""

from __future__ import annotations

import pytest
import torch

from salgp_study.pseudocal import pseudo_temperature


def test_the_temperature_undoes_the_scale_of_the_logits() -> None:
    x = torch.randn(600, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    once, five = (pseudo_temperature(lambda x, k=k: k * x, x) for k in (1.0, 5.0))
    assert five == pytest.approx(5 * once, rel=1e-6)


def test_one_class_alone_tells_nothing() -> None:
    assert pseudo_temperature(lambda x: torch.tensor([[1.0, 0.0]]).repeat(len(x), 1), torch.ones(5, 2)) == 1.0
    with pytest.raises(ValueError, match="share"):
        pseudo_temperature(lambda x: x, torch.ones(5, 2), share=0.4)
