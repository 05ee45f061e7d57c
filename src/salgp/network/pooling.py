"""From a layer's output of any shape to one feature vector per sample.

Every output with more than two axes is read as ``P`` positions (pixels, tokens, time steps) of ``D``
channels, ``(N, P, D)``. The paper reduces the channels at each position (``channel-*``, one number per
pixel); the others reduce the positions (one number per channel). An output ``(N, D)`` has no channel axis of
its own and is used as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d

__all__ = ["POOLINGS", "Layout", "Pooling", "pool"]

Pooling = str | Callable[..., Tensor]
"""A name out of `POOLINGS`, or a function from the batch-first output to ``(N, d)``. A function with a
parameter ``mask`` also gets the mask ``(N, P)``, true where a position is real; None where there is none.
"""


@dataclass(frozen=True)
class Layout:
    """How the axes of a layer's output are to be read.

    Args:
        channels: ``"first"`` (convolutions, ``(N, C, ...)``) or ``"last"`` (tokens and sequences, ``(N, T,
            D)``).
        width: number of channels where known; settles which axis holds them when the output was permuted.
        recurrent: does it come from a recurrent layer?
        batch_axis: 0, or 1 where the layer works time first, ``(T, N, D)``.

    Example:
        >>> Layout("first", 16).channel_axis(torch.zeros(2, 16, 8, 8))
        1
        >>> Layout("last", 16).channel_axis(torch.zeros(2, 8, 8, 16))
        3
    """

    channels: str = "last"
    width: int | None = None
    recurrent: bool = False
    batch_axis: int = 0

    def channel_axis(self, x: Tensor) -> int:
        """Axis of the batch-first output ``x`` that holds its channels."""
        last = x.ndim - 1
        default = last if x.ndim == 3 and self.channels == "last" else 1
        elsewhere = 1 if default == last else last
        permuted = self.width == x.shape[elsewhere] != x.shape[default]
        return elsewhere if permuted and (x.ndim > 3 or self.channels == "first") else default


def pool(
    x: Tensor, how: Pooling = "auto", layout: Layout | None = None, mask: Tensor | None = None
) -> Tensor:
    """Reduce a batch-first layer output to ``(N, d)``.

    ``auto`` takes the maximum over time for recurrent layers and the mean over positions for all others.
    Half precision is accumulated in, and returned as, single precision.

    Args:
        x: ``(N, ...)`` output of a layer.
        how: one of `POOLINGS`, or a function that gives ``(N, d)``.
        layout: how to read the axes; by default ``(N, T, D)`` for three axes, ``(N, C, ...)`` for more.
        mask: ``(N, P)`` true where a position is real and not padding. It concerns sequences, ``(N, P, D)``;
            one of another shape is refused.

    Example:
        >>> image = torch.arange(16.0).reshape(1, 2, 2, 4)  # (N, C, H, W)
        >>> pool(image, "channel-max")
        tensor([[ 8.,  9., 10., 11., 12., 13., 14., 15.]])
        >>> pool(image, "spatial-avg")
        tensor([[ 3.5000, 11.5000]])
        >>> pool(torch.ones(2, 5), "channel-max").shape
        torch.Size([2, 5])
    """
    if not isinstance(how, str):
        pooled = how(x, mask=mask) if _takes_mask(how) else how(x)
        return _widened(_checked(pooled, x.shape[0]))
    if how not in POOLINGS:
        raise ValueError(f"unknown pooling {how!r}; choose one of {', '.join(POOLINGS)}, or pass a function")
    layout = layout or Layout()
    if x.ndim <= 2:
        return _widened(x.reshape(x.shape[0], -1))
    if how == "none":
        raise ValueError(
            f"pooling 'none' needs an output of shape (n, d), got {tuple(x.shape)}; choose one "
            f"of {', '.join(POOLINGS)}"
        )
    if how == "flatten":
        return _widened(x.flatten(1))
    if how == "auto":
        how = "time-max" if layout.recurrent else "spatial-avg"
    if mask is None or x.ndim > 3 or how.startswith("channel-"):
        return _widened(_without_mask(x, how, layout))
    positions = x if layout.channel_axis(x) == 2 else x.transpose(1, 2)  # (N, P, D)
    return _widened(_REDUCE[how](positions, _fitting(mask, positions)))


def _without_mask(x: Tensor, how: str, layout: Layout) -> Tensor:
    """Pooled over all positions: a mask of tokens says nothing about pixels."""
    axis = layout.channel_axis(x)
    if how in _OVER_POSITIONS:
        return _OVER_POSITIONS[how](x, [i for i in range(1, x.ndim) if i != axis])
    return _REDUCE[how](x.movedim(axis, -1).flatten(1, -2), None)


def _fitting(mask: Tensor, positions: Tensor) -> Tensor:
    """The mask as truth values; refused where it is not one value per position."""
    if mask.shape != positions.shape[:2]:
        raise ValueError(
            f"the attention mask has shape {tuple(mask.shape)}, but the layer gives {positions.shape[1]} "
            f"positions for {positions.shape[0]} samples, so nothing tells padding from tokens; leave the "
            f"layer out, or pool it by a function: pooling={{layer: lambda x, mask: ...}}"
        )
    return mask.bool()


def _takes_mask(how: Callable[..., Tensor]) -> bool:
    try:
        return "mask" in inspect.signature(how).parameters
    except (TypeError, ValueError):  # functions written in C do not say what they take
        return False


def _channel_max(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.amax(dim=2)


def _channel_mean(x: Tensor, mask: Tensor | None) -> Tensor:
    return x.mean(dim=2, dtype=_accumulator(x))


def _mean(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.mean(dim=1, dtype=_accumulator(x))
    total = x.masked_fill(~mask[:, :, None], 0).sum(dim=1, dtype=_accumulator(x))
    return total / mask.sum(dim=1, keepdim=True).clamp_min(1)


def _max(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x.amax(dim=1)
    top = x.masked_fill(~mask[:, :, None], float("-inf")).amax(dim=1)
    return top.masked_fill(~mask.any(dim=1, keepdim=True), 0)


def _first(x: Tensor, mask: Tensor | None) -> Tensor:
    return x[:, 0] if mask is None else x[torch.arange(x.shape[0], device=x.device), mask.int().argmax(dim=1)]


def _last(x: Tensor, mask: Tensor | None) -> Tensor:
    if mask is None:
        return x[:, -1]
    last = x.shape[1] - 1 - mask.flip(1).int().argmax(dim=1)
    return x[torch.arange(x.shape[0], device=x.device), last]


_REDUCE: dict[str, Callable[[Tensor, Tensor | None], Tensor]] = {
    "channel-max": _channel_max,
    "channel-avg": _channel_mean,
    "spatial-avg": _mean,
    "spatial-max": _max,
    "tokens-avg": _mean,
    "first-token": _first,
    "time-max": _max,
    "time-last": _last,
}


def _mean_over(x: Tensor, axes: list[int]) -> Tensor:
    if torch.compiler.is_exporting() and axes == [2, 3]:  # runtimes pool images in the layout of convolutions
        return avg_pool2d(x.to(_accumulator(x)), (x.shape[2], x.shape[3])).flatten(1)
    return x.mean(dim=axes, dtype=_accumulator(x))


_OVER_POSITIONS: dict[str, Callable[[Tensor, list[int]], Tensor]] = {
    "spatial-avg": _mean_over,
    "spatial-max": torch.amax,
    "tokens-avg": _mean_over,
    "time-max": torch.amax,
}
"""Without a mask these need not bring the positions together first, which would copy the whole output."""

POOLINGS: tuple[str, ...] = ("auto", *_REDUCE, "flatten", "none")
"""Names of the poolings."""


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype


def _widened(x: Tensor) -> Tensor:
    return x.to(_accumulator(x))


def _checked(pooled: object, n: int) -> Tensor:
    if (
        not isinstance(pooled, Tensor)
        or not pooled.is_floating_point()
        or pooled.ndim != 2
        or pooled.shape[0] != n
    ):
        got = f"{pooled.dtype} {tuple(pooled.shape)}" if isinstance(pooled, Tensor) else type(pooled).__name__
        raise ValueError(
            f"the pooling function must return a floating-point tensor of shape ({n}, d), got {got}"
        )
    return pooled
