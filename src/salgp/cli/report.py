"""``salgp report``: one self-contained HTML page on a calibrator and labelled data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files, options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.predictions import predicted
from salgp.cli.preflight import check_inputs, check_target

if TYPE_CHECKING:
    from salgp.prediction import Prediction

__all__ = ["register"]

NewData = Annotated[
    Path | None, typer.Option("--new-data", help="Features of unlabelled new data, for a section on shift.")
]
PictureData = Annotated[
    Path | None,
    typer.Option(
        "--images", help="The samples as pictures (.npz, .safetensors or image folder), in the same order."
    ),
]
PictureArray = Annotated[
    str | None, typer.Option("--inputs", help="Array of --images that holds the pictures.")
]
Classes = Annotated[str | None, typer.Option("--classes", help="Class names, separated by commas.")]
Others = Annotated[
    list[str] | None,
    typer.Option(
        "--compare", metavar="CAL,...", help="Further calibrators for comparison; may be given several times."
    ),
]
Slices = Annotated[
    Path | None,
    typer.Option(
        "--slices",
        metavar="TABLE",
        help="One row per sample (.csv, .npz, .parquet); the data are looked at by each of its columns.",
    ),
]
MOST_PARTS = 50
"""A column of more different values is no way to slice the data."""


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "report", "salgp report cal test.safetensors -o report.html")(report)


def report(
    console: Console,
    calibrator: options.CalibratorFolder,
    features: options.FeaturesFile,
    out: options.Out,
    new_data: NewData = None,
    images: PictureData = None,
    inputs: PictureArray = None,
    classes: Classes = None,
    compare: Others = None,
    error: options.Error = None,
    slices: Slices = None,
    probs: options.Probs = None,
    any_network: options.AnyNetwork = False,
    force: options.Force = False,
) -> None:
    """Write one self-contained HTML page: verdict, figures, reliability, layers, what to send to a human."""
    check_inputs(calibrator, features, new_data, images, slices)
    if error is not None and not 0 < error < 1:
        raise UsageError(f"--error {error:g}: expected a share above 0 and below 1, such as 0.05")
    others = [Path(name) for name in options.split_names(",".join(compare or [])) or []]
    check_target(out, force, features, calibrator, new_data, images, slices, *others, kind="report")
    from salgp.report import build

    loaded, prediction = predicted(console, calibrator, features, any_network, probs=probs, labelled=True)
    fitted = files.read_calibrator(calibrator)
    new = None if new_data is None else predicted(console, calibrator, new_data, any_network, probs=probs)
    named = options.split_names(classes) or loaded.classes or files.read_origin(calibrator).get("classes")
    content: dict[str, Any] = {
        "method": fitted.display_name,
        "acceptable_error": error,
        "class_names": named,
        "images": None if images is None else _pictures(images, inputs),
        "others": _others(others, fitted.display_name, loaded, any_network),
        "new_data": None if new is None else (new[0].features, new[1]),
        "settings": {"calibrator": calibrator.name, "features": features.name}
        | fitted.get_params(deep=False),
        "slices": None if slices is None else _slices(console, slices),
    }
    with console.progress("writing the report"):
        build(out, loaded.features, files.labels_of(loaded), prediction, force=force, **content)
    size = out.stat().st_size
    console.finish({"report": str(out), "bytes": size}, f"report: {out} (open it in any browser)")


def _slices(console: Console, path: Path) -> dict[str, list[Any]]:
    from salgp.io.arrays import read_arrays

    columns = {name: x.tolist() for name, x in read_arrays(path).items() if x.ndim == 1}
    usable = {name: values for name, values in columns.items() if len(set(values)) <= MOST_PARTS}
    unused = [name for name in columns if name not in usable]
    if not usable:
        raise ValueError(f"--slices {path}: no column of at most {MOST_PARTS} different values")
    if unused:
        console.say(
            f"note: more than {MOST_PARTS} different values, not used for slices: {', '.join(unused)}"
        )
    return usable


def _others(
    folders: Sequence[Path], method: str, loaded: files.FeatureFile, any_network: bool
) -> dict[str, Prediction]:
    """Predictions of further calibrators; one of a name that is taken is called after its folder, too."""
    others: dict[str, Prediction] = {}
    for folder in folders:
        other = files.read_calibrator(folder, any_network)
        taken = other.display_name == method or other.display_name in others
        name = f"{other.display_name} ({folder.name})" if taken else other.display_name
        if name in others:
            raise UsageError(f"--compare {folder}: given twice")
        files.check_source(folder, loaded, any_network)
        others[name] = other.predict(loaded.features)
    return others


def _pictures(path: Path, inputs: str | None) -> Any:
    from salgp.io.images import Pictures
    from salgp.io.loader import open_data

    data = open_data(path, inputs=options.split_names(inputs), scale=1.0, labels=False)
    return Pictures(data.n, data.take)
