"""``salgp report``: one self-contained HTML page on a calibrator and labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Option

import salgp
from salgp.cli import options
from salgp.cli.checks import check_inputs, check_target
from salgp.cli.console import Console, UsageError
from salgp.cli.inputs import PredictionOptions, SavedCalibrator, read_samples
from salgp.cli.options import split_names

__all__ = []

NewData = Annotated[Path | None, Option(help="Features of unlabelled new data, to show a shift.")]
PictureData = Annotated[Path | None, Option(help="Pictures of the samples, in the same order.")]
PictureArray = Annotated[str | None, Option(help="Array of --images that holds the pictures.")]
Classes = Annotated[str | None, Option(help="Class names, separated by commas.")]
Slices = Annotated[
    Path | None, Option(metavar="TABLE", help="One row per sample; its columns divide the data.")
]
MOST_PARTS = 50
"""A column of more different values is no way to slice the data."""


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
    """Write one self-contained HTML page: verdict, figures, reliability, layers, what to send to a human.

    Example:
        salgp report cal test.safetensors -o report.html
    """
    check_inputs(new_data, images, slices)
    _check_share(error)
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
        "fit": getattr(calibrator, "verdict_", None),
    }
    with console.progress("writing the report"):
        salgp.report.build(out, loaded.features, loaded.known_labels, prediction, force=force, **content)
    size = out.stat().st_size
    console.finish({"report": str(out), "bytes": size}, f"report: {out} (open it in any browser)")


def _check_share(error: float | None) -> None:
    if error is not None and not 0 < error < 1:
        raise UsageError(f"--error {error:g}: expected a share above 0 and below 1, such as 0.05")


def _new(console: Console, fitted: SavedCalibrator, path: Path, probs: str | None) -> Any:
    """Features of the new data, and their prediction."""
    loaded = read_samples(console, path, split_names(probs))
    return loaded.features, fitted.predict(console, loaded)


def _slices(console: Console, path: Path) -> dict[str, list[Any]]:
    from salgp.io.arrays import read_arrays

    columns = {name: x.tolist() for name, x in read_arrays(path).items() if x.ndim == 1}
    usable = {name: values for name, values in columns.items() if len(set(values)) <= MOST_PARTS}
    if not usable:
        raise ValueError(f"--slices {path}: no column of at most {MOST_PARTS} different values")
    unused = ", ".join(name for name in columns if name not in usable)
    if unused:
        console.say(f"note: more than {MOST_PARTS} different values, not used for slices: {unused}")
    return usable


def _pictures(path: Path, inputs: str | None) -> Any:
    from salgp.io.images import Pictures

    data = salgp.files.open_data(path, inputs=split_names(inputs), scale=1.0, labels=False)
    return Pictures(data.n, data.take)
