"""Proper scores and plain means: likelihood, Brier, accuracy, predictive variance.

A true class the network does not know (label -1) has no probability of its own: multi-class scores leave such
samples out (`salgp.metrics.evaluate` counts them), while the scores of correctness keep them, as wrong.
"""

from dataclasses import dataclass

import numpy as np

from salgp.metrics.binned import Scheme, assign_bins
from salgp.metrics.metric import (
    ArrayLike,
    FloatArray,
    Statistic,
    as_binary,
    as_distribution,
    as_numbers,
    as_scored,
    as_scores,
    mean_of,
    metric,
)

__all__ = []

EPS = float(np.finfo(np.float64).eps)
"""Probabilities are kept this far from 0 in logarithms, as in scikit-learn: one certain error costs 36 nats,
not infinity.
"""


@dataclass(frozen=True)
class BrierDecomposition:
    """Murphy's parts of the Brier score of the confidence: ``brier = reliability - resolution + uncertainty +
    within_bin``.

    Args:
        reliability: squared gap between mean confidence and accuracy of the bins (smaller is better).
        resolution: squared distance of the bins' accuracies from the overall one (larger is better).
        uncertainty: ``a (1 - a)`` of the overall accuracy a; not the method's doing.
        within_bin: what the binning hides: spread of confidence inside bins less twice its covariance with
            correctness.
    """

    reliability: float
    resolution: float
    uncertainty: float
    within_bin: float

    @property
    def brier(self) -> float:
        """The Brier score of the confidence, put together again."""
        return self.reliability - self.resolution + self.uncertainty + self.within_bin


@metric(
    "Right answers (accuracy)",
    "How often the predicted class is the true one; calibration never changes it.",
    larger_is_better=True,
    heading="acc.",
)
def accuracy(correct: ArrayLike) -> Statistic:
    """Share of correct predictions.

    Example:
        >>> accuracy([True, True, False, True])
        0.75
    """
    return mean_of(as_binary(correct, "correct"))


@metric(
    "Stated confidence (mean)",
    "Mean confidence; it should equal the share of right answers.",
    larger_is_better=None,
    heading="conf.",
)
def mean_confidence(confidence: ArrayLike) -> Statistic:
    """Mean confidence.

    Example:
        >>> mean_confidence([0.5, 0.75])
        0.625
    """
    return mean_of(as_scores(confidence, "confidence"))


@metric(
    "Surprise over all classes (NLL)",
    "Punishes little probability on the true class, over the whole list of classes.",
    larger_is_better=False,
    heading="NLL",
)
def nll(probs: ArrayLike, labels: ArrayLike) -> Statistic:
    """Multi-class negative log-likelihood, the mean of ``-log p(true class)``, in nats.

    Args:
        probs: ``(n, c)`` rows sum to 1.
        labels: ``(n,)`` true classes; samples of an unknown class (-1) are left out.

    Returns:
        A value of at least 0.

    Example:
        >>> round(nll([[0.5, 0.5], [0.9, 0.1], [0.8, 0.2]], [1, 0, -1]), 4)
        0.3993
    """
    p, y = as_distribution(probs, labels)
    true = np.clip(_of_labels(p, y), EPS, 1.0)
    return _mean_of_known(-np.log(true), y)


@metric(
    "Surprise at being right or wrong (NLLc)",
    "Punishes being sure and wrong; counts whether the answer was right.",
    larger_is_better=False,
    heading="NLLc",
)
def nll_correct(confidence: ArrayLike, correct: ArrayLike) -> Statistic:
    """Negative log-likelihood of correctness: ``-mean(c log s + (1 - c) log(1 - s))``, in nats.

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.

    Returns:
        A value of at least 0.

    Example:
        >>> round(nll_correct([0.5, 0.9], [0, 1]), 4)
        0.3993
    """
    s, c = as_scored(confidence, correct)
    s = np.clip(s, EPS, 1 - EPS)
    of_truth = np.where(c == 1, s, 1 - s)
    return mean_of(-np.log(of_truth))


