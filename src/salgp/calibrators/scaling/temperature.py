"""One number for all logits: temperature scaling and its relatives.

Temperature scaling divides every logit by ``T > 0``, ``p = softmax(z / T)``: ``T > 1`` lowers confidence, ``T
< 1`` raises it, the label stays. How ``T`` is found is told in `salgp.calibrators.temperature`.
Reference: Guo et al., On calibration of modern neural networks, ICML 2017.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator
from salgp.calibrators.temperature import (
    BOUNDS,
    best_temperature,
    row_chunks,
    tempered_softmax,
)
from salgp.features import Features
from salgp.gp.optimise import tell_unless_settled
from salgp.prediction import Prediction

__all__ = [
    "EnsembleTemperatureScaling",
    "PerturbedTemperatureScaling",
    "TemperatureScaling",
    "Uncalibrated",
    "best_temperature",
    "ensemble_softmax",
    "mixture_weights",
]


class Uncalibrated(Calibrator):
    """The network's own softmax, unchanged: the baseline of every comparison.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> Uncalibrated().fit(f, [0, 1]).predict(f).confidence
        tensor([0.8808, 0.7311])
    """

    name: ClassVar[str] = "uncalibrated"
    floors_zeros: ClassVar[bool] = False

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        pass

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, 1.0))


class TemperatureScaling(Calibrator):
    """One temperature for all logits, by maximum likelihood on the calibration set.

    ``p = softmax(z / T)`` with ``T = temperature_``. Samples of an unknown class (-1) have no likelihood and
    are left out. Where every calibration sample is correct, the likelihood rises for ever as ``T -> 0``; the
    temperature then stays at its bound, ``at_bound_`` is true and a `CalibrationWarning` says so.

    Args:
        bounds: smallest and largest temperature allowed.

    Attributes:
        temperature_: the fitted ``T``.
        at_bound_: is it one of ``bounds``?

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(2000, 4, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]
        >>> round(TemperatureScaling().fit(Features(z), labels).temperature_, 1)
        2.0
    """

    name: ClassVar[str] = "temperature"
    display_name: ClassVar[str] = "temperature scaling"

    def __init__(self, bounds: tuple[float, float] = BOUNDS) -> None:
        self.bounds = bounds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        self.temperature_, self.at_bound_ = best_temperature(features.logits, labels, self.bounds)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))


class PerturbedTemperatureScaling(Calibrator):
    """Temperature scaling fitted on augmented calibration samples, for use under shift.

    The network's input is repeated under noise of several strengths before the features are taken, so that
    the calibration set holds samples the network gets wrong; the temperature maximises the likelihood of all
    of them. Give it `Features` with ``groups``, in which an augmented sample shares the number of its
    original: every original then counts the same, however often it was augmented. Without ``groups`` it is
    plain temperature scaling, and a warning says so.

    Reference: Tomani et al., Post-hoc uncertainty calibration for domain drift scenarios, CVPR 2021.

    Args:
        bounds: smallest and largest temperature allowed.

    Example:
        >>> z = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
        >>> augmented = Features(torch.cat([z, z / 2]), groups=torch.tensor([0, 1, 2, 0, 1, 2]))
        >>> round(PerturbedTemperatureScaling().fit(augmented, [0, 0, 1, 0, 0, 1]).temperature_, 2)
        0.57
    """

    name: ClassVar[str] = "perturbed-temperature"
    uses_augmented: ClassVar[bool] = True

    def __init__(self, bounds: tuple[float, float] = BOUNDS) -> None:
        self.bounds = bounds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        weights = None
        if features.groups is None:
            warnings.warn(
                "features have no groups: fitted as plain temperature scaling, not on augmented samples",
                CalibrationWarning,
                stacklevel=3,
            )
        else:
            _, of, count = torch.unique(features.groups, return_inverse=True, return_counts=True)
            weights = (1 / count.double())[of]
        self.temperature_, self.at_bound_ = best_temperature(
            features.logits, labels, self.bounds, weights=weights
        )

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))


class EnsembleTemperatureScaling(Calibrator):
    """A mix of the tempered softmax, the raw softmax and the uniform distribution.

    ``p = w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c`` with weights on the simplex: the temperature is that
    of temperature scaling, the weights maximise the likelihood, so the fit is never worse than temperature
    scaling. Reference: Zhang et al., Mix-n-match, ICML 2020.

    Args:
        bounds: smallest and largest temperature allowed.

    Example:
        >>> f = Features(torch.eye(3).repeat(20, 1) * 4)
        >>> ets = EnsembleTemperatureScaling().fit(
        ...     f, torch.cat([torch.arange(3).repeat(15), torch.zeros(15, dtype=torch.long)])
        ... )
        >>> round(float(ets.weights_.sum()), 6)
        1.0
    """

    name: ClassVar[str] = "ensemble-temperature"

    def __init__(self, bounds: tuple[float, float] = BOUNDS) -> None:
        self.bounds = bounds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        self.temperature_, self.at_bound_ = best_temperature(features.logits, labels, self.bounds)
        parts = [_true_class(features.logits, labels, t) for t in (self.temperature_, 1.0)]
        uniform = torch.full_like(parts[0], 1 / features.n_classes)
        self.weights_ = mixture_weights(torch.stack([*parts, uniform], dim=1), (1, 0, 0))

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(
            features, ensemble_softmax(features.logits, self.temperature_, self.weights_)
        )


def ensemble_softmax(logits: Tensor, temperature: float | Tensor, weights: Tensor) -> Tensor:
    """``w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c``."""
    w = weights.tolist()
    mix = tempered_softmax(logits, temperature).mul_(w[0]).add_(tempered_softmax(logits, 1.0), alpha=w[1])
    return mix.add_(w[2] / logits.shape[1])


def _true_class(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Probability of the true class of the samples that have one, in double precision."""
    y = labels.clamp_min(0)[:, None]
    each = [
        tempered_softmax(logits[rows], temperature).gather(1, y[rows])[:, 0]
        for rows in row_chunks(*logits.shape)
    ]
    return torch.cat(each).double()[labels >= 0]


def mixture_weights(likelihood: Tensor, start: Sequence[float]) -> Tensor:
    """Weights on the simplex that maximise the mean of ``log(likelihood_i . w)``, a concave problem.

    Args:
        likelihood: ``(n, k)`` of each sample under each of ``k`` components.
        start: ``k`` weights to begin with, and to return where there are no samples.

    Example:
        >>> mixture_weights(torch.tensor([[0.9, 0.1], [0.2, 0.1]]), (0.5, 0.5)) > 0.99
        tensor([ True, False])
    """
    from scipy.optimize import minimize

    P = likelihood.cpu().numpy()
    first = np.array(start, dtype=float)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        mix = np.maximum(P @ w, np.finfo(float).tiny)
        return -float(np.log(mix).mean()), -(P / mix[:, None]).mean(axis=0)

    if len(P) == 0:
        return torch.tensor(first)
    one = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    how: Any = {"method": "SLSQP", "constraints": one, "options": {"ftol": 1e-12}}
    found = minimize(loss, first, jac=True, bounds=[(0, 1)] * len(first), **how)
    tell_unless_settled(found, "the search for the mixture's weights")
    w = np.clip(found.x, 0, 1) / np.clip(found.x, 0, 1).sum()
    return torch.tensor(w if loss(w)[0] <= loss(first)[0] else first)
