"""Two questions to every layer: does it agree with the predicted class, and has it seen such input before?

Both are answered by distances to reference samples, usually the network's training set, in a space of its own for each
layer: features are scaled to unit length (the direction carries the meaning, the length mostly brightness and
contrast), then centred and whitened along at most ``width`` principal directions. With ``d_own``, ``d_other`` and
``d_any`` the mean distances to the ``k`` nearest reference samples of the predicted class, of other classes, and of any,

    agreement = log d_other - log d_own,        novelty = log d_any.

A reference row can be left out per query, so that the calibration set may serve as its own reference.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def to(self, device: torch.device) -> Reference:
        """The same reference on another device."""
        moved = {n: LayerSpace(s.centre.to(device), s.directions.to(device), s.points.to(device)) for n, s in self.layers.items()}
        return Reference(moved, self.classes.to(device), self.k)


def make_reference(
    features: Features, labels: Tensor, *, k: int = NEAREST, width: int = WIDTH, prototypes: int | None = None, seed: int = 0
) -> Reference:
    """Build the spaces of all layers from reference samples.

    Args:
        features: of the reference samples, usually the network's training set.
        labels: ``(m,)`` their true classes.
        k: neighbours averaged over.
        width: largest number of principal directions per layer.
        prototypes: keep only so many cluster centres per class (k-means in the first layer's place would favour one
            layer, so clusters are formed on all layers side by side); None keeps every sample.
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
        own: ``(n,)`` reference row to leave out for each sample (-1: none), where the sample is part of the reference.

    Returns:
        Two ``(n, L)`` tensors in double precision.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]), k=1)
        >>> seen = layer_evidence(reference, Features(torch.tensor([[2.0, 0.0], [0.0, 2.0]]), {"a": torch.tensor([[9.0, 1.0], [9.0, 1.0]])}))
        >>> (seen.agreement > 0).flatten()  # both look like class 0; the second is predicted as class 1
        tensor([ True, False])
    """
    reference = reference.to(features.logits.device)
    label = features.label
    parts = [_one_layer(space, reference, features.layers[name], label, own) for name, space in reference.layers.items()]
    return Evidence(torch.stack([a for a, _ in parts], dim=1), torch.stack([n for _, n in parts], dim=1))


def _one_layer(space: LayerSpace, reference: Reference, x: Tensor, label: Tensor, own: Tensor | None) -> tuple[Tensor, Tensor]:
    size = max(1, CHUNK_ENTRIES // max(len(reference), 1))
    agreement, novelty = [x.new_zeros(0).double()], [x.new_zeros(0).double()]
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        D = torch.cdist(space.project(x[rows]), space.points)  # (b, m)
        if own is not None:
            here = (own[rows] >= 0).nonzero()[:, 0]
            D[here, own[rows][here]] = torch.inf
        same = label[rows, None] == reference.classes[None, :]
        any_, mine, other = (_mean_nearest(d, reference.k) for d in (D, D.masked_fill(~same, torch.inf), D.masked_fill(same, torch.inf)))
        agreement.append((other.log() - mine.log()).nan_to_num(0.0).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO))
        novelty.append(any_.log())
    return torch.cat(agreement), torch.cat(novelty)


def _mean_nearest(D: Tensor, k: int) -> Tensor:
    """Mean of the ``k`` smallest finite distances of each row; infinite where there are none."""
    near = D.topk(min(k, D.shape[1]), dim=1, largest=False).values
    finite = near.isfinite()
    mean = near.masked_fill(~finite, 0.0).sum(dim=1) / finite.sum(dim=1)
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


def _prototypes(spaces: dict[str, LayerSpace], classes: Tensor, per_class: int, generator: torch.Generator) -> tuple[dict[str, LayerSpace], Tensor]:
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
    reduced = {n: LayerSpace(s.centre, s.directions, _sums(s.points, assigned, len(kept)) / counts) for n, s in spaces.items()}
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
