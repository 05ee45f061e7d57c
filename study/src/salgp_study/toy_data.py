"""Made data of the same shape as the real sets, small enough for tests: chips with a blob per class, light
curves with a bump per class.

Test samples are shifted against the training ones (weaker, noisier), so that there is miscalibration to
correct.
"""

from __future__ import annotations

import numpy as np
import torch

from salgp_study.lightcurves import LightCurves
from salgp_study.mstar import Chips

__all__ = ["toy_chips", "toy_lightcurves"]

_SHIFT = {15: 0.0, 17: 0.4, 30: 1.0}


def toy_chips(n_per_class: int = 24, n_classes: int = 3, size: int = 32, seed: int = 0) -> Chips:
    """Chips of three depression angles; a class is the place of a bright blob, a steeper angle makes it
    fainter.

    Example:
        >>> chips = toy_chips()
        >>> chips.x.shape, sorted(set(chips.depression.tolist()))
        (torch.Size([216, 32, 32]), [15, 17, 30])
    """
    random = np.random.default_rng(seed)
    angles = np.repeat(list(_SHIFT), n_per_class * n_classes)
    labels = np.tile(np.repeat(np.arange(n_classes), n_per_class), len(_SHIFT))
    shift = np.array([_SHIFT[int(a)] for a in angles])
    turn = 2 * np.pi * labels / n_classes + random.normal(0, 0.25 + 0.4 * shift)
    rows, columns = np.mgrid[:size, :size]
    where_row, where_column = (size / 2 + size / 5 * f(turn) for f in (np.sin, np.cos))
    distance = (rows - where_row[:, None, None]) ** 2 + (columns - where_column[:, None, None]) ** 2
    x = (1 - 0.5 * shift)[:, None, None] * np.exp(-distance / (size / 8) ** 2) + 0.15 * random.gamma(
        1.0, 1.0, distance.shape
    )
    names = tuple(f"class {k}" for k in range(n_classes))
    return Chips(
        torch.from_numpy(x.clip(0, 1)).float(), torch.from_numpy(labels), torch.from_numpy(angles), names
    )


def toy_lightcurves(n: int = 160, n_bands: int = 2, n_steps: int = 10, seed: int = 0) -> LightCurves:
    """Light curves of classes ``A``, ``B``, ``C`` (width of the bump) and a rare ``Z``; half are bright and
    spectroscopic.

    Example:
        >>> curves = toy_lightcurves()
        >>> curves.curves.shape, sorted(set(curves.target.tolist()))
        (torch.Size([160, 2, 10, 4]), ['A', 'B', 'C', 'Z'])
    """
    random = np.random.default_rng(seed)
    spectroscopic = np.arange(n) < n // 2
    kind = random.choice(4, n, p=[0.4, 0.3, 0.2, 0.1])
    time = np.sort(random.uniform(0, 1, (n, n_bands, n_steps)), axis=2)
    width = np.array([0.1, 0.3, 0.6, 0.03])[kind][:, None, None]
    error = np.where(spectroscopic, 0.05, 0.3)[:, None, None] * np.ones_like(time)
    flux = np.exp(-(((time - 0.4) / width) ** 2)) + error * random.normal(size=time.shape)
    observed = np.arange(n_steps) < random.integers(n_steps // 2, n_steps + 1, (n, n_bands, 1))
    curves = np.stack([time, flux, error, np.ones_like(time)], axis=-1) * observed[..., None]
    meta = np.stack([width[:, 0, 0] + 0.3 * random.normal(size=n), np.where(spectroscopic, 1.0, 0.3)], axis=1)
    return LightCurves(
        torch.from_numpy(curves).float(),
        torch.from_numpy(meta).float(),
        np.array(list("ABCZ"))[kind],
        torch.arange(n),
        torch.from_numpy(spectroscopic),
    )
