"""From the paper's model to layer evidence in six steps, each measured on the same sets.

``python -m salgp_study.steps --cache DIR --sets digits --out FILE`` reads the features that the
shift suite keeps in ``DIR`` (`salgp_study.suite`), writes a line per step and test set into ``FILE``, where a
stopped run continues, and prints one row per step: in domain, and the mean over the shifted test sets.
``--keep`` puts the lines into the archive, which the table of the documents is made from.

Step 0 is `salgp.SALGP.paper`, steps 1 and 2 are Gaussian processes on evidence. Steps 3 to 5 are the same
linear model with signed weights, which is a Gaussian process only without the signs. The default mixes two
such models, and weighs them by a window of unlabelled samples: an analogy to a further level of the
hierarchy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from salgp.calibrators import get
from salgp.calibrators.evidence.fitting import fit_in_domain, training_rows
from salgp.calibrators.gp.salgp import SALGP
from salgp.features import Features
from salgp.prediction import Prediction
from salgp_study.evidence_gp import EvidenceGP, learn_columns
from salgp_study.store import write_archive
from salgp_study.suite.cache import CachedCase, case_folder, read_case
from salgp_study.suite.methods import predict_windows, takes_context
from salgp_study.suite.scoring import scores
from salgp_study.table import Table, mean_std

__all__ = ["ARCHIVE", "STEPS", "Step", "main", "measure", "score_sets", "steps_table"]

ARCHIVE = Path("study/records/steps.jsonl.gz")
WINDOW = 50
"""Unlabelled samples that are predicted together."""
SCORES = ("ece", "nll", "auroc")
"""Calibration error, negative log-likelihood of correctness, area under the curve of spotting errors."""


class MonotoneEvidence:
    """Log-odds that are linear and monotone in the evidence, with or without offsets of the classes.

    Args:
        offsets: has each predicted class an offset, or have all one constant?
    """

    def __init__(self, offsets: bool) -> None:
        self.offsets = offsets

    def fit(
        self, features: Features, labels: Tensor, reference: tuple[Features, Tensor] | None = None
    ) -> Self:
        """Fit on originals and, where there are any, augmented samples."""
        self.columns, samples = learn_columns(features, labels, reference)
        rows = training_rows(features, samples, features.correct(labels).double())
        self.model = fit_in_domain(rows, features.n_classes, True, offsets=self.offsets)
        return self

    def predict(self, features: Features) -> Prediction:
        """The probability of being correct."""
        log_odds = self.model.log_odds(self.columns(features), features.label)
        return Prediction.from_confidence(features, torch.sigmoid(log_odds))


@dataclass(frozen=True)
class Step:
    """One model on the way.

    Args:
        name: what it is.
        change: what was changed.
        build: makes it.
        augmented: is it fitted on augmented samples too?
        window: unlabelled samples it may look at together.
    """

    name: str
    change: str
    build: Callable[[], Any]
    augmented: bool = False
    window: int = 0


STEPS: tuple[Step, ...] = (
    Step("temperature", "for comparison", lambda: get("temperature")),
    Step("0 SAL-GP (paper), ML", "", lambda: SALGP.paper("ml")),
    Step("  the same, scaled prior", "lengthscales", lambda: SALGP.paper("ml", prior="dimension-scaled")),
    Step("  sum, scaled prior", "one row per sample", lambda: SALGP("sum", prior="dimension-scaled")),
    Step(
        "1 evidence",
        "raw features -> agreement and novelty",
        lambda: EvidenceGP(n_inducing=128),
    ),
    Step(
        "2 linear",
        "stationary -> linear kernels",
        lambda: EvidenceGP(kernel="linear", n_inducing=128),
    ),
    Step(
        "3 log-odds, monotone",
        "residual -> log-odds, weights >= 0",
        lambda: MonotoneEvidence(False),
    ),
    Step("4 classes", "one constant -> a group per predicted class", lambda: MonotoneEvidence(True)),
    Step(
        "5 augmented",
        "in-domain data -> augmented samples too",
        lambda: MonotoneEvidence(True),
        augmented=True,
    ),
    Step(
        "default, one sample",
        "two experts, mixed by a shift weight",
        lambda: get("layer-evidence"),
        augmented=True,
    ),
    Step(
        "6 window",
        "one sample -> a window of 50 unlabelled ones",
        lambda: get("layer-evidence"),
        augmented=True,
        window=WINDOW,
    ),
)
"""The way from the paper's model to the default."""


