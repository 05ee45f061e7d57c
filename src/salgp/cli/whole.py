"""``salgp calibrate``: everything in one command, from a network and three data sets to a report.

It does what the single commands do one after another: extract, rehearse, fit, check, compare, report. The
folder it writes holds what each of them would have written, so that one can go on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import extracting as given
from salgp.cli import files
from salgp.cli.calibrating import Force, Method, Seed, check_method, uncalibrated
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.tables import score_table

if TYPE_CHECKING:
    from torch import Tensor, nn

    from salgp.features import Features
    from salgp.metrics import Comparison
    from salgp.module import CalibratedClassifier
    from salgp.prediction import Prediction

__all__ = ["register"]

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
    model: given.Model,
    calibration: Annotated[
        Path, typer.Option(help="Labelled data the network was not trained on; a few hundred samples.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of everything that is written.")],
    train: Annotated[
        Path | None, typer.Option(help="The network's training data, to compare new samples with.")
    ] = None,
    test: Annotated[
        Path | None, typer.Option(help="Labelled data to check the result on, for the table and the report.")
    ] = None,
    weights: given.Weights = None,
    method: Method = None,
    compare: Annotated[
        str, typer.Option(help="Methods to compare with, separated by commas; empty for none.")
    ] = RIVALS,
    layers: given.Layers = "auto",
    pooling: given.Pooling = "auto",
    output: given.Output = "logits",
    inputs: given.InputNames = None,
    prepare: given.Prepare = None,
    classes: given.Classes = None,
    scale: given.Scale = None,
    image_size: given.ImageSize = None,
    gray: given.Gray = False,
    image_mean: given.ImageMean = None,
    image_std: given.ImageStd = None,
    batch_size: given.BatchSize = 64,
    max_width: given.MaxWidth = None,
    device: given.Device = None,
    seed: Seed = 0,
    force: Force = False,
) -> None:
    """Calibrate a network in one go: extract, rehearse shifts, fit, check, compare and report.

    The folder holds the calibrator, the features it was fitted and checked on, and report.html. Without
    --test nothing is checked.
    """
    files.check_inputs(train, calibration, test, weights)
    rivals = [name for name in files.split_names(compare) or [] if name != method]
    check_method(method, *rivals)
    _check_folder(out, force)
    images = given.image_options(model, image_size, gray, image_mean, image_std)
    data = given.DataOptions(model, batch_size, inputs, classes, images, scale, prepare)
    sets = {"calibration": data.open(calibration)}
    sets |= {k: data.open(path) for k, path in {"train": train, "test": test}.items() if path is not None}
    _check_labelled(sets)
    network = given.network_of(shell, model, weights, device)
    if train is None:
        shell.say("note: no --train given; the calibration samples are compared with each other")
    with shell.progress(f"reading the network over {sum(x.n for x in sets.values()):,} samples, and fitting"):
        classifier = _fitted(
            network,
            sets,
            method=None if method == "auto" else method,
            layers=given.layer_names(layers, model),
            pooling=pooling,
            output=output,
            max_width=max_width,
            seed=seed,
        )
    names = sets["calibration"].classes
    _write(classifier, sets, out, names, force)
    comparison = None if test is None else _checked(shell, classifier, sets, out, rivals, names)
    _finish(shell, classifier, out, sets["calibration"].n, comparison)


def _check_folder(out: Path, force: bool) -> None:
    files.check_target(out / "calibrator", force)
    files.check_folder(out / "calibrator")
    if out.is_file():
        raise UsageError(f"--out {out}: a file; give the name of a folder")


def _check_labelled(sets: Mapping[str, Any]) -> None:
    for name, data in sets.items():
        if data.labels is None:
            raise ValueError(f"--{name}: no labels there; store them under 'labels' (or 'label', 'y')")


def _fitted(network: nn.Module, sets: Mapping[str, Any], **options: Any) -> CalibratedClassifier:
    from salgp.module import calibrate as run

    return run(network, sets["calibration"], reference=sets.get("train"), progress=False, **options)


def _write(
    classifier: CalibratedClassifier, sets: Mapping[str, Any], out: Path, names: Any, force: bool
) -> None:
    """The calibrator, and the features of calibration and test data as `salgp extract` would write them."""
    import salgp

    metadata = given.metadata_of(classifier.model, classifier.taps, names)
    out.mkdir(parents=True, exist_ok=True)
    for name in ("calibration", "test"):
        if name in sets:
            features, labels = classifier.extract(sets[name], progress=False)
            features.save(out / f"{name}.safetensors", labels, metadata)
    origin = {
        "features": "calibration.safetensors",
        "n": sets["calibration"].n,
        "salgp": salgp.__version__,
        "network": metadata["network"],
    }
    kept = origin if names is None else origin | {"classes": names}
    files.save_calibrator(out / "calibrator", classifier.calibrator, kept, force, metadata["module"])


def _checked(
    shell: Shell,
    classifier: CalibratedClassifier,
    sets: Mapping[str, Any],
    out: Path,
    rivals: list[str],
    names: Any,
) -> Comparison:
    """Scores of all methods on the test data, and the report."""
    from salgp.calibrators import get
    from salgp.metrics import compare as compare_predictions
    from salgp.report import build

    features, labels = files.read_labelled(out / "calibration.safetensors")
    loaded, truth = files.read_labelled(out / "test.safetensors")
    predictions = {"uncalibrated": uncalibrated(loaded.features)}
    with shell.progress("comparing and writing the report"):
        for name in rivals:
            predictions[name] = get(name).fit(features.features, labels).predict(loaded.features)
        predictions[classifier.calibrator.display_name] = classifier.calibrator.predict(loaded.features)
        _report(build, out, loaded.features, truth, predictions, names, sets["test"])
    return compare_predictions(predictions, truth)


def _report(
    build: Any,
    out: Path,
    features: Features,
    labels: Tensor,
    predictions: Mapping[str, Prediction],
    names: Any,
    data: Any,
) -> None:
    *others, method = predictions
    build(
        out / "report.html",
        features,
        labels,
        predictions[method],
        force=True,
        method=method,
        class_names=names,
        images=_pictures(data),
        others={name: predictions[name] for name in others[1:]},
        settings={"calibrator": "calibrator", "features": "test.safetensors"},
    )


def _pictures(data: Any) -> Any:
    """The samples, where they are pictures: one input of shape ``(n, channels, height, width)``."""
    first = data.take(slice(0, 1))
    if not isinstance(first, tuple) or len(first) != 1 or first[0].ndim != 4:
        return None
    if first[0].shape[1] not in (1, 3):
        return None
    return data.take(slice(0, data.n))[0].float().numpy()


def _finish(
    shell: Shell, classifier: CalibratedClassifier, out: Path, n: int, comparison: Comparison | None
) -> None:
    method = classifier.calibrator.display_name
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
        shown.append(score_table(comparison, f"{method}, fitted on {n:,} samples, checked on test data"))
    lines = [] if classifier.rehearsal is None else str(classifier.rehearsal).splitlines()
    rehearsed = "".join(f"rehearsed {line}\n" for line in lines)
    report = "" if comparison is None else f"report: {out / 'report.html'} (open it in any browser)\n"
    shown.append(
        f"{rehearsed}{report}calibrator: {out / 'calibrator'}; in Python: "
        f"salgp.load({json.dumps(str(out / 'calibrator'))}, model)"
    )
    shell.finish(value, *shown)
