"""Base kernels on fixed squared distances, with closed-form gradients in their lengthscale and variance.

With ``r`` = distance / lengthscale, ``v`` = variance and ``t^2 = c r^2``:

| name | formula | c |
|---|---|---|
| rbf | ``v exp(-t^2)`` | 1/2 |
| matern12 | ``v exp(-t)`` | 1 |
| matern32 | ``v (1 + t) exp(-t)`` | 3 |
| matern52 | ``v (1 + t + t^2/3) exp(-t)`` | 5 |

All four are a polynomial times a decay (`Decay`), so each is one line of `KERNELS`. Another kernel is a
subclass of `Kernel` put into that table under its name: fitting, prediction, scoring and export read it there
and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["KERNELS", "Decay", "Kernel", "distances_to", "squared_distance", "stationary"]

Values = tuple[Tensor, Tensor | None]


class Kernel(ABC):
    """A stationary kernel of unit variance, as a function of ``c r^2``."""

    c: float = 1.0
    """Factor that `value` and `add_into` expect on ``r^2``; folded into the distances where that is free."""

    @abstractmethod
    def value(self, square: Tensor, slope: bool) -> Values:
        """Value and, if asked for, derivative by the log-lengthscale, from ``square = c r^2``, which may be
        overwritten.
        """

    def add_into(self, total: Tensor, square: Tensor, spare: Tensor, variance: float) -> None:
        """Add ``variance`` times the value to ``total``; ``square`` and ``spare`` (same shape) are
        overwritten.
        """
        total.add_(self.value(square, False)[0], alpha=variance)


@dataclass(frozen=True)
class Decay(Kernel):
    """``p(t) exp(-t)`` with ``p(t) = 1 + a t + b t^2``, or ``exp(-t^2)`` where ``squared``.

    The derivative by the log-lengthscale is ``-t d/dt``: ``t (p - p') exp(-t)``, or ``2 t^2 exp(-t^2)``.

    Example:
        >>> Decay(3.0, a=1.0).value(torch.zeros(1), slope=True)
        (tensor([1.]), tensor([0.]))
    """

    c: float
    a: float = 0.0
    b: float = 0.0
    squared: bool = False

    def value(self, square: Tensor, slope: bool) -> Values:
        if self.squared:
            decay = square.neg().exp_()
            return decay, square.mul(2.0).mul_(decay) if slope else None
        if square.requires_grad:  # gradients by the inputs: nothing may be overwritten
            t = square.sqrt()
            return (1.0 + self.a * t + self.b * square) * torch.exp(-t), None
        t = _apply(np.sqrt, torch.sqrt, square, square)
        decay = t.neg()
        _apply(np.exp, torch.exp, decay, decay)
        by_lengthscale = self._less_own_slope(t).mul_(t).mul_(decay) if slope else None
        return self._polynomial(t).mul_(decay) if self.a else decay, by_lengthscale

    def add_into(self, total: Tensor, square: Tensor, spare: Tensor, variance: float) -> None:
        if self.squared:
            total.add_(square.neg_().exp_(), alpha=variance)
            return
        t = _apply(np.sqrt, torch.sqrt, square, square)
        if not self.a:
            total.add_(_apply(np.exp, torch.exp, t.neg_(), t), alpha=variance)
            return
        _apply(np.exp, torch.exp, t, spare)
        total.addcdiv_(self._polynomial(t), spare, value=variance)

    def _polynomial(self, t: Tensor) -> Tensor:
        """``p = 1 + a t + b t^2``, written over ``t``; for ``a`` other than 0."""
        if self.b:
            t.addcmul_(t, t, value=self.b / self.a)
        if self.a != 1.0:
            t.mul_(self.a)
        return t.add_(1.0)

    def _less_own_slope(self, t: Tensor) -> Tensor:
        """``p - p' = (1 - a) + (a - 2 b) t + b t^2``."""
        rising = t * (self.a - 2.0 * self.b)
        if self.b:
            rising.addcmul_(t, t, value=self.b)
        return rising if self.a == 1.0 else rising.add_(1.0 - self.a)


def _apply(fast: np.ufunc, usual: Callable[..., Tensor], x: Tensor, out: Tensor) -> Tensor:
    """A function of all entries, written into ``out``. On a processor NumPy's root and exponential take half
    to two thirds of the time of PyTorch's.
    """
    if type(x) is not Tensor or not x.is_cpu or torch.compiler.is_compiling():
        return usual(x, out=out)
    with np.errstate(over="ignore"):  # an infinite exponential divides: the value is 0
        fast(x.numpy(), out=out.numpy())
    return out


KERNELS: dict[str, Kernel] = {
    "rbf": Decay(0.5, squared=True),
    "matern12": Decay(1.0),
    "matern32": Decay(3.0, a=1.0),
    "matern52": Decay(5.0, a=1.0, b=1.0 / 3.0),
}
"""Base kernels by name; the one place where a kernel is written."""


def stationary(
    kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None = None
) -> Tensor:
    """``variance * kernel`` on fixed squared distances; differentiable in the logarithms of lengthscale and
    variance only.
    """
    if torch.is_grad_enabled() and (
        log_lengthscale.requires_grad or (log_variance is not None and log_variance.requires_grad)
    ):
        value: Tensor = _OnFixedDistances.apply(kernel, squared, log_lengthscale, log_variance)  # type: ignore[no-untyped-call]
        return value
    value = KERNELS[kernel].value(_scaled(kernel, squared, log_lengthscale), False)[0]
    if log_variance is None:
        return value
    variance = log_variance.exp()
    return value * variance if value.requires_grad else value.mul_(variance)


def _scaled(kernel: str, squared: Tensor, log_lengthscale: Tensor) -> Tensor:
    """``c r^2``."""
    return squared * ((-2.0 * log_lengthscale).exp() * KERNELS[kernel].c)


class _OnFixedDistances(torch.autograd.Function):
    """Closed-form gradients: two saved matrices instead of autograd's seven."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None
    ) -> Tensor:
        value, slope = KERNELS[kernel].value(_scaled(kernel, squared, log_lengthscale), True)
        assert slope is not None
        if log_variance is not None:
            value.mul_(log_variance.exp())
            slope.mul_(log_variance.exp())
        ctx.save_for_backward(value, slope)
        ctx.shapes = log_lengthscale.shape, None if log_variance is None else log_variance.shape
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, Tensor, Tensor | None]:  # type: ignore[override]
        value, slope = ctx.saved_tensors
        by_lengthscale, by_variance = ctx.shapes
        return (
            None,
            None,
            _total(grad, slope, by_lengthscale),
            None if by_variance is None else _total(grad, value, by_variance),
        )


def _total(grad: Tensor, slope: Tensor, shape: torch.Size) -> Tensor:
    """``grad * slope`` summed to ``shape``."""
    return (grad * slope).sum_to_size(shape) if shape else torch.dot(grad.reshape(-1), slope.reshape(-1))


def squared_distance(a: Tensor, b: Tensor) -> Tensor:
    """Squared Euclidean distances (..., N, M) in double precision, clipped at zero."""
    if a is not b:
        return distances_to(b)(a)
    y, _ = _centred(b)
    G = y @ y.mT  # with the norms from the same product, the diagonal is exactly zero
    norms = G.diagonal(dim1=-2, dim2=-1)
    return (norms[..., :, None] + norms[..., None, :]).sub_(G, alpha=2.0).clamp_min_(0.0)


def distances_to(b: Tensor) -> Callable[[Tensor], Tensor]:
    """`squared_distance` to the same points many times: what depends on them alone is computed once.

    The common mean is removed first, which keeps the usual expansion ``|a|^2 + |b|^2 - 2ab`` accurate. The
    norms travel as two further columns, so that one matrix product does it all.

    Example:
        >>> distances_to(torch.tensor([[0.0], [3.0]]))(torch.tensor([[1.0]]))
        tensor([[1., 4.]], dtype=torch.float64)
    """
    y, centre = _centred(b)
    norms = torch.linalg.vector_norm(y, dim=-1, keepdim=True).square()
    right = torch.cat([-2.0 * y, torch.ones_like(norms), norms], dim=-1).mT

    def distances(a: Tensor) -> Tensor:
        x = _distinct(a) - centre
        own = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square()
        left = torch.cat([x, own, torch.ones_like(own)], dim=-1)
        return (left @ right).clamp_min_(0.0)

    return distances


def _centred(b: Tensor) -> tuple[Tensor, Tensor]:
    """Points in double precision about their mean, and the mean."""
    y = b.double()
    centre = y.mean(dim=-2, keepdim=True) if b.shape[-2] else y.new_zeros(())
    return y - centre, centre


def _distinct(a: Tensor) -> Tensor:
    """One row where all ``N`` are the same memory (a sample's confidence, repeated for its layers); the
    result broadcasts.
    """
    return a[..., :1, :] if a.ndim > 2 and a.stride(-2) == 0 else a
