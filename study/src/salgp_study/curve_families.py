"""Perturbations of light curves ``(n, bands, T, 4)``: time, asinh flux, asinh error, mask.

A survey that goes deeper sees the same kinds of objects further away. `distance` makes just that, on
curves and metadata together, as they change together: less flux, more noise, slower curves, a larger
redshift.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.network.augment.corruptions import normal, per, uniform
from salgp.network.augment.families import Family
from salgp_study.lightcurves import META_COLUMNS

__all__ = ["distance", "light_curves"]

REDSHIFT, LOG_SCALE = META_COLUMNS.index("hostgal_photoz"), len(META_COLUMNS)
"""Columns of the metadata: redshift of the host galaxy, and logarithm of the flux scale, which is last."""
NEAREST = 0.02
"""Redshifts below this one are taken for it."""


def light_curves(standard: tuple[Tensor, Tensor]) -> tuple[Family | str, ...]:
    """The augmentation for networks that read light curves and metadata with this centre and spread."""
    return distance(*standard), "layer-noise"


def distance(centre: Tensor, spread: Tensor) -> Family:
    """The same object further away, by up to 1 in redshift per unit of strength.

    Flux falls with the square of the luminosity distance, time runs slower by the ratio of ``1 + z``, errors
    stay. Curves are then scaled to their brightest flux as the loader does, and the metadata follow.

    Args:
        centre: ``(m,)`` of the metadata, before they were standardised.
        spread: ``(m,)`` likewise.

    Example:
        >>> family = distance(torch.zeros(6), torch.ones(6))
        >>> family.name, family.together
        ('distance', True)
    """

    def disturb(
        inputs: tuple[Tensor, Tensor], strength: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        curves, meta = inputs
        near = (meta[:, REDSHIFT] * spread[REDSHIFT] + centre[REDSHIFT]).clamp_min(NEAREST)
        far = near + strength * uniform(len(curves), curves, generator)
        moved, brightest = _moved(curves, near, far, generator)
        new = meta.clone()
        new[:, REDSHIFT] = (far - centre[REDSHIFT]) / spread[REDSHIFT]
        new[:, LOG_SCALE] = meta[:, LOG_SCALE] + brightest.log10() / spread[LOG_SCALE]
        still = strength == 0  # scaling to the brightest flux anew would round
        return torch.where(per(still, curves), curves, moved), torch.where(still[:, None], meta, new)

    return Family("distance", disturb, 2.0, together=True)


def _moved(x: Tensor, near: Tensor, far: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Curves of objects at redshift ``near`` (n,) as seen from ``far``, and their brightest flux (n,)."""
    flux, error = x[..., 1].sinh(), x[..., 2].sinh()
    fading = per((_luminosity_distance(near) / _luminosity_distance(far)).square(), flux)
    missing_noise = (1 - fading.square()).clamp_min(0).sqrt() * error
    flux = fading * flux + missing_noise * normal(flux, generator)
    signal = (flux.abs() - error) * x[..., 3]
    brightest = signal.flatten(1).amax(dim=1).clamp_min(1e-3)
    slower = x[..., 0] * per((1 + far) / (1 + near), flux)
    scale = per(brightest, flux)
    return _with_flux(x, flux / scale, error / scale, slower), brightest


def _luminosity_distance(z: Tensor) -> Tensor:
    """In units of c / H_0, to second order in the redshift for a deceleration of -0.55."""
    return z + 0.775 * z.square()


def _with_flux(x: Tensor, flux: Tensor, error: Tensor, time: Tensor) -> Tensor:
    seen = x[..., 3]
    return torch.stack([time, flux.asinh() * seen, error.asinh() * seen, seen], dim=-1)
