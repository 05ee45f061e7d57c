"""How well does it do today, where there are no labels, or only a few?

Rooms: `accuracy` (what calibrated confidences say of a batch, with an interval), `labelled` (confidences
corrected by a few labels), `mix` (which classes the batch holds, and confidences corrected for it), `rivals`
(published estimators behind one interface). All take a `salgp.Prediction`, so that every calibrator can be
judged by how well it knows its own accuracy.
"""

from __future__ import annotations

from salgp.estimate.accuracy import (
    Estimate,
    Spread,
    accuracy,
    error_above,
    left_out_spread,
    measure_spread,
    per_class,
    sampling_spread,
)
from salgp.estimate.labelled import Correction, learn_correction
from salgp.estimate.mix import ClassMix, adapt, class_mix
from salgp.estimate.rivals import (
    ATC,
    CBPE,
    AverageConfidence,
    DifferenceOfConfidences,
    Estimator,
    ImportanceWeighting,
)

__all__ = [
    "ATC",
    "CBPE",
    "AverageConfidence",
    "ClassMix",
    "Correction",
    "DifferenceOfConfidences",
    "Estimate",
    "Estimator",
    "ImportanceWeighting",
    "Spread",
    "accuracy",
    "adapt",
    "class_mix",
    "error_above",
    "learn_correction",
    "left_out_spread",
    "measure_spread",
    "per_class",
    "sampling_spread",
]
