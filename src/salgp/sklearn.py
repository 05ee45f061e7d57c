"""Classifiers with calibrated confidences in scikit-learn's manner, for pipelines and searches.

`CalibratedEstimator` calibrates any fitted classifier that has ``predict_proba``.
`CalibratedTorchClassifier` trains a network on part of the data and calibrates it on the rest, so that
``predict_proba`` can be trusted and `predict_std` says how far.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import train_test_split
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from salgp.calibrators import Calibrator, load_calibrator
from salgp.calibrators.registry import method_for
from salgp.classifier import CalibratedClassifier, calibrate
from salgp.features import Features
from salgp.logits import refuse_masked
from salgp.prediction import Prediction

__all__ = ["CalibratedEstimator", "CalibratedTorchClassifier"]


class _Calibrated(ClassifierMixin, BaseEstimator, ABC):
    """A classifier of scikit-learn's manner, whose answers come from a `Prediction`."""

    classes_: np.ndarray

    @abstractmethod
    def prediction(self, X: Any) -> Prediction:
        """Labels as numbers, confidences and their error bars."""

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated class probabilities ``(n, c)``."""
        return np.asarray(self.prediction(X).probs.double().cpu().numpy())

    def predict(self, X: Any) -> np.ndarray:
        """Class labels: the classifier's own; calibration never changes them."""
        label = self.prediction(X).label.cpu().numpy()
        return np.asarray(self.classes_[label])


class CalibratedTorchClassifier(_Calibrated):
    """Train a PyTorch network on tabular data and calibrate it on a held-out part.

    Pickle and joblib keep it, as any estimator; ``classifier_.save(folder)`` keeps the calibrator alone.

    Args:
        network: ``(n_features, n_classes) -> nn.Module`` giving logits; a small perceptron by default.
        method: calibrator or its name; None for the library's default.
        calibration_fraction: share of the samples kept from training for calibration.
        epochs: passes over the training part.
        batch_size: samples per step.
        learning_rate: of Adam.
        random_state: seed of split, initial weights and order.

    Attributes:
        classes_: class labels, sorted.
        classifier_: the `salgp.CalibratedClassifier`.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = CalibratedTorchClassifier(method="platt", epochs=5).fit(X, y)
        >>> model.predict_proba(X).shape
        (150, 3)
    """

    def __init__(
        self,
        network: Callable[[int, int], nn.Module] | None = None,
        method: Calibrator | str | None = None,
        calibration_fraction: float = 0.3,
        epochs: int = 60,
        batch_size: int = 64,
        learning_rate: float = 1e-2,
        random_state: int = 0,
    ) -> None:
        self.network = network
        self.method = method
        self.calibration_fraction = calibration_fraction
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> Self:
        """Train and calibrate on samples ``X (n, d)`` with class labels ``y (n,)``."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, encoded = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"a classifier needs at least 2 classes, got 1 class: {self.classes_[0]!r}")
        self.centre_, self.scale_ = X.mean(0), X.std(0) + 1e-9
        inputs, labels = self._tensor(X), torch.as_tensor(encoded)
        train, held_out = ((inputs[rows], labels[rows]) for rows in self._split(encoded))
        model = self._train(*train)
        self.classifier_: CalibratedClassifier = calibrate(
            model, [held_out], method=self.method, reference=[train]
        )
        return self

    def predict_std(self, X: Any) -> np.ndarray | None:
        """Standard deviation of the confidence ``(n,)``, or None where the method has none."""
        std = self.prediction(X).std
        return None if std is None else np.asarray(std.cpu().numpy())

    def prediction(self, X: Any) -> Prediction:
        """Labels as numbers, confidences and their error bars."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return self.classifier_(self._tensor(X))

    def _tensor(self, X: np.ndarray) -> Tensor:
        return torch.as_tensor((X - self.centre_) / self.scale_, dtype=torch.float32)

    def _split(self, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        rows = np.arange(len(y))
        if len(rows) < 2:
            return rows, rows
        enough = np.bincount(y).min() >= 2 and int(self.calibration_fraction * len(y)) >= len(self.classes_)
        train, held_out = train_test_split(
            rows,
            test_size=self.calibration_fraction,
            random_state=self.random_state,
            stratify=y if enough else None,
        )
        return train, held_out

    def _train(self, inputs: Tensor, labels: Tensor) -> nn.Module:
        generator = torch.Generator().manual_seed(self.random_state)
        with torch.random.fork_rng(devices=[]):  # the global random numbers stay as they are
            torch.manual_seed(self.random_state)
            model = _checked_factory(self.network)(inputs.shape[1], len(self.classes_)).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=self.learning_rate)
        for _ in range(self.epochs):
            for batch in torch.randperm(len(inputs), generator=generator).split(self.batch_size):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(inputs[batch]), labels[batch]).backward()
                optimizer.step()
        return model.eval()


def _checked_factory(network: Any) -> Callable[[int, int], nn.Module]:
    if network is None:
        return _perceptron
    if isinstance(network, nn.Module) or not callable(network):
        raise TypeError(
            f"network must be a function (n_features, n_classes) -> nn.Module that makes a new network for "
            f"each fit, got a {type(network).__name__}; a network that is trained already is calibrated by "
            f"salgp.calibrate(network, loader)"
        )
    factory: Callable[[int, int], nn.Module] = network
    return factory


