"""One latent function for every logit: Gaussian process calibration after Wenger et al.

A function ``g`` with a Gaussian process prior, mean ``g(z) = z``, is applied to each logit, ``p =
softmax(g(z))``. With inducing points ``u`` and whitened values ``v ~ N(0, I)`` it is ``g(z) = z + a(z) . v``,
``a(z) = Luu^-1 k(u, z)``. The posterior ``q(v) = N(m, S)`` maximises the evidence lower bound with the
expected log-likelihood expanded to second order around ``m``: then ``m`` is the optimum of a concave function
of few variables (Newton), ``S = (I + H)^-1`` with the curvature ``H`` there, and the bound chooses amplitude
and length-scale. Cost is linear in samples and classes. Reference: Wenger, Kjellstrom and Triebel,
Non-parametric calibration for classification, AISTATS 2020.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator, Training
from salgp.features import Features
from salgp.gp import linalg
from salgp.gp.linalg import cholesky
from salgp.logits import at_class, at_least_single, best_temperature, row_chunks
from salgp.prediction import INTERVAL_SD, Prediction

__all__ = []

AMPLITUDES = (0.3, 1.0, 3.0, 10.0)
"""Prior standard deviations of ``g(z) - z`` that the bound chooses from, in logits; smaller ones would claim
more than few samples can show.
"""
LENGTHSCALES = (0.2, 0.5, 1.0)
"""Length-scales it chooses from, as shares of the range of the inducing points."""
LEAST_JITTER = 1e-6
"""Smallest jitter of the inducing points' covariance: they are close together on a line."""
SCALES = (0.1, 10.0)
"""Temperatures that the amplitudes suit, which are in logits; logits of any other are divided by theirs."""
SEARCH_ELEMENTS = 2**18
"""Logits (samples times classes) used to choose them; the posterior itself always uses all."""


@dataclass(repr=False, eq=False)
class GPCalibration(Calibrator):
    """A Gaussian process on single logits, shared by all classes, with a softmax likelihood.

    The predicted probabilities and the standard deviation of the confidence average over the posterior of
    ``g`` (with the ``2 m`` points of a cubature rule, so nothing is random). ``g`` need not be monotone:
    where another class overtakes the label, `Prediction.flips` says so.

    Args:
        n_inducing: number of inducing points, evenly spaced over the range of the logits.

    Attributes:
        scale_: what the logits are divided by; 1 where their temperature is within `SCALES`.
        inducing_: ``(m,)`` inducing logits.
        amplitude_: prior standard deviation of ``g(z) - z``.
        lengthscale_: of the kernel, in logits.
        mean_: ``(m,)`` posterior mean of the whitened values.
        cov_: ``(m, m)`` their posterior covariance.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(400, 3, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z / 3, 1), 1, generator=generator)[:, 0]
        >>> p = GPCalibration().fit(Features(z), labels).predict(Features(z))
        >>> bool(p.confidence.mean() < Features(z).confidence.mean() - 0.1)  # it was overconfident
        True
    """

    name: ClassVar[str] = "latent-gp"

    n_inducing: int = 10

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        known = labels >= 0
        y = labels[known]
        self.scale_ = _scale(features.logits[known], y)
        logits = features.logits / self.scale_
        z = logits[known]
        if len(z) == 0:
            why = "no calibration sample has a known class: the posterior is the prior"
            warnings.warn(why, CalibrationWarning, stacklevel=3)
        u = _inducing_points(logits, self.n_inducing)
        basis = _choose_basis(*_spread_subset(z, y), u)
        found = _posterior(z, y, basis)
        self.amplitude_, self.lengthscale_ = basis.amplitude, basis.lengthscale
        self.inducing_, self.mean_, self.cov_ = u, found.mean, found.cov

    def _predict(self, features: Features) -> Prediction:
        basis = _basis(self.inducing_, self.amplitude_, self.lengthscale_)
        points = _cubature(self.mean_, self.cov_)
        probs = torch.zeros_like(at_least_single(features.logits))
        spread = probs.new_zeros(len(features))
        for rows in row_chunks(len(features), features.n_classes * self.n_inducing):
            z = features.logits[rows].double() / self.scale_
            probs[rows], spread[rows] = _mean_and_std(z, features.label[rows], basis, points)
        tiny = torch.finfo(probs.dtype).tiny
        mean = Prediction.from_probs(features, probs.clamp_(min=tiny))
        half = INTERVAL_SD * spread
        lower = (mean.confidence - half).clamp(0, 1)
        upper = (mean.confidence + half).clamp(0, 1)
        return replace(mean, std=spread, lower=lower, upper=upper)


@dataclass(frozen=True)
class _Basis:
    """``a(z) = Luu^-1 k(u, z)`` with a squared exponential kernel."""

    inducing: Tensor
    amplitude: float
    lengthscale: float
    whiten: Tensor  # (m, m) Luu^-1

    def __call__(self, z: Tensor) -> Tensor:
        """Basis functions at every entry of ``z``, shape ``(*z.shape, m)``."""
        return _kernel(z, self.inducing, self.amplitude, self.lengthscale) @ self.whiten.T


def _basis(inducing: Tensor, amplitude: float, lengthscale: float) -> _Basis:
    Kuu = _kernel(inducing, inducing, amplitude, lengthscale)
    whiten = linalg.lower_inverse(cholesky(Kuu, start=LEAST_JITTER))
    return _Basis(inducing, amplitude, lengthscale, whiten)


