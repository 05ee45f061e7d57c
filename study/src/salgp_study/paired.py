"""The paper's claims on one network at a time: is a difference in calibration error more than the luck of the
test samples?

Both methods are scored on the same resamples of a network's test set (paired bootstrap), which gives the
difference a standard error. `salgp_study.claims` asks the other question, whether it holds over networks.
Predictions are read from the cache of a study:

    python -m salgp_study.paired DIR
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from salgp.metrics import Interval, bootstrap, ece
from salgp.prediction import Prediction
from salgp_study.claims import BEST_SINGLE, CLAIMS, Claim
from salgp_study.predictions import is_cached, read_prediction
from salgp_study.store import read_records
from salgp_study.table import Record, Table, grouped, write_table

__all__ = ["Difference", "difference", "paired_table"]

ENOUGH = 1.96
"""Standard errors beyond which a difference is taken for one."""
LEAST = 5e-5
"""Differences that four digits do not show are none."""


@dataclass(frozen=True)
class Difference:
    """A difference in expected calibration error with its standard error; negative: the first is better."""

    value: float
    std_error: float

    @property
    def verdict(self) -> str:
        """In words: does the claim that the first is better hold on these data?"""
        if abs(self.value) <= max(ENOUGH * self.std_error, LEAST):
            return "cannot tell"
        return "holds" if self.value < 0 else "does not hold"


def difference(better: Prediction, other: Prediction, labels: Tensor, n_resamples: int = 400) -> Difference:
    """Difference in ECE of two predictions of the same samples, by a paired bootstrap.

    Example:
        >>> import torch
        >>> from salgp.features import Features
        >>> features = Features(torch.tensor([[4.0, 0.0], [0.0, 4.0]]).repeat(50, 1))
        >>> sure = Prediction.from_probs(features, features.probs)
        >>> doubtful = Prediction.from_confidence(features, torch.full((100,), 0.6))
        >>> difference(sure, doubtful, features.label).verdict
        'holds'
    """
    return _between(*(_resampled(p, labels, n_resamples) for p in (better, other)))


def paired_table(out: str | os.PathLike[str], records: Sequence[Record], preset: str = "paper") -> Table:
    """Every claim about ECE on every network of a preset whose predictions are in the cache."""
    mine = [r for r in records if r["preset"] == preset and r["test"] != "30" and is_cached(out, r)]
    errors = {r["key"]: _resampled(*read_prediction(out, r)[:2]) for r in mine if _is_claimed(r)}
    rows = []
    for (study, seed, test, fit_on), group in grouped(mine, ("study", "seed", "test", "fit_on")).items():
        for claim, better, other in _pairs(group):
            found = _between(errors[better["key"]], errors[other["key"]])
            cells = (f"{better['ece']:.4f}", f"{other['ece']:.4f}", f"{found.value:+.4f}")
            where = (claim.text, study, str(seed), test, fit_on)
            rows.append((*where, *cells, f"{found.std_error:.4f}", found.verdict))
    heads = (
        "Claim",
        "Study",
        "Seed",
        "Test",
        "Fitted on",
        "ECE",
        "of",
        "Difference",
        "Std. error",
        "Verdict",
    )
    note = "Standard error by a paired bootstrap over the test samples; a verdict beyond 1.96 of them."
    return Table("paired", "The paper's claims on each network", (note,), heads, tuple(sorted(rows)))


def _resampled(prediction: Prediction, labels: Tensor, n_resamples: int = 400) -> Interval:
    """ECE on resamples of the test set; the same seed draws the same samples for every method."""
    correct = (prediction.label == labels).double()
    return bootstrap(ece, prediction.confidence, correct, n_resamples=n_resamples, seed=0)


def _between(first: Interval, second: Interval) -> Difference:
    spread = float((first.replicates - second.replicates).std(ddof=1))
    return Difference(first.value - second.value, spread)


def _is_claimed(record: Record) -> bool:
    """Is something said of this record's method?"""
    named = {name for claim in CLAIMS if claim.score == "ece" for name in (claim.better, claim.other)}
    return record["method"] in named or record["method"].startswith("Single GP (Layer")


def _pairs(records: Sequence[Record]) -> Iterator[tuple[Claim, Record, Record]]:
    """Claims about ECE of which both sides are there."""
    by_method = {_named(r): r for r in records}
    singles = [r for r in by_method.values() if _named(r).startswith("Single GP (Layer")]
    singles = [r for r in singles if r["pooling"] != "max"]
    if singles:
        by_method[BEST_SINGLE] = min(singles, key=lambda r: float(r["ece"]))
    for claim in CLAIMS:
        if claim.score == "ece" and claim.better in by_method and claim.other in by_method:
            yield claim, by_method[claim.better], by_method[claim.other]


def _named(record: Record) -> str:
    """The method as claims call it: with average pooling unless it says otherwise."""
    return f"{record['method']}, max pooling" if record["pooling"] == "max" else str(record["method"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the table of a study folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder of a study, with its cache")
    folder = parser.parse_args(arguments).folder
    print(write_table(paired_table(folder, read_records(folder)), folder / "tables"))


if __name__ == "__main__":
    main()
