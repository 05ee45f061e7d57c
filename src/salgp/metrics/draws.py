"""Bootstrap resamples as counts: how often each of ``n`` samples is drawn in ``n`` draws with replacement.

These counts are multinomial. Drawing ``n`` indices and counting them costs more than most metrics;
independent Poisson counts are quicker, and given their sum they are exactly multinomial. So every sample gets
a Poisson count of mean a little below 1, the few draws missing from the sum are added one by one, and a
resample whose sum came out above ``n`` (once in 30,000) is drawn again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["resample_counts"]

_CHUNK = 2**18
"""Counts made at a time: few enough to stay in cache, as bytes and as floats."""

_CELLS = 2**16
"""Cells of [0, 1), each looked up for the counts of two samples; one random number of 64 bits chooses four of
them.
"""

_LARGEST = 20
"""Larger counts of mean below 1 are rarer than double precision can tell."""

_UNDECIDED = 0xFFFF
"""Mark of the few cells that a step of the distribution function goes through: further digits decide."""


def resample_counts(n: int, n_resamples: int, seed: int) -> Iterator[NDArray[np.uint8]]:
    """Counts of each sample, ``(rows, n)``, a chunk of resamples at a time; every row sums to ``n``.

    Their type is that of the look-up table: a sample drawn 255 times will not be seen.

    Args:
        n: number of samples.
        n_resamples: number of resamples in all chunks.
        seed: of the generator; the draws do not depend on the size of the chunks.

    Example:
        >>> [chunk.sum(axis=1) for chunk in resample_counts(5, 3, seed=0)]
        [array([5, 5, 5], dtype=uint64)]
    """
    poisson = _Poisson(max(1 - 4 / math.sqrt(n), 0.0), seed)
    step = max(_CHUNK // n, 1)
    for start in range(0, n_resamples, step):
        yield poisson.completed(min(step, n_resamples - start), n)


class _Poisson:
    """Poisson counts, two at a time, by look-up of 16 random bits, and of further ones where these do not
    decide.
    """

    def __init__(self, mean: float, seed: int) -> None:
        k = np.arange(_LARGEST + 1)
        share = np.exp(-mean) * mean**k / np.cumprod(np.maximum(k, 1.0))
        self.pairs = (k[:, None] + 256 * k).astype(np.uint16).reshape(-1)  # one byte for each count
        self.steps = np.cumsum(np.outer(share, share))[:-1]  # of the distribution function over the pairs
        cell = np.minimum((self.steps * _CELLS).astype(np.int64), _CELLS)
        self.table = np.repeat(self.pairs, np.diff(cell, prepend=0, append=_CELLS))
        self.table[cell[cell < _CELLS]] = _UNDECIDED
        self.bits, self.digits, self.missing = np.random.default_rng(seed).spawn(3)

    def completed(self, rows: int, n: int) -> NDArray[np.uint8]:
        """Counts ``(rows, n)`` with the draws that are missing from their sums."""
        counts = self.counts(rows, n)
        missing = n - counts.sum(axis=1, dtype=np.int64)
        for row in np.flatnonzero(missing < 0):
            while missing[row] < 0:
                counts[row] = self.counts(1, n)[0]
                missing[row] = n - counts[row].sum(dtype=np.int64)
        place = self.missing.integers(n, size=int(missing.sum())) + np.repeat(n * np.arange(rows), missing)
        np.add.at(counts.reshape(-1), place, np.uint8(1))
        return counts

    def counts(self, rows: int, n: int) -> NDArray[np.uint8]:
        """Independent Poisson counts, ``(rows, n)``."""
        raw: NDArray[np.uint64] = self.bits.bit_generator.random_raw(
            rows * math.ceil(n / 8)
        )  # rows start on whole numbers
        cells = raw.view(np.uint16)
        pairs = np.take(self.table, cells)
        rest = np.flatnonzero(pairs == _UNDECIDED)
        pairs[rest] = self.pairs[
            np.searchsorted(self.steps, (cells[rest] + self.digits.random(len(rest))) / _CELLS, "right")
        ]
        return np.ascontiguousarray(pairs.view(np.uint8).reshape(rows, -1)[:, :n])
