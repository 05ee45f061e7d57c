"""Probabilities of all classes from logits and layers together, for prediction sets.

A confidence is the probability of one class, the network's label. A set needs all classes on equal terms.
With ``z`` the logits, ``T`` the temperature and ``d_lc`` the distance at layer ``l`` to the nearest reference
point of class ``c``,

    q_c  proportional to  exp(b z_c / T - sum_l w_l log d_lc),      b, w_l >= 0.

``b`` and the weights are those of the largest likelihood on the calibration samples under a prior that pulls
``b`` to 1 and each weight to 0. Where distances add nothing, ``q`` is temperature scaling.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.evidence.layer_spaces import LARGEST, Reference, coordinates, squared_distances
from salgp.features import Features
from salgp.gp.linalg import one_blas_thread
from salgp.gp.optimise import warn_unless_converged
from salgp.io import storable

__all__ = []

ENTRIES = 4_000_000
"""Distances held at once, and all that a fit looks at: it has a few weights to find and needs no more."""
SLOPE_PRECISION, WEIGHT_RATE = 2.0, 0.5
"""Precision of the slope around 1, and rate of each weight's exponential prior, per standard deviation."""


@storable
@dataclass(frozen=True, eq=False)
class ClassModel:
    """Class probabilities from logits and layers.

    Args:
        slope: ``b / T``, of the logits.
        weights: ``(L,)`` of the layers' log distances.
    """

    slope: float
    weights: Tensor

    def __call__(self, logits: Tensor, distance: Tensor) -> Tensor:
        """Probabilities ``(n, c)`` from logits and `class_log_distances` ``(L, n, c)``."""
        against = torch.tensordot(self.weights.to(distance), distance, dims=1)
        return torch.softmax(self.slope * logits.to(distance) - against, dim=1)


def class_log_distances(reference: Reference, features: Features) -> Tensor:
    """Log distance to each class at each layer, from that of the nearest class on, ``(L, n, c)``.

    A class without reference points is as far as the others are on average.

    Example:
        >>> from salgp.calibrators.evidence.layer_spaces import make_reference
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]))
        >>> class_log_distances(reference, Features(x, {"a": x})).argmin(dim=2)
        tensor([[0, 0, 1, 1]])
    """
    x, _ = coordinates(reference, features)
    squared = squared_distances(reference, x).double()
    known = squared.isfinite()
    logs = squared.log() / 2
    logs = logs - logs.amin(dim=2, keepdim=True)
    logs = logs.clamp_max(LARGEST)
    total = logs.where(known, 0.0).sum(dim=2, keepdim=True)
    mean = total / known.sum(dim=2, keepdim=True).clamp_min(1)
    return logs.where(known, mean)


def rows_at_once(reference: Reference) -> int:
    """Samples whose distances to every class at every layer are held at once."""
    each = len(reference.spaces) * reference.n_classes
    return max(1, ENTRIES // max(each, 1))


def fit_classes(logits: Tensor, distance: Tensor, labels: Tensor, temperature: float) -> ClassModel:
    """Largest posterior of slope and weights.

    Args:
        logits: ``(n, c)``.
        distance: ``(L, n, c)`` from `class_log_distances`.
        labels: ``(n,)`` true classes; a class the network does not know (-1) teaches nothing.
        temperature: of temperature scaling.

    Example:
        >>> y = torch.arange(60) % 2
        >>> nothing, truth = torch.zeros(60, 2), torch.nn.functional.one_hot(1 - y)[None].double()
        >>> fit_classes(nothing, truth, y, 1.0).weights > 1, fit_classes(nothing, 1 - truth, y, 1.0).weights
        (tensor([True]), tensor([0.], dtype=torch.float64))
    """
    from scipy.optimize import minimize

    known = labels >= 0
    t = (logits[known] / temperature).to(distance)
    scale = distance.flatten(1).std(dim=1).clamp_min(1e-6)
    F = distance[:, known] / scale[:, None, None]
    if 0 in F.shape[:2]:
        return ClassModel(1 / temperature, torch.zeros_like(scale))
    loss = _loss(t.log_softmax(dim=1), F, labels[known])
    start = [1.0] + [0.0] * len(F)
    bounds = [(0.0, None)] * len(start)
    with one_blas_thread():
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds)
    warn_unless_converged(found, "class probabilities")
    b, *w = torch.as_tensor(found.x).tolist()
    return ClassModel(b / temperature, torch.tensor(w).to(distance) / scale)


def _loss(t: Tensor, F: Tensor, labels: Tensor) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """Minus the log posterior and its slope, as a function of ``b`` and the scaled weights."""
    y = labels[:, None]
    own_t, own_F = t.gather(1, y), F.gather(2, y.expand(len(F), -1, -1))
    sum_t, sum_F = own_t.sum(), own_F.sum(dim=(1, 2))

    def loss(v: np.ndarray) -> tuple[float, np.ndarray]:
        b, w = torch.as_tensor(v).to(t).split([1, len(F)])
        score = b * t - torch.tensordot(w, F, dims=1)
        own = b * own_t - torch.tensordot(w, own_F, dims=1)
        lost = (score.logsumexp(dim=1, keepdim=True) - own).sum()
        value = lost + SLOPE_PRECISION * (b - 1).square() / 2 + WEIGHT_RATE * w.sum()
        p = score.softmax(dim=1)
        slope_b = (p * t).sum() - sum_t + SLOPE_PRECISION * (b - 1)
        slope_w = sum_F - torch.einsum("nc,lnc->l", p, F) + WEIGHT_RATE
        return float(value), torch.cat([slope_b, slope_w]).cpu().numpy()

    return loss
