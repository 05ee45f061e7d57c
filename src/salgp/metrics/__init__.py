"""Scores of calibration, likelihood, ranking and intervals, and bootstrap intervals for each.

All take NumPy arrays or torch tensors and compute in double precision. Top-label metrics take
``(confidence, correct)``, multi-class ones ``(probs, labels)``; `evaluate` takes a whole prediction and
computes all `METRICS`. A metric of your own is one function under `metric`, shown everywhere once `register`
has seen it.
"""

from salgp.metrics.binned import (
    ReliabilityBins,
    adaptive_ece,
    classwise_ece,
    debiased_ece,
    ece,
    mce,
    reliability_bins,
)
from salgp.metrics.interval import accuracy_band, interval_coverage, interval_width
from salgp.metrics.metric import Metric, Statistic, metric
from salgp.metrics.proper import (
    BrierDecomposition,
    accuracy,
    brier,
    brier_correct,
    brier_decomposition,
    mean_confidence,
    mean_variance,
    nll,
    nll_correct,
)
from salgp.metrics.ranking import RiskCoverage, aurc, auroc, fpr95, ood_auroc, risk_coverage
from salgp.metrics.scores import (
    METRICS,
    Comparison,
    Interval,
    Scores,
    arrays_of,
    bootstrap,
    compare,
    evaluate,
    register,
)
from salgp.metrics.smooth import smooth_ece

__all__ = [
    "METRICS",
    "BrierDecomposition",
    "Comparison",
    "Interval",
    "Metric",
    "ReliabilityBins",
    "RiskCoverage",
    "Scores",
    "Statistic",
    "accuracy",
    "accuracy_band",
    "adaptive_ece",
    "arrays_of",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "brier_correct",
    "brier_decomposition",
    "classwise_ece",
    "compare",
    "debiased_ece",
    "ece",
    "evaluate",
    "fpr95",
    "interval_coverage",
    "interval_width",
    "mce",
    "mean_confidence",
    "mean_variance",
    "metric",
    "nll",
    "nll_correct",
    "ood_auroc",
    "register",
    "reliability_bins",
    "risk_coverage",
    "smooth_ece",
]
