"""The page "What reproduces and what does not", and all tables, from the committed records.

    python -m salgp_study.reproduction [--add DIR [--instead PRESET]]

reads ``study/records/study.jsonl.gz`` and writes ``study/results/tables/*.md`` and
``docs/results/reproduction.md``, from the root of the repository; ``--add`` puts the new records of a study
folder into the archive first, ``--instead`` in place of all records of a preset. A test compares the page
with the records.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path

from salgp.io import write_whole
from salgp_study.claims import (
    CLAIMS,
    NEAR,
    RAW,
    TEMPERATURE,
    claims_table,
    compare,
    longest_trained,
    lower,
)
from salgp_study.methods import APPROXIMATE
from salgp_study.published import paper_figures, paper_row
from salgp_study.store import read_archive, read_records, write_archive
from salgp_study.table import Record, Table, grouped
from salgp_study.tables import build_tables

__all__ = ["PAGE", "RECORDS", "TABLES", "add_records", "main", "page", "write_tables"]

RECORDS = Path("study/records/study.jsonl.gz")
TABLES = Path("study/results/tables")
PAGE = Path("docs/results/reproduction.md")

ML, HL = "SAL-GP (ML) G", "SAL-GP (HL) G"
CLAIMED = ("claims-near-exact", "claims-near-exact-inducing")
BOTH_WAYS = (ML, HL, "Additive", "ICM", "LCM", "Reduced ICM")
"""Stacked models of which exact inference and inducing rows stand beside each other."""
COMPARED = (
    RAW,
    TEMPERATURE,
    "Isotonic",
    "Single GP (Layer 1)",
    "Single GP (Layer 5)",
    *(name for model in BOTH_WAYS for name in (model, model + APPROXIMATE)),
    "SAL-GP (sum)",
    "Class-agnostic global (layer 1)",
    "Class-specific global (layer 1)",
    "Class-specific layer-wise",
    "SAL-GP (ML), scaled prior",
    "SAL-GP (HL), scaled prior",
    "SAL-GP (sum), scaled prior",
)
SCORES = {"ece": "ECE", "brier": "Brier", "nll_correct": "NLL", "auroc": "AUROC"}
MISSING = "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write tables and page of the repository in the current directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--add", type=Path, help="folder of a study whose records are new")
    parser.add_argument("--instead", metavar="PRESET", help="preset whose old records they replace")
    chosen = parser.parse_args(arguments)
    if chosen.add is not None:
        add_records(read_records(chosen.add), RECORDS, chosen.instead)
    records = read_archive(RECORDS)
    write_tables(records, TABLES)
    _write(page(records), PAGE)


def add_records(records: Sequence[Record], archive: Path, instead: str | None = None) -> int:
    """Add the records that an archive has not got yet; give their number.

    ``instead`` names a preset whose records leave the archive first: networks of two versions of a preset are
    not to stand in one table.
    """
    known = read_archive(archive) if archive.is_file() else []
    known = [r for r in known if instead is None or r["preset"] != instead]
    keys = {r["key"] for r in known}
    new = [r for r in records if r["key"] not in keys]
    write_archive([*known, *new], archive)
    return len(new)


def write_tables(records: Sequence[Record], folder: Path) -> None:
    """Write every table as Markdown; tables of the folder that are no longer made are removed."""
    made = {f"{table.name}.md": table.markdown() for table in build_tables(records)}
    for old in folder.glob("*.md"):
        if old.name not in made:
            old.unlink()
    for name, text in made.items():
        _write(text, folder / name)


def page(records: Sequence[Record]) -> str:
    """The whole page as Markdown: the text of ``reproduction.md``, filled with tables."""
    exact = [r for r in _near(records) if r["preset"] == "exact"]
    full = [r for r in _near(records) if r["preset"] == "paper"]
    claims = {table.name: table for table in claims_table(records)}
    parts = {
        "summary": [_summary(exact)],
        "exact_scores": [_scores_table(exact, score).markdown() for score in SCORES],
        "fits": [_fits_table(exact).markdown()],
        "gains": [_gains_table(exact, full).markdown()],
        "claims": [claims[name].markdown() for name in CLAIMED if name in claims],
        "paper_scores": [_scores_table(full, score).markdown() for score in ("ece", "brier")],
        "poolings": [_pooling_table(records).markdown()],
    }
    text = resources.files("salgp_study").joinpath("reproduction.md").read_text(encoding="utf-8")
    for name, tables in parts.items():
        text = text.replace("{{" + name + "}}", "\n".join(tables).strip())
    return text


def _summary(records: Sequence[Record]) -> str:
    """What the networks fitted exactly say: the main claim in a sentence, all models in a table."""
    groups = _networks(records).values()
    text, table = _main_claim(records), _counts_table(groups)
    return f"{text}\n\n{table.markdown()}"


def _main_claim(records: Sequence[Record]) -> str:
    said = []
    for approximate, how in ((False, "by exact inference"), (True, "by 512 inducing rows")):
        found = compare(CLAIMS[0], records, "validation", "near", approximate)
        if found is not None:
            size = f"{found.wins} of {found.n} networks, mean ECE {100 * found.relative:+.1f} %"
            said.append(f"{how} ML has the lower ECE on {size} (p = {found.p:.2f}, not corrected)")
    return f"**{CLAIMS[0].text}**: {'; '.join(said)}."


def _counts_table(groups: Collection[Sequence[Record]]) -> Table:
    """On how many networks each model has a lower ECE than raw and than temperature scaling."""
    rows = []
    for name in (name for name in COMPARED if not name.endswith(APPROXIMATE)):
        ways = (name, name + APPROXIMATE)
        cells = [cell for way in ways for cell in (_wins(groups, way, RAW), _change(groups, way, RAW))]
        if name != RAW and any(cell != MISSING for cell in cells):
            against = [_wins(groups, way, TEMPERATURE) if name != TEMPERATURE else MISSING for way in ways]
            rows.append((_bold(name), *cells, *against))
    heads = [f"{how}{what}" for how in ("Exact: ", "512 rows: ") for what in ("below raw", "change")]
    note = (
        "On how many networks the ECE at the near test set is lower, to four digits, and the mean over "
        "networks of its relative change. Methods without inducing rows have the first columns only."
    )
    last = [f"{how}below temperature" for how in ("Exact: ", "512 rows: ")]
    return Table(
        "counts", "Networks on which the ECE is lower", (note,), ("Method", *heads, *last), tuple(rows)
    )


def _pairs(groups: Collection[Sequence[Record]], name: str, other: str) -> list[tuple[float, float]]:
    """ECE of two methods on every network that has both."""
    pairs = [(_find(group, name), _find(group, other)) for group in groups]
    return [(a["ece"], b["ece"]) for a, b in pairs if a is not None and b is not None]


def _wins(groups: Collection[Sequence[Record]], name: str, other: str) -> str:
    """On how many networks, of those with both, one method has the lower ECE, as far as four digits show."""
    both = _pairs(groups, name, other)
    return f"{sum(lower(a, b) for a, b in both)} of {len(both)}" if both else MISSING


def _change(groups: Collection[Sequence[Record]], name: str, other: str) -> str:
    both = _pairs(groups, name, other)
    return _percent(statistics.fmean(a / b - 1 for a, b in both)) if both else MISSING


def _near(records: Sequence[Record]) -> list[Record]:
    """Records of the near test sets, fitted on validation data, with average pooling."""
    chosen = [r for r in longest_trained(records) if r["test"] in NEAR and r["fit_on"] == "validation"]
    return [r for r in chosen if r["pooling"] in ("avg", "none")]


def _scores_table(records: Sequence[Record], score: str) -> Table:
    """One score: a row for each method, a column for each network."""
    networks = _networks(records)
    rows = []
    for method in COMPARED:
        cells = [_cell(group, method, score) for group in networks.values()]
        if any(cell != MISSING for cell in cells):
            rows.append((_bold(method), *cells))
    return Table(score, SCORES[score], (), ("Method", *networks), tuple(rows))


def _fits_table(records: Sequence[Record]) -> Table:
    """How the fits ended: evidence, share clipped, parameters on a bound."""
    rows = []
    for network, group in _networks(records).items():
        for r in sorted(_gaussian(group), key=lambda r: COMPARED.index(r["method"])):
            evidence = f"{r['log_evidence']:,.0f}" if "log_evidence" in r else MISSING
            clipped = f"{100 * r['n_clipped'] / r['n']:.0f} %"
            unsettled = any("did not converge" in said for said in r["warnings"])
            bounds = ", ".join([*r["at_bounds"], *(["(did not converge)"] if unsettled else [])]) or MISSING
            rows.append((network, r["method"], r["inference"], str(r["n_rows"]), evidence, clipped, bounds))
    heads = ("Network", "Method", "Inference", "Rows", "Log evidence", "Clipped", "Parameters on a bound")
    return Table("fits", "How the fits ended", (), heads, tuple(rows))


def _gains_table(*sets: Sequence[Record]) -> Table:
    """Relative change of the ECE by ML and HL, of ours and as the paper printed it."""
    rows = []
    for network, group in (one for records in sets for one in _networks(records).items()):
        raw = _find(group, RAW)
        if raw is not None:
            gains = [
                cell
                for name in (ML, HL)
                for cell in (
                    *(_gain(raw, _find(group, way)) for way in (name, name + APPROXIMATE)),
                    _paper_gain(raw, name),
                )
            ]
            rows.append((network, raw["preset"], f"{raw['ece']:.4f}", *gains))
    said = [f"{name} {way}" for name in ("ML", "HL") for way in ("exact", "512 rows", "paper")]
    heads = ("Network", "Preset", "ECE raw", *said)
    note = "Negative is a gain. The paper's recurrent network was trained on PLAsTiCC, ours on SPCC."
    return Table("gains", "Relative change of the ECE", (note,), heads, tuple(rows))


def _pooling_table(records: Sequence[Record]) -> Table:
    """Average and max pooling of the stacked models, where both were run."""
    chosen = [r for r in longest_trained(records) if r["test"] in NEAR and r["fit_on"] == "validation"]
    rows = []
    for network, group in _networks([r for r in chosen if r["preset"] == "paper"]).items():
        both = {p: [r for r in group if r["pooling"] in (p, "none")] for p in ("avg", "max")}
        if not any(r["pooling"] == "max" for r in group):
            continue
        for name in (ML + APPROXIMATE, HL + APPROXIMATE):
            cells = [_cell(both[p], name, "ece") for p in ("avg", "max")]
            rows.append((network, name, *cells, _cell(group, RAW, "ece")))
    heads = ("Network", "Method", "Average pooling", "Max pooling", "Raw")
    return Table("poolings", "ECE by pooling", (), heads, tuple(rows))


def _networks(records: Sequence[Record]) -> dict[str, list[Record]]:
    found = grouped(records, ("study", "seed"))
    return {f"{study}, seed {seed}": found[study, seed] for study, seed in sorted(found)}


def _gaussian(records: Sequence[Record]) -> Iterator[Record]:
    """Records of Gaussian processes."""
    for r in records:
        if r.get("inference") and r["method"] in COMPARED:
            yield r


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


def _bold(method: str) -> str:
    return f"**{method}**" if method in (ML, HL) else method


def _write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8") and None)


if __name__ == "__main__":
    main()
