"""Affine maps of all logits: vector scaling, matrix scaling and Dirichlet calibration.

``p = softmax(W x + b)`` where ``x`` are the logits (vector: diagonal ``W``; matrix: full ``W``) or the
log-probabilities (Dirichlet). Full matrices overfit, so their off-diagonal entries and the intercept are
penalised (ODIR): ``mean NLL + l sum_{i != j} W_ij^2 / (c (c - 1)) + m sum_j b_j^2 / c``. All three can change
which class is largest; the prediction keeps the network's label, and `Prediction.flips` tells where another
class has overtaken it. References: Guo et al., ICML 2017; Kull et al., Beyond temperature scaling, NeurIPS
2019.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator
from salgp.calibrators.temperature import row_chunks, tempered_softmax
from salgp.features import Features
from salgp.logits import at_least_single
from salgp.prediction import Prediction

__all__ = ["DirichletCalibration", "MatrixScaling", "VectorScaling", "affine", "fit_affine"]

DIAGONAL_PENALTY = 1e-6
"""Pull of the diagonal towards 1: too weak to matter, except where separable data would drive it to infinity.
"""

MANY_PARAMETERS = 10**6
"""Beyond this the search stops at five digits of the loss: the penalties decide there, not the data."""


class VectorScaling(Calibrator):
    """A scale and an offset per class, ``softmax(w * z + b)``.

    Args:
        intercept_penalty: weight of ``mean(b^2)``; keeps a class that is absent from the labels at a finite
            offset.
        max_iterations: of the optimiser.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = torch.randn(500, 3, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(2 * z, 1), 1, generator=generator)[:, 0]
        >>> VectorScaling().fit(Features(z), labels).weight_.round()
        tensor([2., 2., 2.], dtype=torch.float64)
    """

    name: ClassVar[str] = "vector"

    def __init__(self, intercept_penalty: float = 1e-3, max_iterations: int = 500) -> None:
        self.intercept_penalty = intercept_penalty
        self.max_iterations = max_iterations

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        start = torch.ones(features.n_classes, dtype=torch.float64)
        penalty = torch.full_like(start, DIAGONAL_PENALTY / features.n_classes)
        self.weight_, self.bias_ = fit_affine(
            features.logits, labels, start, penalty, self.intercept_penalty, self.max_iterations
        )

    def _predict(self, features: Features) -> Prediction:
        return _affine_prediction(features, features.logits, self.weight_, self.bias_)


class MatrixScaling(Calibrator):
    """A full linear map of the logits, ``softmax(W z + b)``, with regularised off-diagonal entries and
    intercept.

    Args:
        off_diagonal_penalty: weight of the mean squared off-diagonal entry.
        intercept_penalty: weight of ``mean(b^2)``.
        max_iterations: of the optimiser.

    Example:
        >>> f = Features(torch.eye(3).repeat(40, 1) * 3)
        >>> labels = torch.arange(3).repeat(40)
        >>> labels[:30] = 0
        >>> MatrixScaling().fit(f, labels).weight_.shape
        torch.Size([3, 3])
    """

    name: ClassVar[str] = "matrix"

    def __init__(
        self, off_diagonal_penalty: float = 1.0, intercept_penalty: float = 1.0, max_iterations: int = 500
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.intercept_penalty = intercept_penalty
        self.max_iterations = max_iterations

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        penalties = (self.off_diagonal_penalty, self.intercept_penalty)
        self.weight_, self.bias_ = _fit_matrix(features.logits, labels, *penalties, self.max_iterations)

    def _predict(self, features: Features) -> Prediction:
        return _affine_prediction(features, features.logits, self.weight_, self.bias_)


class DirichletCalibration(Calibrator):
    """A full linear map of the log-probabilities, ``softmax(W log p + b)``, as if each class had
    Dirichlet-distributed ``p``.

    It sees what matrix scaling sees, without the arbitrary offset of each sample's logits.

    Args:
        off_diagonal_penalty: weight of the mean squared off-diagonal entry.
        intercept_penalty: weight of ``mean(b^2)``.
        max_iterations: of the optimiser.

    Example:
        >>> f = Features(torch.eye(3).repeat(40, 1) * 3)
        >>> labels = torch.arange(3).repeat(40)
        >>> labels[:30] = 0
        >>> shifted = Features(f.logits + 5)  # the same probabilities
        >>> a, b = (DirichletCalibration().fit(x, labels).predict(x).probs for x in (f, shifted))
        >>> bool(torch.allclose(a, b, atol=1e-5))
        True
    """

    name: ClassVar[str] = "dirichlet"

    def __init__(
        self, off_diagonal_penalty: float = 1.0, intercept_penalty: float = 1.0, max_iterations: int = 500
    ) -> None:
        self.off_diagonal_penalty = off_diagonal_penalty
        self.intercept_penalty = intercept_penalty
        self.max_iterations = max_iterations

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        penalties = (self.off_diagonal_penalty, self.intercept_penalty)
        self.weight_, self.bias_ = _fit_matrix(_log_probs(features), labels, *penalties, self.max_iterations)

    def _predict(self, features: Features) -> Prediction:
        return _affine_prediction(features, _log_probs(features), self.weight_, self.bias_)


def _log_probs(features: Features) -> Tensor:
    return torch.log_softmax(at_least_single(features.logits), dim=1)


def _affine_prediction(features: Features, x: Tensor, weight: Tensor, bias: Tensor) -> Prediction:
    dtype = torch.promote_types(x.dtype, torch.float32)
    W, b = weight.to(x.device, dtype), bias.to(x.device, dtype)
    return Prediction.from_probs(features, tempered_softmax(affine(x.to(dtype), W, b), 1.0))


def affine(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """``W x + b`` for each row; a vector ``W`` stands for a diagonal matrix.

    Example:
        >>> affine(torch.ones(1, 2), torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0]))
        tensor([[3., 3.]])
    """
    return x * W + b if W.ndim == 1 else torch.addmm(b, x, W.T)


def _fit_matrix(
    x: Tensor, labels: Tensor, off: float, intercept: float, max_iterations: int
) -> tuple[Tensor, Tensor]:
    """A full matrix with off-diagonal and intercept regularisation (ODIR)."""
    c = x.shape[1]
    start = torch.eye(c, dtype=torch.float64)
    penalty = torch.full_like(start, off / (c * (c - 1))).fill_diagonal_(DIAGONAL_PENALTY / c)
    return fit_affine(x, labels, start, penalty, intercept, max_iterations)


def fit_affine(
    x: Tensor,
    labels: Tensor,
    start: Tensor,
    penalty: Tensor,
    intercept: float,
    max_iterations: int,
    tolerance: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Weights and intercept of the smallest penalised negative log-likelihood of ``softmax(W x + b)``:
    ``mean NLL + sum penalty (W - start)^2 + intercept mean(b^2)``.

    Args:
        x: ``(n, c)``.
        labels: ``(n,)`` true classes; -1 is left out.
        start: ``(c, c)``, or ``(c,)`` for a diagonal matrix.
        penalty: of the shape of ``start``.
        intercept: weight of ``mean(b^2)``.
        max_iterations: of the optimiser.
        tolerance: relative change of the objective at which it stops.
    """
    c = x.shape[1]
    known = labels >= 0
    x, y = (x, labels) if bool(known.all()) else (x[known], labels[known])
    if len(x) == 0:
        warnings.warn(
            "no calibration sample has a known class: the map stays the identity",
            CalibrationWarning,
            stacklevel=4,
        )
        return start, torch.zeros(c, dtype=torch.float64)
    size = _root_mean_square(x) or 1.0  # parameters are scaled by it, so that large logits converge as fast

    def loss(flat: Tensor) -> tuple[float, Tensor]:
        W, b = flat[:-c].view_as(start) / size, flat[-c:]
        value, grad_W, grad_b = _nll_gradient(x, y, W.to(x.device), b.to(x.device))
        away = W - start
        value += float((penalty * away**2).sum() + intercept * (b**2).mean())
        slope_W, slope_b = grad_W.cpu() + 2 * penalty * away, grad_b.cpu() + 2 * intercept * b / c
        return value, torch.cat([(slope_W / size).flatten(), slope_b])

    begin = torch.cat([(start * size).flatten(), torch.zeros(c, dtype=torch.float64)])
    flat = _lbfgs(loss, begin, max_iterations, tolerance)
    return flat[:-c].view_as(start) / size, flat[-c:].clone()


