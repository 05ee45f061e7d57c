"""Calibration samples as their own reference: the evidence of each comes from the others alone.

Where no training set is given, new samples are compared with the calibration samples. These must be
compared with *others*, or new samples would look novel for being new. Leaving a sample out of the search is
not enough: a sample that had a part in whitening a space lies nearer to all others there than a new one
will. So the calibration samples are dealt into ten folds, and each fold, with its augmented samples, is
compared with a reference made of the nine others. Where there are many, every second one becomes the
reference and the others calibrate, so that the work grows linearly.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from salgp.calibrators.evidence.layer_spaces import (
    Evidence,
    Reference,
    ReferenceSettings,
    layer_evidence,
    make_reference,
    principal_directions,
    unit_length,
)
from salgp.features import Features

__all__ = ["own_reference"]

FOLDS = 10
MANY = 4_000
"""Calibration samples from which on every second one becomes the reference."""


def split_reference(features: Features) -> tuple[Tensor, Tensor]:
    """Rows of every second original, to be the reference, and all rows of the others."""
    first, original = features.originals
    rank = features[first].confidence_rank
    chosen = rank % 2 == 0
    return first[chosen], (~chosen)[original].nonzero()[:, 0]


def fold_references(
    features: Features, labels: Tensor, settings: ReferenceSettings
) -> Iterator[tuple[Reference, Features, Tensor]]:
    """For each fold a reference of the others, the samples of the fold, and their rows."""
    first, original = features.originals
    rank = features[first].confidence_rank
    fold = rank % min(FOLDS, len(first))
    narrow = _narrowed(features, first, 2 * settings.width)
    for k in range(int(fold.max()) + 1):
        others = first[fold != k]
        rows = (fold[original] == k).nonzero()[:, 0]
        reference = make_reference(narrow[others], labels[others], settings)
        yield reference, narrow[rows], rows


def own_reference(
    features: Features, labels: Tensor, settings: ReferenceSettings
) -> tuple[Reference, Evidence]:
    """The calibration samples as reference points, and the evidence of each by the samples of other folds;
    coordinates and norm are those in the space of all.
    """
    first, _ = features.originals
    points = make_reference(features[first], labels[first], settings)
    found = layer_evidence(points, features)
    agreement, novelty = found.agreement.clone(), found.novelty.clone()
    for reference, samples, rows in fold_references(features, labels, settings):
        here = layer_evidence(reference, samples)
        agreement[rows], novelty[rows] = here.agreement, here.novelty
    return points, replace(found, agreement=agreement, novelty=novelty)


def _narrowed(features: Features, first: Tensor, width: int) -> Features:
    """Features along the widest directions of the originals, and the length of what is left as one more
    number: unit vectors stay unit vectors, and every fold finds its own directions among these few.
    """
    layers = {}
    for name, x in features.layers.items():
        unit = unit_length(x.double())
        directions = principal_directions(unit[first])[2][:, :width]
        inside = unit @ directions
        rest = (1 - inside.square().sum(dim=1, keepdim=True)).clamp_min(0).sqrt()
        layers[name] = torch.cat([inside, rest], dim=1)
    return replace(features, layers=layers)
