"""``salgp calibrate``: everything in one command, from a network and three data sets to a report.

It does what the single commands do one after another: extract, rehearse, fit, check, compare, report. The
folder it writes holds what each of them would have written, so that one can go on from there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from salgp.cli import files, options
from salgp.cli.applying import uncalibrated
from salgp.cli.datasets import note_shared, open_sets
from salgp.cli.fitting import check_method, fitting_rows, read_reference
from salgp.cli.given import (
    DataOptions,
    check_numbering,
    image_options,
    layer_names,
    metadata_of,
    network_of,
    note_guessing,
)
from salgp.cli.inputs import Inputs
from salgp.cli.pictures import Pictures
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.tables import score_table
from salgp.cli.targets import check_folder, check_inputs, check_no_other, check_target

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.calibrators import Calibrator
    from salgp.features import Features
    from salgp.metrics import Comparison
    from salgp.module import CalibratedClassifier
    from salgp.network.gathering import Gathered
    from salgp.network.reader import Reader
    from salgp.prediction import Prediction

__all__ = ["register"]

WRITTEN = ("calibration.safetensors", "train.safetensors", "test.safetensors", "report.html")
"""Files beside the calibrator."""

UNFINISHED = "unfinished.calibrate"
"""An empty file that stands in the folder while it is written: after a kill, the same call begins anew."""

RIVALS = "temperature"
"""Compared against unless others are named."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(
        app,
        "calibrate",
        "salgp calibrate net.py:make --weights w.pt --train train.npz --calibration cal.npz --test test.npz "
        "-o calibrated",
    )(calibrate)


