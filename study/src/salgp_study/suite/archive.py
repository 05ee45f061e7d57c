"""The committed records of the suite: every score as one JSON line, compressed, and README's table from them.

``python -m salgp_study.suite keep`` writes the records of a cache into the archive; ``python -m
salgp_study.suite readme`` writes the table between the two comments of a README. A test compares both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from salgp.io import write_whole
from salgp_study.store import write_archive
from salgp_study.suite.methods import BASELINES
from salgp_study.suite.protocol import read_protocol
from salgp_study.suite.scoring import Record
from salgp_study.suite.summary import BASE, CONTEXT, PER_SAMPLE, SOFTMAX, Results, Way, table
from salgp_study.suite.verdicts import in_domain, min_ece, short_name

__all__ = ["ARCHIVE", "BEGIN", "END", "fill_readme", "keep_records", "readme_part"]

ARCHIVE = Path("study/records/suite.jsonl.gz")
"""Where the repository keeps the records, seen from its root."""
BEGIN, END = "<!-- suite: begin -->", "<!-- suite: end -->"
"""What README's table stands between."""
DIGITS = 6
"""Significant digits that are kept."""
RESAMPLED = {way.method for way in (PER_SAMPLE, BASE, SOFTMAX)}
"""Methods of which bootstrap replicates are kept: the verdicts compare these."""
SCORES = ("ece", "nll", "auroc")
PAPER = Way("SAL-GP ML (256 inducing rows)")


def keep_records(records: Sequence[Record], path: Path = ARCHIVE) -> Path:
    """Write records into the archive: figures rounded, and without replicates that no table reads."""
    return write_archive([_lean(record) for record in records], path)


def readme_part(results: Results) -> str:
    """README's table, and the sentence of means below it.

    Strong and weak networks apart: temperature scaling, the three baselines of least error under shift, ours.
    """
    strong = set(read_protocol().strong)
    rows: list[Sequence[object]] = []
    for kind, names in (("strong", strong), ("weak", set(results.sets) - strong)):
        part = results.of_sets(names)
        ways = [way for way in (BASE, *results.best_baselines(3), *results.ours) if part.has(way)]
        rows += _block(kind, part, ways)
    head = ["networks", "in domain: ECE", "NLL", "AUROC", "under shift: ECE", "NLL", "AUROC"]
    return "\n".join([*table(head, rows), "", _means(results), "", _costs(results)])


def fill_readme(path: Path, results: Results) -> None:
    """Replace what stands between the comments of a README."""
    text = path.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        raise ValueError(f"{path}: expected one line {BEGIN} and one line {END} around the table")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    filled = f"{before}{BEGIN}\n\n{readme_part(results)}\n\n{END}{after}"
    write_whole(path, lambda part: part.write_text(filled, encoding="utf-8") and None)


def _block(kind: str, part: Results, ways: Sequence[Way]) -> list[Sequence[object]]:
    """Rows of one kind of networks; the best figure of each column is bold."""
    found = {way: [part.mean(way, where, key) for where in ("in", "shift") for key in SCORES] for way in ways}
    best = [
        max(column) if key == "auroc" else min(column)
        for key, column in zip((*SCORES, *SCORES), zip(*found.values(), strict=True), strict=True)
    ]
    rows: list[Sequence[object]] = []
    for way, figures in found.items():
        cells = [_figure(x, f"{x:.3f}" == f"{top:.3f}") for x, top in zip(figures, best, strict=True)]
        name = f"**{way}**" if way in (PER_SAMPLE, CONTEXT) else str(way)
        rows.append([f"{kind}: {name}" if not rows else name, *cells])
    return rows


def _means(results: Results) -> str:
    """Means over all data sets in one sentence per kind of test set."""
    scored = [BASE, *results.best_baselines(len(BASELINES))]
    parts = []
    for kind, said in (("in", "in domain"), ("shift", "under shift")):
        figures = {way: results.mean(way, kind, "ece") for way in (*results.ours, *scored)}
        baselines = {way: figures[way] for way in scored}
        best = min(baselines, key=lambda way: baselines[way])
        named = [*results.ours, BASE, *([PAPER] if PAPER in baselines else [])]
        shown = ", ".join(f"{way} {_figure(figures[way])}" for way in named)
        parts.append(f"{said} {shown}, and at best {_figure(baselines[best])} of a baseline ({best})")
    return f"Mean ECE over the {len(results.sets)} data sets: {'; '.join(parts)}."


def _costs(results: Results) -> str:
    """On which data sets it costs something in domain."""
    broken = {v.promise for v in in_domain(results) if not v.kept}
    parts = []
    for way, said in ((PER_SAMPLE, "single samples"), (CONTEXT, "with a context")):
        found = []
        for name in results.sets:
            if f"in domain, {name}, {short_name(way)}: ECE" in broken:
                one = results.of_sets([name])
                mine, other = (one.mean(w, "in", "ece") for w in (way, min_ece(one)))
                found.append(f"{name} {_figure(mine)} ({_figure(other)})")
        parts.append(f"{said}: {', '.join(found) or 'none'}")
    return (
        "In domain the ECE is beyond noise above that of the better of no calibration and temperature "
        f"scaling (in brackets) on: {'; '.join(parts)}."
    )


def _figure(value: float, bold: bool = False) -> str:
    text = f"{value:.3f}".replace("0.", ".", 1) if value < 1 else f"{value:.3f}"
    return f"**{text}**" if bold else text


def _lean(record: Record) -> dict[str, Any]:
    """A record with rounded figures, and without replicates that no table reads."""
    kept = record["method"] in RESAMPLED
    return {k: _rounded(v) for k, v in record.items() if kept or not k.endswith("_replicates")}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return [_rounded(v) for v in value] if isinstance(value, list) else value