def measure(case: CachedCase, step: Step) -> Iterator[dict[str, Any]]:
    """Fit one step on one case and score it on every test set."""
    features, labels = case.calibration
    if not step.augmented and features.families is not None:
        first = features.families == 0
        features, labels = Features(features.logits[first], _rows(features.layers, first)), labels[first]
    method = step.build()
    if step.window and not takes_context(method):
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # ends on bounds and the like; the scores say how well it went
        method.fit(features, labels, case.reference)
    for test in case.tests:
        if test.kind in ("in", "shift"):
            prediction = predict_windows(method, test.features, step.window)
            found = scores(prediction, test.features, test.labels)
            yield {"set": case.name, "seed": case.seed, "step": step.name, "kind": test.kind, **found}


def score_sets(
    steps: Sequence[Step], cache: Path, sets: Sequence[str], seeds: Sequence[int], out: Path
) -> list[dict[str, Any]]:
    """Measure steps on sets, a line per test set; what has lines in ``out`` is not measured again.

    Returns:
        All that ``out`` holds.
    """
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    records = [json.loads(line) for line in lines]
    done = {(r["set"], r["seed"], r["step"]) for r in records}
    for name, seed in product(sets, seeds):
        missing = [step for step in steps if (name, seed, step.name) not in done]
        case = read_case(case_folder(cache, name, seed)) if missing else None
        for step in missing:
            assert case is not None
            found = list(measure(case, step))
            with out.open("a", encoding="utf-8") as file:
                file.write("".join(json.dumps(record) + "\n" for record in found))
            records += found
            print(f"{name} {seed} {step.name}", file=sys.stderr, flush=True)
    return records


def steps_table(records: Sequence[Mapping[str, Any]]) -> Table:
    """One row per step: mean over sets and seeds, in domain and under shift."""
    rows = []
    for step in STEPS:
        mine = [r for r in records if r["step"] == step.name]
        if mine:
            cells = [_cell(mine, kind, score) for kind in ("in", "shift") for score in SCORES]
            rows.append((step.name, step.change, *cells))
    heads = [f"{score.upper()} {kind}" for kind in ("in domain", "under shift") for score in SCORES]
    sets = ", ".join(dict.fromkeys(r["set"] for r in records))
    seeds = ", ".join(str(s) for s in dict.fromkeys(r["seed"] for r in records))
    note = f"Sets {sets}; seeds {seeds}; mean over the test sets of each case, then over cases."
    return Table(
        "steps", "From the paper's model to layer evidence", (note,), ("Step", "Change", *heads), tuple(rows)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the steps on the sets given, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True, help="features of the shift suite")
    parser.add_argument("--sets", nargs="+", required=True)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--out", type=Path, required=True, help="lines that are written and continued")
    parser.add_argument("--keep", action="store_true", help="put the lines into the archive")
    chosen = parser.parse_args(arguments)
    records = score_sets(STEPS, chosen.cache, chosen.sets, chosen.seeds, chosen.out)
    if chosen.keep:
        write_archive(records, ARCHIVE)
    print(steps_table(records).markdown())


def _rows(layers: Mapping[str, Tensor], rows: Tensor) -> dict[str, Tensor]:
    return {name: x[rows] for name, x in layers.items()}


def _cell(records: Sequence[Mapping[str, Any]], kind: str, score: str) -> str:
    cases = dict.fromkeys((r["set"], r["seed"]) for r in records)
    means = []
    for case in cases:
        values = [r[score] for r in records if (r["set"], r["seed"]) == case and r["kind"] == kind]
        values = [v for v in values if v == v]
        if values:
            means.append(statistics.fmean(values))
    return mean_std([statistics.fmean(means)] if means else [], 3)


if __name__ == "__main__":
    main()
