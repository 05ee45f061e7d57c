"""What top-label methods see of a prediction: the label, its confidence, and the mass of all other classes.

The entry of the softmax at the label is the confidence ``s``, the sum of the others is ``1 - s`` without
cancellation, so the log-odds are exact where ``s`` rounds to 1. `from_top_label` makes the calibrated
confidence a prediction again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.calibrators.temperature import row_chunks
from salgp.features import Features
from salgp.logits import at_least_single
from salgp.prediction import Prediction

__all__ = ["TopLabel", "from_top_label", "top_label"]


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
    label = features.label
    parts = []
    one_piece = torch.compiler.is_compiling() or not len(features)  # a graph must not depend on the batch
    for rows in [slice(None)] if one_piece else row_chunks(len(features), features.n_classes):
        z = features.logits[rows]
        probs = torch.softmax(at_least_single(z), dim=1)
        own = label[rows, None]
        parts.append((probs.gather(1, own)[:, 0], probs.scatter_(1, own, 0.0).sum(dim=1)))
    confidence, rest = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return TopLabel(label, confidence, rest)


def from_top_label(features: Features, confidence: Tensor, temperature: float) -> Prediction:
    """A prediction from the calibrated confidence, in the precision of the logits.

    Args:
        features: what was predicted on.
        confidence: ``(n,)``.
        temperature: of the other classes, a calibrator's ``rest_temperature_``.

    Example:
        >>> f = Features(torch.tensor([[2.0, 0.0, 0.0]]))
        >>> from_top_label(f, torch.tensor([0.4], dtype=torch.float64), 1.0).probs
        tensor([[0.4000, 0.3000, 0.3000]])
    """
    dtype = torch.promote_types(features.logits.dtype, torch.float32)
    return Prediction.from_confidence(features, confidence.to(dtype), temperature=temperature)
