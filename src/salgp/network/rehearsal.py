"""Read the features of a calibration set and of perturbed copies of it.

`rehearse` is what ``extract(..., perturb="auto")`` does. How strong is strong depends on data and network, so
the scale of each family is found by trying: the strength that costs the network most of what it knows, or the
family's own bound. Every sample then gets, in each family, one of eight strengths from 4 % of that scale to
the whole of it. Samples of one family and strength are an *environment*: about n / 8 samples under the same
shift. Originals always stay, and copies share their original's group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import check_finite
from salgp.network.batches import Batch
from salgp.network.inputs import changed, first_input, first_tokens, real_tokens, values_of
from salgp.network.merging import leading, merged, size_of
from salgp.network.perturb import Family, families_for, layer_change
from salgp.network.reader import Reader
from salgp.network.reading import ANYWHERE, Place, Prepare, Reading, read_batches
from salgp.network.signals import Spread
from salgp.network.taps import Change, Tap
from salgp.network.text import Coder, Tokens, coder_for
from salgp.progress import progress_bar

__all__ = ["LEVELS", "Rehearsal", "Rehearsed", "rehearse", "with_copies"]

LEVELS = tuple(float(0.04 ** (1 - k / 7)) for k in range(8))
"""Strengths of the copies, as shares of the family's scale."""
TRIALS = 160
"""Samples used to find the scale of a family."""
LOST = 0.75
"""A family is strong enough once it has cost the network this share of its accuracy above chance."""


@dataclass(frozen=True)
class Rehearsal:
    """What was rehearsed, and what it cost.

    Args:
        families: names, in the order of their numbers in `salgp.Features.families`, which begin at 1.
        scales: strength of each family at level 1.
        levels: shares of the scale that samples got.
        accuracy: of the network on the originals.
        under: accuracy in each family at each level.

    Example:
        >>> print(Rehearsal(("noise",), (0.5,), (0.1, 1.0), 0.9, ((0.9, 0.4),)))
        noise: scale 0.5, accuracy 0.90 -> 0.90 to 0.40
    """

    families: tuple[str, ...]
    scales: tuple[float, ...]
    levels: tuple[float, ...]
    accuracy: float
    under: tuple[tuple[float, ...], ...]

    def __str__(self) -> str:
        rows = zip(self.families, self.scales, self.under, strict=True)
        return "\n".join(
            f"{name}: scale {scale:.2g}, accuracy {self.accuracy:.2f} -> {at[0]:.2f} to {at[-1]:.2f}"
            for name, scale, at in rows
        )

    @staticmethod
    def from_json(stored: Mapping[str, Any]) -> Rehearsal:
        """Read what ``dataclasses.asdict`` wrote."""
        tuples = {key: tuple(stored[key]) for key in ("families", "scales", "levels")}
        under = tuple(tuple(row) for row in stored["under"])
        return Rehearsal(**tuples, accuracy=stored["accuracy"], under=under)


@dataclass(frozen=True, eq=False)
class Rehearsed:
    """Features of originals and copies, and how they were made.

    Args:
        reader: in use, settled.
        features: of the originals, first, and of their copies; with groups, families and strengths.
        labels: of all of them.
        rehearsal: what was rehearsed.
        originals: readings of the originals.
    """

    reader: Reader
    features: Features
    labels: Tensor
    rehearsal: Rehearsal
    originals: tuple[Reading, ...]


def rehearse(
    model: nn.Module,
    loader: Iterable[Any],
    reader: Reader,
    perturb: str | Sequence[str | Family] = "auto",
    place: Place = ANYWHERE,
    *,
    copies: int = 1,
    seed: int = 0,
    progress: bool | None = None,
    tokenizer: Any = None,
) -> Rehearsed:
    """Read originals and perturbed copies; rows of one original share a group.

    Args:
        model: the network.
        loader: labelled calibration data; its batches are kept in memory while copies are made.
        reader: what to read.
        perturb: see `salgp.network.perturb.families_for`.
        place: where batches are sent, and where the features go.
        copies: of every sample and family.
        seed: of all random numbers.
        progress: show a progress bar; None for "on a terminal and in notebooks".
        tokenizer: of the network, a Hugging Face one or a `salgp.network.text.Coder`: the texts themselves
            are then disturbed.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.randn(8, 4), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1]))]
        >>> rehearse(model, loader, Reader(), ["noise", "gain"]).rehearsal.families
        ('noise', 'gain')
    """
    originals = tuple(read_batches(model, loader, reader, place, progress=progress))
    how: Any = {"copies": copies, "seed": seed, "progress": progress, "tokenizer": tokenizer}
    return with_copies(model, originals, perturb, place, **how)


def with_copies(
    model: nn.Module,
    originals: tuple[Reading, ...],
    perturb: str | Sequence[str | Family] = "auto",
    place: Place = ANYWHERE,
    *,
    copies: int = 1,
    seed: int = 0,
    progress: bool | None = None,
    tokenizer: Any = None,
) -> Rehearsed:
    """What `rehearse` does once the originals are read."""
    if originals[0].labels is None:
        raise ValueError(
            "perturbed copies need labels, but the loader yields inputs only; yield (x, y) or a mapping with "
            "'labels', or say where they are: labels_at=..."
        )
    coder = None if tokenizer is None else coder_for(tokenizer)
    stage = _Stage(model, originals, place, torch.Generator().manual_seed(seed), coder)
    x = values_of(first_input(originals[0].batch)[1])
    x = x if x is not None else first_tokens(originals[0].batch)[1]
    chosen = families_for(perturb, x, with_text=tokenizer is not None)
    families = [stage.prepared(family) for family in chosen]
    families = [family for family in families if not family.inside or stage.layers]
    scales: list[float] = []
    parts = [stage.original]
    with progress_bar("rehearsing", len(families) * copies, progress) as advance:
        for number, family in enumerate(families, start=1):
            scales.append(stage.scale_of(family))
            for _ in range(copies):
                parts.append(stage.copy(family, scales[-1], number))
                advance(1)
    features, labels = Features.concatenate(parts), stage.labels.repeat(len(parts))
    names = tuple(family.name for family in families)
    rehearsal = _rehearsal(names, tuple(scales), features, labels)
    return Rehearsed(originals[0].reader, features, labels, rehearsal, originals)


