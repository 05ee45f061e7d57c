"""The temperature of the largest likelihood, and the softmax it scales.

With the inverse temperature ``b = 1 / T`` the negative log-likelihood of ``softmax(b z)`` is convex: its
slope, the sum of ``E_p[z] - z_y`` over samples, crosses zero once. The root is bracketed and found by Brent's
method in ``log T``.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from salgp.calibrators.checks import CalibrationWarning
from salgp.logits import at_least_single

__all__ = ["BOUNDS", "best_temperature", "shrunk_temperature", "row_chunks", "tempered_softmax"]

BOUNDS = (0.01, 20.0)
"""Smallest and largest temperature looked for."""
FLAT = 0.05
"""Below this temperature the likelihood hardly changes any more: there is no optimum."""


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
    logits: Tensor, labels: Tensor, *, weights: Tensor | None = None, warn: bool = True
) -> tuple[float, bool]:
    """Temperature of the largest likelihood inside `BOUNDS`, and whether it is one of them.

    Args:
        logits: ``(n, c)``.
        labels: ``(n,)`` true classes; -1 is left out.
        weights: ``(n,)`` weight of each sample.
        warn: tell when the temperature stopped at a bound.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> t, at_bound = best_temperature(z, torch.tensor([0, 0, 0, 1]))
        >>> round(t, 4), at_bound  # log-odds 2 / T must be log 3
        (1.8205, False)
    """
    if not bool((labels >= 0).any()):
        _warn("no calibration sample has a known class: the temperature stays 1")
        return 1.0, False
    temperature, at_bound = _root(lambda u: _slope(logits, labels, u, weights))
    if at_bound and warn:
        correct = "every calibration sample is correct"
        useless = "the confidences tell nothing about which samples are correct"
        why = correct if temperature < 1.0 else useless
        _warn(f"the temperature stopped at its bound {temperature:g} ({why}?); calibrate on held-out data")
    return temperature, at_bound


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


def shrunk_temperature(logits: Tensor, labels: Tensor, spread: float = 0.5) -> float:
    """Temperature of the largest likelihood if that is 1 or more; below 1, of the largest posterior with
    ``log T ~ N(0, spread^2)``.

    A temperature below 1 raises confidences. Few samples, or hardly an error among them, are no reason to do
    so, and it stays near 1. One above 1 lowers them and is not shrunk.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> round(shrunk_temperature(z, torch.tensor([0, 0, 0, 0])), 1)
        0.8
    """
    if not bool((labels >= 0).any()):
        return 1.0
    slope = lambda u: _slope(logits, labels, u, None) + min(u, 0.0) / spread**2  # noqa: E731
    return _root(slope)[0]


def row_chunks(n: int, width: int, elements: int = 2**20) -> Iterator[slice]:
    """Slices of at most ``elements / width`` rows, so that temporaries stay small whatever ``n`` is.

    Example:
        >>> list(row_chunks(5, 2, elements=4))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    step = max(1, elements // max(width, 1))
    return (slice(i, i + step) for i in range(0, n, step))


def _slope(logits: Tensor, labels: Tensor, log_temperature: float, weights: Tensor | None) -> float:
    """Derivative of the negative log-likelihood in ``log T``."""
    inverse, total = math.exp(-log_temperature), 0.0
    for rows in row_chunks(len(logits), logits.shape[1], elements=2**17):  # small enough to stay in cache
        z, y = at_least_single(logits[rows]), labels[rows]
        z = z - z.amax(dim=1, keepdim=True)
        mean = torch.linalg.vecdot(torch.softmax(z * inverse, dim=1), z)
        each = z.gather(1, y.clamp_min(0)[:, None])[:, 0] - mean
        weight = (y >= 0).double() if weights is None else weights[rows] * (y >= 0)
        total += float(torch.dot(each.double(), weight.double()))
    return inverse * total


def _root(slope: Callable[[float], float]) -> tuple[float, bool]:
    """``T`` in `BOUNDS` where ``slope(log T)`` turns positive; true with an end where it does not."""
    from scipy.optimize import brentq

    low, high = (math.log(bound) for bound in BOUNDS)
    if slope(0.0) == 0.0:  # as where all logits are equal
        return 1.0, False
    if slope(low) >= 0.0:
        return BOUNDS[0], True
    if slope(high) <= 0.0:
        return BOUNDS[1], True
    return math.exp(brentq(slope, low, high, xtol=1e-12)), False


def _warn(sentence: str) -> None:
    warnings.warn(sentence, CalibrationWarning, stacklevel=5)
