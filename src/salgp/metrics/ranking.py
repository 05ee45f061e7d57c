"""Does the confidence put errors last? Scores of ranking, selection and novelty detection.

Ties are treated as an ordering at random would on average, so the order of the samples never matters.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from salgp.metrics.metric import ArrayLike, FloatArray, Groups, Statistic, as_binary, as_numbers, metric

__all__ = []


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """Error rate among the accepted samples, by the share accepted.

    Args:
        coverage: ``(n,)`` share of samples accepted, ``1/n`` to 1, most confident first.
        risk: ``(n,)`` error rate among them.
    """

    coverage: FloatArray
    risk: FloatArray

    @property
    def area(self) -> float:
        """Area under the curve (AURC): the mean risk over all coverages."""
        return float(self.risk.mean())


@metric(
    "Spotting errors (AUROC)",
    "Chance that a right answer is surer than a wrong one; 0.5 is a coin toss.",
    larger_is_better=True,
    heading="AUROC",
)
def auroc(confidence: ArrayLike, correct: ArrayLike) -> Statistic:
    """Area under the ROC curve of spotting errors: the chance that a correct prediction is more confident
    than a wrong one.

    Args:
        confidence: ``(n,)`` any score that is larger for surer predictions.
        correct: ``(n,)`` 0/1 or boolean.

    Returns:
        A value in [0, 1], 0.5 for chance; NaN where all predictions are correct, or all wrong.

    Example:
        >>> auroc([0.9, 0.8, 0.7, 0.6], [1, 0, 1, 0])
        0.75
    """
    return _pair_order(*_checked(confidence, correct))


def risk_coverage(confidence: ArrayLike, correct: ArrayLike) -> RiskCoverage:
    """Error rate when only the most confident samples are accepted, at every coverage (Geifman & El-Yaniv
    2017).

    Args:
        confidence: ``(n,)`` any score that is larger for surer predictions.
        correct: ``(n,)`` 0/1 or boolean.

    Returns:
        The curve, from one accepted sample to all.

    Example:
        >>> risk_coverage([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]).risk.round(2)
        array([0.  , 0.  , 0.33, 0.25])
    """
    s, c = _checked(confidence, correct)
    ranks = _rank_groups(-s)
    expected = ranks.totals(1 - c) / np.bincount(ranks.index)  # errors of one of a tied group
    errors = np.cumsum(expected[np.sort(ranks.index)])
    accepted = np.arange(1, len(s) + 1)
    return RiskCoverage(accepted / len(s), errors / accepted)


@metric(
    "Error left when picking the surest (AURC)",
    "Mean error rate over all shares that could be kept.",
    larger_is_better=False,
)
def aurc(confidence: ArrayLike, correct: ArrayLike) -> Statistic:
    """Area under the risk-coverage curve: mean error rate over all coverages; smaller is better.

    Args:
        confidence: ``(n,)`` any score that is larger for surer predictions.
        correct: ``(n,)`` 0/1 or boolean.

    Returns:
        A value in [0, 1].

    Example:
        >>> round(aurc([0.9, 0.8, 0.7, 0.6], [1, 1, 0, 1]), 4)
        0.1458
    """
    s, c = _checked(confidence, correct)
    n, ranks = len(s), _rank_groups(s)
    harmonic = np.append(0.0, np.cumsum(1 / np.arange(1, n + 1)))
    return Statistic(n, partial(_mean_risk, ranks, harmonic, 1 - c))


@metric(
    "Spotting unknown classes (AUROC)",
    "Chance that an out-of-distribution sample has a larger novelty than one from the distribution.",
    larger_is_better=True,
)
def ood_auroc(novelty: ArrayLike, is_ood: ArrayLike) -> Statistic:
    """Chance that an out-of-distribution sample has a larger novelty score than one from the distribution.

    Args:
        novelty: ``(n,)`` larger means less like the known data.
        is_ood: ``(n,)`` 0/1 or boolean.

    Returns:
        A value in [0, 1], 0.5 for chance; NaN where one of the two kinds is absent.

    Example:
        >>> ood_auroc([0.1, 0.2, 0.9], [0, 0, 1])
        1.0
    """
    return _pair_order(*_checked(novelty, is_ood, "novelty", "is_ood"))


@metric(
    "Out-of-distribution samples accepted",
    "Share of out-of-distribution samples accepted by the threshold that accepts 95 % of the others.",
    larger_is_better=False,
)
def fpr95(novelty: ArrayLike, is_ood: ArrayLike) -> float:
    """Share of out-of-distribution samples accepted by the threshold that accepts 95 % of the others.

    Args:
        novelty: ``(n,)`` larger means less like the known data.
        is_ood: ``(n,)`` 0/1 or boolean.

    Returns:
        A value in [0, 1], smaller is better; NaN where one of the two kinds is absent.

    Example:
        >>> fpr95([0.1, 0.2, 0.15, 0.9], [0, 0, 1, 1])
        0.5
    """
    score, truth = _checked(novelty, is_ood, "novelty", "is_ood")
    ood, known = score[truth == 1], np.sort(score[truth == 0])
    if not len(ood) or not len(known):
        return math.nan
    accepted = -(-95 * len(known) // 100)  # integer ceiling: exactly 95 % suffice
    return float(np.mean(ood <= known[accepted - 1]))


def _mean_risk(ranks: Groups, harmonic: FloatArray, wrong: FloatArray, weights: FloatArray) -> FloatArray:
    """Mean error rate over all coverages, by the weights ``(..., n)``.

    In a tied group of g samples and e errors behind N samples and E errors, the k-th acceptance has the
    expected risk (E + k e/g) / (N + k); their sum is e + (E - N e/g) (H(N + g) - H(N)) with harmonic numbers
    H.
    """
    g = ranks.totals(weights)[..., ::-1]  # most confident first
    e = ranks.totals(weights * wrong)[..., ::-1]
    after = g.cumsum(axis=-1)
    before, errors_before = after - g, e.cumsum(axis=-1) - e
    steps = harmonic[after.astype(np.int64)] - harmonic[before.astype(np.int64)]
    risks = e + (errors_before - before * e / np.maximum(g, 1)) * steps
    return risks.sum(-1) / weights.sum(-1)


def _pair_order(score: FloatArray, positive: FloatArray) -> Statistic:
    return Statistic(len(score), partial(_share_in_order, _rank_groups(score), positive))


def _share_in_order(ranks: Groups, positive: FloatArray, weights: FloatArray) -> FloatArray:
    """Share of (positive, negative) pairs in the right order, ties counting half."""
    p = ranks.totals(weights * positive)
    q = ranks.totals(weights * (1 - positive))
    below = q.cumsum(axis=-1) - q / 2
    ordered = (p * below).sum(-1)
    pairs = p.sum(-1) * q.sum(-1)
    return np.where(pairs > 0, ordered / np.maximum(pairs, 1), np.nan)


def _rank_groups(score: FloatArray) -> Groups:
    values, index = np.unique(score, return_inverse=True)
    return Groups(index, len(values))


def _checked(
    score: ArrayLike, truth: ArrayLike, score_name: str = "confidence", truth_name: str = "correct"
) -> tuple[FloatArray, FloatArray]:
    s = as_numbers(score, score_name)
    return s, as_binary(truth, truth_name, len(s))
