"""Which class is it, by logits and layers together? For prediction sets, in which no class comes first.

A confidence speaks of one class, the network's label. A set needs all classes on equal terms. With ``z`` the
logits, ``T`` the temperature and ``d_lc`` the distance at layer ``l`` to the nearest reference point of class
``c``,

    q_c  proportional to  exp(b z_c / T - sum_l w_l log d_lc),      b, w_l >= 0.

``b`` and the few weights are those of the largest likelihood on the originals under a prior that pulls ``b``
to 1 and each weight to 0. Where distances add nothing the weights are 0, and ``q`` is temperature scaling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.evidence.reference import LARGEST_LOG_RATIO, Reference, distances_to_classes
from salgp.features import Features
from salgp.gp.optimise import tell_unless_settled
from salgp.gp.threads import one_blas_thread
from salgp.storage import storable

__all__ = ["ClassModel", "farness", "fit_classes", "rows_at_once", "some_originals"]

ENTRIES = 4_000_000
"""Distances held at once, and all that a fit looks at: it has a few weights to find and needs no more."""
SLOPE_PULL, WEIGHT_PULL = 2.0, 0.5
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

    def __post_init__(self) -> None:
        """Refuse what no fit gives."""
        w = self.weights
        usual = w.ndim == 1 and w.is_floating_point() and bool(((w >= 0) & (w < torch.inf)).all())
        if not usual or not 0 <= self.slope < math.inf:
            raise ValueError(f"weights of the classes must be from 0 up and finite, got {self.slope}, {w}")

    def __call__(self, logits: Tensor, far: Tensor) -> Tensor:
        """Probabilities ``(n, c)`` from logits and from what `farness` says ``(L, n, c)``."""
        against = torch.tensordot(self.weights.to(far), far, dims=1)
        return torch.softmax(self.slope * logits.to(far) - against, dim=1)


def farness(reference: Reference, features: Features, own: Tensor | None = None) -> Tensor:
    """Log distance to each class at each layer, from that of the nearest class on, ``(L, n, c)``.

    A class without reference points is as far as the others are on average.

    Args:
        reference: what to compare with.
        features: of ``n`` samples.
        own: ``(n,)`` reference row to leave out for each sample (-1: none).

    Example:
        >>> from salgp.calibrators.evidence.reference import make_reference
        >>> x = torch.tensor([[1.0, 0.1], [1.0, 0.0], [0.1, 1.0], [0.0, 1.0]])
        >>> reference = make_reference(Features(x, {"a": x}), torch.tensor([0, 0, 1, 1]))
        >>> farness(reference, Features(x, {"a": x})).argmin(dim=2)
        tensor([[0, 0, 1, 1]])
    """
    D = distances_to_classes(reference, features, own).double()
    known = D.isfinite()
    far = D.clamp(1e-9, 1e9).log()
    far = (far - far.amin(dim=2, keepdim=True)).clamp_max(LARGEST_LOG_RATIO)
    usual = far.where(known, 0.0).sum(dim=2, keepdim=True) / known.sum(dim=2, keepdim=True).clamp_min(1)
    return far.where(known, usual)


def rows_at_once(n_layers: int, n_classes: int) -> int:
    """Samples whose distances to every class at every layer are held at once.

    Example:
        >>> rows_at_once(5, 1000)
        800
    """
    return max(1, ENTRIES // max(n_layers * n_classes, 1))


def some_originals(n: int, n_layers: int, n_classes: int) -> Tensor:
    """Numbers of the originals, out of ``n``, that a fit looks at: evenly spaced, and all where they are few.

    Example:
        >>> some_originals(5, 2, 10), len(some_originals(1_000_000, 5, 1000))
        (tensor([0, 1, 2, 3, 4]), 800)
    """
    return torch.linspace(0, n - 1, min(n, rows_at_once(n_layers, n_classes))).long()


def fit_classes(logits: Tensor, far: Tensor, labels: Tensor, temperature: float) -> ClassModel:
    """Largest posterior of slope and weights.

    Args:
        logits: ``(n, c)``.
        far: ``(L, n, c)`` from `farness`.
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
    t = (logits[known] / temperature).to(far).log_softmax(dim=1)
    scale = far.flatten(1).std(dim=1).clamp_min(1e-6)
    F, y = far[:, known] / scale[:, None, None], labels[known][:, None]
    if not len(y) or not len(scale):
        return ClassModel(1 / temperature, torch.zeros_like(scale))
    own_t, own_F = t.gather(1, y), F.gather(2, y.expand(len(F), -1, -1))

    def loss(v: object) -> tuple[float, object]:
        b, *_ = v_ = torch.as_tensor(v).to(far)
        score = b * t - torch.tensordot(v_[1:], F, dims=1)
        p = score.softmax(dim=1)
        own = b * own_t - torch.tensordot(v_[1:], own_F, dims=1)
        value = (score.logsumexp(dim=1, keepdim=True) - own).sum()
        slope_b = (p * t).sum() - own_t.sum() + SLOPE_PULL * (b - 1)
        slope_w = own_F.sum(dim=(1, 2)) - torch.einsum("nc,lnc->l", p, F) + WEIGHT_PULL
        value = value + SLOPE_PULL * (b - 1).square() / 2 + WEIGHT_PULL * v_[1:].sum()
        return float(value), torch.cat([slope_b[None], slope_w]).cpu().numpy()

    start = [1.0] + [0.0] * len(F)
    with one_blas_thread():
        found = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=[(0.0, None)] * len(start))
    tell_unless_settled(found, "class probabilities")
    b, *w = torch.as_tensor(found.x).tolist()
    return ClassModel(b / temperature, torch.tensor(w).to(scale) / scale)
