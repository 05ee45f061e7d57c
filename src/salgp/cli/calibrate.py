"""``salgp calibrate``: from a network and its data to a calibrated classifier and a report, in one command.

It calls `salgp.calibrate`, checks the result on test data, compares other methods and writes the report.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command, pasteable
from salgp.cli.data_options import (
    DataOptions,
    check_numbering,
    layer_names,
    metadata_of,
    network_of,
    note_guessing,
    note_shared_samples,
    open_sets,
)
from salgp.cli.predictions import uncalibrated
from salgp.cli.preflight import CALIBRATOR, check_inputs, check_target
from salgp.cli.tables import score_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp import CalibratedClassifier, Features, Prediction
    from salgp.io.loader import FileLoader
    from salgp.metrics import Comparison

__all__ = ["register"]

TEST, REPORT = "test.safetensors", "report.html"
WRITTEN = {CALIBRATOR: "calibrator", TEST: "features", REPORT: "report"}
"""Files in the folder, and their kinds."""
BASELINES = "temperature"
"""Compared against unless others are named."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    data = "--train train.npz --calibration cal.npz --test test.npz"
    command(app, "calibrate", f"salgp calibrate net.py:make --weights w.pt {data} -o calibrated")(calibrate)


def calibrate(
    console: Console,
    model: options.Model,
    calibration: options.CalibrationData,
    out: options.Folder,
    train: options.TrainingData = None,
    test: options.TestData = None,
    weights: options.Weights = None,
    method: options.Method = None,
    compare: options.Compared = BASELINES,
    layers: options.Layers = "auto",
    pooling: options.Pooling = "auto",
    output: options.Output = None,
    inputs: options.InputNames = None,
    prepare: options.Prepare = None,
    classes: options.Classes = None,
    scale: options.Scale = None,
    image_size: options.ImageSize = None,
    gray: options.Gray = False,
    normalize: options.Normalize = None,
    batch_size: options.BatchSize = 64,
    device: options.Device = None,
    seed: options.Seed = 0,
    force: options.Force = False,
) -> None:
    """Calibrate a network in one go: read it, augment, fit, check, compare and report.

    The folder holds the calibrator, the features it was checked on, and report.html; every other command
    takes it as CAL. Without --test nothing is checked.
    """
    check_inputs(train, calibration, test, weights)
    baselines = options.split_names(compare) or []
    options.check_method(method, *baselines)
    _check_folder(out, force, train, calibration, test)
    data = DataOptions(model, batch_size, inputs, classes, scale, prepare, image_size, gray, normalize)
    sets = open_sets(data, {"calibration": calibration, "train": train, "test": test})
    note_shared_samples(console, sets)
    network = network_of(console, model, weights, device)
    check_numbering(network, *sets.values())
    from salgp.network.reader import Reader

    how: Any = {"reader": Reader(layer_names(layers), pooling), "output": output, "seed": seed}
    classifier = _made(network, sets, method, how | {"progress": console.shows_progress})
    if classifier.calibrator.uses_reference and train is None:
        console.say("note: no --train given; the calibration samples are compared with each other")
    tested = _tested(console, classifier, sets)
    wanted = [name for name in baselines if name != classifier.calibrator.name and tested is not None]
    others = {name: _made(network, sets, name, how | {"progress": False}) for name in wanted}
    from salgp.io import locked

    with locked(out):
        _check_folder(out, force)  # again: another process may have come and gone
        _write(classifier, tested, sets["calibration"], out)
        comparison = None if tested is None else _report(classifier, others, tested, sets["test"], out)
    _finish(console, classifier, out, sets, comparison)


def _made(
    network: nn.Module, sets: Mapping[str, FileLoader], method: str | None, how: Mapping[str, Any]
) -> CalibratedClassifier:
    """The network calibrated by a method, with the training data as reference where it uses them."""
    from salgp import calibrate as calibrate_network
    from salgp.calibrators.registry import method_for

    data = sets["calibration"]
    reference = sets.get("train") if method_for(method).uses_reference else None
    return calibrate_network(
        network, data, method=method, reference=reference, tokenizer=data.tokenizer, **how
    )


