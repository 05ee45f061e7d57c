"""The commands that use a fitted calibrator on features: apply, evaluate, explain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from rich.table import Table
from typer import Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_inputs, check_suffix, check_target
from salgp.cli.console import Console, UsageError, score_table
from salgp.cli.inputs import PredictionOptions

KINDS = {".csv": "CSV prediction", ".parquet": "Parquet prediction"}
SHOWN = 10
"""Samples that are explained unless some are named."""
SetsFile = Annotated[Path | None, Option(help="Sets of `salgp sets`: also say what remains possible.")]
Rows = Annotated[list[int] | None, Option(help="Row to explain; repeatable. Default: most corrected.")]


def apply(
    console: Console,
    given: PredictionOptions,
    out: options.Out,
    rule: options.RuleFile = None,
    sets: SetsFile = None,
    force: options.Force = False,
) -> None:
    """Write calibrated confidences, with error bars, for every sample (.csv or .parquet).

    Rows are in the order of the samples. With --rule a column says act or ask, with --sets one per class says
    whether it remains possible.

    Example:
        salgp apply cal new.safetensors -o predictions.csv
        salgp apply cal new.csv --rule rule.json -o predictions.csv
    """
    check_suffix(out, *KINDS)
    check_inputs(rule, sets)
    check_target(out, KINDS[out.suffix], force, *given.inputs, rule, sets)
    _, loaded, prediction = given.predict(console, augmented=True)
    act = None if rule is None else salgp.decide.Rule.load(rule)(prediction)
    possible = None if sets is None else salgp.sets.PredictionSets.load(sets)(prediction)
    before = loaded.features.confidence
    salgp.files.write_prediction(out, prediction, before, loaded.classes, act, possible)
    told = {
        "acted_on": None if act is None else int(act.sum()),
        "mean_set_size": None if possible is None else float(possible.sum(1).double().mean()),
        "out": str(out),
        "n": len(prediction),
        "mean_confidence": float(prediction.confidence.mean()),
        "network_mean_confidence": float(before.mean()),
    }
    console.finish(told, _in_words(told))


def _in_words(told: Mapping[str, Any]) -> str:
    means = f"{told['network_mean_confidence']:.3f} → {told['mean_confidence']:.3f}"
    shown = f"{told['n']:,} predictions in {told['out']}; mean confidence {means}"
    if told["acted_on"] is not None:
        shown += f"\nact on {told['acted_on']:,}, ask about the others"
    if told["mean_set_size"] is not None:
        shown += f"\n{told['mean_set_size']:.2f} classes remain possible on average"
    return shown


def evaluate(console: Console, given: PredictionOptions) -> None:
    """Score the network's own confidence and the calibrated one on labelled features.

    Example:
        salgp evaluate cal test.safetensors
    """
    fitted, loaded, prediction = given.predict(console, labelled=True)
    own = salgp.Prediction.from_probs(loaded.features, loaded.features.probs)
    methods = {"uncalibrated": own, fitted.calibrator.name: prediction}
    comparison = salgp.metrics.compare(methods, loaded.known_labels)
    title = f"{given.features.name}: {len(prediction):,} samples"
    console.finish(comparison.as_dict(), score_table(comparison, title))


def explain(console: Console, given: PredictionOptions, sample: Rows = None) -> None:
    """Say, for single samples, how the confidence changed and which layers caused it.

    Example:
        salgp explain cal test.safetensors --sample 5
    """
    _, loaded, prediction = given.predict(console, augmented=True)
    from salgp.explanation import explain_sample

    change = prediction.confidence.cpu() - loaded.features.confidence
    rows = sample or change.abs().topk(min(SHOWN, len(change))).indices.tolist()
    _check_rows(rows, len(change), given.features)
    table = Table("row", "predicted", "network", "calibrated", "points, which add up to the change")
    told = []
    for row in rows:
        found = explain_sample(loaded.features[[row]], prediction[row : row + 1])
        label, classes = found.label, loaded.classes or ()
        name = classes[label] if label < len(classes) else str(label)
        before = f"{found.network_confidence:.2f}"
        table.add_row(str(row), name, before, found.calibrated, found.reasons or "-")
        told.append({"row": row, "class": name} | asdict(found))
    console.finish({"samples": told}, table)


def _check_rows(rows: list[int], n: int, path: Path) -> None:
    for row in rows:
        if not 0 <= row < n:
            raise UsageError(f"--sample {row}: the rows of {path} are 0..{n - 1}")
