"""Made-up calibration data with the structure of the real thing: a low-dimensional latent seen by every
layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.features import Features

__all__ = ["sample"]


def sample(
    n: int,
    widths: tuple[int, ...] = (4, 6, 5),
    n_classes: int = 3,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Features, Tensor]:
    """Features and labels of an overconfident network whose errors depend on the latent its layers see."""
    fixed, drawn = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    latent = torch.randn(n, 3, generator=drawn, dtype=torch.float64)
    layers = {}
    for index, width in enumerate(widths):
        mixing = torch.randn(3, width, generator=fixed, dtype=torch.float64)
        noise = torch.randn(n, width, generator=drawn, dtype=torch.float64)
        layers[f"layer{index}"] = (torch.tanh(latent @ mixing) + 0.1 * noise).to(dtype)
    logits = 2.0 * latent @ torch.randn(3, n_classes, generator=fixed, dtype=torch.float64)
    wrong = torch.rand(n, generator=drawn, dtype=torch.float64) < torch.sigmoid(2.0 * latent[:, 0] - 0.5)
    other = torch.randint(1, n_classes, (n,), generator=drawn)
    labels = torch.where(wrong, (logits.argmax(1) + other) % n_classes, logits.argmax(1))
    return Features(logits.to(dtype), layers), labels
