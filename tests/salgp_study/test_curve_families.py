"""Light curves disturbed: strength 0 changes nothing, seeds repeat, masks stay in front."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp.network.perturb import Family
from salgp_study.curve_families import LIGHT_CURVES

CURVES = {family.name: family for family in LIGHT_CURVES if isinstance(family, Family)}


def curves(n: int = 6) -> Tensor:
    x = torch.randn(n, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    x[..., 0] = torch.arange(9) / 10
    x[..., 2] = 0.1
    x[..., 3] = (torch.arange(9) < 7).float()
    return x * x[..., 3:]


@pytest.mark.parametrize("name", CURVES)
def test_strength_and_seed(name: str) -> None:
    x, strength = curves(), torch.tensor([0.0, 1.0] * 3)
    state = torch.get_rng_state()
    first, again, other = (
        CURVES[name](x, strength, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == x.shape
    assert bool(first.isfinite().all())
    if name != "dimming":  # it rescales to the loader's unit flux
        torch.testing.assert_close(first[::2], x[::2], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(first[1::2], x[1::2])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_more_noise_moves_further() -> None:
    x = curves(40)
    weak, strong = (
        (CURVES["flux-noise"](x, torch.full((40,), s), torch.Generator().manual_seed(0)) - x).norm()
        for s in (0.2, 0.8)
    )
    assert weak < strong


def test_lost_epochs_leave_observations_in_front() -> None:
    x = curves(50)
    out = CURVES["epoch-drop"](x, torch.ones(50), torch.Generator().manual_seed(0))
    mask = out[..., 3]
    assert (mask.diff(dim=-1) <= 0).all()
    assert (mask.sum(dim=-1) >= 1).all()
    assert mask.sum() < 0.4 * x[..., 3].sum()
    times = {round(float(t), 4) for t in out[0, 0, :, 0][mask[0, 0] > 0]}
    assert times <= {round(float(t), 4) for t in x[0, 0, :7, 0]}
