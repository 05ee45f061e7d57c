"""Two questions to every layer: does it agree with the predicted class, and has it seen such input before?

Both are answered by distances to reference samples, usually the network's training set, in a space of its own
for each layer: features are scaled to unit length (the direction carries the meaning, the length mostly
brightness and contrast), then centred and whitened along at most ``width`` principal directions. With
``d_own``, ``d_other`` and ``d_any`` the mean distances to the ``k`` nearest reference samples of the
predicted class, of other classes, and of any,

    agreement = log d_other - log d_own,        novelty = log d_any.

A reference row can be left out per query, so that the calibration set may serve as its own reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import normalize

from salgp.features import Features
from salgp.storage import storable

__all__ = ["Evidence", "LayerSpace", "Reference", "layer_evidence", "make_reference"]

NEAREST = 3
"""Neighbours averaged over."""
WIDTH = 64
"""Largest number of principal directions kept per layer."""
LARGEST_LOG_RATIO = 6.0
"""Agreement is kept within this bound; a copy of a reference sample would make it infinite."""
CHUNK_ENTRIES = 4_000_000
"""Distances held at once."""


@dataclass(frozen=True, eq=False)
class Evidence:
    """What the layers say about ``n`` predictions.

    Args:
        agreement: ``(n, L)``; positive where the layer sides with the predicted class.
        novelty: ``(n, L)``; large where the layer is far from all reference samples.
    """

    agreement: Tensor
    novelty: Tensor


@storable
@dataclass(frozen=True, eq=False)
class LayerSpace:
    """Where distances of one layer are measured: unit length, centred, whitened.

    Args:
        centre: ``(d,)`` mean of the unit-length reference features.
        directions: ``(d, q)`` principal directions, each divided by its standard deviation.
        points: ``(m, q)`` reference samples in that space.
    """

    centre: Tensor
    directions: Tensor
    points: Tensor

    def project(self, x: Tensor) -> Tensor:
        """Coordinates ``(n, q)`` of features ``(n, d)``."""
        return (normalize(x.to(self.centre), dim=1) - self.centre) @ self.directions


@storable
@dataclass(frozen=True, eq=False)
class Reference:
    """Reference samples of every layer, and their classes.

    Args:
        layers: name of the layer -> its space.
        classes: ``(m,)`` class of each reference sample.
        k: neighbours averaged over.
    """

    layers: dict[str, LayerSpace]
    classes: Tensor
    k: int = NEAREST

    def __len__(self) -> int:
        return len(self.classes)

    @cached_property
    def by_class(self) -> _ByClass:
        """The same samples sorted by class: worked out once, since sorting them costs more than comparing a
        single sample with them.
        """
        order = self.classes.argsort(stable=True)
        classes, sizes = self.classes[order].unique_consecutive(return_counts=True)
        sorted_points = ((name, space.points[order]) for name, space in self.layers.items())
        points = {name: (x, x.float(), x.float().square().sum(dim=1)) for name, x in sorted_points}
        return _ByClass(order.argsort(), classes, sizes.tolist(), points)

    def to(self, device: torch.device) -> Reference:
        """The same reference on another device."""
        if self.classes.device == device:
            return self
        moved = {
            n: LayerSpace(s.centre.to(device), s.directions.to(device), s.points.to(device))
            for n, s in self.layers.items()
        }
        return Reference(moved, self.classes.to(device), self.k)


def make_reference(
    features: Features,
    labels: Tensor,
    *,
    k: int = NEAREST,
    width: int = WIDTH,
    prototypes: int | None = None,
    seed: int = 0,
) -> Reference:
    """Build the spaces of all layers from reference samples.

    Args:
        features: of the reference samples, usually the network's training set.
        labels: ``(m,)`` their true classes.
        k: neighbours averaged over.
        width: largest number of principal directions per layer.
        prototypes: keep only so many cluster centres per class (k-means in the first layer's place would
            favour one layer, so clusters are formed on all layers side by side); None keeps every sample.
        seed: of the clustering.

    Returns:
        The reference; `layer_evidence` compares with it.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]), k=1)
        >>> len(reference), reference.layers["a"].points.shape
        (4, torch.Size([4, 2]))
    """
    if k < 1 or width < 1:
        raise ValueError(f"k and width must be at least 1, got k={k}, width={width}")
    spaces = {name: _space(x, width) for name, x in features.layers.items()}
    classes = labels.to(features.logits.device)
    if prototypes is not None:
        spaces, classes = _prototypes(spaces, classes, prototypes, torch.Generator().manual_seed(seed))
    return Reference(spaces, classes, k)


def layer_evidence(reference: Reference, features: Features, own: Tensor | None = None) -> Evidence:
    """Agreement and novelty of every layer.

    Args:
        reference: what to compare with.
        features: ``n`` samples with the reference's layers.
        own: ``(n,)`` reference row to leave out for each sample (-1: none), where the sample is part of the
            reference.

    Returns:
        Two ``(n, L)`` tensors in double precision.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]), k=1)
        >>> seen = layer_evidence(
        ...     reference,
        ...     Features(
        ...         torch.tensor([[2.0, 0.0], [0.0, 2.0]]), {"a": torch.tensor([[9.0, 1.0], [9.0, 1.0]])}
        ...     ),
        ... )
        >>> (seen.agreement > 0).flatten()  # both look like class 0; the second is predicted as class 1
        tensor([ True, False])
    """
    reference = reference.to(features.logits.device)
    known = reference.by_class
    position = (known.classes[None, :] == features.label[:, None]).int()
    mine = torch.where(position.any(dim=1), position.argmax(dim=1), -1)  # column of the predicted class
    skip = None if own is None else torch.where(own >= 0, known.rank[own], -1)
    spaces = [
        (space.project(features.layers[name]), known.points[name]) for name, space in reference.layers.items()
    ]
    parts = [_one_layer(x, points, known.sizes, mine, skip, reference.k) for x, points in spaces]
    return Evidence(torch.stack([a for a, _ in parts], dim=1), torch.stack([n for _, n in parts], dim=1))


@dataclass(frozen=True, eq=False)
class _ByClass:
    """Reference samples sorted by class: where each one went, the classes, their sizes, and per layer the
    points, the same in single precision, and their squared lengths.
    """

    rank: Tensor
    classes: Tensor
    sizes: list[int]
    points: dict[str, tuple[Tensor, Tensor, Tensor]]


def _one_layer(
    x: Tensor,
    known: tuple[Tensor, Tensor, Tensor],
    sizes: list[int],
    mine: Tensor,
    skip: Tensor | None,
    k: int,
) -> tuple[Tensor, Tensor]:
    """Agreement and novelty ``(n,)`` from coordinates; the known points are sorted by class, with ``sizes``
    of each class.
    """
    points, fast, squares = known
    agreement, novelty = [x.new_zeros(0)], [x.new_zeros(0)]
    for rows in _chunks(x, max(1, CHUNK_ENTRIES // max(len(points), 1))):
        D = torch.addmm(squares, x[rows].float(), fast.T, alpha=-2)  # (b, m), without the row's own square
        if skip is not None:
            here = (skip[rows] >= 0).nonzero()[:, 0]
            D[here, skip[rows][here]] = torch.inf
        near, index, group = _candidates(D, sizes, k)
        own_class = group == mine[rows, None, None]
        masks = (torch.ones_like(own_class), own_class, ~own_class)
        d_any, d_own, d_other = (
            _mean_distance(x[rows], points, near.masked_fill(~mask, torch.inf), index, k) for mask in masks
        )
        agreement.append(
            (d_other.log() - d_own.log()).nan_to_num(0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        )
        novelty.append(d_any.log())
    return torch.cat(agreement), torch.cat(novelty)


def _chunks(x: Tensor, step: int) -> Iterator[slice]:
    """Rows at a time; all of them in an exported graph, whose batch has no known size."""
    if torch.compiler.is_exporting():
        return iter([slice(None)])
    return (slice(start, start + step) for start in range(0, len(x), step))


def _candidates(D: Tensor, sizes: list[int], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Distances that may be among the nearest, their columns, and the classes of those.

    Of each class the ``k`` nearest, ``(b, C, k)``; in an exported graph all columns, ``(b, 1, m)``: three
    searches through all of them make a far smaller graph than one through every class.
    """
    if not torch.compiler.is_exporting():
        return *_nearest_per_class(D, sizes, k), torch.arange(len(sizes), device=D.device)[None, :, None]
    columns = torch.arange(sum(sizes), device=D.device).expand(D.shape[0], 1, -1)
    classes = torch.cat([torch.full((size,), c, device=D.device) for c, size in enumerate(sizes)])
    return D[:, None, :], columns, classes[None, None, :]


