"""Accuracy of unlabelled data, and confidences corrected by a few labels or for another class mix.

`accuracy` (expected accuracy of a batch, with an interval), `labelled` (confidences corrected by a few
labels), `mix` (the class mix of a batch, and confidences corrected for it). All take a `salgp.Prediction`.
"""

from salgp.estimate.accuracy import (
    Estimate,
    Spread,
    accuracy,
    error_above,
    measure_spread,
    per_class,
    sampling_spread,
)
from salgp.estimate.labelled import Correction, learn_correction
from salgp.estimate.mix import ClassMix, adapt, class_mix

__all__ = [
    "ClassMix",
    "Correction",
    "Estimate",
    "Spread",
    "accuracy",
    "adapt",
    "class_mix",
    "error_above",
    "learn_correction",
    "measure_spread",
    "per_class",
    "sampling_spread",
]
