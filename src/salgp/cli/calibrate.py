"""``salgp calibrate``: from a network and its data to a calibrated classifier and a report, in one command.

It calls `salgp.calibrate`, checks the result on test data beside temperature scaling, and writes the report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from typer import Option

import salgp
from salgp.cli import options
from salgp.cli.checks import CALIBRATOR, SHARDS, check_inputs, check_target
from salgp.cli.console import Console, UsageError, pasteable, score_table
from salgp.cli.inputs import check_numbering, note_guessing, note_shared, open_sets
from salgp.cli.options import DataOptions, NetworkOptions, ReadingOptions

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import CalibratedClassifier, Features, Prediction
    from salgp.calibrators import Calibrator
    from salgp.io.loader import FileLoader

    Sets = Mapping[str, FileLoader]
    """Data by the names of their options."""

__all__ = []

TEST, REPORT = "test.safetensors", "report.html"
WRITTEN = {CALIBRATOR: "calibrator", TEST: "features", REPORT: "report"}
"""Files in the folder, and their kinds."""
BASELINE = "temperature"
"""Compared against."""

CalibrationData = Annotated[Path, Option(help="Some hundred labelled samples, not trained on.")]
TrainingData = Annotated[Path | None, Option(help="The training data, to compare samples with.")]
TestData = Annotated[Path | None, Option(help="Labelled data, for the scores and the report.")]
Folder = Annotated[Path, Option("--out", "-o", help="Folder of everything that is written.")]


def calibrate(
    console: Console,
    *,
    network: NetworkOptions,
    calibration: CalibrationData,
    train: TrainingData = None,
    test: TestData = None,
    out: Folder,
    method: options.Method = None,
    reading: ReadingOptions,
    how: DataOptions,
    force: options.Force = False,
) -> None:
    """Calibrate a network in one go: read it, augment, fit, check, compare and report.

    The folder holds the calibrator, the features it was checked on, and report.html; every other command
    takes it as CAL. Without --test nothing is checked.

    Example:
        salgp calibrate net.py:make --weights w.pt
            --train train.npz --calibration cal.npz --test test.npz -o calibrated
    """
    check_inputs(train, calibration, test, network.weights)
    options.check_method(method)
    _check_folder(out, force, train, calibration, test)
    sets = open_sets(how, network.model, {"calibration": calibration, "train": train, "test": test})
    classifier = _calibrated(console, network, reading, method, sets)
    data = sets["calibration"]
    check_numbering(how, data, classifier.calibrator.n_classes_)
    if classifier.calibrator.uses_reference and train is None:
        console.say("note: no --train given; the calibration samples are compared with each other")
    check = _checked(console, classifier, sets)
    from salgp.io import locked

    with locked(out):
        _check_folder(out, force)  # again: another process may have come and gone
        _write(classifier, check, sets, out)
    _finish(console, classifier, check, data.n, out)


def _calibrated(
    console: Console, network: NetworkOptions, reading: ReadingOptions, method: str | None, sets: Sets
) -> CalibratedClassifier:
    """The network calibrated; its training data are read for methods that compare with them."""
    data = sets["calibration"]
    compares = salgp.calibrators.registry.method_for(method).uses_reference
    return salgp.calibrate(
        network.open(console),
        data,
        method=method,
        reference=sets.get("train") if compares else None,
        reader=replace(reading.reader(), tokenizer=data.tokenizer),
        progress=console.shows_progress,
    )


def _check_folder(out: Path, force: bool, *inputs: Path | None) -> None:
    """Refuse a folder where a file of the user would be replaced."""
    if out.is_file():
        raise UsageError(f"--out {out}: a file; give the name of a folder")
    if (out / SHARDS).is_file():
        raise FileExistsError(f"{out} holds shards; it is left alone: choose another folder")
    for name, kind in WRITTEN.items():
        path = out / name
        check_target(path, kind, force, *inputs)
        if path.exists() and not (out / CALIBRATOR).exists():
            why = f"{path} is not of an earlier salgp calibrate; it is left alone: choose another folder"
            raise FileExistsError(why)
    if out.exists():
        from salgp.calibrators.base import check_place

        check_place(out)


class _Check(NamedTuple):
    """Predictions of all methods on test data, ours last."""

    features: Features
    labels: Tensor
    predictions: Mapping[str, Prediction]


def _checked(console: Console, classifier: CalibratedClassifier, sets: Sets) -> _Check | None:
    """The test data, if any, beside temperature scaling; with a note where the network only guesses."""
    known = classifier.extract(sets["calibration"], progress=False)
    note_guessing(console, *known)
    if "test" not in sets:
        return None
    from salgp.logits import check_finite

    features, labels = classifier.extract(sets["test"], progress=False)
    assert labels is not None  # open_sets has refused data without
    check_finite(features.logits, "--test: the class scores hold")
    note_shared(console, "--test", features, "--calibration", known[0])
    return _Check(features, labels, _predictions(classifier.calibrator, known, features))


def _predictions(calibrator: Calibrator, known: Any, features: Features) -> dict[str, Prediction]:
    """The network's own, the baseline's, fitted on the known samples, and the calibrator's, by name."""
    found = {"uncalibrated": salgp.Prediction.from_probs(features, features.probs)}
    if calibrator.name != BASELINE:
        found[BASELINE] = salgp.calibrators.get(BASELINE).fit(*known).predict(features)
    return found | {calibrator.display_name: calibrator.predict(features)}


