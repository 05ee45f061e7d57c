"""``salgp calibrate``: from a network and its data to a calibrated classifier and a report, in one command.

It calls `salgp.calibrate`, checks the result on test data beside temperature scaling, and writes the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command, pasteable
from salgp.cli.datasets import check_numbering, note_guessing, note_shared_samples, open_sets
from salgp.cli.options import DataOptions, NetworkOptions, ReadingOptions
from salgp.cli.preflight import CALIBRATOR, SHARDS, check_inputs, check_target
from salgp.cli.tables import score_table

if TYPE_CHECKING:
    from torch import Tensor

    from salgp import CalibratedClassifier, Features, Prediction
    from salgp.io.loader import FileLoader
    from salgp.metrics import Comparison

__all__ = ["register"]

TEST, REPORT = "test.safetensors", "report.html"
WRITTEN = {CALIBRATOR: "calibrator", TEST: "features", REPORT: "report"}
"""Files in the folder, and their kinds."""
BASELINE = "temperature"
"""Compared against."""

CalibrationData = Annotated[
    Path,
    typer.Option("--calibration", help="Labelled data the network was not trained on; some hundred samples."),
]
TrainingData = Annotated[
    Path | None, typer.Option("--train", help="The network's training data, to compare new samples with.")
]
TestData = Annotated[
    Path | None,
    typer.Option("--test", help="Labelled data to check the result on, for the table and the report."),
]
Folder = Annotated[Path, typer.Option("--out", "-o", help="Folder of everything that is written.")]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    data = "--train train.npz --calibration cal.npz --test test.npz"
    command(app, "calibrate", f"salgp calibrate net.py:make --weights w.pt {data} -o calibrated")(calibrate)


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
    """
    check_inputs(train, calibration, test, network.weights)
    options.check_method(method)
    _check_folder(out, force, train, calibration, test)
    sets = open_sets(how, network.model, {"calibration": calibration, "train": train, "test": test})
    note_shared_samples(console, sets)
    from salgp import calibrate as calibrate_network
    from salgp.calibrators.registry import method_for
    from salgp.io import locked

    model, data = network.open(console), sets["calibration"]
    reference = sets.get("train") if method_for(method).uses_reference else None
    classifier = calibrate_network(
        model,
        data,
        method=method,
        reference=reference,
        reader=reading.reader(),
        tokenizer=data.tokenizer,
        progress=console.shows_progress,
    )
    check_numbering(how, data, classifier.calibrator.n_classes_)
    if classifier.calibrator.uses_reference and train is None:
        console.say("note: no --train given; the calibration samples are compared with each other")
    check = _checked(console, classifier, sets)
    with locked(out):
        _check_folder(out, force)  # again: another process may have come and gone
        _write(classifier, check, sets, out)
    _finish(console, classifier, check, sets, out)


def _check_folder(out: Path, force: bool, *inputs: Path | None) -> None:
    """Refuse a folder where a file of the user would be replaced."""
    if out.is_file():
        raise UsageError(f"--out {out}: a file; give the name of a folder")
    if (out / SHARDS).is_file():
        raise FileExistsError(f"{out} holds shards; it is left alone: choose another folder")
    for name, kind in WRITTEN.items():
        check_target(out / name, kind, force, *inputs)
        if (out / name).exists() and not (out / CALIBRATOR).exists():
            raise FileExistsError(
                f"{out / name} is not of an earlier salgp calibrate; it is left alone: choose another folder"
            )
    if out.exists():
        from salgp.calibrators.base import check_place

        check_place(out)


@dataclass(frozen=True, eq=False)
class _Check:
    """What was found on test data: predictions of all methods, ours last."""

    features: Features
    labels: Tensor
    predictions: Mapping[str, Prediction]

    @property
    def comparison(self) -> Comparison:
        """Scores of all methods."""
        from salgp.metrics import compare

        return compare(dict(self.predictions), self.labels)


