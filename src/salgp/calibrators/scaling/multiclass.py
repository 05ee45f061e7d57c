"""Affine maps of all logits: vector scaling, matrix scaling and Dirichlet calibration.

``p = softmax(W x + b)`` where ``x`` are the logits (vector: diagonal ``W``; matrix: full ``W``) or the
log-probabilities (Dirichlet). Full matrices overfit, so their off-diagonal entries and the intercept are
penalised (ODIR): ``mean NLL + l sum_{i != j} W_ij^2 / (c (c - 1)) + m sum_j b_j^2 / c``. All three can change
which class is largest; the prediction keeps the network's label, and `Prediction.flips` tells where another
class has overtaken it. References: Guo et al., ICML 2017; Kull et al., Beyond temperature scaling, NeurIPS
2019.

Stacked scaling: a mixture of simple calibration maps, weighted by cross-validation.

    p' = sum_k w_k softmax(W_k log p + b_k)

No one map is best for every classifier: a forest wants another than a network, ten classes another than two.
The components are the classifier's own probabilities (``W = 1``), equal ones (``W = 0``), temperature scaling
(``W = 1 / T``) and one matrix scaling for each prior width: Gaussian priors hold the entries of ``W`` near
temperature scaling and ``b`` near 0. The weights maximise the likelihood of samples that the components were
not fitted to, so a map that overfits gets none. With two classes a matrix is beta calibration.

References: Wolpert, Stacked generalization, 1992; Zhang et al., Mix-n-match, ICML 2020; Kull et al., Beyond
temperature scaling, NeurIPS 2019.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator, Training
from salgp.calibrators.scaling.temperature import mixture_weights
from salgp.features import Features
from salgp.logits import at_class, at_least_single, best_temperature, row_chunks, tempered_softmax
from salgp.prediction import Prediction

__all__ = []

DIAGONAL_PENALTY = 1e-6
"""Pull of the diagonal towards 1: too weak to matter, except where separable data would drive it to infinity.
"""

MANY_PARAMETERS = 10**6
"""Beyond this the search stops at five digits of the loss: the penalties decide there, not the data."""


class AffineScaling(Calibrator):
    """Predicts ``softmax(W x + b)``, with ``W`` in ``weight_`` and ``b`` in ``bias_``."""

    def _inputs(self, features: Features) -> Tensor:
        return features.logits

    def _predict(self, features: Features) -> Prediction:
        x = at_least_single(self._inputs(features))
        return Prediction.from_probs(features, affine_softmax(x, self.weight_, self.bias_))


@dataclass(repr=False, eq=False)
class VectorScaling(AffineScaling):
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

    intercept_penalty: float = 1e-3
    max_iterations: int = 500

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        start = torch.ones(features.n_classes, dtype=torch.float64)
        penalty = torch.full_like(start, DIAGONAL_PENALTY / features.n_classes)
        penalties = penalty, self.intercept_penalty
        self.weight_, self.bias_ = fit_affine(features.logits, labels, start, *penalties, self.max_iterations)


@dataclass(repr=False, eq=False)
class MatrixScaling(AffineScaling):
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

    off_diagonal_penalty: float = 1.0
    intercept_penalty: float = 1.0
    max_iterations: int = 500

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        c = features.n_classes
        start = torch.eye(c, dtype=torch.float64)
        off_diagonal = torch.full_like(start, self.off_diagonal_penalty / (c * c - c))
        penalty = off_diagonal.fill_diagonal_(DIAGONAL_PENALTY / c)
        options = penalty, self.intercept_penalty, self.max_iterations
        x = self._inputs(features)
        self.weight_, self.bias_ = fit_affine(x, labels, start, *options)


@dataclass(repr=False, eq=False)
class DirichletCalibration(MatrixScaling):
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

    def _inputs(self, features: Features) -> Tensor:
        return _log_probs(features)


def _log_probs(features: Features) -> Tensor:
    return torch.log_softmax(at_least_single(features.logits), dim=1)


def affine(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """``W x + b`` for each row; a vector ``W`` stands for a diagonal matrix.

    Example:
        >>> affine(torch.ones(1, 2), torch.tensor([2.0, 3.0]), torch.tensor([1.0, 0.0]))
        tensor([[3., 3.]])
    """
    return x * W + b if W.ndim == 1 else torch.addmm(b, x, W.T)


def affine_softmax(x: Tensor, W: Tensor, b: Tensor) -> Tensor:
    """``softmax(W x + b)`` of each row, in the precision of ``x``."""
    return tempered_softmax(affine(x, W.to(x), b.to(x)), 1.0)


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
    c, known = x.shape[1], labels >= 0
    if not known.all():
        x, labels = x[known], labels[known]
    zero = start.new_zeros(c)
    if not len(x):
        why = "no calibration sample has a known class: the map stays the identity"
        warnings.warn(why, CalibrationWarning, stacklevel=4)
        return start, zero
    size = _root_mean_square(x) or 1.0  # parameters are scaled by it, so that large logits converge as fast

    sizes = [start.numel(), c]

    def unpack(flat: np.ndarray) -> tuple[Tensor, Tensor]:
        W, b = torch.tensor(flat).split(sizes)
        return W.view_as(start) / size, b

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        W, b = unpack(flat)
        value, slope_W, slope_b = _nll_gradient(x, labels, W, b)
        away = W - start
        of_weights = (penalty * away**2).sum()
        value += float(of_weights + intercept * (b**2).mean())
        slope_W = slope_W.cpu() + 2 * penalty * away
        slope_b = slope_b.cpu() + 2 * intercept * b / c
        slope = torch.cat([(slope_W / size).flatten(), slope_b])
        return value, slope.numpy()

    begin = torch.cat([(start * size).flatten(), zero])
    W, b = unpack(_lbfgs(loss, begin.numpy(), max_iterations, tolerance))
    return W, b.clone()


def _root_mean_square(x: Tensor) -> float:
    """Of all entries, in double precision without a copy of them all."""
    total = sum(float(x[rows].double().pow(2).sum()) for rows in row_chunks(*x.shape))
    return math.sqrt(total / x.numel())


def _nll_gradient(x: Tensor, labels: Tensor, W: Tensor, b: Tensor) -> tuple[float, Tensor, Tensor]:
    """Mean negative log-likelihood of ``softmax(W x + b)`` and its gradient, in chunks of rows."""
    n, value = len(x), 0.0
    W, b = W.to(x.device), b.to(x.device)
    grad_W, grad_b = torch.zeros_like(W), torch.zeros_like(b)
    for rows in row_chunks(*x.shape):
        z, y = x[rows].double(), labels[rows, None]
        log_p = torch.log_softmax(affine(z, W, b), dim=1)
        value -= float(log_p.gather(1, y).sum())
        minus_one = torch.full_like(y, -1, dtype=z.dtype)
        error = log_p.exp_().scatter_add_(1, y, minus_one)  # p - onehot
        grad_W += (error * z).sum(dim=0) if W.ndim == 1 else error.T @ z
        grad_b += error.sum(dim=0)
    return value / n, grad_W / n, grad_b / n


def _lbfgs(loss: Callable[..., Any], start: np.ndarray, max_iterations: int, tolerance: float) -> np.ndarray:
    """Minimise a smooth convex function with SciPy's L-BFGS; says so when it runs out of iterations.

    Few parameters are followed to the end, so that the result does not tell on which machine it was found.
    """
    from scipy.optimize import minimize

    options = {"ftol": tolerance, "gtol": 1e-10, "maxcor": 20}
    if start.size > MANY_PARAMETERS:
        options = {"ftol": 1e-5, "gtol": 1e-7, "maxcor": 3}
    options |= {"maxiter": max_iterations, "maxfun": 2 * max_iterations}
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    if found.nit >= max_iterations:
        why = f"no convergence in {max_iterations} iterations; raise max_iterations or the penalties"
        warnings.warn(why, CalibrationWarning, stacklevel=5)
    return found.x


LARGEST = 2**17
"""Numbers of the calibration set that maps are fitted to; more change nothing that could be measured."""
ITERATIONS = 500
"""Of the optimiser, for each map."""
WIDTHS = (0.3, 3.0)
"""Prior standard deviations of what a map may add to a logit; one matrix scaling for each."""
FOLDS = 5
"""Of the cross-validation."""
TEMPERATURE = 2
"""Place of temperature scaling among the components."""

Map = tuple[Tensor, Tensor]
"""Weight, ``(c, c)`` or ``(c,)`` for a diagonal matrix, and intercept ``(c,)``."""


class StackedScaling(Calibrator):
    """A mixture of the raw, equal, temperature-scaled and matrix-scaled probabilities, by cross-validation.

    Matrices need ``c^2`` samples, diagonal ones ``4 c``; with fewer the mixture is one of raw, equal and
    temperature-scaled probabilities, and with fewer than two per fold it is temperature scaling.

    Attributes:
        weights_: ``(k,)`` of the components: raw, equal, temperature, and one for each of `WIDTHS`.
        maps_: ``W`` and ``b`` of each component.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(600, 3, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]
        >>> stacked = StackedScaling().fit(Features(z), labels)
        >>> bool((stacked.weights_ >= 0).all()), len(stacked.maps_)
        (True, 5)
    """

    name: ClassVar[str] = "stacked"
    display_name: ClassVar[str] = "stacked scaling"

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        known = labels >= 0
        x, y = _log_probs(features)[known], labels[known]
        order = _sorted(x, y)  # so that the result depends on no order of samples or classes
        x, y = x[order], y[order]
        temperature, _ = best_temperature(x, y)
        identity = _identity(*x.shape)
        if identity is not None:
            step = math.ceil(x.numel() / LARGEST)
            x, y = x[::step], y[::step]
        maps = _maps(x, y, temperature, identity)
        likelihood = _left_out(x, y, identity, len(maps))
        equal = [1 / len(maps)] * len(maps)
        alone = np.eye(len(maps))[TEMPERATURE].tolist()
        self.weights_ = mixture_weights(likelihood, equal if len(likelihood) else alone)
        self.maps_ = [[W.cpu(), b.cpu()] for W, b in maps]

    def _predict(self, features: Features) -> Prediction:
        x = _log_probs(features)
        mixed = torch.zeros_like(x)
        for w, p in zip(self.weights_.tolist(), _components(x, self.maps_), strict=True):
            mixed = mixed + w * p
        return Prediction.from_probs(features, mixed)


def _left_out(x: Tensor, y: Tensor, identity: Tensor | None, n_maps: int) -> Tensor:
    """``(n, k)`` probability of the true class under components that were fitted to other folds."""
    fold = torch.arange(len(y), device=x.device) % FOLDS
    found = [x.new_zeros(0, n_maps).double()]
    for k in range(FOLDS if len(y) >= 2 * FOLDS else 0):
        rest, out = fold != k, fold == k
        temperature = best_temperature(x[rest], y[rest])[0]
        maps = _maps(x[rest], y[rest], temperature, identity)
        each = [at_class(p, y[out]) for p in _components(x[out], maps)]
        found.append(torch.stack(each, dim=1).double())
    return torch.cat(found)


def _sorted(x: Tensor, y: Tensor) -> Tensor:
    """Rows by the likelihood of their true class and then by their largest numbers, whatever their order."""
    largest = x.sort(1, descending=True).values[:, :8]
    own = x.gather(1, y[:, None])
    keys = torch.cat([largest, own], dim=1).T.cpu().numpy()
    return torch.from_numpy(np.lexsort(keys)).to(x.device)


def _identity(n: int, c: int) -> Tensor | None:
    """The identity as a matrix or as a diagonal, as many parameters as the samples can tell, or None."""
    n = min(n, LARGEST // c)
    if c * c <= n:
        return torch.eye(c).double()
    return torch.ones(c).double() if 4 * c <= n else None


def _maps(x: Tensor, y: Tensor, temperature: float, identity: Tensor | None) -> list[Map]:
    """Raw, equal and temperature-scaled probabilities, and an affine map for each prior width."""
    n, c = x.shape
    zero = torch.zeros(c, dtype=torch.float64)
    maps = [(torch.full_like(zero, scale), zero) for scale in (1.0, 0.0, 1 / temperature)]
    if identity is None or not n:
        return maps
    z = x.double() / temperature
    centred = z - z.mean(dim=1, keepdim=True)
    size = float(centred.abs().mean())
    for width in WIDTHS:
        precision = 1 / (2 * n * width**2)  # of a Gaussian prior, in units of the mean likelihood
        penalty = torch.full_like(identity, precision * size**2)
        W, b = fit_affine(z, y, identity, penalty, c * precision, ITERATIONS, 1e-9)
        maps.append((W / temperature, b))
    return maps


def _components(x: Tensor, maps: Iterable[Sequence[Tensor]]) -> Iterator[Tensor]:
    """Probabilities ``(n, c)`` by each map."""
    return (affine_softmax(x, W, b) for W, b in maps)
