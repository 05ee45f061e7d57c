"""The paper's claims, each as a paired comparison over all networks in the records.

A claim says that one method has the smaller score than another. Every trained network (study, preset, seed)
gives one difference, with average pooling. The p-value is that of the exact sign-flip test: how often would
differences of these sizes, with signs by chance, have a mean this far from zero? All claims of a table are
tested at once, so that verdicts follow from p-values corrected by Holm's method. A few networks cannot
decide many claims: ``n`` of them have no p-value below ``2^(1 - n)``, and "cannot tell" is a frequent answer.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from salgp_study.methods import APPROXIMATE, INDUCING
from salgp_study.table import Record, Table, values_of

__all__ = [
    "BEST_SINGLE",
    "CLAIMS",
    "Claim",
    "Comparison",
    "NEAR",
    "RAW",
    "TEMPERATURE",
    "VERDICTS",
    "PLACES",
    "WHOLE",
    "by_inducing_rows",
    "claims_table",
    "claims_tables",
    "compare",
    "holm",
    "of_networks",
    "lower",
    "sign_flip_p",
]

VERDICTS = ("reproduces", "contradicted", "points for", "points against", "cannot tell")
"""Verdicts on a claim: the first two after correction for the number of claims, two more before it."""
LEVEL = 0.05
"""p-value below which a difference is taken for one."""
RAW, TEMPERATURE = "Uncalibrated (Baseline)", "Temperature Scaled (Baseline)"
DROPPED = "SAL-GP (ML), offset dropped"
BEST_SINGLE = "Single GP, best layer"
"""The single GP of smallest ECE on the test set, as the paper compares it: chosen with test labels."""
WHOLE, NEAR = ("pooled", "photometric"), ("15", "17", "photometric")
PLACES = {"near": "radar at the near angle, light curves", "all": "all test data"}
"""Names of test sets: all test data of a network, and radar at the near angle; light curves have one only."""
SIDE_STUDIES = (
    "mstar-fractions",
    "mstar-adam",
    "mstar-soc-smoothed",
    "mstar-soc-aconvnet-1x1",
    "mstar-soc-resnet18-preactivation",
)
"""Studies of networks that another study has, of variants of them, or of parts of the data."""


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
    Claim("ML improves on the raw confidence", "SAL-GP (ML) G", RAW),
    Claim("ML improves on temperature scaling", "SAL-GP (ML) G", TEMPERATURE),
    Claim("ML improves on the best single GP (chosen with test labels)", "SAL-GP (ML) G", BEST_SINGLE),
    Claim("ML improves on the last layer's single GP", "SAL-GP (ML) G", "Single GP (Layer 5)"),
    Claim("ML improves on HL", "SAL-GP (ML) G", "SAL-GP (HL) G"),
    Claim("ML's layer rows (L3) improve on raw", "SAL-GP (ML) L3", RAW),
    Claim("ML's layer rows (L3) improve on temperature scaling", "SAL-GP (ML) L3", TEMPERATURE),
    Claim("ML's layer rows (L3) improve on HL", "SAL-GP (ML) L3", "SAL-GP (HL) G"),
    Claim("ML improves MCE over raw", "SAL-GP (ML) G", RAW, "mce"),
    Claim("ML improves NLL over raw", "SAL-GP (ML) G", RAW, "nll_correct"),
    Claim("ML improves the Brier score over raw", "SAL-GP (ML) G", RAW, "brier"),
    Claim("ML ranks errors better than raw", RAW, "SAL-GP (ML) G", "auroc"),
    Claim("Keeping the shared offset is better than dropping it", "SAL-GP (ML) G", DROPPED),
    Claim("ML without the shared offset improves on raw", DROPPED, RAW),
    Claim("ML with average pooling improves on max pooling", "SAL-GP (ML) L3", "SAL-GP (ML) L3, max pooling"),
    Claim("The best single GP improves on raw", BEST_SINGLE, RAW),
    Claim("HL improves on raw", "SAL-GP (HL) G", RAW),
    Claim("Temperature scaling improves on raw", TEMPERATURE, RAW),
    Claim("Isotonic regression does not improve on raw", RAW, "Isotonic"),
    Claim("BBQ (alpha 1) does not improve on raw", RAW, "BBQ (alpha 1)"),
    Claim("BBQ with alpha .1 improves on alpha 1", "BBQ (alpha 0.1)", "BBQ (alpha 1)"),
    Claim("Layer-wise (HL) beats class-wise (layer 1)", "SAL-GP (HL) G", "Class-specific global (layer 1)"),
    Claim("Layer-wise (HL) beats class-wise (all layers)", "SAL-GP (HL) G", "Class-specific global"),
)
"""What is compared, in the order of the paper's own emphasis. Rows L1 to L5 of ML keep the shared offset in
all records; records of version 0.1 have G without it, under a name that says so.
"""


@dataclass(frozen=True)
class Comparison:
    """Outcome of a claim.

    Args:
        n: networks compared.
        wins: of them with the difference the claim says, as far as four digits show.
        mean: difference, negative where the claim holds.
        relative: the same as a share of the other method's mean score.
        p: of the sign-flip test.
    """

    n: int
    wins: int
    mean: float
    relative: float
    p: float

    def verdict(self, corrected: float) -> str:
        """In words: by the corrected p-value, or, where that decides nothing, by the plain one."""
        holds = self.mean < 0
        if corrected < LEVEL:
            return "reproduces" if holds else "contradicted"
        if self.p < LEVEL:
            return "points for" if holds else "points against"
        return "cannot tell"


def compare(
    claim: Claim, records: Sequence[Record], fit_on: str, where: str = "all", approximate: bool = False
) -> Comparison | None:
    """Compare two methods over all networks that have both; None where there is none.

    Args:
        claim: what is compared.
        records: of any studies.
        fit_on: split the calibrators were fitted on.
        where: ``all`` test data of a network together, or ``near``: radar at the near angle (15 or 17
            degrees), light curves as they are.
        approximate: compare the rows by inducing rows, where a method has such, instead of the exact ones.

    Example:
        >>> base = {"study": "s", "preset": "cpu", "test": "pooled", "fit_on": "train", "fraction": 1.0}
        >>> a, b = (
        ...     {**base, "seed": 0, "pooling": "none", "method": m, "ece": e} for m, e in (("a", 1), ("b", 2))
        ... )
        >>> compare(Claim("a is better", "a", "b"), [a, b], "train").mean
        -1.0
    """
    tests = WHOLE if where == "all" else NEAR
    chosen = [r for r in of_networks(records) if r["test"] in tests and r["fit_on"] == fit_on]
    if approximate:
        chosen = _approximate(chosen)
    better, other = (_by_network(chosen, name, claim.score) for name in (claim.better, claim.other))
    both = [network for network in better if network in other]
    if not both:
        return None
    values = [better[network] - other[network] for network in both]
    wins = sum(lower(better[network], other[network]) for network in both)
    mean, base = statistics.fmean(values), statistics.fmean(other[network] for network in both)
    return Comparison(len(values), wins, mean, mean / base if base else 0.0, sign_flip_p(values))


def by_inducing_rows(claim: Claim, records: Sequence[Record], fit_on: str, where: str) -> Comparison | None:
    """The comparison by inducing rows; None where neither method has such."""
    names = {name + APPROXIMATE for name in (claim.better, claim.other)}
    if not any(r["method"] in names for r in records):
        return None
    return compare(claim, records, fit_on, where, approximate=True)


def lower(score: float, other: float) -> bool:
    """Is a score lower than another, as far as the four digits of the tables show?

    Example:
        >>> lower(0.12341, 0.12344), lower(0.1233, 0.1234)
        (False, True)
    """
    return round(score, 4) < round(other, 4)


def claims_tables(records: Sequence[Record]) -> list[Table]:
    """Every claim, by preset of the networks, test data and split the calibrators were fitted on."""
    places = product(values_of(records, "preset"), ("near", "all"), values_of(records, "fit_on"))
    return [
        claims_table([r for r in records if r["preset"] == preset], where, fit_on)
        for preset, where, fit_on in places
    ]


def claims_table(records: Sequence[Record], where: str, fit_on: str) -> Table:
    """Every claim by exact inference with its verdict, and its size by inducing rows."""
    found = {claim: compare(claim, records, fit_on, where) for claim in CLAIMS}
    near = {claim: by_inducing_rows(claim, records, fit_on, where) for claim in CLAIMS}
    tested = {claim: exact.p for claim, exact in found.items() if exact is not None}
    corrected = dict(zip(tested, holm([*tested.values()]), strict=True))
    rows = []
    for claim in (claim for claim in CLAIMS if found[claim] or near[claim]):
        verdict = _verdict(found[claim], corrected.get(claim))
        rows.append((claim.text, claim.score, *_size(found[claim]), *verdict, *_size(near[claim])))
    heads = ("Claim", "Score", "Change", "Networks", "p", "p (Holm)", "Verdict")
    note = (
        "Exact inference: change of the mean score over networks, negative in favour of the claim; on how "
        "many networks it is; exact sign-flip test over networks; verdict by Holm's correction for "
        f"{len(tested)} tests at {LEVEL:.2f}. Last two columns: the same by {INDUCING} inducing rows, where "
        "there are such; no verdict follows from them."
    )
    last = (f"{INDUCING} rows: change", f"{INDUCING} rows: networks")
    preset = records[0]["preset"] if records else "none"
    title = f"The paper's claims: networks of the set {preset}, {PLACES[where]}, fitted on {fit_on}"
    return Table(f"claims-{preset}-{where}-{fit_on}", title, (note,), (*heads, *last), tuple(rows))


def _size(found: Comparison | None) -> tuple[str, str]:
    return ("-", "-") if found is None else (f"{100 * found.relative:+.1f} %", f"{found.wins} of {found.n}")


def _verdict(found: Comparison | None, corrected: float | None) -> tuple[str, str, str]:
    if found is None or corrected is None:
        return "-", "-", "-"
    return f"{found.p:.3f}", f"{corrected:.3f}", found.verdict(corrected)


def of_networks(records: Sequence[Record]) -> list[Record]:
    """The records that claims and tables over networks count; side studies are left out."""
    return [r for r in records if r["study"] not in SIDE_STUDIES]


def _approximate(records: Sequence[Record]) -> list[Record]:
    """The rows by inducing rows under the name of the exact ones, in place of these on every network."""
    names = {r["method"].removesuffix(APPROXIMATE) for r in records if _is_approximate(r)}
    kept = [r for r in records if _is_approximate(r) or r["method"] not in names]
    return [{**r, "method": r["method"].removesuffix(APPROXIMATE)} for r in kept]


def _is_approximate(record: Record) -> bool:
    return str(record["method"]).endswith(APPROXIMATE)


def _network(record: Record) -> tuple[Any, ...]:
    return record["study"], record["preset"], record["seed"]


def _by_network(records: Sequence[Record], method: str, score: str) -> dict[tuple[Any, ...], float]:
    """A method's score on each network; with average pooling unless its name says otherwise."""
    name, _, _ = method.partition(", max pooling")
    poolings = ("max",) if method != name else ("avg", "none")
    single = name == BEST_SINGLE
    found: dict[tuple[Any, ...], list[Record]] = {}
    for r in records:
        fits = r["method"].startswith("Single GP (Layer") if single else r["method"] == name
        if fits and r["pooling"] in poolings and r[score] is not None:
            found.setdefault(_network(r), []).append(r)
    return {network: float(min(group, key=_ece)[score]) for network, group in found.items()}


def _ece(record: Record) -> float:
    return float(record["ece"])


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values of several tests at once, corrected by Holm's step-down method, in the order given.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def sign_flip_p(differences: Sequence[float], most: int = 14) -> float:
    """Two-sided p-value of the mean under random signs; all of them, or ``2^most`` drawn ones.

    Example:
        >>> sign_flip_p([1.0, 2.0, 3.0])
        0.25
    """
    d = np.asarray(differences, dtype=float)
    if len(d) <= most:
        signs = np.array(list(product((-1.0, 1.0), repeat=len(d))))
    else:
        signs = np.random.default_rng(0).choice((-1.0, 1.0), size=(2**most, len(d)))
    means = np.abs((signs * d).mean(axis=1))
    return float((means >= abs(d.mean()) - 1e-12).mean())
