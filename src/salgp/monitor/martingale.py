"""Test martingales: evidence against "nothing changed", valid however often it is looked at.

Monitored of a prediction are its *features*, a column of numbers each: the confidence, the predicted class,
the novelty, and every layer's term of the correction, each where the calibrator has it. So an alarm can say
what shifted.

If samples are exchangeable, the rank of each among all before it is uniform and independent of the past: the
conformal p-value ``p_t``, with ties broken at random. Betting on it with

    bet(p) = 1 + e cos(k pi p),    k = 1, 2, 3,    e = -.8 ... .8,

is a fair game, so the capital of any mixture of such bets is a test martingale: by Ville's inequality it ever
exceeds ``1 / a`` with probability at most ``a``, however often one looks. That bounds the probability of a
false alarm over the whole life of a monitor, not per look. ``k = 1`` gains when values rise or fall,
``k = 2`` when they spread or concentrate. New bets start at every block with prior weight
``1 / (b (b + 1))``, so that a change after a long quiet time costs only the logarithm of that time.
(Vovk et al. 2005, 2021.)

Ranks are exact on values rounded to `CELLS` fixed cells, which keeps memory constant; rounding makes ties,
which are broken at random, so the bound still holds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from scipy.special import logsumexp
from torch import Tensor

from salgp.logits import log_odds
from salgp.metrics.metric import FloatArray, IntArray, to_double
from salgp.prediction import Prediction

__all__ = ["AccuracyMartingale", "BANDS", "ConformalMartingale", "cells", "feature_cells", "feature_names"]

CELLS = 4096
"""Cells that values are rounded to: steps of about 1 %, finer near 0."""

BLOCK = 256
"""Samples between two starts of new bets."""

BANDS = 64
"""Bands of equal weight in the reference, to measure effect sizes with."""

FREQUENCIES = np.arange(1, 4)
STAKES = np.array([-0.8, -0.3, -0.1, 0.1, 0.3, 0.8])
ACCURACY_STAKES = np.array([0.05, 0.2, 0.5, 0.9])


def cells(values: FloatArray) -> IntArray:
    """Round to cells whose edges do not depend on any data.

    Example:
        >>> cells(np.array([-1e9, 0.0, 1e9]))
        array([   0, 2048, 4095])
    """
    compressed = np.arcsinh(1000 * values) / 22  # 22: where values of 2 million end
    return np.clip((compressed + 1) * (CELLS / 2), 0, CELLS - 1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Martingale:
    """Capital of a mixture of fair bets.

    Args:
        log_capital: log capital of every bet, of any shape.
        blocks: number of blocks so far.
        peak: largest log capital of all bets together so far.
    """

    log_capital: FloatArray
    blocks: int = 0
    peak: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what no sequence of bets gives, such as a damaged file."""
        finite = (self.log_capital < np.inf).all()
        if not finite or math.isnan(self.peak):
            raise ValueError("log capital must be a number")
        if not 0 <= self.blocks < 2**31:
            raise ValueError(f"blocks must be from 0 to 2^31, got {self.blocks}")

    @property
    def log_total(self) -> float:
        """Log capital of all bets together, what is not yet bet included."""
        return float(np.logaddexp(_log_mean(self.log_capital), -np.log1p(self.blocks)))

    def after_block(self, gain: FloatArray, **changes: Any) -> Self:
        """After one more block, in which new bets start; ``gain`` is the log gain of every bet."""
        b = self.blocks + 1
        new_bets = -np.log(b * (b + 1))
        capital = np.logaddexp(self.log_capital, new_bets) + gain
        after = replace(self, log_capital=capital, blocks=b, **changes)
        return replace(after, peak=max(self.peak, after.log_total))


@dataclass(frozen=True, eq=False)
class ConformalMartingale(Martingale):
    """Evidence against "the inputs are exchangeable with the reference", over ``J`` features.

    Its log capital is ``(J, frequencies, stakes)``.

    Args:
        counts: ``(J, CELLS)`` values seen, reference included.
    """

    counts: IntArray = field(kw_only=True)

    @staticmethod
    def start(reference: IntArray) -> ConformalMartingale:
        """No bet yet; ``reference`` are the cells ``(n, J)`` of reference samples."""
        counts = cell_counts(reference)
        shape = len(counts), len(FREQUENCIES), len(STAKES)
        nothing = np.full(shape, -np.inf)
        return ConformalMartingale(nothing, counts=counts)

    @property
    def log_features(self) -> FloatArray:
        """``(J,)`` log capital of the bets on each feature."""
        return np.array([_log_mean(each) for each in self.log_capital])

    def bet(self, values: IntArray, rng: np.random.Generator) -> ConformalMartingale:
        """Bet on new samples, cells ``(n, J)``, in their order."""
        found = self
        for first in range(0, len(values), BLOCK):
            block = values[first : first + BLOCK]
            p = _ranks(found.counts, block, rng.random(block.shape))
            waves = np.cos(np.pi * FREQUENCIES * p[..., None])  # (n, J, frequencies)
            gain = np.log1p(STAKES * waves[..., None]).sum(0)
            counts = found.counts + cell_counts(block)
            found = found.after_block(gain, counts=counts)
        return found


