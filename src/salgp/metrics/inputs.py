"""What is a probability, a truth value or a class, checked where arrays enter a formula."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from salgp.labels import as_labels
from salgp.logits import refuse_masked

__all__ = ["ArrayLike", "FloatArray", "IntArray", "as_numbers", "to_double"]

ArrayLike: TypeAlias = NDArray[Any] | Tensor | Sequence[float] | Sequence[int] | Sequence[bool]
FloatArray: TypeAlias = NDArray[np.float64]
IntArray: TypeAlias = NDArray[np.int64]

_SUM_TOLERANCE = 1e-3


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
