"""The one temperature of the largest likelihood, and the softmax it scales.

In the inverse temperature ``b = 1 / T`` the negative log-likelihood of ``softmax(b z)`` is convex, with slope
``E_p[z] - z_y`` and curvature ``Var_p[z]`` per sample, so a safeguarded Newton iteration finds the one
optimum from any start and cannot leave the bounds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning

__all__ = ["BOUNDS", "best_temperature", "gradient_steps", "room_for", "row_chunks", "tempered_softmax"]

BOUNDS = (0.05, 20.0)
"""Smallest and largest temperature looked for, unless told otherwise."""


def tempered_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``softmax(z / T)`` in at least single precision, kept positive so that no log-likelihood is infinite.

    Args:
        logits: ``(n, c)``.
        temperature: one number, or ``(n, 1)``, one per sample.

    Example:
        >>> tempered_softmax(torch.tensor([[2.0, 0.0]]), 2.0)
        tensor([[0.7311, 0.2689]])
    """
    z = logits if logits.dtype.itemsize >= 4 else logits.float()
    if isinstance(temperature, Tensor):
        z = z / temperature
    elif temperature != 1.0:
        z = torch.div(z, temperature, out=room_for(z))
    return torch.softmax(z, dim=1, out=room_for(z)).clamp_(min=torch.finfo(z.dtype).tiny)


def best_temperature(
    logits: Tensor,
    labels: Tensor,
    bounds: tuple[float, float] = BOUNDS,
    init: float = 1.0,
    *,
    weights: Tensor | None = None,
    warn: bool = True,
) -> tuple[float, bool]:
    """Temperature of the largest likelihood inside ``bounds``, and whether it is one of them.

    Args:
        logits: ``(n, c)``.
        labels: ``(n,)`` true classes; -1 is left out.
        bounds: smallest and largest temperature.
        init: temperature to start from.
        weights: ``(n,)`` weight of each sample.
        warn: tell when the temperature stopped at a bound.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> t, at_bound = best_temperature(z, torch.tensor([0, 0, 0, 1]))
        >>> round(t, 4), at_bound  # log-odds 2 / T must be log 3
        (1.8205, False)
    """
    low, high = bounds
    if not 0 < low < high:
        raise ValueError(f"bounds must be 0 < smallest < largest temperature, got {tuple(bounds)}")
    if not init > 0:
        raise ValueError(f"init must be a positive temperature, got {init}")
    if not bool((labels >= 0).any()):
        warnings.warn(
            "no calibration sample has a known class: the temperature stays 1",
            CalibrationWarning,
            stacklevel=4,
        )
        return 1.0, False
    inverse, end = _safeguarded_newton(
        lambda b: _slope(logits, labels, b, weights), 1 / high, 1 / low, 1 / init
    )
    if end and warn:
        why = (
            "every calibration sample is correct"
            if inverse >= 1 / low
            else "the confidences tell nothing about which samples are correct"
        )
        warnings.warn(
            f"the temperature stopped at its bound {1 / inverse:g} ({why}?); calibrate on held-out data",
            CalibrationWarning,
            stacklevel=4,
        )
    return 1 / inverse, end


def gradient_steps(
    logits: Tensor, labels: Tensor, bounds: tuple[float, float], init: float, steps: int, lr: float
) -> float:
    """Plain gradient descent on the mean negative log-likelihood as a function of ``T``, as many published
    scripts do.

    Args:
        logits: ``(n, c)``.
        labels: ``(n,)`` true classes; -1 is left out.
        bounds: smallest and largest temperature; a step beyond ends on the bound.
        init: temperature to start from.
        steps: number of steps.
        lr: length of a step.

    Returns:
        The temperature after the last step, at the optimum or not.

    Example:
        >>> z, labels = torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 1])
        >>> round(gradient_steps(z, labels, BOUNDS, init=1.0, steps=50, lr=0.01), 2)  # the optimum is 1.82
        1.11
    """
    n = max(int((labels >= 0).sum()), 1)
    t = init
    for _ in range(steps):
        slope = _slope(logits, labels, 1 / t, None)[0] / n  # d NLL / d (1/T); d (1/T) / dT = -1 / T^2
        t = min(max(t + lr * slope / t**2, bounds[0]), bounds[1])
    return t


