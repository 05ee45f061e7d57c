"""A metric is one object: its formula, what it reads, which way is better, and a sentence that says so.

A formula takes arrays and gives a `Statistic`: prepared data, and a function of the samples' weights. Weights
of one give the metric itself; the counts of a bootstrap resample give the metric of that resample, many at a
time. So every formula is written once and resamples at array speed. The decorator `metric` makes such a
formula a `Metric`, which is called like a function and gives a number. Tables, command line, report and plots
loop over `salgp.metrics.METRICS`; none is named there.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, ParamSpec

import numpy as np

from salgp.metrics.inputs import ArrayLike, FloatArray, IntArray, as_numbers

__all__ = ["ArrayLike", "FloatArray", "as_numbers", "metric"]

P = ParamSpec("P")

_FEW_GROUPS = 64
"""Up to so many groups, a matrix product for each is faster than the products of all samples and their sums.
"""


@dataclass(frozen=True, eq=False)
class Statistic:
    """A metric of ``n`` samples as a function of their weights.

    Args:
        n: number of samples.
        of_weights: maps weights ``(..., n)`` to values ``(...)``.

    Example:
        >>> mean_of(np.array([1.0, 3.0])).value()
        2.0
    """

    n: int
    of_weights: Callable[[FloatArray], FloatArray]

    def value(self) -> float:
        """The metric of the samples as they are."""
        return float(self.of_weights(np.ones(self.n)))


@dataclass(eq=False, repr=False)
class Metric(Generic[P]):
    """A score with all that is to be known about it; call it like a function to get a number.

    Attributes:
        name: in tables and files.
        formula: from arrays to a `Statistic`, or to a plain number where no weights are possible.
        reads: names of the arrays it takes, among ``confidence``, ``correct``, ``probs``, ``labels``,
            ``std``, ``lower``, ``upper``, ``novelty``, ``is_ood``.
        options: names of its further arguments, such as ``n_bins``.
        larger_is_better: True, False, or None where neither is.
        heading: a word for the head of a column; empty for a metric that short tables leave out.
        title: the metric's name for a reader who has not met it.
        sentence: what it says.

    Example:
        >>> from salgp.metrics import ece
        >>> ece.name, ece.reads, ece.larger_is_better, ece([0.5, 0.5], [1, 0])
        ('ece', ('confidence', 'correct'), False, 0.0)
    """

    formula: Callable[P, Any]
    title: str
    sentence: str
    larger_is_better: bool | None
    heading: str
    name: str

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.formula)
        parameters = inspect.signature(self.formula).parameters
        self.options = tuple(k for k, p in parameters.items() if p.default is not p.empty)
        self.reads = tuple(k for k in parameters if k not in self.options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> float:
        """The metric of the samples as they are."""
        found = self.formula(*args, **kwargs)
        return found.value() if isinstance(found, Statistic) else float(found)

    def __repr__(self) -> str:
        return f"<metric {self.name}: {self.sentence}>"

    def better(self, a: float, b: float) -> bool:
        """Is ``a`` better than ``b``? Never, where neither way is."""
        if self.larger_is_better is None:
            return False
        return a > b if self.larger_is_better else a < b


def metric(
    title: str, sentence: str, *, larger_is_better: bool | None, heading: str = "", name: str | None = None
) -> Callable[[Callable[P, Any]], Metric[P]]:
    """Decorator that makes a formula a `Metric`.

    Args:
        title: name for a reader who has not met it.
        sentence: what it says.
        larger_is_better: True, False, or None where neither is.
        heading: a word for the head of a column; empty to be left out of short tables.
        name: by default that of the function.

    Example:
        >>> @metric("Surest", "The largest confidence given.", larger_is_better=None)
        ... def surest(confidence):
        ...     return max(confidence)
        >>> surest([0.4, 0.7])
        0.7
    """
    return lambda formula: Metric(
        formula, title, sentence, larger_is_better, heading, name or formula.__name__
    )


def mean_of(scores: FloatArray) -> Statistic:
    """The weighted mean of per-sample scores.

    Example:
        >>> mean_of(np.array([1.0, 3.0])).of_weights(np.array([[1.0, 1.0], [2.0, 0.0]]))
        array([2., 1.])
    """
    return Statistic(len(scores), lambda weights: weights @ scores / weights.sum(-1))


class Groups:
    """A partition of ``n`` samples, to sum weights over each part.

    Args:
        index: ``(n,)`` group of each sample. Sums over sorted indices, as `bootstrap` arranges them, are
            several times faster.
        n_groups: number of groups, empty ones included.

    Example:
        >>> Groups(np.array([0, 1, 0]), 3).totals(np.array([1.0, 2.0, 4.0]))
        array([5., 2., 0.])
    """

    def __init__(self, index: IntArray, n_groups: int) -> None:
        steps = np.diff(index)
        self.index = index
        self.n_groups = n_groups
        self._starts = None
        if (steps >= 0).all():
            self._starts = np.append(0, np.flatnonzero(steps) + 1)

    def totals(self, weights: FloatArray, values: FloatArray | None = None) -> FloatArray:
        """Sum weights ``(..., n)``, each times its sample's value ``(n,)`` if given, over the groups: ``(...,
        n_groups)``.
        """
        starts = self._starts
        totals = np.zeros((*weights.shape[:-1], self.n_groups))
        if starts is not None and values is not None and len(starts) <= _FEW_GROUPS:
            for start, end in pairwise([*starts, len(values)]):
                sums = weights[..., start:end] @ values[start:end]
                totals[..., self.index[start]] = sums
            return totals
        weights = weights if values is None else weights * values
        if starts is None:
            return np.apply_along_axis(self._unsorted_totals, -1, weights)
        totals[..., self.index[starts]] = np.add.reduceat(weights, starts, -1)
        return totals

    def _unsorted_totals(self, weights: FloatArray) -> FloatArray:
        return np.bincount(self.index, weights, self.n_groups).astype(float)