def calibrate(
    shell: Shell,
    model: options.Model,
    calibration: options.CalibrationData,
    out: options.Folder,
    train: options.TrainingData = None,
    test: options.TestData = None,
    weights: options.Weights = None,
    method: options.Method = None,
    compare: options.Compared = RIVALS,
    layers: options.Layers = "auto",
    pooling: options.Pooling = "auto",
    output: options.Output = "logits",
    inputs: options.InputNames = None,
    prepare: options.Prepare = None,
    classes: options.Classes = None,
    scale: options.Scale = None,
    image_size: options.ImageSize = None,
    gray: options.Gray = False,
    image_mean: options.ImageMean = None,
    image_std: options.ImageStd = None,
    batch_size: options.BatchSize = 64,
    max_width: options.MaxWidth = None,
    device: options.Device = None,
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """Calibrate a network in one go: extract, rehearse shifts, fit, check, compare and report.

    The folder holds the calibrator, the features it was fitted and checked on, and report.html, so that
    every other command can go on from there. Without --test nothing is checked.
    """
    check_inputs(train, calibration, test, weights)
    rivals = files.split_names(compare) or []
    check_method(method, *rivals)
    _check_folder(out, force, *(path for path in (train, calibration, test) if path is not None))
    images = image_options(model, image_size, gray, image_mean, image_std)
    data = DataOptions(model, batch_size, inputs, classes, images, scale, prepare)
    sets = open_sets(data, {"calibration": calibration, "train": train, "test": test})
    from salgp.module import CalibratedClassifier
    from salgp.network.reader import Reader
    from salgp.outputs import method_for

    with _alone(out, force):
        network = network_of(shell, model, weights, device)
        calibrator = method_for(method, True)
        if calibrator.uses_reference and train is None:
            shell.say("note: no --train given; the calibration samples are compared with each other")
        taps = Reader(layer_names(layers), pooling, output, max_width, seed)
        read = _gathered(shell, network, sets, taps, calibrator)
        calibrator = _fitted(shell, calibrator, read, method not in (None, "auto"))
        classifier = CalibratedClassifier(network, calibrator, read.reader, read.rehearsal)
        _write(shell, classifier, read, sets, out)
        comparison = _checked(shell, classifier, sets["test"], out, rivals) if "test" in sets else None
        _finish(shell, classifier, out, sets, comparison)


@contextmanager
def _alone(out: Path, force: bool) -> Iterator[None]:
    """Be the only `salgp calibrate` that writes into the folder; one made for nothing is taken away again."""
    from salgp.storage import locked

    new = not out.exists()
    try:
        with locked(out):
            _check_folder(out, force)  # again: another process may have come and gone
            yield
    finally:
        if new and out.is_dir() and not any(out.iterdir()):
            out.rmdir()


def _check_folder(out: Path, force: bool, *inputs: Path) -> None:
    if out.is_file():
        raise UsageError(f"--out {out}: a file; give the name of a folder")
    check_no_other(out)
    killed = (out / UNFINISHED).is_file()
    force = force or killed
    check_target(out / "calibrator", force, *inputs)
    check_folder(out / "calibrator")
    for name in WRITTEN:
        check_target(out / name, force, *inputs, kind="report" if name == "report.html" else "features")
        if (out / name).exists() and not (out / "calibrator").exists() and not killed:
            raise FileExistsError(
                f"{out / name} is not of an earlier salgp calibrate; it is left alone: choose another folder"
            )


def _gathered(
    shell: Shell, network: nn.Module, sets: Mapping[str, Inputs], reader: Reader, calibrator: Calibrator
) -> Gathered:
    from salgp.network.gathering import gather

    check_numbering(network, *sets.values())
    if not calibrator.needs_layers:
        reader = replace(reader, layers=(), pooling="auto")
    copies = "auto" if calibrator.uses_copies else None
    rehearsing = ", and perturbed copies" if copies else ""
    n = sets["calibration"].n + (sets["train"].n if "train" in sets else 0)
    with shell.progress(f"reading the network over {n:,} samples{rehearsing}"):
        read = gather(
            network,
            sets["calibration"],
            reader,
            copies,
            reference=sets.get("train"),
            seed=reader.seed,
            progress=False,
            tokenizer=sets["calibration"].tokenizer,
            needs_layers=calibrator.needs_layers,
        )
    note_guessing(shell, read.features, read.labels)
    return read


def _fitted(shell: Shell, calibrator: Calibrator, read: Gathered, asked_for: bool) -> Calibrator:
    """The method, or what takes its place where no layers could be read, fitted."""
    from salgp.module import suited

    calibrator = suited(calibrator, read.features, asked_for)
    with shell.progress(f"fitting {calibrator.name}"):
        return calibrator.fit(read.features, read.labels, read.reference)


def _write(
    shell: Shell, classifier: CalibratedClassifier, read: Gathered, sets: Mapping[str, Inputs], out: Path
) -> None:
    """The calibrator, and the features of all data as `salgp extract` would write them."""
    import salgp
    from salgp.logits import check_finite
    from salgp.storage import write_whole

    names = sets["calibration"].classes
    metadata = metadata_of(classifier.model, classifier.taps, names)
    kept: dict[str, tuple[Features, Tensor | None]] = {"calibration": (read.features, read.labels)}
    if read.reference is not None:
        kept["train"] = read.reference
    if "test" in sets:
        kept["test"] = classifier.extract(sets["test"], progress=False)
        tested = kept["test"][0]
        note_shared(
            shell, ("--test", tested), {f"--{name}": kept[name][0] for name in kept if name != "test"}
        )
        check_finite(tested.logits, "--test: the class scores hold")
        classifier.calibrator.predict(tested)  # what it refuses is refused before a file is replaced
    write_whole(out / UNFINISHED, lambda part: None)
    for name, (features, labels) in kept.items():
        features.save(out / f"{name}.safetensors", labels, metadata)
    origin = {
        "features": "calibration.safetensors",
        "n": sets["calibration"].n,
        "salgp": salgp.__version__,
        "network": metadata["network"],
    }
    origin |= {} if names is None else {"classes": names}
    files.save_calibrator(out / "calibrator", classifier.calibrator, origin, True, metadata["module"])
    for name in WRITTEN:  # of an earlier call, which may have had other data
        if name.removesuffix(".safetensors") not in kept:
            (out / name).unlink(missing_ok=True)


def _checked(
    shell: Shell, classifier: CalibratedClassifier, data: Inputs, out: Path, rivals: list[str]
) -> Comparison:
    """Scores of all methods on the test data, and the report."""
    from salgp.calibrators import get
    from salgp.metrics import compare as compare_predictions

    features, labels = files.read_labelled(out / "calibration.safetensors")
    train = out / "train.safetensors" if (out / "train.safetensors").exists() else None
    known = read_reference(shell, train, features, features.features, True)
    loaded, truth = files.read_labelled(out / "test.safetensors")
    predictions = {"uncalibrated": uncalibrated(loaded.features)}
    with shell.progress("comparing and writing the report"):
        for name in (name for name in rivals if name != classifier.calibrator.name):
            rival = get(name)
            rival.fit(*fitting_rows(rival, features.features, labels), known)
            predictions[name] = rival.predict(loaded.features)
        predictions[classifier.calibrator.display_name] = classifier.calibrator.predict(loaded.features)
        _report(out, loaded, truth, predictions, data)
    return compare_predictions(predictions, truth)


def _report(
    out: Path,
    loaded: files.FeatureFile,
    labels: Tensor,
    predictions: Mapping[str, Prediction],
    data: Inputs,
) -> None:
    from salgp.report import build

    _, *others, method = predictions
    build(
        out / "report.html",
        loaded.features,
        labels,
        predictions[method],
        force=True,
        method=method,
        class_names=loaded.classes,
        images=_pictures(data),
        others={name: predictions[name] for name in others},
        settings={"calibrator": "calibrator", "features": "test.safetensors"},
    )


def _pictures(data: Inputs) -> Pictures | None:
    """The samples, where they are pictures: one input of shape ``(n, channels, height, width)``."""
    first = data.take(slice(0, 1))
    if not isinstance(first, tuple) or len(first) != 1 or first[0].ndim != 4:
        return None
    if first[0].shape[1] not in (1, 3):
        return None
    return Pictures(data)


def _finish(
    shell: Shell,
    classifier: CalibratedClassifier,
    out: Path,
    sets: Mapping[str, Inputs],
    comparison: Comparison | None,
) -> None:
    (out / UNFINISHED).unlink()
    method, n = classifier.calibrator.display_name, sets["calibration"].n
    value = {
        "out": str(out),
        "method": classifier.calibrator.name,
        "n": n,
        "layers": list(classifier.calibrator.layer_widths_),
        "scores": None if comparison is None else comparison.as_dict(),
        "rehearsal": None if classifier.rehearsal is None else str(classifier.rehearsal),
    }
    shown: list[Any] = []
    if comparison is not None:
        checked = f"checked on {sets['test'].n:,} test samples"
        shown.append(score_table(comparison, f"{method}, fitted on {n:,} samples, {checked}"))
    shown.append("\n".join(_lines(classifier, out, comparison is not None)))
    shell.finish(value, *shown)


def _lines(classifier: CalibratedClassifier, out: Path, checked: bool) -> list[str]:
    """What was done, where it is, and what can be done next."""
    lines = []
    done = classifier.rehearsal
    if done is not None and done.families:
        worst = (f"{name} {at[-1]:.2f}" for name, at in zip(done.families, done.under, strict=True))
        lines.append(
            f"rehearsed on copies disturbed from mildly to strongly; the network's accuracy, "
            f"{done.accuracy:.2f}, fell to: {', '.join(worst)}"
        )
    if not checked:
        lines.append(f"not checked: no --test given. {classifier.verdict_}")
    else:
        lines.append(f"report: {out / 'report.html'} (open it in any browser)")
    folder = out / "calibrator"
    lines.append(f"calibrator: {folder}; in Python: salgp.load({json.dumps(str(folder))}, model)")
    if checked:
        lines.append("next: " + shlex.join(["salgp", "explain", str(folder), str(out / "test.safetensors")]))
    return lines
