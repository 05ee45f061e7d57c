"""Bootstrap intervals for any metric: seeded, and at array speed for the metrics of this package.

A resample is a vector of counts, how often each sample was drawn: multinomial, ``n`` draws over ``n``
samples. Metrics that are a `Statistic` take many count vectors at once; any other function of arrays is
called once per resample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from salgp.metrics.checks import FloatArray, IntArray
from salgp.metrics.metric import Metric, Statistic

__all__ = []

_CHUNK = 2**18
"""Counts made at a time: few enough to stay in cache."""


@dataclass(frozen=True, eq=False)
class Interval:
    """A value with its bootstrap interval.

    Args:
        value: the metric of the data themselves.
        lower: lower end of the percentile interval.
        upper: upper end.
        level: probability mass of the interval.
        replicates: ``(n_resamples,)`` the metric of each resample.
    """

    value: float
    lower: float
    upper: float
    level: float
    replicates: FloatArray = field(repr=False)

    @property
    def std_error(self) -> float:
        """Standard deviation of the replicates."""
        return float(np.nanstd(self.replicates, ddof=1))

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.lower:.4f}, {self.upper:.4f}]"


def bootstrap(
    metric: Callable[..., float],
    *arrays: Any,
    n_resamples: int = 1000,
    seed: int = 0,
    level: float = 0.9,
    **options: Any,
) -> Interval:
    """Percentile bootstrap interval of ``metric(*arrays, **options)``: samples are redrawn with replacement,
    all arrays alike.

    Metrics over bins keep the bins of the whole sample in every resample. Calibration errors are biased
    upwards, and resamples doubly so: the interval may lie above the value. Resamples where the metric is NaN
    are left out. The metrics of this package are computed from the counts of many resamples at once; other
    functions are called on each resample.

    Args:
        metric: one of this package, or any function from arrays to a number.
        arrays: its array arguments, with one row per sample.
        n_resamples: number of resamples.
        seed: of the generator; the same seed redraws the same samples, so that replicates of two metrics or
            methods are paired.
        level: probability mass of the interval.
        options: keyword arguments of the metric.

    Returns:
        The value with its interval and all replicates.

    Example:
        >>> from salgp.metrics import accuracy
        >>> result = bootstrap(accuracy, [1] * 80 + [0] * 20)
        >>> result.value, round(result.lower, 1), round(result.upper, 1)
        (0.8, 0.7, 0.9)
    """
    n = _common_length(arrays)
    if n_resamples < 1 or not 0 < level < 1:
        raise ValueError(f"expected n_resamples >= 1 and 0 < level < 1, got {n_resamples} and {level}")
    columns = [x.detach().cpu() if isinstance(x, Tensor) else np.asarray(x) for x in arrays]
    draws = resample_counts(n, n_resamples, seed)
    order = _order(columns[0])
    formula = metric.formula if isinstance(metric, Metric) else metric
    found = formula(*(x[order] for x in columns), **options)
    if isinstance(found, Statistic):
        value = found.value()
        replicates = np.concatenate([found.of_weights(counts[:, order].astype(float)) for counts in draws])
    else:
        value = float(found)
        rows = (np.repeat(np.arange(n), row) for counts in draws for row in counts)
        replicates = np.array([float(metric(*(x[row] for x in columns), **options)) for row in rows])
    lower, upper = _quantiles(replicates, level)
    return Interval(value, lower, upper, level, replicates)


def resample_counts(n: int, n_resamples: int, seed: int) -> Iterator[IntArray]:
    """How often each of ``n`` samples is drawn in ``n`` draws with replacement, ``(rows, n)``, a chunk of
    resamples at a time; the draws do not depend on the size of the chunks.

    Example:
        >>> [chunk.sum(axis=1) for chunk in resample_counts(5, 3, seed=0)]
        [array([5, 5, 5])]
    """
    generator = np.random.default_rng(seed)
    step = max(_CHUNK // n, 1)
    for start in range(0, n_resamples, step):
        rows = min(step, n_resamples - start)
        place = generator.integers(n, size=(rows, n)) + n * np.arange(rows)[:, None]
        yield np.bincount(place.ravel(), minlength=rows * n).reshape(rows, n)


def _order(first: Any) -> IntArray:
    """Samples in order of the first array, so that bins and ranks are contiguous; a metric does not care for
    the order.
    """
    return np.argsort(np.asarray(first), kind="stable") if first.ndim == 1 else np.arange(len(first))


def _quantiles(replicates: FloatArray, level: float) -> tuple[float, float]:
    valid = replicates[~np.isnan(replicates)]
    if not len(valid):
        return float("nan"), float("nan")
    lower, upper = np.quantile(valid, [(1 - level) / 2, (1 + level) / 2])
    return float(lower), float(upper)


def _common_length(arrays: tuple[Any, ...]) -> int:
    lengths = {len(x) for x in arrays}
    if len(lengths) != 1:
        raise ValueError(f"bootstrap needs arrays of one common length, got {[len(x) for x in arrays]}")
    n = lengths.pop()
    if n == 0:
        raise ValueError("the arrays are empty: a metric needs at least one sample")
    return n
