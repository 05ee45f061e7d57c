"""How few points stand for a training set: samples, herded samples, prototypes, or class statistics.

Every form is made class by class and layer by layer: evidence is asked of each layer by itself, so nothing is
gained by choosing the same samples for all of them. What a form keeps of a training sample differs:

| form | what is kept per class and layer | a training sample's features are |
|---|---|---|
| ``full`` | every sample | kept |
| ``sample`` | samples drawn at random | kept, of a few |
| ``herding`` | samples whose running mean follows the class mean (Welling, 2009) | kept, of a few |
| ``prototypes`` | centres of k-means clusters | averaged with their cluster's |
| ``statistics`` | mean and covariance | in two averages over the class only |
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "FORMS",
    "PER_CLUSTER",
    "PRECISIONS",
    "class_rows",
    "class_statistics",
    "few_points",
    "packed_points",
    "unpacked",
]

FORMS = ("full", "sample", "herding", "prototypes", "statistics")
PRECISIONS = ("single", "half", "8-bit")
PER_CLUSTER = 50
"""Most samples per prototype that k-means is given; more of them do not move the centres."""


def class_rows(classes: Tensor) -> list[tuple[int, Tensor]]:
    """Every class that is there, and its rows.

    Example:
        >>> class_rows(torch.tensor([1, 0, 1]))
        [(0, tensor([1])), (1, tensor([0, 2]))]
    """
    order = classes.argsort(stable=True)
    values, sizes = classes[order].unique_consecutive(return_counts=True)
    return list(zip(values.tolist(), order.split(sizes.tolist()), strict=True))


def few_points(x: Tensor, size: int, form: str, seed: int) -> Tensor:
    """At most ``size`` points that stand for the samples ``(n, q)`` of one class.

    Example:
        >>> x = torch.tensor([[0.0], [0.2], [5.0], [5.2]])
        >>> few_points(x, 2, "prototypes", seed=0).sort(dim=0).values.round(decimals=1).flatten()
        tensor([0.1000, 5.1000])
    """
    if len(x) <= size:
        return x
    if form == "prototypes":
        return _cluster_centres(x, size, seed)
    if form == "herding":
        return x[_herded(x, size)]
    return x[_drawn(len(x), size, seed).to(x.device)]


def class_statistics(x: Tensor, classes: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Classes ``(C,)``, their means ``(C, q)`` and factors ``F`` ``(C, q, q)`` with ``F F' = covariance^-1``.

    A class's covariance is drawn towards the one within all classes, the more the fewer samples it has; where
    ``C q^2`` is above ``most``, all classes share one factor ``(1, q, q)``.
    """
    rows = class_rows(classes)
    means = torch.stack([x[index].mean(dim=0) for _, index in rows])
    centred = [x[index] - mean for (_, index), mean in zip(rows, means, strict=True)]
    q = x.shape[1]
    within = sum((c.T @ c for c in centred), x.new_zeros(q, q)) / max(len(x) - len(rows), 1)
    within = within + 1e-2 * within.diagonal().mean().clamp_min(1e-12) * torch.eye(q).to(x)
    names = torch.tensor([c for c, _ in rows], device=x.device)
    if len(rows) * q * q > most:
        return names, means, _inverse_factor(within)[None]
    drawn = [(c.T @ c + q * within) / (len(c) + q) for c in centred]
    return names, means, torch.stack([_inverse_factor(S) for S in drawn])


def packed_points(points: Tensor, precision: str) -> tuple[Tensor, Tensor | None]:
    """Points as they are stored, and for 8 bits the step of each coordinate.

    Example:
        >>> packed_points(torch.tensor([[1.0, -2.0]]), "8-bit")
        (tensor([[ 127, -127]], dtype=torch.int8), tensor([0.0079, 0.0157]))
    """
    if precision == "8-bit":
        step = (points.abs().amax(dim=0) / 127).clamp_min(1e-12).float()
        return (points / step).round().to(torch.int8), step
    return points.to(torch.float16 if precision == "half" else torch.float32), None


def unpacked(points: Tensor, step: Tensor | None) -> Tensor:
    """Inverse of `packed_points`, in single precision."""
    return points.float() if step is None else points.float() * step


def _cluster_centres(x: Tensor, size: int, seed: int) -> Tensor:
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    most = PER_CLUSTER * size
    some = x if len(x) <= most else x[_drawn(len(x), most, seed).to(x.device)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer distinct samples than clusters
        found = KMeans(size, init="random", n_init=1, max_iter=25, random_state=seed).fit(
            np.ascontiguousarray(some.float().cpu().numpy())
        )
    return torch.from_numpy(found.cluster_centers_).to(x)


def _herded(x: Tensor, size: int) -> Tensor:
    """Rows chosen one by one, so that the mean of those chosen stays next to the mean of all."""
    mean = x.mean(dim=0)
    free = torch.ones(len(x), dtype=torch.bool, device=x.device)
    chosen, total = [], torch.zeros_like(mean)
    for t in range(size):
        wanted = (t + 1) * mean - total
        best = int((x - wanted).square().sum(dim=1).masked_fill(~free, torch.inf).argmin())
        chosen.append(best)
        free[best] = False
        total = total + x[best]
    return torch.tensor(chosen, device=x.device)


def _drawn(n: int, size: int, seed: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:size].sort().values


def _inverse_factor(S: Tensor) -> Tensor:
    """``F`` with ``F F' = S^-1``, from the eigenvalues."""
    values, vectors = torch.linalg.eigh(S)
    factor: Tensor = vectors * values.clamp_min(1e-12).rsqrt()
    return factor
