"""The commands that use a fitted calibrator on features: apply, evaluate, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.predictions import Predicted, PredictionOptions, uncalibrated
from salgp.cli.preflight import check_inputs, check_suffix, check_target
from salgp.cli.tables import explanation_table, score_table

__all__ = ["register"]

KINDS = {".csv": "CSV prediction", ".parquet": "Parquet prediction", ".safetensors": "prediction"}
SHOWN = 10
"""Samples that are explained unless some are named."""
SetsFile = Annotated[
    Path | None,
    typer.Option("--sets", help="Sets of `salgp sets`: also say which classes remain possible."),
]
Rows = Annotated[
    list[int] | None,
    typer.Option("--sample", help="Row to explain; may be repeated. Default: the most corrected ones."),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    acting = "salgp apply cal new.csv --rule rule.json -o predictions.csv"
    command(app, "apply", "salgp apply cal new.safetensors -o predictions.csv", acting)(apply)
    command(app, "evaluate", "salgp evaluate cal test.safetensors")(evaluate)
    command(app, "explain", "salgp explain cal test.safetensors --sample 5")(explain)


def apply(
    console: Console,
    given: PredictionOptions,
    out: options.Out,
    rule: options.RuleFile = None,
    sets: SetsFile = None,
    force: options.Force = False,
) -> None:
    """Write calibrated confidences, with error bars, for every sample (.csv, .parquet or .safetensors).

    Rows are in the order of the samples. With --rule a column says act or ask, with --sets one per class says whether it remains possible.
    """
    check_suffix(out, *KINDS)
    check_inputs(rule, sets)
    check_target(out, KINDS[out.suffix], force, *given.inputs, rule, sets)
    _, loaded, prediction = given.predict(console, augmented=True)
    from salgp.decide import Rule
    from salgp.files import write_prediction
    from salgp.sets import PredictionSets

    act = None if rule is None else Rule.load(rule)(prediction)
    possible = None if sets is None else PredictionSets.load(sets)(prediction)
    before = loaded.features.confidence
    write_prediction(out, prediction, before, loaded.classes, act, possible)
    told = {
        "out": str(out),
        "n": len(prediction),
        "mean_confidence": float(prediction.confidence.mean()),
        "network_mean_confidence": float(before.mean()),
        "acted_on": None if act is None else int(act.sum()),
        "mean_set_size": None if possible is None else float(possible.sum(1).double().mean()),
    }
    console.finish(told, _told(told))


def _told(told: dict[str, Any]) -> str:
    before, after = told["network_mean_confidence"], told["mean_confidence"]
    text = f"{told['n']:,} predictions in {told['out']}; mean confidence {before:.3f} → {after:.3f}"
    if told["acted_on"] is not None:
        text += f"\nact on {told['acted_on']:,}, ask about the others"
    if told["mean_set_size"] is not None:
        text += f"\n{told['mean_set_size']:.2f} classes remain possible on average"
    return text


def evaluate(console: Console, given: PredictionOptions) -> None:
    """Score the network's own confidence and the calibrated one on labelled features."""
    fitted, loaded, prediction = given.predict(console, labelled=True)
    from salgp.metrics import compare

    methods = {"uncalibrated": uncalibrated(loaded), fitted.calibrator.name: prediction}
    comparison = compare(methods, loaded.known_labels)
    title = f"{given.features.name}: {len(prediction):,} samples"
    console.finish(comparison.as_dict(), score_table(comparison, title))


def explain(console: Console, given: PredictionOptions, sample: Rows = None) -> None:
    """Say, for single samples, how the confidence changed and which layers caused it."""
    found = given.predict(console, augmented=True)
    change = found.prediction.confidence.cpu() - found.loaded.features.confidence
    n = len(change)
    wrong = [row for row in sample or () if not 0 <= row < n]
    if wrong:
        raise UsageError(f"--sample {wrong[0]}: the rows of {given.features} are 0..{n - 1}")
    rows = sample or change.abs().topk(min(SHOWN, n)).indices.tolist()
    explained = [_explanation(found, row) for row in rows]
    console.finish({"samples": explained}, explanation_table(explained))


def _explanation(found: Predicted, row: int) -> dict[str, Any]:
    from salgp.explanation import term_points

    one, prediction = found.loaded.features[[row]], found.prediction[row : row + 1]
    points: dict[str, float] = {}
    if prediction.layers is not None:
        names, values = term_points(one, prediction)
        points = dict(zip(names, values[0].tolist(), strict=True))
    label, classes = int(prediction.label[0]), found.loaded.classes
    return {
        "row": row,
        "label": label,
        "class": classes[label] if classes and label < len(classes) else str(label),
        "network_confidence": float(one.confidence[0]),
        "confidence": float(prediction.confidence[0]),
        "lower": None if prediction.lower is None else float(prediction.lower[0]),
        "upper": None if prediction.upper is None else float(prediction.upper[0]),
        "points": dict(sorted(points.items(), key=lambda item: -abs(item[1]))),
    }
