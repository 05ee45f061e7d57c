"""The paper's claims, each as a paired comparison over all networks in the records.

A claim says that one method has the smaller score than another. Every trained network (study, seed) gives one
difference, on its test sets together (``pooled`` or ``photometric``), with average pooling. The p-value is
that of the exact sign-flip test: how often would differences of these sizes, with signs by chance, have a
mean this far from zero? Eleven networks are few, so that "cannot tell" is a frequent answer.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["CLAIMS", "Claim", "Comparison", "compare", "sign_flip_p"]

Record = Mapping[str, Any]
LEVEL = 0.05
"""p-value below which a difference is taken for one."""


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper as a comparison.

    Args:
        text: the claim.
        better: method that is said to have the smaller score.
        other: method it is compared with.
        score: which score.
    """

    text: str
    better: str
    other: str
    score: str = "ece"


CLAIMS: tuple[Claim, ...] = (
    Claim("ML (row L3, with the offset) improves on raw", "SAL-GP (ML) L3", "Uncalibrated (Baseline)"),
    Claim("ML (L3) improves on temperature", "SAL-GP (ML) L3", "Temperature Scaled (Baseline)"),
    Claim("ML (L3) improves on the last layer's single GP", "SAL-GP (ML) L3", "Single GP (Layer 5)"),
    Claim("ML (L3) improves on HL", "SAL-GP (ML) L3", "SAL-GP (HL) G"),
    Claim("ML (G) improves on raw", "SAL-GP (ML) G", "Uncalibrated (Baseline)"),
    Claim("ML (G) improves on temperature", "SAL-GP (ML) G", "Temperature Scaled (Baseline)"),
    Claim("ML (G) improves on the last layer's single GP", "SAL-GP (ML) G", "Single GP (Layer 5)"),
    Claim("ML (G) improves on HL", "SAL-GP (ML) G", "SAL-GP (HL) G"),
    Claim("HL improves on the raw confidence", "SAL-GP (HL) G", "Uncalibrated (Baseline)"),
    Claim(
        "Temperature scaling improves on the raw confidence",
        "Temperature Scaled (Baseline)",
        "Uncalibrated (Baseline)",
    ),
    Claim("Isotonic regression does not improve", "Uncalibrated (Baseline)", "Isotonic"),
    Claim("Layer-wise beats class-wise", "SAL-GP (HL) G", "Class-specific global"),
    Claim("ML (L3) improves NLL over raw", "SAL-GP (ML) L3", "Uncalibrated (Baseline)", "nll_correct"),
)
"""What is compared. Layer rows of ML keep the offset that all layers share; G kept it only in records of
preset ``paper``, so that L3 stands for the paper's reading in all records alike.
"""


@dataclass(frozen=True)
class Comparison:
    """Outcome of a claim.

    Args:
        n: networks compared.
        wins: of them with the difference the claim says.
        mean: difference, negative where the claim holds.
        p: of the sign-flip test.
    """

    n: int
    wins: int
    mean: float
    p: float

    @property
    def verdict(self) -> str:
        """In words."""
        if self.p >= LEVEL:
            return "cannot tell"
        return "reproduces" if self.mean < 0 else "contradicted"


def compare(claim: Claim, records: Sequence[Record], fit_on: str) -> Comparison | None:
    """Compare two methods over all networks that have both; None where there is none.

    Example:
        >>> base = {"study": "s", "preset": "cpu", "test": "pooled", "fit_on": "train", "fraction": 1.0}
        >>> a, b = (
        ...     {**base, "seed": 0, "pooling": "none", "method": m, "ece": e} for m, e in (("a", 1), ("b", 2))
        ... )
        >>> compare(Claim("a is better", "a", "b"), [a, b], "train").mean
        -1.0
    """
    chosen = [
        r
        for r in records
        if r["test"] in ("pooled", "photometric")
        and r["fit_on"] == fit_on
        and r["pooling"] in ("avg", "none")
        and not r["study"].startswith(("mstar-fractions", "mstar-approximation", "mstar-adam"))
    ]
    sides = [
        {(r["study"], r["preset"], r["seed"]): r[claim.score] for r in chosen if r["method"] == name}
        for name in (claim.better, claim.other)
    ]
    both = [key for key in sides[0] if key in sides[1]]
    if not both:
        return None
    differences = [float(sides[0][key] - sides[1][key]) for key in both]
    wins = sum(d < 0 for d in differences)
    return Comparison(len(both), wins, statistics.fmean(differences), sign_flip_p(differences))


def sign_flip_p(differences: Sequence[float], most: int = 14) -> float:
    """Two-sided p-value of the mean under random signs; all of them, or ``2^most`` drawn ones.

    Example:
        >>> sign_flip_p([1.0, 2.0, 3.0])
        0.25
    """
    d = np.asarray(differences, dtype=float)
    if len(d) <= most:
        signs = np.array(list(itertools.product((-1.0, 1.0), repeat=len(d))))
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(2**most, len(d)))
    means = np.abs((signs * d).mean(axis=1))
    return float((means >= abs(d.mean()) - 1e-12).mean())
