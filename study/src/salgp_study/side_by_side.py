"""All networks of a preset beside each other: a row for each method and score, a column for each network.

One look shows on how many networks a method helps, and which order of methods they share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import product

from salgp_study.claims import NEAR, PLACES, WHOLE, of_networks
from salgp_study.published import paper_cell, paper_figures, paper_row
from salgp_study.table import Record, Table, grouped, mean_std, values_of

__all__ = ["side_by_side_tables"]

SCORES = {"ece": "ECE", "brier": "Brier", "nll_correct": "NLL", "auroc": "AUROC"}


def side_by_side_tables(records: Sequence[Record]) -> list[Table]:
    """For radar at the near angle and for all test data, by preset and split the methods were fitted on."""
    chosen = [r for r in of_networks(records) if r["pooling"] in ("avg", "none")]
    places = product(("exact", "exact-all", "paper"), PLACES, values_of(chosen, "fit_on"))
    return [_beside(preset, where, fit_on, chosen) for preset, where, fit_on in places]


def _beside(preset: str, where: str, fit_on: str, records: Sequence[Record]) -> Table:
    tests = NEAR if where == "near" else WHOLE
    chosen = [r for r in records if r["preset"] == preset and r["fit_on"] == fit_on and r["test"] in tests]
    chosen = sorted(chosen, key=lambda r: (r["dataset"], r["study"], r["seed"]))
    networks, kinds = grouped(chosen, ("study", "seed")), grouped(chosen, ("dataset", "backbone"))
    rows = tuple(
        (said, method, *_ours(networks.values(), method, score), *_theirs(kinds.values(), method, score))
        for score, said in SCORES.items()
        for method in values_of(chosen, "method")
    )
    heads = [f"{study}, seed {seed}" for study, seed in networks]
    printed = [f"paper: {backbone}" for _, backbone in kinds]
    title = f"All networks of the set {preset}: {PLACES[where]}, calibrators fitted on {fit_on}"
    note = (
        "Average pooling. NLL is that of correctness. The paper's RNN was trained on PLAsTiCC, ours on SPCC."
    )
    columns = ("Score", "Method", *heads, *printed)
    return Table(f"networks-{preset}-{where}-{fit_on}", title, (note,), columns, rows)


def _ours(groups: Collection[Sequence[Record]], method: str, score: str) -> list[str]:
    return [mean_std(r[score] for r in group if r["method"] == method) for group in groups]


def _theirs(groups: Collection[Sequence[Record]], method: str, score: str) -> list[str]:
    """The paper's figures: of these scores it has the ECE of every row, and the Brier score."""
    figures = paper_figures()
    found = [[r for r in group if r["method"] == method] for group in groups]
    return [paper_cell(paper_row(figures, group[0]), score) if group else "-" for group in found]
