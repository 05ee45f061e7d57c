"""LaSCal: the temperature of a network under label shift, from unlabelled target samples.

Under label shift ``p(x | y)`` stays and the class mix changes. With weights ``w_k`` = target share / source
share of class k, how often class k is right among target samples of one bin of its probability is

    a_kb = w_k (n_t - 1) / n_s * #(source samples of class k in the bin) / (#(target samples in the bin) - 1),

and the mean over classes and target samples of ``(p_k - a_kb)^2`` estimates the classwise calibration error
without target labels (15 bins of equal mass). The temperature is the one of the smallest estimate.

Reference: Popordanoska, Radevski, Tuytelaars and Blaschko, LaSCal: label-shift calibration without target
labels, NeurIPS 2024.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["label_shift_error", "label_shift_temperature"]

FloatArray = NDArray[np.float64]
TEMPERATURES = np.geomspace(0.1, 20, 200)


def label_shift_temperature(source: Tensor, labels: Tensor, target: Tensor, weights: FloatArray) -> float:
    """Temperature for the target.

    Args:
        source: ``(n, c)`` logits of labelled samples.
        labels: ``(n,)`` their classes.
        target: ``(m, c)`` logits of unlabelled samples.
        weights: ``(c,)`` target share over source share of every class, for instance of
            `salgp.estimate.class_mix`.

    Example:
        >>> import torch
        >>> g = torch.Generator().manual_seed(0)
        >>> z = 2 * torch.randn(2000, 3, generator=g)
        >>> y = torch.distributions.Categorical(logits=z).sample()
        >>> 2 < label_shift_temperature(3 * z[:1000], y[:1000], 3 * z[1000:], np.ones(3)) < 4
        True
    """
    y = labels.numpy()
    errors = [
        label_shift_error(_softmax(source, temperature), y, _softmax(target, temperature), weights)
        for temperature in TEMPERATURES
    ]
    return float(TEMPERATURES[int(np.argmin(errors))])


def label_shift_error(
    source: FloatArray, labels: NDArray[np.int64], target: FloatArray, weights: FloatArray, n_bins: int = 15
) -> float:
    """Estimated classwise squared calibration error of the target's probabilities ``(m, c)``."""
    ordered = np.sort(target.T, axis=1)  # (c, m): samples of a bin are neighbours
    c, m = ordered.shape
    edges = np.quantile(ordered, np.linspace(0, 1, n_bins + 1)[1:-1], axis=1).T  # (c, n_bins - 1)
    below = [np.searchsorted(p, edge, side="right") for p, edge in zip(ordered, edges, strict=True)]
    count = np.diff(below, prepend=0, append=m, axis=1)  # (c, n_bins)
    own = source[np.arange(len(labels)), labels]
    bin_own = (edges[labels] < own[:, None]).sum(axis=1)
    hits = np.bincount(labels * n_bins + bin_own, minlength=c * n_bins).reshape(c, n_bins)
    rate = weights[:, None] * (m - 1) / len(source) * hits / np.maximum(count - 1, 1)
    errors = (ordered.ravel() - np.repeat(rate, count.ravel())) ** 2
    return float((errors * np.repeat(count > 1, count.ravel())).mean())


def _softmax(logits: Tensor, temperature: float) -> FloatArray:
    return np.asarray((logits.double() / temperature).softmax(dim=1))
