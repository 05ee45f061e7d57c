"""Calibrate any fitted classifier that has ``predict_proba``, for pipelines and searches of scikit-learn."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, clone, is_classifier, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import check_is_fitted

from salgp.calibrators import Calibrator, load_calibrator
from salgp.calibrators.registry import method_for
from salgp.features import Features
from salgp.logits import refuse_masked
from salgp.prediction import Prediction

__all__ = ["CalibratedEstimator"]


class CalibratedEstimator(ClassifierMixin, BaseEstimator):
    """A fitted classifier of scikit-learn's manner (XGBoost, LightGBM, ...) with calibrated confidences.

    `fit` takes samples the classifier was not trained on. The classifier itself is used as it is; labels stay
    its own. It is never pickled: `save` keeps what was learned about it, `load` takes it back.

    Args:
        estimator: fitted; gives ``predict_proba`` and ``classes_``. In ``cross_val_score``, a search or a
            pipeline wrap it in ``sklearn.frozen.FrozenEstimator``, since these clone, and so unfit, what they
            are given.
        method: calibrator, its name, or None: layer evidence where there are ``layers``, else stacked
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
        self.calibrator_ = method_for(self.method, bool(features.layers)).fit(features, labels)
        return self

    def prediction(self, X: Any) -> Prediction:
        """Labels as numbers, confidences and their error bars."""
        check_is_fitted(self)
        return self.calibrator_.predict(self._features(X))

    def predict_proba(self, X: Any) -> np.ndarray:
        """Calibrated class probabilities ``(n, c)``."""
        return self.prediction(X).probs.double().numpy(force=True)

    def predict(self, X: Any) -> np.ndarray:
        """Class labels: the classifier's own; calibration never changes them."""
        return np.asarray(self.classes_[self.prediction(X).label.cpu().numpy()])

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
        layers = None if self.layers is None else self.layers(X)
        return Features.from_probs(self.estimator.predict_proba(X), layers)


def _check_fitted(estimator: Any) -> None:
    """Refuse what is no fitted classifier."""
    name = type(estimator).__name__
    if getattr(estimator, "predict", None) is None:
        raise TypeError(f"expected a fitted classifier, got {name}, which cannot predict")
    if not is_classifier(estimator) and getattr(estimator, "classes_", None) is None:
        kind = "a regressor" if is_regressor(estimator) else "no fitted classifier: it has no classes_"
        raise TypeError(
            f"{name} is {kind}; confidences are calibrated for classifiers, such as "
            f"sklearn.linear_model.LogisticRegression"
        )
    try:
        check_is_fitted(estimator)
    except NotFittedError:
        raise NotFittedError(
            f"the {name} is not fitted. Fit it first, on other samples than it is "
            f"calibrated on; cross_val_score, searches and pipelines clone, and so unfit, what they get: "
            f"there pass CalibratedEstimator(sklearn.frozen.FrozenEstimator(model))"
        ) from None