def _nearest_per_class(D: Tensor, sizes: list[int], k: int) -> tuple[Tensor, Tensor]:
    """The ``k`` smallest entries of every class's columns and where they are; overwrites ``D``, infinite
    where there are fewer.
    """
    near = D.new_full((len(D), len(sizes), k), torch.inf)
    index = torch.zeros(near.shape, dtype=torch.long, device=D.device)
    start = 0
    for c, size in enumerate(sizes):
        columns = D[:, start : start + size]
        for j in range(min(k, size)):
            near[:, c, j], found = columns.min(dim=1)
            index[:, c, j] = found + start
            columns.scatter_(1, found[:, None], torch.inf)
        start += size
    return near, index


def _mean_distance(x: Tensor, points: Tensor, near: Tensor, index: Tensor, k: int) -> Tensor:
    """Mean distance, computed anew from the differences, to the ``k`` nearest candidates; infinite where
    there are none.
    """
    best, where = near.flatten(1).topk(min(k, near.shape[1] * near.shape[2]), dim=1, largest=False)
    chosen = points[index.flatten(1).gather(1, where)]  # (b, k, q)
    exact = (chosen - x[:, None, :]).norm(dim=2)
    finite = best.isfinite()
    mean: Tensor = exact.masked_fill(~finite, 0.0).sum(dim=1) / finite.sum(dim=1)
    return mean.masked_fill(~finite.any(dim=1), torch.inf).clamp_min(1e-9)


