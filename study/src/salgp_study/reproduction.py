"""The page "What reproduces and what does not", and all tables, from the committed records.

    python -m salgp_study.reproduction [--add DIR]

reads ``study/records/study.jsonl.gz`` and writes ``study/results/tables/*.md`` and
``docs/results/reproduction.md``, from the root of the repository; ``--add`` puts the new records of a study
folder into the archive first. A test compares the page with the records.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from importlib import resources
from pathlib import Path

from salgp.io import write_whole
from salgp_study.claims import NEAR, RAW, TEMPERATURE, claims_table, longest_trained
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
SCALED = ("SAL-GP (ML)", "SAL-GP (HL)", "SAL-GP (sum)")
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
    folder = parser.parse_args(arguments).add
    if folder is not None:
        add_records(read_records(folder), RECORDS)
    records = read_archive(RECORDS)
    write_tables(records, TABLES)
    _write(page(records), PAGE)


def add_records(records: Sequence[Record], archive: Path) -> int:
    """Add the records that an archive has not got yet; give their number."""
    known = read_archive(archive) if archive.is_file() else []
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
    """What the networks fitted exactly say, in sentences."""
    groups = _networks(records).values()
    said = [f"On the {len(groups)} networks of the set *exact*, at the near test set:"]
    for name, other in ((ML, RAW), (ML, TEMPERATURE), (HL, RAW), (HL, TEMPERATURE)):
        ways = [f"{_wins(groups, name, other)} by exact inference"]
        ways.append(f"{_wins(groups, name + APPROXIMATE, other)} by 512 inducing rows")
        said.append(f"- {name} has a lower ECE than {other} on {' and on '.join(ways)};")
    scaled = [f"{_wins(groups, f'{name}, scaled prior', RAW)} ({name})" for name in SCALED]
    said.append(f"- under the dimension-scaled prior a lower ECE than raw on {', '.join(scaled)}.")
    return "\n".join([said[0], "", *said[1:]])


def _wins(groups: Collection[Sequence[Record]], name: str, other: str) -> str:
    """On how many networks, of those with both, one method has the lower ECE, as far as four digits show."""
    pairs = [(_find(group, name), _find(group, other)) for group in groups]
    both = [(a["ece"], b["ece"]) for a, b in pairs if a is not None and b is not None]
    return f"{sum(round(a, 4) < round(b, 4) for a, b in both)} of {len(both)}"


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
        for r in sorted(_stacked(group), key=lambda r: COMPARED.index(r["method"])):
            evidence = f"{r['log_evidence']:,.0f}" if "log_evidence" in r else MISSING
            clipped = f"{100 * r['n_clipped'] / r['n']:.0f} %"
            bounds = ", ".join(r["at_bounds"]) or MISSING
            rows.append((network, r["method"], r["inference"], str(r["n_rows"]), evidence, clipped, bounds))
    heads = ("Network", "Method", "Inference", "Rows", "Log evidence", "Clipped", "Parameters on a bound")
    return Table("fits", "How the fits ended", (), heads, tuple(rows))


def _gains_table(*sets: Sequence[Record]) -> Table:
    """Relative change of the ECE by ML, of ours and as the paper printed it."""
    rows = []
    for network, group in (one for records in sets for one in _networks(records).items()):
        raw = _find(group, RAW)
        if raw is not None:
            ours = [_gain(raw, _find(group, name)) for name in (ML, ML + APPROXIMATE)]
            rows.append((network, raw["preset"], f"{raw['ece']:.4f}", *ours, _paper_gain(raw)))
    heads = ("Network", "Preset", "ECE raw", "ML exact", "ML 512 rows", "Paper's ML")
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
    return {
        f"{study}, seed {seed}": group for (study, seed), group in grouped(records, ("study", "seed")).items()
    }


def _stacked(records: Sequence[Record]) -> Iterator[Record]:
    """Records of stacked models and of those under the scaled prior."""
    for r in records:
        if r.get("inference") and r["method"] in COMPARED and not r["method"].startswith("Single"):
            yield r


def _find(records: Sequence[Record], method: str) -> Record | None:
    return next((r for r in records if r["method"] == method), None)


def _cell(records: Sequence[Record], method: str, score: str) -> str:
    found = _find(records, method)
    return MISSING if found is None or found[score] is None else f"{found[score]:.4f}"


def _gain(raw: Record, other: Record | None) -> str:
    return MISSING if other is None else f"{100 * (other['ece'] / raw['ece'] - 1):+.0f} %"


def _paper_gain(raw: Record) -> str:
    """The same change from the paper's own figures."""
    pooling = "none" if raw["backbone"] == "rnn" else "avg"
    rows = [paper_row(paper_figures(), {**raw, "method": m, "pooling": pooling}) for m in (RAW, ML)]
    figures = [float(row["ece"]) for row in rows if row.get("ece")]
    return f"{100 * (figures[1] / figures[0] - 1):+.0f} %" if len(figures) == 2 else MISSING


def _bold(method: str) -> str:
    return f"**{method}**" if method in (ML, HL) else method


def _write(text: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8") and None)


if __name__ == "__main__":
    main()
