"""What a calibrator is fitted on, read in one go: calibration data, perturbed copies, reference.

`salgp.calibrate` and ``salgp calibrate`` both read with `gather`, so that what the command keeps is
what the calibrator saw.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from salgp.features import Features
from salgp.logits import check_finite
from salgp.network.extract import Copies, Perturb, perturbed
from salgp.network.reader import Reader
from salgp.network.reading import ANYWHERE, Place, Reading, collect, read_batches
from salgp.network.rehearsal import Rehearsal, with_copies

__all__ = ["Gathered", "gather"]


@dataclass(frozen=True, eq=False)
class Gathered:
    """What a calibrator is fitted on.

    Args:
        reader: settled by the first batch.
        features: of the calibration data, with their perturbed copies where there are some.
        labels: of all of them.
        reference: features and labels of the training data, or None.
        rehearsal: which copies there are, or None.
    """

    reader: Reader
    features: Features
    labels: Tensor
    reference: tuple[Features, Tensor] | None = None
    rehearsal: Rehearsal | None = None


def gather(
    model: nn.Module,
    loader: Iterable[Any],
    reader: Reader,
    copies: Perturb | Copies | None = None,
    place: Place = ANYWHERE,
    *,
    reference: Iterable[Any] | None = None,
    seed: int = 0,
    progress: bool | None = None,
    tokenizer: Any = None,
    needs_layers: bool = False,
) -> Gathered:
    """Read calibration data, copies and reference with the same taps.

    Args:
        model: the classifier.
        loader: labelled calibration data.
        reader: what to read of the network.
        copies: see ``perturb`` of `salgp.extract`; None for none.
        place: where the network runs.
        reference: labelled training data.
        seed: of the copies.
        progress: see `salgp.extract`.
        tokenizer: see `salgp.extract`.
        needs_layers: are the copies for a method that reads layers? Then none are made where no layer of the
            network can be read.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 3), torch.arange(8) % 3
        >>> gather(nn.Sequential(nn.Flatten()), [(x, y)], Reader(layers=())).features
        Features(8 samples, 3 classes, no layers)
    """
    rehearsal: Rehearsal | None = None
    if copies is None or callable(copies):
        prepare = perturbed(copies, seed)
        readings = read_batches(model, loader, reader, place, prepare=prepare, progress=progress)
        reader, features, labels = _labelled(readings)  # one batch after the other: none is kept
    else:
        originals = tuple(read_batches(model, loader, reader, place, progress=progress))
        if needs_layers and not originals[0].features.layers:
            reader, features, labels = _labelled(originals)
        else:
            how: Any = {"seed": seed, "progress": progress, "tokenizer": tokenizer}
            found = with_copies(model, originals, copies, place, **how)
            reader, features, labels, rehearsal = found.reader, found.features, found.labels, found.rehearsal
    known = None
    if reference is not None:
        title = "reading the reference"
        readings = read_batches(model, reference, reader, place, progress=progress, title=title)
        known = _labelled(readings)[1:]
        check_finite(known[0].logits, "the class scores of the reference hold")
    return Gathered(reader, features, labels, known, rehearsal)


def _labelled(readings: Iterable[Reading]) -> tuple[Reader, Features, Tensor]:
    reader, features, labels = collect(readings)
    if labels is None:
        raise ValueError(
            "calibration needs labels, but the loader yields inputs only; yield (x, y) or a "
            "mapping with 'labels', or say where they are: labels_at=..."
        )
    return reader, features, labels
