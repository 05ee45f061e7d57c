"""All networks of the paper's settings beside each other: a row for each method, a column for each network.

One look shows on how many networks a method helps, and which order of methods they share.
"""

from __future__ import annotations

from collections.abc import Sequence

from salgp_study.claims import NEAR, WHOLE, of_networks
from salgp_study.published import paper_cell, paper_figures, paper_row
from salgp_study.table import Record, Table, grouped, mean_std, values_of

__all__ = ["side_by_side_tables"]

SCORES = {"ece": "ECE", "brier": "Brier", "nll_correct": "NLL of correctness", "auroc": "AUROC of errors"}


def side_by_side_tables(records: Sequence[Record]) -> list[Table]:
    """For radar at the near angle and for all test data, fitted on validation and on training data."""
    return [t for preset in ("exact", "paper") for t in _of_preset(records, preset)]


def _of_preset(records: Sequence[Record], preset: str) -> list[Table]:
    chosen = [r for r in of_networks(records) if r["preset"] == preset and r["pooling"] in ("avg", "none")]
    where = {"near": ("radar at the near angle, light curves", NEAR), "all": ("all test data", WHOLE)}
    return [
        _beside(f"networks-{preset}-{score}-{name}-{fit_on}", score, title, fit_on, here)
        for name, (title, tests) in where.items()
        for fit_on in values_of(chosen, "fit_on")
        for score in SCORES
        if (here := [r for r in chosen if r["test"] in tests and r["fit_on"] == fit_on])
    ]


def _beside(name: str, score: str, title: str, fit_on: str, records: Sequence[Record]) -> Table:
    records = sorted(records, key=lambda r: (r["dataset"], r["study"], r["seed"]))
    networks = grouped(records, ("study", "seed"))
    methods = values_of(records, "method")
    printed = paper_figures() if score == "ece" else {}
    kinds = grouped(records, ("dataset", "backbone")) if printed else {}
    rows = []
    for method in methods:
        mine = [_of(group, method) for group in networks.values()]
        theirs = [next(iter(_of(group, method)), None) for group in kinds.values()]
        paper = [paper_cell(paper_row(printed, r), score) if r else "-" for r in theirs]
        rows.append((method, *(mean_std(r[score] for r in one) for one in mine), *paper))
    heads = [f"{study}, seed {seed}" for study, seed in networks]
    beside = [f"paper: {backbone}" for _, backbone in kinds]
    preset, inference = records[0]["preset"], ", ".join(dict.fromkeys(_inferences(records)))
    note = (
        f"Average pooling; networks of preset {preset}; stacked Gaussian processes by {inference} inference "
        f"unless a row says otherwise. The paper's RNN was trained on PLAsTiCC, ours on SPCC."
    )
    said = f"{SCORES[score]} of all networks: {title}, calibrators fitted on {fit_on}"
    return Table(name, said, (note,), ("Method", *heads, *beside), tuple(rows))


def _inferences(records: Sequence[Record]) -> list[str]:
    """Inference of the rows of ML and HL."""
    named = [r for r in records if r["method"] in ("SAL-GP (ML) G", "SAL-GP (HL) G")]
    return [r["inference"] for r in named if r.get("inference")]


def _of(records: Sequence[Record], method: str) -> list[Record]:
    return [r for r in records if r["method"] == method]
