"""Published estimators of accuracy without labels, as their authors define them: the baselines of ours.

Each is a function of the labelled source (its prediction and labels) and the prediction of the unlabelled
target, and gives the accuracy to expect there. All are given temperature-scaled predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from salgp.labels import as_labels
from salgp.prediction import Prediction

__all__ = [
    "BASELINES",
    "atc",
    "average_confidence",
    "cbpe",
    "cot",
    "cott",
    "difference_of_confidences",
    "importance_weighting",
]

FloatArray = NDArray[np.float64]


def average_confidence(source: Prediction, labels: Any, target: Prediction) -> float:
    """Mean confidence of the target.

    Example:
        >>> import torch
        >>> p = Prediction(torch.tensor([0, 0]), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.7]))
        >>> round(average_confidence(p, [0, 1], p), 3)
        0.8
    """
    return float(_confidence(target).mean())


def atc(source: Prediction, labels: Any, target: Prediction, score: str = "confidence") -> float:
    """Average thresholded confidence (Garg et al. 2022): the share of target scores at or above the threshold
    below which lies just the source's share of errors; ``score`` is ``"confidence"`` or ``"entropy"``.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.8, 0.7, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> atc(p, [0, 0, 0, 1], p)
        0.75
    """
    scores = {"confidence": _confidence, "entropy": _negative_entropy}[score]
    return _share_above(scores(source), _right(source, labels), scores(target))


def difference_of_confidences(source: Prediction, labels: Any, target: Prediction) -> float:
    """Source accuracy minus the fall of the mean confidence (Guillory et al. 2021).

    Example:
        >>> import torch
        >>> p = Prediction(torch.tensor([0, 0]), torch.full((2, 2), 0.5), torch.tensor([0.9, 0.7]))
        >>> round(difference_of_confidences(p, [0, 1], p[:1]), 3)
        0.6
    """
    fall = _confidence(source).mean() - _confidence(target).mean()
    return float(np.clip(_right(source, labels).mean() - fall, 0, 1))


def cbpe(source: Prediction, labels: Any, target: Prediction) -> float:
    """Confidence-based performance estimation as NannyML computes it: isotonic regression of every class's
    probability on the source, rows made to sum to 1, then the mean probability of the predicted class.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.9, 0.6, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> cbpe(p, [0, 0, 0, 1], p)
        0.75
    """
    known, new, y = _probs(source), _probs(target), _labels(source, labels)
    curve = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
    columns = [curve.fit(known[:, k], y == k).predict(new[:, k]) for k in range(new.shape[1])]
    calibrated = np.stack(columns, 1)
    total = calibrated.sum(1, keepdims=True)
    calibrated = np.where(total > 0, calibrated / np.where(total > 0, total, 1), 1 / new.shape[1])
    return float(calibrated[np.arange(len(new)), target.label.cpu().numpy()].mean())


def importance_weighting(source: Prediction, labels: Any, target: Prediction) -> float:
    """Source accuracy weighted by the density ratio of a logistic regression "source or target?" on the log
    probabilities, the confidence, and the novelty where there is one.

    Example:
        >>> import torch
        >>> s = torch.tensor([0.9, 0.8, 0.7, 0.6])
        >>> p = Prediction(torch.zeros(4, dtype=torch.long), torch.stack([s, 1 - s], 1), s)
        >>> round(importance_weighting(p, [0, 0, 0, 1], p), 2)
        0.75
    """
    known, new = _columns(source), _columns(target)
    where = np.repeat([0, 1], [len(known), len(new)])
    ratio = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    log_odds = ratio.fit(np.concatenate([known, new]), where).decision_function(known)
    weight = np.exp(np.clip(log_odds - log_odds.max(), -50, 0))
    return float((weight * _right(source, labels)).sum() / weight.sum())


def cot(source: Prediction, labels: Any, target: Prediction) -> float:
    """Confidence optimal transport (Lu et al. 2023): one minus the cost of moving the target's probability
    vectors to one-hot labels in the source's class mix, with the maximum norm as the distance.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> p = Prediction(torch.tensor([0, 0]), probs, probs[:, 0])
        >>> round(cot(p, [0, 1], p), 3)  # one of the two must become class 1
        0.55
    """
    return float(1 - _transport_costs(target, _labels(source, labels)).mean())


def cott(source: Prediction, labels: Any, target: Prediction) -> float:
    """Confidence optimal transport with thresholding (Lu et al. 2023): the share of target costs at or below
    the threshold above which lies just the source's share of errors.

    Example:
        >>> import torch
        >>> probs = torch.tensor([[0.9, 0.1], [0.8, 0.2]])
        >>> p = Prediction(torch.tensor([0, 0]), probs, probs[:, 0])
        >>> cott(p, [0, 1], p)
        0.5
    """
    y = _labels(source, labels)
    costs = [_transport_costs(each, y) for each in (source, target)]
    return _share_above(-costs[0], _right(source, labels), -costs[1])


BASELINES: dict[str, Callable[[Prediction, Any, Prediction], float]] = {
    "average confidence": average_confidence,
    "ATC, confidence": atc,
    "ATC, entropy": partial(atc, score="entropy"),
    "difference of confidences": difference_of_confidences,
    "CBPE": cbpe,
    "importance weighting": importance_weighting,
    "COT": cot,
    "COTT": cott,
}


def _transport_costs(prediction: Prediction, y: NDArray[np.int64]) -> FloatArray:
    """``(n,)`` cost of each sample under the exact optimal plan to the class mix of ``y``.

    The distance of a probability vector from the one-hot vector of class k in the maximum norm is 1 - p_k.
    """
    probs = _probs(prediction)
    n, c = probs.shape
    exact = n * np.bincount(y[y >= 0], minlength=c) / max((y >= 0).sum(), 1)
    counts = np.floor(exact).astype(int)
    counts[np.argsort(counts - exact, kind="stable")[: n - counts.sum()]] += 1  # largest remainders
    classes = np.repeat(np.arange(c), counts)
    cost = 1 - probs[:, classes]
    rows, columns = linear_sum_assignment(cost)
    return np.asarray(cost[rows, columns])


def _share_above(source: FloatArray, right: NDArray[np.bool_], target: FloatArray) -> float:
    """Share of target scores at or above the threshold below which lies the source's share of errors."""
    errors = int((~right).sum())
    threshold = np.sort(source)[errors] if errors < len(source) else np.inf
    return float((target >= threshold).mean())


def _columns(prediction: Prediction) -> FloatArray:
    columns = [np.log(np.clip(_probs(prediction), 1e-6, None)), _confidence(prediction)[:, None]]
    if prediction.novelty is not None:
        columns.append(prediction.novelty.detach().cpu().double().numpy()[:, None])
    return np.concatenate(columns, 1)


def _probs(prediction: Prediction) -> FloatArray:
    return np.asarray(prediction.probs.detach().cpu().double())


def _confidence(prediction: Prediction) -> FloatArray:
    return np.asarray(prediction.confidence.detach().cpu().double())


def _negative_entropy(prediction: Prediction) -> FloatArray:
    probs = _probs(prediction)
    return np.asarray((probs * np.log(np.clip(probs, 1e-30, None))).sum(1))


def _labels(prediction: Prediction, labels: Any) -> NDArray[np.int64]:
    return np.asarray(as_labels(labels, len(prediction), prediction.probs.shape[1]).cpu())


def _right(prediction: Prediction, labels: Any) -> NDArray[np.bool_]:
    return np.asarray(prediction.label.cpu()) == _labels(prediction, labels)
