"""The page "What reproduces and what does not", and all tables, from the committed records.

    python -m salgp_study.reproduction [--add DIR]

reads ``study/records/study.jsonl.gz`` and writes ``study/results/tables/*.md`` and
``docs/results/reproduction.md``, from the root of the repository; ``--add`` puts the records of a study
folder into the archive first. A test compares the page with the records.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path

from salgp.io import write_whole
from salgp_study.claims import (
    CLAIMS,
    NEAR,
    RAW,
    TEMPERATURE,
    VERDICTS,
    by_inducing_rows,
    claims_table,
    compare,
    lower,
    of_networks,
)
from salgp_study.methods import APPROXIMATE, ONE_START
from salgp_study.published import paper_cell, paper_figures, paper_row
from salgp_study.store import read_archive, read_records, write_archive
from salgp_study.table import Record, Table, grouped
from salgp_study.tables import build_tables

__all__ = ["PAGE", "RECORDS", "TABLES", "add_records", "all_tables", "main", "page", "write_tables"]

RECORDS = Path("study/records/study.jsonl.gz")
TABLES = Path("study/results/tables")
PAGE = Path("docs/results/reproduction.md")

ML, HL, SUM = "SAL-GP (ML) G", "SAL-GP (HL) G", "SAL-GP (sum)"
BOTH_WAYS = (ML, HL, "Additive", "ICM", "LCM", "Reduced ICM")
"""Stacked models of which exact inference and inducing rows stand beside each other."""
COMPARED = (
    RAW,
    TEMPERATURE,
    "Isotonic",
    "Single GP (Layer 1)",
    "Single GP (Layer 5)",
    *BOTH_WAYS,
    "Class-agnostic global (layer 1)",
    "Class-specific global (layer 1)",
    "Class-specific layer-wise",
    SUM,
    *(f"{name}, scaled prior" for name in ("SAL-GP (ML)", "SAL-GP (HL)", SUM)),
    *(name + ONE_START for name in (ML, HL, SUM)),
    "Deep GP",
)
SHOWN = (RAW, TEMPERATURE, ML, ML + APPROXIMATE, HL, HL + APPROXIMATE, SUM, "Deep GP")
"""Methods shown network by network; the others are in the tables beside the study."""
SHOWN_ALL = (
    RAW,
    TEMPERATURE,
    *(name + way for name in (ML, HL) for way in ("", APPROXIMATE)),
    *BOTH_WAYS[2:],
    SUM,
    *(f"{name}, scaled prior" for name in ("SAL-GP (ML)", "SAL-GP (HL)", SUM)),
)
SUBSETS = tuple(f"{model} G({part})" for model in ("SAL-GP (ML)", "SAL-GP (HL)") for part in ("1-3", "3-5"))
FITS = {way for name in (*COMPARED, *SUBSETS) for way in (name, name + APPROXIMATE)}
"""Methods whose fits are listed: all but the rows of single layers."""
VARIANTS = ("mstar-soc-smoothed", "mstar-soc-aconvnet-1x1", "mstar-soc-resnet18-preactivation")
BOUNDS = ("noise", "lengthscale", "variance")
ROW = ("study", "preset", "seed", "fraction", "fit_on", "pooling", "method", "test")
MISSING = "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write tables and page of the repository in the current directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, help="folder of a study whose records are new")
    chosen = parser.parse_args(arguments)
    if chosen.add is not None:
        add_records(read_records(chosen.add), RECORDS)
    records = read_archive(RECORDS)
    write_tables(records, TABLES)
    _write(page(records), PAGE)


def add_records(records: Sequence[Record], archive: Path) -> int:
    """Add records to an archive, in place of older ones of the same row; give the number of new ones."""
    known = read_archive(archive) if archive.is_file() else []
    added = {_row(r) for r in records}
    write_archive([*(r for r in known if _row(r) not in added), *records], archive)
    return len({r["key"] for r in records} - {r["key"] for r in known})


def _row(record: Record) -> tuple[object, ...]:
    """What a record scores: a method on a test set of a network."""
    return tuple(record[name] for name in ROW)


def write_tables(records: Sequence[Record], folder: Path) -> None:
    """Write every table as Markdown; tables of the folder that are no longer made are removed."""
    made = all_tables(records)
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        _write(text, folder / name)


def all_tables(records: Sequence[Record]) -> dict[str, str]:
    """File name and text of every table beside the study."""
    fits = [_fits_table(_of_preset(records, preset), preset) for preset in ("exact", "exact-all")]
    tables = [*build_tables(records), *(table for table in fits if table.rows)]
    return {f"{table.name}.md": table.markdown() for table in tables}


def page(records: Sequence[Record]) -> str:
    """The whole page as Markdown: the text of ``reproduction.md``, filled with tables."""
    exact, whole, full = (_of_preset(records, preset) for preset in ("exact", "exact-all", "paper"))
    claims, claims_all = (claims_table(some, "near", "validation") for some in (exact, whole))
    parts = {
        "summary": _main_claim(exact),
        "summary_all": _main_claim(whole),
        "verdicts": _verdicts(claims),
        "claims": _text(claims),
        "counts": _text(_counts_table(exact, "exact")),
        "ece": _text(_scores_table(exact, "ece", "ECE on every network, set exact")),
        "gains": _text(_gains_table(exact, whole, full)),
        "ends": _text(_ends_table(exact, "exact")),
        "agreement": _agreement(claims, claims_all),
        "claims_all": _text(claims_all),
        "counts_all": _text(_counts_table(whole, "exact-all")),
        "ece_all": _text(_scores_table(whole, "ece", "ECE on every network, set exact-all", SHOWN_ALL)),
        "ends_all": _text(_ends_table(whole, "exact-all")),
        "paper_size": _paper_size(full),
        "poolings": _text(_pooling_table(records)),
        "subsets": _text(_subsets_table(exact)),
        "variants": _text(_variants_table(records)),
    }
    text = resources.files("salgp_study").joinpath("reproduction.md").read_text(encoding="utf-8")
    for name, part in parts.items():
        text = text.replace("{{" + name + "}}", part.strip())
    return text


def _text(table: Table) -> str:
    """A table as Markdown; nothing where it has no rows."""
    return table.markdown() if table.rows else ""


def _main_claim(records: Sequence[Record]) -> str:
    ways = {"by exact inference": compare(CLAIMS[0], records, "validation", "near")}
    ways["by 512 inducing rows"] = by_inducing_rows(CLAIMS[0], records, "validation", "near")
    said = []
    for how, found in ways.items():
        if found is not None:
            size = f"{found.wins} of {found.n} networks, mean ECE {100 * found.relative:+.1f} %"
            said.append(f"{how} ML has the lower ECE on {size}")
    return f"**{CLAIMS[0].text}**: {'; '.join(said)}."


def _verdicts(claims: Table) -> str:
    """The claims by verdict, a line each; of those without a verdict, their number."""
    text, verdict = claims.columns.index("Claim"), claims.columns.index("Verdict")
    found = {said: [row[text] for row in claims.rows if row[verdict] == said] for said in VERDICTS}
    *told, unknown = found
    lines = [f"- **{said.capitalize()}**: {'; '.join(found[said]) or 'none'}." for said in told]
    return "\n".join([*lines, f"- **{unknown.capitalize()}**: the other {len(found[unknown])}."])


def _agreement(claims: Table, others: Table) -> str:
    """Do the claims that one set of networks contradicts point the same way in another set?"""
    text, verdict, change = (claims.columns.index(head) for head in ("Claim", "Verdict", "Change"))
    found = {row[text]: row[change] for row in others.rows}
    contradicted = [row[text] for row in claims.rows if row[verdict] == "contradicted" and row[text] in found]
    against = sum(found[claim].startswith("+") for claim in contradicted)
    here = f"{against} have a change against them here too"
    return f"Of the {len(contradicted)} claims contradicted above, {here}."


def _counts_table(records: Sequence[Record], preset: str) -> Table:
    """On how many networks each model has a lower ECE than raw and than temperature scaling."""
    groups = _networks(records).values()
    rows = []
    for name in COMPARED[1:]:
        if _pairs(groups, name, RAW, "ece"):
            near = name + APPROXIMATE
            cells = (_wins(groups, name, RAW), _change(groups, name, RAW))
            beside = _wins(groups, name, TEMPERATURE) if name != TEMPERATURE else MISSING
            others = (_wins(groups, name, RAW, "brier"), _wins(groups, name, RAW, "auroc", higher=True))
            rows.append((name, *cells, beside, *others, _wins(groups, near, RAW), _change(groups, near, RAW)))
    heads = (
        "Method",
        "ECE below raw",
        "change",
        "ECE below temperature",
        "Brier below raw",
        "AUROC above raw",
    )
    note = (
        "On how many networks, to four digits, and the mean over networks of the relative change. Last two "
        "columns: by 512 inducing rows."
    )
    last = ("512 rows: ECE below raw", "change")
    title = f"Every model beside the raw confidence, set {preset}"
    return Table("counts", title, (note,), (*heads, *last), tuple(rows))


def _pairs(
    groups: Collection[Sequence[Record]], name: str, other: str, score: str
) -> list[tuple[float, float]]:
    """A score of two methods on every network that has both."""
    pairs = [(_find(group, name), _find(group, other)) for group in groups]
    return [(a[score], b[score]) for a, b in pairs if a is not None and b is not None]


def _wins(
    groups: Collection[Sequence[Record]], name: str, other: str, score: str = "ece", higher: bool = False
) -> str:
    """On how many networks, of those with both, one method has the lower score, or the higher one."""
    both = _pairs(groups, name, other, score)
    won = sum(lower(b, a) if higher else lower(a, b) for a, b in both)
    return f"{won} of {len(both)}" if both else MISSING


def _change(groups: Collection[Sequence[Record]], name: str, other: str) -> str:
    both = _pairs(groups, name, other, "ece")
    return _percent(statistics.fmean(a / b - 1 for a, b in both)) if both else MISSING


def _scores_table(records: Sequence[Record], score: str, title: str, methods: Sequence[str] = SHOWN) -> Table:
    """One score: a row for each method, a column for each network."""
    networks = _networks(records)
    rows = []
    for method in methods:
        cells = [_cell(group, method, score) for group in networks.values()]
        if any(cell != MISSING for cell in cells):
            rows.append((method, *cells))
    return Table(score, title, (), ("Method", *networks), tuple(rows))


def _gains_table(*sets: Sequence[Record]) -> Table:
    """Relative change of the ECE by ML and HL, of ours and as the paper printed it."""
    rows = [
        (network, group[0]["preset"], *_gains(group))
        for records in sets
        for network, group in _networks(records).items()
    ]
    said = [f"{name} {way}" for name in ("ML", "HL") for way in ("exact", "512 rows", "paper")]
    heads = ("Network", "Set", "ECE raw", *said)
    note = "Negative is a gain. The paper's recurrent network was trained on PLAsTiCC, ours on SPCC."
    title = "Relative change of the ECE beside the paper's"
    return Table("gains", title, (note,), heads, tuple(rows))


def _gains(group: Sequence[Record]) -> list[str]:
    """ECE of a network, and the relative changes by ML and HL: exact, by inducing rows, the paper's."""
    raw = next(r for r in group if r["method"] == RAW)
    cells = [f"{raw['ece']:.4f}"]
    for name in (ML, HL):
        cells += [_gain(raw, _find(group, way)) for way in (name, name + APPROXIMATE)]
        cells.append(_paper_gain(raw, name))
    return cells


