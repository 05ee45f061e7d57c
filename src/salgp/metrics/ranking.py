"""Does the confidence put errors last? Scores of ranking, selection and novelty detection.

Ties are treated as an ordering at random would on average, so the order of the samples never matters.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    s, c = _checked(confidence, correct)
    return _pair_order(s, c)


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
    expected = ranks.totals(1 - c) / ranks.totals(np.ones_like(c))
    accepted = np.arange(1, len(s) + 1)
    return RiskCoverage(accepted / len(s), np.cumsum(expected[np.sort(ranks.index)]) / accepted)


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
    # In a tied group of g samples and e errors behind N samples and E errors, the k-th acceptance has the
    # expected risk (E + k e/g) / (N + k); their sum is e + (E - N e/g) (H(N + g) - H(N)) with harmonic
    # numbers H.
    s, c = _checked(confidence, correct)
    ranks = _rank_groups(s)
    harmonic = np.concatenate([[0.0], np.cumsum(1 / np.arange(1, len(s) + 1))])

    def of_weights(weights: FloatArray) -> FloatArray:
        g, e = (ranks.totals(weights * x)[..., ::-1] for x in (1.0, 1 - c))  # most confident first
        after, errors_after = g.cumsum(axis=-1), e.cumsum(axis=-1)
        before = after - g
        steps = harmonic[after.astype(np.int64)] - harmonic[before.astype(np.int64)]
        risks = e + (errors_after - e - before * e / np.maximum(g, 1)) * steps
        return np.asarray(risks.sum(axis=-1) / weights.sum(axis=-1))

    return Statistic(len(s), of_weights)


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
    score = as_numbers(novelty, "novelty")
    return _pair_order(score, as_binary(is_ood, "is_ood", len(score)))


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
    score = as_numbers(novelty, "novelty")
    ood = as_binary(is_ood, "is_ood", len(score)) == 1
    if ood.all() or not ood.any():
        return float("nan")
    known = np.sort(score[~ood])
    threshold = known[-(-95 * len(known) // 100) - 1]  # integer ceiling: exactly 95 % suffice
    return float(np.mean(score[ood] <= threshold))


def _pair_order(score: FloatArray, positive: FloatArray) -> Statistic:
    """Share of (positive, negative) pairs in the right order, ties counting half."""
    ranks = _rank_groups(score)

    def of_weights(weights: FloatArray) -> FloatArray:
        p, q = ranks.totals(weights * positive), ranks.totals(weights * (1 - positive))
        pairs = p.sum(axis=-1) * q.sum(axis=-1)
        ordered = (p * (q.cumsum(axis=-1) - q / 2)).sum(axis=-1)
        return np.where(pairs > 0, ordered / np.maximum(pairs, 1), np.nan)

    return Statistic(len(score), of_weights)


def _rank_groups(score: FloatArray) -> Groups:
    values, index = np.unique(score, return_inverse=True)
    return Groups(index, len(values))


def _checked(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    s = as_numbers(confidence, "confidence")
    return s, as_binary(correct, "correct", len(s))
