"""Calibration samples as their own reference: what others say of each of them.

Where no training set is given, the calibration samples are what new samples are compared with. What the
layers say of *them* must come from others, or new samples would look strange for being new. Leaving a sample
out of the search is not enough. The space of a layer is whitened along many directions; a sample that had a
part in that lies nearer to all others there than a new one will. So the originals are dealt into ten folds,
in the order of their confidence, and each fold, with its copies, is compared with a reference made of the
nine others: its points, and its spaces. Where a sample lies (`Evidence.place`) is told in the space of all,
in which coordinates mean the same for every fold; along the few widest directions one sample counts little.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import normalize

from salgp.calibrators.copies import originals
from salgp.calibrators.evidence.classes import farness
from salgp.calibrators.evidence.reference import (
    Evidence,
    LayerSpace,
    Reference,
    condensed_reference,
    layer_evidence,
    place_and_length,
    principal_directions,
    white_space,
)
from salgp.features import Features

__all__ = ["OwnReference"]

FOLDS = 10
SPARE = 2
"""Directions of a fold are sought among this many times as many of all samples as are kept."""


class OwnReference:
    """References without each fold of the originals.

    Args:
        features: originals and copies.
        labels: ``(n,)`` true classes.
        whole: reference of all originals.
        width: largest number of principal directions per layer.
        options: of `salgp.calibrators.evidence.reference.condensed_reference`.
    """

    def __init__(
        self, features: Features, labels: Tensor, whole: Reference, width: int, **options: object
    ) -> None:
        self.first, self.original = originals(features)
        self.features, self.labels, self.whole = features, labels, whole
        self.width, self.options = width, options
        base = features[self.first]
        rank = base.confidence.argsort(stable=True).argsort(stable=True)
        self.fold = rank % min(FOLDS, len(base))
        self.parts = {name: _Directions(x, width) for name, x in base.layers.items()}

    def evidence(self) -> Evidence:
        """What the layers say of every row, by those that are in other folds."""
        found = [
            (rows, layer_evidence(reference, self.features[rows]))
            for reference, rows in self._references(self.fold[self.original])
        ]
        order = torch.cat([rows for rows, _ in found]).argsort()
        agreement, novelty = (
            torch.cat([getattr(e, name) for _, e in found])[order] for name in ("agreement", "novelty")
        )
        return Evidence(agreement, novelty, *place_and_length(self.whole, self.features))

    def farness(self, some: Tensor) -> Tensor:
        """`salgp.calibrators.evidence.classes.farness` of the originals ``some (m,)``, likewise."""
        rows = self.first[some]
        found = [
            (chosen, farness(reference, self.features[rows[chosen]]))
            for reference, chosen in self._references(self.fold[some])
        ]
        order = torch.cat([chosen for chosen, _ in found]).argsort()
        return torch.cat([far for _, far in found], dim=1)[:, order]

    def _references(self, fold: Tensor) -> Iterator[tuple[Reference, Tensor]]:
        """Every fold's reference, and the rows of that fold; ``fold (n,)`` says where each row is."""
        for number in range(int(self.fold.max()) + 1):
            rows = (fold == number).nonzero()[:, 0]
            if not len(rows):
                continue
            others = (self.fold != number).nonzero()[:, 0]
            known = self.features[self.first[others]]
            spaces = {name: part.without(others) for name, part in self.parts.items()}
            labels = self.labels[self.first[others]]
            yield condensed_reference(spaces, known, labels, **self.options), rows  # type: ignore[arg-type]


class _Directions:
    """Principal directions of a layer, ready to be found again for some of its samples."""

    def __init__(self, x: Tensor, width: int) -> None:
        self.width = width
        unit = normalize(x.double(), dim=1)
        self.centre, _, directions = principal_directions(unit)
        self.directions = directions[:, : SPARE * width]
        self.inside = (unit - self.centre) @ self.directions

    def without(self, others: Tensor) -> LayerSpace:
        """The space of these samples, without points."""
        mean, variance, turned = principal_directions(self.inside[others])
        centre = self.centre + self.directions @ mean
        return white_space(centre, variance, self.directions @ turned, self.width)
