"""Detectors of errors by neighbourhood, made confidences: trust score and deep k-nearest neighbours.

Both score how well a sample's neighbours among the training data agree with its predicted label; a sigmoid
fitted on the calibration set turns the score into a confidence. Without a reference the calibration set takes
its place, each sample compared with the others. References: Jiang et al., To trust or not to trust a
classifier, NeurIPS 2018; Papernot and McDaniel, Deep k-nearest neighbors, 2018.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.scaling.isotonic import interpolate, monotone_fit
from salgp.calibrators.scaling.sigmoid import fit_logistic, platt_targets
from salgp.calibrators.scaling.toplabel import from_top_label
from salgp.features import Features
from salgp.logits import at_least_single
from salgp.neighbours import class_distances, nearest
from salgp.prediction import Prediction

__all__ = ["DeepKNN", "TrustScore"]

RATIO_LIMIT = 1e6
"""Trust scores are kept within [1 / RATIO_LIMIT, RATIO_LIMIT]."""


class TrustScore(Calibrator):
    """Distance to the nearest other class over the distance to the predicted class, at one layer.

    Before, each class loses the share ``filter`` of its reference samples that lie in its thinnest regions
    (largest distance to the ``k``-th neighbour of the same class).

    Args:
        layer: name of the layer; the last one by default.
        filter: share of reference samples left out per class, in [0, 1).
        k: neighbour whose distance measures density.
        link: ``"platt"`` or ``"isotonic"``, from the log of the score to the confidence.

    Example:
        >>> x = torch.tensor([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
        >>> f = Features(torch.cat([5 - x, x], dim=1), {"a": x})
        >>> TrustScore(k=1).fit(f, [0, 0, 0, 1, 1, 1]).predict(f).confidence.round(decimals=2)
        tensor([0.8800, 0.8800, 0.8800, 0.8800, 0.8800, 0.8800])
    """

    name: ClassVar[str] = "trust-score"
    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True

    def __init__(
        self,
        layer: str | None = None,
        filter: float = 0.0,
        k: int = 10,
        link: Literal["platt", "isotonic"] = "platt",
    ) -> None:
        self.layer = layer
        self.filter = filter
        self.k = k
        self.link = link

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if not 0 <= self.filter < 1:
            raise ValueError(f"filter must be a share in [0, 1), got {self.filter}")
        if self.layer is not None and self.layer not in features.layers:
            raise KeyError(f"no layer named {self.layer!r}; known layers: {', '.join(features.layer_names)}")
        self.layer_ = self.layer or features.layer_names[-1]
        known, classes = reference or (features, labels)
        x = at_least_single(known.layers[self.layer_])
        kept = _dense(x, classes, self.filter, self.k)
        self.x_, self.classes_ = x[kept].cpu(), classes[kept].cpu()
        own = None if reference else kept
        self.link_ = _fit_link(self._log_score(features, own), features.correct(labels), self.link)

    def _predict(self, features: Features) -> Prediction:
        score = self._log_score(features)
        confidence = _apply_link(score, self.link_)
        return replace(from_top_label(features, confidence, self.rest_temperature_), novelty=-score)

    def _log_score(self, features: Features, own: Tensor | None = None) -> Tensor:
        """``log`` of the trust score; ``own`` marks the samples that are themselves the reference, in its
        order.
        """
        x, label = at_least_single(features.layers[self.layer_]), features.label
        reference, classes = self.x_.to(x), self.classes_.to(x.device)
        same, other = class_distances(x, label, reference, classes)
        if own is not None:
            s, o = class_distances(x[own], label[own], reference, classes, leave_one_out=True)
            same, other = same.masked_scatter(own, s), other.masked_scatter(own, o)
        ratio = ((other + 1e-12) / (same + 1e-12)).nan_to_num(
            nan=1.0
        )  # inf / inf: a class and all others absent
        return ratio.clamp(1 / RATIO_LIMIT, RATIO_LIMIT).log().double()


class DeepKNN(Calibrator):
    """Credibility of the label: how usual is the number of neighbours, over all layers, with another label?

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
    gives_confidence_only: ClassVar[bool] = True
    needs_layers: ClassVar[bool] = True
    uses_reference: ClassVar[bool] = True

    def __init__(self, k: int = 10) -> None:
        self.k = k

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        known, classes = reference or (features, labels)
        self.reference_ = {name: x.cpu() for name, x in known.layers.items()}
        self.classes_ = classes.cpu()
        neighbours = self._neighbour_labels(features, leave_one_out=reference is None)  # (n, L k)
        true = (neighbours != labels[:, None]).sum(dim=1)[labels >= 0]
        self.nonconformity_ = true.sort().values.cpu()
        self.link_ = _fit_link(
            self._log_odds_credibility(neighbours, features.label), features.correct(labels), "platt"
        )

    def _predict(self, features: Features) -> Prediction:
        score = self._log_odds_credibility(self._neighbour_labels(features), features.label)
        confidence = _apply_link(score, self.link_)
        return replace(from_top_label(features, confidence, self.rest_temperature_), novelty=-score)

    def _neighbour_labels(self, features: Features, leave_one_out: bool = False) -> Tensor:
        classes = self.classes_.to(features.logits.device)
        each = [
            nearest(x, self.reference_[name].to(x), self.k, leave_one_out=leave_one_out)[1]
            for name, x in features.layers.items()
        ]
        return classes[torch.cat(each, dim=1)]

    def _log_odds_credibility(self, neighbours: Tensor, label: Tensor) -> Tensor:
        rank = self.nonconformity_.to(label.device)
        alpha = (neighbours != label[:, None]).sum(dim=1)
        as_bad = len(rank) - torch.searchsorted(rank, alpha)
        return torch.logit((as_bad + 0.5).double() / (len(rank) + 1))


def _dense(x: Tensor, classes: Tensor, share: float, k: int) -> Tensor:
    """Boolean ``(m,)``: is the row among the ``1 - share`` densest of its class?"""
    kept = classes >= 0
    for c in torch.unique(classes[kept]).tolist() if share > 0 else []:
        rows = (classes == c).nonzero()[:, 0]
        if len(rows) > 1:
            radius = nearest(x[rows], x[rows], k, leave_one_out=True)[0][:, -1]
            kept[rows[radius.argsort(stable=True)[len(rows) - int(share * len(rows)) :]]] = False
    return kept


def _fit_link(score: Tensor, correct: Tensor, link: str) -> list[Tensor]:
    """A monotone map from score to confidence: two coefficients (sigmoid), or knots and values (isotonic)."""
    if link == "platt":
        lower = score.new_tensor([0.0, -torch.inf])
        return [
            fit_logistic(
                torch.stack([score, torch.ones_like(score)], dim=1), platt_targets(correct), lower
            ).cpu()
        ]
    if link == "isotonic":
        x, y = monotone_fit(score.cpu().numpy(), correct.cpu().numpy())
        return [torch.tensor(x), torch.tensor(y)]
    raise ValueError(f"link must be 'platt' or 'isotonic', got {link!r}")


def _apply_link(score: Tensor, link: list[Tensor]) -> Tensor:
    if len(link) == 1:
        slope, intercept = link[0].tolist()
        return torch.sigmoid(slope * score + intercept)
    return interpolate(score[None], link[0][None], link[1][None])[0]
