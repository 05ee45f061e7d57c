"""Read the features of a calibration set and of augmented samples: the same samples, perturbed.

How strong is strong depends on data and network, so
the scale of each family is found by trying: the strength that costs the network most of what it knows, or the
family's own bound. Every sample then gets, in each family, one of eight strengths from 4 % of that scale to
the whole of it. Samples of one family and strength are an *environment*: about n / 8 samples under the same
shift. Originals always stay, and augmented samples share their original's group.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import check_finite
from salgp.network.augment.corruptions import Spread
from salgp.network.augment.families import (
    Family,
    families_for,
    first_input,
    first_texts,
    first_tokens,
    layer_change,
    perturbed_batch,
    real_tokens,
    values_of,
)
from salgp.network.augment.text import Tokens, checked_tokenizer
from salgp.network.batches import Batch, first_rows, rebatched
from salgp.network.reader import Prepare, Reader, Reading, read_batches
from salgp.network.taps import Change, Tap
from salgp.progress import Advance, progress_bar

__all__ = ["Augmentation", "augment"]

LEVELS = tuple(float(0.04 ** (1 - k / 7)) for k in range(8))
"""Strengths of augmented samples, as shares of the family's scale."""
TRIALS = 160
"""Samples used to find the scale of a family."""
FEWEST, MOST = 64, 3
"""Least augmented samples in a family, and most of one original in it, whatever the budget."""
ACCURACY_LOSS = 0.75
"""A family is strong enough once it has cost the network this share of its accuracy above chance."""


@dataclass(frozen=True)
class Augmentation:
    """Which augmented samples were made, and what they cost the network.

    Args:
        families: names, in the order of their numbers in `salgp.Features.families`, which begin at 1.
        scales: strength of each family at level 1.
        levels: shares of the scale that samples got.
        accuracy: of the network on the originals.
        under: accuracy in each family at each level.
        per_sample: augmented samples of every original in every family; below 1, of this share of them.
        reference: share of the reference that was read.

    Example:
        >>> print(Augmentation(("noise",), (0.5,), (0.1, 1.0), 0.9, ((0.9, 0.4),)))
        noise: scale 0.5, accuracy 0.90 -> 0.90 to 0.40
    """

    families: tuple[str, ...]
    scales: tuple[float, ...]
    levels: tuple[float, ...]
    accuracy: float
    under: tuple[tuple[float, ...], ...]
    per_sample: float = 1
    reference: float = 1

    def __str__(self) -> str:
        rows = zip(self.families, self.scales, self.under, strict=True)
        lines = [
            f"{name}: scale {scale:.2g}, accuracy {self.accuracy:.2f} -> {at[0]:.2f} to {at[-1]:.2f}"
            for name, scale, at in rows
        ]
        if self.per_sample != 1:
            lines.append(f"augmented samples of each sample and family: {self.per_sample:.2g}")
        if self.reference != 1:
            lines.append(f"read of the reference: {self.reference:.0%}")
        return "\n".join(lines)

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Augmentation:
        """Read what ``dataclasses.asdict`` wrote."""
        tuples: dict[str, Any] = {key: tuple(stored[key]) for key in ("families", "scales", "levels")}
        under = tuple(tuple(row) for row in stored["under"])
        rest = {key: stored[key] for key in ("accuracy", "per_sample", "reference") if key in stored}
        return Augmentation(**tuples, **rest, under=under)