def _check_folder(out: Path, force: bool, *inputs: Path | None) -> None:
    """Refuse a folder where a file of the user would be replaced."""
    if out.is_file():
        raise UsageError(f"--out {out}: a file; give the name of a folder")
    if (out / "manifest.json").is_file():
        raise FileExistsError(f"{out} holds shards; it is left alone: choose another folder")
    if (out / CALIBRATOR).exists():
        from salgp.calibrators.base import check_place

        check_place(out)
    for name, kind in WRITTEN.items():
        check_target(out / name, force, *inputs, kind=kind)
        if (out / name).exists() and not (out / CALIBRATOR).exists():
            raise FileExistsError(
                f"{out / name} is not of an earlier salgp calibrate; it is left alone: choose another folder"
            )


def _tested(
    console: Console, classifier: CalibratedClassifier, sets: Mapping[str, FileLoader]
) -> tuple[Features, Tensor] | None:
    """Features and labels of the test data, with notes on what makes a check worthless."""
    from salgp.logits import check_finite

    features, labels = classifier.extract(sets.get("test", sets["calibration"]), progress=False)
    assert labels is not None  # open_sets has refused data without
    note_guessing(console, features, labels)
    if "test" not in sets:
        return None
    check_finite(features.logits, "--test: the class scores hold")
    classifier.calibrator.predict(features)  # what it refuses is refused before a file is replaced
    return features, labels


def _write(
    classifier: CalibratedClassifier,
    tested: tuple[Features, Tensor] | None,
    data: FileLoader,
    out: Path,
) -> None:
    """The calibrator with where it came from, and the test features as `salgp extract` would write them."""
    from salgp.calibrators.base import save_calibrator

    metadata = metadata_of(classifier.model, classifier.taps, data.classes)
    origin = files.origin_of("the calibration data", data.n, metadata, data.classes)
    save_calibrator(out, classifier.calibrator, network=classifier.network_header(), origin=origin)
    for name in (TEST, REPORT):  # of an earlier call, which may have had other data
        (out / name).unlink(missing_ok=True)
    if tested is not None:
        tested[0].save(out / TEST, tested[1], metadata)


def _report(
    classifier: CalibratedClassifier,
    others: Mapping[str, CalibratedClassifier],
    tested: tuple[Features, Tensor],
    data: FileLoader,
    out: Path,
) -> Comparison:
    """Scores of all methods on the test data, and the report."""
    from salgp.metrics import compare
    from salgp.report import build

    features, labels = tested
    method = classifier.calibrator.display_name
    prediction = classifier.calibrator.predict(features)
    found: dict[str, Prediction] = {
        name: other.predict(data, progress=False) for name, other in others.items()
    }
    build(
        out / REPORT,
        features,
        labels,
        prediction,
        method=method,
        class_names=data.classes,
        images=data.pictures,
        others=found,
        settings={"calibrator": out.name, "features": TEST},
    )
    return compare({"uncalibrated": uncalibrated(features), **found, method: prediction}, labels)


def _finish(
    console: Console,
    classifier: CalibratedClassifier,
    out: Path,
    sets: Mapping[str, FileLoader],
    comparison: Comparison | None,
) -> None:
    calibrator, n = classifier.calibrator, sets["calibration"].n
    told = {
        "out": str(out),
        "method": calibrator.name,
        "n": n,
        "layers": list(calibrator.layer_widths_),
        "scores": None if comparison is None else comparison.as_dict(),
        "augmentation": None if classifier.augmentation is None else str(classifier.augmentation),
    }
    shown: list[Any] = []
    if comparison is not None:
        checked = f"checked on {sets['test'].n:,} test samples"
        shown.append(
            score_table(comparison, f"{calibrator.display_name}, fitted on {n:,} samples, {checked}")
        )
    shown.append("\n".join(_lines(classifier, out, comparison is not None)))
    console.finish(told, *shown)


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
