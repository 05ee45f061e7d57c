"""Samples as the model of layer evidence sees them: a few numbers each, whatever the network.

A `View` is what the network and its layers say of a sample; `FittedRows` are views with the answers, the rows
a calibrator was fitted on. They are kept, so that samples can be added and taken back later.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from salgp.calibrators.copies import copies, originals
from salgp.calibrators.evidence.model import (
    Scales,
    gated,
    height,
    network_log_odds,
    standardised,
)
from salgp.calibrators.evidence.reference import Evidence
from salgp.features import Features
from salgp.storage import storable

__all__ = ["LARGEST", "FittedRows", "View", "rows_of", "view_of"]

LARGEST = 20.0
"""Log-odds are kept within this bound."""


@storable
@dataclass(frozen=True, eq=False)
class View:
    """What is known of ``n`` samples without their labels.

    Args:
        own: ``(n, 2)`` what the network says: log-odds of the tempered confidence, as they are and at the
            usual length of the features.
        agreement: ``(n, L)`` in standard deviations of the originals.
        novelty: ``(n, L)`` likewise, from their median.
        label: ``(n,)`` predicted class.
    """

    own: Tensor
    agreement: Tensor
    novelty: Tensor
    label: Tensor

    @cached_property
    def t(self) -> Tensor:
        """``(n,)`` log-odds of the tempered confidence."""
        return self.own[:, 0]

    @cached_property
    def gated(self) -> Tensor:
        """``(n, L)`` agreements as the model counts them."""
        return gated(self.agreement, self.novelty)

    @cached_property
    def height(self) -> Tensor:
        """``(n, L)`` novelties as the model counts them."""
        return height(self.novelty)

    def __len__(self) -> int:
        return len(self.own)

    def __getitem__(self, rows: Tensor) -> View:
        return View(*(getattr(self, f.name)[rows] for f in fields(self)))


@storable
@dataclass(frozen=True, eq=False)
class FittedRows:
    """Rows a model was fitted on.

    Args:
        view: of the samples.
        correct: ``(n,)`` 0 or 1.
        group: ``(n,)`` number of the original; copies share it.
        family: ``(n,)`` of perturbations, 0 for originals.
        strength: ``(n,)`` of the perturbation.
    """

    view: View
    correct: Tensor
    group: Tensor
    family: Tensor
    strength: Tensor

    def __len__(self) -> int:
        return len(self.correct)

    def __getitem__(self, rows: Tensor) -> FittedRows:
        return FittedRows(self.view[rows], *(x[rows] for x in self._origin()))

    @property
    def is_copy(self) -> Tensor:
        """Perturbed copy, or original? ``(n,)``."""
        return self.family > 0

    @property
    def families(self) -> list[int]:
        """Families of perturbations, without the originals."""
        return sorted(set(self.family.tolist()) - {0})

    def joined(self, more: FittedRows) -> FittedRows:
        """These rows and more, whose groups are new ones."""
        first = int(self.group.max()) + 1 if len(self) else 0
        view = (torch.cat([getattr(self.view, f.name), getattr(more.view, f.name)]) for f in fields(View))
        theirs = (more.correct, more.group + first, more.family, more.strength)
        return FittedRows(
            View(*view), *(torch.cat(pair) for pair in zip(self._origin(), theirs, strict=True))
        )

    def without(self, some: FittedRows) -> FittedRows:
        """These rows without some of them, each taken once."""
        keep = torch.ones(len(self), dtype=torch.bool, device=self.correct.device)
        mine, gone = self._numbers(), some._numbers().to(self.correct)
        for x in gone:
            same = keep & torch.isclose(mine, x, rtol=1e-6, atol=1e-7).all(dim=1)
            if not bool(same.any()):
                raise ValueError(
                    "a sample to forget is not among those the calibrator was fitted on, or its label was "
                    "another"
                )
            keep[same.nonzero()[0, 0]] = False
        if not bool((keep & ~self.is_copy).any()):
            raise ValueError("cannot forget every sample a calibrator knows")
        return self[keep.nonzero()[:, 0]]

    def _origin(self) -> tuple[Tensor, ...]:
        return self.correct, self.group, self.family, self.strength

    def _numbers(self) -> Tensor:
        v = self.view
        one = torch.stack([v.label.to(v.own), self.correct], dim=1)
        return torch.cat([v.own, one, v.agreement, v.novelty], dim=1)


def view_of(features: Features, evidence: Evidence, temperature: float, scales: Scales) -> View:
    """The view of samples, given the scales of the originals."""
    A, N = standardised(evidence, scales)
    return View(network_log_odds(features, evidence, temperature, scales, LARGEST), A, N, features.label)


def rows_of(features: Features, view: View, correct: Tensor) -> FittedRows:
    """Views with their answers; copies of unknown family are all of family 1, of unknown strength 1."""
    group = originals(features)[1]
    is_copy = copies(features)
    family = is_copy.long() if features.families is None else features.families.to(is_copy.device)
    strength = is_copy.double() if features.strengths is None else features.strengths.to(is_copy.device)
    return FittedRows(view, correct, group, family, strength)
