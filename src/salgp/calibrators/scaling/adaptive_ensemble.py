"""Adaptive calibrator ensemble (ACE): an easy and a hard temperature, weighted by how confident a window is.

The optimal temperature depends on how difficult a set is. ACE fits one temperature to all calibration samples
and one to a hard set of them, all errors and few correct samples, and mixes the two scaled logits by the mean
confidence of the unlabelled window that is to be calibrated, ``a = mean s(window) / mean s(calibration)``:

    z' = a z / T_easy + (1 - a) z / T_hard.

Reference: Zou, Deng and Zheng, Adaptive calibrator ensemble, ICCV 2023 (arXiv 2303.05331).
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from salgp.calibrators.base import Calibrator
from salgp.calibrators.grouping import window_numbers
from salgp.calibrators.scaling.toplabel import top_label
from salgp.calibrators.temperature import best_temperature, tempered_softmax
from salgp.features import Features
from salgp.prediction import Prediction

__all__ = ["AdaptiveCalibratorEnsemble"]


class AdaptiveCalibratorEnsemble(Calibrator):
    """Two temperatures, of all and of hard calibration samples, weighted by the confidence of a window.

    A single sample is no window: without a context the prediction is temperature scaling. The authors draw
    the correct samples of the hard set at random; here all of them count with the weight of that draw, which
    is its expectation and needs no seed. A window that is more confident than the calibration samples has
    ``a = 1``.

    Args:
        ratio: correct samples for each error in the hard set; 0.1 by the authors.

    Attributes:
        easy_temperature_: of all calibration samples.
        hard_temperature_: of the hard set; the same where there is no error.
        mean_confidence_: of the calibration samples.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(500, 4, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z, 1), 1, generator=generator)[:, 0]
        >>> ace = AdaptiveCalibratorEnsemble().fit(Features(z), labels)
        >>> unsure = Features(z / 2)
        >>> alone, together = (ace.predict(unsure, c).confidence.mean() for c in (None, "all"))
        >>> bool(together < alone)
        True
    """

    name: ClassVar[str] = "adaptive-ensemble"
    display_name: ClassVar[str] = "adaptive calibrator ensemble (ACE)"
    takes_context: ClassVar[bool] = True

    def __init__(self, ratio: float = 0.1) -> None:
        self.ratio = ratio

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        if not self.ratio > 0:
            raise ValueError(f"ratio must be positive, correct samples for each error; got {self.ratio}")
        correct, known = features.correct(labels), labels >= 0
        n_correct, n_wrong = int((correct & known).sum()), int((~correct & known).sum())
        weight = min(self.ratio * n_wrong / max(n_correct, 1), 1.0)
        self.easy_temperature_, _ = best_temperature(features.logits, labels)
        self.hard_temperature_ = self.easy_temperature_
        if n_wrong:
            weights = torch.where(correct, weight, 1.0).double()
            self.hard_temperature_, _ = best_temperature(features.logits, labels, weights=weights, warn=False)
        self.mean_confidence_ = float(top_label(features).confidence.double().mean())

    def predict(self, features: Features, context: Any = None) -> Prediction:
        """Calibrated confidences for new samples.

        Args:
            features: of the samples.
            context: the windows they form, of samples met together. None for none, ``"all"`` for one, the
                size of windows of consecutive samples, ``(n,)`` integers or names that tell which window each
                belongs to, or the `Features` of other samples that make up the one window.
        """
        if context is None:
            return super().predict(features)
        features = self.check_input(features)
        with torch.no_grad():
            easy = self._easy_weight(features, context).to(features.logits)[:, None]
            inverse = easy / self.easy_temperature_ + (1 - easy) / self.hard_temperature_
            return Prediction.from_probs(features, tempered_softmax(features.logits, 1 / inverse))

    def context(self, features: Features) -> Features:
        """The samples of a window, for `predict`."""
        return self.check_input(features)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.easy_temperature_))

    def _easy_weight(self, features: Features, context: Any) -> Tensor:
        """``(n,)`` weight of the easy temperature in the window of each sample."""
        others = isinstance(context, Features)
        seen = top_label(self.check_input(context) if others else features)
        confidence = seen.confidence.double()
        if others:
            mean = confidence.mean().expand(len(features))
        else:
            _, number = window_numbers(context, seen.log_odds).unique(return_inverse=True)
            total = confidence.new_zeros(len(features)).index_add(0, number, confidence)
            mean = (total / number.bincount(minlength=len(features)).clamp_min(1))[number]
        return (mean / self.mean_confidence_).clamp(0.0, 1.0)
