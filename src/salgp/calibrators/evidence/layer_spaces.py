"""Distance of a sample to every class, in a whitened space of its own for each layer.

Features of a layer are scaled to unit length (the direction carries the meaning, the length mostly brightness
and contrast), then centred and whitened along at most ``width`` principal directions of the training set.
Each class is represented by at most ``size`` points: its training samples, or the centres of k-means clusters
where it has more. With ``d_lc`` the distance at layer ``l`` to the nearest point of class ``c`` and ``y`` the
predicted class,

    agreement  A_l = log min_{c != y} d_lc - log d_ly,        novelty  N_l = log min_c d_lc.

One matrix product per layer gives all distances, for one sample as for many.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from salgp.calibrators.base import chunks
from salgp.features import Features
from salgp.io import storable
from salgp.logits import at_least_single

__all__ = [
    "Evidence",
    "Reference",
    "ReferenceSettings",
    "LARGEST",
    "WIDTH",
    "coordinates",
    "layer_evidence",
    "make_reference",
    "squared_distances",
]

WIDTH = 64
"""Largest number of principal directions per layer."""
POINTS = 200
"""Points per class and layer."""
MOST_POINTS = 10_000
"""Points per layer in all: classes get fewer points where there are more than 50 of them."""
COORDINATES = 16
"""Leading whitened coordinates per layer that the shift score reads."""
SAMPLES_PER_POINT = 50
"""Most samples per cluster that k-means is given: more do not change the centres."""
LARGEST = 6.0
"""Bound of differences of log distances."""
NEAREST = 0.03
"""Least distance to a point: less is the rounding of points in half precision. It bounds the agreement."""
NO_VARIANCE = 1e-12
"""Largest variance of unit-length features that is only rounding."""
ENTRIES = 2_000_000
"""Distances computed at once, so that they stay in the processor's cache."""
Pair = tuple[Tensor, Tensor]
T = TypeVar("T")


def each_field(function: Callable[..., Any], *values: T) -> T:
    """A value each of whose fields is ``function`` of that field of the given ones."""
    first: Any = values[0]
    columns = ([getattr(value, f.name) for value in values] for f in fields(first))
    found: T = type(first)(*(function(*column) for column in columns))
    return found


def joined(*values: Any) -> Any:
    """The rows of all values, which are tensors or have fields that are."""
    return torch.cat(values) if isinstance(values[0], Tensor) else each_field(joined, *values)


@dataclass(frozen=True, eq=False)
class Evidence:
    """Agreement and novelty of every layer for ``n`` predictions.

    Args:
        agreement: ``(n, L)``; infinite where a class needed for it has no reference points.
        novelty: ``(n, L)``; large where the layer is far from all reference points, 0 where there are none.
        coordinates: ``(n, q L)`` leading whitened coordinates of every layer.
        norm: ``(n,)`` length of the last layer's features.
    """

    agreement: Tensor
    novelty: Tensor
    coordinates: Tensor
    norm: Tensor

    def __getitem__(self, rows: Tensor) -> Evidence:
        return each_field(lambda x: x[rows], self)


@storable
@dataclass(frozen=True, eq=False)
class LayerSpace:
    """Whitened space of one layer.

    Args:
        centre: ``(q,)`` mean of the unit-length reference features, in the space.
        directions: ``(d, q)`` principal directions, each divided by its standard deviation.
    """

    centre: Tensor
    directions: Tensor

    def project(self, x: Tensor) -> Pair:
        """Features ``(n, d)`` along the directions, ``(n, q)``, and their lengths ``(n, 1)``."""
        x = at_least_single(x)
        length = vector_norm(x, dim=1, keepdim=True, dtype=torch.float64)
        return x @ self.directions.to(x), length

    def whitened(self, x: Tensor) -> Tensor:
        """Coordinates ``(n, q)`` of features ``(n, d)``."""
        return _centred(*self.project(x), self.centre)