def _space(x: Tensor, width: int, ridge: float = 1e-3) -> LayerSpace:
    unit = normalize(x.double(), dim=1)
    centre = unit.mean(dim=0)
    _, S, Vh = torch.linalg.svd(unit - centre, full_matrices=False)
    variance = S.square() / max(len(x) - 1, 1)
    kept = variance[:width] > 1e-6 * variance[0].clamp_min(1e-30)
    scale = (variance[:width] + ridge * variance[0]).clamp_min(1e-30).rsqrt()
    directions = (Vh[:width].T * scale)[:, kept] if bool(kept.any()) else Vh[:1].T
    return LayerSpace(centre, directions.contiguous(), (unit - centre) @ directions)


def _prototypes(
    spaces: dict[str, LayerSpace], classes: Tensor, per_class: int, generator: torch.Generator
) -> tuple[dict[str, LayerSpace], Tensor]:
    if per_class < 1:
        raise ValueError(f"prototypes must be at least 1 per class, got {per_class}")
    joint = torch.cat([s.points / s.points.shape[1] ** 0.5 for s in spaces.values()], dim=1)
    assigned = torch.full_like(classes, -1)
    kept: list[int] = []
    for c in classes.unique().tolist():
        rows = (classes == c).nonzero()[:, 0]
        cluster = _k_means(joint[rows], per_class, generator)
        assigned[rows] = cluster + len(kept)
        kept += [c] * (int(cluster.max()) + 1)
    counts = torch.bincount(assigned, minlength=len(kept)).to(joint)[:, None]
    reduced = {
        n: LayerSpace(s.centre, s.directions, _sums(s.points, assigned, len(kept)) / counts)
        for n, s in spaces.items()
    }
    return reduced, torch.tensor(kept, device=classes.device)


def _k_means(x: Tensor, k: int, generator: torch.Generator, rounds: int = 25) -> Tensor:
    """Cluster number of each row, numbered without gaps."""
    start = torch.randperm(len(x), generator=generator)[: min(k, len(x))].to(x.device)
    centres = x[start]
    cluster = torch.cdist(x, centres).argmin(dim=1)
    for _ in range(rounds):
        counts = torch.bincount(cluster, minlength=len(centres)).to(x)[:, None]
        centres = torch.where(counts > 0, _sums(x, cluster, len(centres)) / counts.clamp_min(1), centres)
        moved = torch.cdist(x, centres).argmin(dim=1)
        if bool((moved == cluster).all()):
            break
        cluster = moved
    numbered: Tensor = cluster.unique(return_inverse=True)[1]
    return numbered


def _sums(x: Tensor, group: Tensor, n: int) -> Tensor:
    return x.new_zeros(n, x.shape[1]).index_add_(0, group, x)
