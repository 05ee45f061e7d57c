"""Three blobs seen through a linear network that is too sure of itself, and layer evidence fitted to them."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.features import Features

__all__ = ["augmented_world", "fitted", "world"]


def world(n: int, seed: int, noise: float = 0.0) -> tuple[Features, Tensor]:
    """Samples of three classes with this much noise on the input, and their true classes."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (n,), generator=g)
    x = 1.8 * torch.eye(3, 6)[labels] + 0.8 * torch.randn(n, 6, generator=g)
    x = x + noise * torch.randn(n, 6, generator=g)
    hidden = torch.cat([x, x[:, :3].square()], dim=1)
    return Features(6.0 * x[:, :3], {"one": x, "two": hidden}), labels


def augmented_world(n: int, seed: int, noises: tuple[float, ...] = (0.5, 1.5)) -> tuple[Features, Tensor]:
    """The samples as they come, and with each noise as a family of its own."""
    labels = world(n, seed)[1]
    parts = []
    for family, noise in enumerate((0.0, *noises)):
        f = world(n, seed, noise)[0]
        number, strength = torch.full((n,), family), torch.full((n,), noise)
        parts.append(Features(f.logits, f.layers, torch.arange(n), number, strength))
    return Features.concatenate(parts), labels.repeat(len(parts))


@cache
def fitted(**arguments: Any) -> LayerEvidence:
    """Fitted to samples and two families of augmented ones; not to be changed, as it is shared."""
    return LayerEvidence(**arguments).fit(*augmented_world(250, 1), reference=world(400, 0))
