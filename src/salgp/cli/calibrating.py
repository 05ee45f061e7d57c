"""The commands around one calibrator: fit, apply, evaluate, explain."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.shell import Shell, UsageError, command, did_you_mean
from salgp.cli.tables import explanation_table, score_table
from salgp.methods import CLASSES, entry_points

if TYPE_CHECKING:
    from torch import Tensor

    from salgp.calibrators import Calibrator
    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = [
    "AnyNetwork",
    "Cal",
    "Feats",
    "Force",
    "Method",
    "Out",
    "Reference",
    "Seed",
    "check_method",
    "fitting_rows",
    "known_methods",
    "make_calibrator",
    "notes_on",
    "origin_of",
    "predicted",
    "read_reference",
    "register",
    "uncalibrated",
]


def known_methods() -> list[str]:
    """Names of all calibrators, for completion and messages."""
    return [*CLASSES, *entry_points()]


Feats = Annotated[
    Path,
    typer.Argument(
        metavar="FEATURES",
        help="Features: .safetensors, a folder of Parquet shards, or class scores (.npz, .csv, .parquet).",
    ),
]
Cal = Annotated[Path, typer.Argument(metavar="CAL", help="Folder of a fitted calibrator.")]
Out = Annotated[Path, typer.Option("--out", "-o", help="Where the result is written.")]
Force = Annotated[bool, typer.Option("--force", help="Replace an existing result.")]
AnyNetwork = Annotated[
    bool, typer.Option("--any-network", help="Accept features known to come from another network.")
]
InContext = Annotated[
    str | None,
    typer.Option(
        "--context",
        metavar="all|N",
        help="Samples met together: 'all', or windows of N consecutive ones. By default each by itself.",
    ),
]
Reference = Annotated[
    Path | None,
    typer.Option(
        "--reference", help="Features of the network's training data, for methods that compare against it."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything random.")]
Method = Annotated[
    str | None,
    typer.Option(
        "--method",
        "-m",
        autocompletion=known_methods,
        help="Calibrator; `salgp info` lists them. auto, the default: layer evidence where there are layers, "
        "else temperature scaling.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands of this file to ``app``."""
    command(app, "fit", "salgp fit calibration.safetensors -o cal", "salgp fit logits.npz -o cal")(fit)
    command(app, "apply", "salgp apply cal new.safetensors -o predictions.csv")(apply)
    command(app, "evaluate", "salgp evaluate cal test.safetensors")(evaluate)
    command(app, "explain", "salgp explain cal test.safetensors --top 5")(explain)


def fit(
    shell: Shell,
    features: Feats,
    out: Out,
    method: Method = None,
    reference: Reference = None,
    layers: Annotated[str | None, typer.Option(help="Use only these layers, separated by commas.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="An argument of the method; may be repeated."),
    ] = None,
    force: Force = False,
) -> None:
    """Fit a calibrator on labelled features, or on any framework's logits or probabilities, and save it.

    Class scores come as .npz, .csv or .parquet: arrays 'logits' or 'probs', 'labels', and embeddings as
    'layers.NAME'; in a table one column per class, e.g. probs.cat, probs.dog, label.
    """
    files.check_inputs(features, reference)
    files.check_target(out, force, features)
    check_method(method)
    files.check_folder(out)
    if layers is None and files.is_large(features, reference):
        return fit_large(shell, features, out, make_calibrator(method, setting or [], True), reference, force)
    loaded, labels = files.read_labelled(features)
    chosen = files.split_names(layers)
    data = loaded.features if chosen is None else loaded.features.select(chosen)
    calibrator = make_calibrator(method, setting or [], bool(data.layers))
    known = read_reference(reference, data)
    data, labels = fitting_rows(calibrator, data, labels)
    for note in notes_on(calibrator, loaded, data, known is not None):
        shell.say(f"note: {note}")
    with shell.progress(f"fitting {calibrator.name} on {len(data)} samples"):
        calibrator.fit(data, labels, known)
    files.save_calibrator(out, calibrator, origin_of(loaded), force, loaded.metadata.get("module"))
    shell.finish(
        {
            "calibrator": str(out),
            "method": calibrator.name,
            "n": len(data),
            "layers": list(calibrator.layer_widths_),
        },
        f"fitted {calibrator.name} on {len(data):,} samples; saved in "
        f"{out}\nnext: salgp evaluate {out} TEST.safetensors",
    )
    return None


def fit_large(
    shell: Shell, features: Path, out: Path, calibrator: Calibrator, reference: Path | None, force: bool
) -> None:
    """Fit out of core to a folder of shards; called again after a kill, it goes on where it stopped."""
    import shutil

    from salgp.store import fit_store

    loaded, n = files.first_rows(features)
    work = out.with_name(f"{out.name}.unfinished")
    with shell.progress(f"fitting {calibrator.name} on {n:,} samples, out of core"):
        fit_store(calibrator, features, reference=reference, work=work)
    files.save_calibrator(out, calibrator, origin_of(loaded) | {"n": n}, force, loaded.metadata.get("module"))
    shutil.rmtree(work)
    shell.finish(
        {
            "calibrator": str(out),
            "method": calibrator.name,
            "n": n,
            "layers": list(calibrator.layer_widths_),
        },
        f"fitted {calibrator.name} on {n:,} samples, out of core; saved in {out}",
    )


def apply(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    out: Out,
    context: InContext = None,
    any_network: AnyNetwork = False,
    force: Force = False,
) -> None:
    """Write calibrated confidences, with error bars, for every sample (.csv, .parquet or .safetensors)."""
    if out.suffix not in (".csv", ".parquet", ".safetensors"):
        raise UsageError(f"--out {out}: expected a name that ends in .csv, .parquet or .safetensors")
    files.check_inputs(calibrator, features)
    files.check_target(out, force, features, calibrator)
    together = _context(context)
    loaded, prediction = predicted(calibrator, features, any_network, shell, together)
    files.write_prediction(out, prediction, loaded.features.confidence)
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
    any_network: AnyNetwork = False,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration errors.")] = 15,
) -> None:
    """Score the network's own confidence and the calibrated one on labelled features."""
    files.check_inputs(calibrator, features)
    from salgp.metrics import compare as compare_predictions

    _, labels = files.read_labelled(features)
    loaded, prediction = predicted(calibrator, features, any_network, shell, _context(context))
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
    files.check_inputs(calibrator, features)
    loaded, prediction = predicted(calibrator, features, any_network, shell)
    change = prediction.confidence.cpu() - loaded.features.confidence
    rows = list(sample) if sample else change.abs().topk(min(top, len(change))).indices.tolist()
    wrong = [row for row in rows if not 0 <= row < len(change)]
    if wrong:
        raise UsageError(f"--sample {wrong[0]}: the rows of {features} are 0..{len(change) - 1}")
    explained = [_explanation(loaded.features, prediction, row, loaded.classes) for row in rows]
    shell.finish({"samples": explained}, explanation_table(explained))