def augment(
    model: nn.Module,
    reader: Reader,
    batches: Sequence[Batch],
    features: Features,
    labels: Tensor,
    perturb: str | Sequence[str | Family] = "auto",
    *,
    passes: int | None = None,
    progress: bool | None = None,
) -> tuple[Features, Tensor, Augmentation]:
    """Features and labels of originals, first, and of augmented samples, and how these were made. Rows of one
    original share a group.

    Args:
        model: the network.
        reader: how the originals were read; its seed is that of all random numbers, and with its tokenizer
            the words themselves are perturbed.
        batches: the originals.
        features: of the originals.
        labels: of the originals.
        perturb: see `salgp.network.augment.families.families_for`.
        passes: forward passes it may take; None for one augmented sample of each original and family.
        progress: show a progress bar; None for "on a terminal and in notebooks".

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> batch = Batch((torch.randn(8, 4),), labels=torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))
        >>> reader = Reader().resolved(model, batch)
        >>> features = reader.read(model, batch)
        >>> more, _, _ = augment(model, reader, [batch], features, batch.labels, ["noise", "gain"])
        >>> more
        Features(24 samples, 3 classes, layers: 1 (8), with augmented samples)
    """
    tokenizer = None if reader.tokenizer is None else checked_tokenizer(reader.tokenizer)
    augmenter = _Augmenter(model, reader, batches, features, labels, tokenizer)
    x: Any = values_of(first_input(batches[0])[1])
    x = first_tokens(batches[0])[1] if x is None else x
    x = first_texts(batches[0])[1] if x is None else x
    chosen = families_for(perturb, x, with_text=tokenizer is not None)
    families = [augmenter.prepared(family) for family in chosen]
    families = [family for family in families if not family.inside or augmenter.layers]
    per_sample = 1.0 if passes is None else augmenter.affordable(families, passes)
    total = augmenter.passes(families, per_sample)
    scales: list[float] = []
    parts = [augmenter.original]
    with progress_bar("augmenting", total, progress, unit="samples") as advance:
        augmenter.advance = advance
        for number, family in enumerate(families, start=1):
            scales.append(augmenter.scale_of(family))
            for _ in range(max(1, int(per_sample))):
                parts.append(augmenter.augmented(family, scales[-1], number, min(per_sample, 1)))
    features = Features.concatenate(parts)
    labels = labels[torch.cat([part.groups.cpu() for part in parts if part.groups is not None])]
    names = tuple(family.name for family in families)
    return features, labels, _augmentation(names, tuple(scales), features, labels, per_sample)


class _Augmenter:
    """A network being read, with one stream of random numbers."""

    def __init__(
        self,
        model: nn.Module,
        reader: Reader,
        batches: Sequence[Batch],
        features: Features,
        labels: Tensor,
        tokenizer: Any,
    ) -> None:
        check_finite(features.logits)
        self.model, self.reader, self.labels, self.tokenizer = model, reader, labels, tokenizer
        self.generator = torch.Generator().manual_seed(reader.seed)
        self.batches = list(rebatched(batches))
        n = len(features)
        origin = {"groups": torch.arange(n), "families": torch.zeros(n), "strengths": torch.zeros(n)}
        self.original = replace(features, **origin)  # type: ignore[arg-type]
        self.layers = [j for j, tap in enumerate(reader.taps or ()) if tap.leads]
        self.advance: Advance = lambda steps=1, title=None: None

    def passes(self, families: Sequence[Family], per_sample: float) -> int:
        """Forward passes that the families take, one for each sample."""
        trials = min(TRIALS, len(self.labels))
        inside = trials if any(family.inside for family in families) else 0
        return inside + len(families) * (trials + round(per_sample * len(self.labels)))

    def affordable(self, families: Sequence[Family], passes: int) -> float:
        """Augmented samples of every original in each family that so many passes allow, from a few for each
        family up to `MOST`.
        """
        n = len(self.labels)
        found = (passes - self.passes(families, 0)) / (n * max(len(families), 1))
        return float(min(int(found), MOST)) if found >= 1 else max(found, min(1.0, FEWEST / n))

    def prepared(self, family: Family) -> Family:
        """The family with the spread of the inputs, measured on all of them."""
        if family.text or (family.tokens and family.measured):
            return family.on(self.tokens)
        return family.on(self.input_spread) if family.measured and not family.inside else family

    @cached_property
    def input_spread(self) -> Spread | None:
        """Spread of the first floating-point input."""
        found = [values_of(first_input(batch)[1]) for batch in self.batches]
        inputs = [x for x in found if x is not None]
        return Spread.of(_same_shape(inputs)) if inputs else None

    @cached_property
    def tokens(self) -> Tokens | None:
        """Which tokens there are, where the first input is text."""
        found = [(batch, first_tokens(batch)[1]) for batch in self.batches]
        known = [(ids, real_tokens(batch, ids)) for batch, ids in found if ids is not None]
        return Tokens.of([ids for ids, _ in known], [real for _, real in known]) if known else None

    def augmented(self, family: Family, scale: float, number: int, share: float = 1) -> Features:
        """An augmented sample of this share of the originals; all levels are equally frequent."""
        batches, groups = self._drawn(share)
        n = len(groups)
        level = torch.randperm(n, generator=self.generator) % len(LEVELS)
        strength = torch.tensor(LEVELS, dtype=torch.float64)[level]
        found = self._read(batches, family, scale * strength)
        return replace(found, groups=groups, families=torch.full((n,), number), strengths=strength)

    def _drawn(self, share: float) -> tuple[list[Batch], Tensor]:
        """This share of the originals, drawn at random, and their numbers. Batches that cannot be cut stay
        whole.
        """
        n = len(self.labels)
        if share >= 1:
            return self.batches, torch.arange(n)
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[torch.randperm(n, generator=self.generator)[: max(1, round(share * n))]] = True
        batches, groups, start = [], [], 0
        for batch in self.batches:
            whole = torch.arange(start, start + len(batch.labels))
            own = whole[chosen[whole]]
            start += len(whole)
            if len(own):
                part = batch.take(own - whole[0])
                batches.append(part)
                groups.append(own if len(part.labels) == len(own) else whole)
        return batches, torch.cat(groups)

    def scale_of(self, family: Family) -> float:
        """Strength that costs the network most of its accuracy above chance, or the family's bound.

        A few samples each try strengths that double. Layer families stop where accuracy stops falling: what
        is harmless at any strength teaches nothing.
        """
        tried = _doubled(family.largest)
        batches = list(first_rows(self.batches, TRIALS))
        n = sum(len(batch.labels) for batch in batches)
        which = torch.randperm(n, generator=self.generator) % len(tried)
        found = self._read(batches, family, torch.tensor(tried)[which])
        right = found.correct(self.labels[:n]).cpu().double()
        accuracy = _falling(right, which, len(tried))
        original = float(self.original[:n].correct(self.labels[:n]).double().mean())
        enough = original - ACCURACY_LOSS * max(original - 1 / found.n_classes, 0.0)
        reached = [s for s, a in zip(tried, accuracy, strict=True) if a <= enough]
        if family.inside and not reached:
            reached = [s for s, a in zip(tried, accuracy, strict=True) if a <= accuracy[-1] + 0.03]
        return reached[0] if reached else family.largest

    def _read(self, batches: Sequence[Batch], family: Family, strength: Tensor) -> Features:
        starts = np.cumsum([0, *(len(batch.labels) for batch in batches)])

        def prepare(batch: Batch, index: int) -> tuple[Batch, Change | None]:
            own = strength[starts[index] : starts[index + 1]]
            if not family.inside:
                return perturbed_batch(batch, family, own, self.generator, self.tokenizer), None
            layers = torch.tensor(self.layers)
            layer = layers[torch.randint(len(layers), (len(own),), generator=self.generator)]
            return batch, layer_change(family, self.spreads, layer, own, self.generator)

        return Features.concatenate([reading.features for reading in self._readings(batches, prepare)])

    def _readings(self, batches: Sequence[Batch], prepare: Prepare) -> Iterator[Reading]:
        for reading in read_batches(self.model, batches, self.reader, prepare=prepare, progress=False):
            yield reading
            self.advance(len(reading.features))

    @cached_property
    def spreads(self) -> list[Spread]:
        """Spread of what passes each tap, measured on some of the originals."""
        taps = self.reader.taps or ()
        passed: list[list[Tensor]] = [[] for _ in taps]

        def keep(j: int, x: Tensor) -> Tensor:
            passed[j].append(x.clone())  # the network may yet overwrite its output in place
            return x

        list(self._readings(list(first_rows(self.batches, TRIALS)), lambda batch, _: (batch, keep)))
        return [_spread_of(tap, xs) for tap, xs in zip(taps, passed, strict=True)]


