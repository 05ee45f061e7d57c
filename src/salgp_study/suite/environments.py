"""Rehearsed environments: the calibration set once more per family, at known strengths.

`salgp.network.rehearsal` makes them: every sample gets one copy per family, at one of eight levels. All
copies of one family and one level are a small data set under one known shift.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.network import rehearsal
from salgp.network.batches import Batch
from salgp.network.perturb import Family
from salgp.network.reader import Reader
from salgp.network.rehearsal import rehearsed

__all__ = ["LEVELS", "Environments", "rehearse_environments"]

LEVELS = torch.tensor(rehearsal.LEVELS)
"""Strengths of the environments, in units of a family's scale."""


@dataclass(frozen=True, eq=False)
class Environments:
    """Originals first, then their copies, family by family.

    Args:
        features: with groups, families and strengths.
        labels: ``(n,)``.
        scales: scale of each family by name.
    """

    features: Features
    labels: Tensor
    scales: dict[str, float]


def rehearse_environments(
    network: nn.Module,
    batches: Sequence[Batch],
    layers: str | tuple[str, ...],
    families: Sequence[Family],
    seed: int,
) -> Environments:
    """Read a calibration set and one copy of it per family.

    Args:
        network: any classifier.
        batches: the labelled calibration samples.
        layers: taken from the network.
        families: perturbations of the input or inside the network.
        seed: of all random numbers.
    """
    found = rehearsed(network, batches, Reader(layers=layers), families, seed=seed, progress=False)
    scales = dict(zip(found.rehearsal.families, found.rehearsal.scales, strict=True))
    return Environments(found.features, found.labels, scales)
