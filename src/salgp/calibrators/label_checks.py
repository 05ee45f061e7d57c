"""Do labels belong to the samples beside them? Labels of other samples, or of classes in another order, do
not, and no calibration survives them.

They are told by comparing the network with itself: how often would it be right if the labels were shuffled?
With predicted classes counted ``a_k`` and true ones ``b_k``, the number of hits under a random order of the
``n`` labels has mean ``S / n`` and variance ``(S - sum a b^2 / n - sum a^2 b / n + (S / n)^2) / (n - 1)``
with ``S = sum a b``. A weak network is a little better than that, or does not claim to be much better.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from salgp.features import Features
from salgp.logits import tell_nothing

__all__ = ["misaligned", "misaligned_reference", "refuse_signs"]

CLAIMED = 0.1
"""By how much the confidences must exceed the accuracy before labels at the level of a guess are doubted."""
SURE = 5.0
"""Standard deviations that are no accident."""
LOOKED_AT = 1000
"""About how many samples are asked for their confidence."""
ENOUGH = 50
"""Fewer samples cannot tell a network at the level of a guess from a weak one."""
NEVER = 1e-4
"""Chance of no hit at all by shuffled labels below which none is suspicious."""


def refuse_signs(labels: Tensor, n_classes: int) -> None:
    """Refuse labels -1 and 1 of two classes: -1 is a class the network does not know, class 0 is 0.

    Example:
        >>> refuse_signs(torch.tensor([-1, 1, 1, -1]), 2)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: labels are -1 and 1; two classes are numbered 0 and 1 ...
    """
    counts = [int((labels == value).sum()) for value in (-1, 0, 1)]
    if n_classes == 2 and counts[1] == 0 and min(counts[0], counts[2]) >= 2:
        raise ValueError(
            "labels are -1 and 1; two classes are numbered 0 and 1 (-1 is an unknown class): pass "
            "(labels + 1) // 2"
        )


@dataclass(frozen=True)
class _Hits:
    """Correct samples ``hits`` of ``n``, and mean and standard deviation of their number under shuffled
    labels.
    """

    n: int
    hits: int
    mean: float
    sd: float

    @property
    def skill(self) -> float:
        """Accuracy beyond that of shuffled labels."""
        return (self.hits - self.mean) / self.n


def misaligned(features: Features, labels: Tensor) -> str | None:
    """A sentence where the labels cannot be those of the samples.

    Args:
        features: ``n`` original samples.
        labels: ``(n,)`` their classes; -1 is left out.

    Example:
        >>> z = 5 * torch.nn.functional.one_hot(torch.arange(90) % 3).float()
        >>> misaligned(Features(z), (torch.arange(90) + 1) % 3)[:41]
        'no calibration sample is classified corre'
    """
    known = labels >= 0
    if not bool(known.any()):
        return (
            "no calibration sample has a known class: all labels are -1; number the classes from 0, in the "
            "order of the network's outputs"
        )
    found = _hits(features, labels)
    ask = "are the labels in the order of the network's classes, and aligned with the samples?"
    if found.hits == 0 and (1 - found.mean / found.n) ** found.n < NEVER:
        return f"no calibration sample is classified correctly: {ask}"
    if found.n < ENOUGH or found.sd == 0 or found.hits > found.mean + 2 * found.sd:
        return None
    accuracy = found.hits / found.n
    s = features[known.nonzero()[:: 1 + found.n // LOOKED_AT, 0]].confidence.double()
    claimed, sd = float(s.mean()), float((s * (1 - s)).mean() / found.n) ** 0.5
    if claimed < accuracy + max(CLAIMED, SURE * sd):
        return None
    return (
        f"the network is right on {accuracy:.0%} of the calibration samples, no more than if their labels "
        f"were shuffled ({found.mean / found.n:.0%}), and claims {claimed:.0%}: {ask}"
    )


def misaligned_reference(
    calibration: tuple[Features, Tensor], reference: tuple[Features, Tensor]
) -> str | None:
    """A sentence where the network is far worse on the reference than on the calibration samples, though it
    was trained on it; references without class scores are not judged.
    """
    if tell_nothing(reference[0].logits):
        return None
    here, there = _hits(*calibration), _hits(*reference)
    if min(here.n, there.n) == 0 or there.skill > here.skill / 2:
        return None
    accuracy = here.hits / here.n
    doubt = SURE * (accuracy * (1 - accuracy) * (1 / here.n + 1 / there.n)) ** 0.5
    if there.hits / there.n > accuracy - max(doubt, CLAIMED):
        return None
    return (
        f"the network is right on {there.hits / there.n:.0%} of the reference samples, and on {accuracy:.0%} "
        f"of the calibration samples, though it was trained on the reference: are the labels of the "
        f"reference in the order of the network's classes, and aligned with its samples?"
    )


def _hits(features: Features, labels: Tensor) -> _Hits:
    known = labels >= 0
    true, predicted = labels[known], features.label[known]
    n, c = len(true), features.n_classes
    b, a = (torch.bincount(x, minlength=c).double() for x in (true, predicted))
    both = float((a * b).sum())
    rest = both - float((a * b * (a + b)).sum()) / max(n, 1) + (both / max(n, 1)) ** 2
    variance = max(rest, 0.0) / max(n - 1, 1)
    return _Hits(n, int((true == predicted).sum()), both / max(n, 1), variance**0.5)
