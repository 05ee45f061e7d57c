"""Everything that was learned, and how it judges a sample: both experts, heard as gate and window say.

An `EvidenceModel` turns features and what layers say of them into log-odds of being correct, with their
variance and the terms they add up to. `salgp.calibrators.evidence.calibrator` fits it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from salgp.calibrators.evidence.check import in_windows
from salgp.calibrators.evidence.classes import ClassModel
from salgp.calibrators.evidence.environment import Context, Environment, Surroundings
from salgp.calibrators.evidence.experts import Expert, InDomain, Opinion, mixed
from salgp.calibrators.evidence.gate import Gate
from salgp.calibrators.evidence.model import Scales, beyond, log_odds
from salgp.calibrators.evidence.reference import Evidence, Reference
from salgp.calibrators.evidence.rows import LARGEST, View, view_of
from salgp.calibrators.evidence.single import SingleSample
from salgp.calibrators.evidence.strangeness import Strangeness
from salgp.calibrators.evidence.windows import window_numbers
from salgp.features import Features
from salgp.prediction import LayerTerms
from salgp.storage import storable

__all__ = ["EvidenceModel"]


@storable
@dataclass(frozen=True, eq=False)
class EvidenceModel:
    """All that is needed to turn features into log-odds of being correct.

    Args:
        reference: what layers are compared with.
        temperature: of the network's confidence.
        scales: of the evidence.
        usual: how strange originals are.
        inside: the expert in domain.
        shift: the expert for shift; None where there were no copies to learn from.
        gate: who is heard on a single sample; None likewise.
        environment: who is heard in a context; None likewise.
        unseen: variance that an unseen shift adds to the log-odds, per squared weight of the expert for it.
        classes: how likely each class is, for `LayerEvidence.predict_classes`.
    """

    reference: Reference
    temperature: float
    scales: Scales
    usual: Strangeness
    inside: InDomain
    shift: Expert | None = None
    gate: Gate | None = None
    environment: Environment | None = None
    unseen: float = 0.0
    classes: ClassModel | None = None

    def __post_init__(self) -> None:
        """Refuse parts that do not belong together."""
        if self.classes is not None and len(self.classes.weights) != len(self.reference.layers):
            raise ValueError(f"{len(self.classes.weights)} weights for {len(self.reference.layers)} layers")

    @cached_property
    def ready(self) -> bool:
        """True, and all that is worked out once is."""
        return bool(
            self.reference.ready and self.inside.expert.former and (self.shift is None or self.shift.former)
        )

    @cached_property
    def single(self) -> SingleSample | None:
        """The same made ready for one sample at a time; None where it is not in the processor's memory, or
        some class has too few points.
        """
        if not self.reference.serves_single(len(self.inside.expert.posterior.offsets)):
            return None
        return SingleSample(
            self.reference,
            self.temperature,
            self.scales,
            self.usual,
            self.inside,
            self.shift,
            self.gate,
            self.unseen,
        )

    def view(self, features: Features, evidence: Evidence) -> View:
        """The samples as the experts see them."""
        return view_of(features, evidence, self.temperature, self.scales)

    def known_environment(self) -> Environment:
        """The environment; raises where a context tells nothing."""
        if self.environment is None:
            raise ValueError(
                "this calibrator was fitted without perturbed copies, so a context tells it nothing; "
                "fit it on extract(..., perturb='auto'), or predict without a context"
            )
        return self.environment

    def opinions(self, features: Features, evidence: Evidence) -> Tensor:
        """Two numbers per sample ``(n, 2)`` whose mean over a window describes it."""
        environment = self.known_environment()
        assert self.shift is not None
        view = self.view(features, evidence)
        return environment.opinions(self.inside.log_odds(view), self.shift.log_odds(view), view.label)

    def surroundings(self, features: Features, evidence: Evidence, context: Any) -> Surroundings:
        """What the environment of each sample shows; see `salgp.LayerEvidence.predict` for a context."""
        environment = self.known_environment()
        if isinstance(context, Context):
            return self.in_one_window(features, context.total)
        number = window_numbers(context, self.view(features, evidence).t)
        return in_windows(environment, self.opinions(features, evidence), features.label, number)

    def in_one_window(self, features: Features, sums: Tensor) -> Surroundings:
        """What a window with these sums ``(2 + C,)`` shows to samples that are in it."""
        environment, one = self.known_environment(), torch.zeros_like(features.label)
        known = len(environment.shares) + 2
        if sums.shape != (known,):
            raise ValueError(
                f"a context of this calibrator holds {known} sums, two and one for each class; "
                f"got {tuple(sums.shape)}: was it made by another calibrator?"
            )
        return environment.surroundings(sums.to(one.device, torch.float64)[None], one, features.label)

    def judged(
        self, features: Features, view: View, evidence: Evidence, seen: Surroundings | None
    ) -> tuple[Tensor, Tensor, LayerTerms]:
        """Mean and variance ``(n,)`` of the log-odds, and the terms that add up to them."""
        inside = self.inside.opinion(view)
        alone, far = self.leaning(view, evidence.place), beyond(evidence, self.scales)
        if self.shift is None or (seen is None and alone is None):
            return _added_up(features, inside, inside.variance, far)
        shift = self.shift.opinion(view)
        alone = torch.zeros_like(view.t) if alone is None else alone
        if seen is None:
            both = mixed(inside, shift, alone, self.unseen)
            return _added_up(features, both, (1 - alone).square() * inside.variance, far)
        environment, seen = self.known_environment(), seen.to(view.t)
        lean, doubt = environment.joined(alone, seen.m), environment.doubt(seen)
        both = mixed(inside, shift, lean, self.unseen)
        change = (lean - alone) * (shift.rest - inside.rest) - doubt
        gap = (1 - alone) * (shift.mean - inside.mean)
        unsure = gap.square() * environment.lean_variance(seen.m) + environment.doubt_variance(seen)
        own = (1 - lean).square() * inside.variance
        return _added_up(features, both, own, far, _Change(change, unsure, doubt))

    def leaning(self, view: View, place: Tensor) -> Tensor | None:
        """Weight ``(n,)`` of the expert for shift by the gate; None where it is asked about no sample."""
        if self.gate is None:
            return None
        lean = self.gate(view, place)
        return lean if torch.compiler.is_exporting() or bool(lean.any()) else None

    def heard(self, view: View, evidence: Evidence, seen: Surroundings | None) -> Tensor:
        """How far ``(n,)`` a sample is not judged as in domain: by gate, environment and length."""
        alone = self.leaning(view, evidence.place)
        alone = torch.zeros_like(view.t) if alone is None else alone
        lean = alone if seen is None else self.known_environment().joined(alone, seen.to(view.t).m)
        return torch.maximum(lean, 1 - 1 / beyond(evidence, self.scales))


@dataclass(frozen=True, eq=False)
class _Change:
    """What the environment adds to the log-odds: its term, the term's variance, and how much of it the
    experts do not account for; each ``(n,)``.
    """

    term: Tensor
    variance: Tensor
    doubt: Tensor


def _added_up(
    features: Features, whole: Opinion, own: Tensor, far: Tensor, environment: _Change | None = None
) -> tuple[Tensor, Tensor, LayerTerms]:
    """Mean and variance ``(n,)`` of the log-odds, and their terms; the confidence has what is left.

    Args:
        features: of the samples.
        whole: opinion of the experts on them.
        own: ``(n,)`` variance of the confidence's term.
        far: ``(n,)`` from `salgp.calibrators.evidence.model.beyond`: log-odds fall back to chance by it.
        environment: what it adds; None without one.
    """
    f, variance = whole.mean, whole.variance
    parts, spread = whole.terms, whole.term_variance
    names = ("confidence", "predicted class", *features.layer_names)
    if environment is not None:
        f, variance = f - environment.doubt, variance + environment.variance
        parts = torch.cat([parts, environment.term[:, None]], dim=1)
        spread = torch.cat([spread, environment.variance[:, None]], dim=1)
        names = (*names, "environment")
    chance = -math.log(max(features.n_classes - 1, 1))
    f = chance + (f - chance) / far
    rest = f - log_odds(features, 1.0, LARGEST) - parts.sum(dim=1)
    mean = torch.cat([rest[:, None], parts], dim=1)
    std = torch.cat([own[:, None], spread], dim=1).clamp_min(0).sqrt()
    return f, variance, LayerTerms(names, mean, std, "log-odds", True)