@metric(
    "Squared error (Brier)",
    "Mean squared distance between probabilities and truth.",
    larger_is_better=False,
    heading="Brier",
)
def brier(probs: ArrayLike, labels: ArrayLike) -> Statistic:
    """Multi-class Brier score, the mean of ``sum_k (p_k - [y = k])^2``; between 0 and 2.

    Args:
        probs: ``(n, c)`` rows sum to 1.
        labels: ``(n,)`` true classes; samples of an unknown class (-1) are left out.

    Returns:
        A value in [0, 2]; scikit-learn halves it for two classes.

    Example:
        >>> round(brier([[0.5, 0.5], [1.0, 0.0]], [1, 0]), 3)
        0.25
    """
    p, y = as_distribution(probs, labels)
    squares = np.einsum("ij,ij->i", p, p, dtype=np.float64)
    return _mean_of_known(squares - 2 * _of_labels(p, y) + 1, y)


@metric(
    "Squared error of being right",
    "Mean squared distance between confidence and being right.",
    larger_is_better=False,
)
def brier_correct(confidence: ArrayLike, correct: ArrayLike) -> Statistic:
    """Brier score of correctness, the mean of ``(s - c)^2``.

    Example:
        >>> round(brier_correct([0.5, 1.0], [0, 1]), 3)
        0.125
    """
    s, c = as_scored(confidence, correct)
    return mean_of((s - c) ** 2)


def brier_decomposition(
    confidence: ArrayLike, correct: ArrayLike, n_bins: int = 15, scheme: Scheme = "width"
) -> BrierDecomposition:
    """Reliability, resolution and uncertainty of the confidence (Murphy 1973), and what binning hides
    (Stephenson et al. 2008).

    Args:
        confidence: ``(n,)`` in [0, 1].
        correct: ``(n,)`` 0/1 or boolean.
        n_bins: number of bins.
        scheme: equal width or equal mass.

    Returns:
        The parts, which add up to `brier_correct` exactly.

    Example:
        >>> parts = brier_decomposition([0.9, 0.9, 0.6, 0.6], [1, 1, 1, 0])
        >>> round(parts.reliability, 3), round(parts.resolution, 4), round(parts.uncertainty, 4)
        (0.01, 0.0625, 0.1875)
    """
    s, c = as_scored(confidence, correct)
    index, _ = assign_bins(s, n_bins, scheme)
    count = np.bincount(index)[index]  # (n,) samples in the bin of each
    in_bin, right = (np.bincount(index, x)[index] / count for x in (s, c))
    ds, dc, overall = s - in_bin, c - right, c.mean()
    return BrierDecomposition(
        reliability=float(np.mean((in_bin - right) ** 2)),
        resolution=float(np.mean((right - overall) ** 2)),
        uncertainty=float(overall * (1 - overall)),
        within_bin=float(np.mean(ds**2 - 2 * ds * dc)),
    )


@metric("Mean variance", "Mean squared error bar of the confidence.", larger_is_better=None)
def mean_variance(std: ArrayLike) -> Statistic:
    """Mean predictive variance of the confidence, from its standard deviations ``(n,)``.

    Example:
        >>> round(mean_variance([0.1, 0.3]), 3)
        0.05
    """
    values = as_numbers(std, "std")
    if values.min() < 0:
        raise ValueError(f"std must not be negative, got {values.min():g} in row {values.argmin()}")
    return mean_of(values**2)


def _of_labels(probs: np.ndarray, labels: np.ndarray) -> FloatArray:
    """Probability of each true class; any where it is unknown."""
    own = np.maximum(labels, 0)[:, None]
    return np.take_along_axis(probs, own, 1)[:, 0].astype(float)


def _mean_of_known(scores: FloatArray, labels: np.ndarray) -> Statistic:
    known = labels >= 0
    if not known.any():
        raise ValueError("every label is -1 (unknown): a multi-class score needs samples of known classes")
    inner = mean_of(scores[known])
    return Statistic(len(known), lambda weights: inner.of_weights(weights[..., known]))
