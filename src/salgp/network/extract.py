"""From a network and a loader to `Features` and labels, with augmented samples and reference.

The network is never changed (`salgp.network.frozen_copy`), and batches are pooled while they pass through,
so memory holds pooled features only. For more samples than memory holds there is
`salgp.store.extract_to_store`.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import check_finite
from salgp.network.augment.augmentation import Augmentation, augment
from salgp.network.augment.families import Family
from salgp.network.reader import Reader, Reading, collect, read_batches
from salgp.progress import steps_in

__all__ = [
    "CalibrationData",
    "Families",
    "extract",
    "read_calibration_data",
    "reader_for",
]

READING_SHARE = 0.85
"""Of a budget; the rest is for the fit."""

Families = str | Sequence[str | Family]
"""Which augmented samples to add to the originals: see `salgp.network.augment.families.families_for`."""


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
    begin = time.monotonic()
    readings = read_batches(model, loader, reader, progress=progress)
    originals = () if perturb is None else tuple(readings)  # batches are kept only to be augmented
    reader, features, labels = _labelled(originals or readings)
    clock = None if budget is None else _Clock(budget, begin, len(features))
    n_reference = _rows(reference, originals)
    augmentation: Augmentation | None = None
    if perturb is not None and (features.layers or not needs_layers):
        # a tenth of the reference does as well as the whole: benchmarks/results/calibrate.md
        passes = None if clock is None else clock.passes() - min(n_reference // 10, clock.passes() // 2)
        features, labels, augmentation = augment(
            model,
            reader,
            [reading.batch for reading in originals],
            features,
            labels,
            perturb,
            passes=passes,
            progress=progress,
        )
    if reference is None:
        return CalibrationData(reader, features, labels, None, augmentation)
    step = 1 if clock is None else -(-n_reference // max(clock.passes(), 1)) or 1
    if step > 1:
        reference = _EveryFew(reference, step)
    title = "reading the reference"
    _, known, classes = _labelled(read_batches(model, reference, reader, progress=progress, title=title))
    check_finite(known.logits, "the class scores of the reference hold")
    if augmentation is not None:
        read = 1.0 if step == 1 else min(len(known) / n_reference, 1.0)
        augmentation = replace(augmentation, reference=read)
    return CalibrationData(reader, features, labels, (known, classes), augmentation)


@dataclass(frozen=True)
class _Clock:
    """How many forward passes a budget of seconds still allows, by the time the calibration samples took."""

    budget: float
    begin: float
    samples: int
    per_pass: float = field(init=False)

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"budget must be a positive number of seconds, got {self.budget}")
        object.__setattr__(self, "per_pass", (time.monotonic() - self.begin) / self.samples)

    def passes(self) -> int:
        left = READING_SHARE * self.budget - (time.monotonic() - self.begin)
        return max(0, int(left / self.per_pass))


class _EveryFew:
    """Every so many batches of a loader."""

    def __init__(self, loader: Iterable[Any], step: int) -> None:
        self._loader, self._step = loader, step

    def __iter__(self) -> Iterator[Any]:
        return itertools.islice(self._loader, 0, None, self._step)

    def __len__(self) -> int:
        steps = steps_in(self._loader)
        if steps is None:
            raise TypeError("the loader does not know its length")
        return -(-steps // self._step)


def _rows(loader: Iterable[Any] | None, like: Sequence[Reading]) -> int:
    """Samples of a loader, if its batches are as large as those read already; 0 where it cannot tell."""
    steps = None if loader is None else steps_in(loader)
    return (steps or 0) * (len(like[0].features) if like else 1)


def _labelled(readings: Iterable[Reading]) -> tuple[Reader, Features, Tensor]:
    reader, features, labels = collect(readings)
    if labels is None:
        raise ValueError(
            "calibration needs labels, but the loader yields inputs only; yield (x, y) or a "
            "mapping with 'labels', or say where they are: reader=salgp.Reader(labels_at=...)"
        )
    return reader, features, labels