@dataclass(frozen=True, eq=False)
class AccuracyMartingale(Martingale):
    """Evidence against "answers are right at least as often as their confidence says, to within a tolerance".

    That is more than "nothing changed": a calibrator fitted on few samples may violate it from the start.

    A bet of ``1 + x (confidence - tolerance - right)`` cannot gain on average while that holds. It stays
    above 0 for every answer if ``x < 1 / (1 + tolerance)``: larger stakes are lowered to that.
    Its log capital is ``(stakes,)``.
    """

    @staticmethod
    def start() -> AccuracyMartingale:
        """No bet yet."""
        return AccuracyMartingale(np.full(len(ACCURACY_STAKES), -np.inf))

    def bet(self, confidence: FloatArray, right: NDArray[np.bool_], tolerance: float) -> AccuracyMartingale:
        """Bet on labelled samples, in their order."""
        stakes = np.minimum(ACCURACY_STAKES, 0.99 / (1 + tolerance))
        excess = confidence - tolerance - right
        gains = np.log1p(stakes * excess[:, None])
        found = self
        for first in range(0, len(gains), BLOCK):
            found = found.after_block(gains[first : first + BLOCK].sum(0))
        return found


def cell_counts(values: IntArray) -> IntArray:
    """``(J, CELLS)`` how many of the cells ``(n, J)`` are which."""
    return np.stack([np.bincount(column, minlength=CELLS) for column in values.T])


def _ranks(counts: IntArray, values: IntArray, draws: FloatArray) -> FloatArray:
    """``(n, J)`` share of all values up to and including each that are larger, ties counted by ``draws``."""
    below = counts.cumsum(1)  # (J, CELLS) seen at or below
    feature = np.arange(len(counts))
    larger = below[:, -1] - below[feature, values]  # (n, J)
    equal = counts[feature, values] + 1  # itself
    earlier = np.tri(len(values), k=-1, dtype=bool)
    for more, same, column in zip(larger.T, equal.T, values.T, strict=True):
        own = column[:, None]
        more += ((column > own) & earlier).sum(1)
        same += ((column == own) & earlier).sum(1)
    total = below[:, -1] + np.arange(1, len(values) + 1)[:, None]
    return (larger + draws * equal) / total


def _log_mean(log_values: FloatArray) -> float:
    return float(logsumexp(log_values)) - math.log(log_values.size)


def feature_names(prediction: Prediction) -> tuple[str, ...]:
    """Names of the features this kind of prediction has.

    Example:
        >>> import torch
        >>> feature_names(Prediction(torch.tensor([0]), torch.tensor([[0.9, 0.1]]), torch.tensor([0.9])))
        ('confidence', 'class')
    """
    return tuple(_features(prediction))


def feature_cells(prediction: Prediction) -> IntArray:
    """``(n, J)`` cells of the features."""
    values = np.stack([to_double(x) for x in _features(prediction).values()], 1)
    if not np.isfinite(values).all():
        raise ValueError("a prediction to be monitored must be finite; it has NaN or infinite entries")
    found = cells(values)
    found[:, 1] = np.minimum(prediction.label.cpu().numpy(), CELLS - 1)  # a class is a cell of its own
    return found


def _features(prediction: Prediction) -> dict[str, Tensor]:
    """The monitored values, by name."""
    found = {"confidence": log_odds(prediction.confidence.double(), 1e-9), "class": prediction.label}
    if prediction.novelty is not None:
        found["novelty"] = prediction.novelty
    if prediction.layers is not None:
        names = (f"layer {name}" for name in prediction.layers.names)
        found |= zip(names, prediction.layers.mean.T, strict=True)
    return found


def band_of_cells(reference: IntArray) -> IntArray:
    """``(J, CELLS)`` which of the reference's `BANDS` each cell belongs to, by counts ``(J, CELLS)``."""
    up_to = reference.cumsum(1)
    share = (up_to - reference / 2) / np.maximum(up_to[:, -1:], 1)
    return np.minimum((share * BANDS).astype(int), BANDS - 1)


def band_counts(values: IntArray, bands: IntArray) -> IntArray:
    """``(J, BANDS)`` how many of the cells ``(n, J)`` fall into each band."""
    columns = zip(bands, values.T, strict=True)
    return np.stack([np.bincount(band[cell], minlength=BANDS) for band, cell in columns])


def effects(reference: IntArray, now: IntArray) -> FloatArray:
    """``(J,)`` Cliff's delta, from -1 to 1: P(now > reference) - P(now < reference), by counts ``(J, B)``.

    Unlike a p-value it does not grow with the number of samples.

    Example:
        >>> effects(np.array([[1, 1]]), np.array([[0, 2]]))
        array([0.5])
    """
    total, up_to = reference.sum(1), reference.cumsum(1)
    below, above = up_to - reference, total[:, None] - up_to
    pairs = np.maximum(total * now.sum(1), 1)
    return (now * (below - above)).sum(1) / pairs
