"""A temperature for each sample from how far its layers are from the training data: density-aware
calibration.

``s_l(x)`` is the distance of sample ``x`` to its ``k``-th neighbour among the training samples, at layer
``l``, between features scaled to unit length. The temperature ``T(x) = w_0 + sum_l w_l s_l(x)``, ``w >= 0``,
rises with that distance; the weights minimise the squared error of ``softmax(z / T(x))`` on the calibration
set. Reference: Tomani et al., Beyond in-domain scenarios: robust density-aware calibration, ICML 2023.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.temperature import EnsembleTemperatureScaling, ensemble_softmax
from salgp.calibrators.temperature import BOUNDS, best_temperature, row_chunks, tempered_softmax
from salgp.features import Features
from salgp.gp.optimise import tell_unless_settled
from salgp.logits import at_least_single
from salgp.neighbours import nearest
from salgp.prediction import Prediction

__all__ = ["DensityAwareCalibration"]


class DensityAwareCalibration(Calibrator):
    """Sample-wise temperature from k-th neighbour distances at every layer.

    Without a reference the calibration set takes its place, each sample compared with the others.

    Args:
        k: which neighbour's distance to take.
        then: ``"nothing"``, or ``"ensemble"`` for ensemble temperature scaling of the density-scaled logits.

    Attributes:
        weights_: ``(1 + L,)`` weights ``w_0, w_1, ..., w_L``.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> f = Features(
        ...     torch.randn(60, 3, generator=generator), {"a": torch.randn(60, 4, generator=generator)}
        ... )
        >>> dac = DensityAwareCalibration(k=5).fit(
        ...     f, f.label.where(torch.arange(60) % 3 > 0, torch.arange(60) % 3)
        ... )
        >>> bool((dac.weights_ >= 0).all()), dac.predict(f).novelty.shape
        (True, torch.Size([60]))
    """

    name: ClassVar[str] = "density-aware"
    needs_layers: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True

    def __init__(self, k: int = 50, then: Literal["nothing", "ensemble"] = "nothing") -> None:
        self.k = k
        self.then = then

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if self.then not in ("nothing", "ensemble"):
            raise ValueError(f"then must be 'nothing' or 'ensemble', got {self.then!r}")
        self.reference_ = {
            name: _unit(x).cpu() for name, x in (reference[0] if reference else features).layers.items()
        }
        S = self._distances(features, leave_one_out=reference is None)
        known = labels >= 0
        self.weights_ = _fit_weights(features.logits[known], labels[known], S[known]).cpu()
        self.temperature_, self.mix_ = 1.0, torch.tensor([1.0, 0.0, 0.0])
        if self.then == "ensemble":
            scaled = Features(at_least_single(features.logits) / self._sample_temperature(S)[:, None])
            ensemble = EnsembleTemperatureScaling().fit(scaled, labels)
            self.temperature_, self.mix_ = ensemble.temperature_, ensemble.weights_

    def _predict(self, features: Features) -> Prediction:
        T = self._sample_temperature(self._distances(features)).to(at_least_single(features.logits).dtype)
        if self.then == "ensemble":
            probs = ensemble_softmax(
                at_least_single(features.logits) / T[:, None], self.temperature_, self.mix_
            )
        else:
            probs = tempered_softmax(features.logits, T[:, None])
        return replace(Prediction.from_probs(features, probs), novelty=T)

    def _distances(self, features: Features, leave_one_out: bool = False) -> Tensor:
        """Distance to the k-th neighbour at each layer, ``(n, L)``."""
        device = features.logits.device
        each = [
            nearest(_unit(x), self.reference_[name].to(device), self.k, leave_one_out=leave_one_out)[0]
            for name, x in features.layers.items()
        ]
        return torch.stack([d[:, -1] for d in each], dim=1).double()

    def _sample_temperature(self, S: Tensor) -> Tensor:
        w = self.weights_.to(S.device)
        return (w[0] + S @ w[1:]).clamp_min(BOUNDS[0])


def _unit(x: Tensor) -> Tensor:
    return normalize(at_least_single(x), dim=1)


def _fit_weights(logits: Tensor, labels: Tensor, S: Tensor) -> Tensor:
    """Non-negative weights of the smallest squared error, from two starts: one temperature for all, and half
    of it by distance.
    """
    from scipy.optimize import minimize

    start = S.new_zeros(1 + S.shape[1])
    start[0] = 1.0
    if len(labels) == 0:
        return start
    X = torch.cat([torch.ones_like(S[:, :1]), S], dim=1)
    scale = X.mean(dim=0).clamp_min(1e-12)
    X = X / scale

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        T = X @ torch.as_tensor(w).to(X)
        value, slope = _squared_error(logits, labels, T.clamp_min(BOUNDS[0]))
        return value, (X.T @ (slope * (BOUNDS[0] <= T))).cpu().numpy()

    start[0] = best_temperature(logits, labels, warn=False)[0]
    by_distance = torch.full_like(start, 0.5 * float(start[0]) / max(S.shape[1], 1))
    by_distance[0] = 0.5 * start[0]
    bounds = [(0.0, 1e3)] * len(start)
    found = [
        minimize(loss, w.cpu().numpy(), jac=True, method="L-BFGS-B", bounds=bounds)
        for w in (start, by_distance)
    ]
    best = min(found, key=lambda f: float(f.fun))
    tell_unless_settled(best, "the search for the weights of the distances")
    return torch.tensor(best.x) / scale.cpu()


def _squared_error(logits: Tensor, labels: Tensor, T: Tensor) -> tuple[float, Tensor]:
    """Mean squared error of ``softmax(z / T)`` and its derivative in each sample's ``T``, in
    chunks of rows.
    """
    value, slopes = 0.0, []
    for rows in row_chunks(*logits.shape):
        a = logits[rows].double() / T[rows, None]
        p = torch.softmax(a, dim=1)
        error = p.scatter_add(1, labels[rows, None], -torch.ones_like(p[:, :1]))
        value += float(error.pow(2).sum())
        pull = 2 * p * (error - (error * p).sum(dim=1, keepdim=True))  # d error^2 / d a
        slopes.append(-(pull * a).sum(dim=1) / T[rows])
    return value / len(labels), torch.cat(slopes) / len(labels)
