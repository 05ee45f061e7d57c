"""What the numbers of a classifier mean: logits, probabilities, or logarithms of probabilities.

Nothing is guessed from the values: the caller says what they are. Where they contradict what was said, the
caller is told.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "OUTPUTS",
    "ZERO",
    "as_array",
    "at_least_single",
    "as_logits",
    "check_finite",
    "largest",
    "log_odds",
    "look_like_probabilities",
    "non_finite_rows",
    "plain_array",
    "tell_nothing",
]

OUTPUTS = ("logits", "probabilities", "log-probabilities")
"""What the numbers a classifier returns can mean."""

ZERO = -1000.5
"""Logit that stands for a probability of exactly 0, in every precision: below the logarithm of any positive
number (-745), and nothing a network would give. Calibrators put a learned one in its place, see
`salgp.calibrators.zeros`.
"""

TOLERANCE = 1e-2
"""Rows of probabilities may miss 1 by this much: half precision, rounded files."""


def as_logits(raw: Tensor, output: str = "logits", hint: str = "") -> Tensor:
    """Turn class scores into logits ``(n, c)`` with at least single precision.

    A binary network with one column gives ``z``, the log-odds of class 1: its logits are ``[0, z]``, and with
    ``p`` in place of ``z`` they are ``[log(1 - p), log p]``. A probability of 0 becomes `ZERO`.

    Args:
        raw: ``(n, c)``, or ``(n,)`` / ``(n, 1)`` for a binary network.
        output: what the numbers are, one of `OUTPUTS`. Nothing is guessed from their range.
        hint: what to do where they are no class scores at all.

    Example:
        >>> as_logits(torch.tensor([2.0, -1.0]))
        tensor([[ 0.,  2.],
                [ 0., -1.]])
        >>> as_logits(torch.tensor([[0.5, 0.5]]), "probabilities").exp()
        tensor([[0.5000, 0.5000]])
    """
    if output not in OUTPUTS:
        raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {output!r}")
    if not raw.is_floating_point() or raw.ndim not in (1, 2) or 0 in raw.shape[1:]:
        raise ValueError(
            f"expected {output} as floating-point numbers of shape (n, c) or, of a binary classifier, (n,) "
            f"or (n, 1); got {raw.dtype} {tuple(raw.shape)}" + (f"; {hint}" if hint else "")
        )
    z = at_least_single(raw)
    binary = z.ndim == 1 or z.shape[1] == 1
    if output == "logits":
        return torch.stack([torch.zeros_like(z.reshape(-1)), z.reshape(-1)], dim=1) if binary else z
    p = z.exp() if output == "log-probabilities" else z
    p = torch.stack([1 - p.reshape(-1), p.reshape(-1)], dim=1) if binary else p
    if not torch.compiler.is_exporting():  # a graph being traced has stand-ins for the numbers
        _check_probabilities(p, output)
    if output == "log-probabilities" and not binary:
        return z.masked_fill(z == -torch.inf, ZERO)
    return p.clamp_min(torch.finfo(p.dtype).tiny).log().masked_fill(p <= 0, ZERO)


def at_least_single(x: Tensor) -> Tensor:
    """The same numbers in at least single precision.

    Example:
        >>> at_least_single(torch.zeros(1).half()).dtype, at_least_single(torch.zeros(1).double()).dtype
        (torch.float32, torch.float64)
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    return x if x.dtype == dtype else x.to(dtype)


def log_odds(p: Tensor, margin: float = 1e-12) -> Tensor:
    """``log(p / (1 - p))``, kept finite: probabilities count as this far from 0 and 1 at least.

    Example:
        >>> log_odds(torch.tensor([0.5, 1.0]).double(), 0.1)
        tensor([0.0000, 2.1972], dtype=torch.float64)
    """
    inside = p.clamp(margin, 1 - margin)
    return inside.log() - (-inside).log1p()


