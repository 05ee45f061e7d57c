"""Rows of features: which are original samples, which are augmented ones, and which share a window.

Which samples share a window: all of them, runs of consecutive ones, or those of one environment.

A window must be a random sample of its environment. One that was sorted by confidence looks like a shift that
is none, so rows in such an order are refused.

Which samples to label next: uncertain, and unlike each other.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.features import Features

__all__ = ["is_augmented", "originals", "spread_choice", "window_numbers", "without_augmented"]


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


SORTED = 0.9
"""Rows whose confidence is correlated this much with the confidence of the row before are sorted."""


def window_numbers(context: Any, t: Tensor) -> Tensor:
    """Number of the window of each of ``n`` samples.

    Args:
        context: ``"all"``, the size of a window of consecutive samples, or ``(n,)`` integers or names.
        t: ``(n,)`` log-odds of the network's confidence, to see whether the rows are sorted by it.

    Example:
        >>> window_numbers(2, torch.tensor([0.1, 0.7, 0.2]))
        tensor([0, 0, 1])
        >>> window_numbers(["north", "south", "north"], torch.tensor([0.1, 0.7, 0.2]))
        tensor([0, 1, 0])
    """
    n = len(t)
    if isinstance(context, str):
        if context != "all":
            raise ValueError(
                f"context must be 'all', a window size, environments or a Context; got {context!r}"
            )
        return torch.zeros(n, dtype=torch.long, device=t.device)
    if isinstance(context, bool | float | np.bool_ | np.floating):
        raise TypeError(f"a window size must be a whole number of samples, got {context!r}")
    if isinstance(context, int | np.integer):
        if context < 1:
            raise ValueError(f"a window must hold at least 1 sample, got {context}")
        _refuse_sorted(t)
        return torch.arange(n, device=t.device) // int(context)
    given = _plain(np.asarray(context.cpu() if isinstance(context, Tensor) else context))
    if given.shape != (n,) or given.dtype.kind not in "biuUS":
        raise ValueError(
            f"environments must be one whole number or name per sample, ({n},); got {given.dtype} of shape "
            f"{given.shape}"
        )
    number = np.unique(given, return_inverse=True)[1] if given.dtype.kind in "US" else given
    return torch.as_tensor(number.astype(np.int64)).to(t.device)


def _plain(given: np.ndarray) -> np.ndarray:
    """Names or whole numbers that came as objects, as a column of a table does, as what they are."""
    if given.dtype.kind not in "OT":
        return given
    values = given.ravel().tolist()
    for kind in (str, int | np.integer):
        if values and all(isinstance(x, kind) for x in values):
            return np.array(values).reshape(given.shape)
    return given


def _refuse_sorted(t: Tensor) -> None:
    if len(t) < 50 or float(t.std()) < 1e-9:
        return
    x = t - t.mean()
    if float((x[1:] * x[:-1]).sum() / x.square().sum()) > SORTED:
        raise ValueError(
            "the samples are sorted by confidence, so consecutive ones are no random sample of their "
            "environment; shuffle them, or pass the environment of each sample"
        )


def spread_choice(features: Features, std: Tensor, k: int) -> Tensor:
    """Indices of ``k`` samples to label next: uncertain, and unlike each other.

    Greedy on the prior that neighbouring samples (in the last tapped layer, or the logits) share their error:
    each pick has the largest standard deviation that the earlier picks leave unexplained.

    Example:
        >>> features = Features(torch.tensor([[0.0, 0.0], [0.1, 0.1], [5.0, 5.0]]))
        >>> spread_choice(features, torch.tensor([0.3, 0.31, 0.2]), 2)
        tensor([1, 2])
    """
    x = (list(features.layers.values()) or [features.logits])[-1].double()
    x = (x - x.mean(0)) / (x.std(0, correction=0) + 1e-12)
    left, scale = std.double().square().clone(), x.shape[1]
    factors: list[Tensor] = []
    picked: list[int] = []
    for _ in range(min(k, len(features))):
        best = int(left.argmax())
        similar = torch.exp(-(x - x[best]).square().sum(1) / scale) * std * std[best]
        explained = sum((f * f[best] for f in factors), torch.zeros_like(similar))
        factor = (similar - explained) / left[best].clamp_min(1e-300).sqrt()
        factors.append(factor)
        left = (left - factor.square()).clamp_min(0.0)
        left[picked := [*picked, best]] = -1.0
    return torch.tensor(picked, dtype=torch.long)
