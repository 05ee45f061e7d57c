"""Hyperparameters: names, starting points, bounds and priors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Parameter", "Scale", "started", "typical_square"]

GPYTORCH_START = 0.6931471805599453
"""Where GPyTorch starts every positive parameter: ``softplus(0) = log 2``."""
GPYTORCH_NOISE = 1e-4
"""Smallest noise variance of GPyTorch's Gaussian likelihood."""
STRIDE = 1_000_003
"""A prime: multiples of it, modulo the number of rows, pick rows of all layers alike (an even stride would
pick one layer's).
"""


@dataclass(frozen=True)
class Scale:
    """Data-driven scales for starting points: typical squared distance per block, and the variance of the
    target.
    """

    squared: Mapping[str, float]
    variance: float


@dataclass(frozen=True, eq=False)
class Parameter:
    """A learnable array with its starting point and bounds (positive quantities are stored as logarithms).

    Args:
        name: under which ``theta`` holds it.
        start: where a search begins.
        lower: smallest value.
        upper: largest value.
        prior: mean and standard deviation of its normal prior; None where only the bounds are known.
    """

    name: str
    start: Tensor
    lower: float
    upper: float
    prior: tuple[float, float] | None = None

    def log_prior(self, value: Tensor) -> Tensor | float:
        """Log density of the prior; 0 where there is none."""
        if self.prior is None:
            return 0.0
        mean, std = self.prior
        return -(0.5 * ((value - mean) / std).square() + math.log(std * math.sqrt(2.0 * math.pi))).sum()


def started(
    parameters: Sequence[Parameter],
    start: str = "data",
    prior: str | None = None,
    fixed: Mapping[str, float] | None = None,
) -> list[Parameter]:
    """The parameters with the starting points, prior and fixed values that were asked for.

    Args:
        parameters: as a covariance names them, started at scales of the data.
        start: ``data`` to leave them there, or ``gpytorch`` for where GPyTorch starts.
        prior: of lengthscales; None, or ``dimension-scaled``.
        fixed: values of parameters that are not learned, by name.
    """
    held = fixed or {}
    doubled = [name for name, count in Counter(p.name for p in parameters).items() if count > 1]
    if doubled:
        raise ValueError(
            f"two terms of the covariance have a parameter called {doubled[0]!r}; give one of them "
            f"another name, e.g. Stationary('x', 'rbf', name='slow')"
        )
    unknown = set(held) - {p.name for p in parameters}
    if unknown:
        known = ", ".join(p.name for p in parameters)
        raise ValueError(f"cannot fix {sorted(unknown)[0]!r}; the hyperparameters are {known}")
    if start not in ("data", "gpytorch"):
        raise ValueError(f"start must be 'data' or 'gpytorch', got {start!r}")
    if prior not in (None, "dimension-scaled"):
        raise ValueError(f"prior must be None or 'dimension-scaled', got {prior!r}")
    moved = [_gpytorch_start(p) for p in parameters] if start == "gpytorch" else list(parameters)
    if prior:
        moved = [
            _dimension_scaled(p, float(own.start.mean())) for p, own in zip(moved, parameters, strict=True)
        ]
    return [_fixed(p, held[p.name]) if p.name in held else p for p in moved]


def _gpytorch_start(p: Parameter) -> Parameter:
    """Started where GPyTorch starts a positive parameter, away from its bounds; others as they are."""
    if "log_" not in p.name:
        return p
    start = float(torch.tensor(GPYTORCH_START).log())
    lower = float(torch.tensor(GPYTORCH_NOISE).log()) if p.name == "log_noise" else min(p.lower, start - 20.0)
    return Parameter(p.name, torch.full_like(p.start, start), lower, max(p.upper, start + 20.0))


def _dimension_scaled(p: Parameter, typical: float) -> Parameter:
    """Lengthscales under the log-normal prior of Hvarfner et al. (2024), location ``log sqrt(D) + sqrt(2)``
    and scale ``sqrt(3)`` for inputs of unit variance; others as they are.

    Two samples of unit variance in ``D`` dimensions are ``sqrt(2 D)`` apart, so that in the units of the data
    the location is the logarithm of the ``typical`` distance, less ``log sqrt(2)``, plus ``sqrt(2)``.
    """
    if "log_lengthscale" not in p.name:
        return p
    location, scale = typical - 0.5 * math.log(2.0) + math.sqrt(2.0), math.sqrt(3.0)
    return Parameter(p.name, p.start, location - 10.0 * scale, location + 10.0 * scale, (location, scale))


def _fixed(p: Parameter, value: float) -> Parameter:
    return Parameter(p.name, torch.full_like(p.start, value), value, value)


def typical_square(block: Tensor, most: int = 500) -> float:
    """Median squared distance between rows; the scale of a block. Rows are chosen by a stride that visits
    every layer.
    """
    some = block[torch.arange(min(len(block), most), device=block.device) * STRIDE % len(block)].double()
    squared = torch.pdist(some).square()
    positive = squared[squared > 1e-12 * float(squared.max())] if len(squared) else squared
    return float(positive.median()) if len(positive) else 1.0
