"""One number for all logits: temperature scaling and its relatives.

Temperature scaling divides every logit by ``T > 0``, ``p = softmax(z / T)``: ``T > 1`` lowers confidence, ``T
< 1`` raises it, the label stays. How ``T`` is found is told in `salgp.logits`.
Reference: Guo et al., On calibration of modern neural networks, ICML 2017.

Adaptive calibrator ensemble (ACE): an easy and a hard temperature, weighted by how confident a window is.

The optimal temperature depends on how difficult a set is. ACE fits one temperature to all calibration samples
and one to a hard set of them, all errors and few correct samples, and mixes the two scaled logits by the mean
confidence of the unlabelled window that is to be calibrated, ``a = mean s(window) / mean s(calibration)``:

    z' = a z / T_easy + (1 - a) z / T_hard.

Reference: Zou, Deng and Zheng, Adaptive calibrator ensemble, ICCV 2023 (arXiv 2303.05331).
"""

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from salgp.calibrators.base import CalibrationWarning, Calibrator, Training
from salgp.calibrators.evidence.windows import window_numbers
from salgp.calibrators.scaling.toplabel import top_label
from salgp.features import Features
from salgp.gp.optimise import warn_unless_converged
from salgp.logits import at_class, best_temperature, row_chunks, tempered_softmax
from salgp.prediction import Prediction

__all__ = []


class Uncalibrated(Calibrator):
    """The network's own softmax, unchanged: the baseline of every comparison.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0], [0.0, 1.0]]))
        >>> Uncalibrated().fit(f, [0, 1]).predict(f).confidence
        tensor([0.8808, 0.7311])
    """

    name: ClassVar[str] = "uncalibrated"
    floors_zeros: ClassVar[bool] = False

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        pass

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, 1.0))


class TemperatureScaling(Calibrator):
    """One temperature for all logits, by maximum likelihood on the calibration set.

    ``p = softmax(z / T)`` with ``T = temperature_``. Samples of an unknown class (-1) have no likelihood and
    are left out. Where every calibration sample is correct, the likelihood rises for ever as ``T -> 0``; the
    temperature then stays at its bound, ``at_bound_`` is true and a `CalibrationWarning` says so.

    Attributes:
        temperature_: the fitted ``T``.
        at_bound_: is it the smallest or largest that is looked for?

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> z = 3 * torch.randn(2000, 4, generator=generator)
        >>> labels = torch.multinomial(torch.softmax(z / 2, 1), 1, generator=generator)[:, 0]
        >>> round(TemperatureScaling().fit(Features(z), labels).temperature_, 1)
        2.0
    """

    name: ClassVar[str] = "temperature"
    display_name: ClassVar[str] = "temperature scaling"

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        self.temperature_, self.at_bound_ = _fitted(features.logits, labels)

    def _predict(self, features: Features) -> Prediction:
        return Prediction.from_probs(features, tempered_softmax(features.logits, self.temperature_))


