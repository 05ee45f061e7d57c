"""Which samples to label next: uncertain, and unlike each other."""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.features import Features

__all__ = ["spread_choice"]


def spread_choice(features: Features, std: Tensor, k: int) -> Tensor:
    """Indices of ``k`` samples to label next: uncertain, and unlike each other.

    Greedy on the prior that neighbouring samples (in the last tapped layer, or the logits) share their error:
    each pick has the largest standard deviation that the earlier picks leave unexplained.

    Example:
        >>> features = Features(torch.tensor([[0.0, 0.0], [0.1, 0.1], [5.0, 5.0]]))
        >>> spread_choice(features, torch.tensor([0.3, 0.31, 0.2]), 2)
        tensor([1, 2])
    """
    x = (list(features.layers.values()) or [features.logits])[-1].double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-12)
    left, scale = std.double().square().clone(), x.shape[1]
    factors: list[Tensor] = []
    picked: list[int] = []
    for _ in range(min(k, len(features))):
        best = int(left.argmax())
        similar = torch.exp(-(x - x[best]).square().sum(1) / scale) * std * std[best]
        explained = sum((f * f[best] for f in factors), torch.zeros_like(similar))
        factor = (similar - explained) / left[best].clamp_min(1e-300).sqrt()
        factors.append(factor)
        left = (left - factor.square()).clamp_min(0.0)
        left[picked := [*picked, best]] = -1.0
    return torch.tensor(picked, dtype=torch.long)
