"""Published estimators of accuracy without labels, as their authors define them, behind one interface.

Each is fitted on labelled predictions from home and estimates the accuracy of an unlabelled batch. They are
what ours is measured against (``benchmarks/act.py``), and are kept for whoever trusts them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.exceptions import NotFittedError
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from salgp.labels import as_labels
from salgp.prediction import Prediction

__all__ = [
    "ATC",
    "CBPE",
    "AverageConfidence",
    "DifferenceOfConfidences",
    "Estimator",
    "ImportanceWeighting",
]

FloatArray = NDArray[np.float64]


class Estimator(ABC):
    """Learn from labelled predictions, then estimate the accuracy of unlabelled ones.

    What is learned has a name that ends in ``_``; a leaf that learns something calls `_check_fitted` first.
    """

    @abstractmethod
    def fit(self, prediction: Prediction, labels: Any) -> Estimator:
        """Learn what accuracy goes with what predictions."""

    @abstractmethod
    def estimate(self, prediction: Prediction) -> float:
        """Accuracy of an unlabelled batch."""

    def _check_fitted(self) -> None:
        if not any(name.endswith("_") for name in vars(self)):
            raise NotFittedError(
                f"this {type(self).__name__} is not fitted; call fit(prediction, labels) first"
            )


class AverageConfidence(Estimator):
    """Mean confidence (after temperature scaling, where it is given such predictions).

    Example:
        >>> import torch
        >>> p = Prediction(torch.tensor([0, 0]), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.7]))
        >>> round(AverageConfidence().fit(p, [0, 1]).estimate(p), 3)
        0.8
    """

    def fit(self, prediction: Prediction, labels: Any) -> AverageConfidence:
        """Nothing to learn: it estimates without it, too."""
        return self

    def estimate(self, prediction: Prediction) -> float:
        """The mean."""
        return float(_confidence(prediction).mean())


class ATC(Estimator):
    """Average thresholded confidence (Garg et al. 2022): the share of scores above the threshold below which
    lies just the source's share of errors.

    Args:
        score: ``"confidence"`` or ``"entropy"`` (negative entropy).

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.8, 0.7, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> ATC().fit(p, [0, 0, 0, 1]).estimate(p)
        0.75
    """

    def __init__(self, score: str = "confidence") -> None:
        if score not in ("confidence", "entropy"):
            raise ValueError(f'score must be "confidence" or "entropy", got {score!r}')
        self.score = score

    def fit(self, prediction: Prediction, labels: Any) -> ATC:
        """Find the threshold."""
        scores = np.sort(self._scores(prediction))
        errors = int((~_right(prediction, labels)).sum())
        self.threshold_ = float(scores[errors]) if errors < len(scores) else np.inf
        return self

    def estimate(self, prediction: Prediction) -> float:
        """Share at or above the threshold."""
        self._check_fitted()
        return float((self._scores(prediction) >= self.threshold_).mean())

    def _scores(self, prediction: Prediction) -> FloatArray:
        if self.score == "confidence":
            return _confidence(prediction)
        probs = _probs(prediction)
        return (probs * np.log(np.clip(probs, 1e-30, None))).sum(1)


class DifferenceOfConfidences(Estimator):
    """Source accuracy minus the fall of the mean confidence (Guillory et al. 2021).

    Example:
        >>> import torch
        >>> p = Prediction(torch.tensor([0, 0]), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.7]))
        >>> round(DifferenceOfConfidences().fit(p, [0, 1]).estimate(p[:1]), 3)
        0.6
    """

    def fit(self, prediction: Prediction, labels: Any) -> DifferenceOfConfidences:
        """Remember accuracy and mean confidence."""
        self.accuracy_ = float(_right(prediction, labels).mean())
        self.confidence_ = float(_confidence(prediction).mean())
        return self

    def estimate(self, prediction: Prediction) -> float:
        """The difference, inside [0, 1]."""
        self._check_fitted()
        return float(np.clip(self.accuracy_ + _confidence(prediction).mean() - self.confidence_, 0, 1))


class CBPE(Estimator):
    """Confidence-based performance estimation as NannyML computes it: isotonic regression of every class's
    probability on the source, rows made to sum to 1, then the mean probability of the predicted class.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.9, 0.6, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> CBPE().fit(p, [0, 0, 0, 1]).estimate(p)
        0.75
    """

    def fit(self, prediction: Prediction, labels: Any) -> CBPE:
        """One isotonic regression per class."""
        probs = _probs(prediction)
        y = as_labels(labels, len(probs), probs.shape[1]).cpu().numpy()
        self.curves_ = [
            IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip").fit(probs[:, k], y == k)
            for k in range(probs.shape[1])
        ]
        return self

    def estimate(self, prediction: Prediction) -> float:
        """Expected accuracy under the calibrated probabilities."""
        self._check_fitted()
        probs = _probs(prediction)
        calibrated = np.stack([curve.predict(probs[:, k]) for k, curve in enumerate(self.curves_)], 1)
        total = calibrated.sum(1, keepdims=True)
        even = np.full_like(calibrated, 1 / probs.shape[1])
        calibrated = np.where(total > 0, calibrated / np.where(total > 0, total, 1), even)
        label = prediction.label.cpu().numpy()
        return float(calibrated[np.arange(len(label)), label].mean())


class ImportanceWeighting(Estimator):
    """Source accuracy weighted by how much each source sample looks like the batch.

    The density ratio is that of a logistic regression "source or batch?" on the log probabilities, and on the
    novelty where there is one.

    Args:
        penalty: inverse strength of its ridge.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.8, 0.7, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> round(ImportanceWeighting().fit(p, [0, 0, 0, 1]).estimate(p), 2)
        0.75
    """

    def __init__(self, penalty: float = 1.0) -> None:
        self.penalty = penalty

    def fit(self, prediction: Prediction, labels: Any) -> ImportanceWeighting:
        """Remember the source."""
        self.source_ = _columns(prediction)
        self.right_ = _right(prediction, labels)
        return self

    def estimate(self, prediction: Prediction) -> float:
        """Weighted source accuracy."""
        self._check_fitted()
        here = _columns(prediction)
        rows = np.concatenate([self.source_, here])
        where = np.repeat([0, 1], [len(self.source_), len(here)])
        judge = make_pipeline(StandardScaler(), LogisticRegression(C=self.penalty, max_iter=2000))
        log_odds = judge.fit(rows, where).decision_function(self.source_)
        weight = np.exp(np.clip(log_odds - log_odds.max(), -50, 0))
        return float((weight * self.right_).sum() / weight.sum())


def _columns(prediction: Prediction) -> FloatArray:
    columns = [np.log(np.clip(_probs(prediction), 1e-6, None)), _confidence(prediction)[:, None]]
    if prediction.novelty is not None:
        columns.append(prediction.novelty.detach().cpu().double().numpy()[:, None])
    return np.concatenate(columns, 1)


def _probs(prediction: Prediction) -> FloatArray:
    return prediction.probs.detach().cpu().double().numpy()


def _confidence(prediction: Prediction) -> FloatArray:
    return prediction.confidence.detach().cpu().double().numpy()


def _right(prediction: Prediction, labels: Any) -> NDArray[np.bool_]:
    y = as_labels(labels, len(prediction), prediction.probs.shape[1]).cpu()
    return (prediction.label.cpu() == y).numpy()
