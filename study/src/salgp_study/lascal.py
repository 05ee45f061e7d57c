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
    per_class = [
        _class_error(source[:, k], labels == k, target[:, k], float(weights[k]), n_bins)
        for k in range(target.shape[1])
    ]
    return float(np.mean(per_class))


def _class_error(
    source: FloatArray, is_class: NDArray[np.bool_], target: FloatArray, weight: float, n_bins: int
) -> float:
    edges = np.quantile(target, np.linspace(0, 1, n_bins + 1)[1:-1])
    bin_source, bin_target = (np.searchsorted(edges, x, side="left") for x in (source, target))
    hits = np.bincount(bin_source[is_class], minlength=n_bins)
    count = np.bincount(bin_target, minlength=n_bins)
    rate = weight * (len(target) - 1) / len(source) * hits / np.maximum(count - 1, 1)
    counted = count[bin_target] > 1
    return float((counted * (target - rate[bin_target]) ** 2).sum() / len(target))


def _softmax(logits: Tensor, temperature: float) -> FloatArray:
    return np.asarray((logits.double() / temperature).softmax(dim=1))
