"""The one contract of all calibrators: ``fit(features, labels)``, ``predict(features) -> Prediction``,
``save``.

A calibrator is a scikit-learn style estimator: the constructor stores its arguments verbatim, learned state
ends in ``_``, `sklearn.base.clone` works. Input is checked here, once, so that every method below may assume
clean tensors. A leaf implements `_fit` and `_predict` and nothing else; a saved calibrator is its arguments
plus every attribute that ends in ``_``.
"""

from __future__ import annotations

import copy
import operator
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import NotFittedError
from torch import Tensor

from salgp.calibrators.checks import (
    CalibrationWarning,
    bounded_logits,
    check_features,
    check_reference,
    warn_of_data,
)
from salgp.calibrators.copies import originals
from salgp.calibrators.saving import save_folder, write_calibrator
from salgp.calibrators.temperature import rest_temperature
from salgp.calibrators.zeros import learn_zeros, lift_zeros
from salgp.explanation import explain_line
from salgp.features import Features
from salgp.labels import as_labels
from salgp.prediction import Prediction
from salgp.storage import pack, unpack

__all__ = ["CalibrationWarning", "Calibrator", "check_features", "chunks"]


class Calibrator(BaseEstimator, ABC):
    """Abstract base of all calibrators.

    Attributes:
        n_classes_: number of classes seen in `fit`; `predict` refuses others.
        layer_widths_: feature widths seen in `fit`; `predict` refuses others.
        zeros_: ``(c,)`` logits in place of a probability of exactly 0, see `salgp.calibrators.zeros`; None
            where no calibration sample had one.
    """

    name: ClassVar[str]
    """Short name for look-up, e.g. ``"temperature"``."""
    needs_layers: ClassVar[bool] = False
    """Does the method read hidden layers, or the logits only?"""
    uses_reference: ClassVar[bool] = False
    """Does the method, as it is by default, compare samples with the network's training data?"""
    uses_copies: ClassVar[bool] = False
    """Does the method learn from perturbed copies of the calibration samples (`Features.groups`)?"""
    takes_context: ClassVar[bool] = False
    """May samples be judged by what others seen beside them show?"""
    gives_confidence_only: ClassVar[bool] = False
    """Does the method say how sure to be of the label, and nothing about the other classes? Then `fit` also
    learns ``rest_temperature_``, by which `Prediction.from_confidence` shares what is left among them.
    """

    lifts_zeros: ClassVar[bool] = True
    """Is a probability of exactly 0 replaced by the smallest that the classifier can tell?"""
    suits_few_values: ClassVar[bool] = False
    """Does the method suit classifiers that tell few values apart, so that `fit` need not name another?"""
    zeros_: Tensor | None = None

    @property
    def display_name(self) -> str:
        """The method's name for readers, in tables and reports."""
        return self.name.replace("-", " ")

    def fit(self, features: Features, labels: Any, reference: tuple[Features, Any] | None = None) -> Self:
        """Learn from labelled calibration data.

        Args:
            features: of the calibration samples.
            labels: ``(n,)`` true classes; -1 for a class the network does not know.
            reference: features and labels of the network's training set, for methods that compare against it.

        Returns:
            The fitted calibrator itself.
        """
        check_features(features, self.needs_layers)
        features = bounded_logits(features)
        y = as_labels(labels, len(features), features.n_classes).to(features.logits.device)
        rows, _ = originals(features)
        if len(rows) < 2:
            raise ValueError("only one calibration sample: at least 2 are needed, a few hundred are sensible")
        if reference is not None:
            known = check_reference(reference[0], features, self.needs_layers)
            seen = as_labels(reference[1], len(known), features.n_classes).to(features.logits.device)
            reference = (known, seen)
        plain = features if len(rows) == len(features) else Features(features.logits[rows])
        compared = reference if self.needs_layers else None
        warn_of_data(plain, y[rows], compared, zeros=self.lifts_zeros and not self.suits_few_values)
        fresh = type(self)(**self.get_params(deep=False))  # a fit that fails leaves the old one as it was
        fresh._learn_zeros(plain)
        plain, features = fresh.lifted(plain), fresh.lifted(features)
        if reference is not None:
            reference = (fresh.lifted(reference[0]), reference[1])
        with torch.no_grad():
            if self.gives_confidence_only:
                fresh.rest_temperature_ = rest_temperature(plain.logits, y[rows])
            fresh._fit(features, y, reference)
        fresh.n_classes_ = features.n_classes
        fresh.layer_widths_ = features.widths if self.needs_layers else {}
        self.__dict__ = fresh.__dict__
        return self

    def predict(self, features: Features, context: Any = None) -> Prediction:
        """Calibrated confidences for new samples.

        Args:
            features: of the samples.
            context: what the samples have in common, for methods that make use of it (`takes_context`).
        """
        features = self.check_input(features)
        if context is not None:
            raise self._without_context()
        with torch.no_grad():
            parts = [self._predict(part) for part in chunks(features, self._chunk())]
            return parts[0] if len(parts) == 1 else Prediction.concatenate(parts)

    def explain(self, features: Features, i: int) -> str:
        """Say in one line what each term did to the confidence of sample ``i``, in confidence points that add
        up to the change, see `salgp.explanation`.

        Args:
            features: of ``n`` samples.
            i: one of them, from 0 to ``n - 1``; negative numbers count from the end.

        Example:
            >>> from salgp.calibrators import get
            >>> x = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
            >>> f = Features(3 * x, {"a": x})
            >>> labels = f.label.where(torch.arange(80) % 9 > 0, 1 - f.label)
            >>> get("layer-evidence").fit(f, labels).explain(f, 0)[:7]
            '0.52 ->'
        """
        one = features[[_place(i, len(features))]]
        return explain_line(one, self.predict(one))

    def check_input(self, features: Features, allow_empty: bool = True) -> Features:
        """The features `predict` works on, with the fitted layers only; refuses what the calibrator was not
        fitted for.
        """
        self._check_fitted()
        check_features(features, self.needs_layers, allow_empty)
        features = bounded_logits(features)
        if features.n_classes != self.n_classes_:
            raise ValueError(f"fitted on {self.n_classes_} classes, got class scores of {features.n_classes}")
        features = self.lifted(features)
        if not self.needs_layers:
            return features
        missing = [k for k in self.layer_widths_ if k not in features.layers]
        if missing:
            raise ValueError(
                f"layer {missing[0]!r} is missing; fitted on {list(self.layer_widths_)}, got "
                f"{list(features.layers)}"
            )
        if features.layer_names != tuple(self.layer_widths_):
            features = features.select(list(self.layer_widths_))
        wrong = [k for k, d in self.layer_widths_.items() if features.widths[k] != d]
        if wrong:
            raise ValueError(
                f"layer {wrong[0]!r} has width {features.widths[wrong[0]]}, fitted on "
                f"{self.layer_widths_[wrong[0]]}: is it the same network?"
            )
        return features

    def _learn_zeros(self, features: Features) -> None:
        """Keep what takes the place of probabilities of 0, where there are any."""
        self.__dict__.pop("zeros_", None)
        zeros = learn_zeros(features.logits) if self.lifts_zeros else None
        if zeros is not None:
            self.zeros_ = zeros

    def lifted(self, features: Features) -> Features:
        """The features with the learned logits in place of probabilities of 0, as `predict` sees them."""
        return lift_zeros(features, self.zeros_) if self.lifts_zeros else features

    @abstractmethod
    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        """Set the learned attributes; called under ``no_grad`` with checked input."""

    @abstractmethod
    def _predict(self, features: Features) -> Prediction:
        """Compute the prediction; called under ``no_grad`` with checked input."""

    def context(self, features: Features) -> Any:
        """What unlabelled samples that were met together tell of their environment, where `takes_context`."""
        raise self._without_context()

    def predict_in_window(self, features: Features, window: Tensor) -> tuple[Prediction, Tensor]:
        """Prediction in a window of which only sums are known, for exported graphs.

        Args:
            features: of the samples, checked.
            window: ``(2 + C,)`` sums over its samples: of two numbers, and of how often each class was
                predicted.

        Returns:
            The prediction, and what every sample adds to the sums, ``(n, 2 + C)``.
        """
        raise self._without_context()

    def prepare_export(self) -> None:
        """Work out, once and with real numbers, what an exported graph is to hold as it is."""

    def _without_context(self) -> ValueError:
        return ValueError(f"{self.display_name} judges each sample by itself: it takes no context")

    def _chunk(self) -> int:
        """Samples predicted at once; bounds memory whatever the number of samples."""
        return 65_536

    def fit_stream(self, source: Any) -> Self | None:
        """Fit to more rows than memory holds, or None where the method has no such way (the default).

        Args:
            source: what a feature store offers: passes over its shards, a sample of its rows, a place to keep
                what is done already.
        """
        return None

    def predictor(self, layers: bool, precision: str) -> Callable[[Features], Prediction] | None:
        """A function that predicts many samples faster than `predict`, or None where there is none (the
        default).

        Args:
            layers: are the terms of the layers wanted?
            precision: ``"single"`` or ``"double"``.
        """
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        same = type(self)(**copy.deepcopy(self.get_params(deep=False), memo))
        memo[id(self)] = same
        same.__dict__.update({k: copy.deepcopy(v, memo) for k, v in vars(self).items() if k.endswith("_")})
        return same

    def to(self, device: torch.device | str) -> Self:
        """A copy whose learned arrays are on ``device``, where its predictions are then made."""
        self._check_fitted()
        tensors: dict[str, Tensor] = {}
        state = pack({k: v for k, v in vars(self).items() if k.endswith("_")}, tensors)
        same = type(self)(**copy.deepcopy(self.get_params(deep=False)))
        same.__dict__.update(unpack(state, {k: x.to(device) for k, x in tensors.items()}))
        return same

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write ``calibrator.json`` and ``calibrator.safetensors`` with their checksums, whole or not at all.

        A calibrator that is there already is replaced at once; a folder with anything else in it is refused.
        Only a rule that was saved beside the old calibrator (`salgp.decide.Rule.save`) is no hindrance. It
        stays if the new calibrator is the old one byte for byte. Otherwise it is removed with the old one:
        it promises nothing about other confidences. A `salgp.storage.RemovedWarning` says so.
        """
        self._check_fitted()
        return save_folder(folder, lambda part: write_calibrator(self, part))

    def _check_fitted(self) -> None:
        if "n_classes_" not in vars(self):
            raise NotFittedError(
                f"this {type(self).__name__} is not fitted; call fit(features, labels) first"
            )

    def __getstate__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} is never pickled; use save(folder) and salgp.load(folder), or for a "
            f"CalibratedEstimator its own save(folder) and CalibratedEstimator.load(folder, estimator); "
            f"likewise CalibratedTorchClassifier.load(folder)"
        )


def chunks(features: Features, size: int) -> list[Features]:
    """The samples, at most ``size`` at a time; no samples are one chunk.

    Example:
        >>> [len(part) for part in chunks(Features(torch.zeros(5, 2)), 2)]
        [2, 2, 1]
    """
    if len(features) <= size:
        return [features]
    return [features[i : i + size] for i in range(0, len(features), size)]


def _place(i: Any, n: int) -> int:
    """The number of one of ``n`` samples, counted from 0."""
    try:
        number = operator.index(i)
    except TypeError:
        raise TypeError(
            f"expected the number of one sample, got a {type(i).__name__}; explain several one by one: "
            f"[calibrator.explain(features, i) for i in ...]"
        ) from None
    if not -n <= number < n:
        raise IndexError(f"there is no sample {number}: the features have {n:,}, counted from 0")
    return number % n
