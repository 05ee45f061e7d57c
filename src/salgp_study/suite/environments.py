"""Rehearsed environments: the calibration set once more per family, at known strengths.

Every sample gets one copy per family. Its strength is one of eight levels, geometric from a twenty-fifth of
the family's scale to the whole of it, and each level gets the same number of samples. Levels make
environments: all copies of one family and one level are a small data set under one known shift.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from salgp.features import Features
from salgp.network.batches import Batch
from salgp.network.perturb import Family, disturbed
from salgp.network.reader import Choice, Reader

__all__ = ["LEVELS", "Environments", "assign_levels", "rehearse_environments"]

LEVELS = torch.logspace(torch.log10(torch.tensor(0.04)).item(), 0.0, 8)
"""Strengths of the environments, in units of a family's scale."""
TRIALS = 128
"""Samples used to find the scale of a family."""
LOST = 0.75
"""A family is at full scale once it has cost the network this share of its accuracy above chance."""


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


def assign_levels(n: int, generator: torch.Generator) -> Tensor:
    """One level per sample, every level equally often.

    Example:
        >>> levels = assign_levels(16, torch.Generator().manual_seed(0))
        >>> sorted(set(torch.unique(levels, return_counts=True)[1].tolist()))
        [2]
    """
    order = torch.randperm(n, generator=generator)
    return LEVELS[order % len(LEVELS)]


def rehearse_environments(
    network: nn.Module,
    batches: Sequence[Batch],
    layers: str | tuple[str, ...],
    families: Sequence[Family],
    seed: int,
) -> Environments:
    """Read a calibration set and one copy of it per family.

    Args:
        network: in evaluation mode.
        batches: the labelled calibration samples.
        layers: taken from the network.
        families: perturbations of the input or inside the network.
        seed: of all random numbers.
    """
    run = _Run(network, batches, Choice(layers=layers).reader(network, batches[0]), seed)
    n = len(run.labels)
    groups = torch.arange(n)
    none = torch.zeros(n)
    parts = [Features(run.originals.logits, run.originals.layers, groups, none, none)]
    scales = {}
    for number, family in enumerate(families, start=1):
        scales[family.name] = run.scale_of(family)
        levels = assign_levels(n, run.generator)
        copy = run.copies(family, scales[family.name] * levels)
        parts.append(Features(copy.logits, copy.layers, groups, torch.full((n,), number), levels))
    labels = run.labels.repeat(len(parts))
    return Environments(Features.concatenate(parts), labels, scales)


class _Run:
    """A network being read, with one stream of random numbers."""

    def __init__(self, network: nn.Module, batches: Sequence[Batch], reader: Reader, seed: int) -> None:
        self.network, self.batches, self.reader = network, batches, reader
        self.generator = torch.Generator().manual_seed(seed)
        self.labels = torch.cat([torch.as_tensor(batch.labels) for batch in batches])
        self.originals = Features.concatenate([reader.read(network, batch) for batch in batches])
        self.layers = torch.tensor([j for j in range(len(reader.taps)) if self._reaches_logits(j)])

    def copies(self, family: Family, strength: Tensor, most: int | None = None) -> Features:
        """Features of every sample (or the first ``most``) disturbed with its own strength."""
        parts = [self._copy(batch, family, s) for batch, s in self._split(strength, most)]
        return Features.concatenate(parts)

    def scale_of(self, family: Family) -> float:
        """Strength that costs most of the accuracy above chance, or the family's bound."""
        clean = float(self.originals.correct(self.labels).double().mean())
        chance = 1.0 / self.originals.n_classes
        scale = min(0.25, family.largest)
        while scale < family.largest:
            tried = self.copies(family, torch.full((len(self.labels),), scale), TRIALS)
            accuracy = float(tried.correct(self.labels[: len(tried)]).double().mean())
            if accuracy <= clean - LOST * max(clean - chance, 0.0):
                break
            scale = min(2 * scale, family.largest)
        return scale

    def _split(self, strength: Tensor, most: int | None) -> Iterator[tuple[Batch, Tensor]]:
        start = 0
        for batch in self.batches:
            if most is not None and start >= most:
                return
            n = len(batch.labels)
            yield batch, strength[start : start + n]
            start += n

    def _copy(self, batch: Batch, family: Family, strength: Tensor) -> Features:
        if not family.inside:
            return self.reader.read(self.network, _changed(batch, family, strength, self.generator))
        draw = torch.randint(len(self.layers), (len(strength),), generator=self.generator)
        taps = self.reader.taps
        with disturbed(self.network, taps, family, self.layers[draw], strength, self.generator):
            return self.reader.read(self.network, batch)

    def _reaches_logits(self, j: int) -> bool:
        batch = self.batches[0]
        n = len(batch.labels)
        doubled = Family("doubled", lambda x, strength, generator: 2 * x + 1, inside=True)
        layer, strength = torch.full((n,), j), torch.ones(n)
        with disturbed(self.network, self.reader.taps, doubled, layer, strength, self.generator):
            moved = self.reader.read(self.network, batch).logits
        return bool((moved != self.originals.logits[:n]).any())


def _changed(batch: Batch, family: Family, strength: Tensor, generator: torch.Generator) -> Batch:
    """The first input perturbed; further floating-point inputs of two axes (metadata) get noise."""
    if batch.keywords:
        name, x = next(iter(batch.keywords.items()))
        return Batch((), {**batch.keywords, name: family.disturb(x, strength, generator)}, batch.labels)
    first, *rest = batch.inputs
    noisy = (_noisy(x, strength, generator) for x in rest)
    return Batch((family(first, strength, generator), *noisy), {}, batch.labels)


def _noisy(x: Tensor, strength: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x.shape, generator=generator)
    return x + strength[:, None] * x.std(dim=0) * noise
