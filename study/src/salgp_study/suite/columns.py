"""Corruptions of tables: what happens to columns between a laboratory and the field.

All take standardised rows ``(n, d)``; 0 is the mean of a column and 1 its standard deviation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from salgp_study.suite.case import TestSet

__all__ = ["TABLE_CORRUPTIONS", "corrupted_tables"]

Corrupt = Callable[[Tensor, float, torch.Generator], Tensor]
SEVERITIES = (0.3, 0.6, 1.0)
"""Severities 1, 2 and 3."""


def _missing(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Values lost and filled in with the mean."""
    return x.masked_fill(torch.rand(x.shape, generator=generator) < 0.5 * severity, 0.0)


def _gain(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Every value multiplied by a factor of its own."""
    return x * torch.exp(0.8 * severity * torch.randn(x.shape, generator=generator))


def _noise(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    return x + severity * torch.randn(x.shape, generator=generator)


def _drift(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Every column moved, the same for all rows: an instrument that was not set to zero."""
    return x + severity * torch.randn(x.shape[1], generator=generator)


def _stuck(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Some columns keep the value of the first row: a sensor that hangs."""
    stuck = torch.rand(x.shape[1], generator=generator) < 0.4 * severity
    return torch.where(stuck, x[:1], x)


def _swapped(x: Tensor, severity: float, generator: torch.Generator) -> Tensor:
    """Values taken from other rows."""
    order = torch.stack([torch.randperm(len(x), generator=generator) for _ in range(x.shape[1])], dim=1)
    taken = torch.rand(x.shape, generator=generator) < 0.4 * severity
    return torch.where(taken, x.gather(0, order), x)


TABLE_CORRUPTIONS: dict[str, tuple[Corrupt, str | None]] = {
    "missing values": (_missing, None),
    "value gain": (_gain, None),
    "noise": (_noise, "noise"),
    "drift": (_drift, None),
    "stuck columns": (_stuck, None),
    "swapped values": (_swapped, None),
}
"""Every corruption of tables by name, with the family of augmentations it resembles."""


def corrupted_tables(x: Tensor, y: Tensor) -> tuple[TestSet, ...]:
    """One test set per corruption and severity."""

    def make(corrupt: Corrupt, severity: float, seed: int) -> TensorDataset:
        return TensorDataset(corrupt(x, severity, torch.Generator().manual_seed(seed)), y)

    sets = []
    for number, (name, (corrupt, like)) in enumerate(TABLE_CORRUPTIONS.items()):
        for level, severity in enumerate(SEVERITIES, start=1):
            recipe = partial(make, corrupt, severity, 1000 * level + number)
            sets.append(TestSet(f"{name} {level}", "shift", recipe, like, level))
    return tuple(sets)
