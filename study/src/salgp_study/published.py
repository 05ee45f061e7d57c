"""What the paper printed: the 130 rows of its tables (``paper.csv``), its networks' accuracies
and temperatures.

SPCC stands beside the paper's PLAsTiCC: the same network and kind of shift, other data.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from salgp_study.methods import APPROXIMATE
from salgp_study.table import Record, grouped

__all__ = [
    "PAPER_NETWORKS",
    "PaperNetwork",
    "nearest_test",
    "paper_cell",
    "paper_figures",
    "paper_network",
    "paper_row",
]

_PAPER_NAMES = {"mean_variance": "var"}


@dataclass(frozen=True)
class PaperNetwork:
    """A network of the paper: its accuracies, and the temperature found for it."""

    train: float
    validation: float
    test: float
    temperature: float


PAPER_NETWORKS: Mapping[tuple[str, str], PaperNetwork] = {
    ("mstar", "convnet"): PaperNetwork(1.0, 1.0, 0.9792, 0.0308),
    ("mstar", "aconvnet"): PaperNetwork(0.9837, 0.9864, 0.7644, 1.2278),
    ("mstar", "resnet18"): PaperNetwork(0.9986, 0.9932, 0.9283, 1.00453),
    ("plasticc", "rnn"): PaperNetwork(0.7058, 0.5860, 0.3040, 1.5315),
}
"""Data set and backbone -> what the last rows and notes of the paper's tables say."""


def paper_figures() -> dict[tuple[str, str, str, str], dict[str, str]]:
    """The paper's rows, keyed by data set, backbone, pooling and method.

    Example:
        >>> paper_figures()["mstar", "convnet", "avg", "SAL-GP (ML) G"]["ece"]
        '0.00797'
    """
    text = resources.files("salgp_study").joinpath("paper.csv").read_text(encoding="utf-8")
    return {
        (r["dataset"], r["backbone"], r["pooling"], _plain(r["method"])): r
        for r in csv.DictReader(text.splitlines())
    }


def paper_network(record: Record) -> PaperNetwork | None:
    """The paper's network of the same kind as a record's; None where it has none."""
    return PAPER_NETWORKS.get((_paper_dataset(record), record["backbone"]))


def nearest_test(records: Sequence[Record]) -> str | None:
    """The test set on which our networks' accuracy is nearest to the paper's; None where it has none."""
    paper = paper_network(records[0])
    if paper is None:
        return None
    found = {
        test: statistics.fmean(r["accuracy"] for r in group)
        for (test,), group in grouped(records, ["test"]).items()
    }
    return min(found, key=lambda test: abs(found[test] - paper.test))


def paper_row(
    figures: Mapping[tuple[str, str, str, str], Mapping[str, str]], record: Record
) -> Mapping[str, str]:
    """The paper's row of the same network, pooling and method; empty where it has none."""
    network, method = (_paper_dataset(record), record["backbone"]), _plain(record["method"])
    return figures.get((*network, record["pooling"], method)) or figures.get((*network, "none", method)) or {}


def paper_cell(paper: Mapping[str, str], column: str) -> str:
    """The paper's figure in a column of ours, as printed; ``-`` where there is none."""
    return paper.get(_PAPER_NAMES.get(column, column)) or "-"


def _paper_dataset(record: Record) -> str:
    return "plasticc" if record["dataset"] == "spcc" else str(record["dataset"])


def _plain(method: str) -> str:
    return method.removesuffix(APPROXIMATE).replace("G (", "G(").removesuffix("(1-5)")
