"""Light curves disturbed: strength 0 changes nothing, seeds repeat, masks stay in front, and what belongs
together moves together.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from salgp_study.curve_families import EPOCH_DROP, FLUX_NOISE, LOG_SCALE, REDSHIFT, distance, light_curves

CENTRE, SPREAD = torch.linspace(0.1, 0.6, 6), torch.linspace(0.5, 1.0, 6)
DISTANCE = distance(CENTRE, SPREAD)


def curves(n: int = 6) -> Tensor:
    x = torch.randn(n, 2, 9, 4, generator=torch.Generator().manual_seed(0))
    x[..., 0] = torch.arange(9) / 10
    x[..., 2] = 0.1
    x[..., 3] = (torch.arange(9) < 7).float()
    return x * x[..., 3:]


def further(n: int, strength: Tensor, seed: int = 3) -> tuple[Tensor, Tensor]:
    moved: tuple[Tensor, Tensor] = DISTANCE.disturb(
        (curves(n), torch.zeros(n, 6)), strength, torch.Generator().manual_seed(seed)
    )
    return moved


@pytest.mark.parametrize("family", [FLUX_NOISE, EPOCH_DROP], ids=lambda family: family.name)
def test_strength_and_seed(family: object) -> None:
    x, strength = curves(), torch.tensor([0.0, 1.0] * 3)
    state = torch.get_rng_state()
    first, again, other = (
        family(x, strength, torch.Generator().manual_seed(seed))  # type: ignore[operator]
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == x.shape
    assert bool(first.isfinite().all())
    torch.testing.assert_close(first[::2], x[::2], atol=2e-6, rtol=1e-5)
    assert not torch.allclose(first[1::2], x[1::2])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_more_noise_moves_further() -> None:
    x = curves(40)
    weak, strong = (
        (FLUX_NOISE(x, torch.full((40,), s), torch.Generator().manual_seed(0)) - x).norm() for s in (0.2, 0.8)
    )
    assert weak < strong


def test_lost_epochs_leave_observations_in_front() -> None:
    x = curves(50)
    out = EPOCH_DROP(x, torch.ones(50), torch.Generator().manual_seed(0))
    mask = out[..., 3]
    assert (mask.diff(dim=-1) <= 0).all()
    assert (mask.sum(dim=-1) >= 1).all()
    assert mask.sum() < 0.4 * x[..., 3].sum()
    times = {round(float(t), 4) for t in out[0, 0, :, 0][mask[0, 0] > 0]}
    assert times <= {round(float(t), 4) for t in x[0, 0, :7, 0]}


class TestDistance:
    def test_strength_and_seed(self) -> None:
        strength = torch.tensor([0.0, 1.0] * 3)
        (x, meta), again, other = further(6, strength), further(6, strength), further(6, strength, seed=4)
        assert torch.equal(x[::2], curves()[::2])
        assert torch.equal(meta[::2], torch.zeros(3, 6))
        assert torch.equal(x, again[0])
        assert torch.equal(meta, again[1])
        assert not torch.equal(x, other[0])
        assert bool(x.isfinite().all())

    def test_curves_and_metadata_move_together(self) -> None:
        x, meta = further(200, torch.full((200,), 0.8))
        near, far = CENTRE[REDSHIFT], meta[:, REDSHIFT] * SPREAD[REDSHIFT] + CENTRE[REDSHIFT]
        assert (far >= near).all()
        assert (far <= near + 0.8 + 1e-6).all()
        slower = x[:, 0, 5, 0] / curves(200)[:, 0, 5, 0]
        torch.testing.assert_close(slower, (1 + far) / (1 + near))
        kept = [k for k in range(6) if k not in (REDSHIFT, LOG_SCALE)]
        assert torch.equal(meta[:, kept], torch.zeros(200, 4))
        assert meta[far > near + 0.4, LOG_SCALE].mean() < -0.1  # fainter

    def test_signal_to_noise_falls_and_the_brightest_flux_is_the_unit(self) -> None:
        x, _ = further(200, torch.full((200,), 0.8))
        signal = (x[..., 1].sinh().abs() - x[..., 2].sinh()) * x[..., 3]
        torch.testing.assert_close(signal.flatten(1).amax(dim=1), torch.ones(200))
        assert x[:, :, :7, 2].mean() > 1.5 * curves(200)[:, :, :7, 2].mean()

    def test_is_what_is_rehearsed(self) -> None:
        names = [
            family if isinstance(family, str) else family.name for family in light_curves((CENTRE, SPREAD))
        ]
        assert names == ["distance", "layer-noise"]
