"""Choices that must hold under shift: scores on perturbations the model has not seen, and the layers worth
reading.

A setting that looks best on the perturbations it was fitted on may have learned just those.
`leave_family_out` fits without one family of perturbed copies and scores on it, for every family in turn;
originals are scored by leaving out each sample with all its copies. `select_layers` drops layers as long as
that score allows it: fewer taps, smaller reference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.base import clone
from torch import Tensor

from salgp.calibrators.evidence.calibrator import LayerEvidence
from salgp.calibrators.evidence.model import originals
from salgp.calibrators.evidence.reference import Evidence, Reference
from salgp.features import Features, as_labels
from salgp.metrics import ece, nll_correct

__all__ = ["FamilyScores", "LayerChoice", "leave_family_out", "select_layers"]


@dataclass(frozen=True)
class FamilyScores:
    """Scores on what the model was not fitted on.

    Args:
        nll: family of perturbations (0: original samples) -> negative log-likelihood of correctness.
        ece: the same for the calibration error.
    """

    nll: dict[int, float]
    ece: dict[int, float]

    @property
    def loss(self) -> float:
        """Mean of the negative log-likelihood over the families, originals included."""
        return sum(self.nll.values()) / len(self.nll)


@dataclass(frozen=True)
class LayerChoice:
    """Layers worth reading.

    Args:
        names: of the layers kept, in the order of the forward pass.
        path: layers kept and loss of every step, from all layers on.
    """

    names: tuple[str, ...]
    path: tuple[tuple[tuple[str, ...], float], ...]

    def __str__(self) -> str:
        return "\n".join(f"{loss:.4f}  {', '.join(names)}" for names, loss in self.path)


def leave_family_out(
    features: Features,
    labels: Tensor,
    reference: tuple[Features, Tensor] | None = None,
    calibrator: LayerEvidence | None = None,
) -> FamilyScores:
    """Score a calibrator's settings on families of perturbations it was not fitted on.

    Args:
        features: originals and perturbed copies, with ``groups`` and ``families`` (``extract(...,
            perturb="auto")``).
        labels: ``(n,)`` true classes.
        reference: features and labels of the network's training set.
        calibrator: the settings to score; it is not changed.

    Returns:
        Scores by family; of originals only, where there are no copies.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(200, 2, generator=g)
        >>> y = (x + 0.7 * torch.randn(200, 2, generator=g)).argmax(dim=1)
        >>> copies = Features(
        ...     3 * x.repeat(2, 1),
        ...     {"a": x.repeat(2, 1)},
        ...     torch.arange(200).repeat(2),
        ...     torch.arange(400) // 200,
        ... )
        >>> sorted(leave_family_out(copies, y.repeat(2)).nll)
        [0, 1]
    """
    y, known, evidence, settings = _prepared(features, labels, reference, calibrator)
    return _scores(settings, features, y, evidence, known)


def select_layers(
    features: Features,
    labels: Tensor,
    reference: tuple[Features, Tensor] | None = None,
    cost: float = 0.002,
    calibrator: LayerEvidence | None = None,
) -> LayerChoice:
    """The layers worth their cost: of all steps that each drop the layer missed least, the one with the
    smallest loss + cost * layers.

    Args:
        features: see `leave_family_out`.
        labels: ``(n,)`` true classes.
        reference: features and labels of the network's training set.
        cost: negative log-likelihood a layer must be worth to be kept.
        calibrator: the settings to use; it is not changed.

    Returns:
        The choice, and how it was found.

    Example:
        >>> g = torch.Generator().manual_seed(0)
        >>> x = torch.randn(300, 2, generator=g)
        >>> y = (x + 0.7 * torch.randn(300, 2, generator=g)).argmax(dim=1)
        >>> layers = {"useful": x, "noise": torch.randn(300, 2, generator=g)}
        >>> blurred = 3 * (x + torch.randn(300, 2, generator=g))
        >>> select_layers(Features(blurred, layers), y).names
        ('useful',)
    """
    if cost < 0:
        raise ValueError(f"cost must not be negative, got {cost}")
    y, known, evidence, settings = _prepared(features, labels, reference, calibrator)
    names = features.layer_names

    def loss(kept: tuple[int, ...]) -> float:
        columns = Evidence(evidence.agreement[:, kept], evidence.novelty[:, kept])
        return _scores(settings, features.select([names[j] for j in kept]), y, columns, known).loss

    kept = tuple(range(len(names)))
    path = [(kept, loss(kept))]
    while len(kept) > 1:
        tried = [tuple(j for j in kept if j != out) for out in kept]
        kept, value = min(((some, loss(some)) for some in tried), key=lambda found: found[1])
        path.append((kept, value))
    best = min(path, key=lambda step: step[1] + cost * len(step[0]))
    return LayerChoice(
        tuple(names[j] for j in best[0]),
        tuple((tuple(names[j] for j in some), value) for some, value in path),
    )


def _prepared(
    features: Features,
    labels: Tensor,
    reference: tuple[Features, Tensor] | None,
    calibrator: LayerEvidence | None,
) -> tuple[Tensor, Reference, Evidence, LayerEvidence]:
    settings: LayerEvidence = clone(calibrator) if calibrator is not None else LayerEvidence()
    y = as_labels(labels, len(features), features.n_classes).to(features.logits.device)
    known, evidence = settings.compared(features, y, reference)
    return y, known, evidence, settings


def _scores(
    settings: LayerEvidence, features: Features, labels: Tensor, evidence: Evidence, known: Reference
) -> FamilyScores:
    first, _ = originals(features)
    family = (
        torch.zeros(len(features), dtype=torch.long) if features.families is None else features.families.cpu()
    )
    whole: LayerEvidence = clone(settings)
    whole.learn(features, labels, evidence, known)
    found = {0: (whole.loo_confidence_, features[first].correct(labels[first]))}
    for number in family[family > 0].unique().tolist():
        fit, held = (family != number).nonzero()[:, 0], (family == number).nonzero()[:, 0]
        part: LayerEvidence = clone(settings)
        part.learn(
            features[fit], labels[fit], Evidence(evidence.agreement[fit], evidence.novelty[fit]), known
        )
        there = features[held]
        prediction = part.from_evidence(there, Evidence(evidence.agreement[held], evidence.novelty[held]))
        found[number] = (prediction.confidence, there.correct(labels[held]))
    return FamilyScores(
        {k: nll_correct(s, c) for k, (s, c) in found.items()}, {k: ece(s, c) for k, (s, c) in found.items()}
    )