@storable
@dataclass(frozen=True, eq=False)
class Reference:
    """Reference points of every layer and class.

    Args:
        spaces: name of the layer -> its space.
        points: ``(L, m, q)`` in half precision, narrow layers filled up with zeros.
        classes: ``(m,)`` class of each point, ascending.
        n_classes: the network knows.
    """

    spaces: dict[str, LayerSpace]
    points: Tensor
    classes: Tensor
    n_classes: int

    @cached_property
    def columns(self) -> Pair:
        """Points as columns ``(L, q, C P)`` and their squared lengths ``(L, 1, C P)``, every class filled up
        to ``P`` points by ones at an infinite distance.
        """
        classes, points, C = self.classes, self.points.float(), self.n_classes
        count = torch.bincount(classes, minlength=C)
        P = max(int(count.max()), 1)
        start = count.cumsum(0) - count
        rank = torch.arange(len(classes), device=classes.device) - start[classes]
        place = classes * P + rank
        L, _, q = points.shape
        grid = points.new_zeros(L, C * P, q)
        grid.index_copy_(1, place, points)
        squares = points.new_full((L, C * P), torch.inf)
        squares.index_copy_(1, place, points.square().sum(dim=2))
        return grid.mT.contiguous(), squares[:, None, :]

    @cached_property
    def lacks_classes(self) -> bool:
        """Is there a class without points? Its distance is infinite."""
        return len(self.classes.unique()) < self.n_classes

    @cached_property
    def even_spaces(self) -> dict[str, LayerSpace]:
        """The spaces, narrow ones filled up with zeros as the points are."""
        q = self.points.shape[2]
        return {
            name: LayerSpace(_filled(space.centre, q), _filled(space.directions, q))
            for name, space in self.spaces.items()
        }

    @cached_property
    def centres(self) -> Tensor:
        """Centres of all spaces, ``(L, q)``."""
        return torch.stack([space.centre for space in self.even_spaces.values()])

    @cached_property
    def leading(self) -> Tensor:
        """Places of the first coordinates of every layer among all coordinates ``L q``."""
        q = self.points.shape[2]
        places = []
        for i, space in enumerate(self.spaces.values()):
            width = min(len(space.centre), COORDINATES)
            places.append(i * q + torch.arange(width))
        return torch.cat(places).to(self.points.device)