def row_chunks(n: int, width: int, elements: int = 2**20) -> Iterator[slice]:
    """Slices of at most ``elements / width`` rows, so that temporaries stay small whatever ``n`` is.

    Example:
        >>> list(row_chunks(5, 2, elements=4))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    step = max(1, elements // max(width, 1))
    return (slice(i, i + step) for i in range(0, n, step))


def room_for(x: Tensor) -> Tensor | None:
    """Memory for a result of the size of a large ``x``, else None: the ``out`` of an operation.

    Taken from NumPy, which asks the system for huge pages: handing out small ones takes longer than a
    softmax. Only for plain tensors on a processor that no gradient is taken of; all else is left to torch.

    Example:
        >>> room_for(torch.zeros(2, 2)) is None, room_for(torch.zeros(2000, 1000)).shape
        (True, torch.Size([2000, 1000]))
    """
    plain = type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64)
    if (
        not plain
        or x.numel() < 2**20
        or torch.compiler.is_compiling()
        or (x.requires_grad and torch.is_grad_enabled())
    ):
        return None
    return torch.from_numpy(np.empty(x.shape, np.float32 if x.dtype == torch.float32 else np.float64))


def _slope(logits: Tensor, labels: Tensor, inverse: float, weights: Tensor | None) -> tuple[float, float]:
    """First and second derivative of the negative log-likelihood in the inverse temperature."""
    total = torch.zeros(2, dtype=torch.float64, device=logits.device)
    work: list[Tensor] = []
    for rows in row_chunks(*logits.shape):
        y = labels[rows]
        x = logits[rows] if logits.dtype.itemsize >= 4 else logits[rows].float()
        if not work or work[0].shape != x.shape:
            work = [torch.empty_like(x) for _ in range(3)]  # reused: fresh memory costs more than the sums
        z, p, pz = work
        torch.sub(x, x.amax(dim=1, keepdim=True), out=z)
        torch.softmax(torch.mul(z, inverse, out=pz), dim=1, out=p)
        torch.mul(p, z, out=pz)
        mean = pz.sum(dim=1)
        each = torch.stack(
            [mean - z.gather(1, y.clamp_min(0)[:, None])[:, 0], torch.linalg.vecdot(pz, z) - mean**2]
        )
        w = (y >= 0).double() if weights is None else weights[rows] * (y >= 0)
        total += (each.double() * w).sum(dim=1)
    slope, curvature = total.tolist()
    return slope, curvature


def _safeguarded_newton(
    slope: Callable[[float], tuple[float, float]], low: float, high: float, start: float
) -> tuple[float, bool]:
    """Root of an increasing function in [low, high]; the second value says that an end was returned for want
    of a root.

    The ends are looked at only where the first steps do not settle: each look costs a pass over the data.
    """
    x = min(max(start, low), high)
    for _ in range(8):
        g, h = slope(x)
        new = x - g / h if h > 0 else math.nan
        if not low < new < high:
            break
        if abs(new - x) <= 1e-4 * x:  # convergence is quadratic: the new one is good to about 1e-8
            return new, False
        x = new
    below, above = slope(low)[0], slope(high)[0]
    if below >= 0 >= above:  # flat: no preference anywhere
        return min(max(start, low), high), False
    if below >= 0 or above <= 0:
        return (low, True) if below >= 0 else (high, True)
    return _bracketed_newton(slope, low, high, x), False


def _bracketed_newton(
    slope: Callable[[float], tuple[float, float]], low: float, high: float, x: float
) -> float:
    """Newton steps inside a bracket of the root, halving it (on a log scale) where they leave it."""
    for _ in range(100):
        g, h = slope(x)
        low, high = (low, x) if g > 0 else (x, high)
        new = x - g / h if h > 0 else math.inf
        new = new if low < new < high else math.sqrt(low * high)
        if abs(new - x) <= 1e-7 * x:
            return new
        x = new
    return x