class _Stage:
    """A network being read, with one stream of random numbers."""

    def __init__(
        self,
        model: nn.Module,
        originals: Sequence[Reading],
        place: Place,
        generator: torch.Generator,
        coder: Coder | None = None,
    ) -> None:
        self.model, self.place, self.generator, self.coder = model, place, generator, coder
        self.reader = originals[0].reader
        self.batches = list(merged([reading.batch for reading in originals]))
        self.labels = torch.cat([reading.labels for reading in originals if reading.labels is not None])
        plain = Features.concatenate([reading.features for reading in originals])
        check_finite(plain.logits)
        n = len(plain)
        self.original = replace(
            plain, groups=torch.arange(n), families=torch.zeros(n), strengths=torch.zeros(n)
        )
        self.layers = [j for j, tap in enumerate(self.reader.taps or ()) if tap.leads]
        self._spreads: list[Spread] | None = None

    def prepared(self, family: Family) -> Family:
        """The family with the spread of the inputs, measured on all of them."""
        if family.tokens and family.measured:
            return family.on(self._tokens())
        found = [values_of(first_input(batch)[1]) for batch in self.batches]
        inputs = [x for x in found if x is not None]
        if family.inside or not family.measured or not inputs:
            return family
        return family.on(Spread.of(_same_shape(inputs)))

    def _tokens(self) -> Tokens | None:
        found = [(batch, first_tokens(batch)[1]) for batch in self.batches]
        known = [(ids, real_tokens(batch, ids)) for batch, ids in found if ids is not None]
        return Tokens.of([ids for ids, _ in known], [real for _, real in known]) if known else None

    def copy(self, family: Family, scale: float, number: int) -> Features:
        """One copy of every sample, its level drawn so that all levels are equally frequent."""
        n = len(self.labels)
        level = torch.randperm(n, generator=self.generator) % len(LEVELS)
        share = torch.tensor(LEVELS, dtype=torch.float64)[level]
        found = self._read(self.batches, family, scale * share)
        return replace(
            found,
            groups=self.original.groups,
            families=torch.full((n,), number),
            strengths=share,
        )

    def scale_of(self, family: Family) -> float:
        """Strength that costs the network most of its accuracy above chance, or the family's bound.

        A few samples each try strengths that double. Layer families stop where accuracy stops falling: what
        is harmless however strong it is teaches nothing.
        """
        tried = _doubled(family.largest)
        batches = list(leading(self.batches, TRIALS))
        n = sum(size_of(batch) for batch in batches)
        which = torch.randperm(n, generator=self.generator) % len(tried)
        found = self._read(batches, family, torch.tensor(tried)[which])
        right = found.correct(self.labels[:n]).cpu().double()
        accuracy = _falling(right, which, len(tried))
        clean = float(self.original[:n].correct(self.labels[:n]).double().mean())
        enough = clean - LOST * max(clean - 1 / found.n_classes, 0.0)
        reached = [s for s, a in zip(tried, accuracy, strict=True) if a <= enough]
        if family.inside and not reached:
            reached = [s for s, a in zip(tried, accuracy, strict=True) if a <= accuracy[-1] + 0.03]
        return reached[0] if reached else family.largest

    def _read(self, batches: Sequence[Batch], family: Family, strength: Tensor) -> Features:
        starts = np.cumsum([0, *(size_of(batch) for batch in batches)])

        def prepare(batch: Batch, index: int) -> tuple[Batch, Change | None]:
            own = strength[starts[index] : starts[index + 1]]
            if not family.inside:
                return changed(batch, family, own, self.generator, self.coder), None
            layers = torch.tensor(self.layers)
            layer = layers[torch.randint(len(layers), (len(own),), generator=self.generator)]
            return batch, layer_change(family, self.spreads, layer, own, self.generator)

        return Features.concatenate([reading.features for reading in self._readings(batches, prepare)])

    def _readings(self, batches: Sequence[Batch], prepare: Prepare) -> Iterator[Reading]:
        return read_batches(self.model, batches, self.reader, self.place, prepare=prepare, progress=False)

    @property
    def spreads(self) -> list[Spread]:
        """Spread of what passes each tap, measured on some of the originals."""
        if self._spreads is None:
            taps = self.reader.taps or ()
            passed: list[list[Tensor]] = [[] for _ in taps]

            def keep(j: int, x: Tensor) -> Tensor:
                passed[j].append(x.clone())  # the network may yet overwrite its output in place
                return x

            list(self._readings(list(leading(self.batches, TRIALS)), lambda batch, _: (batch, keep)))
            self._spreads = [_spread_of(tap, xs) for tap, xs in zip(taps, passed, strict=True)]
        return self._spreads


def _rehearsal(
    names: tuple[str, ...], scales: tuple[float, ...], features: Features, labels: Tensor
) -> Rehearsal:
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
    return Rehearsal(names, scales, LEVELS, float(right[families == 0].mean()), under)


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
