"""Which rows are samples as they came, and which are augmented samples."""

from __future__ import annotations

import torch
from torch import Tensor

from salgp.features import Features

__all__ = ["is_augmented", "originals", "without_augmented"]


def originals(features: Features) -> tuple[Tensor, Tensor]:
    """Rows of the original samples, and for every row the position of its original among them.

    The original of a group is its row of family 0; where families are unknown, its first row.

    Example:
        >>> originals(Features(torch.zeros(4, 2), groups=torch.tensor([7, 8, 7, 8])))
        (tensor([0, 1]), tensor([0, 1, 0, 1]))
        >>> originals(
        ...     Features(
        ...         torch.zeros(4, 2), groups=torch.tensor([7, 8, 7, 8]), families=torch.tensor([1, 0, 0, 1])
        ...     )
        ... )
        (tensor([1, 2]), tensor([1, 0, 1, 0]))
    """
    n, device = len(features), features.logits.device
    rows = torch.arange(n, device=device)
    if features.groups is None:
        return rows, rows
    _, group = features.groups.to(device).unique(return_inverse=True)
    late = rows if features.families is None else rows + n * (features.families.to(device) > 0)
    earliest = torch.full((int(group.max()) + 1,), 2 * n, device=device)
    first = earliest.scatter_reduce(0, group, late, "amin") % n
    rank = first.argsort().argsort()
    return first.sort().values, rank[group]


def is_augmented(features: Features) -> Tensor:
    """Mask of the augmented rows, ``(n,)``.

    Example:
        >>> is_augmented(Features(torch.zeros(3, 2), groups=torch.tensor([7, 8, 7])))
        tensor([False, False,  True])
    """
    first, _ = originals(features)
    return torch.ones(len(features), dtype=torch.bool, device=first.device).index_fill(0, first, False)


def without_augmented(features: Features) -> tuple[Features, Tensor]:
    """The original samples alone, and the rows they stood in.

    Example:
        >>> without_augmented(Features(torch.zeros(4, 2), groups=torch.tensor([7, 8, 7, 8])))
        (Features(2 samples, 2 classes, no layers), tensor([0, 1]))
    """
    rows = originals(features)[0]
    if features.groups is None:
        return features, rows
    plain = features[rows]
    return Features(plain.logits, plain.layers), rows
