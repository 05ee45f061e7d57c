"""A temperature for each sample from how far its layers are from the training data: density-aware
calibration.

``s_l(x)`` is the distance of sample ``x`` to its ``k``-th neighbour among the training samples, at layer
``l``, between features scaled to unit length. The temperature ``T(x) = w_0 + sum_l w_l s_l(x)``, ``w >= 0``,
rises with that distance; the weights minimise the squared error of ``softmax(z / T(x))`` on the calibration
set. Reference: Tomani et al., Beyond in-domain scenarios: robust density-aware calibration, ICML 2023.

Detectors of errors by neighbourhood, made confidences: trust score and deep k-nearest neighbours.

Both score how well a sample's neighbours among the training data agree with its predicted label; a sigmoid
fitted on the calibration set turns the score into a confidence. Without a reference the calibration set takes
its place, each sample compared with the others. References: Jiang et al., To trust or not to trust a
classifier, NeurIPS 2018; Papernot and McDaniel, Deep k-nearest neighbors, 2018.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from salgp.calibrators.base import Calibrator, Training
from salgp.calibrators.scaling.toplabel import fit_logistic, from_top_label, platt_targets, with_constant
from salgp.features import Features
from salgp.gp.optimise import warn_unless_converged
from salgp.logits import BOUNDS, at_least_single, best_temperature, row_chunks, tempered_softmax
from salgp.neighbours import class_distances, nearest
from salgp.prediction import Prediction

__all__ = []


@dataclass(repr=False, eq=False)
class DensityAwareCalibration(Calibrator):
    """Sample-wise temperature from k-th neighbour distances at every layer.

    Without a reference the calibration set takes its place, each sample compared with the others.

    Args:
        k: which neighbour's distance to take.

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

    k: int = 50

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        known = features if reference is None else reference[0]
        self.reference_ = {name: _unit(x) for name, x in known.layers.items()}
        S = self._distances(features, leave_one_out=reference is None)
        scored = labels >= 0
        self.weights_ = _fit_weights(features.logits[scored], labels[scored], S[scored])

    def _predict(self, features: Features) -> Prediction:
        S = self._distances(features)
        T = self.weights_[0] + S @ self.weights_[1:]
        T = T.clamp_min(BOUNDS[0]).to(at_least_single(features.logits).dtype)
        probs = tempered_softmax(features.logits, T[:, None])
        return replace(Prediction.from_probs(features, probs), novelty=T)

    def _distances(self, features: Features, leave_one_out: bool = False) -> Tensor:
        """Distance to the k-th neighbour at each layer, ``(n, L)``."""
        found = []
        for name, x in features.layers.items():
            each, _ = nearest(_unit(x), self.reference_[name], self.k, leave_one_out=leave_one_out)
            found.append(each[:, -1])
        return torch.stack(found, dim=1).double()


def _unit(x: Tensor) -> Tensor:
    return normalize(at_least_single(x), dim=1)


def _fit_weights(logits: Tensor, labels: Tensor, S: Tensor) -> Tensor:
    """Non-negative weights of the smallest squared error, from two starts: one temperature for all, and half
    of it by distance.
    """
    from scipy.optimize import minimize

    X = pad(S, (1, 0), value=1.0)
    start = X.new_zeros(X.shape[1])
    start[0], _ = best_temperature(logits, labels)
    if len(labels) == 0:
        return start
    scale = X.mean(dim=0).clamp_min(1e-12)
    X = X / scale

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        T = X @ torch.as_tensor(w).to(X)
        value, slope = _squared_error(logits, labels, T.clamp_min(BOUNDS[0]))
        return value, (X.T @ (slope * (BOUNDS[0] <= T))).cpu().numpy()

    half = 0.5 * float(start[0])
    by_distance = torch.full_like(start, half / S.shape[1])
    by_distance[0] = half
    starts = torch.stack([start, by_distance]).cpu().numpy()
    how: Any = {"jac": True, "method": "L-BFGS-B", "bounds": [(0.0, 1e3)] * len(start)}
    best = min((minimize(loss, w, **how) for w in starts), key=lambda found: float(found.fun))
    warn_unless_converged(best, "the search for the weights of the distances")
    return torch.as_tensor(best.x).to(scale) / scale


def _squared_error(logits: Tensor, labels: Tensor, T: Tensor) -> tuple[float, Tensor]:
    """Mean squared error of ``softmax(z / T)`` and its derivative in each sample's ``T``, in
    chunks of rows.
    """
    value, slopes = 0.0, []
    for rows in row_chunks(*logits.shape):
        a = logits[rows].double() / T[rows, None]
        p = torch.softmax(a, dim=1)
        error = p.scatter_add(1, labels[rows, None], torch.full_like(p[:, :1], -1))
        value += float(error.pow(2).sum())
        mean = (error * p).sum(dim=1, keepdim=True)
        pull = 2 * p * (error - mean)  # d error^2 / d a
        slopes.append(-(pull * a).sum(dim=1) / T[rows])
    return value / len(labels), torch.cat(slopes) / len(labels)


