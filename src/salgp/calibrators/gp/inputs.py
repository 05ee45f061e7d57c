"""Inputs of a layerwise GP other than features: the evidence of each layer.

With ``inputs="evidence"`` a layer is its standardised agreement, the last one also its novelty (the columns
of `salgp.calibrators.evidence.monotone`), and the mean of the log-odds is that monotone regression. With a
linear kernel there is no regression below: the constant and the tempered log-odds are two more inputs, and
the Gaussian process is one expert of layer evidence without its constraints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from salgp.calibrators.evidence.cross_fitting import reference_and_evidence
from salgp.calibrators.evidence.fitting import fit_in_domain, training_rows
from salgp.calibrators.evidence.layer_spaces import Reference, ReferenceSettings, layer_evidence
from salgp.calibrators.evidence.mixture import Scales, samples_of, scales_of
from salgp.calibrators.evidence.monotone import MonotoneLogistic
from salgp.features import Features
from salgp.io import storable
from salgp.logits import best_temperature

__all__ = ["EvidenceInputs", "learn_evidence"]


@storable
@dataclass(frozen=True, eq=False)
class EvidenceInputs:
    """The transformation from features to evidence.

    Args:
        reference: what layers are compared with.
        scales: of the evidence.
        monotone: the monotone model of the log-odds, or None where the GP has a linear kernel.
    """

    reference: Reference
    scales: Scales
    monotone: MonotoneLogistic | None

    def view(self, features: Features) -> tuple[Features, Tensor]:
        """The samples with their evidence as layers, and the columns of the mean of their log-odds."""
        X = samples_of(features, layer_evidence(self.reference, features), self.scales).design
        return self.view_of(features, X)

    def view_of(self, features: Features, X: Tensor) -> tuple[Features, Tensor]:
        """The same for columns ``X (n, L + 3)`` that are known already."""
        layers = {name: X[:, 2 + j : 3 + j] for j, name in enumerate(features.layer_names)}
        layers[features.layer_names[-1]] = X[:, -2:]
        if self.monotone is None:
            linear = {"constant": X[:, :1], "log-odds": X[:, 1:2], **layers}
            return replace(features, layers=linear), X[:, :2]
        f = self.monotone.log_odds(X, features.label)
        return replace(features, layers=layers), torch.stack([torch.ones_like(f), f], dim=1)


def learn_evidence(
    features: Features,
    labels: Tensor,
    reference: tuple[Features, Tensor] | None,
    linear: bool,
    seed: int,
    class_sd: float = 1.0,
) -> tuple[EvidenceInputs, Tensor]:
    """Reference, scales and monotone regression from calibration data, and the columns of their evidence.

    Without a reference the calibration samples are one; each sample and its augmented ones are then compared
    with the *others*, as any new sample will be.
    """
    first, _ = features.originals
    known, evidence = reference_and_evidence(features, labels, reference, ReferenceSettings(seed=seed))
    temperature = best_temperature(features.logits[first], labels[first])[0]
    scales = scales_of(features[first], evidence[first], temperature)
    samples = samples_of(features, evidence, scales)
    monotone = None
    if not linear:
        rows = training_rows(features, samples, features.correct(labels).double())
        monotone = fit_in_domain(rows, features.n_classes, class_sd, True)
    return EvidenceInputs(known, scales, monotone), samples.design