def as_array(x: Any) -> Tensor:
    """A tensor of any framework's array: NumPy, pandas, JAX, TensorFlow, lists.

    Example:
        >>> as_array([[1.0, 2.0]])
        tensor([[1., 2.]], dtype=torch.float64)
    """
    if isinstance(x, Tensor):
        return x.detach()
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, got an array of {array.dtype}")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def look_like_probabilities(logits: Tensor) -> bool:
    """Do numbers given as logits look like a softmax, or like ``[0, sigmoid]``?

    This decides nothing. It is for a warning: real logits do not have rows of non-negative numbers that all
    sum to 1.

    Example:
        >>> look_like_probabilities(torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
        True
        >>> look_like_probabilities(torch.tensor([[0.2, 3.8], [0.5, -0.5]]))
        False
    """
    if len(logits) < 2 or bool((logits < 0).any()) or bool((logits > 1).any()):
        return False
    totals = logits.double().sum(dim=1)
    one_column = logits.shape[1] == 2 and bool((logits[:, 0] == 0).all()) and bool((logits[:, 1] > 0).any())
    return one_column or bool(((totals - 1).abs() < TOLERANCE).all())


def tell_nothing(logits: Tensor) -> bool:
    """Are all classes equal in every row? So do samples look that came without class scores.

    Example:
        >>> tell_nothing(torch.zeros(2, 3)), tell_nothing(torch.eye(3))
        (True, False)
    """
    return bool((logits == logits[:, :1]).all())


def largest(x: Tensor) -> Tensor:
    """Column of the largest entry of each row, the first of equals.

    NumPy's search is several times faster than torch's on a processor; a tensor that is being traced stays
    with torch.

    Example:
        >>> largest(torch.tensor([[0.0, 2.0, 2.0]]))
        tensor([1])
    """
    if not plain_array(x) or x.numel() == 0:
        return x.argmax(dim=1)
    return torch.from_numpy(x.detach().numpy().argmax(axis=1))


def plain_array(x: Tensor) -> bool:
    """Can NumPy work on it where it lies? Not on a tensor that is being traced or keeps gradients.

    Example:
        >>> plain_array(torch.zeros(1)), plain_array(torch.zeros(1, dtype=torch.bfloat16))
        (True, False)
    """
    return (
        type(x) is Tensor
        and x.is_cpu
        and x.dtype in (torch.float32, torch.float64)
        and not x.requires_grad
        and not torch.compiler.is_compiling()
    )


def _check_probabilities(p: Tensor, output: str) -> None:
    off = ~((p.sum(dim=1) - 1).abs() <= TOLERANCE)  # NaN is off, too
    if not bool((p < 0).any()) and not bool(off.any()):
        return
    lost = (~torch.isfinite(p).all(dim=1)).nonzero()[:, 0].tolist()
    if lost:
        raise ValueError(
            f"{output} hold NaN or infinity in row {lost[0]} ({len(lost)} rows in all); clean the data or "
            f"the network first"
        )
    raise ValueError(
        f"{output} were announced, but the rows are not distributions (smallest value "
        f"{float(p.min()):.3g}); are they logits?"
    )


def check_finite(x: Tensor, what: str = "the class scores hold", first: int = 0) -> None:
    """Refuse NaN and infinity, naming the row.

    Args:
        x: ``(n, d)`` numbers of all samples.
        what: they are, as the beginning of a sentence.
        first: number of the first row.

    Example:
        >>> check_finite(torch.tensor([[0.0, torch.nan]]), first=100)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the class scores hold NaN or infinity in row 100 (1 rows in all); clean the data or ...
    """
    wrong = non_finite_rows(x)
    if len(wrong):
        where = f"row {first + int(wrong[0])} ({len(wrong)} rows in all)"
        raise ValueError(f"{what} NaN or infinity in {where}; clean the data or the network first")


def non_finite_rows(x: Tensor) -> Tensor:
    """Numbers of the rows that hold NaN or infinity."""
    if math.isfinite(float(x.sum())):  # one pass, no copy; the sum of finite numbers may overflow
        return torch.empty(0, dtype=torch.int64, device=x.device)
    return (~torch.isfinite(x).all(dim=1)).nonzero()[:, 0]