@storable
@dataclass(frozen=True)
class ReferenceSettings:
    """Settings of the reference points.

    Args:
        width: largest number of principal directions per layer.
        size: points per class and layer; by default 200, fewer where there are more than 50 classes.
        seed: of the clustering.
    """

    width: int = WIDTH
    size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("width", "size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")

    def points(self, n_classes: int) -> int:
        """Points that stand for each class.

        Example:
            >>> settings = ReferenceSettings()
            >>> settings.points(10), settings.points(1000), ReferenceSettings(size=7).points(1000)
            (200, 10, 7)
        """
        if self.size is not None:
            return self.size
        return max(1, min(POINTS, MOST_POINTS // max(n_classes, 1)))


def make_reference(
    features: Features, labels: Tensor, settings: ReferenceSettings | None = None
) -> Reference:
    """Whitened spaces and class points of all layers.

    Args:
        features: of the reference samples, usually the network's training set.
        labels: ``(m,)`` their true classes; samples of unknown class (-1) are left out.
        settings: of the points; by default those of `ReferenceSettings`.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1])).points.shape
        torch.Size([1, 4, 2])
    """
    settings = settings or ReferenceSettings()
    spaces = {}
    for name, x in features.layers.items():
        unit = unit_length(x.double())
        spaces[name] = whitened_space(*principal_directions(unit), settings.width)
    return reference_points(spaces, features, labels, settings)


def reference_points(
    spaces: Mapping[str, LayerSpace], features: Features, labels: Tensor, settings: ReferenceSettings
) -> Reference:
    """The points of every class in spaces that are known already; see `make_reference`."""
    most = settings.points(features.n_classes)
    labels = labels.to(features.logits.device)
    order = labels.argsort(stable=True)
    order = order[labels[order] >= 0]
    sizes = torch.bincount(labels[order], minlength=features.n_classes)
    layers = []
    for name, space in spaces.items():
        x = space.whitened(features.layers[name][order])
        by_class = x.split(sizes.tolist())
        layers.append(torch.cat([_representatives(part, most, settings.seed) for part in by_class]))
    kept = sizes.clamp_max(most)
    classes = torch.arange(len(kept), device=kept.device).repeat_interleave(kept)
    q = max(x.shape[1] for x in layers)
    points = torch.stack([_filled(x, q) for x in layers])
    return Reference(dict(spaces), points.half(), classes, features.n_classes)


def layer_evidence(reference: Reference, features: Features) -> Evidence:
    """Agreement and novelty of every layer.

    Args:
        reference: what to compare with.
        features: ``n`` samples with the reference's layers.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]))
        >>> like_0 = torch.tensor([[9.0, 1.0], [9.0, 1.0]])
        >>> found = layer_evidence(reference, Features(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), {"a": like_0}))
        >>> (found.agreement > 0).flatten()  # both look like class 0; the second is predicted as class 1
        tensor([ True, False])
    """
    _, squares = reference.columns
    most = max(1, ENTRIES // max(squares.numel(), 1))
    if len(features) <= most:
        return evidence_at_once(reference, features)
    return each_field(joined, *(evidence_at_once(reference, part) for part in chunks(features, most)))


def evidence_at_once(reference: Reference, features: Features) -> Evidence:
    """The same, with the distances of all samples in memory."""
    x, norm = coordinates(reference, features)
    squared = squared_distances(reference, x)
    label = features.label.view(1, -1, 1).expand(squared.shape[0], -1, 1)
    own = squared.gather(2, label)
    other = squared.scatter(2, label, torch.inf).amin(dim=2, keepdim=True)
    logs = torch.cat([own, other], dim=2).double().log()
    logs = logs.mul(0.5).permute(2, 1, 0)  # (2, n, L)
    own, other = logs[0], logs[1]
    agreement, novelty = other - own, torch.minimum(own, other)
    if reference.lacks_classes:
        agreement = agreement.nan_to_num(torch.inf, torch.inf, torch.inf)
        novelty = novelty.nan_to_num(torch.nan, posinf=0.0)
    leading = x.flatten(1).index_select(1, reference.leading)
    return Evidence(agreement, novelty, leading.double(), norm)


def squared_distances(reference: Reference, x: Tensor) -> Tensor:
    """Squared distance ``(L, n, C)`` from coordinates ``x (n, L, q)`` to the nearest point of every class;
    infinite where a class has none.
    """
    x = x.transpose(0, 1)
    columns, squares = reference.columns
    scores = torch.baddbmm(squares, x, columns, alpha=-2)
    by_class = scores.unflatten(2, (reference.n_classes, -1))
    squared = by_class.amin(dim=3) + x.square().sum(dim=2, keepdim=True)
    return squared.clamp_min(NEAREST**2)


def unit_length(x: Tensor) -> Tensor:
    """Rows ``(n, d)`` divided by their length; no number is too large.

    Example:
        >>> unit_length(torch.tensor([[3e300, 4e300]], dtype=torch.float64))
        tensor([[0.6000, 0.8000]], dtype=torch.float64)
    """
    largest = vector_norm(x, torch.inf, dim=1, keepdim=True)
    x = x / largest.clamp_min(torch.finfo(x.dtype).tiny)
    return x / vector_norm(x, dim=1, keepdim=True).clamp_min(1e-12)


def _centred(projected: Tensor, length: Tensor, centre: Tensor) -> Tensor:
    """Coordinates of features from their projection and length; of features too long for their precision,
    which get chance (`salgp.calibrators.evidence.mixture`), the origin.
    """
    limits = torch.finfo(projected.dtype)
    x = projected / length.to(projected).clamp_min(limits.tiny)
    x = torch.where(length < 1e-8 * limits.max, x, 0.0)
    return x.to(centre) - centre


def whitened_space(centre: Tensor, variance: Tensor, directions: Tensor, width: int) -> LayerSpace:
    """The space with this mean ``(d,)`` and variances along principal directions ``(d, r)``, largest first.

    Directions whose variance is below a millionth of the largest are left out; a thousandth of it is added to
    the others, so that noise is not blown up.
    """
    variance = variance[:width]
    largest = variance[0].clamp_min(NO_VARIANCE)
    large = variance > 1e-6 * largest
    kept = max(int(large.sum()), 1)
    scale = (variance[:kept] + 1e-3 * largest).rsqrt()
    white = (directions[:, :kept] * scale).float()
    return LayerSpace(centre.to(white) @ white, white.contiguous())


def coordinates(reference: Reference, features: Features) -> Pair:
    """Coordinates ``(n, L, q)`` of all layers, and the length ``(n,)`` of the last layer's features."""
    spaces, layers = reference.even_spaces, features.layers
    found = [spaces[name].project(layers[name]) for name in spaces]
    projections, lengths = zip(*found, strict=True)
    projected = torch.cat(projections, dim=1).unflatten(1, reference.centres.shape)
    length = torch.cat(lengths, dim=1)
    x = _centred(projected, length[:, :, None], reference.centres)
    return x, length[:, -1]


def _filled(x: Tensor, q: int) -> Tensor:
    """Filled up with zeros to width ``q``."""
    return pad(x, (0, q - x.shape[-1]))


def principal_directions(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean ``(d,)`` of samples ``(n, d)``, variances along their principal directions, and these."""
    centre = x.mean(dim=0)
    centred, n = x - centre, max(len(x) - 1, 1)
    if x.shape[1] > len(x):
        _, S, Vh = torch.linalg.svd(centred, full_matrices=False)
        return centre, S.square() / n, Vh.T
    return centre, *descending_directions(centred.T @ centred / n)


def descending_directions(covariance: Tensor) -> Pair:
    """Variances ``(d,)`` and principal directions ``(d, d)``, largest first."""
    values, vectors = torch.linalg.eigh(covariance)
    return values.flip(0).clamp_min(0), vectors.flip(1)


def _representatives(x: Tensor, size: int, seed: int) -> Tensor:
    """At most ``size`` points for the samples ``(n, q)`` of one class."""
    if len(x) <= size:
        return x
    from sklearn.cluster import KMeans

    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(x), generator=generator)[: SAMPLES_PER_POINT * size]
    found = KMeans(size, init="random", n_init=1, max_iter=25, random_state=seed)
    found.fit(x[chosen].cpu().numpy())
    return torch.from_numpy(found.cluster_centers_).to(x)