def _root_mean_square(x: Tensor) -> float:
    """Of all entries, in double precision without a copy of them all."""
    return math.sqrt(sum(float(x[rows].double().pow(2).sum()) for rows in row_chunks(*x.shape)) / x.numel())


def _nll_gradient(x: Tensor, labels: Tensor, W: Tensor, b: Tensor) -> tuple[float, Tensor, Tensor]:
    """Mean negative log-likelihood of ``softmax(W x + b)`` and its gradient, in chunks of rows."""
    value, grad_W, grad_b = 0.0, torch.zeros_like(W), torch.zeros_like(b)
    for rows in row_chunks(*x.shape):
        z, y = x[rows].double(), labels[rows][:, None]
        log_p = torch.log_softmax(affine(z, W, b), dim=1)
        value -= float(log_p.gather(1, y).sum())
        error = log_p.exp_().scatter_add_(1, y, -torch.ones_like(y, dtype=z.dtype))  # p - onehot
        grad_W += (error * z).sum(dim=0) if W.ndim == 1 else error.T @ z
        grad_b += error.sum(dim=0)
    return value / len(x), grad_W / len(x), grad_b / len(x)


def _lbfgs(
    loss: Callable[[Tensor], tuple[float, Tensor]], start: Tensor, max_iterations: int, tolerance: float
) -> Tensor:
    """Minimise a smooth convex function with SciPy's L-BFGS; says so when it runs out of iterations.

    Few parameters are followed to the end, so that the result does not tell on which machine it was found.
    """
    from scipy.optimize import minimize

    def evaluate(flat: np.ndarray) -> tuple[float, np.ndarray]:
        value, gradient = loss(torch.from_numpy(flat))
        return value, gradient.cpu().numpy()

    many = start.numel() > MANY_PARAMETERS
    options = {
        "maxiter": max_iterations,
        "maxfun": 2 * max_iterations,
        "ftol": 1e-5 if many else tolerance,
        "gtol": 1e-7 if many else 1e-10,
        "maxcor": 3 if many else 20,
    }
    found = minimize(evaluate, start.numpy(), jac=True, method="L-BFGS-B", options=options)
    if found.nit >= max_iterations:
        warnings.warn(
            f"no convergence in {max_iterations} iterations; raise max_iterations or the penalties",
            CalibrationWarning,
            stacklevel=5,
        )
    return torch.tensor(found.x)