def _ends_table(records: Sequence[Record], preset: str) -> Table:
    """How the exact fits of each model ended, over networks."""
    rows = []
    for (name,), group in sorted(grouped(records, ("method",)).items(), key=lambda item: _place(item[0][0])):
        if name in COMPARED and "at_bounds" in group[0]:
            clipped = sorted(r["n_clipped"] / r["n"] for r in group)
            share = f"{100 * clipped[0]:.0f} to {100 * clipped[-1]:.0f} %"
            bounds = [_share([_on_bound(r, part) for r in group]) for part in BOUNDS]
            rows.append((name, share, *bounds, _share([_unsettled(r) for r in group])))
    heads = ("Method", "Clipped", *(f"Bound: {part}" for part in BOUNDS), "Did not converge")
    note = (
        "Share of the test confidences that s + r puts outside of (0, 1), lowest and highest network. On how "
        "many networks a noise, a lengthscale, a variance ended on a bound; each is named in "
        f"`study/results/tables/fits-{preset}.md`."
    )
    return Table("ends", f"How the fits of the set {preset} ended", (note,), heads, tuple(rows))


def _share(found: Sequence[bool]) -> str:
    return f"{sum(found)} of {len(found)}"


def _on_bound(record: Record, part: str) -> bool:
    """Did a parameter of this kind end on a bound? Weights of an index kernel are variances."""
    kinds = ("variance", "shared", "own") if part == "variance" else (part,)
    return any(name.endswith(f"log_{kind}") for name in record["at_bounds"] for kind in kinds)


