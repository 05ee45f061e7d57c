"""Class scores as logits: from logits, probabilities or logarithms of probabilities, never guessed.

Nothing is guessed from the values: the caller says what they are. Where they contradict what was said, the
caller is told.

The temperature of the largest likelihood is found here too. With the inverse temperature ``b = 1 / T`` the
negative log-likelihood of ``softmax(b z)`` is convex: its slope, the sum of ``E_p[z] - z_y`` over samples,
crosses zero once. The root is bracketed and found by Brent's method in ``log T``.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BOUNDS",
    "OUTPUTS",
    "ZERO",
    "as_array",
    "as_logits",
    "at_class",
    "at_least_single",
    "best_temperature",
    "check_finite",
    "check_undeclared",
    "log_odds",
    "look_like_probabilities",
    "non_finite_rows",
    "refuse_masked",
    "rest_temperature",
    "row_chunks",
    "shrunk_temperature",
    "tell_nothing",
    "tempered_softmax",
]

OUTPUTS = ("logits", "probabilities", "log-probabilities", "sigmoids")
"""Kinds of class scores a classifier may return; sigmoids are one probability per class against the rest."""

ZERO = -1000.5
"""Logit that stands for a probability of exactly 0, in every precision: below the logarithm of any positive
number (-745), and nothing a network would give. Calibrators put a learned one in its place, see
`salgp.calibrators.checks`.
"""

TOLERANCE = 1e-2
"""Rows of probabilities may miss 1 by this much: half precision, rounded files."""
ENOUGH = 20
"""Fewer samples of small scores may all lie between 0 and 1 by chance."""
BOUNDS = (0.01, 20.0)
"""Smallest and largest temperature looked for."""
FLAT = 0.05
"""Below this temperature the likelihood hardly changes any more: there is no optimum."""


def as_logits(raw: Tensor, output: str = "logits", hint: str = "") -> Tensor:
    """Turn class scores into logits ``(n, c)`` with at least single precision.

    A binary network with one column gives ``z``, the log-odds of class 1: its logits are ``[0, z]``, and with
    ``p`` in place of ``z`` they are ``[log(1 - p), log p]``. A probability of 0 becomes `ZERO`. Sigmoids, one
    per class, become their log-odds.

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
        >>> as_logits(torch.tensor([[0.5, 0.9]]), "sigmoids")
        tensor([[0.0000, 2.1972]])
    """
    if output not in OUTPUTS:
        raise ValueError(f"output must be one of {', '.join(OUTPUTS)}, got {output!r}")
    if not raw.is_floating_point() or raw.ndim not in (1, 2) or 0 in raw.shape[1:]:
        _refuse_shape(raw, output, hint)
    z = at_least_single(raw)
    traced = torch.compiler.is_compiling()  # a graph being traced has stand-ins for the numbers
    if output == "sigmoids":
        if not traced:
            _check_sigmoids(z)
        z = log_odds(z.double()).to(z.dtype)
    binary = z.ndim == 1 or z.shape[1] == 1
    if output in ("logits", "sigmoids"):
        return _two_columns(torch.zeros_like(z), z) if binary else z
    p = z.exp() if output == "log-probabilities" else z
    if binary:
        p = _two_columns(1 - p, p)
    if not traced:
        _check_probabilities(p, output)
    if output == "log-probabilities" and not binary:
        return z.masked_fill(z == -torch.inf, ZERO)
    return p.clamp_min(torch.finfo(p.dtype).tiny).log().masked_fill(p <= 0, ZERO)


def _two_columns(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack([first.reshape(-1), second.reshape(-1)], dim=1)


def _refuse_shape(raw: Tensor, output: str, hint: str) -> None:
    if raw.is_floating_point() and raw.ndim in (3, 4, 5):
        raise ValueError(
            f"expected {output} of shape (n, c), one row for each sample, got {tuple(raw.shape)}: outputs "
            f"with several positions (segmentation) are not supported; calibrate them by position: "
            f"salgp.calibrate_outputs(scores.movedim(1, -1).flatten(0, -2), labels.flatten())"
        )
    raise ValueError(
        f"expected {output} as floating-point numbers of shape (n, c) or, of a binary classifier, (n,) "
        f"or (n, 1); got {raw.dtype} {tuple(raw.shape)}" + (f"; {hint}" if hint else "")
    )


def at_least_single(x: Tensor) -> Tensor:
    """The same numbers in at least single precision.

    Example:
        >>> at_least_single(torch.zeros(1).half()).dtype, at_least_single(torch.zeros(1).double()).dtype
        (torch.float32, torch.float64)
    """
    return x.float() if x.itemsize < 4 else x


def at_class(x: Tensor, classes: Tensor) -> Tensor:
    """The entry of each row at a class of its own, ``(n,)``.

    Example:
        >>> at_class(torch.tensor([[5, 6], [7, 8]]), torch.tensor([1, 0]))
        tensor([6, 7])
    """
    return x.gather(1, classes[:, None])[:, 0]


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
    refuse_masked(x, "array")
    array = np.asarray(x)
    if array.dtype.kind not in "fiub":
        raise TypeError(f"expected numbers, got an array of {array.dtype}")
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def refuse_masked(values: Any, what: str) -> None:
    """Refuse a NumPy array with masked entries: as a tensor it would lose its mask.

    Example:
        >>> refuse_masked(np.ma.masked_array([1, 2], [False, True]), "labels")
        Traceback (most recent call last):
        ...
        ValueError: labels: 1 of 2 entries are masked; leave these rows out, or fill them: labels.filled(...)
    """
    if isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values):
        n = int(np.ma.getmaskarray(values).sum())
        raise ValueError(
            f"{what}: {n:,} of {values.size:,} entries are masked; leave these rows out, or fill them: "
            f"{what}.filled(...)"
        )


def look_like_probabilities(logits: Tensor) -> str | None:
    """What numbers given as logits look like: ``"probabilities"``, ``"sigmoids"`` or None.

    This decides nothing. It is for a refusal or a warning: real logits do not all lie between 0 and 1.

    Example:
        >>> look_like_probabilities(torch.tensor([[0.2, 0.8], [0.5, 0.5]]))
        'probabilities'
        >>> look_like_probabilities(torch.rand(20, 3))
        'sigmoids'
        >>> look_like_probabilities(torch.tensor([[0.2, 3.8], [0.5, -0.5]]))
    """
    outside = (logits < 0) | (logits > 1)
    if len(logits) < 2 or outside.any() or tell_nothing(logits):
        return None
    off = (logits.double().sum(1) - 1).abs()
    if _has_one_column(logits) or (off < TOLERANCE).all():
        return "probabilities"
    return "sigmoids" if len(logits) >= ENOUGH else None


def check_undeclared(logits: Tensor, labels: Tensor | None = None) -> None:
    """Refuse scores that nobody called logits and that look like something else: probabilities, or the
    outputs of a regression on targets 0 and 1.

    Args:
        logits: ``(n, c)``; of one output column ``z``, ``[0, z]``.
        labels: ``(n,)`` true classes, where known.

    Example:
        >>> check_undeclared(torch.tensor([[0.2, 0.7, 0.1], [0.5, 0.3, 0.2]]))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: the outputs look like probabilities: say output='probabilities', or output='logits' ...
    """
    kind = look_like_probabilities(logits)
    if kind and (logits.shape[1] > 2 or len(logits) >= ENOUGH):
        raise ValueError(
            f"the outputs look like {kind}: say output={kind!r}, or output='logits' if they are scores "
            f"before any softmax or sigmoid all the same"
        )
    if labels is not None and _looks_like_regression(logits, labels.to(logits.device)):
        raise ValueError(
            "the outputs look like a regression on targets 0 and 1, with the border between the classes at "
            "0.5, but log-odds have it at 0; pass reader=salgp.Reader(forward=lambda model, batch: "
            "model(batch[0]) - 0.5), or say output='logits' if they are log-odds all the same"
        )


def _looks_like_regression(logits: Tensor, labels: Tensor) -> bool:
    """One column near 0 and 1 that tells the classes apart better at 0.5 than at 0, beyond chance."""
    z = logits[:, 1]
    near = ((z > -0.5) & (z < 1.5)).double()
    between = labels[(z > 0) & (z <= 0.5)]
    zeros, ones = (int((between == k).sum()) for k in (0, 1))
    chance = max(0.02 * len(z), 3 * math.sqrt(zeros + ones))
    return _has_one_column(logits) and float(near.mean()) > 0.9 and zeros - ones > chance


def _has_one_column(logits: Tensor) -> bool:
    """Are they the log-odds of a binary network beside a column of zeros?"""
    return logits.shape[1] == 2 and not logits[:, 0].any()


def tell_nothing(logits: Tensor) -> bool:
    """Are all classes equal in every row? So do samples look that came without class scores.

    Example:
        >>> tell_nothing(torch.zeros(2, 3)), tell_nothing(torch.eye(3))
        (True, False)
    """
    return bool((logits == logits[:, :1]).all())


def _check_probabilities(p: Tensor, output: str) -> None:
    sums_to_one = (p.sum(dim=1) - 1).abs() <= TOLERANCE  # false for NaN
    if sums_to_one.all() and not (p < 0).any():
        return
    check_finite(p, f"{output} hold")
    raise ValueError(
        f"{output} were announced, but the rows are not distributions (smallest value "
        f"{float(p.min()):.3g}); are they logits? Of one sigmoid per class say output='sigmoids', or as "
        f"arrays pass their log-odds, log(p / (1 - p))"
    )


def _check_sigmoids(p: Tensor) -> None:
    wrong = p[~((p >= 0) & (p <= 1))]  # NaN is wrong, too
    if len(wrong):
        raise ValueError(f"sigmoids must lie between 0 and 1, got {float(wrong[0]):.3g}; are they logits?")


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
    return (~x.isfinite().all(dim=1)).nonzero()[:, 0]


def tempered_softmax(logits: Tensor, temperature: float | Tensor) -> Tensor:
    """``softmax(z / T)`` in at least single precision, kept positive so that no log-likelihood is infinite.

    Args:
        logits: ``(n, c)``.
        temperature: one number, or ``(n, 1)``, one per sample.

    Example:
        >>> tempered_softmax(torch.tensor([[2.0, 0.0]]), 2.0)
        tensor([[0.7311, 0.2689]])
    """
    z = at_least_single(logits) / temperature
    tiny = torch.finfo(z.dtype).tiny
    return torch.softmax(z, dim=1).clamp_(min=tiny)


def best_temperature(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> tuple[float, bool]:
    """Temperature of the largest likelihood inside `BOUNDS`, and whether it is one of them; 1 where no class
    is known.

    Args:
        logits: ``(n, c)``.
        labels: ``(n,)`` true classes; -1 is left out.
        weights: ``(n,)`` weight of each sample.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> t, at_bound = best_temperature(z, torch.tensor([0, 0, 0, 1]))
        >>> round(t, 4), at_bound  # log-odds 2 / T must be log 3
        (1.8205, False)
    """
    if not (labels >= 0).any():
        return 1.0, False
    return _root(lambda u: _slope(logits, labels, u, weights))


def rest_temperature(logits: Tensor, labels: Tensor) -> float:
    """Temperature by which the classes other than the label share what the confidence leaves.

    That of the largest likelihood; 1 where the likelihood has no optimum, as where every sample is correct.

    Example:
        >>> rest_temperature(torch.tensor([[2.0, 0.0]]).repeat(4, 1), torch.tensor([0, 0, 0, 0]))
        1.0
    """
    temperature, at_bound = best_temperature(logits, labels)
    return 1.0 if at_bound or temperature < FLAT else temperature


def shrunk_temperature(logits: Tensor, labels: Tensor, spread: float = 0.5) -> float:
    """Temperature of the largest likelihood if that is 1 or more; below 1, of the largest posterior with
    ``log T ~ N(0, spread^2)``.

    A temperature below 1 raises confidences. Few samples, or hardly an error among them, are no reason to do
    so, and it stays near 1. One above 1 lowers them and is not shrunk.

    Example:
        >>> z = torch.tensor([[2.0, 0.0]]).repeat(4, 1)
        >>> round(shrunk_temperature(z, torch.tensor([0, 0, 0, 0])), 1)
        0.8
    """
    if not (labels >= 0).any():
        return 1.0
    temperature, _ = _root(lambda u: _slope(logits, labels, u) + min(u, 0.0) / spread**2)
    return temperature


def row_chunks(n: int, width: int, elements: int = 2**20) -> Iterator[slice]:
    """Slices of at most ``elements / width`` rows, so that temporaries stay small whatever ``n`` is.

    Example:
        >>> list(row_chunks(5, 2, elements=4))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    step = max(1, elements // max(width, 1))
    return (slice(i, i + step) for i in range(0, n, step))


def _slope(logits: Tensor, labels: Tensor, log_temperature: float, weights: Tensor | None = None) -> float:
    """Derivative of the negative log-likelihood in ``log T``."""
    inverse, total = math.exp(-log_temperature), 0.0
    for rows in row_chunks(len(logits), logits.shape[1], elements=2**17):  # small enough to stay in cache
        z, y = at_least_single(logits[rows]), labels[rows]
        z = z - z.amax(dim=1, keepdim=True)
        mean = torch.linalg.vecdot(torch.softmax(z * inverse, dim=1), z)
        true = at_class(z, y.clamp_min(0))
        weight = (y >= 0).double() if weights is None else weights[rows] * (y >= 0)
        total += float((true - mean).double() @ weight.double())
    return inverse * total


def _root(slope: Callable[[float], float]) -> tuple[float, bool]:
    """``T`` in `BOUNDS` where ``slope(log T)`` turns positive; true with an end where it does not."""
    from scipy.optimize import brentq

    low, high = (math.log(bound) for bound in BOUNDS)
    if slope(0.0) == 0.0:  # as where all logits are equal
        return 1.0, False
    if slope(low) >= 0.0:
        return BOUNDS[0], True
    if slope(high) <= 0.0:
        return BOUNDS[1], True
    return math.exp(brentq(slope, low, high, xtol=1e-12)), False