def _write(classifier: CalibratedClassifier, check: _Check | None, sets: Sets, out: Path) -> None:
    """The calibrator with where it came from, the test features as `salgp extract` would write them, and the
    report.
    """
    from salgp.calibrators.base import save_calibrator

    data = sets["calibration"]
    metadata = salgp.files.network_metadata(classifier.model, classifier.taps, data.classes)
    origin = salgp.files.origin_of("the calibration data", data.n, metadata, data.classes)
    save_calibrator(out, classifier.calibrator, network=classifier.network_header(), origin=origin)
    for name in (TEST, REPORT):  # of an earlier call, which may have had other data
        (out / name).unlink(missing_ok=True)
    if check is not None:
        check.features.save(out / TEST, check.labels, metadata)
        _report(classifier.calibrator, check, sets["test"], out)


def _report(calibrator: Calibrator, check: _Check, test: FileLoader, out: Path) -> None:
    *others, method = check.predictions
    salgp.report.build(
        out / REPORT,
        check.features,
        check.labels,
        check.predictions[method],
        method=method,
        class_names=test.classes,
        images=test.pictures,
        others={name: check.predictions[name] for name in others if name == BASELINE},
        settings={"calibrator": out.name, "features": TEST},
        fit=getattr(calibrator, "verdict_", None),
    )


def _finish(console: Console, fitted: CalibratedClassifier, check: _Check | None, n: int, out: Path) -> None:
    calibrator, made = fitted.calibrator, fitted.augmentation
    comparison = None if check is None else salgp.metrics.compare(check.predictions, check.labels)
    told = {
        "out": str(out),
        "method": calibrator.name,
        "n": n,
        "layers": list(calibrator.layer_widths_),
        "scores": None if comparison is None else comparison.as_dict(),
        "augmentation": None if made is None else str(made),
    }
    shown = "\n".join(_lines(fitted, check, out))
    if check is None or comparison is None:
        console.finish(told, shown)
        return
    tested = f"checked on {len(check.labels):,} test samples"
    title = f"{calibrator.display_name}, fitted on {n:,} samples, {tested}"
    console.finish(told, score_table(comparison, title), shown)


def _lines(classifier: CalibratedClassifier, check: _Check | None, out: Path) -> Iterator[str]:
    """What was written, and what can be done with it."""
    made = classifier.augmentation
    if made is not None and made.families:
        yield f"augmented samples, and how right the network is on mild to strong ones:\n{made}"
    yield f"calibrator: {out}; in Python: salgp.load({json.dumps(str(out))}, model)"
    if check is None:
        yield f"not checked: no --test given. {classifier.verdict_}"
    else:
        yield f"report: {out / REPORT} (open it in any browser)"
        yield "next: " + pasteable("salgp", "explain", out, out / TEST)
