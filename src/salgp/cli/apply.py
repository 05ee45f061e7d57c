"""The commands that use a fitted calibrator on features: apply, evaluate, explain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.predictions import context_of, predicted, uncalibrated, write_prediction
from salgp.cli.preflight import check_inputs, check_suffix, check_target
from salgp.cli.tables import explanation_table, score_table

if TYPE_CHECKING:
    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = ["register"]

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
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    out: options.Out,
    rule: options.RuleFile = None,
    sets: SetsFile = None,
    probs: options.Probs = None,
    context: options.Context = None,
    field_labels: options.FieldLabels = None,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Write calibrated confidences, with error bars, for every sample (.csv, .parquet or .safetensors).

    With --rule a column says act or ask, with --sets one per class says whether it remains possible.
    """
    check_suffix("--out", out, ".csv", ".parquet", ".safetensors")
    check_inputs(calibrator, features, field_labels, rule, sets)
    kind = "prediction" if out.suffix == ".safetensors" else None
    check_target(out, force, features, calibrator, field_labels, rule, sets, kind=kind)
    how: Any = {"probs": probs, "context": context_of(context), "field_labels": field_labels}
    loaded, prediction = predicted(console, calibrator, features, any_network, **how, augmented=True)
    _note_augmented(console, loaded)
    from salgp.decide import Rule
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
    lines = [
        f"{told['n']:,} predictions in {out}; mean confidence {told['network_mean_confidence']:.3f} → "
        f"{told['mean_confidence']:.3f}"
    ]
    lines += [] if act is None else [f"act on {told['acted_on']:,}, ask about the others"]
    lines += [] if possible is None else [f"{told['mean_set_size']:.2f} classes remain possible on average"]
    console.finish(told, "\n".join(lines))


def evaluate(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    probs: options.Probs = None,
    context: options.Context = None,
    field_labels: options.FieldLabels = None,
    any_network: options.AnyNetwork = False,
) -> None:
    """Score the network's own confidence and the calibrated one on labelled features."""
    check_inputs(calibrator, features, field_labels)
    how: Any = {"probs": probs, "context": context_of(context), "field_labels": field_labels}
    loaded, prediction = predicted(console, calibrator, features, any_network, **how, labelled=True)
    from salgp.metrics import compare

    labels, name = files.labels_of(loaded), files.read_calibrator(calibrator).name
    comparison = compare({"uncalibrated": uncalibrated(loaded.features), name: prediction}, labels)
    console.finish(comparison.as_dict(), score_table(comparison, f"{features.name}: {len(labels):,} samples"))


def explain(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    sample: Rows = None,
    probs: options.Probs = None,
    any_network: options.AnyNetwork = False,
) -> None:
    """Say, for single samples, how the confidence changed and which layers caused it."""
    check_inputs(calibrator, features)
    loaded, prediction = predicted(console, calibrator, features, any_network, probs=probs, augmented=True)
    _note_augmented(console, loaded)
    change = prediction.confidence.cpu() - loaded.features.confidence
    rows = list(sample) if sample else change.abs().topk(min(SHOWN, len(change))).indices.tolist()
    wrong = [row for row in rows if not 0 <= row < len(change)]
    if wrong:
        raise UsageError(f"--sample {wrong[0]}: the rows of {features} are 0..{len(change) - 1}")
    explained = [_explanation(loaded.features, prediction, row, loaded.classes) for row in rows]
    console.finish({"samples": explained}, explanation_table(explained))


def _note_augmented(console: Console, loaded: files.FeatureFile) -> None:
    """Say that some rows are no samples of their own."""
    from salgp.calibrators.rows import originals

    n, rows = len(loaded.features), len(originals(loaded.features)[0])
    if n > rows:
        console.say(
            f"note: {loaded.path.name} holds {n - rows:,} augmented samples beside its {rows:,} samples; "
            f"every row is answered, in the order of the file"
        )


def _explanation(
    features: Features, prediction: Prediction, row: int, classes: Sequence[str] | None
) -> dict[str, Any]:
    from salgp.explanation import term_points

    label, points = int(prediction.label[row]), {}
    if prediction.layers is not None:
        names, values = term_points(features[[row]], prediction[row : row + 1])
        points = dict(zip(names, values[0].tolist(), strict=True))
    return {
        "row": row,
        "label": label,
        "class": classes[label] if classes and label < len(classes) else str(label),
        "network_confidence": float(features.confidence[row]),
        "confidence": float(prediction.confidence[row]),
        "lower": None if prediction.lower is None else float(prediction.lower[row]),
        "upper": None if prediction.upper is None else float(prediction.upper[row]),
        "points": dict(sorted(points.items(), key=lambda item: -abs(item[1]))),
    }
