"""Base kernels on fixed squared distances, with closed-form gradients in their lengthscale and variance.

With ``r`` = distance / lengthscale and ``v`` = variance:
    RBF ``v exp(-r^2/2)``; Matern 1/2 ``v exp(-r)``; Matern 3/2 ``v (1+t) exp(-t)``, ``t = sqrt(3) r``;
    Matern 5/2 ``v (1+t+t^2/3) exp(-t)``, ``t = sqrt(5) r``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["KERNELS", "rbf", "squared_distance", "stationary"]

Values = tuple[Tensor, Tensor | None]


def rbf(squared: Tensor, slope: bool) -> Values:
    """RBF value and, if asked for, its derivative by the log-lengthscale, from ``r^2``."""
    value = (-0.5 * squared).exp()
    return value, squared * value if slope else None


def matern12(squared: Tensor, slope: bool) -> Values:
    """Matern 1/2 value and, if asked for, its derivative by the log-lengthscale, from ``r^2``."""
    t = squared.sqrt()
    value = t.neg().exp_()
    return value, t.mul_(value) if slope else None


def matern32(squared: Tensor, slope: bool) -> Values:
    """Matern 3/2 value and, if asked for, its derivative by the log-lengthscale, from ``r^2``."""
    t = (3.0 * squared).sqrt_()
    decay = t.neg().exp_()
    value = torch.addcmul(decay, decay, t)
    return value, t.square_().mul_(decay) if slope else None


def matern52(squared: Tensor, slope: bool) -> Values:
    """Matern 5/2 value and, if asked for, its derivative by the log-lengthscale, from ``r^2``."""
    t = (5.0 * squared).sqrt_()
    decay = t.neg().exp_()
    value = torch.addcmul(decay, decay, torch.addcmul(t, t, t, value=1.0 / 3.0))
    return value, torch.addcmul(t, t, t).mul_(t).mul_(decay).mul_(1.0 / 3.0) if slope else None


KERNELS: dict[str, Callable[[Tensor, bool], Values]] = {
    "rbf": rbf,
    "matern12": matern12,
    "matern32": matern32,
    "matern52": matern52,
}
"""Base kernels by name: ``r^2 -> (value, d value / d log lengthscale)``; the derivative only where asked for.
"""


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
    value = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp(), False)[0]
    return value if log_variance is None else value.mul_(log_variance.exp())


class _OnFixedDistances(torch.autograd.Function):
    """Closed-form gradients: two saved matrices instead of autograd's seven."""

    @staticmethod
    def forward(
        ctx: Any, kernel: str, squared: Tensor, log_lengthscale: Tensor, log_variance: Tensor | None
    ) -> Tensor:
        value, slope = KERNELS[kernel](squared * (-2.0 * log_lengthscale).exp(), True)
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
    """Squared Euclidean distances (..., N, M) in double precision, clipped at zero.

    The common mean is removed first, which keeps the usual expansion ``|a|^2 + |b|^2 - 2ab`` accurate. The
    norms travel as two further columns, so that one matrix product does it all.
    """
    y = b.double()
    centre = y.mean(dim=-2, keepdim=True) if b.shape[-2] else y.new_zeros(())
    y = y - centre
    if a is b:  # with the norms from the same product, the diagonal is exactly zero
        G = y @ y.mT
        norms = G.diagonal(dim1=-2, dim2=-1)
        return (norms[..., :, None] + norms[..., None, :]).sub_(G, alpha=2.0).clamp_min_(0.0)
    x = _distinct(a) - centre
    left, right = (torch.linalg.vector_norm(v, dim=-1, keepdim=True).square() for v in (x, y))
    left = torch.cat([x, left, torch.ones_like(left)], dim=-1)
    right = torch.cat([-2.0 * y, torch.ones_like(right), right], dim=-1)
    return (left @ right.mT).clamp_min_(0.0)


def _distinct(a: Tensor) -> Tensor:
    """One row where all ``N`` are the same memory (a sample's confidence, repeated for its layers); the
    result broadcasts.
    """
    return a[..., :1, :] if a.ndim > 2 and a.stride(-2) == 0 else a
