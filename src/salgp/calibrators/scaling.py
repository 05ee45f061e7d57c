"""One number for all logits: temperature scaling and its relatives.

Temperature scaling divides every logit by ``T > 0``, ``p = softmax(z / T)``: ``T > 1`` lowers confidence, ``T < 1``
raises it, the label stays. In the inverse temperature ``b = 1 / T`` the negative log-likelihood is convex, with slope
``E_p[z] - z_y`` and curvature ``Var_p[z]`` per sample, so a safeguarded Newton iteration finds the one optimum from
any start and cannot leave the bounds. Reference: Guo et al., On calibration of modern neural networks, ICML 2017.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = [
    "EnsembleTemperatureScaling",
    "PerturbedTemperatureScaling",
    "TemperatureScaling",
    "Uncalibrated",
    "best_temperature",
    "row_chunks",
    "tempered_softmax",
]

BOUNDS = (0.05, 20.0)
"""Smallest and largest temperature looked for, unless told otherwise."""


class Uncalibrated(Calibrator):
    """The network's own softmax, unchanged: the baseline of every comparison.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> Uncalibrated().fit(f, [0, 1]).predict(f).confidence
        tensor([0.8808, 0.7311])
    """

    name: ClassVar[str] = "uncalibrated"

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        pass

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, 1.0))


class TemperatureScaling(Calibrator):
    """One temperature for all logits, by maximum likelihood on the calibration set.

    ``p = softmax(z / T)`` with ``T = temperature_``. Samples of an unknown class (-1) have no likelihood and are left
    out. Where every calibration sample is correct, the likelihood rises for ever as ``T -> 0``; the temperature then
    stays at its bound, ``at_bound_`` is true and a `CalibrationWarning` says so.

    Args:
        init: temperature to start from. The problem is convex, so ``"newton"`` gives the same answer for every start.
        bounds: smallest and largest temperature allowed.
        optimizer: ``"newton"`` runs to the optimum; ``"gradient"`` takes a fixed number of plain gradient steps on
            ``T``, as many published scripts do, and stops early where the likelihood is flat: its result depends on ``init``.
        steps: number of gradient steps (``"gradient"`` only).
        lr: length of a gradient step (``"gradient"`` only).

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

    def __init__(
        self,
        init: float = 1.0,
        bounds: tuple[float, float] = BOUNDS,
        optimizer: Literal["newton", "gradient"] = "newton",
        steps: int = 50,
        lr: float = 0.01,
    ) -> None:
        self.init = init
        self.bounds = bounds
        self.optimizer = optimizer
        self.steps = steps
        self.lr = lr

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.optimizer not in ("newton", "gradient"):
            raise ValueError(f"optimizer must be 'newton' or 'gradient', got {self.optimizer!r}")
        if self.optimizer == "newton":
            self.temperature_, self.at_bound_ = best_temperature(features.logits, labels, self.bounds, self.init)
        else:
            self.temperature_ = _gradient_steps(features.logits, labels, self.bounds, self.init, self.steps, self.lr)
            self.at_bound_ = self.temperature_ in tuple(self.bounds)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))


class PerturbedTemperatureScaling(Calibrator):
    """Temperature scaling fitted on perturbed copies of the calibration set, for use under shift.

    The network's input is repeated under noise of several strengths before the features are taken, so that the
    calibration set holds samples the network gets wrong; the temperature is the maximum likelihood one of all copies.
    Give it `Features` with ``groups``, where copies of one sample share a number: every original sample then counts
    the same, however many copies it has. Without ``groups`` there are no copies to speak of, and a warning says so.
    Reference: Tomani et al., Post-hoc uncertainty calibration for domain drift scenarios, CVPR 2021.

    Args:
        bounds: smallest and largest temperature allowed.

    Example:
        >>> z = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
        >>> copies = Features(torch.cat([z, z / 2]), groups=torch.tensor([0, 1, 2, 0, 1, 2]))
        >>> round(PerturbedTemperatureScaling().fit(copies, [0, 0, 1, 0, 0, 1]).temperature_, 2)
        0.57
    """

    name: ClassVar[str] = "perturbed-temperature"
    uses_copies: ClassVar[bool] = True

    def __init__(self, bounds: tuple[float, float] = BOUNDS) -> None:
        self.bounds = bounds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        weights = None
        if features.groups is None:
            warnings.warn("features have no groups: fitted as plain temperature scaling, not on perturbed copies", CalibrationWarning, stacklevel=3)
        else:
            _, of, count = torch.unique(features.groups, return_inverse=True, return_counts=True)
            weights = (1 / count.double())[of]
        self.temperature_, self.at_bound_ = best_temperature(features.logits, labels, self.bounds, weights=weights)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))


