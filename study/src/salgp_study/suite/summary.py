"""Means over records, and the tables made of them.

A mean is over data sets, each the mean of its test sets and seeds, so that a set with fifty corruptions
counts no more than one with two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from salgp_study.suite.methods import BASELINES, OURS
from salgp_study.suite.scoring import Record

__all__ = ["BASE", "CONTEXT", "PER_SAMPLE", "Results", "SOFTMAX", "Way", "table"]

Keep = Callable[[Record], bool]


@dataclass(frozen=True)
class Way:
    """A method, and the size of the windows it is given; 0 is sample by sample."""

    method: str
    window: int = 0

    def __str__(self) -> str:
        name = self.method.replace(", on copies", ", augmented")  # records keep the name of the first run
        return f"{name}, context of {self.window}" if self.window else name


PER_SAMPLE, CONTEXT = Way(OURS), Way(OURS, 50)
BASE, SOFTMAX = Way("temperature"), Way("uncalibrated")


@dataclass(frozen=True)
class Results:
    """Records, asked for means.

    Example:
        >>> one = {"set": "a", "seed": 0, "method": "x", "window": 0, "test": "t", "kind": "in", "ece": 0.1}
        >>> Results([one, {**one, "set": "b", "ece": 0.3}]).mean(Way("x"), "in", "ece")
        0.2
    """

    records: Sequence[Record]

    @property
    def sets(self) -> list[str]:
        """Data sets, in order."""
        return list(dict.fromkeys(r["set"] for r in self.records))

    @property
    def ours(self) -> list[Way]:
        """Ours sample by sample and, where it was scored, with a context."""
        return [way for way in (PER_SAMPLE, CONTEXT) if self.has(way)]

    def has(self, way: Way) -> bool:
        """Was it scored?"""
        return any((r["method"], r["window"]) == (way.method, way.window) for r in self.records)

    def only(self, keep: Keep) -> Results:
        """Some of the records."""
        return Results([r for r in self.records if keep(r)])

    def of_draws(self, draws: Iterable[tuple[str, int]]) -> Results:
        """Records of some data sets and seeds."""
        wanted = set(draws)
        return self.only(lambda r: (r["set"], r["seed"]) in wanted)

    def of_sets(self, names: Iterable[str]) -> Results:
        """Records of some data sets."""
        wanted = set(names)
        return self.only(lambda r: r["set"] in wanted)

    def of(self, way: Way, kind: str) -> list[Record]:
        """Records of one way on test sets of one kind."""
        wanted = (way.method, way.window, kind)
        return [r for r in self.records if (r["method"], r["window"], r["kind"]) == wanted]

    def mean(self, way: Way, kind: str, key: str) -> float:
        """Mean over the data sets, NaN where there is none."""
        by_set: dict[str, list[float]] = {}
        for r in self.of(way, kind):
            if key in r and np.isfinite(r[key]):
                by_set.setdefault(r["set"], []).append(r[key])
        return float(np.mean([np.mean(v) for v in by_set.values()])) if by_set else float("nan")

    def by_test(self, way: Way, kind: str, key: str) -> dict[tuple[str, str], float]:
        """Mean over the seeds, for every data set and test set."""
        found: dict[tuple[str, str], list[float]] = {}
        for r in self.of(way, kind):
            found.setdefault((r["set"], r["test"]), []).append(r[key])
        return {where: _mean(values) for where, values in found.items()}

    def mean_of_tests(self, way: Way, kind: str, key: str) -> float:
        """Mean over all test sets, each counted once."""
        return _mean(list(self.by_test(way, kind, key).values()))

    def estimate_error(self, way: Way, kind: str = "shift") -> float:
        """Mean distance of the mean confidence from the accuracy: accuracy without labels."""
        near = [{**r, "error": abs(r["confidence"] - r["accuracy"])} for r in self.of(way, kind)]
        return Results(near).mean(way, kind, "error")

    def best_baselines(self, count: int) -> list[Way]:
        """Baselines of the least ECE under shift, temperature and no calibration aside; of those scored on
        every data set, since a mean over some of them cannot be compared.
        """
        everywhere = self.draws_of(BASE)
        others = [Way(m) for m in BASELINES if Way(m) not in (BASE, SOFTMAX)]
        others = [way for way in others if self.draws_of(way) == everywhere]
        return sorted(others, key=lambda way: self.mean(way, "shift", "ece"))[:count]

    def draws_of(self, way: Way) -> set[tuple[str, int]]:
        """Data sets and seeds on which a way was scored under shift."""
        return {(r["set"], r["seed"]) for r in self.of(way, "shift")}

    def replicates(self, way: Way, key: str, name: str) -> np.ndarray | None:
        """Bootstrap replicates in domain of one data set, mean over the seeds."""
        found = [r[f"{key}_replicates"] for r in self.of(way, "in") if r["set"] == name]
        return np.mean(found, axis=0) if found else None


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """A Markdown table; figures have three decimals.

    Example:
        >>> table(["method", "ECE"], [["x", 0.1]])
        ['| method | ECE |', '|---|---|', '| x | 0.100 |']
    """
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return [*lines, *(f"| {' | '.join(map(_shown, row))} |" for row in rows)]


def _shown(cell: object) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.3f}" if np.isfinite(cell) else "-"


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if np.isfinite(v)]
    return float(np.mean(known)) if known else float("nan")
