"""Tables from records: the paper's figure beside ours, mean and standard deviation over seeds, as Markdown
and LaTeX.

The paper's published rows are in ``paper.csv``. SPCC stands beside the paper's PLAsTiCC: the same network and
kind of shift, other data.
"""

from __future__ import annotations

import csv
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from salgp.storage import write_whole
from salgp_study.claims import CLAIMS, compare
from salgp_study.store import read_records

__all__ = ["Table", "build_tables", "make_tables", "mean_std", "paper_figures"]

Record = Mapping[str, Any]
_COLUMNS = {"ece": "ECE", "mce": "MCE", "nll": "NLL", "brier": "Brier", "mean_variance": "Var."}
_OURS = {"nll_correct": "NLL of correctness", "auroc": "AUROC of errors"}
_PAPER_NAMES = {"mean_variance": "var"}
_LAYER_ROWS = {name for k in range(1, 6) for name in (f"L{k}", f"(Layer {k})")}
PAPER_ACCURACY = {
    ("mstar", "convnet"): 0.9792,
    ("mstar", "aconvnet"): 0.7644,
    ("mstar", "resnet18"): 0.9283,
    ("plasticc", "rnn"): 0.3040,
}
"""Test accuracy of the paper's networks, from the last row of its tables."""


@dataclass(frozen=True)
class Table:
    """A table that can be written as Markdown or LaTeX.

    Args:
        name: file name without ending.
        title: heading.
        notes: sentences below the heading.
        columns: column names.
        rows: cells as text.
    """

    name: str
    title: str
    notes: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table as GitHub Markdown.

        Example:
            >>> print(Table("t", "T", (), ("a", "b"), (("1", "2"),)).markdown())
            ### T
            <BLANKLINE>
            | a | b |
            |---|---|
            | 1 | 2 |
            <BLANKLINE>
        """
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        body = [
            "|---" * len(cells) + "|" if cells[0] == "---" else "| " + " | ".join(cells) + " |"
            for cells in lines
        ]
        return "\n".join([f"### {self.title}", "", *(f"{note}\n" for note in self.notes), *body, ""])

    def latex(self) -> str:
        """The table as a LaTeX ``tabular``."""
        lines = [" & ".join(map(_escape, cells)) + r" \\" for cells in (self.columns, *self.rows)]
        head = (
            rf"\begin{{table}}[htbp]\centering\caption{{{_escape(self.title)}}}"
            + "\n"
            + rf"\begin{{tabular}}{{{'l' * len(self.columns)}}}\hline"
        )
        return "\n".join(
            [
                head,
                lines[0],
                r"\hline",
                *lines[1:],
                r"\hline\end{tabular}",
                *map(_escape, self.notes),
                r"\end{table}",
                "",
            ]
        )


def make_tables(out: str | os.PathLike[str]) -> list[Path]:
    """Write ``tables/NAME.md`` and ``.tex`` for all records of a study folder; return the Markdown files."""
    records = read_records(out)
    if not records:
        raise FileNotFoundError(f"{out}: no records here; run a study into this folder first")
    folder, written = Path(out) / "tables", []
    for table in build_tables(records):
        for suffix, text in ((".tex", table.latex()), (".md", table.markdown())):
            path = folder / f"{table.name}{suffix}"
            write_whole(path, lambda part, text=text: part.write_text(text) and None)  # type: ignore[misc]
        written.append(path)
    return written


def build_tables(records: Sequence[Record]) -> list[Table]:
    """All tables of some records: per network and test set, variance and unknown classes, training fractions,
    approximation.
    """
    tables: list[Table] = []
    for study, preset in dict.fromkeys((r["study"], r["preset"]) for r in records):
        mine = [r for r in records if (r["study"], r["preset"]) == (study, preset)]
        study = study if preset != "paper" else f"{study}-paper"
        if study.startswith("mstar-fractions"):
            tables.append(_fractions(study, mine))
        elif study.startswith("mstar-approximation"):
            tables.append(_approximation(study, mine))
        else:
            tables += [
                _beside_paper(study, test, fit_on, mine)
                for test in _values(mine, "test")
                for fit_on in _values(mine, "fit_on")
            ]
            tables += [_uncertainty(study, mine)]
    tables += [_claims(records), _stability(records)]
    return [t for t in tables if t.rows]


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


def mean_std(values: Iterable[float | None], digits: int = 4) -> str:
    """``mean ± std`` over seeds, ``mean`` of a single one, ``-`` of none.

    Example:
        >>> mean_std([0.1, 0.3]), mean_std([0.5]), mean_std([None])
        ('0.2000 ± 0.1414', '0.5000', '-')
    """
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    mean = _number(statistics.fmean(known), digits)
    return mean if len(known) == 1 else f"{mean} ± {_number(statistics.stdev(known), digits)}"


def _beside_paper(study: str, test: str, fit_on: str, records: Sequence[Record]) -> Table:
    chosen = [r for r in records if r["test"] == test and r["fit_on"] == fit_on]
    nearest = _nearest_test(records)
    compare = test in ("pooled", "photometric", nearest)
    figures = paper_figures() if compare else {}
    rows = []
    for (pooling, method), group in _grouped(chosen, ("pooling", "method")).items():
        paper = _paper_row(figures, group[0])
        pairs = [(_paper_cell(paper, c), mean_std(r[c] for r in group)) for c in _COLUMNS]
        ours = [cell for pair in pairs for cell in (pair if compare else pair[1:])]
        rows.append((pooling, method, *ours, *(mean_std(r[c] for r in group) for c in _OURS)))
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
        ("Pooling", "Method", *heads, *_OURS.values()),
        tuple(rows),
    )


def _nearest_test(records: Sequence[Record]) -> str | None:
    """The test set on which our network's accuracy is nearest to the paper's; None where it has none."""
    first = records[0]
    dataset = "plasticc" if first["dataset"] == "spcc" else first["dataset"]
    paper = PAPER_ACCURACY.get((dataset, first["backbone"]))
    found = {r["test"]: r["accuracy"] for r in records}
    if paper is None or not found:
        return None
    return min(found, key=lambda test: abs(found[test] - paper))


def _uncertainty(study: str, records: Sequence[Record]) -> Table:
    columns = {
        "variance_known": "Var. known",
        "variance_unknown": "Var. unknown",
        "ood_auroc_confidence": "OOD AUROC by confidence",
        "ood_auroc_variance": "OOD AUROC by variance",
        "coverage": "Interval coverage",
        "n_clipped": "Clipped",
    }
    rows = []
    for (fit_on, test, pooling, method), group in _grouped(
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
    for (test, method), group in _grouped(records, ("test", "method")).items():
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


def _approximation(study: str, records: Sequence[Record]) -> Table:
    columns = ("ece", "nll_correct", "auroc", "mean_variance", "seconds")
    rows = []
    for (test, method), group in _grouped(records, ("test", "method")).items():
        exact = [
            r
            for r in records
            if r["test"] == test and r["method"].endswith("exact") and r["method"][:11] == method[:11]
        ]
        gap = mean_std([abs(a["ece"] - b["ece"]) for a, b in zip(group, exact, strict=False)])
        rows.append((test, method, *(mean_std(r[c] for r in group) for c in columns), gap))
    heads = (
        "Test",
        "Method",
        "ECE",
        "NLL of correctness",
        "AUROC of errors",
        "Var.",
        "Seconds",
        "Gap of ECE to exact",
    )
    return Table(
        study, f"{study}: inducing rows against exact inference", (_setting(records),), heads, tuple(rows)
    )


def _claims(records: Sequence[Record]) -> Table:
    rows = []
    for claim in CLAIMS:
        for fit_on in _values(records, "fit_on"):
            found = compare(claim, records, fit_on)
            if found is not None and found.n > 1:
                cells = (f"{found.mean:+.4f}", f"{found.wins} of {found.n}", f"{found.p:.3f}", found.verdict)
                rows.append((claim.text, fit_on, claim.score, *cells))
    heads = ("Claim", "Fitted on", "Score", "Mean difference", "Networks", "p", "Verdict")
    note = "Negative differences are in favour of the claim; exact sign-flip test over networks."
    return Table("claims", "The paper's claims as paired comparisons", (note,), heads, tuple(rows))


def _stability(records: Sequence[Record]) -> Table:
    """How far apart the rows L1 to L5 and G of the stacked models are."""
    rows = []
    chosen = [
        r for r in records if r["test"] in ("pooled", "photometric") and r["pooling"] in ("avg", "none")
    ]
    for (study, fit_on), group in _grouped(chosen, ("study", "fit_on")).items():
        for stem in ("SAL-GP (ML)", "SAL-GP (HL)", "Single GP"):
            spreads, gaps = _spreads(group, stem)
            if spreads:
                rows.append((study, fit_on, stem, f"{max(spreads):.4f}", f"{max(gaps):.4f}" if gaps else "-"))
    heads = ("Study", "Fitted on", "Method", "Largest range of ECE over layers", "Largest |G - L1|")
    return Table("stability", "Stability over layers", ("Over seeds, the largest.",), heads, tuple(rows))


def _spreads(records: Sequence[Record], stem: str) -> tuple[list[float], list[float]]:
    """Per network: range of the ECE over layers, and distance of the global row from the first layer's."""
    spreads, gaps = [], []
    for _, group in _grouped(records, ("preset", "seed")).items():
        found = {
            r["method"].removeprefix(f"{stem} "): r["ece"]
            for r in group
            if r["method"].startswith(f"{stem} ")
        }
        layers = [v for k, v in found.items() if k in _LAYER_ROWS]
        if len(layers) > 1:
            spreads.append(max(layers) - min(layers))
        if "G" in found and "L1" in found:
            gaps.append(abs(found["G"] - found["L1"]))
    return spreads, gaps


