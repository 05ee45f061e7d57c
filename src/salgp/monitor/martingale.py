"""Evidence against "nothing changed" that may be looked at any time.

If samples are exchangeable, the rank of each among all before it is uniform and independent of the past: the
conformal p-value ``p_t``, made continuous by a random share of its ties. Betting on it, with

    bet(p) = 1 + e cos(k pi p),    k = 1, 2, 3,    e = -.8 ... .8,

is a fair game, so the money made by any mixture of such bets is a test martingale: by Ville's inequality it
ever exceeds ``1 / a`` with probability at most ``a``, however often one looks. That is the stated rate of
false alarms *over the whole life* of a monitor, not per look. ``k = 1`` makes money when values rise or fall,
``k = 2`` when they spread or gather. Bets start at every block with prior weight ``1 / (b (b + 1))``, so that
a change after a long quiet time costs only the logarithm of that time. (Vovk et al. 2005, 2021.)

Ranks are exact on values rounded to `CELLS` fixed cells, which keeps memory constant; rounding makes ties,
and ties are broken at random, so nothing is lost of the guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["CELLS", "Promise", "Wealth", "cells"]

CELLS = 4096
"""Cells that values are rounded to: steps of about 1 %, finer near 0."""

BLOCK = 256
"""Samples bet on between two restarts."""

FREQUENCIES = np.arange(1, 4)
STAKES = np.array([-0.8, -0.3, -0.1, 0.1, 0.3, 0.8])
LAMBDAS = np.array([0.05, 0.2, 0.5, 0.9])

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


def cells(values: FloatArray) -> IntArray:
    """Round to cells whose edges do not depend on any data.

    Example:
        >>> cells(np.array([-1e9, 0.0, 1e9]))
        array([   0, 2048, 4095])
    """
    compressed = np.arcsinh(1000 * values) / 22  # 22: where values of 2 million end
    return np.clip((compressed + 1) * (CELLS / 2), 0, CELLS - 1).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Wealth:
    """What bets on each of ``J`` channels have made so far.

    Args:
        counts: ``(J, CELLS)`` values seen, reference included.
        log_money: ``(J, frequencies, stakes)`` logarithm of the money of every bet, restarts included.
        blocks: how many were bet on.
        peak: largest logarithm of the money of all bets together.
    """

    counts: IntArray
    log_money: FloatArray
    blocks: int = 0
    peak: float = 0.0

    @staticmethod
    def start(reference: IntArray) -> Wealth:
        """Nothing bet yet; ``reference`` are the cells ``(n, J)`` of samples from home."""
        counts = np.stack([np.bincount(column, minlength=CELLS) for column in reference.T])
        return Wealth(counts, np.full((len(counts), len(FREQUENCIES), len(STAKES)), -np.inf))

    @property
    def log_total(self) -> float:
        """Logarithm of the money of all bets together, that not yet bet included."""
        return float(np.logaddexp(_log_mean(self.log_money), -np.log1p(self.blocks)))

    @property
    def log_channels(self) -> FloatArray:
        """``(J,)`` the same for the bets on each channel."""
        return np.array([_log_mean(each) for each in self.log_money])

    def bet(self, values: IntArray, rng: np.random.Generator) -> Wealth:
        """Bet on new samples, cells ``(n, J)``, in their order."""
        wealth = self
        for first in range(0, len(values), BLOCK):
            wealth = wealth._block(values[first : first + BLOCK], rng)
        return wealth

    def _block(self, values: IntArray, rng: np.random.Generator) -> Wealth:
        p = _ranks(self.counts, values, rng.random(values.shape))
        waves = np.cos(np.pi * FREQUENCIES * p[:, :, None])  # (n, J, frequencies)
        gain = np.log1p(STAKES * waves[..., None]).sum(0)
        b = self.blocks + 1
        money = np.logaddexp(self.log_money, -np.log(b * (b + 1))) + gain
        counts = self.counts.copy()
        for j, column in enumerate(values.T):
            counts[j] += np.bincount(column, minlength=CELLS)
        after = replace(self, counts=counts, log_money=money, blocks=b)
        return replace(after, peak=max(self.peak, after.log_total))


@dataclass(frozen=True, eq=False)
class Promise:
    """The same for labelled samples against "answers are right at least as often as their confidence says".

    That is more than "nothing changed": a calibrator fitted on few samples may break it from the start.

    A bet of ``1 + x (confidence - tolerance - right)`` cannot gain on average as long as the promise is kept
    to within ``tolerance``. It stays above 0 for every answer if ``x < 1 / (1 + tolerance)``: larger stakes
    are lowered to that.

    Args:
        log_money: ``(stakes,)``.
        blocks: how many were bet on.
        peak: largest logarithm of the money so far.
    """

    log_money: FloatArray
    blocks: int = 0
    peak: float = 0.0

    @staticmethod
    def start() -> Promise:
        """Nothing bet yet."""
        return Promise(np.full(len(LAMBDAS), -np.inf))

    @property
    def log_total(self) -> float:
        """Logarithm of the money of all bets together."""
        return float(np.logaddexp(_log_mean(self.log_money), -np.log1p(self.blocks)))

    def bet(self, confidence: FloatArray, right: NDArray[np.bool_], tolerance: float) -> Promise:
        """Bet on labelled samples, in their order."""
        stakes = _stakes(tolerance)
        promise = self
        excess = confidence - tolerance - right
        for first in range(0, len(excess), BLOCK):
            part = excess[first : first + BLOCK]
            b = promise.blocks + 1
            gain = np.log1p(stakes * part[:, None]).sum(0)
            after = Promise(np.logaddexp(promise.log_money, -np.log(b * (b + 1))) + gain, b)
            promise = replace(after, peak=max(promise.peak, after.log_total))
        return promise


def _stakes(tolerance: float) -> FloatArray:
    """`LAMBDAS`, as far as no answer can cost all the money."""
    if not 0 <= tolerance < 1:
        raise ValueError(f"tolerance must be at least 0 and below 1, got {tolerance}")
    return np.minimum(LAMBDAS, 0.99 / (1 + tolerance))


def _ranks(counts: IntArray, values: IntArray, draws: FloatArray) -> FloatArray:
    """``(n, J)`` share of all values up to and including each that are larger, ties counted by ``draws``."""
    n = len(values)
    below = counts.cumsum(1)  # (J, CELLS) seen at or below
    channel = np.arange(counts.shape[0])
    larger = below[:, -1] - below[channel, values]  # (n, J)
    equal = counts[channel, values] + 1  # itself
    earlier = np.tril(np.ones((n, n), dtype=bool), -1)
    for j in range(counts.shape[0]):
        column = values[:, j]
        larger[:, j] += ((column[None, :] > column[:, None]) & earlier).sum(1)
        equal[:, j] += ((column[None, :] == column[:, None]) & earlier).sum(1)
    total = below[:, -1] + np.arange(1, n + 1)[:, None]
    return (larger + draws * equal) / total


def _log_mean(log_values: FloatArray) -> float:
    top = float(log_values.max())
    return -np.inf if np.isneginf(top) else top + float(np.log(np.exp(log_values - top).mean()))
