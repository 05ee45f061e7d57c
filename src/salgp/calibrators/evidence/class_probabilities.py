"""Probabilities of all classes from logits and layers together, for prediction sets.

A confidence is the probability of one class, the network's label. A set needs all classes on equal terms.
With ``z`` the logits, ``T`` the temperature and ``d_lc`` the distance at layer ``l`` to the nearest reference
point of class ``c``,

    q_c  proportional to  exp(b z_c / T - sum_l w_l log d_lc),      b, w_l >= 0.

``b`` and the weights are those of the largest likelihood on the calibration samples under a prior that pulls
``b`` to 1 and each weight to 0. Where distances add nothing, ``q`` is temperature scaling.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.evidence.layer_spaces import (
    LARGEST,
    Reference,
    coordinates,
    squared_distances,
)
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
    squared = squared_distances(reference, coordinates(reference, features)[0]).double()
    known = squared.isfinite()
    logs = squared.log() / 2
    logs = (logs - logs.amin(dim=2, keepdim=True)).clamp_max(LARGEST)
    mean = logs.where(known, 0.0).sum(dim=2, keepdim=True) / known.sum(dim=2, keepdim=True).clamp_min(1)
    return logs.where(known, mean)


def rows_at_once(n_layers: int, n_classes: int) -> int:
    """Samples whose distances to every class at every layer are held at once.

    Example:
        >>> rows_at_once(5, 1000)
        800
    """
    return max(1, ENTRIES // max(n_layers * n_classes, 1))


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
    t = (logits[known] / temperature).to(distance).log_softmax(dim=1)
    scale = distance.flatten(1).std(dim=1).clamp_min(1e-6)
    F, y = distance[:, known] / scale[:, None, None], labels[known][:, None]
    if not len(y) or not len(scale):
        return ClassModel(1 / temperature, torch.zeros_like(scale))
    own_t, own_F = t.gather(1, y), F.gather(2, y.expand(len(F), -1, -1))

    def loss(v: object) -> tuple[float, object]:
        b, *_ = v_ = torch.as_tensor(v).to(distance)
        score = b * t - torch.tensordot(v_[1:], F, dims=1)
        p = score.softmax(dim=1)
        own = b * own_t - torch.tensordot(v_[1:], own_F, dims=1)
        value = (score.logsumexp(dim=1, keepdim=True) - own).sum()
        slope_b = (p * t).sum() - own_t.sum() + SLOPE_PRECISION * (b - 1)
        slope_w = own_F.sum(dim=(1, 2)) - torch.einsum("nc,lnc->l", p, F) + WEIGHT_RATE
        value = value + SLOPE_PRECISION * (b - 1).square() / 2 + WEIGHT_RATE * v_[1:].sum()
        return float(value), torch.cat([slope_b[None], slope_w]).cpu().numpy()

    start = [1.0] + [0.0] * len(F)
    with one_blas_thread():
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * len(start))
    warn_unless_converged(found, "class probabilities")
    b, *w = torch.as_tensor(found.x).tolist()
    return ClassModel(b / temperature, torch.tensor(w).to(distance) / scale)
