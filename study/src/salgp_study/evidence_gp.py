"""A Gaussian process on the evidence of the layers: steps 1 and 2 from the paper's model to layer evidence.

Each layer is its standardised agreement, the last one also its novelty (the columns of
`salgp.calibrators.evidence.monotone`). With a linear kernel the constant and the tempered log-odds are two
more inputs, and the confidence is none of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from salgp.calibrators import register
from salgp.calibrators.evidence.cross_fitting import own_reference
from salgp.calibrators.evidence.layer_spaces import (
    Reference,
    ReferenceSettings,
    layer_evidence,
    make_reference,
)
from salgp.calibrators.evidence.mixture import Samples, Scales, samples_of, scales_of
from salgp.calibrators.gp.salgp import LayerwiseGP, fit_structure, settings_of
from salgp.calibrators.gp.structures import Structure, structure
from salgp.features import Features
from salgp.gp.covariance import Sum, kernel_on
from salgp.io import storable
from salgp.logits import best_temperature

__all__ = ["EvidenceColumns", "EvidenceGP", "learn_columns"]


@storable
@dataclass(frozen=True, eq=False)
class EvidenceColumns:
    """From features to the columns of their evidence.

    Args:
        reference: what layers are compared with.
        scales: of the evidence.
    """

    reference: Reference
    scales: Scales

    def __call__(self, features: Features) -> Tensor:
        """Columns ``X (n, L + 3)``."""
        return samples_of(features, layer_evidence(self.reference, features), self.scales).design


def learn_columns(
    features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None, seed: int = 0
) -> tuple[EvidenceColumns, Samples]:
    """Reference and scales from calibration data, and the calibration samples with their evidence.

    Without a reference the calibration samples are one; each sample and its augmented ones are then compared
    with the *others*, as any new sample will be.
    """
    first, _ = features.originals
    settings = ReferenceSettings(seed=seed)
    if reference is None:
        known, evidence = own_reference(features, labels, settings)
    else:
        known = make_reference(*reference, settings)
        evidence = layer_evidence(known, features)
    temperature = best_temperature(features.logits[first], labels[first])[0]
    scales = scales_of(features[first], evidence[first], temperature)
    return EvidenceColumns(known, scales), samples_of(features, evidence, scales)


@register
@dataclass(repr=False, eq=False)
class EvidenceGP(LayerwiseGP):
    """The ``sum`` of `salgp.SALGP` with the evidence of each layer in place of its features.

    Example:
        >>> EvidenceGP(kernel="linear").name
        'evidence-gp'
    """

    name: ClassVar[str] = "evidence-gp"
    uses_reference: ClassVar[bool] = True

    def _fit(self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None) -> None:
        self.columns_, samples = learn_columns(features, labels, reference, self.seed)
        seen = self._as_layers(features, samples.design)
        self.structure_ = self._structure(seen)
        self.fitted_ = fit_structure(self.structure_, seen, labels, settings_of(self))

    def _seen(self, features: Features) -> Features:
        return self._as_layers(features, self.columns_(features))

    def _as_layers(self, features: Features, X: Tensor) -> Features:
        layers = {name: X[:, 2 + j : 3 + j] for j, name in enumerate(features.layer_names)}
        layers[features.layer_names[-1]] = X[:, -2:]
        if self.kernel == "linear":
            layers = {"constant": X[:, :1], "log-odds": X[:, 1:2], **layers}
        return replace(features, layers=layers)

    def _structure(self, seen: Features) -> Structure:
        if self.kernel != "linear":
            return structure("sum", seen.widths, seen.n_classes, kernel=self.kernel)
        terms = tuple(kernel_on(f"layer:{name}", "linear") for name in seen.layer_names)
        return Structure(Sum(terms), seen.layer_names, stacked=False, terms=seen.layer_names)
