"""Base kernels on fixed squared distances, with closed-form gradients in their lengthscale and variance.

A kernel is a function of ``r^2``, ``r`` = distance / lengthscale. It returns its value at unit variance, and
a function that returns the derivative of the value by the log-lengthscale, ``-r dk/dr``:

| name | formula |
|---|---|
| rbf | ``exp(-r^2 / 2)`` |
| matern12 | ``exp(-r)`` |
| matern32 | ``(1 + t) exp(-t)``, ``t = sqrt(3) r`` |
| matern52 | ``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r`` |

Another kernel is one more such function, put into `KERNELS` under its name: fitting, prediction, scoring and
export read it there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS", "Kernel", "distances_to", "squared_distance", "stationary"]

Kernel = Callable[[Tensor], tuple[Tensor, Callable[[], Tensor]]]
"""``r^2`` -> value, and a function of no arguments that gives the derivative by the log-lengthscale."""


def rbf(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``exp(-r^2 / 2)``."""
    value = torch.exp(-0.5 * square)
    return value, lambda: square * value


def matern12(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``exp(-r)``."""
    r = torch.sqrt(square)
    value = torch.exp(-r)
    return value, lambda: r * value


def matern32(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``(1 + t) exp(-t)``, ``t = sqrt(3) r``."""
    t = torch.sqrt(3.0 * square)
    decay = torch.exp(-t)
    return (1.0 + t) * decay, lambda: t * t * decay


def matern52(square: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """``(1 + t + t^2/3) exp(-t)``, ``t = sqrt(5) r``."""
    t = torch.sqrt(5.0 * square)
    decay = torch.exp(-t)
    third = t * t / 3.0
    return (1.0 + t + third) * decay, lambda: third * (1.0 + t) * decay


KERNELS: dict[str, Kernel] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}
"""Base kernels by name; the one place where a kernel is looked up."""


def stationary(
    kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None = None
) -> Tensor:
    """``variance * kernel`` on fixed squared distances; differentiable in the logarithms of lengthscale and
    variance only.

    Example:
        >>> zero = torch.zeros(())
        >>> stationary("matern12", torch.tensor([0.0, 4.0]), zero, zero)
        tensor([1.0000, 0.1353])
    """
    if torch.is_grad_enabled() and (
        log_lengthscale.requires_grad or (log_variance is not None and log_variance.requires_grad)
    ):
        value: Tensor = _OnFixedDistances.apply(kernel, squared, log_lengthscale, log_variance)  # type: ignore[no-untyped-call]
        return value
    value, _ = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp())
    return value if log_variance is None else value * log_variance.exp()


class _OnFixedDistances(torch.autograd.Function):
    """Closed-form gradients: two saved matrices instead of autograd's seven."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None
    ) -> Tensor:
        value, slope = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp())
        scale = 1.0 if log_variance is None else log_variance.exp()
        value, by_lengthscale = value * scale, slope() * scale
        ctx.save_for_backward(value, by_lengthscale)
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
