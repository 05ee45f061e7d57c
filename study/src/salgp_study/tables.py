"""Tables from records: the paper's figure beside ours, mean and standard deviation over seeds.

One table per network, test set and split that the calibrators were fitted on; beside them variances and
unknown classes, what every network learned, shares of the training data, the paper's claims.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from salgp_study.claims import claims_tables
from salgp_study.methods import APPROXIMATE
from salgp_study.published import nearest_test, paper_cell, paper_figures, paper_network, paper_row
from salgp_study.side_by_side import side_by_side_tables
from salgp_study.store import read_records
from salgp_study.table import Record, Table, grouped, mean_std, values_of, write_table

__all__ = ["build_tables", "make_tables"]

_COLUMNS = {"ece": "ECE", "mce": "MCE", "nll": "NLL", "brier": "Brier", "mean_variance": "Var."}
_OURS = {"nll_correct": "NLL of correctness", "auroc": "AUROC of errors"}
_FIT = ("Inference", "Clipped", "On a bound")
_OF_CLASSES = ("nll", "brier")
"""Scores that depend on how the other classes share what the predicted one leaves."""


def make_tables(out: str | os.PathLike[str]) -> list[Path]:
    """Write ``tables/NAME.md`` and ``.tex`` for all records of a study folder; return the Markdown files."""
    records = read_records(out)
    if not records:
        raise FileNotFoundError(f"{out}: no records here; run a study into this folder first")
    return [write_table(table, Path(out) / "tables") for table in build_tables(records)]


def build_tables(records: Sequence[Record]) -> list[Table]:
    """All tables of some records: per network and test set, unknown classes, training fractions, claims."""
    tables: list[Table] = []
    for study, preset in dict.fromkeys((r["study"], r["preset"]) for r in records):
        mine = [r for r in records if (r["study"], r["preset"]) == (study, preset)]
        study = study if preset == "cpu" else f"{study}-{preset}"
        if study.startswith("mstar-fractions"):
            tables.append(_fractions(study, mine))
        else:
            tables += [
                _beside_paper(study, test, fit_on, mine)
                for test in values_of(mine, "test")
                for fit_on in values_of(mine, "fit_on")
            ]
            tables += [_uncertainty(study, mine)]
    tables += [_networks(records), *side_by_side_tables(records)]
    tables += claims_tables(records)
    return [t for t in tables if t.rows]


def _beside_paper(study: str, test: str, fit_on: str, records: Sequence[Record]) -> Table:
    chosen = [r for r in records if r["test"] == test and r["fit_on"] == fit_on]
    nearest = nearest_test(records)
    compare = test in ("pooled", "photometric", nearest)
    figures = paper_figures() if compare else {}
    rows = []
    for (pooling, method), group in grouped(chosen, ("pooling", "method")).items():
        paper = paper_row(figures, group[0])
        pairs = [(paper_cell(paper, c), mean_std(_score(r, c) for r in group)) for c in _COLUMNS]
        ours = [cell for pair in pairs for cell in (pair if compare else pair[1:])]
        rows.append((pooling, method, *ours, *(mean_std(r[c] for r in group) for c in _OURS), *_fit(group)))
    heads = [
        h for name in _COLUMNS.values() for h in ((f"{name} paper", f"{name} ours") if compare else (name,))
    ]
    title = f"{study}: test {test}, calibrators fitted on {fit_on}"
    notes = [_setting(chosen)] if chosen else []
    if test == nearest:
        notes.append("Of the test sets, this one is nearest to the paper's in the network's accuracy.")
    return Table(
        f"{study}-{test}-{fit_on}",
        title,
        tuple(notes),
        ("Pooling", "Method", *heads, *_OURS.values(), *_FIT),
        tuple(rows),
    )


def _score(record: Record, name: str) -> float | None:
    """A score of a record; None where other classes share the rest in another way than elsewhere.

    Rows of single layers were once scored with the rest shared at temperature 1; such records name no
    ``rest_temperature``.
    """
    row = record["method"].removesuffix(APPROXIMATE).rpartition(" ")[2]
    layer = row[:1] == "L" and row[1:].isdigit()
    if name in _OF_CLASSES and layer and "rest_temperature" not in record:
        return None
    value: float | None = record[name]
    return value


def _fit(records: Sequence[Record]) -> tuple[str, str, str]:
    """How the Gaussian processes of a row were fitted: inference, share of clipped confidences, parameters
    that ended on a bound.
    """
    inference = ", ".join(dict.fromkeys(r["inference"] for r in records if r.get("inference"))) or "-"
    clipped = mean_std((r["n_clipped"] / r["n"] for r in records), 2) if inference != "-" else "-"
    bound = dict.fromkeys(name for r in records for name in r.get("at_bounds", ()))
    unsettled = any("did not converge" in said for r in records for said in r.get("warnings", ()))
    return inference, clipped, "; ".join([*bound, *(["(did not converge)"] if unsettled else [])]) or "-"


def _uncertainty(study: str, records: Sequence[Record]) -> Table:
    columns = {
        "variance_known": "Var. known",
        "variance_unknown": "Var. unknown",
        "ood_auroc_confidence": "OOD AUROC by confidence",
        "ood_auroc_variance": "OOD AUROC by variance",
        "coverage": "Interval coverage",
    }
    rows = []
    for (fit_on, test, pooling, method), group in grouped(
        records, ("fit_on", "test", "pooling", "method")
    ).items():
        if test in ("pooled", "photometric") and any(
            r["mean_variance"] is not None or r["n_unknown"] for r in group
        ):
            rows.append((fit_on, test, pooling, method, *(mean_std(r[c] for r in group) for c in columns)))
    heads = ("Fitted on", "Test", "Pooling", "Method", *columns.values())
    return Table(
        f"{study}-uncertainty", f"{study}: predictive variance and unknown classes", (), heads, tuple(rows)
    )


def _fractions(study: str, records: Sequence[Record]) -> Table:
    rows = []
    fractions = sorted({r["fraction"] for r in records}, reverse=True)
    for (test, method), group in grouped(records, ("test", "method")).items():
        cells = [
            mean_std((r[c] for r in group if r["fraction"] == f), 3)
            for c in ("ece", "nll_correct")
            for f in fractions
        ]
        rows.append((test, method, *cells))
    heads = [f"{name} {f:.0%}" for name in ("ECE", "NLL of correctness") for f in fractions]
    raw = [r for r in records if r["method"].startswith("Uncal") and r["test"] == "pooled"]
    accuracy = "; ".join(
        f"{f:.0%}: {mean_std((r['accuracy'] for r in raw if r['fraction'] == f), 3)}" for f in fractions
    )
    return Table(
        study,
        f"{study}: share of the training data",
        (f"Accuracy pooled: {accuracy}.",),
        ("Test", "Method", *heads),
        tuple(rows),
    )


def _networks(records: Sequence[Record]) -> Table:
    """Every trained network: how long it was trained, what it knows, and the temperatures found for it."""
    rows = []
    for (study, preset, fraction, seed), group in grouped(
        records, ("study", "preset", "fraction", "seed")
    ).items():
        known: Mapping[str, float] = next((r["accuracies"] for r in group if r.get("accuracies")), {})
        tests = {r["test"]: r["accuracy"] for r in group if r["test"] != "pooled"}
        shown = [f"{split} {known[split]:.4f}" for split in ("train", "validation") if split in known]
        shown += [f"{test} {accuracy:.4f}" for test, accuracy in tests.items()]
        epochs = group[0].get("config", {}).get("recipe", {}).get("epochs", "-")
        paper = paper_network(group[0])
        printed = (
            f"train {paper.train}, validation {paper.validation}, test {paper.test}; T {paper.temperature}"
            if paper
            else "-"
        )
        name = f"{study}, {fraction:.0%}" if fraction < 1 else study
        found = [_temperature(group, split) for split in ("train", "validation")]
        rows.append((name, preset, str(seed), str(epochs), ", ".join(shown), *found, printed))
    heads = ("Study", "Preset", "Seed", "Epochs", "Accuracy", "T (train)", "T (validation)", "Paper")
    note = (
        "T is the temperature found on training or validation data; older records kept neither it nor the "
        "accuracies."
    )
    return Table("networks", "The networks", (note,), heads, tuple(rows))


def _temperature(records: Sequence[Record], fit_on: str) -> str:
    found = [
        r.get("temperature")
        for r in records
        if r["method"] == "Temperature Scaled (Baseline)" and r["fit_on"] == fit_on
    ]
    return mean_std(found[:1])


def _setting(records: Sequence[Record]) -> str:
    raw = [r for r in records if r["method"].startswith("Uncal")] or records
    sizes = ", ".join(f"{name} {n}" for name, n in raw[0]["sizes"].items())
    seeds = ", ".join(map(str, values_of(records, "seed")))
    unknown = f", {raw[0]['n_unknown']} of unknown classes" if raw[0]["n_unknown"] else ""
    epochs = raw[0].get("config", {}).get("recipe", {}).get("epochs")
    trained = f"; {epochs} epochs" if epochs else ""
    return (
        f"Accuracy {mean_std(r['accuracy'] for r in raw)}; seeds {seeds}; samples: "
        f"{sizes}{unknown}; preset {raw[0]['preset']}{trained}.{_learned(records)}"
    )


def _learned(records: Sequence[Record]) -> str:
    """Temperature found and accuracy on training and validation data, where the records have them."""
    tempered = [r for r in records if r["method"] == "Temperature Scaled (Baseline)"]
    found = [r["temperature"] for r in tempered if r.get("temperature") is not None]
    known = {r["seed"]: r["accuracies"] for r in records if r.get("accuracies")}
    text = f" Temperature {mean_std(found)}." if found else ""
    if known:
        splits = next(iter(known.values()))
        shares = ", ".join(f"{k} {mean_std(a[k] for a in known.values())}" for k in splits)
        text += f" Accuracies: {shares}."
    return text