def _checked(
    console: Console, classifier: CalibratedClassifier, sets: Mapping[str, FileLoader]
) -> _Check | None:
    """The test data, if any, beside temperature scaling; with a note where the network only guesses."""
    from salgp.calibrators import get
    from salgp.logits import check_finite
    from salgp.prediction import Prediction

    known = classifier.extract(sets["calibration"], progress=False)
    if "test" not in sets:
        note_guessing(console, *known)
        return None
    features, labels = classifier.extract(sets["test"], progress=False)
    assert labels is not None  # open_sets has refused data without
    note_guessing(console, features, labels)
    check_finite(features.logits, "--test: the class scores hold")
    calibrator = classifier.calibrator
    found = {"uncalibrated": Prediction.from_probs(features, features.probs)}
    if calibrator.name != BASELINE:
        found[BASELINE] = get(BASELINE).fit(*known).predict(features)
    return _Check(features, labels, found | {calibrator.display_name: calibrator.predict(features)})


def _write(
    classifier: CalibratedClassifier,
    check: _Check | None,
    sets: Mapping[str, FileLoader],
    out: Path,
) -> None:
    """The calibrator with where it came from, the test features as `salgp extract` would write them, and the
    report.
    """
    from salgp.calibrators.base import save_calibrator
    from salgp.files import network_metadata, origin_of
    from salgp.report import build

    calibrator, data = classifier.calibrator, sets["calibration"]
    metadata = network_metadata(classifier.model, classifier.taps, data.classes)
    origin = origin_of("the calibration data", data.n, metadata, data.classes)
    save_calibrator(out, calibrator, network=classifier.network_header(), origin=origin)
    for name in (TEST, REPORT):  # of an earlier call, which may have had other data
        (out / name).unlink(missing_ok=True)
    if check is None:
        return
    check.features.save(out / TEST, check.labels, metadata)
    *others, method = check.predictions
    build(
        out / REPORT,
        check.features,
        check.labels,
        check.predictions[method],
        method=method,
        class_names=sets["test"].classes,
        images=sets["test"].pictures,
        others={name: check.predictions[name] for name in others if name == BASELINE},
        settings={"calibrator": out.name, "features": TEST},
    )


def _finish(
    console: Console,
    classifier: CalibratedClassifier,
    check: _Check | None,
    sets: Mapping[str, FileLoader],
    out: Path,
) -> None:
    calibrator, n = classifier.calibrator, sets["calibration"].n
    comparison = None if check is None else check.comparison
    told = {
        "out": str(out),
        "method": calibrator.name,
        "n": n,
        "layers": list(calibrator.layer_widths_),
        "scores": None if comparison is None else comparison.as_dict(),
        "augmentation": None if classifier.augmentation is None else str(classifier.augmentation),
    }
    lines = "\n".join(_lines(classifier, out, check is not None))
    if comparison is None:
        console.finish(told, lines)
        return
    tested = f"checked on {sets['test'].n:,} test samples"
    title = f"{calibrator.display_name}, fitted on {n:,} samples, {tested}"
    console.finish(told, score_table(comparison, title), lines)


def _lines(classifier: CalibratedClassifier, out: Path, checked: bool) -> list[str]:
    """What was done, where it is, and what can be done next."""
    lines = []
    made = classifier.augmentation
    if made is not None and made.families:
        worst = (f"{name} {at[-1]:.2f}" for name, at in zip(made.families, made.under, strict=True))
        lines.append(
            f"augmented samples, from mildly to strongly perturbed; the network's accuracy, "
            f"{made.accuracy:.2f}, fell to: {', '.join(worst)}"
        )
    if not checked:
        lines.append(f"not checked: no --test given. {classifier.verdict_}")
    else:
        lines.append(f"report: {out / REPORT} (open it in any browser)")
    lines.append(f"calibrator: {out}; in Python: salgp.load({json.dumps(str(out))}, model)")
    if checked:
        lines.append("next: " + pasteable("salgp", "explain", out, out / TEST))
    return lines
