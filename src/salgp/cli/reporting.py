"""``salgp report``: one self-contained HTML page on a calibrator and labelled data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from salgp.cli import files
from salgp.cli.applying import predicted
from salgp.cli.inputs import open_inputs
from salgp.cli.options import AnyNetwork, Cal, Feats, Force, Out
from salgp.cli.pictures import Pictures
from salgp.cli.shell import Shell, UsageError, command
from salgp.cli.targets import check_inputs, check_target

if TYPE_CHECKING:
    from salgp.features import Features
    from salgp.prediction import Prediction

__all__ = ["register"]

NewData = Annotated[
    Path | None, typer.Option(help="Features of unlabelled new data, for a section on shift.")
]
PictureData = Annotated[
    Path | None,
    typer.Option(help="The samples as pictures (.npz, .safetensors or image folder), in the same order."),
]
PictureArray = Annotated[str | None, typer.Option(help="Array of --images that holds the pictures.")]
Classes = Annotated[str | None, typer.Option(help="Class names, separated by commas.")]
Rivals = Annotated[
    list[str] | None,
    typer.Option(metavar="CAL,...", help="Further calibrators for comparison; may be given several times."),
]
Slices = Annotated[
    Path | None,
    typer.Option(
        metavar="TABLE",
        help="One row per sample (.csv, .npz, .parquet); the data are looked at by each of its columns.",
    ),
]
MOST_PARTS = 50
"""A column of more different values is no way to slice the data."""
AcceptableError = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, help="Acceptable share of wrong answers. Default: about half of the network's."
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command of this file to ``app``."""
    command(app, "report", "salgp report cal test.safetensors -o report.html")(report)


def report(
    shell: Shell,
    calibrator: Cal,
    features: Feats,
    out: Out,
    new_data: NewData = None,
    images: PictureData = None,
    inputs: PictureArray = None,
    classes: Classes = None,
    compare: Rivals = None,
    title: Annotated[str, typer.Option(help="Heading of the page.")] = "Can this network be trusted?",
    error: AcceptableError = None,
    slices: Slices = None,
    any_network: AnyNetwork = False,
    force: Force = False,
) -> None:
    """Write one self-contained HTML page: verdict, figures, reliability, layers, what to send to a human."""
    check_inputs(calibrator, features, new_data, images, slices)
    if error in (0, 1):
        raise UsageError(f"--error {error:g}: expected a share above 0 and below 1, such as 0.05")
    rivals = files.split_names(",".join(compare or [])) or []
    check_target(
        out, force, features, calibrator, new_data, images, slices, *map(Path, rivals), kind="report"
    )
    from salgp.report import build

    loaded, prediction = predicted(calibrator, features, any_network, shell, labelled=True)
    labels = files.labels_of(loaded)
    fitted = files.read_calibrator(calibrator)
    about = {"calibrator": calibrator.name, "features": features.name}
    named = files.split_names(classes) or loaded.classes or files.read_origin(calibrator).get("classes")
    options = {
        "method": fitted.display_name,
        "title": title,
        "acceptable_error": error,
        "class_names": named,
        "images": None if images is None else _pictures(images, inputs),
        "others": _others(rivals, fitted.display_name, loaded, any_network),
        "new_data": None if new_data is None else _new_data(calibrator, new_data, any_network, shell),
        "settings": about | fitted.get_params(deep=False),
        "slices": None if slices is None else _slices(shell, slices),
    }
    with shell.progress("writing the report"):
        build(out, loaded.features, labels, prediction, force=force, **options)
    shell.finish({"report": str(out), "bytes": out.stat().st_size}, f"report: {out} (open it in any browser)")


def _slices(shell: Shell, path: Path) -> dict[str, list[Any]]:
    from salgp.cli.arrays import read_arrays

    columns = {name: x.tolist() for name, x in read_arrays(path).items() if x.ndim == 1}
    usable = {name: values for name, values in columns.items() if len(set(values)) <= MOST_PARTS}
    unused = [name for name in columns if name not in usable]
    if not usable:
        raise ValueError(f"--slices {path}: no column of at most {MOST_PARTS} different values")
    if unused:
        shell.say(f"note: more than {MOST_PARTS} different values, not used for slices: {', '.join(unused)}")
    return usable


def _others(
    folders: Sequence[str], method: str, loaded: files.FeatureFile, any_network: bool
) -> dict[str, Prediction]:
    """Predictions of further calibrators; one of a name that is taken is called after its folder, too."""
    others: dict[str, Prediction] = {}
    for folder in map(Path, folders):
        rival = files.read_calibrator(folder)
        taken = rival.display_name == method or rival.display_name in others
        name = f"{rival.display_name} ({folder.name})" if taken else rival.display_name
        if name in others:
            raise UsageError(f"--compare {folder}: given twice")
        files.check_network(folder, loaded, any_network)
        others[name] = rival.predict(loaded.features)
    return others


def _new_data(calibrator: Path, path: Path, any_network: bool, shell: Shell) -> tuple[Features, Prediction]:
    loaded, prediction = predicted(calibrator, path, any_network, shell)
    return loaded.features, prediction


def _pictures(path: Path, inputs: str | None) -> Pictures:
    return Pictures(open_inputs(path, inputs=files.split_names(inputs), scale=1.0))