def _unsettled(record: Record) -> bool:
    return any("did not converge" in said for said in record["warnings"])


def _fits_table(records: Sequence[Record], preset: str) -> Table:
    """How every fit ended: evidence, share clipped, parameters on a bound."""
    rows = []
    for network, group in _networks(records).items():
        for r in (r for r in group if r.get("inference") and r["method"] in FITS):
            evidence = f"{r['log_evidence']:,.0f}" if "log_evidence" in r else MISSING
            clipped = f"{100 * r['n_clipped'] / r['n']:.0f} %"
            ends = [*r["at_bounds"], *(["(did not converge)"] if _unsettled(r) else [])]
            place = (network, r["method"], r["inference"], str(r["n_rows"]))
            rows.append((*place, evidence, clipped, ", ".join(ends) or MISSING))
    heads = ("Network", "Method", "Inference", "Rows", "Log evidence", "Clipped", "Parameters on a bound")
    title = f"How the fits of the set {preset} ended"
    return Table(f"fits-{preset}", title, (), heads, tuple(rows))


def _paper_size(records: Sequence[Record]) -> str:
    """ECE and Brier score of the networks of the paper's size."""
    titles = {
        "ece": "ECE, networks of the paper's size",
        "brier": "Brier score, networks of the paper's size",
    }
    methods = [way for name in COMPARED for way in (name, name + APPROXIMATE)]
    chosen = [name for name in methods if name in SHOWN]
    return "\n".join(
        _scores_table(records, score, title, chosen).markdown() for score, title in titles.items()
    )