RATIO_LIMIT = 1e6
"""Trust scores are kept within [1 / RATIO_LIMIT, RATIO_LIMIT]."""


class NeighbourScore(Calibrator):
    """A sigmoid of how well a sample's neighbours agree with its label; ``link_`` is slope and intercept."""

    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True

    @abstractmethod
    def _score(self, features: Features) -> Tensor:
        """``(n,)`` score of each sample, larger for better agreement."""

    def _fit_link(self, score: Tensor, correct: Tensor) -> None:
        lower = score.new_tensor([0.0, -torch.inf])
        self.link_ = fit_logistic(with_constant(score), platt_targets(correct), lower)

    def _predict(self, features: Features) -> Prediction:
        score = self._score(features)
        slope, intercept = self.link_.tolist()
        confidence = torch.sigmoid(slope * score + intercept)
        return replace(from_top_label(features, confidence, self.rest_temperature_), novelty=-score)


@dataclass(repr=False, eq=False)
class TrustScore(NeighbourScore):
    """Distance to the nearest other class over the distance to the predicted class, at one layer.

    Args:
        layer: name of the layer; the last one by default.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> f = Features(torch.cat([5 - x, x], dim=1), {"a": x})
        >>> TrustScore().fit(f, [0, 0, 0, 1, 1, 1]).predict(f).confidence.round(decimals=2)
        tensor([0.8800, 0.8800, 0.8800, 0.8800, 0.8800, 0.8800])
    """

    name: ClassVar[str] = "trust-score"

    layer: str | None = None

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        if self.layer is not None and self.layer not in features.layers:
            raise KeyError(f"no layer named {self.layer!r}; known layers: {', '.join(features.layer_names)}")
        self.layer_ = self.layer or features.layer_names[-1]
        known, classes = reference or (features, labels)
        x = at_least_single(known.layers[self.layer_])
        kept = classes >= 0
        self.x_, self.classes_ = x[kept], classes[kept]
        own = None if reference else kept
        self._fit_link(self._score(features, own), features.correct(labels))

    def _score(self, features: Features, own: Tensor | None = None) -> Tensor:
        """``log`` of the trust score; ``own`` marks the samples that are themselves the reference, in its
        order.
        """
        x, label = at_least_single(features.layers[self.layer_]), features.label
        reference = self.x_.to(x)
        same, other = class_distances(x, label, reference, self.classes_)
        if own is not None:
            among = x[own], label[own], reference, self.classes_
            same[own], other[own] = class_distances(*among, leave_one_out=True)
        ratio = (other + 1e-12) / (same + 1e-12)
        ratio = ratio.nan_to_num(nan=1.0)  # inf / inf: a class and all others absent
        return ratio.clamp(1 / RATIO_LIMIT, RATIO_LIMIT).log().double()


@dataclass(repr=False, eq=False)
class DeepKNN(NeighbourScore):
    """Credibility of the label: how common is the number of neighbours, over all layers, with another label?

    The nonconformity of a sample with a label is the number of its ``k`` neighbours at each layer, summed
    over layers, that do not carry it; the credibility is the share of calibration samples (with their true
    label) that conform no better.

    Args:
        k: number of neighbours per layer.

    Attributes:
        nonconformity_: ``(n,)`` sorted nonconformities of the calibration set.
        link_: coefficients from the log-odds of the credibility to those of the confidence.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> f = Features(torch.cat([5 - x, x], dim=1), {"a": x})
        >>> DeepKNN(k=2).fit(f, [0, 0, 0, 1, 1, 1]).nonconformity_
        tensor([0, 0, 0, 0, 0, 0])
    """

    name: ClassVar[str] = "deep-knn"

    k: int = 10

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        known, classes = reference or (features, labels)
        self.reference_, self.classes_ = dict(known.layers), classes
        neighbours = self._neighbour_labels(features, leave_one_out=reference is None)
        self.nonconformity_ = _disagreeing(neighbours, labels)[labels >= 0].sort().values
        alpha = _disagreeing(neighbours, features.label)
        self._fit_link(self._log_odds_credibility(alpha), features.correct(labels))

    def _score(self, features: Features) -> Tensor:
        alpha = _disagreeing(self._neighbour_labels(features), features.label)
        return self._log_odds_credibility(alpha)

    def _neighbour_labels(self, features: Features, leave_one_out: bool = False) -> Tensor:
        """Labels of the neighbours at all layers, ``(n, L k)``."""
        found = []
        for name, x in features.layers.items():
            reference = self.reference_[name].to(x)
            found.append(nearest(x, reference, self.k, leave_one_out=leave_one_out)[1])
        return self.classes_[torch.cat(found, dim=1)]

    def _log_odds_credibility(self, alpha: Tensor) -> Tensor:
        n = len(self.nonconformity_)
        as_bad = n - torch.searchsorted(self.nonconformity_, alpha)
        return torch.logit((as_bad + 0.5).double() / (n + 1))


def _disagreeing(neighbours: Tensor, label: Tensor) -> Tensor:
    """How many neighbours of each sample have another label."""
    return (neighbours != label[:, None]).sum(dim=1)
