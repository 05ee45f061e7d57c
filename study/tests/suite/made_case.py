"""A made case of the suite: two clouds of points and a network of two layers."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from salgp_study.suite.case import Case, TestSet
from salgp_study.train import seeded


def clouds(n: int, seed: int, shift: float = 0.0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    x = torch.eye(3)[y] * 2 + torch.randn(n, 3, generator=generator) * (0.7 + shift)
    return TensorDataset(x, y)


def made_case(seed: int = 0, shared: tuple[str, ...] = ()) -> Case:
    with seeded(0):
        hidden = nn.Linear(3, 8)
    network = nn.Sequential(hidden, nn.ReLU(), nn.Linear(8, 3)).eval()
    with torch.no_grad():  # the network passes its input on: logits follow the clouds
        hidden.weight[:3], hidden.bias[:3] = torch.eye(3), 5.0
        network[2].weight.zero_()
        network[2].weight[:, :3] = 2 * torch.eye(3)
        network[2].bias.zero_()
    tests = (
        TestSet("test", "in", lambda: clouds(120, 3)),
        TestSet("wide 2", "shift", lambda: clouds(110, 4, 0.8), "noise", 2),
        TestSet("wider", "shift", lambda: clouds(100, 5, 1.5)),
        TestSet("unknown samples", "unknown", lambda: _unknown_samples()),
    )
    families = ("noise", "layer-noise")
    return Case("made", seed, network, clouds(150, 1), clouds(160, 2), tests, families, shared=shared)


def _unknown_samples() -> TensorDataset:
    x, y = clouds(60, 6).tensors
    return TensorDataset(torch.cat([x, x[:30] - 4]), torch.cat([y, torch.full((30,), -1)]))
