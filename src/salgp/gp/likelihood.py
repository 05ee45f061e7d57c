"""Likelihoods as Gaussian sites of the weighted regression.

Gaussian: the residual itself with one noise variance. Bernoulli on correctness: the logistic likelihood is
bounded by a Gaussian in the log-odds ``f`` whose precision depends on ``xi = sqrt(E f^2)`` (Jaakkola & Jordan
2000; the same bound as mean-field Polya-Gamma augmentation). For fixed ``xi`` everything is the weighted
regression of `salgp.gp.regression`; updating ``xi`` never lowers the bound, so there is no step size to tune.
Laplace's approximation (`laplace_sites`) expands the same likelihood around its mode instead.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

__all__ = ["Sites", "bernoulli_sites", "gaussian_sites", "laplace_sites", "sigmoid_moments"]


@dataclass(frozen=True, eq=False)
class Sites:
    """Gaussian stand-in for a likelihood: ``log p(y|f) ~ log N(target | f, noise) + constant``."""

    target: Tensor
    noise: Tensor
    constant: Tensor


def gaussian_sites(y: Tensor, log_noise: Tensor, weight: Tensor | float = 1.0) -> Sites:
    """Sites of ``N(y | f, exp(log_noise))^weight``; a weight below 1 tempers repeated observations.

    Example:
        >>> y = torch.zeros(2, dtype=torch.float64)
        >>> gaussian_sites(y, torch.zeros((), dtype=torch.float64), weight=0.5).noise
        tensor([2., 2.], dtype=torch.float64)
    """
    weight = torch.as_tensor(weight, dtype=y.dtype, device=y.device).expand_as(y)
    noise = log_noise.exp() / weight
    log_2pi = math.log(2.0 * math.pi)
    constant = 0.5 * (log_2pi + noise.log()) - 0.5 * weight * (log_2pi + log_noise)
    return Sites(y, noise, constant.sum())


def bernoulli_sites(correct: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | float = 1.0) -> Sites:
    """Sites of ``sigmoid((2 correct - 1) f)^weight`` around the current posterior of the log-odds ``f``.

    Args:
        correct: ``(n,)`` 0 or 1.
        mean: ``(n,)`` current mean of ``f``.
        variance: ``(n,)`` its current variance.
        weight: of each observation.
    """
    xi = (mean.square() + variance).sqrt().clamp_min(1e-6)
    w = torch.tanh(0.5 * xi) / (2.0 * xi)
    target = (correct - 0.5) / w
    weight = torch.as_tensor(weight, dtype=xi.dtype, device=xi.device).expand_as(xi)
    noise = 1.0 / (weight * w)
    bound = torch.nn.functional.logsigmoid(xi) - 0.5 * xi + 0.5 * w * xi.square()
    constant = weight * (bound + 0.5 * w * target.square()) + 0.5 * (2.0 * math.pi * noise).log()
    return Sites(target, noise, constant.sum())


def laplace_sites(correct: Tensor, mean: Tensor, weight: Tensor | float = 1.0) -> Sites:
    """Second-order expansion of ``sigmoid((2 correct - 1) f)^weight`` around ``f = mean``: Newton's step.

    At the mode of the posterior the sites give Laplace's approximation of posterior and evidence (Rasmussen &
    Williams 2006, section 3.4).

    Args:
        correct: ``(n,)`` 0 or 1.
        mean: ``(n,)`` log-odds to expand around.
        weight: of each observation.
    """
    weight = torch.as_tensor(weight, dtype=mean.dtype, device=mean.device).expand_as(mean)
    p = torch.sigmoid(mean)
    curvature = (weight * p * (1.0 - p)).clamp_min(1e-12)
    target = mean + weight * (correct - p) / curvature
    log_likelihood = weight * torch.nn.functional.logsigmoid((2.0 * correct - 1.0) * mean)
    gaussian = -0.5 * (math.log(2.0 * math.pi) - curvature.log() + curvature * (target - mean).square())
    return Sites(target, 1.0 / curvature, (log_likelihood - gaussian).sum())


def sigmoid_moments(mean: Tensor, variance: Tensor, points: int = 32) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of ``sigmoid(f)`` for ``f ~ N(mean, variance)``, by Gauss-Hermite
    quadrature.

    Example:
        >>> sigmoid_moments(torch.zeros(1), torch.zeros(1))
        (tensor([0.5000]), tensor([0.]))
    """
    nodes, weights = (torch.as_tensor(x, dtype=mean.dtype, device=mean.device) for x in _hermite(points))
    values = torch.sigmoid(mean[..., None] + variance.clamp_min(0.0).sqrt()[..., None] * nodes)
    first = values @ weights
    return first, ((values - first[..., None]).square() @ weights).clamp_min(0.0).sqrt()


@functools.cache
def _hermite(points: int) -> tuple[np.ndarray, np.ndarray]:
    nodes, weights = np.polynomial.hermite_e.hermegauss(points)
    return nodes, weights / weights.sum()