def _pooling_table(records: Sequence[Record]) -> Table:
    """Average and max pooling of ML and HL, where both were run."""
    chosen = [r for r in of_networks(records) if r["test"] in NEAR and r["fit_on"] == "validation"]
    chosen = [r for r in chosen if r["backbone"] != "rnn"]
    rows = []
    for (study, seed, preset), group in sorted(grouped(chosen, ("study", "seed", "preset")).items()):
        both = {p: [r for r in group if r["pooling"] in (p, "none")] for p in ("avg", "max")}
        for name in (way for model in (ML, HL) for way in (model, model + APPROXIMATE)):
            cells = [_cell(both[p], name, "ece") for p in ("avg", "max")]
            if MISSING not in cells:
                rows.append((f"{study}, seed {seed}", preset, name, *cells, _cell(group, RAW, "ece")))
    heads = ("Network", "Set", "Method", "Average pooling", "Max pooling", "Raw")
    return Table("poolings", "ECE by pooling", (), heads, tuple(rows))


def _subsets_table(records: Sequence[Record]) -> Table:
    """Layers 1 to 3 or 3 to 5 of the recurrent network, beside the paper's figures."""
    mine = [r for r in records if r["backbone"] == "rnn"]
    whole = _scores_table(mine, "ece", "Layer subsets of the recurrent network", (RAW, ML, HL, *SUBSETS))
    rows = [(*row, _printed(mine, row[0])) for row in whole.rows]
    note = "ECE. The paper's network was trained on PLAsTiCC, ours on SPCC."
    return Table("subsets", whole.title, (note,), (*whole.columns, "Paper"), tuple(rows))