def _setting(records: Sequence[Record]) -> str:
    raw = [r for r in records if r["method"].startswith("Uncal")] or records
    sizes = ", ".join(f"{name} {n}" for name, n in raw[0]["sizes"].items())
    seeds = ", ".join(map(str, _values(records, "seed")))
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
    known = [r["accuracies"] for r in records if r.get("accuracies")]
    text = f" Temperature {mean_std(found)}." if found else ""
    if known:
        shares = ", ".join(f"{k} {mean_std(a[k] for a in known[:1])}" for k in known[0])
        text += f" Accuracy of seed {records[0]['seed']}: {shares}."
    return text


def _grouped(records: Iterable[Record], keys: Sequence[str]) -> dict[tuple[Any, ...], list[Record]]:
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[k] for k in keys), []).append(record)
    return groups


def _values(records: Sequence[Record], key: str) -> list[Any]:
    return list(dict.fromkeys(r[key] for r in records))


def _paper_row(
    figures: Mapping[tuple[str, str, str, str], Mapping[str, str]], record: Record
) -> Mapping[str, str]:
    dataset = "plasticc" if record["dataset"] == "spcc" else record["dataset"]
    place = (dataset, record["backbone"]), _plain(record["method"])
    return (
        figures.get((*place[0], record["pooling"], place[1]))
        or figures.get((*place[0], "none", place[1]))
        or {}
    )


def _paper_cell(paper: Mapping[str, str], column: str) -> str:
    return paper.get(_PAPER_NAMES.get(column, column)) or "-"


def _plain(method: str) -> str:
    return method.replace("G (", "G(").removesuffix("(1-5)")


def _number(value: float, digits: int) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 10**-digits else f"{value:.{digits}f}"


def _escape(text: str) -> str:
    return text.replace("%", r"\%").replace("_", r"\_").replace("±", r"$\pm$").replace("&", r"\&")
