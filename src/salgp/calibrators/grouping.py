"""Which samples share a window: all of them, runs of consecutive ones, or those of one environment.

A window must be a random sample of its environment. One that was sorted by confidence looks like a shift that
is none, so rows in such an order are refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["window_numbers"]

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
