"""Nearest neighbours by exact search, in blocks.

Candidates come from one matrix product in single precision on centred and scaled data. A few more than asked
for are kept, and their distances are computed again from the differences, in the precision of the data: a
duplicate is at distance 0 whatever the size of the features.

Which samples to label next (`spread_choice`) rests on the same idea: neighbours tell much the same.
"""

import torch
from torch import Tensor
from torch.linalg import vector_norm

from salgp.features import Features

__all__ = ["class_distances", "nearest", "spread_choice"]

ENTRIES = 4_000_000
"""Distances held at once."""
SPARE = 3
"""Candidates kept beyond those asked for."""


def nearest(
    query: Tensor, reference: Tensor, k: int, *, leave_one_out: bool = False
) -> tuple[Tensor, Tensor]:
    """The ``k`` nearest reference rows of each query row, nearest first.

    Args:
        query: ``(n, d)``.
        reference: ``(m, d)``.
        k: number of neighbours; fewer come back where the reference has fewer rows.
        leave_one_out: the query *is* the reference; a row is not its own neighbour.

    Returns:
        Distances ``(n, k)`` and row numbers ``(n, k)``.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> nearest(x, x, 1, leave_one_out=True)
        (tensor([[1.],
                [1.],
                [2.]]), tensor([[1],
                [0],
                [1]]))
    """
    k = min(k, len(reference) - int(leave_one_out))
    if k < 1:
        raise ValueError(
            f"no neighbours to compare with: the reference has {len(reference)} row(s); give a "
            f"larger reference or calibration set"
        )
    centre = reference.mean(dim=0)
    centred = reference - centre
    scale = centred.abs().amax().clamp_min(torch.finfo(reference.dtype).tiny)
    points = (centred / scale).float()
    squares = points.square().sum(dim=1)
    distances, rows = [], []
    size = max(1, ENTRIES // len(reference))
    for i, some in enumerate(query.split(size)):
        scaled = ((some - centre) / scale).float()
        D = torch.addmm(squares, scaled, points.T, alpha=-2)
        if leave_one_out:
            D.diagonal(i * size).fill_(torch.inf)
        near, column = D.topk(min(k + SPARE, len(reference)), dim=1, largest=False)
        exact = vector_norm(reference[column] - some[:, None], dim=2)
        exact = exact.masked_fill(near == torch.inf, torch.inf)
        distance, order = exact.sort(dim=1, stable=True)
        distances.append(distance[:, :k])
        rows.append(column.gather(1, order)[:, :k])
    return torch.cat(distances), torch.cat(rows)


def class_distances(
    query: Tensor, label: Tensor, reference: Tensor, classes: Tensor, *, leave_one_out: bool = False
) -> tuple[Tensor, Tensor]:
    """Distance of each query row to the nearest reference row of its own class, and of any other.

    Args:
        query: ``(n, d)``.
        label: ``(n,)`` class of each query row.
        reference: ``(m, d)``.
        classes: ``(m,)`` class of each reference row.
        leave_one_out: the query *is* the reference; a row is not its own neighbour.

    Returns:
        Two ``(n,)`` tensors, infinite where there is no such row.

    Example:
        >>> x = torch.tensor([[0.0], [1.0], [3.0]])
        >>> class_distances(torch.tensor([[0.5]]), torch.tensor([1]), x, torch.tensor([0, 0, 1]))
        (tensor([2.5000]), tensor([0.5000]))
    """
    own = query.new_full((len(query),), torch.inf)
    other = own.clone()
    row = torch.arange(len(query), device=query.device)[:, None]
    for c in classes.unique():
        members = (classes == c).nonzero()[:, 0]
        distance, column = nearest(query, reference[members], 1 + int(leave_one_out))
        if leave_one_out:
            itself = members[column] == row
            distance = distance.masked_fill(itself, torch.inf)
        least, same = distance.amin(dim=1), label == c
        own = torch.where(same, least, own)
        other = torch.where(same, other, torch.minimum(other, least))
    return own, other


def spread_choice(features: Features, std: Tensor, k: int) -> Tensor:
    """Indices of ``k`` samples to label next: uncertain, and unlike each other.

    Greedy on the prior that neighbouring samples share their error: each pick has the largest standard
    deviation that the earlier picks leave unexplained.

    Args:
        features: of ``n`` samples; neighbours are those in the last layer, or by the logits.
        std: ``(n,)`` standard deviation of the confidence of each.
        k: how many.

    Example:
        >>> features = Features(torch.tensor([[0.0, 0.0], [0.1, 0.1], [5.0, 5.0]]))
        >>> spread_choice(features, torch.tensor([0.3, 0.31, 0.2]), 2)
        tensor([1, 2])
    """
    *_, x = features.logits, *features.layers.values()
    x = x.double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-12)
    left = std.double().square()
    factors: list[Tensor] = []
    picked: list[int] = []
    for _ in range(min(k, len(x))):
        best = int(left.argmax())
        distance = (x - x[best]).square().sum(1) / x.shape[1]
        similar = torch.exp(-distance) * std * std[best]
        explained = sum((f * f[best] for f in factors), torch.zeros_like(similar))
        factor = (similar - explained) / left[best].clamp_min(1e-300).sqrt()
        factors.append(factor)
        picked.append(best)
        left = (left - factor.square()).clamp_min(0.0)
        left[picked] = -1.0
    return torch.tensor(picked, dtype=torch.long)