def _printed(records: Sequence[Record], method: str) -> str:
    """The paper's ECE of a method on a network of this kind."""
    return paper_cell(paper_row(paper_figures(), {**records[0], "method": method}), "ece")


def _variants_table(records: Sequence[Record]) -> Table:
    """Variants of networks, each beside the network it is a variant of."""
    chosen = [r for r in records if r["test"] in NEAR and r["preset"] == "exact" and r["seed"] == 0]
    chosen = [r for r in chosen if r["pooling"] in ("avg", "none")]
    studies = {study: group for (study,), group in grouped(chosen, ("study",)).items()}
    rows = [
        (name, f"{group[0]['accuracy']:.4f}", *(_cell(group, m, "ece") for m in (RAW, TEMPERATURE, ML, HL)))
        for name, group in ((name, studies[name]) for name in _with_originals(studies))
    ]
    heads = ("Study, seed 0", "Accuracy", "Raw", "Temperature", "ML", "HL")
    return Table("variants", "Variants of the networks", ("ECE, exact inference.",), heads, tuple(rows))


def _with_originals(studies: Mapping[str, Sequence[Record]]) -> list[str]:
    """Names of the variants there are, after the networks they are variants of."""
    there = [name for name in VARIANTS if name in studies]
    pairs = [(name.rpartition("-")[0], name) for name in there]
    return [name for pair in pairs for name in pair if name in studies]


def _of_preset(records: Sequence[Record], preset: str) -> list[Record]:
    """Records of the near test sets, fitted on validation data, with average pooling."""
    chosen = [r for r in of_networks(records) if r["preset"] == preset and r["test"] in NEAR]
    return [r for r in chosen if r["fit_on"] == "validation" and r["pooling"] in ("avg", "none")]


def _networks(records: Sequence[Record]) -> dict[str, list[Record]]:
    found = grouped(records, ("study", "seed"))
    return {f"{study}, seed {seed}": found[study, seed] for study, seed in sorted(found)}


def _place(method: str) -> int:
    return COMPARED.index(method) if method in COMPARED else len(COMPARED)


def _find(records: Sequence[Record], method: str) -> Record | None:
    return next((r for r in records if r["method"] == method), None)


def _cell(records: Sequence[Record], method: str, score: str) -> str:
    found = _find(records, method)
    return MISSING if found is None or found[score] is None else f"{found[score]:.4f}"


def _gain(raw: Record, other: Record | None) -> str:
    return MISSING if other is None else _percent(other["ece"] / raw["ece"] - 1)


def _paper_gain(raw: Record, method: str) -> str:
    """The same change from the paper's own figures."""
    pooling = "none" if raw["backbone"] == "rnn" else "avg"
    rows = [paper_row(paper_figures(), {**raw, "method": m, "pooling": pooling}) for m in (RAW, method)]
    figures = [float(row["ece"]) for row in rows if row.get("ece")]
    return _percent(figures[1] / figures[0] - 1) if len(figures) == 2 else MISSING


def _percent(share: float) -> str:
    return f"{100 * share:+.0f} %" if abs(share) >= 0.005 else "0 %"


def _write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8") and None)


if __name__ == "__main__":
    main()