def _check_fitted(estimator: Any) -> None:
    """Refuse what is no fitted classifier."""
    if getattr(estimator, "predict", None) is None:
        raise TypeError(f"expected a fitted classifier, got {type(estimator).__name__}, which cannot predict")
    if not is_classifier(estimator) and getattr(estimator, "classes_", None) is None:
        kind = "a regressor" if is_regressor(estimator) else "no fitted classifier: it has no classes_"
        raise TypeError(
            f"{type(estimator).__name__} is {kind}; confidences are calibrated for classifiers, such as "
            f"sklearn.linear_model.LogisticRegression"
        )
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise NotFittedError(
            f"the {type(estimator).__name__} is not fitted. Fit it first, on other samples than it is "
            f"calibrated on; cross_val_score, searches and pipelines clone, and so unfit, what they get: "
            f"there pass CalibratedEstimator(sklearn.frozen.FrozenEstimator(model))"
        ) from None


def _perceptron(n_features: int, n_classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(n_features, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, n_classes)
    )


class CalibratedEstimator(_Calibrated):
    """A fitted classifier of scikit-learn's manner (XGBoost, LightGBM, ...) with calibrated confidences.

    `fit` takes samples the classifier was not trained on. The classifier itself is used as it is; labels stay
    its own. It is never pickled: `save` keeps what was learned about it, `load` takes it back.

    Args:
        estimator: fitted; gives ``predict_proba`` and ``classes_``. In ``cross_val_score``, a search or a
            pipeline wrap it in ``sklearn.frozen.FrozenEstimator``, since these clone, and so unfit, what they
            are given.
        method: calibrator, its name, or None: layer evidence where there are ``layers``, else temperature
            scaling.
        layers: ``X -> {name: embeddings (n, d)}``, for methods that read layers; e.g. the transformed
            features of a pipeline.

    Attributes:
        classes_: those of the estimator.
        calibrator_: the fitted calibrator.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> from sklearn.naive_bayes import GaussianNB
        >>> X, y = load_iris(return_X_y=True)
        >>> model = CalibratedEstimator(GaussianNB().fit(X[::2], y[::2])).fit(X[1::2], y[1::2])
        >>> model.predict_proba(X).shape
        (150, 3)
    """

    def __init__(
        self,
        estimator: Any,
        method: Calibrator | str | None = None,
        layers: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> None:
        self.estimator = estimator
        self.method = method
        self.layers = layers

    def fit(self, X: Any, y: Any) -> Self:
        """Calibrate on samples ``X`` with class labels ``y``; classes unknown to the estimator count as
        errors.
        """
        _check_fitted(self.estimator)
        self.classes_ = np.asarray(self.estimator.classes_)
        number = {label: k for k, label in enumerate(self.classes_.tolist())}
        labels = torch.tensor([number.get(label, -1) for label in np.asarray(y).tolist()])
        features = self._features(X)
        self.calibrator_: Calibrator = method_for(self.method, bool(features.layers)).fit(features, labels)
        return self

    def prediction(self, X: Any) -> Prediction:
        """Labels as numbers, confidences and their error bars."""
        check_is_fitted(self)
        return self.calibrator_.predict(self._features(X))

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Write the calibrator, without the estimator: that is kept by whoever made it."""
        check_is_fitted(self)
        return self.calibrator_.save(folder)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        estimator: Any,
        layers: Callable[[Any], Mapping[str, Any]] | None = None,
    ) -> Self:
        """Put a saved calibrator and the fitted estimator it belongs to together again.

        Args:
            folder: written by `save`.
            estimator: the same as then, fitted.
            layers: the same function as then, where there was one.

        Example:
            >>> import tempfile
            >>> from sklearn.datasets import load_iris
            >>> from sklearn.naive_bayes import GaussianNB
            >>> X, y = load_iris(return_X_y=True)
            >>> nb = GaussianNB().fit(X[::2], y[::2])
            >>> model = CalibratedEstimator(nb).fit(X[1::2], y[1::2])
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     again = CalibratedEstimator.load(model.save(folder), nb)
            >>> bool((again.predict_proba(X) == model.predict_proba(X)).all())
            True
        """
        _check_fitted(estimator)
        calibrator = load_calibrator(folder)
        loaded = cls(estimator, clone(calibrator), layers)
        loaded.classes_ = np.asarray(estimator.classes_)
        if len(loaded.classes_) != calibrator.n_classes_:
            raise ValueError(
                f"{folder} was fitted on {calibrator.n_classes_} classes, the estimator has "
                f"{len(loaded.classes_)}: is it the same?"
            )
        loaded.calibrator_ = calibrator
        return loaded

    def _features(self, X: Any) -> Features:
        if getattr(self.estimator, "predict_proba", None) is None:
            raise TypeError(
                f"{type(self.estimator).__name__} has no predict_proba; calibrate its decision_function with "
                f"salgp.calibrate_outputs(logits, labels)"
            )
        refuse_masked(X, "X")
        return Features.from_probs(
            self.estimator.predict_proba(X), None if self.layers is None else self.layers(X)
        )