def _augmentation(
    names: tuple[str, ...], scales: tuple[float, ...], features: Features, labels: Tensor, per_sample: float
) -> Augmentation:
    right = features.correct(labels).cpu().double()
    assert features.families is not None
    assert features.strengths is not None
    families, strengths = features.families.cpu(), features.strengths.cpu()
    under = tuple(
        tuple(
            float(right[(families == k) & torch.isclose(strengths, torch.tensor(s).double())].mean())
            for s in LEVELS
        )
        for k in range(1, len(names) + 1)
    )
    return Augmentation(names, scales, LEVELS, float(right[families == 0].mean()), under, per_sample)


def _doubled(largest: float) -> list[float]:
    strengths = [min(0.25, largest)]
    while strengths[-1] < largest:
        strengths.append(min(2 * strengths[-1], largest))
    return strengths


def _falling(right: Tensor, which: Tensor, n: int) -> list[float]:
    """Share right at each strength, smoothed so that it never rises."""
    counts = torch.bincount(which, minlength=n)
    tried = [i for i in range(n) if counts[i] > 0]
    means = [float(right[which == i].mean()) for i in tried]
    smooth = isotonic_regression(means, sample_weight=counts[tried].numpy(), increasing=False)
    known = dict(zip(tried, smooth, strict=True))
    return [float(known.get(i, smooth[-1])) for i in range(n)]


def _spread_of(tap: Tap, passed: Sequence[Tensor]) -> Spread:
    axis = tap.layout.channel_axis(passed[0]) if passed[0].ndim > 2 else None
    return Spread.of(_same_shape(passed), axis, table=False)


def _same_shape(parts: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in parts if x.shape[1:] == parts[0].shape[1:]]
