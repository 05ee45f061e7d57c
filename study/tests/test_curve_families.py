"""Light curves further away: strength 0 changes nothing, seeds repeat, and what belongs together moves
together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp_study.curve_families import LOG_SCALE, REDSHIFT, distance, light_curves

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

    def test_is_an_augmentation(self) -> None:
        names = [
            family if isinstance(family, str) else family.name for family in light_curves((CENTRE, SPREAD))
        ]
        assert names == ["distance", "layer-noise"]
