"""What top-label methods see of a prediction, and how their answer becomes one again.

The softmax is taken once: its entry at the label is the confidence ``s``, the sum of the others is ``1 - s``
without cancellation (so the log-odds are exact where ``s`` rounds to 1), and the others, scaled, share what
the calibrated confidence leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.temperature import room_for, row_chunks
from salgp.features import Features, largest
from salgp.prediction import Prediction, share_others

__all__ = ["TopLabel", "split_top_label", "top_label"]

EPS = 1e-6
"""Calibrated confidences keep this distance from 0 and 1."""


@dataclass(frozen=True, eq=False)
class TopLabel:
    """Label, confidence and the mass of the other classes, ``(n,)`` each.

    Example:
        >>> top = top_label(Features(torch.tensor([[100.0, 0.0], [1.0, 1.0]])))
        >>> top.confidence, top.log_odds.round(decimals=2)
        (tensor([1.0000, 0.5000]), tensor([87.3400,  0.0000], dtype=torch.float64))
    """

    label: Tensor
    confidence: Tensor
    rest: Tensor

    @property
    def log_odds(self) -> Tensor:
        """``log s - log(1 - s)`` in double precision, finite: ``1 - s`` counts as the smallest normal number
        where it vanishes.
        """
        tiny = torch.finfo(self.rest.dtype).tiny
        return self.confidence.double().clamp_min(tiny).log() - self.rest.double().clamp_min(tiny).log()


def top_label(features: Features) -> TopLabel:
    """Label, confidence and rest of all samples, in chunks: no second matrix of the size of the logits.

    Example:
        >>> top_label(Features(torch.tensor([[2.0, 0.0, 0.0]]))).label
        tensor([0])
    """
    parts, work = [], None
    for rows in row_chunks(max(len(features), 1), features.n_classes):
        z = _wide(features.logits[rows])
        work = (
            work if work is not None and work.shape == z.shape else torch.empty_like(z)
        )  # fresh memory costs more than the softmax
        parts.append(split_top_label(z, work)[0])
    return TopLabel(
        torch.cat([p.label for p in parts]),
        torch.cat([p.confidence for p in parts]),
        torch.cat([p.rest for p in parts]),
    )


def split_top_label(logits: Tensor, work: Tensor | None = None) -> tuple[TopLabel, Tensor]:
    """The top label, and the softmax of all other classes (0 at the label), ``(n, c)``, written into ``work``
    if given.
    """
    z = _wide(logits)
    probs = torch.softmax(z, dim=1, out=room_for(z) if work is None else work)
    label = largest(logits)
    confidence = probs.gather(1, label[:, None])[:, 0]
    others = probs.scatter_(1, label[:, None], 0.0)
    return TopLabel(label, confidence, others.sum(dim=1)), others


def put_back(top: TopLabel, others: Tensor, confidence: Tensor) -> Prediction:
    """A prediction from the calibrated confidence; overwrites ``others``."""
    given = confidence.to(others.dtype)
    inside = given.clamp(EPS, 1 - EPS)
    return Prediction(
        top.label, share_others(others, top.rest, top.label, inside), inside, clipped=inside != given
    )


def _wide(x: Tensor) -> Tensor:
    """In at least single precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
