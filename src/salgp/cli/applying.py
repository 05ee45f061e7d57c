"""The commands that use a fitted calibrator on features: apply, evaluate, explain."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.datasets import note_shared
from salgp.cli.fitting import samples_of
from salgp.cli.options import AnyNetwork, Cal, Feats, FieldLabels, Force, InContext, Out
from salgp.cli.predictions import write_prediction
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.tables import explanation_table, score_table
from salgp.cli.targets import check_inputs, check_target

if TYPE_CHECKING:
    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = ["context_of", "predicted", "register", "uncalibrated"]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    command(app, "apply", "salgp apply cal new.safetensors -o predictions.csv")(apply)
    command(app, "evaluate", "salgp evaluate cal test.safetensors")(evaluate)
    command(app, "explain", "salgp explain cal test.safetensors --top 5")(explain)


def apply(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    out: Out,
    context: InContext = None,
    field_labels: FieldLabels = None,
    any_network: AnyNetwork = False,
    force: Force = False,
) -> None:
    """Write calibrated confidences, with error bars, for every sample (.csv, .parquet or .safetensors)."""
    if out.suffix not in (".csv", ".parquet", ".safetensors"):
        raise UsageError(f"--out {out}: expected a name that ends in .csv, .parquet or .safetensors")
    check_inputs(calibrator, features, field_labels)
    kind = "prediction" if out.suffix == ".safetensors" else None
    check_target(out, force, features, calibrator, field_labels, kind=kind)
    together = context_of(context)
    loaded, prediction = predicted(
        calibrator, features, any_network, shell, together, field_labels, copies=True
    )
    note_copies(shell, loaded)
    write_prediction(out, prediction, loaded.features.confidence, loaded.classes)
    before, after = float(loaded.features.confidence.mean()), float(prediction.confidence.mean())
    shell.finish(
        {"out": str(out), "n": len(prediction), "mean_confidence": after, "network_mean_confidence": before},
        f"{len(prediction):,} predictions in {out}; mean confidence {before:.3f} → {after:.3f}",
    )


def evaluate(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    context: InContext = None,
    field_labels: FieldLabels = None,
    any_network: AnyNetwork = False,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = 15,
) -> None:
    """Score the network's own confidence and the calibrated one on labelled features."""
    check_inputs(calibrator, features, field_labels)
    from salgp.metrics import compare as compare_predictions

    together = context_of(context)
    loaded, prediction = predicted(
        calibrator, features, any_network, shell, together, field_labels, labelled=True
    )
    labels = files.labels_of(loaded)
    name = files.read_calibrator(calibrator).name
    comparison = compare_predictions(
        {"uncalibrated": uncalibrated(loaded.features), name: prediction}, labels, bins
    )
    shell.finish(comparison.as_dict(), score_table(comparison, f"{features.name}: {len(labels):,} samples"))


def explain(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    sample: Annotated[
        list[int] | None, typer.Option(help="Row to explain; may be repeated. Default: the most corrected.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="How many of the most corrected samples.")] = 10,
    any_network: AnyNetwork = False,
) -> None:
    """Say, for single samples, how the confidence changed and which layers caused it."""
    check_inputs(calibrator, features)
    loaded, prediction = predicted(calibrator, features, any_network, shell, copies=True)
    note_copies(shell, loaded)
    change = prediction.confidence.cpu() - loaded.features.confidence
    rows = list(sample) if sample else change.abs().topk(min(top, len(change))).indices.tolist()
    wrong = [row for row in rows if not 0 <= row < len(change)]
    if wrong:
        raise UsageError(f"--sample {wrong[0]}: the rows of {features} are 0..{len(change) - 1}")
    explained = [_explanation(loaded.features, prediction, row, loaded.classes) for row in rows]
    shell.finish({"samples": explained}, explanation_table(explained))


def uncalibrated(features: Features) -> Prediction:
    """The network's own confidence as a prediction."""
    from salgp.prediction import Prediction

    return Prediction.from_probs(features, features.probs)


def predicted(
    calibrator: Path,
    features: Path,
    any_network: bool,
    shell: Shell,
    context: int | str | None = None,
    field_labels: Path | None = None,
    *,
    labelled: bool = False,
    copies: bool = False,
) -> tuple[files.FeatureFile, Prediction]:
    """Features and what a calibrator says of them.

    Args:
        calibrator: its folder.
        features: file.
        any_network: accept features of another network.
        shell: to speak.
        context: samples that were met together.
        field_labels: file of labelled samples from the same place, to correct the confidences by.
        labelled: refuse features without labels.
        copies: predict perturbed copies, too, not only the samples they were made of.
    """
    fitted = files.read_calibrator(calibrator)
    loaded = files.read_labelled(features)[0] if labelled else files.read_features(features)
    files.check_network(calibrator, loaded, any_network)
    loaded = loaded if copies else samples_of(shell, loaded)
    with shell.progress(f"predicting {len(loaded.features):,} samples"):
        prediction = fitted.predict(loaded.features, context)
    if field_labels is None:
        return loaded, prediction
    known = samples_of(shell, files.read_labelled(field_labels)[0])
    files.check_network(calibrator, known, any_network)
    if labelled:
        note_shared(shell, (features.name, loaded.features), {"--field-labels": known.features})
    around = None if context is None else fitted.context(loaded.features)
    return loaded, _corrected(shell, prediction, fitted.predict(known.features, around), known)


def _corrected(
    shell: Shell, prediction: Prediction, judged: Prediction, known: files.FeatureFile
) -> Prediction:
    """A prediction corrected by samples whose labels are known, and which were judged alike."""
    from salgp.estimate import learn_correction

    correction = learn_correction(judged, files.labels_of(known))
    shell.say(f"{known.path.name}: {correction}")
    return correction(prediction)


def note_copies(shell: Shell, loaded: files.FeatureFile) -> None:
    """Say that some rows are no samples of their own."""
    from salgp.calibrators.copies import originals

    n, rows = len(loaded.features), len(originals(loaded.features)[0])
    if n > rows:
        shell.say(
            f"note: {loaded.path.name} holds {n - rows:,} perturbed copies of its {rows:,} samples; every "
            f"row is answered, in the order of the file"
        )


def context_of(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--context {text}: expected 'all' or the number of samples in a window")
    return int(text)


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