class EnsembleTemperatureScaling(Calibrator):
    """A mix of the tempered softmax, the raw softmax and the uniform distribution.

    ``p = w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c`` with weights on the simplex: the temperature is that of
    temperature scaling, the weights maximise the likelihood, so the fit is never worse than temperature scaling.
    Reference: Zhang et al., Mix-n-match, ICML 2020.

    Args:
        bounds: smallest and largest temperature allowed.

    Example:
        >>> f = Features(torch.eye(3).repeat(20, 1) * 4)
        >>> ets = EnsembleTemperatureScaling().fit(f, torch.cat([torch.arange(3).repeat(15), torch.zeros(15, dtype=torch.long)]))
        >>> round(float(ets.weights_.sum()), 6)
        1.0
    """

    name: ClassVar[str] = "ensemble-temperature"

    def __init__(self, bounds: tuple[float, float] = BOUNDS) -> None:
        self.bounds = bounds

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        self.temperature_, self.at_bound_ = best_temperature(features.logits, labels, self.bounds)
        known = labels >= 0
        parts = [_true_class(features.logits[known], labels[known], t) for t in (self.temperature_, 1.0)]
        uniform = torch.full_like(parts[0], 1 / features.n_classes)
        self.weights_ = _mixture_weights(torch.stack([*parts, uniform], dim=1))

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, ensemble_softmax(features.logits, self.temperature_, self.weights_))


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
    if isinstance(temperature, Tensor) or temperature != 1.0:
        z = z / temperature
    return torch.softmax(z, dim=1).clamp_(min=torch.finfo(z.dtype).tiny)


def ensemble_softmax(logits: Tensor, temperature: float | Tensor, weights: Tensor) -> Tensor:
    """``w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c``."""
    w = weights.tolist()
    mix = tempered_softmax(logits, temperature).mul_(w[0]).add_(tempered_softmax(logits, 1.0), alpha=w[1])
    return mix.add_(w[2] / logits.shape[1])


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
        warnings.warn("no calibration sample has a known class: the temperature stays 1", CalibrationWarning, stacklevel=4)
        return 1.0, False
    inverse, end = _safeguarded_newton(lambda b: _slope(logits, labels, b, weights), 1 / high, 1 / low, 1 / init)
    if end and warn:
        why = "every calibration sample is correct" if inverse >= 1 / low else "the confidences tell nothing about which samples are correct"
        warnings.warn(f"the temperature stopped at its bound {1 / inverse:g} ({why}?); calibrate on held-out data", CalibrationWarning, stacklevel=4)
    return 1 / inverse, end


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
    for rows in row_chunks(*logits.shape):
        y = labels[rows]
        z = logits[rows] if logits.dtype.itemsize >= 4 else logits[rows].float()
        z = z - z.amax(dim=1, keepdim=True)
        p = torch.softmax(z * inverse, dim=1)
        pz = p * z
        mean = pz.sum(dim=1)
        each = torch.stack([mean - z.gather(1, y.clamp_min(0)[:, None])[:, 0], torch.linalg.vecdot(pz, z) - mean**2])
        w = (y >= 0).double() if weights is None else weights[rows] * (y >= 0)
        total += (each.double() * w).sum(dim=1)
    slope, curvature = total.tolist()
    return slope, curvature


def _safeguarded_newton(slope: Callable[[float], tuple[float, float]], low: float, high: float, start: float) -> tuple[float, bool]:
    """Root of an increasing function in [low, high]; the second value says that an end was returned for want of a root.

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


def _bracketed_newton(slope: Callable[[float], tuple[float, float]], low: float, high: float, x: float) -> float:
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


def _gradient_steps(logits: Tensor, labels: Tensor, bounds: tuple[float, float], init: float, steps: int, lr: float) -> float:
    """Plain gradient descent on the mean negative log-likelihood as a function of ``T``."""
    n = max(int((labels >= 0).sum()), 1)
    t = init
    for _ in range(steps):
        slope = _slope(logits, labels, 1 / t, None)[0] / n  # d NLL / d (1/T); d (1/T) / dT = -1 / T^2
        t = min(max(t + lr * slope / t**2, bounds[0]), bounds[1])
    return t


def _true_class(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Probability of the true class, ``(n,)``, in double precision."""
    parts = [tempered_softmax(logits[rows], temperature).gather(1, labels[rows][:, None])[:, 0].double() for rows in row_chunks(*logits.shape)]
    return torch.cat(parts) if parts else logits.new_zeros(0, dtype=torch.float64)


def _mixture_weights(likelihood: Tensor) -> Tensor:
    """Weights on the simplex that maximise the mean of ``log(likelihood_i . w)``, a concave problem."""
    from scipy.optimize import minimize

    P = likelihood.cpu().numpy()
    start = np.array([1.0, 0.0, 0.0])

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        mix = np.maximum(P @ w, np.finfo(float).tiny)
        return -float(np.log(mix).mean()), -(P / mix[:, None]).mean(axis=0)

    if len(P) == 0:
        return torch.tensor(start)
    one = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    found = minimize(loss, start, jac=True, method="SLSQP", bounds=[(0, 1)] * 3, constraints=one, options={"ftol": 1e-12})
    w = np.clip(found.x, 0, 1) / np.clip(found.x, 0, 1).sum()
    return torch.tensor(w if loss(w)[0] <= loss(start)[0] else start)
