"""From a network and a loader to `Features` and labels, with augmented samples and reference.

The network is never changed (`salgp.network.frozen_copy`), and batches are pooled while they pass through,
so memory holds pooled features only. For more samples than memory holds there is
`salgp.store.extract_to_store`.

Augmented samples are the same samples, perturbed. How strong is strong depends on data and network, so the
scale of each family is found by trying: the strength that costs the network most of what it knows, or the
family's own bound. Every sample then gets, in each family, one of eight strengths from 4 % of that scale to
the whole of it. Samples of one family and strength are an *environment*: about n / 8 samples under the same
shift. Originals always stay, and augmented samples share their original's group. `read_calibration_data`
keeps to a budget of seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from sklearn.isotonic import isotonic_regression
from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import check_finite
from salgp.network.augment.corruptions import Spread
from salgp.network.augment.families import Family, families_for, layer_change, perturbed_batch, real_tokens
from salgp.network.batches import Batch, first_rows, rebatched
from salgp.network.reader import Prepare, Reader, Reading, collect, read_batches
from salgp.network.taps import Change, Tap
from salgp.progress import Advance, progress_bar, steps_in

if TYPE_CHECKING:
    from salgp.network.augment.text import Tokens

__all__ = ["Augmentation", "CalibrationData", "Families", "extract", "read_calibration_data", "reader_for"]

Families = str | Sequence[str | Family]
"""Which augmented samples to add to the originals: see `salgp.network.augment.families.families_for`."""
LEVELS = tuple(float(0.04 ** (1 - k / 7)) for k in range(8))
"""Strengths of augmented samples, as shares of the family's scale."""
TRIALS = 160
"""Samples used to find the scale of a family."""
MOST = 3
"""Most augmented samples of an original in a family: more change nothing."""
READING_SHARE = 0.85
"""Of a budget; the rest is for the fit."""
ACCURACY_LOSS = 0.75
"""A family is strong enough once it has cost the network this share of its accuracy above chance."""


def extract(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    reader: Reader | None = None,
    output: str | None = None,
    perturb: Families | None = None,
    progress: bool | None = None,
) -> tuple[Features, Tensor | None]:
    """Logits and pooled layer features of everything a loader yields.

    Args:
        model: any PyTorch classifier; it is the same afterwards.
        loader: yields ``(x, y)``, ``(x1, x2, ..., y)``, ``x`` alone, or mappings with keyword arguments (and
            ``labels``, ``label``, ``targets``, ``target`` or ``y``). Labels are class numbers or one-hot
            rows.
        reader: how to read the network: layers, pooling, how it is called, where labels are, devices, the
            tokenizer and the seed of augmented samples.
        output: what the network returns: ``"logits"`` (the default), ``"probabilities"``,
            ``"log-probabilities"`` or ``"sigmoids"`` (one probability per class, against the rest).
        perturb: families of perturbations: ``"auto"``, by the kind of input; a kind (``"images"``,
            ``"sequences"``, ``"tabular"``, ``"tokens"``, ``"text"``); or a list of names (``"noise"``, ...)
            and of `salgp.network.augment.families.Family` of your own. Labelled originals are then followed
            by augmented samples that share their original's group. None adds nothing.
        progress: True shows a bar (needs ``rich``), False nothing; None a bar on a terminal and in notebooks,
            and elsewhere a line now and then.

    Returns:
        Features, and labels ``(n,)`` or None where the loader has none.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> loader = [(torch.zeros(2, 4), torch.tensor([0, 1])), (torch.ones(1, 4), torch.tensor([2]))]
        >>> features, labels = extract(model, loader)
        >>> len(features), features.widths, labels
        (3, {'1': 8}, tensor([0, 1, 2]))
    """
    reader = reader_for(reader, output)
    if perturb is None:
        return collect(read_batches(model, loader, reader, progress=progress))[1:]
    found = read_calibration_data(model, loader, reader, perturb, progress=progress)
    return found.features, found.labels


def reader_for(reader: Reader | None, output: str | None) -> Reader:
    """The reader, or the default one, with the output of a call.

    Example:
        >>> reader_for(Reader(layers=-1), "probabilities").output
        'probabilities'
    """
    if reader is not None and not isinstance(reader, Reader):
        raise TypeError(f"reader must be a salgp.Reader, got {type(reader).__name__}")
    reader = reader or Reader()
    if output is not None and reader.output not in (None, output):
        raise ValueError(f"output is {output!r}, but that of the reader {reader.output!r}")
    return replace(reader, output=output or reader.output)


