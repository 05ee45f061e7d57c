"""The shift weight of a window: computed from unlabelled samples met together, also called a context.

The formulas are in `salgp.calibrators.evidence.mixture`.

Which samples share a window: all of them, runs of consecutive ones, or those of one environment. A window
must be a random sample of its environment. One that was sorted by confidence looks like a shift that is none,
so rows in such an order are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from salgp.io import storable

__all__ = ["Context", "compressed", "over_prediction", "window_numbers", "window_sums"]

Windows = tuple[Tensor, Tensor]
"""Sums ``(w, 2 + C)`` over the samples of each window, and the window ``(n,)`` of each sample."""
CLASS_NOISE = 4.0
"""Over-prediction of a class counts from 2 standard errors on: ``r^3 / (r^2 + 4 / e)``."""


@storable
@dataclass(frozen=True, eq=False)
class WindowModel:
    """The shift weight as a function of a window of samples.

    Args:
        centre: ``(2,)`` mean of both statistics over the calibration samples.
        scale: ``(2,)`` their standard deviation.
        weights: ``(2,)``, ``w``.
        noise: window means count from the root of it, in standard errors, on.
        shares: ``(C,)`` of the predicted classes among the calibration samples, ``pi``.
        over_prediction: weight ``v``.
    """

    centre: Tensor
    scale: Tensor
    weights: Tensor
    noise: float
    shares: Tensor
    over_prediction: float

    def parts(self, statistics: Tensor, label: Tensor) -> Tensor:
        """Part of each sample in the sums of its window, ``(n, 2 + C)``: statistics and a class count."""
        u = (statistics - self.centre) / self.scale
        classes = torch.arange(len(self.shares), device=label.device)
        counts = (classes == label[:, None]).to(u)
        return torch.cat([u, counts], dim=1)

    def shift_of_one(self, statistics: Tensor) -> Tensor:
        """Shift weight ``(n,)`` of samples that are a window each; none is predicted too often."""
        u = (statistics - self.centre) / self.scale
        return self.weigh(compressed(u, self.noise))

    def weigh(self, m: Tensor) -> Tensor:
        """Shift weight ``k (n,)`` of compressed statistics ``m (n, 2)``."""
        return (m @ self.weights).clamp(0.0, 1.0)

    def describe(self, sums: Tensor, window: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed statistics ``m (n, 2)`` of each sample's window, and ``r_class (n,)``."""
        n = sums[:, 2:].sum(dim=1)
        mean = sums[:, :2] / n[:, None]
        m = compressed(mean, self.noise / n[:, None])
        count = sums[window, 2 + label]
        return m[window], over_prediction(count, n[window], self.shares[label])


@storable
@dataclass(frozen=True, eq=False)
class Context:
    """Unlabelled samples met together, as sums, so that more can be added.

    Args:
        total: ``(2 + C,)`` sums over the samples: of two statistics, and how often each class was predicted.

    Example:
        >>> a = Context(torch.tensor([1.0, 2.0, 3.0, 1.0]))  # four samples, three of them of the first class
        >>> (a + a).count, a.mean
        (8, tensor([0.2500, 0.5000]))
    """

    total: Tensor

    def __add__(self, other: Context) -> Context:
        return Context(self.total + other.total)

    @property
    def count(self) -> int:
        """Number of samples."""
        return round(float(self.total[2:].sum()))

    @property
    def mean(self) -> Tensor:
        """``(2,)`` of the two statistics."""
        return self.total[:2] / max(self.count, 1)


def window_sums(parts: Tensor, number: Tensor) -> Windows:
    """Sums ``(w, 2 + C)`` over the samples of each window, and the window ``(n,)`` of each sample.

    Args:
        parts: ``(n, 2 + C)`` of the samples.
        number: ``(n,)`` any number of its window.

    Example:
        >>> window_sums(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([7, 9, 7]))
        (tensor([[5.],
                [2.]]), tensor([0, 1, 0]))
    """
    found, window = number.unique(return_inverse=True)
    sums = torch.zeros_like(parts[: len(found)])
    return sums.index_add_(0, window, parts), window


def compressed(u: Tensor, noise: Tensor | float) -> Tensor:
    """Window means ``u (w, q)``, shrunk where their square is not above ``noise (w, 1)``, on a log scale.

    Example:
        >>> compressed(torch.tensor([[4.0], [4.0]]), torch.tensor([[16.0], [16.0 / 50]]))
        tensor([[1.0986],
                [1.5936]])
    """
    squared = u.square()
    shrunk = squared * u / (squared + noise)
    return shrunk.sign() * torch.log1p(shrunk.abs())


def over_prediction(count: Tensor, n: Tensor, share: Tensor) -> Tensor:
    """Over-prediction of a class: predicted ``count`` times out of ``n``, with this ``share`` among the
    calibration samples.

    Example:
        >>> over_prediction(torch.tensor([1.0, 40.0]), torch.tensor([1.0, 50.0]), torch.tensor([0.1, 0.1]))
        tensor([0.0000, 1.6150])
    """
    expected = 1 + (n - 1) * share
    r = torch.log(count.clamp_min(1.0) / expected).clamp_min(0.0)
    return r.pow(3) / (r.square() + CLASS_NOISE / expected)


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
    if isinstance(context, str):
        if context != "all":
            raise ValueError(
                f"context must be 'all', a window size, environments or a Context; got {context!r}"
            )
        return torch.zeros_like(t).long()
    if isinstance(context, bool | float | np.bool_ | np.floating):
        raise TypeError(f"a window size must be a whole number of samples, got {context!r}")
    if isinstance(context, int | np.integer):
        if context < 1:
            raise ValueError(f"a window must hold at least 1 sample, got {context}")
        _refuse_sorted(t)
        return torch.arange(len(t), device=t.device) // int(context)
    return _environments(context, len(t)).to(t.device)


def _environments(context: Any, n: int) -> Tensor:
    """Number of the environment of each of ``n`` samples, from numbers or names."""
    given = _plain(np.asarray(context.cpu() if isinstance(context, Tensor) else context))
    if given.shape != (n,) or given.dtype.kind not in "biuUS":
        raise ValueError(
            f"environments must be one whole number or name per sample, ({n},); got {given.dtype} of shape "
            f"{given.shape}"
        )
    if given.dtype.kind in "US":
        _, given = np.unique(given, return_inverse=True)
    return torch.as_tensor(given.astype(np.int64))


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
    correlation = (x[1:] * x[:-1]).sum() / x.square().sum()
    if correlation > SORTED:
        raise ValueError(
            "the samples are sorted by confidence, so consecutive ones are no random sample of their "
            "environment; shuffle them, or pass the environment of each sample"
        )