def check_method(*methods: str | None) -> None:
    """Refuse names that no calibrator has, and suggest the nearest."""
    known = known_methods()
    for name in methods:
        if name is not None and name not in (*known, "auto"):
            raise UsageError(
                f"no calibrator called {name!r}; {did_you_mean(name, known)}known: {', '.join(known)}"
            )


def notes_on(calibrator: Calibrator, loaded: files.Loaded, data: Features, reference: bool) -> list[str]:
    """What the user should know about the data a calibrator is fitted on."""
    notes = []
    if loaded.metadata.get("unused"):
        notes.append(f"columns not used: {loaded.metadata['unused']}")
    if calibrator.uses_copies and data.groups is None:
        notes.append(
            f"no perturbed copies in {loaded.path.name}: {calibrator.name} has rehearsed no shift; "
            f"salgp extract --perturb makes some"
        )
    if calibrator.name == "layer-evidence" and not reference:
        notes.append(
            "no --reference given: the calibration samples are compared with each other; features of the "
            "training data serve better"
        )
    return notes


def make_calibrator(method: str | None, settings: Sequence[str], has_layers: bool = True) -> Calibrator:
    """A calibrator by name (None or auto: what suits the data) with ``NAME=VALUE`` settings; values are JSON
    or else plain text.
    """
    from salgp.outputs import method_for

    calibrator = method_for(method, has_layers)
    known = calibrator.get_params(deep=False)
    arguments = dict(_setting(text) for text in settings)
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise UsageError(
            f"--set {unknown[0]}: {calibrator.name} has no such setting; {did_you_mean(unknown[0], known)}"
            f"it has {', '.join(known) or 'none'}"
        )
    return calibrator.set_params(**arguments)


def fitting_rows(calibrator: Calibrator, features: Features, labels: Tensor) -> tuple[Features, Tensor]:
    """What a method learns from: perturbed copies only where it knows what they are, else the original
    samples.
    """
    from salgp.calibrators.copies import originals

    if calibrator.uses_copies or features.groups is None:
        return features, labels
    rows = originals(features)[0]
    plain = features[rows]
    return type(features)(plain.logits, plain.layers), labels[rows]


def uncalibrated(features: Features) -> Prediction:
    """The network's own confidence as a prediction."""
    from salgp.prediction import Prediction

    return Prediction.from_probs(features, features.probs)


def origin_of(loaded: files.Loaded) -> dict[str, Any]:
    """What a calibrator remembers of the features it was fitted on."""
    import salgp

    kept = {
        "features": loaded.path.name,
        "n": len(loaded.features),
        "salgp": salgp.__version__,
        "network": loaded.metadata.get("network"),
    }
    return kept | ({} if loaded.classes is None else {"classes": loaded.classes})


def predicted(
    calibrator: Path, features: Path, any_network: bool, shell: Shell, context: int | str | None = None
) -> tuple[files.Loaded, Prediction]:
    fitted = files.read_calibrator(calibrator)
    loaded = files.read_features(features)
    files.check_network(calibrator, loaded, any_network)
    with shell.progress(f"predicting {len(loaded.features):,} samples"):
        return loaded, fitted.predict(loaded.features, context)


def _context(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"--context {text}: expected 'all' or the number of samples in a window")
    return int(text)


def read_reference(path: Path | None, data: Features) -> tuple[Features, Tensor] | None:
    if path is None:
        return None
    loaded, labels = files.read_labelled(path)
    return loaded.features.select(data.layer_names), labels


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text}: expected NAME=VALUE")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


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
