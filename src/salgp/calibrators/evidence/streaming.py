"""Layer evidence from more rows than memory holds: two passes, then a problem of a few columns.

1. One pass over the reference sums what its spaces need (per layer the mean and the products of the
   unit-length features) and draws so many samples of each class as its points are made from.
2. One pass over the calibration data computes the evidence, a few numbers per layer and row. These, the
logits
   and where each row came from are all that a fit needs, and fit into memory for millions of rows.

Every row gets a random number that depends on nothing but its part of the data and its place there; of each
class those with the smallest are drawn. So the parts may be passed over in any grouping, anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.base import Source
from salgp.calibrators.evidence.layer_spaces import (
    SAMPLES_PER_POINT,
    Evidence,
    LayerSpace,
    Reference,
    ReferenceSettings,
    descending_directions,
    layer_evidence,
    reference_points,
    unit_length,
    whitened_space,
)
from salgp.features import Features
from salgp.io import storable

__all__ = []

DRAWN_ROWS = 60_000
"""About so many reference samples are drawn in all, where a class has enough."""


@storable
@dataclass(frozen=True, eq=False)
class SampleRows:
    """Samples with their classes, in memory.

    Args:
        values: ``logits``, ``layers.<name>``, ``label`` and whatever else is known, each with ``n`` rows.
    """

    values: dict[str, Tensor]

    def __add__(self, other: SampleRows) -> SampleRows:
        return SampleRows({name: torch.cat([x, other.values[name]]) for name, x in self.values.items()})

    def features(self) -> Features:
        """The samples as features."""
        layers = {n.removeprefix("layers."): x for n, x in self.values.items() if n.startswith("layers.")}
        known = ("groups", "families", "strengths")
        origin: dict[str, Any] = {n: self.values[n] for n in known if n in self.values}
        return Features(self.values["logits"], layers, **origin)


@storable
@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over unit-length features ``u`` of one layer.

    Args:
        total: ``(d,)``, of ``u``.
        outer_products: ``(d, d)``, of ``u u'``.
    """

    total: Tensor
    outer_products: Tensor

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.total + other.total, self.outer_products + other.outer_products)

    def space(self, n: int, width: int) -> LayerSpace:
        """The whitened space of ``n`` samples with these sums."""
        mean = self.total / n
        deviations = self.outer_products - n * torch.outer(mean, mean)
        found = descending_directions(deviations / max(n - 1, 1))
        return whitened_space(mean, *found, width)


@storable
@dataclass(frozen=True, eq=False)
class ReferenceSums:
    """Sums of one pass over reference samples.

    Args:
        n: number of samples.
        moments: of each layer.
        drawn: at most ``per_class`` samples of each class.
        per_class: see above.
    """

    n: int
    moments: dict[str, Moments]
    drawn: SampleRows
    per_class: int

    def __add__(self, other: ReferenceSums) -> ReferenceSums:
        moments = {name: m + other.moments[name] for name, m in self.moments.items()}
        drawn = first_of_class(self.drawn + other.drawn, self.per_class)
        return ReferenceSums(self.n + other.n, moments, drawn, self.per_class)


@dataclass(frozen=True, eq=False)
class EvidenceRows:
    """The calibration data as a fit needs them.

    Args:
        features: with layers of no width, that have names only.
        labels: ``(n,)`` true classes.
        evidence: of the layers.
        reference: it was found with.
        widths: of the layers.
    """

    features: Features
    labels: Tensor
    evidence: Evidence
    reference: Reference
    widths: dict[str, int]


def stream_evidence(source: Source, settings: ReferenceSettings) -> EvidenceRows:
    """Cluster a source's reference, and compare all its rows with it."""
    found: ReferenceSums = source.over_rows("reference-sums", sum_reference, settings, reference=True)
    spaces = {name: m.space(found.n, settings.width) for name, m in found.moments.items()}
    drawn = found.drawn
    reference = reference_points(spaces, drawn.features(), drawn.values["label"], settings)
    rows: SampleRows = source.over_rows("evidence", compare_rows, reference)
    seen = dict(rows.values)
    labels = seen.pop("label")
    evidence = Evidence(*(seen.pop(field.name) for field in fields(Evidence)))
    widths = {name: len(space.directions) for name, space in reference.spaces.items()}
    seen |= {f"layers.{name}": evidence.novelty.new_zeros(len(labels), 0) for name in widths}
    return EvidenceRows(SampleRows(seen).features(), labels, evidence, reference, widths)


def sum_reference(
    settings: ReferenceSettings, features: Features, labels: Tensor, number: int
) -> ReferenceSums:
    """Moments of every layer, and the samples drawn from this part."""
    moments = {}
    for name, x in features.layers.items():
        unit = unit_length(x.double())
        moments[name] = Moments(unit.sum(dim=0), unit.T @ unit)
    generator = torch.Generator().manual_seed((settings.seed << 32) + number)
    key = torch.rand(len(labels), generator=generator)
    rows = {"logits": features.logits, "label": labels, "key": key}
    rows |= {f"layers.{name}": x for name, x in features.layers.items()}
    points = settings.points(features.n_classes)
    most = min(SAMPLES_PER_POINT * points, DRAWN_ROWS // features.n_classes)
    per_class = max(points, most)
    drawn = first_of_class(SampleRows(rows), per_class)
    return ReferenceSums(len(labels), moments, drawn, per_class)


def compare_rows(reference: Reference, features: Features, labels: Tensor, number: int) -> SampleRows:
    """Evidence of every row, and what else a fit needs of it."""
    found = layer_evidence(reference, features)
    known = {"logits": features.logits, "label": labels, **features.origin}
    return SampleRows(known | {name: x.contiguous() for name, x in vars(found).items()})


def first_of_class(rows: SampleRows, per_class: int) -> SampleRows:
    """At most ``per_class`` samples of each class, those with the smallest random numbers, in their order.

    Example:
        >>> rows = SampleRows(
        ...     {"label": torch.tensor([0, 1, 0, 0]), "key": torch.tensor([0.9, 0.5, 0.1, 0.2])}
        ... )
        >>> first_of_class(rows, 2).values["key"]
        tensor([0.5000, 0.1000, 0.2000])
    """
    label, key = rows.values["label"], rows.values["key"]
    order = key.argsort(stable=True)
    order = order[label[order].argsort(stable=True)]  # by class, then by number
    _, sizes = label[order].unique_consecutive(return_counts=True)
    start = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    early = torch.arange(len(order)) - start < per_class
    kept = order[early].sort().values
    return SampleRows({name: x[kept] for name, x in rows.values.items()})
