"""What a prior on lengthscales does for the paper's models under shift.

``python -m salgp_study.prior --cache DIR --sets digits tabular-digits --out FILE`` fits ML, HL and ``sum`` by
exact inference, each with bounds alone and with the dimension-scaled prior, to the calibration samples of
development sets of the shift suite (`salgp_study.suite`), and writes a line per test set. A stopped run
continues. ``--keep`` puts the lines into the archive and writes the table of all that it holds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Sequence
from pathlib import Path

from salgp.calibrators import get
from salgp.io import write_whole
from salgp_study.refined import RefinedSALGP
from salgp_study.steps import Step, score_sets
from salgp_study.store import read_archive, write_archive
from salgp_study.table import Record, Table

__all__ = ["ARCHIVE", "MODELS", "PAGE", "keep", "main", "prior_page"]

ARCHIVE = Path("study/records/prior.jsonl.gz")
PAGE = Path("study/results/prior.md")
PRIOR = ", scaled prior"
"""What the name of a model under the prior ends with."""
SCORES = ("ece", "nll", "auroc")


def _models() -> tuple[Step, ...]:
    found = [Step("temperature", "for comparison", lambda: get("temperature"))]
    for name, change in (("ML", {}), ("HL", {"restarts": 2}), ("sum", {"covariance": "sum"})):
        build = functools.partial(RefinedSALGP.paper, "ml" if name == "sum" else name.lower(), **change)
        scaled = functools.partial(build, prior="dimension-scaled")
        found += [Step(name, "bounds", build), Step(name + PRIOR, "prior", scaled)]
    return tuple(found)


MODELS = _models()
"""Temperature scaling, and each model of the paper without and with the prior."""


def keep(records: Sequence[Record], archive: Path = ARCHIVE, page: Path = PAGE) -> None:
    """Put records into the archive, in place of older ones of the same fit, and write the page."""
    known = read_archive(archive) if archive.is_file() else []
    added = {(r["set"], r["seed"], r["step"]) for r in records}
    kept = [r for r in known if (r["set"], r["seed"], r["step"]) not in added]
    every = [*kept, *records]
    write_archive(every, archive)
    write_whole(page, lambda part: part.write_text(prior_page(every), encoding="utf-8") and None)


def prior_page(records: Sequence[Record]) -> str:
    """The page: means over sets, and each set."""
    by_set = [
        (set_, seed, [r for r in records if (r["set"], r["seed"]) == (set_, seed)])
        for set_, seed in dict.fromkeys((r["set"], r["seed"]) for r in records)
    ]
    heads = [f"{score.upper()} {kind}" for kind in ("in domain", "under shift") for score in SCORES]
    whole = [
        (model.name, *(_cell([group for *_, group in by_set], model.name, *place) for place in _places()))
        for model in MODELS
    ]
    each = [
        (f"{set_}, draw {seed}", *(_cell([group], model.name, "shift", "ece") for model in MODELS))
        for set_, seed, group in by_set
    ]
    note = (
        "Calibration error, NLL of correctness, AUROC of spotting errors; mean over the test sets of each "
        f"of {len(by_set)} development sets, then over these. Exact inference."
    )
    tables = (
        Table("prior", "A prior on lengthscales under shift", (note,), ("Model", *heads), tuple(whole)),
        Table("sets", "ECE under shift, set by set", (), ("Set", *(m.name for m in MODELS)), tuple(each)),
    )
    return "\n".join(table.markdown() for table in tables)


def _places() -> list[tuple[str, str]]:
    return [(kind, score) for kind in ("in", "shift") for score in SCORES]


def _cell(groups: Sequence[Sequence[Record]], model: str, kind: str, score: str) -> str:
    """Mean over test sets, then over data sets; of those on which every model was scored."""
    means = []
    for group in groups:
        values = [r[score] for r in group if (r["step"], r["kind"]) == (model, kind)]
        values = [v for v in values if v == v]
        if values:
            means.append(statistics.fmean(values))
    return f"{statistics.fmean(means):.3f}" if means else "-"


def main(arguments: Sequence[str] | None = None) -> None:
    """Score sets, or keep what was scored."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, help="features of the shift suite")
    parser.add_argument("--sets", nargs="+", default=[])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, required=True, help="lines that are written and continued")
    parser.add_argument("--keep", action="store_true", help="put the lines into the archive")
    chosen = parser.parse_args(arguments)
    records = score_sets(MODELS, chosen.cache, chosen.sets, chosen.seeds, chosen.out)
    if chosen.keep:
        keep(_complete(records))


def _complete(records: Sequence[Record]) -> list[Record]:
    """Records of the sets on which every model was scored."""
    done: dict[tuple[str, int], set[str]] = {}
    for r in records:
        done.setdefault((r["set"], r["seed"]), set()).add(r["step"])
    return [r for r in records if len(done[r["set"], r["seed"]]) == len(MODELS)]


if __name__ == "__main__":
    main()