def _kernel(z: Tensor, inducing: Tensor, amplitude: float, lengthscale: float) -> Tensor:
    return ((z[..., None] - inducing) / lengthscale).square_().mul_(-0.5).exp_().mul_(amplitude**2)


Chunk = tuple[Tensor, Tensor, Tensor]
"""Logits ``(b, c)``, labels ``(b, 1)`` and basis functions ``(b, c, m)`` of some samples."""


def _chunks(logits: Tensor, labels: Tensor, basis: _Basis) -> Iterator[Chunk]:
    n, c = logits.shape
    for rows in row_chunks(n, c * len(basis.inducing)):
        z = logits[rows].double()
        yield z, labels[rows][:, None], basis(z)


@dataclass(frozen=True)
class _Posterior:
    mean: Tensor
    cov: Tensor
    bound: float


def _inducing_points(logits: Tensor, m: int) -> Tensor:
    """Evenly spaced from the median smallest logit of a sample to nearly the largest of all."""
    if m < 2:
        raise ValueError(f"n_inducing must be at least 2, got {m}")
    low = float(logits.amin(1).double().median())
    top = logits.amax(1).double().sort().values
    high = max(float(top[int(0.99 * (len(top) - 1))]), low + 1e-3)
    return torch.linspace(low, high, m, dtype=torch.float64, device=logits.device)


def _spread_subset(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Rows evenly spread over the order of their largest logit, few enough for the search."""
    most = max(SEARCH_ELEMENTS // logits.shape[1], 50)
    if len(logits) <= most:
        return logits, labels
    order = logits.amax(dim=1).argsort(stable=True)
    rows = order[torch.linspace(0, len(order) - 1, most, device=order.device).long()]
    return logits[rows], labels[rows]


def _choose_basis(logits: Tensor, labels: Tensor, u: Tensor) -> _Basis:
    """Amplitude and length-scale of the largest evidence bound."""
    width = float(u[-1] - u[0])
    tried = [_basis(u, amplitude, share * width) for amplitude in AMPLITUDES for share in LENGTHSCALES]
    return max(tried, key=lambda basis: _posterior(logits, labels, basis).bound)


def _posterior(logits: Tensor, labels: Tensor, basis: _Basis) -> _Posterior:
    """Newton iterations to the mean; covariance and evidence bound there."""
    kept = list(_chunks(logits, labels, basis)) if logits.numel() <= SEARCH_ELEMENTS else None

    def objective(v: Tensor) -> tuple[float, Tensor, Tensor, float]:
        chunks = _chunks(logits, labels, basis) if kept is None else kept
        return _objective(chunks, basis.amplitude, v)

    v = torch.zeros_like(basis.inducing)
    value, gradient, curvature, slack = objective(v)
    for _ in range(50):
        step = linalg.solve_positive(curvature, gradient)
        if float(gradient @ step) < 1e-8 * (1 + abs(value)):
            break
        start, least = v, value
        for halving in range(30):
            v = start + step * 0.5**halving
            value, gradient, curvature, slack = objective(v)
            if value >= least:
                break
    L = cholesky(curvature)
    bound = value - slack - 0.5 * float(linalg.log_determinant(L))
    return _Posterior(v, linalg.inverse_positive(L), bound)


def _objective(chunks: Iterable[Chunk], amplitude: float, v: Tensor) -> tuple[float, Tensor, Tensor, float]:
    """Log-likelihood plus log-prior at ``v``, its gradient, its negative Hessian, and the bound's loss to
    residual variance.
    """
    m = len(v)
    value, slack = -0.5 * float(v @ v), 0.0
    gradient, curvature = -v, linalg.eye_like(v)
    for z, y, A in chunks:
        log_p = torch.log_softmax(z + A @ v, dim=1)
        p = log_p.exp()
        mean = torch.einsum("bk,bkm->bm", p, A)
        true = A.take_along_dim(y[..., None], 1)[:, 0]
        value += float(log_p.gather(1, y).sum())
        gradient = gradient + (true - mean).sum(dim=0)
        flat = A.reshape(-1, m)
        weighted = flat * p.reshape(-1, 1)
        curvature += flat.T @ weighted - mean.T @ mean
        unexplained = amplitude**2 - A.square().sum(dim=2)
        loss = p * (1 - p) * unexplained.clamp_min(0)
        slack += 0.5 * float(loss.sum())
    return value, gradient, curvature, slack


def _cubature(mean: Tensor, cov: Tensor) -> Tensor:
    """``(2 m, m)`` equally weighted points with the given mean and covariance."""
    L = cholesky(cov) * math.sqrt(len(mean))
    return torch.cat([mean + L.T, mean - L.T])


def _mean_and_std(z: Tensor, label: Tensor, basis: _Basis, points: Tensor) -> tuple[Tensor, Tensor]:
    """Mean of ``softmax(g(z))`` over the points, and the standard deviation of the label's entry."""
    A = basis(z)
    total, confidences = torch.zeros_like(z), []
    for v in points:
        p = torch.softmax(z + A @ v, dim=1)
        total += p
        confidences.append(at_class(p, label))
    std = torch.stack(confidences).std(dim=0, correction=0)
    return total / len(points), std


def _scale(z: Tensor, y: Tensor) -> float:
    """Temperature of the logits where it lies outside `SCALES`; 1 elsewhere, and where they have none."""
    size = float(z.double().square().mean().sqrt())
    if not size > 0.0:
        return 1.0
    temperature, at_bound = best_temperature(at_least_single(z) / size, y)
    suits = SCALES[0] <= temperature * size <= SCALES[1]
    return 1.0 if at_bound or suits else temperature * size
