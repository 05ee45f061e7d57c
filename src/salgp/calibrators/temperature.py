"""The one temperature of the largest likelihood, and the softmax it scales.

In the inverse temperature ``b = 1 / T`` the negative log-likelihood of ``softmax(b z)`` is convex, with slope
``E_p[z] - z_y`` and curvature ``Var_p[z]`` per sample, so a safeguarded Newton iteration finds the one
optimum from any start and cannot leave the bounds.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from salgp.calibrators.checks import CalibrationWarning
from salgp.logits import at_least_single

__all__ = [
    "BOUNDS",
    "best_temperature",
    "careful_temperature",
    "gradient_steps",
    "rest_temperature",
    "row_chunks",
    "tempered_softmax",
]

BOUNDS = (0.01, 20.0)
"""Smallest and largest temperature looked for, unless told otherwise."""
FLAT = 0.05
"""Below this temperature the likelihood hardly changes any more: there is no optimum."""
NEWTON = 30
"""Newton steps before the search only halves; ordinary data take fewer than ten."""
LARGE = 2**24
"""Logits from which on a temperature needs no prior."""


def tempered_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``softmax(z / T)`` in at least single precision, kept positive so that no log-likelihood is infinite.

    Args:
        logits: ``(n, c)``.
        temperature: one number, or ``(n, 1)``, one per sample.

    Example:
        >>> tempered_softmax(torch.tensor([[2.0, 0.0]]), 2.0)
        tensor([[0.7311, 0.2689]])
    """
    z = at_least_single(logits) / temperature
    return torch.softmax(z, dim=1).clamp_(min=torch.finfo(z.dtype).tiny)


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
    inverse, end = _increasing_root(lambda b: _slope(logits, labels, b, weights), 1 / high, 1 / low, 1 / init)
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


def rest_temperature(logits: Tensor, labels: Tensor) -> float:
    """Temperature by which the classes other than the label share what the confidence leaves.

    That of the largest likelihood; 1 where the likelihood has no optimum, as where every sample is correct.

    Example:
        >>> rest_temperature(torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 0]))
        1.0
    """
    if not bool((labels >= 0).any()):
        return 1.0
    temperature, at_bound = best_temperature(logits, labels, warn=False)
    return 1.0 if at_bound or temperature < FLAT else temperature


def careful_temperature(logits: Tensor, labels: Tensor, spread: float = 0.5) -> float:
    """Temperature of the largest likelihood if that is 1 or more; below 1, of the largest posterior with
    ``log T ~ N(0, spread^2)``.

    A temperature below 1 raises confidences. Few samples, or hardly an error among them, are no reason to do
    so, and it stays near 1. One above 1 lowers them, which needs no further caution.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> round(careful_temperature(z, torch.tensor([0, 0, 0, 0])), 1)
        0.8
    """
    from scipy.optimize import minimize_scalar

    known = labels >= 0
    if not bool(known.any()):
        return 1.0
    if logits.numel() > LARGE:  # the prior no longer shows
        return best_temperature(logits, labels, warn=False)[0]
    z, y = logits[known].double(), labels[known]

    def loss(u: float) -> float:
        fit = torch.nn.functional.cross_entropy(z * math.exp(-u), y, reduction="sum")
        return float(fit) + 0.5 * (min(u, 0.0) / spread) ** 2

    return math.exp(minimize_scalar(loss, bounds=(-3.0, 3.0), method="bounded").x)


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


def _slope(logits: Tensor, labels: Tensor, inverse: float, weights: Tensor | None) -> tuple[float, float]:
    """First and second derivative of the negative log-likelihood in the inverse temperature."""
    total = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for rows in row_chunks(len(logits), logits.shape[1], elements=2**17):  # small enough to stay in cache
        z, y = at_least_single(logits[rows]), labels[rows]
        z = z - z.amax(dim=1, keepdim=True)
        pz = torch.softmax(z * inverse, dim=1).mul_(z)
        mean = pz.sum(dim=1)
        slope = mean - z.gather(1, y.clamp_min(0)[:, None])[:, 0]
        curvature = torch.linalg.vecdot(pz, z) - mean**2
        weight = (y >= 0).double() if weights is None else weights[rows] * (y >= 0)
        total += (torch.stack([slope, curvature]).double() * weight).sum(dim=1)
    first, second = total.tolist()
    return first, second


def _increasing_root(
    slope: Callable[[float], tuple[float, float]], low: float, high: float, start: float
) -> tuple[float, bool]:
    """Root of an increasing function in [low, high]; the second value says that an end was returned for want
    of a root.

    Newton steps, as long as they are few and each leads to a new place inside the bracket. Otherwise the end
    on that side is tried, and then the bracket halved (on a log scale), which always comes to an end.
    """
    x, below, above, tried = min(max(start, low), high), low, high, set[float]()
    while True:
        g, h = slope(x)
        tried.add(x)
        if (x <= low and g >= 0) or (x >= high and g <= 0):
            return x, True
        if g == 0:
            return x, False
        below, above, end = (below, x, low) if g > 0 else (x, above, high)
        new = min(max(x - g / h, low), high) if h > 0 and len(tried) <= NEWTON else math.nan
        if below <= new <= above and new not in tried:
            if abs(new - x) <= 1e-4 * x:  # convergence is quadratic: the new one is good to about 1e-8
                return new, False
            x = new
        elif end not in tried:
            x = end
        elif above / below > 1 + 1e-8:
            x = math.sqrt(below * above)
        else:
            return x, False
