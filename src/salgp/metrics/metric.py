"""A metric is one object: its formula, what it reads, which way is better, and a sentence that says so.

A formula takes arrays and gives a `Statistic`: prepared data, and a function of the samples' weights. Weights
of one give the metric itself; the counts of a bootstrap resample give the metric of that resample, many at a
time. So every formula is written once and resamples at array speed. The decorator `metric` makes such a
formula a `Metric`, which is called like a function and gives a number. Tables, command line, report and plots
loop over `salgp.metrics.METRICS`; none is named there.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Generic, ParamSpec, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salgp.labels import as_labels
from salgp.logits import refuse_masked

__all__ = ["ArrayLike", "FloatArray", "IntArray", "as_numbers", "metric", "to_double"]

ArrayLike: TypeAlias = NDArray[Any] | Tensor | Sequence[float] | Sequence[int] | Sequence[bool]
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

_SUM_TOLERANCE = 1e-3
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


# --- what is a probability, a truth value or a class, checked where arrays enter a formula


def to_double(x: Tensor) -> FloatArray:
    """The numbers of a tensor in double precision, as NumPy.

    Example:
        >>> import torch
        >>> to_double(torch.tensor([0, 1]))
        array([0., 1.])
    """
    return x.detach().cpu().double().numpy()


def as_numbers(x: ArrayLike, what: str, n: int | None = None) -> FloatArray:
    """Check finite numbers ``(n,)`` and give them as float64.

    Example:
        >>> as_numbers([0, 1], "novelty")
        array([0., 1.])
    """
    values = _to_numpy(x, what).astype(np.float64)
    if values.ndim != 1:
        raise ValueError(f"{what} must have shape (n,), got {values.shape}")
    if not len(values):
        raise ValueError(f"{what} is empty: a metric needs at least one sample")
    if n not in (None, len(values)):
        raise ValueError(f"{what} must have {n} values, one per sample, got {len(values)}")
    _refuse_non_finite(values, what)
    return values


def as_scores(x: ArrayLike, what: str, n: int | None = None) -> FloatArray:
    """Check probabilities ``(n,)`` in [0, 1] and give them as float64.

    Example:
        >>> as_scores([0.5, 1.0], "confidence")
        array([0.5, 1. ])
    """
    values = as_numbers(x, what, n)
    _refuse_outside_unit(values, what)
    return values


def as_binary(x: ArrayLike, what: str, n: int | None = None) -> FloatArray:
    """Check ``(n,)`` values that are all 0 or 1 (or boolean) and give them as float64.

    Example:
        >>> as_binary([True, False], "correct")
        array([1., 0.])
    """
    values = as_numbers(x, what, n)
    wrong = np.flatnonzero((values != 0) & (values != 1))
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"{what} must be 0/1 or boolean, got {values[row]:g} in row {row}; for class indices pass "
            f"`label == labels`"
        )
    return values


def as_scored(confidence: ArrayLike, correct: ArrayLike) -> tuple[FloatArray, FloatArray]:
    """Check confidences in [0, 1] and whether each was right, ``(n,)`` both.

    Example:
        >>> as_scored([0.5], [True])
        (array([0.5]), array([1.]))
    """
    s = as_scores(confidence, "confidence")
    return s, as_binary(correct, "correct", len(s))


def as_distribution(probs: ArrayLike, labels: ArrayLike) -> tuple[NDArray[np.floating[Any]], IntArray]:
    """Check class probabilities ``(n, c)`` and labels ``(n,)`` in -1..c-1; the floating type is kept.

    Example:
        >>> as_distribution([[0.5, 0.5]], [1])
        (array([[0.5, 0.5]]), array([1]))
    """
    p = _to_numpy(probs, "probs")
    if p.ndim != 2:
        raise ValueError(f"probs must have shape (n, c), got {p.shape}")
    if not p.size:
        raise ValueError(f"probs is empty, shape {p.shape}: a metric needs at least one sample")
    if p.dtype not in (np.float32, np.float64):
        p = p.astype(np.float32 if p.dtype == np.float16 else np.float64)
    _refuse_non_finite(p, "probs")
    _refuse_outside_unit(p, "probs")
    off = np.abs(p.sum(axis=1, dtype=float) - 1)
    row = off.argmax()
    if off[row] > _SUM_TOLERANCE:
        raise ValueError(f"rows of probs must sum to 1; row {row} sums to {p[row].sum():g}")
    return p, as_labels(labels, *p.shape).cpu().numpy()


def _to_numpy(x: ArrayLike, what: str) -> NDArray[Any]:
    if isinstance(x, Tensor):
        half = x.is_floating_point() and x.itemsize < 4
        x = x.float() if half else x
        return x.detach().cpu().numpy()
    refuse_masked(x, what)
    values = np.asarray(x)
    if values.dtype.kind not in "biuf":
        raise TypeError(f"{what} must be numbers, got {values.dtype}")
    return values


def _refuse_non_finite(values: NDArray[Any], what: str) -> None:
    finite = np.isfinite(values)
    if not finite.all():
        rows = np.nonzero(~finite)[0]
        raise ValueError(
            f"{what} holds NaN or infinity in row {rows[0]} ({len(rows)} values in all); remove these "
            f"samples first"
        )


def _refuse_outside_unit(values: NDArray[Any], what: str) -> None:
    low, high = -1e-6, 1 + 1e-6  # rounding of a softmax in single precision
    if values.min() < low or values.max() > high:
        outside = values[(values < low) | (values > high)][0]
        raise ValueError(
            f"{what} must be probabilities in [0, 1], got {outside:g}; are these logits? Apply softmax first"
        )
