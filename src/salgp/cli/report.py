"""``salgp report``: one self-contained HTML page on a calibrator and labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from salgp.cli import options
from salgp.cli.console import Console, UsageError, command
from salgp.cli.options import split_names
from salgp.cli.predictions import PredictionOptions, SavedCalibrator, read_samples
from salgp.cli.preflight import check_inputs, check_target

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
    given: PredictionOptions,
    out: options.Out,
    new_data: NewData = None,
    images: PictureData = None,
    inputs: PictureArray = None,
    classes: Classes = None,
    error: options.Error = None,
    slices: Slices = None,
    force: options.Force = False,
) -> None:
    """Write one self-contained HTML page: verdict, figures, reliability, layers, what to send to a human."""
    check_inputs(new_data, images, slices)
    if error is not None and not 0 < error < 1:
        raise UsageError(f"--error {error:g}: expected a share above 0 and below 1, such as 0.05")
    check_target(out, "report", force, *given.inputs, new_data, images, slices)
    fitted, loaded, prediction = given.predict(console, labelled=True)
    calibrator = fitted.calibrator
    files = {"calibrator": given.calibrator.name, "features": given.features.name}
    content: dict[str, Any] = {
        "method": calibrator.display_name,
        "acceptable_error": error,
        "class_names": split_names(classes) or loaded.classes or fitted.origin.get("classes"),
        "images": None if images is None else _pictures(images, inputs),
        "new_data": None if new_data is None else _new(console, fitted, new_data, given.probs),
        "settings": files | calibrator.get_params(deep=False),
        "slices": None if slices is None else _slices(console, slices),
    }
    from salgp.report import build

    with console.progress("writing the report"):
        build(out, loaded.features, loaded.known_labels, prediction, force=force, **content)
    size = out.stat().st_size
    console.finish({"report": str(out), "bytes": size}, f"report: {out} (open it in any browser)")


def _new(console: Console, fitted: SavedCalibrator, path: Path, probs: str | None) -> Any:
    """Features of the new data, and their prediction."""
    loaded = read_samples(console, path, split_names(probs))
    return loaded.features, fitted.predict(console, loaded)


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


def _pictures(path: Path, inputs: str | None) -> Any:
    from salgp.files import open_data
    from salgp.io.images import Pictures

    data = open_data(path, inputs=split_names(inputs), scale=1.0, labels=False)
    return Pictures(data.n, data.take)