@dataclass(frozen=True)
class Augmentation:
    """Which augmented samples were made, and what they cost the network.

    Args:
        families: names, in the order of their numbers in `salgp.Features.families`, which begin at 1.
        scales: strength of each family at level 1.
        levels: shares of the scale that samples got.
        accuracy: of the network on the originals.
        under: accuracy in each family at each level.
        per_sample: augmented samples of each original and family, on average.
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
    per_sample: float = 1.0
    reference: float = 1.0

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
        lists = {name: tuple(stored[name]) for name in ("families", "scales", "levels")}
        under = tuple(map(tuple, stored["under"]))
        return Augmentation(**{**stored, **lists, "under": under})


@dataclass(frozen=True, eq=False)
class CalibrationData:
    """Calibration data as a calibrator is fitted on them.

    Args:
        reader: resolved by the first batch.
        features: of the calibration data, with augmented samples where there are some.
        labels: of all of them.
        reference: features and labels of the training data, or None.
        augmentation: how the augmented samples were made, or None.
    """

    reader: Reader
    features: Features
    labels: Tensor
    reference: tuple[Features, Tensor] | None = None
    augmentation: Augmentation | None = None


def read_calibration_data(
    model: nn.Module,
    loader: Iterable[Any],
    reader: Reader,
    perturb: Families | None = None,
    *,
    reference: Iterable[Any] | None = None,
    needs_layers: bool = False,
    budget: float | None = None,
    progress: bool | None = None,
) -> CalibrationData:
    """Read calibration data, augmented samples and reference with the same taps.

    Args:
        model: the classifier.
        loader: labelled calibration data.
        reader: how to read the network; its seed is also that of the augmented samples.
        perturb: see `extract`.
        reference: labelled training data.
        needs_layers: are the augmented samples for a method that reads layers? Then none are made where no
            layer of the network can be read.
        budget: seconds to spend on all this; see `salgp.calibrate`.
        progress: see `extract`.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 3), torch.arange(8) % 3
        >>> read_calibration_data(nn.Sequential(nn.Flatten()), [(x, y)], Reader(layers=())).features
        Features(8 samples, 3 classes, no layers)
    """
    clock = _Clock(budget)
    readings = read_batches(model, loader, reader, progress=progress)
    originals = () if perturb is None else tuple(readings)  # batches are kept only to be augmented
    reader, features, labels = _labelled(originals or readings)
    clock.learn(len(features))
    rows = len(features) / (steps_in(loader) or 1)
    n_reference = int(rows * (steps_in(reference) or 0))
    augmentation: Augmentation | None = None
    if perturb is not None and (features.layers or not needs_layers):
        batches = [reading.batch for reading in originals]
        passes = clock.passes(keep=n_reference // 10)  # as good as all: benchmarks/results/calibrate.md
        features, labels, augmentation = augment(
            model, reader, batches, features, labels, perturb, passes=passes, progress=progress
        )
    if reference is None:
        return CalibrationData(reader, features, labels, None, augmentation)
    left = clock.passes()
    step = 1 if left is None else max(1, -(-n_reference // max(left, 1)))
    some = reference if step == 1 else islice(reference, 0, None, step)
    readings = read_batches(model, some, reader, progress=progress, title="reading the reference")
    _, known, known_labels = _labelled(readings)
    check_finite(known.logits, "the class scores of the reference hold")
    if augmentation is not None and step > 1:
        augmentation = replace(augmentation, reference=len(known) / n_reference)
    return CalibrationData(reader, features, labels, (known, known_labels), augmentation)


class _Clock:
    """How many forward passes a budget of seconds still allows; None where there is no budget."""

    _rate = 0.0

    def __init__(self, budget: float | None) -> None:
        if budget is not None and not budget > 0:
            raise ValueError(f"budget must be a positive number of seconds, got {budget}")
        self._begin = time.monotonic()
        self._end = None if budget is None else self._begin + READING_SHARE * budget

    def learn(self, samples: int) -> None:
        """So many samples were read until now."""
        self._rate = samples / (time.monotonic() - self._begin)

    def passes(self, keep: int = 0) -> int | None:
        """Passes that are left, of which these, or half, are kept for later."""
        if self._end is None:
            return None
        passes = max(0, int(self._rate * (self._end - time.monotonic())))
        return passes - min(keep, passes // 2)


def _labelled(readings: Iterable[Reading]) -> tuple[Reader, Features, Tensor]:
    reader, features, labels = collect(readings)
    if labels is None:
        raise ValueError(
            "calibration needs labels, but the loader yields inputs only; yield (x, y) or a "
            "mapping with 'labels', or say where they are: reader=salgp.Reader(labels_at=...)"
        )
    return reader, features, labels


def augment(
    model: nn.Module,
    reader: Reader,
    batches: Sequence[Batch],
    features: Features,
    labels: Tensor,
    perturb: Families = "auto",
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
        passes: forward passes it may take, about; None for one augmented sample of each original and family.
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
    augmenter = _Augmenter(model, reader, batches, features, labels)
    families = augmenter.families(perturb)
    most = len(families) * len(labels)
    sets = len(families) + any(family.inside for family in families)
    trials = sets * min(TRIALS, len(labels))
    per_sample = 1.0 if passes is None else min(max(passes - trials, 0) / max(most, 1), MOST)
    rounds, share = max(1, int(per_sample)), min(per_sample, 1.0)
    total = trials + round(rounds * share * most)
    scales: list[float] = []
    parts = [augmenter.original]
    with progress_bar("augmenting", total, progress, unit="samples") as advance:
        augmenter.advance = advance
        for number, family in enumerate(families, start=1):
            scale = augmenter.scale_of(family)
            scales.append(scale)
            parts += [augmenter.augmented(family, scale, number, share) for _ in range(rounds)]
    features = Features.concatenate(parts)
    made = (len(features) - len(labels)) / most if most else 1.0
    labels = labels[features.origin["groups"].cpu()]
    return features, labels, _augmentation(families, scales, features, labels, made)


class _Augmenter:
    """A network being read, with one stream of random numbers."""

    def __init__(
        self, model: nn.Module, reader: Reader, batches: Sequence[Batch], features: Features, labels: Tensor
    ) -> None:
        check_finite(features.logits)
        self.model, self.reader, self.labels = model, reader, labels
        self.generator = torch.Generator().manual_seed(reader.seed)
        self.batches = list(rebatched(batches))
        zeros = torch.zeros(len(features))
        groups = torch.arange(len(features))
        self.original = replace(features, groups=groups, families=zeros, strengths=zeros)
        self.trials = list(first_rows(self.batches, TRIALS))
        self.n_trials = sum(_sizes(self.trials))
        self.layers = [j for j, tap in enumerate(reader.taps or ()) if tap.leads]
        self.advance: Advance = lambda steps=1, title=None: None

    def families(self, perturb: Families) -> list[Family]:
        """The families meant, with the spread of the data; none inside a network without layers."""
        first = self.batches[0]
        found = (first.numbers, first.tokens, first.texts)
        x = next((x for _, x in found if x is not None), None)
        chosen = families_for(perturb, x, with_text=self.reader.tokenizer is not None)
        usable = [family for family in chosen if self.layers or not family.inside]
        return list(map(self.prepared, usable))

    def prepared(self, family: Family) -> Family:
        """The family with the spread of the inputs, measured on all of them."""
        if family.inside or not (family.measured or family.text):
            return family
        return family.on(self.tokens if family.tokens or family.text else self.input_spread)

    @cached_property
    def input_spread(self) -> Spread | None:
        """Spread of the first floating-point input."""
        inputs = _same_shape(batch.numbers[1] for batch in self.batches)
        return Spread.of(inputs) if inputs else None

    @cached_property
    def tokens(self) -> Tokens | None:
        """Which tokens there are, where the first input is text."""
        found = [(batch, batch.tokens[1]) for batch in self.batches]
        known = [(ids, real_tokens(batch, ids)) for batch, ids in found if ids is not None]
        from salgp.network.augment.text import Tokens  # of text alone

        return Tokens.of(*zip(*known, strict=True)) if known else None

    def permuted(self, n: int) -> Tensor:
        """The numbers below ``n`` in random order."""
        return torch.randperm(n, generator=self.generator)

    def some(self, share: float) -> tuple[list[Batch], Tensor]:
        """This share of the batches, at least one, drawn at random; and the numbers of their originals."""
        sizes = _sizes(self.batches)
        numbers = torch.arange(sum(sizes))
        if share >= 1:
            return self.batches, numbers
        few = max(1, round(share * len(sizes)))
        drawn = self.permuted(len(sizes))[:few].sort().values
        chosen, parts = drawn.tolist(), numbers.split(sizes)
        return [self.batches[i] for i in chosen], torch.cat([parts[i] for i in chosen])

    def augmented(self, family: Family, scale: float, number: int, share: float = 1.0) -> Features:
        """An augmented sample of this share of the originals; all levels are equally frequent."""
        batches, groups = self.some(share)
        n = len(groups)
        level = self.permuted(n) % len(LEVELS)
        strength = torch.tensor(LEVELS, dtype=torch.float64)[level]
        found = self._read(batches, family, scale * strength)
        return replace(found, groups=groups, families=torch.full((n,), number), strengths=strength)

    def scale_of(self, family: Family) -> float:
        """Strength that costs the network most of its accuracy above chance, or the family's bound.

        A few samples each try strengths that double. Layer families stop where accuracy stops falling: what
        is harmless at any strength teaches nothing.
        """
        tried = _doubled(family.largest)
        which = self.permuted(self.n_trials) % len(tried)
        found = self._read(self.trials, family, torch.tensor(tried)[which])
        accuracy = _falling(self._right(found), which, len(tried))
        enough, least = self._accuracy_wanted, accuracy[-1]
        if family.inside and least > enough:
            enough = least + 0.03
        pairs = zip(tried, accuracy, strict=True)
        return next((s for s, a in pairs if a <= enough), family.largest)

    def _right(self, trials: Features) -> Tensor:
        return trials.correct(self.labels[: self.n_trials]).cpu().double()

    @cached_property
    def _accuracy_wanted(self) -> float:
        """Accuracy on the trials at which a family is strong enough."""
        original = float(self._right(self.original[: self.n_trials]).mean())
        chance = 1 / self.original.n_classes
        return original - ACCURACY_LOSS * max(original - chance, 0.0)

    def _read(self, batches: Sequence[Batch], family: Family, strength: Tensor) -> Features:
        strengths = strength.split(_sizes(batches))

        readings = self._readings(batches, lambda x, i: self._perturbed(x, family, strengths[i]))
        return Features.concatenate([reading.features for reading in readings])

    def _perturbed(self, batch: Batch, family: Family, strength: Tensor) -> tuple[Batch, Change | None]:
        generator = self.generator
        if not family.inside:
            return perturbed_batch(batch, family, strength, generator, self.reader.tokenizer), None
        drawn = torch.randint(len(self.layers), (len(strength),), generator=generator)
        layer = torch.tensor(self.layers)[drawn]
        return batch, layer_change(family, self.spreads, layer, strength, generator)

    def _readings(self, batches: Sequence[Batch], prepare: Prepare) -> Iterator[Reading]:
        readings = read_batches(self.model, batches, self.reader, prepare=prepare, progress=False)
        for reading in readings:
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

        list(self._readings(self.trials, lambda batch, _: (batch, keep)))
        return [_spread_of(tap, xs) for tap, xs in zip(taps, passed, strict=True)]


def _augmentation(
    families: Sequence[Family], scales: Sequence[float], features: Features, labels: Tensor, per_sample: float
) -> Augmentation:
    right = features.correct(labels).cpu().double()
    origin = {what: x.cpu() for what, x in features.origin.items()}
    number, strengths = origin["families"], origin["strengths"]
    names = tuple(family.name for family in families)
    own = [number == k for k in range(len(names) + 1)]
    accuracy = float(right[own[0]].mean())
    under = tuple(_by_level(right[rows], strengths[rows]) for rows in own[1:])
    return Augmentation(names, tuple(scales), LEVELS, accuracy, under, per_sample)


def _by_level(right: Tensor, strengths: Tensor) -> tuple[float, ...]:
    at_level = strengths.isclose(torch.tensor(LEVELS, dtype=torch.float64)[:, None])
    return tuple(float(right[rows].mean()) for rows in at_level)


def _sizes(batches: Sequence[Batch]) -> list[int]:
    return [len(batch.labels) for batch in batches]


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
    weights = counts[tried].numpy()
    smooth = isotonic_regression(means, sample_weight=weights, increasing=False)
    known = dict(zip(tried, smooth, strict=True))
    return [float(known.get(i, smooth[-1])) for i in range(n)]


def _spread_of(tap: Tap, passed: Sequence[Tensor]) -> Spread:
    first = passed[0]
    axis = tap.layout.channel_axis(first) if first.ndim > 2 else None
    return Spread.of(_same_shape(passed), axis, table=False)


def _same_shape(parts: Iterable[Tensor | None]) -> list[Tensor]:
    known = [x for x in parts if x is not None]
    return [x for x in known if x.shape[1:] == known[0].shape[1:]]
