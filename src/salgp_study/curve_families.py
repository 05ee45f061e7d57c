"""Perturbations of light curves ``(n, bands, T, 4)``: time, asinh flux, asinh error, mask.

`LIGHT_CURVES` is what a calibration of such a network rehearses: ``calibrate(..., perturb=LIGHT_CURVES)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.network.perturb import Family
from salgp.network.signals import normal, per, uniform

__all__ = ["LIGHT_CURVES", "dimming", "epoch_drop", "flux_noise", "stretch"]


def flux_noise(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Noise added to the fluxes of light curves, in units of their errors, which grow to match."""
    flux, error = x[..., 1].sinh(), x[..., 2].sinh()
    extra = per(4 * strength, flux)
    flux = flux + extra * error * normal(flux, generator)
    return _with_flux(x, flux, error * (1 + extra.square()).sqrt())


def dimming(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """The same object further away: signal falls by up to e^-2 per unit of strength, errors stay; then
    rescaled as the loader does.
    """
    flux, error = x[..., 1].sinh(), x[..., 2].sinh()
    share = torch.exp(-2 * strength * uniform(len(x), x, generator))
    fading = per(share, flux)
    missing_noise = (1 - fading.square()).clamp_min(0).sqrt() * error
    flux = fading * flux + missing_noise * normal(flux, generator)
    signal = (flux.abs() - error) * x[..., 3]
    brightest = per(signal.flatten(1).amax(dim=1).clamp_min(1e-3), flux)
    return _with_flux(x, flux / brightest, error / brightest)


def _with_flux(x: Tensor, flux: Tensor, error: Tensor) -> Tensor:
    seen = x[..., 3]
    return torch.stack([x[..., 0], flux.asinh() * seen, error.asinh() * seen, seen], dim=-1)


def epoch_drop(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Observations lost, up to 90 %; what is left moves to the front, and one observation per band always
    stays.
    """
    seen = x[..., 3] > 0
    lost = uniform(tuple(seen.shape), x, generator) < per((0.9 * strength).clamp(max=0.9), seen)
    lost[..., 0] = False
    kept = seen & ~lost
    order = (~kept).to(torch.uint8).argsort(dim=-1, stable=True)[..., None].expand_as(x)
    return (x * kept[..., None]).gather(-2, order)


def stretch(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    """Time axis of light curves stretched or shortened by up to e^1 per unit of strength, as by redshift."""
    factor = per(torch.exp((2 * uniform(len(x), x, generator) - 1) * strength), x[..., 0])
    return torch.cat([(x[..., 0] * factor)[..., None], x[..., 1:]], dim=-1)


LIGHT_CURVES: tuple[Family | str, ...] = (
    Family("flux-noise", flux_noise),
    Family("epoch-drop", epoch_drop, 1.0),
    Family("dimming", dimming),
    Family("stretch", stretch, 2.0),
    "layer-noise",
)
"""What is rehearsed for networks that read light curves."""
