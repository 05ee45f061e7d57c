"""Probabilities of exactly 0: what a calibrator takes in their place.

A forest of 20 trees gives no class a probability between 0 and .05, five neighbours none between 0 and .2, a
file of three digits none below .001, a sigmoid in single precision none above ``1 - 6e-8`` but 1. Their 0
says "less than I can tell", not "never". Its logarithm has no finite value, and any very negative one would
let a single sample whose true class got a 0 decide the whole fit.

So the calibration samples tell how small a probability the classifier can give, the smallest positive one,
and all zeros of a sample together count at most as much: a class of probability 0 gets

    log(r_k / c),   r_k = min(smallest p_k, max(smallest p, 2^-24)),

with the smallest positive ``p`` of the class ``k`` and of all classes. Positive probabilities stay as they
are, however small. The values do not depend on the type of the numbers, and are kept for `predict`. Where no
calibration sample had a zero, ``r_k = 2^-24``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from salgp.features import Features
from salgp.logits import ZERO, plain_array

__all__ = ["learn_zero_logits", "floor_zeros"]

SINGLE = -24 * math.log(2)
"""Logarithm of half the step of single precision below 1: a class whose own probabilities are never small
is not taken to be resolved more finely."""


def learn_zero_logits(logits: Tensor) -> Tensor | None:
    """Logits ``(c,)`` in place of a probability of 0, class by class; None where there is no such.

    Args:
        logits: ``(n, c)`` of the calibration samples; logarithms of probabilities where there are zeros.

    Example:
        >>> learn_zero_logits(torch.tensor([[0.8, 0.2], [1.0, 0.0]]).log().clamp_min(ZERO)).exp()
        tensor([0.1000, 0.1000], dtype=torch.float64)
    """
    if not _has_zeros(logits):
        return None
    own = logits.where(logits != ZERO, torch.inf).amin(dim=0).double()
    return torch.minimum(own, own.amin().clamp_min(SINGLE)) - math.log(logits.shape[1])


def floor_zeros(features: Features, zeros: Tensor | None) -> Features:
    """The same features, with what `learn_zero_logits` found in place of `ZERO`.

    Example:
        >>> f = Features(torch.tensor([[0.0, ZERO]]))
        >>> floor_zeros(f, torch.tensor([-3.0, -2.0])).logits
        tensor([[ 0., -2.]])
    """
    z = features.logits
    exporting = torch.compiler.is_exporting()  # a graph looks at every sample, and at logarithms of others
    if not exporting and not _has_zeros(z):
        return features
    zero = (z == ZERO) | (z == -torch.inf) if exporting else z == ZERO
    small = SINGLE - math.log(features.n_classes) if zeros is None else zeros.to(z)
    return replace(features, logits=torch.where(zero, small, z))


def _has_zeros(z: Tensor) -> bool:
    if not z.numel():
        return False
    return float(z.numpy().min() if plain_array(z) else z.amin()) <= ZERO and bool((z == ZERO).any())
