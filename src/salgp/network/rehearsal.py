"""Read the features of a calibration set and of perturbed copies of it.

`rehearse` is what ``extract(..., perturb="auto")`` does: it finds the scale of each family of perturbations
on a part of the data, then reads originals and copies, and numbers the groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from salgp.features import Features, as_labels
from salgp.network.batches import Batch
from salgp.network.perturb import Family, disturbed, families_for
from salgp.network.reader import Choice, Reader

__all__ = ["COPIES", "rehearse"]

COPIES = 3
"""Copies of every sample per family."""
TRIALS = 128
"""Samples used to find the scale of a family."""
LOST = 0.75
"""A family is strong enough once it has cost the network this share of its accuracy above chance."""


def rehearse(
    model: nn.Module,
    loader: Iterable[Any],
    source: Choice | Reader,
    perturb: str | Sequence[str | Family] = "auto",
    *,
    copies: int = COPIES,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[Reader, Features, Tensor]:
    """Features of originals, first, and of their perturbed copies; rows of one original share a group,
    families are numbered from 1.

    Args:
        model: the network.
        loader: labelled calibration data; its batches are kept in memory while copies are made.
        source: what to read.
        perturb: see `salgp.network.perturb.families_for`.
        copies: of every sample and family.
        device: where batches are sent.
        dtype: of the features.
        seed: of all random numbers.

    Returns:
        The reader in use, features with groups and families, labels.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.randn(5, 4), torch.tensor([0, 1, 2, 0, 1]))]
        >>> _, features, labels = rehearse(model, loader, Choice(), ["noise"], copies=2)
        >>> features.groups.tolist()
        [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    """
    batches = [Batch.of(item) for item in loader]
    if not batches:
        raise ValueError("the loader gave no batch: there is nothing to extract")
    if any(batch.labels is None for batch in batches):
        raise ValueError(
            "perturbed copies need labels, but the loader yields inputs only; yield (x, y) or "
            "a mapping with 'labels'"
        )
    reader = source if isinstance(source, Reader) else source.reader(model, batches[0], device)
    run = _Run(model, reader, device, dtype, torch.Generator().manual_seed(seed))
    originals = [run.read(batch) for batch in batches]
    labels = [as_labels(batch.labels, len(f)).cpu() for batch, f in zip(batches, originals, strict=True)]
    starts = [sum(len(y) for y in labels[:i]) for i in range(len(labels))]
    parts = [
        Features(f.logits, f.layers, torch.arange(s, s + len(f)), torch.zeros(len(f)))
        for f, s in zip(originals, starts, strict=True)
    ]
    for number, family in enumerate(families_for(perturb, _first_input(batches[0])[1]), start=1):
        if family.inside and not run.layers_that_matter(batches[0]):
            continue
        scale = run.scale_of(family, batches, originals, labels)
        for _ in range(copies):
            for batch, part in zip(batches, parts[: len(batches)], strict=True):
                copy = run.copy(batch, family, scale * run.uniform(len(part)))
                parts.append(
                    Features(copy.logits, copy.layers, part.groups, torch.full((len(part),), number))
                )
    return reader, Features.concatenate(parts), torch.cat(labels).repeat(len(parts) // len(batches))


class _Run:
    """A network being read, with one stream of random numbers."""

    def __init__(
        self,
        model: nn.Module,
        reader: Reader,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        generator: torch.Generator,
    ) -> None:
        self.model, self.reader, self.device, self.dtype, self.generator = (
            model,
            reader,
            device,
            dtype,
            generator,
        )
        self._matter: list[int] | None = None

    def uniform(self, n: int) -> Tensor:
        return torch.rand(n, generator=self.generator)

    def read(self, batch: Batch) -> Features:
        return self.reader.read(self.model, batch, self.device).to("cpu", self.dtype)

    def copy(self, batch: Batch, family: Family, strength: Tensor) -> Features:
        if not family.inside:
            return self.read(_changed(batch, family, strength, self.generator))
        layers = torch.tensor(self.layers_that_matter(batch))
        layer = layers[torch.randint(len(layers), (len(strength),), generator=self.generator)]
        with disturbed(self.model, self.reader.taps, family, layer, strength, self.generator):
            return self.read(batch)

    def layers_that_matter(self, batch: Batch) -> list[int]:
        """Tapped layers whose output reaches the logits; others would rehearse a shift that has no effect."""
        if self._matter is None:
            before = self.read(batch).logits
            self._matter = [j for j in range(len(self.reader.taps)) if self._moves(batch, before, j)]
        return self._matter

    def _moves(self, batch: Batch, before: Tensor, j: int) -> bool:
        n = len(before)
        noise = families_for(["layer-noise"])[0]
        with disturbed(
            self.model,
            self.reader.taps,
            noise,
            torch.full((n,), j),
            torch.ones(n),
            torch.Generator().manual_seed(0),
        ):
            return bool((self.read(batch).logits != before).any())

    def scale_of(
        self,
        family: Family,
        batches: Sequence[Batch],
        originals: Sequence[Features],
        labels: Sequence[Tensor],
    ) -> float:
        """Strength that costs the network most of its accuracy above chance, or the family's bound."""
        used, n = 0, 0
        while used < len(batches) and n < TRIALS:
            n += len(labels[used])
            used += 1
        clean = _accuracy(originals[:used], labels[:used])
        chance = 1.0 / originals[0].n_classes
        scale = min(0.25, family.largest)
        while scale < family.largest:
            tried = [
                self.copy(b, family, torch.full((len(y),), scale))
                for b, y in zip(batches[:used], labels, strict=False)
            ]
            if _accuracy(tried, labels[:used]) <= clean - LOST * max(clean - chance, 0.0):
                break
            scale = min(2 * scale, family.largest)
        return scale


def _accuracy(features: Sequence[Features], labels: Sequence[Tensor]) -> float:
    return float(torch.cat([f.correct(y) for f, y in zip(features, labels, strict=True)]).double().mean())


def _first_input(batch: Batch) -> tuple[int | str | None, Tensor | None]:
    """Where the first floating-point input tensor of a batch is, and the tensor."""
    for i, x in enumerate(batch.inputs):
        if isinstance(x, Tensor) and x.is_floating_point():
            return i, x
    for key, x in batch.keywords.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            return key, x
    return None, None


def _changed(batch: Batch, family: Family, strength: Tensor, generator: torch.Generator) -> Batch:
    """The first floating-point input perturbed; further ones of two axes (metadata) get noise of the same
    strength.
    """
    where, x = _first_input(batch)
    if x is None:
        raise ValueError(
            f"perturbation {family.name!r} needs a floating-point input tensor, but the batch "
            f"has none; use perturb='tokens'"
        )
    new = family(x, strength, generator)
    if isinstance(where, str):
        return Batch(batch.inputs, {**batch.keywords, where: new}, batch.labels)
    inputs = tuple(
        new if i == where else _noisy(old, strength, generator) for i, old in enumerate(batch.inputs)
    )
    return Batch(inputs, batch.keywords, batch.labels)


def _noisy(x: Any, strength: Tensor, generator: torch.Generator) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != 2:
        return x
    spread = x.std(dim=0) if len(x) > 1 else torch.zeros_like(x[0])
    noise = torch.randn(x.shape, generator=generator, device=generator.device).to(x)
    return x + strength.to(x)[:, None] * spread * noise