def _fitted(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[float, bool]:
    """The best temperature, with a warning where it is a bound."""
    temperature, at_bound = best_temperature(logits, labels, weights)
    if at_bound:
        correct = "every calibration sample is correct"
        useless = "the confidences tell nothing about which samples are correct"
        why = correct if temperature < 1.0 else useless
        stopped = f"the temperature stopped at its bound {temperature:g} ({why}?)"
        warnings.warn(f"{stopped}; calibrate on held-out data", CalibrationWarning, stacklevel=4)
    return temperature, at_bound


class PerturbedTemperatureScaling(TemperatureScaling):
    """Temperature scaling fitted on augmented calibration samples, for use under shift.

    The network's input is repeated under noise of several strengths before the features are taken, so that
    the calibration set holds samples the network gets wrong; the temperature maximises the likelihood of all
    of them. Give it `Features` with ``groups``, in which an augmented sample shares the number of its
    original: every original then counts the same, however often it was augmented. Without ``groups`` it is
    plain temperature scaling, and a warning says so.

    Reference: Tomani et al., Post-hoc uncertainty calibration for domain drift scenarios, CVPR 2021.

    Example:
        >>> z = torch.tensor([[2.0, 0.0], [1.0, 0.0], [0.5, 0.0]])
        >>> augmented = Features(torch.cat([z, z / 2]), groups=torch.tensor([0, 1, 2, 0, 1, 2]))
        >>> round(PerturbedTemperatureScaling().fit(augmented, [0, 0, 1, 0, 0, 1]).temperature_, 2)
        0.57
    """

    name: ClassVar[str] = "perturbed-temperature"
    display_name: ClassVar[str] = "perturbed temperature"
    uses_augmented: ClassVar[bool] = True

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        weights = None
        if features.groups is None:
            without = "features have no groups: fitted as plain temperature scaling, not on augmented samples"
            warnings.warn(without, CalibrationWarning, stacklevel=3)
        else:
            _, of, count = features.groups.unique(return_inverse=True, return_counts=True)
            weights = (1 / count.double())[of]
        self.temperature_, self.at_bound_ = _fitted(features.logits, labels, weights)


class EnsembleTemperatureScaling(Calibrator):
    """A mix of the tempered softmax, the raw softmax and the uniform distribution.

    ``p = w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c`` with weights on the simplex: the temperature is that
    of temperature scaling, the weights maximise the likelihood, so the fit is never worse than temperature
    scaling. Reference: Zhang et al., Mix-n-match, ICML 2020.

    Example:
        >>> f = Features(torch.eye(3).repeat(20, 1) * 4)
        >>> ets = EnsembleTemperatureScaling().fit(
        ...     f, torch.cat([torch.arange(3).repeat(15), torch.zeros(15, dtype=torch.long)])
        ... )
        >>> round(float(ets.weights_.sum()), 6)
        1.0
    """

    name: ClassVar[str] = "ensemble-temperature"

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        self.temperature_, self.at_bound_ = _fitted(features.logits, labels)
        parts = [_true_class(features.logits, labels, t) for t in (self.temperature_, 1.0)]
        parts.append(torch.full_like(parts[0], 1 / features.n_classes))
        self.weights_ = mixture_weights(torch.stack(parts, dim=1), (1, 0, 0))

    def _predict(self, features: Features) -> Prediction:
        mixed = ensemble_softmax(features.logits, self.temperature_, self.weights_)
        return Prediction.from_probs(features, mixed)


def ensemble_softmax(logits: Tensor, temperature: float | Tensor, weights: Tensor) -> Tensor:
    """``w_1 softmax(z / T) + w_2 softmax(z) + w_3 / c``."""
    of_tempered, of_raw, of_uniform = weights.tolist()
    mix = tempered_softmax(logits, temperature).mul_(of_tempered)
    return mix.add_(tempered_softmax(logits, 1.0), alpha=of_raw).add_(of_uniform / logits.shape[1])


def _true_class(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Probability of the true class of the samples that have one, in double precision."""
    y, parts = labels.clamp_min(0), []
    for rows in row_chunks(*logits.shape):
        probs = tempered_softmax(logits[rows], temperature)
        parts.append(at_class(probs, y[rows]))
    return torch.cat(parts).double()[labels >= 0]


def mixture_weights(likelihood: Tensor, start: Sequence[float]) -> Tensor:
    """Weights on the simplex that maximise the mean of ``log(likelihood_i . w)``, a concave problem.

    Args:
        likelihood: ``(n, k)`` of each sample under each of ``k`` components.
        start: ``k`` weights to begin with, and to return where there are no samples.

    Example:
        >>> mixture_weights(torch.tensor([[0.9, 0.1], [0.2, 0.1]]), (0.5, 0.5)) > 0.99
        tensor([ True, False])
    """
    from scipy.optimize import minimize

    P = likelihood.cpu().numpy()
    first = np.array(start, dtype=float)

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        mix = np.maximum(P @ w, 1e-300)  # sums of quotients stay finite
        gradient = -(P / mix[:, None]).mean(axis=0)
        return -float(np.log(mix).mean()), gradient

    if len(P) == 0:
        return torch.tensor(first)
    one = {"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like}
    how: Any = {"method": "SLSQP", "constraints": one, "tol": 1e-12}
    found = minimize(loss, first, jac=True, bounds=[(0, 1)] * len(first), **how)
    warn_unless_converged(found, "the search for the mixture's weights")
    inside = np.clip(found.x, 0, 1)
    w = inside / inside.sum()
    return torch.tensor(w if loss(w)[0] <= loss(first)[0] else first)  # also where a step led to NaN


RATIO = 0.1
"""Correct samples for each error in the hard set, by its authors."""


class AdaptiveCalibratorEnsemble(Calibrator):
    """Two temperatures, of all and of hard calibration samples, weighted by the confidence of a window.

    A single sample is no window: without a context the prediction is temperature scaling. The authors draw
    the correct samples of the hard set at random; here all of them count with the weight of that draw, which
    is its expectation and needs no seed. A window that is more confident than the calibration samples has
    ``a = 1``.

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

    def _fit(self, features: Features, labels: Tensor, reference: Training) -> None:
        correct, known = features.correct(labels), labels >= 0
        n_wrong = int((~correct & known).sum())
        weight = min(RATIO * n_wrong / max(int(correct.sum()), 1), 1.0)
        self.easy_temperature_, _ = _fitted(features.logits, labels)
        self.hard_temperature_ = self.easy_temperature_
        if n_wrong:
            weights = torch.where(correct, weight, 1.0).double()
            self.hard_temperature_, _ = best_temperature(features.logits, labels, weights)
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
