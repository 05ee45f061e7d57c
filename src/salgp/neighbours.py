"""Exact nearest neighbours in chunks: the distances that layer-aware methods compare samples by.

Candidates are found by matrix products on centred data, which is fast; the distances of those kept are then
computed again from the differences, so that they are exact (a duplicate is at distance 0) whatever the size
of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.calibrators.temperature import row_chunks

__all__ = ["class_distances", "nearest"]


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
    parts = []
    for rows in row_chunks(len(query), len(reference), 2**24):
        index = _distances(query, reference, rows, leave_one_out).topk(k, dim=1, largest=False).indices
        parts.append((_exact(query[rows], reference, index), index))
    if not parts:
        return query.new_zeros(0, k), torch.zeros(0, k, dtype=torch.long, device=query.device)
    distance, index = torch.cat([d for d, _ in parts]), torch.cat([i for _, i in parts])
    order = distance.argsort(dim=1, stable=True)
    return distance.gather(1, order), index.gather(1, order)


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
    if len(reference) == 0:
        return query.new_full((len(query),), torch.inf), query.new_full((len(query),), torch.inf)
    same, other = [query.new_zeros(0)], [query.new_zeros(0)]
    for rows in row_chunks(len(query), len(reference), 2**24):
        D = _distances(query, reference, rows, leave_one_out)
        own = label[rows, None] == classes[None, :]
        same.append(_smallest(query[rows], reference, D.masked_fill(~own, torch.inf)))
        other.append(_smallest(query[rows], reference, D.masked_fill(own, torch.inf)))
    return torch.cat(same), torch.cat(other)


def _distances(query: Tensor, reference: Tensor, rows: slice, leave_one_out: bool) -> Tensor:
    """Approximate squared distances of some query rows to all reference rows, up to a constant per row."""
    centre = reference.mean(dim=0)
    q, r = query[rows] - centre, reference - centre
    D = torch.addmm((r * r).sum(dim=1), q, r.T, alpha=-2)  # (b, m), |q|^2 left out
    if leave_one_out:
        here = torch.arange(len(q), device=q.device)
        D[here, here + rows.start] = torch.inf
    return D


def _exact(query: Tensor, reference: Tensor, index: Tensor) -> Tensor:
    return torch.stack([(reference[i] - query).norm(dim=1) for i in index.T], dim=1)


def _smallest(query: Tensor, reference: Tensor, D: Tensor) -> Tensor:
    least, index = D.min(dim=1)
    return _exact(query, reference, index[:, None])[:, 0].masked_fill(least == torch.inf, torch.inf)
