"""What a layerwise GP may see instead of features: the evidence of each layer, two numbers.

With ``inputs="evidence"`` a layer is its gated agreement and its negative persistent novelty (the columns of
`salgp.calibrators.evidence.model`), and the mean of the log-odds is the monotone model of layer evidence.
With a linear kernel there is no monotone model below: the constant and the tempered log-odds are two more
inputs, and the Gaussian process is the model of layer evidence without its constraints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.calibrators.copies import copies, originals
from salgp.calibrators.evidence.left_out import OwnReference
from salgp.calibrators.evidence.model import (
    LARGEST_LOG_ODDS,
    LogOdds,
    Scales,
    columns,
    fit_log_odds,
    gated,
    height,
    log_odds,
    sample_weights,
    scales_of,
    standardised,
)
from salgp.calibrators.evidence.reference import WIDTH, Evidence, Reference, layer_evidence, make_reference
from salgp.calibrators.temperature import best_temperature
from salgp.features import Features
from salgp.storage import storable

__all__ = ["EvidenceInputs", "design", "learn_evidence"]

CLEAN, CAUTION, RIDGE, CLASS_SPREAD = 0.8, 1.25, 0.2, 1.0
"""Settings of the monotone model: weight of originals, of errors among copies, pull of the weights, spread of
the classes.
"""


@storable
@dataclass(frozen=True, eq=False)
class EvidenceInputs:
    """All that turns features into evidence.

    Args:
        reference: what layers are compared with.
        temperature: of the network's confidence.
        scales: of the evidence.
        monotone: the monotone model of the log-odds, or None where the GP has a linear kernel.
    """

    reference: Reference
    temperature: float
    scales: Scales
    monotone: LogOdds | None

    def view(self, features: Features) -> tuple[Features, Tensor]:
        """The samples with their evidence as layers, and the columns of the mean of their log-odds."""
        evidence = layer_evidence(self.reference, features)
        return self.view_of(features, design(features, evidence, self.temperature, self.scales))

    def view_of(self, features: Features, X: Tensor) -> tuple[Features, Tensor]:
        """The same for columns ``X`` that are known already."""
        L = len(features.layers)
        pairs = {name: X[:, [2 + j, 2 + L + j]] for j, name in enumerate(features.layer_names)}
        if self.monotone is None:
            linear = {"constant": X[:, :1], "log-odds": X[:, 1:2], **pairs}
            return replace(features, layers=linear), X[:, 1:2]
        f = self.monotone.to(X).moments(X, features.label)[0]
        return replace(features, layers=pairs), torch.stack([torch.ones_like(f), f], dim=1)


def learn_evidence(
    features: Features,
    labels: Tensor,
    reference: tuple[Features, Tensor] | None,
    linear: bool,
    seed: int,
    class_spread: float = CLASS_SPREAD,
) -> tuple[EvidenceInputs, Tensor]:
    """Reference, scales and monotone model from calibration data, and the columns of their evidence.

    Without a reference the calibration samples are one; each sample and its copies are then compared with the
    *others*, as any new sample will be.
    """
    first, _ = originals(features)
    known = make_reference(*(reference or (features[first], labels[first])), seed=seed)
    if reference is None:
        evidence = OwnReference(features, labels, known, WIDTH, seed=seed).evidence()
    else:
        evidence = layer_evidence(known, features)
    temperature = best_temperature(features.logits[first], labels[first], warn=False)[0]
    scales = scales_of(evidence[first])
    X = design(features, evidence, temperature, scales)
    monotone = None
    if not linear:
        correct = features.correct(labels).double()
        weight = sample_weights(copies(features), correct, CLEAN, CAUTION)
        monotone = fit_log_odds(X, features.label, correct, weight, features.n_classes, RIDGE, class_spread)
    return EvidenceInputs(known, temperature, scales, monotone), X


def design(features: Features, evidence: Evidence, temperature: float, scales: Scales) -> Tensor:
    """The columns of samples in the model of layer evidence, with ``t`` within `LARGEST_LOG_ODDS`."""
    t = log_odds(features, temperature, LARGEST_LOG_ODDS)
    A, N = standardised(evidence, scales)
    return columns(t[:, None], gated(A, N), height(N))
